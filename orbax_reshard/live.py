"""Resharding arrays that are already on devices.

Going from many shards to few, on other dimensions, is where a direct reshard hurts:
no target shard is a union of source shards, so each source device cuts its shard into
slivers for every target device. With an intermediate sharding the source devices first
merge shards among neighbours, down to about the target's count, and one replica of the
merged pieces then moves on:

    source              intermediate                     target
    P('fsdp', None)     P('fsdp_intermediate_split')     P(None, 'tp')
    fsdp=8              split=4 x replica=2              tp=4

    dev 0  row 0        dev 0  rows 0 1   (+ row 1)      dev 0  all rows, col 0
    dev 1  row 1        dev 1  rows 0 1   (+ row 0)      dev 1  all rows, col 1
    dev 2  row 2        dev 2  rows 2 3   (+ row 3)      dev 2  all rows, col 2
     :                   :                                :
    dev 7  row 7        dev 7  rows 6 7   (+ row 6)

Each device keeps what it has and receives 1/4 - 1/8 of the array, which is the least
possible. The intermediate lives on the *source's* devices, in their order; the target
may be on others. The choice is made by ``orbax_reshard.planning.splits``.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from orbax_reshard.engine import relayout
from orbax_reshard.engine.requests import live_request
from orbax_reshard.errors import (
    NoIntermediateShardingError,
    NoIntermediateShardingNeededError,
)
from orbax_reshard.planning import splits
from orbax_reshard.planning.options import Options
from orbax_reshard.planning.reshard_plan import ReshardPlan, build_reshard_plan


def find_intermediate_sharding(
    in_sharding: Sharding, out_sharding: Sharding
) -> tuple[NamedSharding, tuple[str, ...]]:
    """The sharding to go through between two shardings, receiving least on the way.

    With s and t the shards per dimension of source and target, and S and T their
    products, none is needed when S <= T, or when every t divides its s: a target shard
    is then a union of whole source shards. Otherwise the intermediate has I shards, the
    largest divisor of S not above T that splitting mesh axes can form. A split axis
    ``a`` becomes ``a_intermediate_split`` (major) and ``a_intermediate_replica``
    (minor), in its place. Device order, other axes, axis types, memory kind and the
    spec's length stay as they are; an axis that is gathered whole keeps a split part
    of size 1.

    A spec that is shorter than the other is filled up with None: in JAX ``P('a')``
    fits an array of any rank from 1. Only a spec that *ends* in None is taken to spell
    out its rank, and must then reach the other's last sharded dimension.

    The name and the contract are those of pathways-utils
    (``pathwaysutils/reshard.py``), so that its callers change the import only.

    Args:
        in_sharding: the source; a `NamedSharding` over a `Mesh` or `AbstractMesh`.
        out_sharding: the target; a `NamedSharding`, on the same or other devices.

    Returns:
        ``(intermediate, replicated_axes)``: a sharding over the source's devices under
        which each device keeps its source shard and receives 1/I - 1/S of the array,
        and the names of the replica axes that were made, in mesh order. Axes over
        which the source is replicated already are not among them.

    Raises:
        NoIntermediateShardingNeededError: direct is as good; ``code`` is
            ``"source_not_finer"`` (S <= T) or ``"target_shards_whole"``.
        NoIntermediateShardingError: there is none; ``code`` is
            ``"not_named_sharding"``, ``"unconstrained"``, ``"unreduced"``,
            ``"rank_mismatch"`` or ``"axis_name_taken"``.

    >>> source = NamedSharding(
    ...     AbstractMesh((8, 1), ("fsdp", "tp")), PartitionSpec("fsdp", "tp")
    ... )
    >>> target = NamedSharding(
    ...     AbstractMesh((1, 4), ("fsdp", "tp")), PartitionSpec("fsdp", "tp")
    ... )
    >>> intermediate, replicated_axes = find_intermediate_sharding(source, target)
    >>> print(tuple(intermediate.mesh.shape.items()))  # doctest: +NORMALIZE_WHITESPACE
    (('fsdp_intermediate_split', 4), ('fsdp_intermediate_replica', 2), ('tp', 1))
    >>> print(tuple(intermediate.spec), replicated_axes)
    ('fsdp_intermediate_split', 'tp') ('fsdp_intermediate_replica',)
    """
    both = f"in_sharding={in_sharding}, out_sharding={out_sharding}"
    source = _checked(in_sharding, "in_sharding", both)
    target = _checked(out_sharding, "out_sharding", both)
    _check_ranks(source.spec, target.spec, both)

    rank = max(len(source.spec), len(target.spec))
    source_axes, source_dims = _mesh_axes(source), _dim_axes(source.spec, rank)
    source_counts = splits.shard_counts(source_axes, source_dims)
    target_counts = splits.shard_counts(
        _mesh_axes(target), _dim_axes(target.spec, rank)
    )
    _check_needed(source_counts, target_counts, both)

    plan = splits.plan_splits(source_axes, source_dims, target_counts)
    _check_names(plan, both)
    intermediate = NamedSharding(
        _split_mesh(source.mesh, plan),
        # `update`, because a spec is more than its partitions (reduced axes).
        source.spec.update(partitions=_partitions(plan, len(source.spec))),
        memory_kind=source.memory_kind,
    )
    return intermediate, plan.replicated_names


def _checked(sharding: Sharding, argument: str, both: str) -> NamedSharding:
    """``sharding``, known to be one whose shards are parts of the array."""
    if not isinstance(sharding, NamedSharding):
        raise NoIntermediateShardingError(
            f"{argument} is a {type(sharding).__name__}, not a NamedSharding, and has "
            "no mesh axes to split; reshard directly, or name the layout with a "
            f"NamedSharding. {both}",
            code="not_named_sharding",
        )
    spec = sharding.spec
    for dim, entry in enumerate(spec.partitions):
        if entry is PartitionSpec.UNCONSTRAINED:
            raise NoIntermediateShardingError(
                f"{argument} leaves dimension {dim} UNCONSTRAINED, so its number of "
                "shards is not known; name the mesh axes, or None, for that "
                f"dimension. {both}",
                code="unconstrained",
            )
    if spec.unreduced:
        raise NoIntermediateShardingError(
            f"{argument} is unreduced over {sorted(map(str, spec.unreduced))}: its "
            "shards are terms of a sum and not parts of the array; reduce it first. "
            f"{both}",
            code="unreduced",
        )
    return sharding


def _check_ranks(source: PartitionSpec, target: PartitionSpec, both: str) -> None:
    """Refuses two specs of which one spells out a rank that the other exceeds."""
    for argument, spec, other_argument, other in (
        ("in_sharding", source, "out_sharding", target),
        ("out_sharding", target, "in_sharding", source),
    ):
        sharded = [
            dim for dim, entry in enumerate(other.partitions) if entry is not None
        ]
        spells_out_rank = len(spec) > 0 and spec.partitions[-1] is None
        if spells_out_rank and sharded and sharded[-1] >= len(spec):
            raise NoIntermediateShardingError(
                f"{argument} ends in None and so spells out rank {len(spec)}, but "
                f"{other_argument} shards dimension {sharded[-1]} and so has rank "
                f"{sharded[-1] + 1} or more; give both specs the array's rank, or "
                f"leave the trailing None away. {both}",
                code="rank_mismatch",
            )


def _check_needed(
    source_counts: tuple[int, ...], target_counts: tuple[int, ...], both: str
) -> None:
    """Refuses a pair that is served as well by going directly."""
    code = splits.direct_reason(source_counts, target_counts)
    if code is None:
        return
    fact = {
        splits.SOURCE_NOT_FINER: "in_sharding has no more shards than out_sharding, so "
        "there are none to merge",
        splits.TARGET_SHARDS_WHOLE: "every shard of out_sharding is a union of whole "
        "shards of in_sharding",
    }[code]
    raise NoIntermediateShardingNeededError(
        f"{fact} (shards per dimension: in {source_counts}, out {target_counts}); "
        f"reshard directly. {both}",
        code=code,
    )


def _check_names(plan: splits.AxisSplits, both: str) -> None:
    """Refuses a plan whose new axes would have the name of an axis that stays."""
    num_uses = Counter(axis.name for axis in plan.axes)
    taken = [name for name, uses in num_uses.items() if uses > 1]
    if taken:
        raise NoIntermediateShardingError(
            f"splitting {list(plan.split_names)} of in_sharding would make axes named "
            f"{taken}, but its mesh {[axis.name for axis in plan.source_axes]} has "
            f"them already; rename those axes. {both}",
            code="axis_name_taken",
        )


def _mesh_axes(sharding: NamedSharding) -> tuple[splits.MeshAxis, ...]:
    """The mesh's axes as plain values, major first."""
    return tuple(
        splits.MeshAxis(name=name, size=size)
        for name, size in sharding.mesh.shape.items()
    )


