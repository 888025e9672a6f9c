"""The search against counting every member of the whole family by brute force."""

import dataclasses
import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_oracle import (
    chunks_per_host,
    coordinates,
    fixed,
    groups,
    layouts,
    mesh_of,
    meshes,
    whole_family,
)

from orbax_reshard.planning.candidates import (
    Candidate,
    GroupShape,
    Search,
    intermediates,
    target_intermediate,
    with_shape,
)
from orbax_reshard.planning.digits import DigitMesh, factorise
from orbax_reshard.planning.layout import Intermediate
from orbax_reshard.planning.profile import CPU_FILE, CPU_OBJECT_STORE, HardwareProfile


def brute_counts(
    intermediate: Intermediate, digits: DigitMesh, group: GroupShape
) -> tuple[int, int]:
    """Chunks read by all hosts, and by the busiest."""
    found = chunks_per_host(intermediate, digits, group.chunk_shape)
    counts = [len(own) for own, _ in found.values()]
    return sum(counts), max(counts)


def search(
    group: GroupShape,
    digits: DigitMesh,
    *,
    profile: HardwareProfile = CPU_FILE,
    budget: int | None = None,
) -> Search:
    return Search(group, digits, profile, budget)


def counts(candidate: Candidate) -> tuple[int, int]:
    return candidate.total_chunks, candidate.max_host_chunks


def group_on(mesh, shape, chunks, *spec) -> tuple[DigitMesh, GroupShape]:
    """``shape`` with the number of leaves first, ``spec`` without."""
    digits = factorise(mesh)
    dims = [() if s is None else (s,) for s in spec]
    dims += [()] * (len(shape) - 1 - len(dims))
    return digits, GroupShape(
        shape=tuple(shape),
        chunk_shape=(1, *chunks),
        element_bytes=4,
        moved_bytes=4,
        target=((), *digits.layout(dims)),
    )


# --- counting -------------------------------------------------------------------------


@fixed(300)
@given(layouts())
def test_chunk_counts_of_a_candidate_against_sets(layout):
    digits, group, intermediate = layout
    candidate = search(group, digits).candidate(intermediate)
    assert counts(candidate) == brute_counts(intermediate, digits, group)


@fixed(100)
@given(st.data())
def test_counts_kept_from_other_candidates_do_not_leak(data):
    digits, _, group = data.draw(groups(data.draw(meshes())))
    shared = search(group, digits)
    for intermediate in itertools.islice(intermediates(group, digits), 100):
        fresh = search(group, digits).candidate(intermediate)
        assert shared.candidate(intermediate) == fresh


# --- the best -------------------------------------------------------------------------


@fixed(150)
@given(st.data())
def test_the_least_fetched_is_the_least_of_the_whole_family(data):
    digits, _, group = data.draw(groups(data.draw(meshes()), max_rank=2))
    best = search(group, digits).best("fetched")
    found = [brute_counts(i, digits, group) for i in whole_family(group, digits)]
    direct = brute_counts(target_intermediate(group, digits), digits, group)
    least = min(found)
    assert best.total_chunks == least[0] <= direct[0]
    if digits.regular:
        assert counts(best) == least
    else:
        # Which of two like digits goes where may matter to the busiest host here.
        assert best.max_host_chunks >= least[1]


@fixed(150)
@given(st.data())
def test_the_best_is_the_first_of_the_best_within_the_family(data):
    """All in order, nothing skipped: what the search may leave out changes nothing."""
    digits, _, group = data.draw(groups(data.draw(meshes()), max_rank=2))
    profile = data.draw(st.sampled_from([CPU_FILE, CPU_OBJECT_STORE]))
    # As large as if an element were 16 KiB: bytes and not latencies decide.
    if data.draw(st.booleans(), "large"):
        group = dataclasses.replace(group, element_bytes=1 << 14, moved_bytes=1 << 14)
    ranking = search(group, digits, profile=profile)
    family = [ranking.candidate(i) for i in intermediates(group, digits)]
    budget = None
    if data.draw(st.booleans(), "with a budget"):
        budget = data.draw(st.sampled_from([c.exchange.peak_bytes for c in family]))
        family = [c for c in family if c.exchange.peak_bytes <= budget]
    ranking = search(group, digits, profile=profile, budget=budget)
    by_fetched = min(family, key=lambda c: (*counts(c), c.seconds))
    assert ranking.best("fetched") == by_fetched
    assert ranking.best("seconds") == min(family, key=lambda c: c.seconds)


@fixed(100)
@given(st.data())
def test_the_family_is_ordered_and_complete_members_only(data):
    digits, _, group = data.draw(groups(data.draw(meshes()), max_rank=2))
    family = list(intermediates(group, digits))
    assert family[0] == target_intermediate(group, digits)
    assert family == list(intermediates(group, digits))
    assert len(set(family)) == len(family)
    assert set(family) <= set(whole_family_sorted(group, digits))


