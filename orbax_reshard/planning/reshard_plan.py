"""The plan of resharding live arrays: a value with a forecast, like a restore's.

Leaves of one signature travel together, in waves that stay below the budget. Waves run
one after the other, so that the bound on a wave bounds the whole:

    group 0: leaves 0 1 2 | 3 4 5       group 1: leaf 6 | leaf 7
             argument + result + temporaries of one wave <= device_budget_bytes
"""

from __future__ import annotations

import functools
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from orbax_reshard.errors import BudgetError
from orbax_reshard.planning import reshard_text
from orbax_reshard.planning.boxes import ceil_div
from orbax_reshard.planning.cost import ExchangeCost
from orbax_reshard.planning.digits import DeviceMesh
from orbax_reshard.planning.explain import spec_text
from orbax_reshard.planning.record import Record
from orbax_reshard.planning.relayout import (
    Relayout,
    Spec,
    plan_relayout,
    same_blocks,
)
from orbax_reshard.planning.relayout_cost import relayout_cost
from orbax_reshard.planning.splits import (
    MeshAxis,
    direct_reason,
    plan_splits,
    shard_counts,
)

Decision = Literal["exchange", "relabel", "other_devices", "device_put"]

# Leaves below this share of a device travel together by default: stacking costs a
# copy, which only small leaves win back in launches saved.
DEFAULT_WAVE_BYTES = 16 * 2**20

# 64 leaves of 5 KiB on 8 CPU devices, compiled already: 58 ms one by one, 22 ms from 8
# in a wave on; compiling takes 0.3 s of CPU time with 8, 0.7 s with 16, 1.5 s with 64.
MAX_WAVE_LEAVES = 16

