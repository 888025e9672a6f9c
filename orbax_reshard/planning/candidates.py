"""The intermediates worth having, in a fixed order, and the search over them.

The family is that of ``layout``: a kept prefix per dimension, and every other digit
either unused or an extra behind a complete dimension. Digits that are alike (same
origin, same size, same ``cross_host``) are counted and not permuted: which of two
equal replica digits goes where changes nothing that is counted.

What keeps the family small: a cross-host digit is always placed where some dimension
can take it, because left unused it makes two hosts read the same chunks; and a
dimension takes no more cross-host digits than it has chunks to give away, unless it
is the last resort.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from orbax_reshard.planning import cost as costs
from orbax_reshard.planning.boxes import ceil_div
from orbax_reshard.planning.digits import DigitMesh, Layout
from orbax_reshard.planning.layout import Intermediate, block_bytes, make_intermediate
from orbax_reshard.planning.profile import HardwareProfile
from orbax_reshard.planning.reads import Reads, count_reads, dim_reads

# A signature is searched at most this far, about 2 s on one core. The largest families
# met (256 leaves of rank 4, one axis of 128 on a dimension, 8,192 devices) have 40,000
# members after pruning; the later ones have dropped most of the target's digits.
MAX_CANDIDATES = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShape:
    """A wave of equal leaves as one array: dimension 0 counts the leaves.

    Attributes:
        shape: ``(leaves in a wave, *leaf shape)``, in elements.
        chunk_shape: ``(1, *leaf chunk shape)``: a leaf is never split by dimension 0.
        element_bytes: bytes of an element in storage, decoded.
        moved_bytes: bytes of an element while it is exchanged and on the device.
        target: the target's digits per dimension; none on dimension 0.
    """

    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    element_bytes: int
    moved_bytes: int
    target: Layout

    @property
    def grid_shape(self) -> tuple[int, ...]:
        """Chunks per dimension."""
        return tuple(map(ceil_div, self.shape, self.chunk_shape))

    @property
    def num_chunks(self) -> int:
        """Chunks in the whole wave."""
        return math.prod(self.grid_shape)

    @property
    def chunk_bytes(self) -> int:
        """Decoded bytes of a chunk."""
        return math.prod(self.chunk_shape) * self.element_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An intermediate with all that ranks it.

    Attributes:
        intermediate: the layout under which hosts read.
        total_chunks: chunks read by all hosts together.
        max_host_chunks: chunks read by the busiest host.
        exchange: what a device does to reach the target.
        seconds: forecast for one wave.
    """

    intermediate: Intermediate
    total_chunks: int
    max_host_chunks: int
    exchange: costs.ExchangeCost
    seconds: float


@dataclass(frozen=True, slots=True)
class _Pool:
    """Digits that are alike: same origin, size and ``cross_host``."""

    digits: tuple[int, ...]
    cross_host: bool


def target_intermediate(group: GroupShape, digits: DigitMesh) -> Intermediate:
    """The target itself as an intermediate: nothing dropped, nothing placed."""
    return make_intermediate(
        shape=group.shape,
        chunk_shape=group.chunk_shape,
        target=group.target,
        digits=digits,
        num_kept=[len(t) for t in group.target],
        extras=((),) * len(group.shape),
    )


def intermediates(group: GroupShape, digits: DigitMesh) -> Iterator[Intermediate]:
    """All members of the family for a group, the target first, order fixed."""
    yield target_intermediate(group, digits)
    in_target = set(itertools.chain.from_iterable(group.target))
    replicas = [x for x in range(len(digits.sizes)) if x not in in_target]
    choices = [range(len(t), -1, -1) for t in group.target]
    keeps = sorted(
        itertools.product(*choices),
        key=lambda kept: sum(map(len, group.target)) - sum(kept),
    )
    for num_kept in keeps:
        pools = [_pools(replicas, digits)]
        pools += [
            _pools(list(target[num:]), digits)
            for target, num in zip(group.target, num_kept, strict=True)
        ]
        flat = list(itertools.chain.from_iterable(pools))
        receivers = [
            dim
            for dim, (target, num) in enumerate(
                zip(group.target, num_kept, strict=True)
            )
            if num == len(target)
        ]
        for extras in _placements(flat, receivers, group, digits):
            if not any(extras) and sum(num_kept) == len(in_target):
                continue  # the target itself, yielded first
            yield make_intermediate(
                shape=group.shape,
                chunk_shape=group.chunk_shape,
                target=group.target,
                digits=digits,
                num_kept=num_kept,
                extras=extras,
            )


