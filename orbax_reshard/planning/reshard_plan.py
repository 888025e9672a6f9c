"""The plan of resharding live arrays: a value with a forecast, like a restore's.

Leaves of one signature travel together, in waves that stay below the budget:

    peak of a wave = leaves in it x (argument + before + after) of the widest step
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from orbax_reshard.errors import BudgetError
from orbax_reshard.planning.boxes import ceil_div
from orbax_reshard.planning.cost import ExchangeCost, exchange_cost
from orbax_reshard.planning.digits import DeviceMesh
from orbax_reshard.planning.explain import bytes_text, record_dict, spec_text
from orbax_reshard.planning.layout import block_bytes
from orbax_reshard.planning.record import Record
from orbax_reshard.planning.relayout import Relayout, Spec, plan_relayout

Decision = Literal["exchange", "relabel", "other_devices", "device_put"]

# Leaves below this share of a device travel together by default: stacking costs a
# copy, which only small leaves win back in launches saved.
DEFAULT_WAVE_BYTES = 16 * 2**20
MAX_WAVE_LEAVES = 64

_cached_relayout = functools.lru_cache(maxsize=4096)(plan_relayout)

REASONS = {
    "digits": "blocks move by slices, all-to-alls and all-gathers",
    "same_blocks": "every device already holds its target block",
    "other_devices": "the target is on other devices: merge there, move one replica",
    "no_common_digits": "the two meshes cut the devices at places that do not divide",
    "not_named_sharding": "source or target is no NamedSharding over a concrete mesh",
    "host_array": "the leaf is not on devices yet",
    "memory_kind": "source or target is not in the device's default memory",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardRequest:
    """One leaf to move.

    Attributes:
        name: the leaf's path in its tree.
        shape: elements per dimension.
        dtype: dtype name.
        dtype_bytes: bytes of an element on the device, at least 1.
        source_mesh: where it is; None when ``declined``.
        source_spec: mesh axes per dimension.
        target_mesh: where it goes; None when ``declined``.
        target_spec: mesh axes per dimension.
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

    @property
    def signature(self) -> tuple[object, ...]:
        """Leaves of one signature share plan, program and waves."""
        return (
            *(self.shape, self.dtype, self.dtype_bytes, self.source_mesh),
            *(self.source_spec, self.target_mesh, self.target_spec, self.declined),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardGroup:
    """Leaves of one signature.

    Attributes:
        leaves: their indices, ascending.
        decision: how they move.
        reason: why, a key of ``REASONS``.
        wave_size: leaves per wave.
        relayout: the exchange of one wave; None unless the decision needs one.
        cost: what one device does in one wave; None when ``device_put`` decides.
        full_copy: True when a device may hold a whole leaf on the way although its
            target does not ask for one.
        peak_device_bytes: bound on a device's bytes during a wave.
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
        return "\n".join(_lines(self))

    def to_json(self) -> str:
        """The plan as JSON with sorted keys; equal plans give equal text."""
        plain = {
            "forecast": record_dict(self.forecast),
            "peak_device_bytes": self.peak_device_bytes,
            "full_copies": list(self.full_copies),
            "groups": [_group_dict(self, group) for group in self.groups],
        }
        return json.dumps(plain, sort_keys=True)


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
            one = group.cost.in_host_bytes + group.cost.cross_host_bytes
            received += one * len(group.leaves)
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
    """Decides for one signature; costs are per leaf until the wave is sized."""
    one = _single(request)
    peak = one.peak_device_bytes
    if budget is not None and peak > budget:
        raise BudgetError(
            f"leaf {request.name!r} ({request.dtype}{list(request.shape)}) needs "
            f"{peak} bytes on a device to reach {spec_text(request.target_spec)}, but "
            f"device_budget_bytes is {budget}. Raise the budget, or choose a target "
            f"with more shards.",
            code="device_budget",
        )
    size = 1
    if one.decision == "exchange":
        room = DEFAULT_WAVE_BYTES if budget is None else min(budget, DEFAULT_WAVE_BYTES)
        size = max(1, min(len(leaves), room // max(1, peak), MAX_WAVE_LEAVES))
        size = ceil_div(len(leaves), ceil_div(len(leaves), size))
    relayout = one.relayout
    if relayout is not None:
        relayout = _cached_relayout(
            shape=(size, *request.shape),
            source_mesh=request.source_mesh,
            source_spec=request.source_spec,
            target_mesh=request.target_mesh,
            target_spec=request.target_spec,
        )
    return replace(
        one,
        leaves=leaves,
        wave_size=size,
        relayout=relayout,
        peak_device_bytes=peak * size,
    )


def _single(request: ReshardRequest) -> ReshardGroup:
    """The decision and the cost of one leaf alone."""
    source, target = request.source_mesh, request.target_mesh
    whole = request.dtype_bytes
    for extent in request.shape:
        whole *= extent
    decision: Decision = "device_put"
    reason = request.declined or "no_common_digits"
    if request.declined is None and source is not None and target is not None:
        if set(source.device_ids) != set(target.device_ids):
            decision, reason = "other_devices", "other_devices"
        else:
            relayout = _cached_relayout(
                shape=(1, *request.shape),
                source_mesh=source,
                source_spec=request.source_spec,
                target_mesh=target,
                target_spec=request.target_spec,
            )
            if relayout is not None:
                return _exchange_group(request, relayout)
    on_device = request.declined is None
    return ReshardGroup(
        leaves=(0,),
        decision=decision,
        reason=reason,
        wave_size=1,
        relayout=None,
        cost=None,
        full_copy=reason == "no_common_digits",
        # What XLA or a transfer between devices does is not ours to know: a full
        # copy beside the shards is the most it takes.
        peak_device_bytes=whole if on_device else 0,
    )


def _exchange_group(request: ReshardRequest, relayout: Relayout) -> ReshardGroup:
    moves = bool(relayout.permutation or relayout.steps)
    start = block_bytes(relayout.intermediate, request.dtype_bytes)
    result = request.dtype_bytes
    for extent, run in zip(
        relayout.intermediate.shape, relayout.intermediate.target, strict=True
    ):
        result *= extent // relayout.digits.num_parts(run)
    cost = exchange_cost(
        relayout.steps,
        start_bytes=start,
        result_bytes=result,
        digits=relayout.digits,
    )
    if relayout.permutation:
        # The permuted block stands beside the argument in every later step.
        cost = replace(
            cost,
            cross_host_bytes=cost.cross_host_bytes + start,
            num_collectives=cost.num_collectives + 1,
            peak_bytes=max(2 * start + result, cost.peak_bytes + start),
        )
    return ReshardGroup(
        leaves=(0,),
        decision="exchange" if moves else "relabel",
        reason="digits" if moves else "same_blocks",
        wave_size=1,
        relayout=relayout if moves else None,
        cost=cost if moves else None,
        full_copy=False,
        peak_device_bytes=cost.peak_bytes if moves else 0,
    )


def _group_dict(plan: ReshardPlan, group: ReshardGroup) -> dict[str, Any]:
    first = plan.leaves[group.leaves[0]]
    return {
        "leaves": [plan.leaves[i].name for i in group.leaves],
        "shape": list(first.shape),
        "dtype": first.dtype,
        "source": spec_text(first.source_spec),
        "target": spec_text(first.target_spec),
        "decision": group.decision,
        "reason": group.reason,
        "wave_size": group.wave_size,
        "collectives": group.collectives,
        "cost": None if group.cost is None else asdict(group.cost),
        "full_copy": group.full_copy,
        "peak_device_bytes": group.peak_device_bytes,
    }


def _lines(plan: ReshardPlan) -> Iterator[str]:
    moved = ", ".join(f"{n} {kind}" for kind, n in plan.forecast.collectives)
    yield (
        f"Reshard plan, {len(plan.leaves)} leaves in {len(plan.groups)} group(s): "
        f"{moved or 'no collectives'}; a device receives "
        f"{bytes_text(plan.forecast.received_bytes_per_device)}, peak "
        f"{bytes_text(plan.peak_device_bytes)} per device and wave."
    )
    if plan.full_copies:
        yield f"A device may hold a full copy of: {', '.join(plan.full_copies)}"
    for number, group in enumerate(plan.groups):
        first = plan.leaves[group.leaves[0]]
        more = f" and {len(group.leaves) - 1} more" if len(group.leaves) > 1 else ""
        found = ", ".join(f"{n} {kind}" for kind, n in group.collectives.items())
        yield ""
        yield f"[{number}] {first.name}{more}: {first.dtype}{list(first.shape)}"
        yield f"    decision      {group.decision}: {REASONS[group.reason]}"
        yield (
            f"    layout        {spec_text(first.source_spec)} to "
            f"{spec_text(first.target_spec)}"
        )
        yield f"    collectives   {found or 'none'} per wave"
        yield (
            f"    waves         {len(group.waves)} of {group.wave_size}, peak "
            f"{bytes_text(group.peak_device_bytes)} per device"
        )
