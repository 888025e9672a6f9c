"""Plans and layouts as text and as plain dictionaries; no decisions are made here."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orbax_reshard.planning.digits import DigitMesh
    from orbax_reshard.planning.layout import Step
    from orbax_reshard.planning.plan import GroupPlan, RestorePlan
    from orbax_reshard.planning.record import Record

# What each reason code means to a reader; tests check that no code is missing.
REASONS = {
    "reads_once": "read once and exchange: fewer bytes from storage",
    "faster": "read once and exchange: forecast to be faster",
    "already_read_once": "the target's shards already read every chunk once",
    "reads_no_gaps": "the same chunks as stock, without the gaps that stock reads",
    "not_fewer_bytes": "no exchange fetches fewer bytes than reading directly",
    "not_faster": "reading directly is forecast to be as fast",
    "policy_direct": "the policy asks for stock reads",
    "device_budget": "no exchange fits the device budget",
    "irregular_mesh_too_large": "the device order mixes hosts on a very large mesh",
    "not_named_sharding": "the target is no NamedSharding over a concrete mesh",
    "single_device": "the target is one device",
    "custom_layout": "the target asks for a device-local layout",
    "memory_kind": "the target is not in the device's default memory",
    "dtype_not_carried": "collectives do not carry this dtype",
    "shape_differs": "padding or truncation was asked for",
    "empty_array": "the array has no elements",
    "driver_not_planned": "the storage driver is not one that is planned for",
    "dispatcher": "the handler runs through a dispatcher",
}


def ratio(part: float, whole: float) -> float:
    """``part / whole``, and 1.0 for nothing out of nothing."""
    return part / whole if whole else 1.0


def bytes_text(count: float) -> str:
    """Bytes for people, in binary units.

    >>> bytes_text(62 * 2**20)
    '62.0 MiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def spec_text(spec: Sequence[Sequence[str]]) -> str:
    """A partition spec as it is written in code.

    >>> spec_text((("data", "fsdp"), (), ("tensor",)))
    "P(('data', 'fsdp'), None, 'tensor')"
    """
    parts = [
        "None" if not axes else repr(axes[0]) if len(axes) == 1 else repr(tuple(axes))
        for axes in spec
    ]
    return f"P({', '.join(parts)})"


def digits_text(run: Sequence[int], digits: DigitMesh) -> list[str]:
    """Digits by the mesh axes that they come from.

    A whole axis is its name; a part of one is ``name[factors]``, for example
    ``fsdp[2,2]`` or, when the factors are a suffix or prefix, the same.
    """
    names: list[str] = []
    for axis, group in itertools.groupby(run, lambda d: digits.axis_of[d]):
        own = list(group)
        name = digits.mesh.axis_names[axis]
        if tuple(own) == digits.digits_of_axis(name):
            names.append(name)
        else:
            names.append(f"{name}[{','.join(str(digits.sizes[d]) for d in own)}]")
    return names


def layout_text(group: GroupPlan) -> str | None:
    """The intermediate as a spec; the group dimension stands first, as ``leaves=``."""
    if group.intermediate is None or group.digits is None:
        return None
    spec = [digits_text(run, group.digits) for run in group.intermediate.layout]
    text = spec_text(spec[1:])
    return f"leaves={'+'.join(spec[0])} {text}" if spec[0] else text


def steps_text(steps: Sequence[Step], digits: DigitMesh) -> str:
    """The exchange as a line.

    Reads like ``all_to_all fsdp (dim 1 -> 0), all_gather data``; dimensions count
    without the group dimension, which is called ``leaves``.
    """

    def dim(index: int) -> str:
        return "leaves" if index == 0 else f"dim {index - 1}"

    words: list[str] = []
    for step in steps:
        names = "+".join(digits_text(step.digits, digits))
        if step.kind == "all_to_all" and step.donor is not None:
            words.append(
                f"all_to_all {names} ({dim(step.receivers[0])} to {dim(step.donor)})"
            )
        else:
            words.append(f"{step.kind} {names}")
    return ", ".join(words) or "none"


def _record_dict(record: Record | None) -> dict[str, Any] | None:
    if record is None:
        return None
    plain = dataclasses.asdict(record)
    plain["collectives"] = dict(record.collectives)
    plain["fetched_bytes"] = record.fetched_bytes
    plain["chunk_reads"] = record.chunk_reads
    return plain


