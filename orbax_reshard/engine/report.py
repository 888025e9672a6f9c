"""What a restore did, beside what its plan said it would do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from orbax_reshard.planning.explain import bytes_text, ratio, record_dict
from orbax_reshard.planning.plan import LeafPlan
from orbax_reshard.planning.record import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport:
    """The proof of a restore.

    Figures are of all hosts that took part, where hosts met; a restore that went to
    stock whole (``policy="direct"``) knows only its own host, and says so in
    ``hosts``.

    Attributes:
        leaves: decision, reason, layouts, forecast and measurement per leaf.
        hosts: process indices that the figures cover, ascending.
        fetched_bytes_per_host: bytes from storage while array data was read,
            from TensorStore's own counters; hosts in that order.
        needed_bytes: stored bytes of the chunks that were needed.
        needed_bytes_exact: False when the decoded size of direct leaves stands in:
            outside OCDBT, and when ``auto`` or ``direct`` left all to stock, because
            such a restore shall cost what stock costs.
        forecast: of the planned leaves, from the plan.
        measured: of the planned leaves. Chunk reads are counted by the reader,
            bytes come from TensorStore's counters, collectives from compiled HLO.
        metadata_bytes: bytes fetched on this host while arrays were opened.
        seconds: wall time on this host.
        read_seconds: until this host's last planned byte was in.
        exchange_seconds: in meetings and programs on this host.
        compile_seconds: spent compiling on this host, mostly behind reads.
        plan_seconds: spent planning on this host.
        num_programs: distinct exchange programs launched.
        num_compiled: programs compiled by this restore; 0 when all were cached.
        read_budget_bytes: the bound in use on bytes in flight; None for no bound.
        read_budget_source: where that bound came from.
        peak_read_bytes: most bytes in flight on this host.
        profile: name of the hardware profile.
        policy: the policy that was asked.
    """

    leaves: tuple[LeafPlan, ...]
    hosts: tuple[int, ...]
    fetched_bytes_per_host: tuple[int, ...]
    needed_bytes: int
    needed_bytes_exact: bool
    forecast: Record
    measured: Record
    metadata_bytes: int
    seconds: float
    read_seconds: float
    exchange_seconds: float
    compile_seconds: float
    plan_seconds: float
    num_programs: int
    num_compiled: int
    read_budget_bytes: int | None
    read_budget_source: str
    peak_read_bytes: int
    profile: str
    policy: str

    @classmethod
    def of_stock(
        cls,
        *,
        names: Sequence[str],
        reason: str,
        host: int,
        fetched_bytes: int,
        seconds: float,
    ) -> RestoreReport:
        """The report of a restore that went to stock whole, without a plan."""
        leaf = LeafPlan(
            name="",
            decision="direct",
            reason=reason,
            shape=(),
            dtype="",
            chunk_shape=(),
            num_chunks=0,
            intermediate_spec=None,
            target_spec="",
            group=0,
            forecast=None,
        )
        return cls(
            leaves=tuple(replace(leaf, name=name) for name in names),
            hosts=(host,),
            fetched_bytes_per_host=(fetched_bytes,),
            needed_bytes=0,
            needed_bytes_exact=False,
            forecast=Record(),
            measured=Record(),
            metadata_bytes=0,
            seconds=seconds,
            read_seconds=seconds,
            exchange_seconds=0.0,
            compile_seconds=0.0,
            plan_seconds=0.0,
            num_programs=0,
            num_compiled=0,
            read_budget_bytes=None,
            read_budget_source="stock",
            peak_read_bytes=0,
            profile="",
            policy="direct",
        )

    @property
    def fetched_bytes(self) -> int:
        """Bytes fetched from storage by the hosts that the report covers."""
        return sum(self.fetched_bytes_per_host)

    @property
    def amplification(self) -> float:
        """Fetched over needed bytes of all leaves; 1.0 is perfect."""
        return ratio(self.fetched_bytes, self.needed_bytes)

    @property
    def collectives(self) -> dict[str, int]:
        """Collectives launched, by HLO name."""
        return dict(self.measured.collectives)

    @property
    def reasons(self) -> dict[str, int]:
        """How many leaves were decided for which reason."""
        counts: dict[str, int] = {}
        for leaf in self.leaves:
            counts[leaf.reason] = counts.get(leaf.reason, 0) + 1
        return counts

    def summary(self) -> str:
        """One line for the log."""
        planned = sum(leaf.decision == "planned" for leaf in self.leaves)
        reasons = ", ".join(f"{n} {reason}" for reason, n in self.reasons.items())
        return (
            f"restored {len(self.leaves)} leaves in {self.seconds:.2f} s, {planned} of "
            f"them read once ({reasons}): fetched {bytes_text(self.fetched_bytes)} for "
            f"{bytes_text(self.needed_bytes)} needed on host(s) "
            f"{', '.join(map(str, self.hosts))}, amplification "
            f"{self.amplification:.2f}; {self.num_programs} program(s), "
            f"{self.num_compiled} compiled"
        )

    def __str__(self) -> str:
        """The summary, then a line per decision."""
        return self.summary()

    def to_json(self) -> str:
        """All figures as JSON with sorted keys."""
        plain = {name: getattr(self, name) for name in self.__slots__}
        plain["leaves"] = [
            {
                "name": leaf.name,
                "decision": leaf.decision,
                "reason": leaf.reason,
                "intermediate": leaf.intermediate_spec,
                "target": leaf.target_spec,
                "forecast": record_dict(leaf.forecast),
                "measured": record_dict(leaf.measured),
            }
            for leaf in self.leaves
        ]
        plain["forecast"] = record_dict(self.forecast)
        plain["measured"] = record_dict(self.measured)
        plain["fetched_bytes"] = self.fetched_bytes
        plain["amplification"] = self.amplification
        return json.dumps(plain, sort_keys=True)