def _pools(found: Sequence[int], digits: DigitMesh) -> list[_Pool]:
    """Gathers digits of one origin that are alike."""
    by_kind: dict[tuple[int, bool], list[int]] = {}
    for x in found:
        by_kind.setdefault((digits.sizes[x], digits.cross_host[x]), []).append(x)
    return [_Pool(tuple(v), kind[1]) for kind, v in by_kind.items()]


def _placements(
    pools: Sequence[_Pool],
    receivers: Sequence[int],
    group: GroupShape,
    digits: DigitMesh,
) -> Iterator[Layout]:
    """Ways to hand the pools' digits to the receivers, by count."""
    room = {
        dim: ceil_div(
            ceil_div(group.shape[dim], digits.num_parts(group.target[dim])),
            group.chunk_shape[dim],
        )
        for dim in receivers
    }
    # Dimension 0, always complete, takes what the grid cannot: one owner reads a leaf.
    # Where shards start on the grid, another cut never makes two hosts read a chunk.
    on_grid = {
        dim
        for dim in receivers
        if group.shape[dim] // digits.num_parts(group.target[dim])
        in (group.shape[dim], *range(0, group.shape[dim], group.chunk_shape[dim]))
    }
    takers = [dim for dim in receivers if dim and room[dim] > 1]
    takers.insert(0 if room[0] > 1 else len(takers), 0)
    across = [p for p in pools if p.cross_host]
    inside = [p for p in pools if not p.cross_host]
    options = [list(_distribute(p, takers, False)) for p in across]

    def fits(placed: Sequence[dict[int, tuple[int, ...]]]) -> bool:
        taken = {
            dim: math.prod(digits.num_parts(where.get(dim, ())) for where in placed)
            for dim in takers
        }
        # A digit more than that would have nothing left to split.
        if any(dim and taken[dim] >= 2 * room[dim] for dim in takers):
            return False
        if taken[0] < 2 * room[0]:
            return True
        least = min(digits.sizes[x] for where in placed for x in where.get(0, ()))
        return not any(
            dim in on_grid and taken[dim] * least < 2 * room[dim]
            for dim in takers
            if dim
        )

    placed_across = [p for p in itertools.product(*options) if fits(p)]
    inside_options = [list(_distribute(p, receivers, True)) for p in inside]
    for outer in placed_across:
        for inner in itertools.product(*inside_options):
            yield tuple(
                tuple(
                    itertools.chain.from_iterable(
                        where.get(dim, ()) for where in (*outer, *inner)
                    )
                )
                for dim in range(len(group.shape))
            )


def _distribute(
    pool: _Pool, receivers: Sequence[int], may_rest: bool
) -> Iterator[dict[int, tuple[int, ...]]]:
    """Counts of a pool's digits per receiver; the rest stays unused if allowed."""
    num = len(pool.digits)
    for counts in itertools.product(range(num, -1, -1), repeat=len(receivers)):
        if sum(counts) > num or (not may_rest and sum(counts) != num):
            continue
        left = list(pool.digits)
        yield {
            dim: tuple(left.pop(0) for _ in range(count))
            for dim, count in zip(receivers, counts, strict=True)
            if count
        }


