"""What one process of the demo does; `demo` starts it and reads what it emits.

Run as ``python -m orbax_reshard.tools.demo_worker JSON``, where JSON is a `Task`. One
process saves; then several, in one cluster, restore every target in both ways.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from typing import Any

from orbax_reshard.planning.plan import Policy
from orbax_reshard.tools import bits, demo_checkpoint, launch


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What to do, as sent on the command line.

    Attributes:
        action: ``"save"`` or ``"restore"``.
        path: of the checkpoint.
        size_bytes: of the model, as for `demo_checkpoint.transformer`.
        targets: sizes of the target meshes, in the order of the restores.
        policy: for the planned restores.
    """

    action: str
    path: str
    size_bytes: int
    targets: tuple[tuple[int, ...], ...] = ()
    policy: Policy = "read_once"


def ways_in_order(target_index: int) -> tuple[str, str]:
    """Which way goes first on a target: stock on the first, planned on the second...

    The first restore of a kind pays for imports and cold caches; taking turns spreads
    that over both columns.
    """
    return ("stock", "planned") if target_index % 2 == 0 else ("planned", "stock")


def main(task: Task) -> None:
    """Does the task; every fact goes to the parent as one emitted value."""
    leaves = demo_checkpoint.transformer(task.size_bytes)
    if task.action == "save":
        demo_checkpoint.save(task.path, leaves)
        stored_bytes = demo_checkpoint.stored_chunk_bytes(task.path)
        launch.emit({"stored_bytes": stored_bytes})
        return

    process_index = launch.initialize_from_environment()
    launch.emit({"event": "ready"})
    for target_index, sizes in enumerate(task.targets):
        abstract = demo_checkpoint.abstract_tree(leaves, demo_checkpoint.mesh(sizes))
        restored: dict[str, Any] = {}
        for way in ways_in_order(target_index):
            launch.emit({"event": "restore", "target": target_index, "way": way})
            restored[way], facts = _restore(task, abstract, way)
            launch.emit(
                {"event": "restored", "target": target_index, "way": way, **facts}
            )
        launch.emit({"event": "compare", "target": target_index})
        differences, num_shards = _compare(restored["stock"], restored["planned"])
        launch.emit(
            {
                "event": "compared",
                "target": target_index,
                "num_shards": num_shards,
                "differences": [
                    {"process": process_index, "leaf": leaf, "what": what}
                    for leaf, what in differences
                ],
            }
        )


def bytes_read() -> int:
    """Bytes that TensorStore has read in this process, from files and object stores.

    The same sum as Orbax's own ``get_tensorstore_raw_bytes``: what left the storage,
    not what was asked for, so that coalesced and repeated reads count.
    """
    import tensorstore as ts

    return sum(
        value.get("value", 0)
        for metric in ts.experimental_collect_matching_metrics("/tensorstore/kvstore/")
        if metric["name"].endswith("/bytes_read")
        for value in metric["values"]
    )


def _restore(task: Task, abstract: Any, way: str) -> tuple[Any, dict[str, Any]]:
    """One restore, measured from the outside: both ways with the same ruler."""
    import jax
    import orbax.checkpoint as ocp
    from jax.experimental import multihost_utils

    handler = _handler(task, way)
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, handler))
    args = ocp.args.PyTreeRestore(
        item=abstract,
        restore_args=ocp.checkpoint_utils.construct_restore_args(abstract),
    )
    tree_handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
    with ocp.Checkpointer(tree_handler) as checkpointer:
        multihost_utils.sync_global_devices(f"demo {way}")
        started, before = time.perf_counter(), bytes_read()
        tree = jax.block_until_ready(checkpointer.restore(task.path, args=args))
        facts = {
            "seconds": time.perf_counter() - started,
            "fetched_bytes": bytes_read() - before,
        }
    # What only the plugin's own report knows; stock has none.
    report = getattr(handler, "last_report", None)
    return tree, facts | {
        "collectives": report.collectives if report else {},
        "compile_seconds": report.compile_seconds if report else 0.0,
        "reasons": report.reasons if report else {},
    }


def _handler(task: Task, way: str) -> Any:
    import orbax.checkpoint as ocp

    if way == "stock":
        return ocp.type_handlers.ArrayHandler()
    import orbax_reshard as oresh

    return oresh.ReshardingArrayHandler(oresh.Options(policy=task.policy))


def _compare(stock: Any, planned: Any) -> tuple[list[tuple[str, str]], int]:
    """Per differing leaf its name and how; and the number of shards compared."""
    import jax

    differences: list[tuple[str, str]] = []
    num_shards = 0
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(stock),
        jax.tree_util.tree_leaves(planned),
        strict=True,
    )
    for (path, expected), got in pairs:
        num_shards += len(expected.addressable_shards)
        what = bits.describe_difference(expected, got)
        if what is not None:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            differences.append((name, what))
    return differences, num_shards


if __name__ == "__main__":
    main(Task(**json.loads(sys.argv[1])))
