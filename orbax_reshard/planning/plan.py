"""The plan of a restore: a value that says what will be read, by whom, and why.

``build_plan`` is a function of its arguments only: no clock, no environment, no hash
order, no files. Every host computes the same plan without talking, and a plan can be
made for a machine that is not here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
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
from orbax_reshard.planning.digits import DeviceMesh, DigitMesh, factorise
from orbax_reshard.planning.layout import Intermediate, Step, rotated
from orbax_reshard.planning.profile import HardwareProfile
from orbax_reshard.planning.reads import Reads, count_reads
from orbax_reshard.planning.record import Record, sum_records
from orbax_reshard.planning.stored import StoredArray

Policy = Literal["auto", "read_once", "direct"]
POLICIES: tuple[Policy, ...] = ("auto", "read_once", "direct")
Spec = tuple[tuple[str, ...], ...]

# What a host holds of one wave unless a read budget says less. Large enough that
# latencies vanish, small enough that the waves of a model of some gigabytes overlap.
DEFAULT_WAVE_BYTES = 32 * 2**20

# Leaves of one wave: each is an output of the program, and XLA compiles them one by
# one (30 ms each on one core for the CPU backend: 0.4 s for 12, 1.6 s for 48). More
# are taken only where leaves of one chunk have to keep as many hosts busy.
MAX_WAVE_LEAVES = 16
MAX_WAVE_LEAVES_OF_MANY_HOSTS = 256

# The forecast of a plan must be below this part of the forecast of reading directly,
# else the plan declines: forecasts are not that exact.
COST_MARGIN = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafRequest:
    """One leaf that was asked for.

    Attributes:
        stored: what is on disk.
        mesh: the target's mesh, or None when ``declined`` says why there is none.
        spec: mesh axes per dimension, as long as the array has dimensions.
        dtype: name of the dtype that the caller gets.
        moved_bytes: bytes of one element on the device.
        kind: memory kind of the target, part of the signature.
        declined: reason code why this leaf must be read directly, or None.
        target_text: the target as the report shows it.
    """

    stored: StoredArray
    mesh: DeviceMesh | None
    spec: Spec
    dtype: str
    moved_bytes: int
    kind: str | None = None
    declined: str | None = None
    target_text: str = ""

    @property
    def signature(self) -> tuple[object, ...]:
        """Leaves of one signature are planned, compiled and exchanged together."""
        s = self.stored
        return (
            *(s.shape, s.dtype, s.chunk_shape, s.dtype_bytes, self.mesh, self.spec),
            *(self.dtype, self.moved_bytes, self.kind, self.declined),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafPlan:
    """The decision for one leaf.

    Attributes:
        name: the leaf's name in the checkpoint.
        decision: ``"planned"`` or ``"direct"``.
        reason: why it was decided so, a stable code (see docs/declines.md).
        shape: stored shape, elements.
        dtype: stored dtype.
        chunk_shape: stored chunk grid, elements per chunk.
        num_chunks: chunks in that grid.
        intermediate_spec: what hosts read, or None when direct.
        target_spec: what was asked.
        group: index into ``RestorePlan.groups``.
        forecast: this leaf's part of the group's forecast, or None when unknown.
        measured: the same, measured; None before a restore.
    """

    name: str
    decision: Literal["planned", "direct"]
    reason: str
    shape: tuple[int, ...]
    dtype: str
    chunk_shape: tuple[int, ...]
    num_chunks: int
    intermediate_spec: str | None
    target_spec: str
    group: int
    forecast: Record | None
    measured: Record | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """Leaves of one signature, restored in waves of equal size by one program.

    Attributes:
        leaves: indices of the leaves, ascending.
        decision: ``"planned"`` or ``"direct"``.
        reason: a stable code.
        wave_size: leaves per wave; the last wave may be padded.
        shape: the wave as one array, None when direct.
        digits: the target's mesh in digits, None when direct without a mesh.
        intermediate: what hosts read, None when direct.
        steps: the exchange of one wave.
        peak_device_bytes: bound on a device's bytes during a wave.
        forecast: reads and collectives of all waves, None when unknown.
        stock: what reading directly would fetch, None when unknown.
        needed_bytes: stored bytes of the chunks that are needed.
        needed_chunks: those chunks.
        needed_bytes_exact: False when decoded sizes stand in for stored ones.
    """

    leaves: tuple[int, ...]
    decision: Literal["planned", "direct"]
    reason: str
    wave_size: int
    shape: GroupShape | None
    digits: DigitMesh | None
    intermediate: Intermediate | None
    steps: tuple[Step, ...]
    peak_device_bytes: int
    forecast: Record | None
    stock: Record | None
    needed_bytes: int
    needed_chunks: int
    needed_bytes_exact: bool

    @property
    def waves(self) -> list[tuple[int, ...]]:
        """The leaves of each wave, in order."""
        size = max(1, self.wave_size)
        return [self.leaves[i : i + size] for i in range(0, len(self.leaves), size)]

    @property
    def wave_intermediates(self) -> list[Intermediate]:
        """What hosts read of each wave: the last one may hold fewer leaves."""
        assert self.intermediate is not None
        return [partial_wave(self.intermediate, len(wave)) for wave in self.waves]

    @property
    def needs_program(self) -> bool:
        """False when blocks are read as the target wants them."""
        inter = self.intermediate
        return inter is not None and (bool(self.steps) or not inter.is_target)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorePlan:
    """What a restore will do.

    Attributes:
        leaves: a decision per leaf, in the order they were given.
        groups: leaves of one signature.
        hosts: the process indices that take part, ascending.
        policy: the policy that was asked.
        profile: the rates behind the forecast seconds.
        forecast: of all planned groups together.
        stock: what reading all planned groups directly would fetch.
        needed_bytes: stored bytes of the chunks of the planned groups.
    """

    leaves: tuple[LeafPlan, ...]
    groups: tuple[GroupPlan, ...]
    hosts: tuple[int, ...]
    policy: Policy
    profile: HardwareProfile
    forecast: Record
    stock: Record
    needed_bytes: int

    @property
    def planned(self) -> tuple[GroupPlan, ...]:
        """The groups that are read once and exchanged, in order of execution."""
        return tuple(g for g in self.groups if g.decision == "planned")

    @property
    def amplification(self) -> float:
        """Forecast bytes fetched by all hosts over the needed ones; 1.0 is perfect."""
        return explain.ratio(self.forecast.fetched_bytes, self.needed_bytes)

    @property
    def num_programs(self) -> int:
        """Distinct programs that the exchange needs: at most one per signature."""
        return sum(g.needs_program for g in self.planned)

    def explain(self) -> str:
        """The plan in words, a block per group; for people."""
        return explain.explain(self)

    def to_json(self) -> str:
        """The plan as JSON with sorted keys; equal plans give equal text."""
        return json.dumps(explain.as_dict(self), sort_keys=True, separators=(",", ":"))

    def digest(self) -> str:
        """SHA-256 of the JSON: what hosts compare before the first collective."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


