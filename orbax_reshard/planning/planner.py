"""Makes plans: one decision per signature, from the arguments alone.

No clock, no environment, no hash order, no files: every host computes the same plan
without talking.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import numpy as np

from orbax_reshard.errors import OptionsError
from orbax_reshard.planning import explain
from orbax_reshard.planning.boxes import ceil_div
from orbax_reshard.planning.candidates import (
    Candidate,
    GroupShape,
    Search,
    target_intermediate,
    with_shape,
)
from orbax_reshard.planning.digits import DigitMesh, factorise
from orbax_reshard.planning.layout import Intermediate, Step, rotated
from orbax_reshard.planning.plan import (
    POLICIES,
    GroupPlan,
    LeafPlan,
    LeafRequest,
    Policy,
    RestorePlan,
    partial_wave,
)
from orbax_reshard.planning.profile import HardwareProfile
from orbax_reshard.planning.reads import Reads, count_reads
from orbax_reshard.planning.record import Record, sum_records

# What a host holds of one wave unless a read budget says less. Large enough that
# latencies vanish, small enough that the waves of a model of some gigabytes overlap.
DEFAULT_WAVE_BYTES = 32 * 2**20

# Leaves of one wave: each is an output of the program, and XLA compiles them one by
# one (20 to 30 ms each on one core for the CPU backend). More are taken only where
# leaves of one chunk have to keep as many hosts busy.
MAX_WAVE_LEAVES = 8
MAX_WAVE_LEAVES_OF_MANY_HOSTS = 256

# The forecast of a plan must be below this part of the forecast of reading directly,
# else the plan declines: forecasts are not that exact.
COST_MARGIN = 0.9


def build_plan(
    requests: Sequence[LeafRequest],
    *,
    policy: Policy,
    profile: HardwareProfile,
    read_budget_bytes: int | None = None,
    device_budget_bytes: int | None = None,
) -> RestorePlan:
    """Plans a restore.

    Args:
        requests: the leaves, in the order that all hosts share.
        policy: ``"auto"`` ranks by forecast seconds and declines what is not faster,
            ``"read_once"`` by fetched bytes, ``"direct"`` declines everything.
        profile: the rates of the machine.
        read_budget_bytes: bound on a host's bytes in flight; waves are sized to it.
        device_budget_bytes: inclusive bound on a device's bytes in a wave.

    Raises:
        OptionsError: an unknown policy.
    """
    if policy not in POLICIES:
        raise OptionsError(
            f"policy is {policy!r}; it must be one of {', '.join(POLICIES)}",
            code="unknown_policy",
        )
    members: dict[tuple[object, ...], list[int]] = {}
    for index, request in enumerate(requests):
        members.setdefault(request.signature, []).append(index)
    groups: list[GroupPlan] = []
    turn = 0
    for leaves in members.values():
        group = _plan_group(
            requests,
            tuple(leaves),
            policy=policy,
            profile=profile,
            turn=turn,
            wave_bytes=min(DEFAULT_WAVE_BYTES, (read_budget_bytes or 2**62) // 2),
            device_budget_bytes=device_budget_bytes,
        )
        if group.intermediate is not None and any(_padding(group.intermediate, group)):
            turn += 1
        groups.append(group)
    hosts = sorted({h for r in requests if r.mesh is not None for h in r.mesh.host_ids})
    planned = [g for g in groups if g.decision == "planned"]
    return RestorePlan(
        leaves=_leaf_plans(requests, groups),
        groups=tuple(groups),
        hosts=tuple(hosts),
        policy=policy,
        profile=profile,
        forecast=sum_records([g.forecast for g in planned if g.forecast]),
        stock=sum_records([g.stock for g in planned if g.stock]),
        needed_bytes=sum(g.needed_bytes for g in planned),
    )


def _padding(intermediate: Intermediate, group: GroupPlan) -> list[bool]:
    """Per dimension whether rounding up leaves hosts with less than their share."""
    assert group.digits is not None
    return [
        group.digits.num_parts(intermediate.cross_extras(dim, group.digits)) * host
        > width
        for dim, (host, width) in enumerate(
            zip(intermediate.host_width, intermediate.shard_width, strict=True)
        )
    ]


def _plan_group(
    requests: Sequence[LeafRequest],
    leaves: tuple[int, ...],
    *,
    policy: Policy,
    profile: HardwareProfile,
    turn: int,
    wave_bytes: int,
    device_budget_bytes: int | None,
) -> GroupPlan:
    """Decides for the leaves of one signature."""
    first = requests[leaves[0]]
    stored = first.stored
    sizes = [requests[i].stored.encoded_bytes for i in leaves]
    nominal = stored.num_chunks * stored.chunk_bytes
    declined = GroupPlan(
        leaves=leaves,
        decision="direct",
        reason=first.declined or "policy_direct",
        wave_size=len(leaves),
        shape=None,
        digits=None,
        intermediate=None,
        steps=(),
        peak_device_bytes=0,
        forecast=None,
        stock=None,
        needed_bytes=sum(nominal if s is None else sum(s) for s in sizes),
        needed_chunks=stored.num_chunks * len(leaves),
        needed_bytes_exact=all(s is not None for s in sizes),
    )
    if first.declined is not None or first.mesh is None:
        return declined
    digits = factorise(first.mesh)
    group = GroupShape(
        shape=(1, *stored.shape),
        chunk_shape=(1, *stored.chunk_shape),
        element_bytes=stored.dtype_bytes,
        moved_bytes=first.moved_bytes,
        target=((), *digits.layout(first.spec)),
    )
    try:
        direct = count_reads(
            target_intermediate(group, digits), group.chunk_shape, digits
        )
    except ValueError:
        return dataclasses.replace(declined, reason="irregular_mesh_too_large")
    # Where stored sizes are known, stock is told in stored bytes too: the mean chunk.
    mean_bytes = declined.needed_bytes / max(1, declined.needed_chunks)
    stock = _record(
        digits, direct.box_chunks, len(leaves), mean_bytes, None, {}, profile
    )
    declined = dataclasses.replace(declined, digits=digits, forecast=stock, stock=stock)
    if policy == "direct":
        return declined
    found = _search(
        group,
        digits,
        len(leaves),
        wave_bytes // max(1, ceil_div(stored.decoded_bytes, len(digits.mesh.host_ids))),
        profile,
        device_budget_bytes,
        "fetched" if policy == "read_once" else "seconds",
    )
    if found is None:
        return dataclasses.replace(declined, reason="device_budget")
    wave, best = found
    steps = best.intermediate.steps(digits)
    if policy == "read_once":
        keeps = sum(direct.box_chunks) * wave.shape[0] <= best.total_chunks
        reason = "not_fewer_bytes" if keeps else "reads_once"
    else:
        keeps = not _is_faster(best, wave, len(leaves), bool(steps), digits, profile)
        reason = "not_faster" if keeps else "faster"
    if keeps and sum(direct.box_chunks) == stored.num_chunks:
        reason = "already_read_once"
    if keeps and stored.stock_reads_gaps and _has_gaps(direct, stored.num_chunks):
        # The same chunks as stock, by this reader: nothing is exchanged, and the gaps
        # between a host's chunks stay where they are.
        own = target_intermediate(wave, digits)
        best = Search(wave, digits, profile, None).candidate(own)
        steps, keeps, reason = (), False, "reads_no_gaps"
    if keeps:
        return dataclasses.replace(declined, reason=reason)
    chosen = rotated(best.intermediate, turn, digits)
    return dataclasses.replace(
        declined,
        decision="planned",
        reason=reason,
        wave_size=wave.shape[0],
        shape=wave,
        intermediate=chosen,
        steps=steps,
        peak_device_bytes=best.exchange.peak_bytes,
        forecast=_planned_record(wave, chosen, steps, digits, sizes, best, profile),
    )


def _is_faster(
    best: Candidate,
    wave: GroupShape,
    num_leaves: int,
    compiles: bool,
    digits: DigitMesh,
    profile: HardwareProfile,
) -> bool:
    """Whether the forecast of a plan beats that of reading directly by the margin."""
    seconds = best.seconds * ceil_div(num_leaves, wave.shape[0])
    if compiles:
        seconds += max(0.0, profile.compile_seconds - seconds)
    all_leaves = with_shape(wave, num_leaves)
    direct = Search(all_leaves, digits, profile, None).candidate(
        target_intermediate(all_leaves, digits)
    )
    return seconds < COST_MARGIN * direct.seconds


def _has_gaps(direct: Reads, num_chunks: int) -> bool:
    """Whether some host leaves chunks out that others read."""
    return len(direct.chunks) > 1 and min(direct.chunks) < num_chunks


def _search(
    group: GroupShape,
    digits: DigitMesh,
    num_leaves: int,
    leaves_in_room: int,
    profile: HardwareProfile,
    device_budget_bytes: int | None,
    objective: Literal["fetched", "seconds"],
) -> tuple[GroupShape, Candidate] | None:
    """The best candidate with the largest waves that all bounds allow."""
    hosts = len(digits.mesh.host_ids)
    most = max(MAX_WAVE_LEAVES, min(hosts, MAX_WAVE_LEAVES_OF_MANY_HOSTS))
    size = max(1, min(num_leaves, leaves_in_room, most))
    bound = device_budget_bytes
    found: tuple[GroupShape, Candidate] | None = None
    least = (math.inf, math.inf)
    free = math.inf
    while True:
        size = ceil_div(num_leaves, ceil_div(num_leaves, size))
        wave = with_shape(group, size)
        best = Search(wave, digits, profile, bound).best(objective)
        if best is not None and _rank(best, wave, num_leaves, objective) < least:
            least = _rank(best, wave, num_leaves, objective)
            found = wave, best
        # Under a bound, half the leaves may fit an exchange that all of them do not.
        if bound is not None and math.isinf(free):
            unbound = Search(wave, digits, profile, None).best(objective)
            assert unbound is not None
            free = _rank(unbound, wave, num_leaves, objective)[0]
        if bound is None or size == 1 or least[0] <= free:
            return found
        size //= 2


def _rank(
    candidate: Candidate,
    wave: GroupShape,
    num_leaves: int,
    objective: Literal["fetched", "seconds"],
) -> tuple[float, float]:
    """What candidates of different wave sizes are compared by; less is better."""
    count = wave.shape[0]
    seconds = candidate.seconds * ceil_div(num_leaves, count)
    if objective == "fetched":
        return candidate.total_chunks / count, seconds
    return seconds, 0.0


def _planned_record(
    wave: GroupShape,
    intermediate: Intermediate,
    steps: Sequence[Step],
    digits: DigitMesh,
    sizes: Sequence[tuple[int, ...] | None],
    best: Candidate,
    profile: HardwareProfile,
) -> Record:
    """Reads and collectives of all waves of a planned group."""
    count = wave.shape[0]
    exact = all(s is not None for s in sizes)
    totals: list[Reads] = []
    for start in range(0, len(sizes), count):
        part = sizes[start : start + count]
        encoded = (
            np.asarray(part, np.int64).reshape(len(part), *wave.grid_shape[1:])
            if exact
            else None
        )
        totals.append(
            count_reads(
                partial_wave(intermediate, len(part)),
                wave.chunk_shape,
                digits,
                encoded,
            )
        )
    chunks = [sum(column) for column in zip(*(r.chunks for r in totals), strict=True)]
    known = [r.encoded_bytes for r in totals if r.encoded_bytes is not None]
    stored = [sum(column) for column in zip(*known, strict=True)] if exact else None
    kinds = Counter(s.hlo_name for s in steps if s.kind != "slice")
    return _record(
        digits,
        chunks,
        1,
        wave.chunk_bytes,
        stored,
        {k: n * len(totals) for k, n in kinds.items()},
        profile,
        seconds=best.seconds * len(totals),
        received=(best.exchange.in_host_bytes + best.exchange.cross_host_bytes)
        * len(totals),
    )


def _record(
    digits: DigitMesh,
    chunks: Sequence[int],
    times: int,
    chunk_bytes: float,
    stored: Sequence[int] | None,
    collectives: dict[str, int],
    profile: HardwareProfile,
    seconds: float | None = None,
    received: int = 0,
) -> Record:
    """A record from per-host chunk counts."""
    hosts = digits.mesh.host_ids
    fetched = stored
    if fetched is None:
        fetched = [round(n * times * chunk_bytes) for n in chunks]
    if seconds is None:
        seconds = max(fetched) / profile.storage_bytes_per_second
    return Record(
        hosts=hosts,
        chunk_reads_per_host=tuple(n * times for n in chunks),
        fetched_bytes_per_host=tuple(fetched),
        bytes_are_exact=stored is not None,
        collectives=tuple(sorted(collectives.items())),
        received_bytes_per_device=received,
        seconds=seconds,
    )


def _leaf_plans(
    requests: Sequence[LeafRequest], groups: Sequence[GroupPlan]
) -> tuple[LeafPlan, ...]:
    """One decision per leaf, in the order of the requests."""
    made: dict[int, LeafPlan] = {}
    for number, group in enumerate(groups):
        forecast = group.forecast and group.forecast.share(len(group.leaves))
        for index in group.leaves:
            request = requests[index]
            made[index] = LeafPlan(
                name=request.stored.name,
                decision=group.decision,
                reason=group.reason,
                shape=request.stored.shape,
                dtype=request.stored.dtype,
                chunk_shape=request.stored.chunk_shape,
                num_chunks=request.stored.num_chunks,
                intermediate_spec=explain.layout_text(group),
                target_spec=request.target_text or explain.spec_text(request.spec),
                group=number,
                forecast=forecast,
            )
    return tuple(made[i] for i in range(len(requests)))