def record_dict(record: Record | None) -> dict[str, Any] | None:
    """A record as JSON-ready values, totals included."""
    return _record_dict(record)


def as_dict(plan: RestorePlan) -> dict[str, Any]:
    """A plan as JSON-ready values; everything that hosts must agree on is in it."""
    return {
        "policy": plan.policy,
        "profile": plan.profile.name,
        "hosts": list(plan.hosts),
        "needed_bytes": plan.needed_bytes,
        "amplification": plan.amplification,
        "forecast": _record_dict(plan.forecast),
        "stock": _record_dict(plan.stock),
        "leaves": [
            {
                "name": leaf.name,
                "decision": leaf.decision,
                "reason": leaf.reason,
                "shape": list(leaf.shape),
                "dtype": leaf.dtype,
                "chunk_shape": list(leaf.chunk_shape),
                "intermediate": leaf.intermediate_spec,
                "target": leaf.target_spec,
                "group": leaf.group,
            }
            for leaf in plan.leaves
        ],
        "groups": [_group_dict(group) for group in plan.groups],
    }


def _group_dict(group: GroupPlan) -> dict[str, Any]:
    inter = group.intermediate
    return {
        "leaves": list(group.leaves),
        "decision": group.decision,
        "reason": group.reason,
        "wave_size": group.wave_size,
        "mesh": None if group.digits is None else group.digits.mesh.digest,
        "layout": None if inter is None else [list(d) for d in inter.layout],
        "piece_width": None if inter is None else list(inter.piece_width),
        "host_width": None if inter is None else list(inter.host_width),
        "rotation": None if inter is None else list(inter.rotation),
        "steps": [
            {"kind": s.kind, "digits": list(s.digits), "receivers": list(s.receivers)}
            for s in group.steps
        ],
        "peak_device_bytes": group.peak_device_bytes,
        "needed_bytes": group.needed_bytes,
        "needed_chunks": group.needed_chunks,
        "forecast": _record_dict(group.forecast),
        "stock": _record_dict(group.stock),
    }


def explain(plan: RestorePlan) -> str:
    """The plan in words: a summary, then a block per group."""
    return "\n".join(_lines(plan))


def _lines(plan: RestorePlan) -> Iterator[str]:
    planned = sum(leaf.decision == "planned" for leaf in plan.leaves)
    yield (
        f"Restore plan, policy {plan.policy}, {len(plan.leaves)} leaves on "
        f"{len(plan.hosts)} host(s): {planned} read once, "
        f"{len(plan.leaves) - planned} direct."
    )
    if planned:
        stock = ratio(plan.stock.fetched_bytes, plan.needed_bytes)
        yield (
            f"Read once: {bytes_text(plan.forecast.fetched_bytes)} fetched for "
            f"{bytes_text(plan.needed_bytes)} needed, amplification "
            f"{plan.amplification:.2f} (stock up to {stock:.2f}); "
            f"{plan.num_programs} exchange program(s)."
        )
    for number, group in enumerate(plan.groups):
        names = [plan.leaves[i].name for i in group.leaves]
        first = plan.leaves[group.leaves[0]]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield ""
        yield (
            f"[{number}] {names[0]}{more}: {first.dtype}{list(first.shape)} in "
            f"{first.num_chunks} chunk(s) of {list(first.chunk_shape)}"
        )
        yield f"    decision      {group.decision}: {REASONS[group.reason]}"
        yield f"    target        {first.target_spec}"
        if group.digits is None or group.forecast is None:
            continue
        if group.intermediate is not None:
            yield f"    intermediate  {first.intermediate_spec}"
            yield f"    exchange      {steps_text(group.steps, group.digits)}"
            yield (
                f"    waves         {len(group.waves)} of {group.wave_size}, peak "
                f"{bytes_text(group.peak_device_bytes)} per device"
            )
        per_host = group.forecast.fetched_bytes_per_host
        up_to = "" if group.decision == "planned" else "up to "
        yield (
            f"    fetched       {up_to}{bytes_text(group.forecast.fetched_bytes)} for "
            f"{bytes_text(group.needed_bytes)} needed; per host "
            f"{bytes_text(min(per_host))} to {bytes_text(max(per_host))}"
        )
