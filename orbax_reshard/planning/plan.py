"""The plan of a restore: a value that says what will be read, by whom, and why.

Plans are made by ``planner.build_plan``, compared between hosts by their digest, and
executed by ``engine.pipeline``. They hold no devices and no files, so that one can be
made, printed and stored for a machine that is not here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass
from typing import Literal

from orbax_reshard.planning import explain
from orbax_reshard.planning.candidates import GroupShape
from orbax_reshard.planning.digits import DeviceMesh, DigitMesh
from orbax_reshard.planning.layout import Intermediate, Step
from orbax_reshard.planning.profile import HardwareProfile
from orbax_reshard.planning.record import Record
from orbax_reshard.planning.stored import StoredArray

Policy = Literal["auto", "read_once", "direct"]
POLICIES: tuple[Policy, ...] = ("auto", "read_once", "direct")
Spec = tuple[tuple[str, ...], ...]


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
            *(s.shape, s.dtype, s.chunk_shape, s.dtype_bytes, s.stock_reads_gaps),
            *(self.mesh, self.spec),
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


def wave_bytes_per_host(group: GroupPlan) -> int:
    """Host memory that the blocks of one wave take on the busiest host."""
    if group.intermediate is None or group.digits is None or group.shape is None:
        return 0
    block = math.prod(group.intermediate.piece_width) * group.shape.moved_bytes
    return block * group.digits.mesh.devices_per_host