def _dim_axes(spec: PartitionSpec, rank: int) -> splits.DimAxes:
    """Per dimension the axes that cut it, filled up to ``rank`` with none."""
    dims = [
        () if entry is None else entry if isinstance(entry, tuple) else (entry,)
        for entry in spec.partitions
    ]
    return tuple(dims + [()] * (rank - len(dims)))


def _partitions(
    plan: splits.AxisSplits, rank: int
) -> tuple[str | tuple[str, ...] | None, ...]:
    """The plan's first ``rank`` dimensions as a spec has them."""
    return tuple(
        names if len(names) > 1 else names[0] if names else None
        for names in plan.dims[:rank]
    )


def _split_mesh(
    mesh: Mesh | AbstractMesh, plan: splits.AxisSplits
) -> Mesh | AbstractMesh:
    """``mesh`` under the plan's axes: same devices, same order, types inherited."""
    sizes = tuple(axis.size for axis in plan.axes)
    names = tuple(axis.name for axis in plan.axes)
    types = tuple(mesh.axis_types[position] for position in plan.origins)
    if isinstance(mesh, AbstractMesh):
        return mesh.update(axis_sizes=sizes, axis_names=names, axis_types=types)
    return Mesh(mesh.devices.reshape(sizes), names, axis_types=types)