def partial_wave(intermediate: Intermediate, count: int) -> Intermediate:
    """The same layout with only ``count`` real leaves; the others are padding."""
    return dataclasses.replace(
        intermediate,
        shape=(count, *intermediate.shape[1:]),
        shard_width=(count, *intermediate.shard_width[1:]),
    )


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
    waves = ceil_div(len(leaves), wave.shape[0])
    if policy == "read_once":
        keeps = sum(direct.box_chunks) * wave.shape[0] <= best.total_chunks
        reason = "already_read_once" if keeps else "reads_once"
    else:
        hidden = best.seconds * waves
        compiling = max(0.0, profile.compile_seconds - hidden) if steps else 0.0
        seconds = hidden + compiling
        plain = Search(with_shape(group, len(leaves)), digits, profile, None)
        direct_seconds = plain.candidate(
            target_intermediate(with_shape(group, len(leaves)), digits)
        ).seconds
        keeps = seconds >= COST_MARGIN * direct_seconds
        reason = "not_faster" if keeps else "faster"
        if sum(direct.box_chunks) * wave.shape[0] <= best.total_chunks:
            reason = "already_read_once"
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
    while True:
        size = ceil_div(num_leaves, ceil_div(num_leaves, size))
        wave = with_shape(group, size)
        best = Search(wave, digits, profile, device_budget_bytes).best(objective)
        if best is not None:
            return wave, best
        if size == 1:
            return None
        size //= 2


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


def wave_bytes_per_host(group: GroupPlan) -> int:
    """Host memory that the blocks of one wave take on the busiest host."""
    if group.intermediate is None or group.digits is None or group.shape is None:
        return 0
    block = math.prod(group.intermediate.piece_width) * group.shape.moved_bytes
    return block * group.digits.mesh.devices_per_host