class Search:
    """Ranks the candidates of one group; counts per dimension are kept and reused.

    Args:
        group: the wave to place.
        digits: the target's mesh.
        profile: rates for the forecast seconds.
        device_budget_bytes: inclusive bound on a device's peak, or None.
    """

    def __init__(
        self,
        group: GroupShape,
        digits: DigitMesh,
        profile: HardwareProfile,
        device_budget_bytes: int | None,
    ) -> None:
        """Stores the arguments; nothing is counted yet."""
        self._group = group
        self._digits = digits
        self._profile = profile
        self._budget = device_budget_bytes
        self._dims: dict[object, tuple[int, int]] = {}
        self._devices_per_host = digits.mesh.devices_per_host

    def candidate(self, intermediate: Intermediate) -> Candidate:
        """Counts and costs one intermediate."""
        return self._costed(intermediate, *self._counts(intermediate))

    def _costed(self, intermediate: Intermediate, total: int, most: int) -> Candidate:
        """Costs one intermediate whose chunks are counted."""
        group, digits = self._group, self._digits
        steps = intermediate.steps(digits)
        result = math.prod(
            ceil_div(extent, digits.num_parts(target))
            for extent, target in zip(group.shape, group.target, strict=True)
        )
        start = block_bytes(intermediate, group.moved_bytes)
        exchange = costs.exchange_cost(
            steps,
            start_bytes=start,
            result_bytes=result * group.moved_bytes,
            digits=digits,
            num_results=group.shape[0],
        )
        seconds = self._read_seconds(total, most)
        if steps:
            seconds += costs.exchange_seconds(
                exchange, devices_per_host=self._devices_per_host, profile=self._profile
            )
        seconds += costs.place_seconds(
            host_bytes=start * self._devices_per_host, profile=self._profile
        )
        return Candidate(
            intermediate=intermediate,
            total_chunks=total,
            max_host_chunks=most,
            exchange=exchange,
            seconds=seconds,
        )

    def best(self, objective: Literal["fetched", "seconds"]) -> Candidate | None:
        """The best candidate within the budget, ties to the earlier one.

        Args:
            objective: ``"seconds"`` ranks by forecast time; ``"fetched"`` by bytes
                fetched by all hosts, then by the busiest host, then by time.
        """

        def by_fetched(c: Candidate) -> tuple[float, ...]:
            return (c.total_chunks, c.max_host_chunks, c.seconds)

        def by_seconds(c: Candidate) -> tuple[float, ...]:
            return (c.seconds,)

        key: Callable[[Candidate], tuple[float, ...]]
        key = by_fetched if objective == "fetched" else by_seconds
        best: Candidate | None = None
        found = itertools.islice(
            intermediates(self._group, self._digits), MAX_CANDIDATES
        )
        for intermediate in found:
            counts = self._counts(intermediate)
            # What reads too much is not worth the walk over its steps.
            if best is not None and (
                counts > (best.total_chunks, best.max_host_chunks)
                if objective == "fetched"
                else self._read_seconds(*counts) >= best.seconds
            ):
                continue
            candidate = self._costed(intermediate, *counts)
            if self._budget is not None and (
                candidate.exchange.peak_bytes > self._budget
            ):
                continue
            if best is None or key(candidate) < key(best):
                best = candidate
        return best

    def reads(self, intermediate: Intermediate) -> Reads:
        """Per-host counts of one intermediate."""
        return count_reads(intermediate, self._group.chunk_shape, self._digits)

    def _read_seconds(self, total: int, most: int) -> float:
        """Seconds until all hosts have read: a bound from below for a candidate."""
        return costs.read_seconds(
            max_host_bytes=most * self._group.chunk_bytes,
            total_bytes=total * self._group.chunk_bytes,
            num_requests=most,
            profile=self._profile,
        )

    def _counts(self, intermediate: Intermediate) -> tuple[int, int]:
        """Chunks read by all hosts, and by the busiest one."""
        digits = self._digits
        if not digits.regular:
            reads = self.reads(intermediate)
            return sum(reads.chunks), max(reads.chunks)
        total = most = 1
        unused = set(range(len(digits.sizes)))
        for dim, layout in enumerate(intermediate.layout):
            key = (dim, intermediate.num_kept[dim], intermediate.extras[dim])
            if key not in self._dims:
                once = dim_reads(
                    intermediate, dim, self._group.chunk_shape[dim], digits
                ).once
                self._dims[key] = int(once.sum()), int(once.max())
            total *= self._dims[key][0]
            most *= self._dims[key][1]
            unused.difference_update(layout)
        for digit in unused:
            if digits.cross_host[digit]:
                total *= digits.sizes[digit]
        return total, most


def with_shape(group: GroupShape, count: int) -> GroupShape:
    """The same group with another number of leaves in a wave."""
    return replace(group, shape=(count, *group.shape[1:]))
