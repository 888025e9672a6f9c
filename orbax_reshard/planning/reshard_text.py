"""Reshard plans as text and as plain dictionaries; no decisions are made here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from orbax_reshard.planning.explain import bytes_text, record_dict, spec_text

if TYPE_CHECKING:
    from orbax_reshard.planning.reshard_plan import ReshardGroup, ReshardPlan

# What each reason code means to a reader; tests check that no code is missing.
REASONS = {
    "digits": "blocks move by slices, all-to-alls and all-gathers",
    "same_blocks": "every device already holds its target block",
    "other_devices": "the target is on other devices: merge there, move one replica",
    "no_common_digits": "the two meshes cut the devices at places that do not divide",
    "not_named_sharding": "source or target is no NamedSharding over a concrete mesh",
    "host_array": "the leaf is not on devices yet",
    "memory_kind": "source or target is not in the device's default memory",
    "other_platform": "source and target are devices of different backends",
    "dtype_not_carried": "collectives do not carry this dtype",
    "empty_array": "the array has no elements",
    "weak_type": "the leaf's type is weak, which only device_put keeps",
}


def as_dict(plan: ReshardPlan) -> dict[str, Any]:
    """The plan as JSON-ready values."""
    return {
        "forecast": record_dict(plan.forecast),
        "peak_device_bytes": plan.peak_device_bytes,
        "full_copies": list(plan.full_copies),
        "groups": [_group_dict(plan, group) for group in plan.groups],
    }


def explain(plan: ReshardPlan) -> str:
    """The plan in words: a summary, then a block per group."""
    return "\n".join(_lines(plan))


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
