"""Global registration, reversible, and planning without restoring."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from orbax_reshard.engine.report import RestoreReport
from orbax_reshard.errors import CheckpointError
from orbax_reshard.planning.options import Options
from orbax_reshard.planning.plan import RestorePlan
from orbax_reshard.plugin import compat
from orbax_reshard.plugin.handler import ReshardingArrayHandler
from orbax_reshard.plugin.prepare import prepare


class Registration:
    """A handler in Orbax's global registry, until ``unregister`` or the block ends.

    Attributes:
        handler: the handler that was registered.
    """

    def __init__(self, options: Options | None) -> None:
        """Takes the place of the registered array handler, with its settings."""
        self._replaced = compat.registered_handler()
        self.handler = ReshardingArrayHandler.like(self._replaced, options)
        compat.replace_registered(self._replaced, self.handler)

    @property
    def last_report(self) -> RestoreReport | None:
        """What the latest restore did, or None."""
        return self.handler.last_report

    @property
    def last_plan(self) -> RestorePlan | None:
        """The plan of the latest restore, or None."""
        return self.handler.last_plan

    def unregister(self) -> None:
        """Puts the handler that was found back; doing it again changes nothing."""
        compat.replace_registered(self.handler, self._replaced)

    def __enter__(self) -> Registration:
        """The registration itself; it is already in force."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Unregisters."""
        self.unregister()


def register(options: Options | None = None) -> Registration:
    """Registers the handler for ``jax.Array`` in Orbax's global registry.

    The settings of the handler that it replaces (replica-parallel saving, metadata
    store, ...) are kept; saving does not change.

    Args:
        options: how to restore; ``Options()`` by default.

    Returns:
        A registration with ``unregister()``; also a context manager.
    """
    return Registration(options)


class _PlanMade(Exception):
    """Carries a plan out of Orbax's restore before anything is read."""

    def __init__(self, plan: RestorePlan) -> None:
        super().__init__("planned")
        self.plan = plan


class _PlanningHandler(ReshardingArrayHandler):
    """Plans where the real handler would restore."""

    async def deserialize(self, infos: Any, args: Any = None) -> Any:
        """Raises the plan instead of reading."""
        shardings = await compat.resolve_shardings(infos, args)
        prepared = await prepare(
            infos,
            args,
            shardings,
            options=self.options,
            metadata_key=self._metadata_key,
        )
        raise _PlanMade(prepared.sized_plan(prepared.sizes()))


def plan_restore(
    path: str | os.PathLike[str], target: Any, options: Options | None = None
) -> RestorePlan:
    """Plans a restore without reading any array data.

    The plan is the one that a restore of the same target makes: names, specs and
    metadata come from the same Orbax code.

    Args:
        path: the folder of a saved tree, or a checkpoint folder whose only item (or
            item ``default``) is one.
        target: pytree of ``jax.ShapeDtypeStruct`` with shardings, of the structure
            that was saved or a part of it.
        options: how to restore; ``Options()`` by default.

    Raises:
        CheckpointError: the path is no checkpoint, or a leaf is not in it.
        TargetError: a target cannot hold its array.
    """
    handler = ocp.PyTreeCheckpointHandler(
        type_handler_registry=compat.registry_with(_PlanningHandler(options))
    )
    folder = tree_folder(path)
    # Other handlers restore what has no sharding; they would read, not plan.
    arrays = jax.tree.map(
        lambda leaf: ocp.PLACEHOLDER if _sharding_of(leaf) is None else leaf, target
    )
    try:
        handler.restore(
            folder,
            args=ocp.args.PyTreeRestore(
                item=arrays,
                restore_args=ocp.checkpoint_utils.construct_restore_args(target),
                partial_restore=True,
            ),
        )
    except _PlanMade as made:
        _check_all_planned(made.plan, arrays, folder)
        return made.plan
    raise CheckpointError(
        f"no leaf of the target is an array in the checkpoint at {folder}",
        code="no_arrays",
    )


def _sharding_of(leaf: Any) -> Any:
    return getattr(leaf, "sharding", None)


def _check_all_planned(plan: RestorePlan, arrays: Any, folder: epath.Path) -> None:
    """Refuses a plan that lacks leaves: Orbax drops what is not in the checkpoint."""
    planned = {leaf.name for leaf in plan.leaves}
    asked = [
        ".".join(map(str, keys))
        for keys, leaf in ocp.tree.to_flat_dict(arrays).items()
        if _sharding_of(leaf) is not None
    ]
    missing = [name for name in asked if name not in planned]
    if missing:
        raise CheckpointError(
            f"leaf {missing[0]!r} of the target is not in the checkpoint at {folder}"
            + (f", nor are {len(missing) - 1} more" if missing[1:] else ""),
            code="missing_leaf",
        )


def tree_folder(path: str | os.PathLike[str]) -> epath.Path:
    """The folder that holds a saved tree, at or just below ``path``.

    Raises:
        CheckpointError: there is none, or several and none is called ``default``.
    """
    root = epath.Path(path)
    if not root.exists():
        raise CheckpointError(
            f"no checkpoint at {root}: the path does not exist", code="missing_path"
        )
    if _is_tree(root):
        return root
    items = sorted(p.name for p in root.iterdir() if p.is_dir() and _is_tree(p))
    if "default" in items or len(items) == 1:
        return root / ("default" if "default" in items else items[0])
    found = f"items {items}; name one of them" if items else "no saved tree in it"
    raise CheckpointError(
        f"{root} is not the folder of one saved tree: {found}", code="not_a_checkpoint"
    )


def _is_tree(folder: epath.Path) -> bool:
    return (folder / "_METADATA").exists()