_cached_relayout = functools.lru_cache(maxsize=4096)(plan_relayout)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardRequest:
    """One leaf to move.

    Attributes:
        name: the leaf's path in its tree.
        shape: elements per dimension.
        dtype: dtype name.
        dtype_bytes: bytes of an element on the device, at least 1.
        source_block_bytes: what a device holds; 0 when the leaf is on none.
        target_block_bytes: what a device is to hold; 0 when not known.
        platform: backend of the devices, because device ids are unique only there.
        source_mesh: where it is; None when ``declined``.
        source_spec: mesh axes per dimension, where they are known.
        target_mesh: where it goes; None when ``declined``.
        target_spec: mesh axes per dimension, where they are known.
        declined: reason code for going through ``jax.device_put``, or None.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    dtype_bytes: int
    source_mesh: DeviceMesh | None
    source_spec: Spec
    target_mesh: DeviceMesh | None
    target_spec: Spec
    declined: str | None = None
    source_block_bytes: int = 0
    target_block_bytes: int = 0
    platform: str = ""

    @property
    def signature(self) -> tuple[object, ...]:
        """Leaves of one signature share plan, program and waves."""
        return (
            *(self.shape, self.dtype, self.dtype_bytes, self.source_mesh),
            *(self.source_spec, self.target_mesh, self.target_spec, self.declined),
            *(self.source_block_bytes, self.target_block_bytes, self.platform),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardGroup:
    """Leaves of one signature.

    Attributes:
        leaves: their indices, ascending.
        decision: how they move.
        reason: why, a key of ``reshard_text.REASONS``.
        wave_size: leaves per wave.
        relayout: the exchange of one wave; with ``"other_devices"`` the one that
            merges shards on the source's devices; None where nothing is exchanged.
        cost: what one device does in ``relayout``.
        full_copy: True when a device may hold a whole leaf on the way although its
            target does not ask for one.
        peak_device_bytes: inclusive bound on a device's bytes during a wave: argument,
            result and temporaries.
    """

    leaves: tuple[int, ...]
    decision: Decision
    reason: str
    wave_size: int
    relayout: Relayout | None
    cost: ExchangeCost | None
    full_copy: bool
    peak_device_bytes: int

    @property
    def waves(self) -> list[tuple[int, ...]]:
        """The leaves of each wave."""
        return [
            self.leaves[i : i + self.wave_size]
            for i in range(0, len(self.leaves), self.wave_size)
        ]

    @property
    def collectives(self) -> dict[str, int]:
        """Collectives of one wave, by HLO name."""
        found: Counter[str] = Counter()
        if self.relayout is not None:
            found.update(s.hlo_name for s in self.relayout.steps if s.kind != "slice")
            if self.relayout.permutation:
                found["collective-permute"] += 1
        return dict(sorted(found.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardPlan:
    """What ``reshard`` will do.

    Attributes:
        leaves: the requests, in tree order.
        groups: leaves of one signature, in order of execution.
        forecast: collectives and received bytes; seconds are not forecast.
        peak_device_bytes: the largest of the groups.
    """

    leaves: tuple[ReshardRequest, ...]
    groups: tuple[ReshardGroup, ...]
    forecast: Record
    peak_device_bytes: int

    @property
    def full_copies(self) -> tuple[str, ...]:
        """Names of the leaves of which a device may hold a full copy on the way."""
        return tuple(
            self.leaves[i].name for g in self.groups if g.full_copy for i in g.leaves
        )

    def explain(self) -> str:
        """The plan in words, a block per group; for people."""
        return reshard_text.explain(self)

    def to_json(self) -> str:
        """The plan as JSON with sorted keys; equal plans give equal text."""
        return json.dumps(reshard_text.as_dict(self), sort_keys=True)


def build_reshard_plan(
    requests: Sequence[ReshardRequest], *, device_budget_bytes: int | None = None
) -> ReshardPlan:
    """Plans the moves of a tree of leaves.

    Args:
        requests: the leaves, in tree order.
        device_budget_bytes: inclusive bound on a device's bytes in one wave.

    Raises:
        BudgetError: one leaf alone does not fit the budget.
    """
    members: dict[tuple[object, ...], list[int]] = {}
    for index, request in enumerate(requests):
        members.setdefault(request.signature, []).append(index)
    groups = tuple(
        _plan_group(requests[leaves[0]], tuple(leaves), device_budget_bytes)
        for leaves in members.values()
    )
    collectives: Counter[str] = Counter()
    received = 0
    for group in groups:
        for _ in group.waves:
            collectives.update(group.collectives)
        if group.cost is not None:
            wave = group.cost.in_host_bytes + group.cost.cross_host_bytes
            received += wave * len(group.waves)
    return ReshardPlan(
        leaves=tuple(requests),
        groups=groups,
        forecast=Record(
            collectives=tuple(sorted(collectives.items())),
            received_bytes_per_device=received,
        ),
        peak_device_bytes=max((g.peak_device_bytes for g in groups), default=0),
    )


def _plan_group(
    request: ReshardRequest, leaves: tuple[int, ...], budget: int | None
) -> ReshardGroup:
    """Decides for one signature, and sizes its waves."""
    one = replace(_single(request), leaves=leaves)
    if budget is not None and one.peak_device_bytes > budget:
        raise BudgetError(
            f"leaf {request.name!r} ({request.dtype}{list(request.shape)}) needs "
            f"{one.peak_device_bytes} bytes on a device to reach "
            f"{spec_text(request.target_spec)}, but device_budget_bytes is {budget}. "
            f"Raise the budget, or choose a target with more shards.",
            code="device_budget",
        )
    if one.decision != "exchange" or len(leaves) == 1:
        return one
    # From two leaves on, a wave's bytes are proportional to their number.
    room = DEFAULT_WAVE_BYTES if budget is None else min(budget, DEFAULT_WAVE_BYTES)
    pair = _wave(request, 2)
    size = min(len(leaves), 2 * room // pair.peak_device_bytes, MAX_WAVE_LEAVES)
    if size < 2:
        return one
    # Waves of one size, because a group has one program; the last may be short.
    size = ceil_div(len(leaves), ceil_div(len(leaves), size))
    return replace(_wave(request, size), leaves=leaves)


@functools.lru_cache(maxsize=4096)
def _cached_single(request: ReshardRequest) -> ReshardGroup:
    """The decision and the cost of one leaf alone."""
    source, target = request.source_mesh, request.target_mesh
    if request.declined is not None or source is None or target is None:
        return _put(request, "device_put", request.declined or "not_named_sharding")
    if set(source.device_ids) != set(target.device_ids):
        return _through_intermediate(request, source, target)
    if same_blocks(
        source_mesh=source,
        source_spec=request.source_spec,
        target_mesh=target,
        target_spec=request.target_spec,
    ):
        # Nothing is written: the result has the source's buffers.
        return replace(_put(request, "relabel", "same_blocks"), peak_device_bytes=0)
    if _relayout(request, 1) is not None:
        return _wave(request, 1)
    # XLA's last resort replicates the array and cuts it again. Measured for 2 x 3
    # against 3 x 2: argument, result and one full copy; a second for what we have not
    # seen.
    made = _put(request, "device_put", "no_common_digits")
    whole = request.dtype_bytes * math.prod(request.shape)
    peak = made.peak_device_bytes + 2 * whole
    return replace(made, full_copy=True, peak_device_bytes=peak)


def _single(request: ReshardRequest) -> ReshardGroup:
    """The decision and the cost of one leaf alone; leaves of one signature share it."""
    return _cached_single(replace(request, name=""))


def _relayout(request: ReshardRequest, num_leaves: int) -> Relayout | None:
    assert request.source_mesh is not None and request.target_mesh is not None
    return _cached_relayout(
        shape=(num_leaves, *request.shape),
        source_mesh=request.source_mesh,
        source_spec=request.source_spec,
        target_mesh=request.target_mesh,
        target_spec=request.target_spec,
    )


def _wave(request: ReshardRequest, num_leaves: int) -> ReshardGroup:
    """A wave of the exchange, of leaves that have common digits."""
    relayout = _relayout(request, num_leaves)
    assert relayout is not None
    cost = relayout_cost(relayout, element_bytes=request.dtype_bytes)
    return ReshardGroup(
        leaves=(0,),
        decision="exchange",
        reason="digits",
        wave_size=num_leaves,
        relayout=relayout,
        cost=cost,
        full_copy=False,
        peak_device_bytes=cost.peak_bytes,
    )


def _put(request: ReshardRequest, decision: Decision, reason: str) -> ReshardGroup:
    """One leaf that goes without an exchange; source and target may share a device."""
    return ReshardGroup(
        leaves=(0,),
        decision=decision,
        reason=reason,
        wave_size=1,
        relayout=None,
        cost=None,
        full_copy=False,
        peak_device_bytes=request.source_block_bytes + request.target_block_bytes,
    )


def _through_intermediate(
    request: ReshardRequest, source: DeviceMesh, target: DeviceMesh
) -> ReshardGroup:
    """To other devices: shards are merged where they are, then one replica moves."""
    made = _put(request, "other_devices", "other_devices")
    axes, asked = (
        tuple(
            MeshAxis(name=name, size=size)
            for name, size in zip(mesh.axis_names, mesh.axis_sizes, strict=True)
        )
        for mesh in (source, target)
    )
    counts = shard_counts(asked, request.target_spec)
    if direct_reason(shard_counts(axes, request.source_spec), counts) is not None:
        return made
    plan = plan_splits(axes, request.source_spec, counts)
    relayout = _cached_relayout(
        shape=(1, *request.shape),
        source_mesh=source,
        source_spec=request.source_spec,
        target_mesh=DeviceMesh(
            axis_names=tuple(axis.name for axis in plan.axes),
            axis_sizes=tuple(axis.size for axis in plan.axes),
            device_ids=source.device_ids,
            hosts=source.hosts,
        ),
        target_spec=plan.dims,
    )
    if relayout is None:
        return made
    cost = relayout_cost(relayout, element_bytes=request.dtype_bytes)
    # A device of both meshes holds source, intermediate and, at the end, target.
    shared = set(source.device_ids) & set(target.device_ids)
    after = request.source_block_bytes + cost.result_bytes
    after += request.target_block_bytes if shared else 0
    return replace(
        made,
        relayout=relayout,
        cost=cost,
        peak_device_bytes=max(cost.peak_bytes, after, request.target_block_bytes),
    )
