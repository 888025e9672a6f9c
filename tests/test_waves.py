"""Groups and waves: sizes, the last one, forecasts, and who reads what is odd."""

import dataclasses
import json
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from planning_oracle import chunks_per_host, fixed, mesh_of, request
from test_plan import MIB, columns, plan, requests

from orbax_reshard.planning import planner
from orbax_reshard.planning.plan import wave_bytes_per_host
from orbax_reshard.planning.record import sum_records

# --- forecasts ------------------------------------------------------------------------


def brute_forecast(group, asked):
    """Chunks and bytes per host, wave by wave, from what devices hold."""
    chunks, fetched = Counter(), Counter()
    for wave, layout in zip(group.waves, group.wave_intermediates, strict=True):
        found = chunks_per_host(layout, group.digits, group.shape.chunk_shape)
        for host, (own, _) in found.items():
            chunks[host] += len(own)
            for at in own:
                stored = asked[wave[at[0]]].stored
                sizes = stored.encoded_bytes
                number = 0
                for place, extent in zip(at[1:], stored.grid_shape, strict=True):
                    number = number * extent + place
                fetched[host] += sizes[number] if sizes else stored.chunk_bytes
    hosts = group.digits.mesh.host_ids
    return tuple(chunks[h] for h in hosts), tuple(fetched[h] for h in hosts)


@fixed(120)
@given(
    requests(),
    st.sampled_from(["auto", "read_once"]),
    st.one_of(st.none(), st.integers(1, 4000)),
)
def test_forecasts_against_the_waves(asked, policy, budget):
    made = plan(asked, policy, read_budget_bytes=budget)
    for group in made.planned:
        chunks, fetched = brute_forecast(group, asked)
        assert group.forecast.hosts == group.digits.mesh.host_ids
        assert group.forecast.chunk_reads_per_host == chunks
        exact = all(asked[i].stored.encoded_bytes is not None for i in group.leaves)
        assert group.forecast.bytes_are_exact == exact
        if exact or all(asked[i].stored.encoded_bytes is None for i in group.leaves):
            assert group.forecast.fetched_bytes_per_host == fetched
        kinds = Counter(s.hlo_name for s in group.steps if s.kind != "slice")
        assert dict(group.forecast.collectives) == {
            kind: count * len(group.waves) for kind, count in kinds.items()
        }
    assert made.forecast == sum_records([g.forecast for g in made.planned])


@fixed(100)
@given(requests(), st.one_of(st.none(), st.integers(1, 4000)))
def test_every_leaf_is_in_one_wave_of_one_group(asked, budget):
    made = plan(asked, read_budget_bytes=budget)
    places = [leaf for g in made.groups for wave in g.waves for leaf in wave]
    assert sorted(places) == list(range(len(asked)))
    for number, group in enumerate(made.groups):
        assert list(group.leaves) == sorted(group.leaves)
        assert len({asked[i].signature for i in group.leaves}) == 1
        assert all(made.leaves[i].group == number for i in group.leaves)
        sizes = [len(wave) for wave in group.waves]
        assert all(size == group.wave_size for size in sizes[:-1])
        assert 1 <= sizes[-1] <= group.wave_size
    assert [leaf.name for leaf in made.leaves] == [r.stored.name for r in asked]
    assert made.num_programs <= len(made.groups)


# --- sizes ----------------------------------------------------------------------------


def test_waves_are_equal_and_the_last_may_be_smaller(monkeypatch):
    monkeypatch.setattr(planner, "MAX_WAVE_LEAVES", 16)
    for count, size, sizes in (
        (1, 1, [1]),
        (16, 16, [16]),
        (17, 9, [9, 8]),
        (33, 11, [11, 11, 11]),
        (34, 12, [12, 12, 10]),
    ):
        (group,) = plan(columns(count)).groups
        assert group.wave_size == size
        assert [len(wave) for wave in group.waves] == sizes
        last = group.wave_intermediates[-1]
        assert last.shape[0] == sizes[-1]
        assert last.piece_width == group.intermediate.piece_width


def test_many_hosts_get_a_leaf_each_but_not_more_than_a_bound():
    for hosts, expected in ((32, 32), (256, 256), (512, 256)):
        mesh = mesh_of({"d": hosts}, hosts)
        asked = [request(f"s{i}", mesh, (64,), (64,)) for i in range(600)]
        (group,) = plan(asked).groups
        assert expected // 2 < group.wave_size <= expected
        assert group.wave_size > planner.MAX_WAVE_LEAVES
        assert group.wave_size <= planner.MAX_WAVE_LEAVES_OF_MANY_HOSTS