def whole_family_sorted(group, digits):
    """The whole family with the extras of each pool in any order."""
    for member in whole_family(group, digits):
        orders = [itertools.permutations(extras) for extras in member.extras]
        for extras in itertools.product(*orders):
            crossing = [[digits.cross_host[d] for d in run] for run in extras]
            if all(run == sorted(run, reverse=True) for run in crossing):
                yield dataclasses.replace(member, extras=tuple(map(tuple, extras)))


def test_like_digits_are_counted_and_not_permuted():
    # 8 hosts of 1 device, all replicas: 3 like digits over leaves, rows and columns.
    mesh = mesh_of({"x": 8}, 8)
    digits, group = group_on(mesh, (8, 16, 16), (2, 2))
    placed = [i.extras for i in intermediates(group, digits)][1:]
    sizes = sorted(tuple(map(len, extras)) for extras in placed)
    ways = [c for c in itertools.product(range(4), repeat=3) if sum(c) == 3]
    assert sizes == sorted(ways)


def test_shards_off_the_grid_may_stay_while_one_owner_reads():
    # Shards of 4 in chunks of 3: halving them makes both hosts read chunks 0 and 1.
    digits, group = group_on(mesh_of({"r": 2, "t": 2}, 2), (1, 8), (3,), "t")
    placed = [(i.num_kept, i.extras) for i in intermediates(group, digits)]
    owner = ((0, 1), ((0,), ()))
    assert owner in placed
    assert counts(search(group, digits).best("fetched")) == (3, 3)
    # On the grid the other host has a share, and no owner is needed.
    digits, group = group_on(mesh_of({"r": 2, "t": 2}, 2), (1, 8), (2,), "t")
    placed = [(i.num_kept, i.extras) for i in intermediates(group, digits)]
    assert owner not in placed
    assert counts(search(group, digits).best("fetched")) == (4, 2)


# --- examples -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("axes", "hosts", "shape", "chunks", "spec", "least"),
    [
        # The picture of the design: rows on disk, columns wanted, 4 hosts of 2.
        ({"t": 8}, 4, (1, 64, 64), (8, 64), (None, "t"), (8, 2)),
        # Replicated: as even as 8 chunks over 4 hosts can be.
        ({"d": 8}, 4, (1, 64, 64), (8, 64), (), (8, 2)),
        # One chunk, one leaf: one host reads, and the exchange scatters.
        ({"d": 8}, 4, (1, 64, 64), (64, 64), (None, "d"), (1, 1)),
        # Four such leaves: one each.
        ({"d": 8}, 4, (4, 64, 64), (64, 64), (None, "d"), (4, 1)),
        # Six chunks over four hosts: two at most; three chunks: one at most.
        ({"d": 8}, 4, (1, 48, 8), (8, 8), (), (6, 2)),
        ({"d": 8}, 4, (1, 24, 8), (8, 8), (), (3, 1)),
        # Two leaves of two chunks on eight hosts: both dimensions share the work.
        ({"d": 8}, 8, (2, 16, 8), (8, 8), (), (4, 1)),
        # One leaf of two chunks on eight hosts: two hosts read one chunk each.
        ({"d": 8}, 8, (1, 16, 8), (8, 8), (), (2, 1)),
        # Shards that start inside a chunk: it is read once all the same.
        ({"d": 8}, 8, (1, 2, 1, 8), (1, 1, 3), (None, None, "d"), (6, 3)),
        # A replica axis across hosts, shards in-host: both hosts read half (R23).
        ({"r": 2, "f": 4}, 2, (1, 64, 8), (8, 8), ("f",), (8, 4)),
    ],
)
def test_examples_of_least_fetched(axes, hosts, shape, chunks, spec, least):
    digits, group = group_on(mesh_of(axes, hosts), shape, chunks, *spec)
    best = search(group, digits).best("fetched")
    assert counts(best) == brute_counts(best.intermediate, digits, group)
    everything = [brute_counts(i, digits, group) for i in whole_family(group, digits)]
    assert counts(best) == min(everything) == least


def test_a_budget_is_inclusive():
    digits, group = group_on(mesh_of({"t": 8}, 4), (1, 64, 64), (8, 64), None, "t")
    free = search(group, digits).best("fetched")
    peak = free.exchange.peak_bytes
    assert search(group, digits, budget=peak).best("fetched") == free
    tight = search(group, digits, budget=peak - 1).best("fetched")
    assert tight is None or tight.exchange.peak_bytes < peak
    # Nothing at all fits below a device's own shard.
    shard = math.prod(group.shape) // 8 * group.moved_bytes
    assert search(group, digits, budget=shard).best("fetched").intermediate.is_target
    assert search(group, digits, budget=shard - 1).best("fetched") is None


def test_group_shape():
    _, group = group_on(mesh_of({"t": 8}, 4), (3, 60, 64), (8, 64), None, "t")
    assert (group.grid_shape, group.num_chunks) == ((3, 8, 1), 24)
    assert group.chunk_bytes == 8 * 64 * 4
    assert with_shape(group, 5) == dataclasses.replace(group, shape=(5, 60, 64))


def test_places_of_the_oracle_are_the_meshs():
    assert coordinates(factorise(mesh_of({"x": 6}, 3))) == [
        *itertools.product(range(3), range(2))
    ]
