"""Turns what the hosts said at the last meeting into one report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from orbax_reshard.engine.read import ByteBudget
from orbax_reshard.engine.report import RestoreReport
from orbax_reshard.engine.work import Work
from orbax_reshard.planning.plan import GroupPlan, LeafPlan, RestorePlan
from orbax_reshard.planning.record import Record


def host_word(
    work: Work,
    planned_bytes: int,
    direct_bytes: int,
    sizes: Mapping[int, Sequence[int]],
) -> dict[str, object]:
    """What one host tells the others about its part, and of the chunks it asked for."""
    return {
        "planned_bytes": planned_bytes,
        "direct_bytes": direct_bytes,
        "chunks": work.counter.chunks,
        "chunks_by_leaf": {str(k): v for k, v in work.counter.by_leaf.items()},
        "sizes": {str(k): list(v) for k, v in sizes.items()},
        "collectives": dict(work.collectives),
        "seconds": work.read_seconds + work.exchange_seconds,
    }


def all_sizes(words: Mapping[int, Mapping[str, Any]]) -> dict[int, tuple[int, ...]]:
    """The stored chunk sizes that the hosts found out together, by leaf index."""
    return {
        int(index): tuple(sizes)
        for word in words.values()
        for index, sizes in word["sizes"].items()
    }


def build_report(
    *,
    plan: RestorePlan,
    words: Mapping[int, Mapping[str, Any]],
    work: Work,
    metadata_bytes: int,
    seconds: float,
    plan_seconds: float,
    num_compiled: int,
    budget: ByteBudget,
    budget_source: str,
) -> RestoreReport:
    """One report from the plan and the words of all hosts."""
    hosts = tuple(sorted(words))
    planned = [int(words[h]["planned_bytes"]) for h in hosts]
    direct = [int(words[h]["direct_bytes"]) for h in hosts]
    measured = Record(
        hosts=hosts,
        chunk_reads_per_host=tuple(int(words[h]["chunks"]) for h in hosts),
        fetched_bytes_per_host=tuple(planned),
        collectives=tuple(sorted(work.collectives.items())),
        received_bytes_per_device=plan.forecast.received_bytes_per_device,
        seconds=seconds,
    )
    return RestoreReport(
        leaves=_measured_leaves(plan, words),
        hosts=hosts,
        fetched_bytes_per_host=tuple(
            a + b for a, b in zip(planned, direct, strict=True)
        ),
        needed_bytes=_needed(plan.planned, sum(planned), measured.chunk_reads)
        + sum(g.needed_bytes for g in plan.groups if g.decision == "direct"),
        needed_bytes_exact=all(
            g.needed_bytes_exact for g in plan.groups if g.decision == "direct"
        ),
        forecast=plan.forecast,
        measured=measured,
        metadata_bytes=metadata_bytes,
        seconds=seconds,
        read_seconds=work.read_seconds,
        exchange_seconds=work.exchange_seconds,
        compile_seconds=work.compile_seconds,
        plan_seconds=plan_seconds,
        num_programs=len(work.programs),
        num_compiled=num_compiled,
        read_budget_bytes=budget.max_bytes,
        read_budget_source=budget_source,
        peak_read_bytes=budget.peak_bytes,
        profile=plan.profile.name,
        policy=plan.policy,
    )


def _needed(groups: Sequence[GroupPlan], fetched_bytes: int, chunk_reads: int) -> int:
    """Stored bytes of the chunks that the planned groups needed.

    Exact where the plan knew the stored sizes. Elsewhere (compressed chunks outside
    OCDBT, where a chunk is a file and is fetched whole) the fetched bytes, divided by
    how often each chunk was read.
    """
    if all(g.needed_bytes_exact for g in groups) or not chunk_reads:
        return sum(g.needed_bytes for g in groups)
    return round(fetched_bytes * sum(g.needed_chunks for g in groups) / chunk_reads)


def _measured_leaves(
    plan: RestorePlan, words: Mapping[int, Mapping[str, Any]]
) -> tuple[LeafPlan, ...]:
    """The plan's leaves with the chunks that were really read for each."""
    hosts = tuple(sorted(words))
    made: list[LeafPlan] = []
    for index, leaf in enumerate(plan.leaves):
        group = plan.groups[leaf.group]
        if leaf.decision == "direct" or group.shape is None:
            made.append(leaf)
            continue
        chunks = tuple(
            int(words[h]["chunks_by_leaf"].get(str(index), 0)) for h in hosts
        )
        record = Record(
            hosts=hosts,
            chunk_reads_per_host=chunks,
            fetched_bytes_per_host=tuple(n * group.shape.chunk_bytes for n in chunks),
            bytes_are_exact=False,
            collectives=leaf.forecast.collectives if leaf.forecast else (),
        )
        made.append(replace(leaf, measured=record))
    return tuple(made)