def test_a_wave_holds_what_the_budget_allows_on_both_sides(monkeypatch):
    # A leaf is 8 MiB, of which each of 4 hosts holds 2; two waves are in flight.
    monkeypatch.setattr(planner, "MAX_WAVE_LEAVES", 16)
    leaf = columns(8, rows=4096)
    per_host = 2 * MIB
    for budget, size in (
        (16 * per_host, 8),
        (16 * per_host - 1, 4),
        (8 * per_host, 4),
        (8 * per_host - 1, 3),
        (2 * per_host, 1),
        # Never less than one leaf: it is then read in more pieces.
        (1, 1),
    ):
        (group,) = plan(leaf, read_budget_bytes=budget).groups
        assert group.wave_size == size
        assert wave_bytes_per_host(group) == size * per_host
    (group,) = plan(columns(64, rows=4096)).groups
    assert wave_bytes_per_host(group) <= planner.DEFAULT_WAVE_BYTES
    (direct,) = plan(leaf, "direct").groups
    assert wave_bytes_per_host(direct) == 0


# --- even -----------------------------------------------------------------------------


def readers(group) -> list[int]:
    """The hosts that read anything of the first wave."""
    layout = group.wave_intermediates[0]
    found = chunks_per_host(layout, group.digits, group.shape.chunk_shape)
    return [host for host, (own, _) in found.items() if own]


def test_host_0_is_not_always_the_reader_of_a_single_chunk():
    mesh = mesh_of({"d": 8}, 4)
    asked = [request(f"n{i}", mesh, (64 + i,), (64 + i,)) for i in range(8)]
    made = plan(asked)
    assert [g.decision for g in made.groups] == ["planned"] * 8
    assert [readers(g) for g in made.groups] == [[h] for h in [0, 1, 2, 3] * 2]
    assert made.forecast.chunk_reads_per_host == (2, 2, 2, 2)


def test_the_many_small_leaves_of_r25():
    mesh = mesh_of({"d": 8}, 4)
    small = [request(f"s{i}", mesh, (1024,), (1024,)) for i in range(2000)]
    large = [request(f"l{i}", mesh, (2048, 1024), (2048, 1024)) for i in range(4)]
    made = plan([*small, *large])
    assert made.num_programs == 2 < 20
    assert made.amplification == 1.0
    per_host = made.forecast.fetched_bytes_per_host
    assert max(per_host) <= 1.1 * min(per_host)


def test_three_replicated_leaves_of_r24():
    mesh = mesh_of({"d": 8}, 4)
    asked = [request(f"r{n}", mesh, (n, 512, 512), (1, 512, 512)) for n in (8, 4, 1)]
    made = plan(asked)
    chunks = made.forecast.chunk_reads_per_host
    # 13 chunks over 4 hosts: 3 each, and the odd one.
    assert sorted(chunks) == [3, 3, 3, 4]


def test_turning_changes_who_reads_and_nothing_else():
    mesh = mesh_of({"d": 8}, 4)
    asked = [request(f"n{i}", mesh, (64 + i,), (64 + i,)) for i in range(2)]
    first, second = plan(asked).groups
    assert first.intermediate.rotation != second.intermediate.rotation
    assert first.steps == second.steps
    assert first.forecast.chunk_reads == second.forecast.chunk_reads == 1
    plain = dataclasses.replace(second.intermediate, rotation=(0, 0))
    assert plain.piece_width == second.intermediate.piece_width


def test_aligned_leaves_need_no_program_r26():
    mesh = mesh_of({"f": 8}, 4)
    aligned = [request(f"a{i}", mesh, (64, 8), (8, 8), "f") for i in range(8)]
    scalars = [request(f"s{i}", mesh, (), ()) for i in range(50)]
    made = plan([*aligned, *scalars])
    assert {leaf.reason for leaf in made.leaves[:8]} == {"already_read_once"}
    assert {leaf.reason for leaf in made.leaves[8:]} == {"reads_once"}
    assert made.num_programs == 1
    assert made.forecast.chunk_reads == 50
    assert json.loads(made.to_json())["amplification"] == 1.0