def plan_reshard(
    tree: Any,
    shardings: Any,
    *,
    device_budget_bytes: int | None = None,
) -> ReshardPlan:
    """Plans ``reshard`` without moving anything.

    Args:
        tree: pytree of arrays, or of ``jax.ShapeDtypeStruct`` with shardings.
        shardings: target shardings, a tree like ``tree`` or a prefix of it.
        device_budget_bytes: inclusive bound on a device's bytes in one wave.

    Returns:
        The plan: ``explain()``, ``forecast`` with collectives and bytes received per
        device, ``peak_device_bytes``, and ``full_copies``.

    Raises:
        TargetError: a sharding does not fit its leaf.
        BudgetError: a leaf alone does not fit the budget.
    """
    names, leaves, targets, _ = _flat(tree, shardings)
    requests = [
        live_request(name, leaf, target)
        for name, leaf, target in zip(names, leaves, targets, strict=True)
    ]
    return build_reshard_plan(requests, device_budget_bytes=device_budget_bytes)


def reshard(
    tree: Any,
    shardings: Any,
    *,
    donate: bool = False,
    device_budget_bytes: int | None = None,
    options: Options | None = None,
) -> Any:
    """Moves a tree of arrays to other shardings, in bounded memory.

    On one device set, in any order, blocks move by slices, all-to-alls and then
    all-gathers (``orbax_reshard.planning.relayout``); to another device set the source
    devices merge shards first (`find_intermediate_sharding`) and one replica travels.
    Everything else (host arrays, single-device arrays, other memory kinds) goes
    through ``jax.device_put``, which is also what the values are equal to, bit for
    bit. Programs and plans are cached for the process: moving the same signatures
    again compiles nothing.

    Args:
        tree: pytree of arrays; typed PRNG keys and numpy arrays are fine.
        shardings: target shardings, a tree like ``tree`` or a prefix of it.
        donate: delete each source array when its wave is done. Without it no array
            that the caller holds is deleted. A leaf whose blocks stay where they are
            is never deleted: the result has its buffers, as with ``device_put``.
        device_budget_bytes: inclusive bound on a device's bytes in one wave (argument,
            result and what is between); default: ``options.device_budget_bytes``.
        options: where the default budget comes from.

    Returns:
        A tree like ``tree`` whose leaves have exactly the asked shardings.

    Raises:
        TargetError: a sharding does not fit its leaf; before anything moves.
        BudgetError: a leaf alone does not fit the budget; before anything moves.
    """
    if device_budget_bytes is None and options is not None:
        device_budget_bytes = options.device_budget_bytes
    names, leaves, targets, structure = _flat(tree, shardings)
    plan = build_reshard_plan(
        [live_request(*row) for row in zip(names, leaves, targets, strict=True)],
        device_budget_bytes=device_budget_bytes,
    )
    made = relayout.run_plan(plan, leaves, targets, donate=donate)
    return jax.tree.unflatten(structure, made)


def _flat(tree: Any, shardings: Any) -> tuple[list[str], list[Any], list[Any], Any]:
    """Names, leaves and targets in tree order, and the structure."""
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    spread = jax.tree.broadcast(shardings, tree, is_leaf=lambda x: x is None)
    targets = structure.flatten_up_to(spread)
    names = [jax.tree_util.keystr(path) or "(the array)" for path, _ in paths]
    return names, [leaf for _, leaf in paths], targets, structure
