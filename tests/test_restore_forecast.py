"""What the plan forecast is what was measured; programs and plans are few and kept."""

import json

import pytest
import restore_cases
import restore_runs

RUNS = restore_runs.every_run()
COUNTED = restore_runs.every_run(lambda s: s.id in restore_cases.COUNTED)


def runs_of(name):
    return [p for p in RUNS if p.values[2] == name]


@pytest.mark.parametrize(("processes", "devices", "name"), RUNS)
def test_forecast_is_what_was_measured(processes, devices, name):
    run = restore_runs.run_of(processes, devices, name)
    forecast, measured = run.report["forecast"], run.report["measured"]
    planned = [n for n, (how, _) in run.words[0]["reasons"].items() if how == "planned"]
    if planned:
        assert measured["hosts"] == forecast["hosts"]
        assert measured["chunk_reads_per_host"] == forecast["chunk_reads_per_host"]
    else:
        assert sum(measured["chunk_reads_per_host"]) == 0
    assert measured["collectives"] == forecast["collectives"]
    if planned and forecast["bytes_are_exact"]:
        assert measured["fetched_bytes_per_host"] == forecast["fetched_bytes_per_host"]


@pytest.mark.parametrize(("processes", "devices", "name"), RUNS)
def test_forecast_of_every_leaf(processes, devices, name):
    run = restore_runs.run_of(processes, devices, name)
    for leaf in run.report["leaves"]:
        if leaf["decision"] == "planned":
            # A leaf's forecast is its share of the group's, rounded up.
            forecast, measured = leaf["forecast"], leaf["measured"]
            assert sum(measured["chunk_reads_per_host"]) <= sum(
                forecast["chunk_reads_per_host"]
            )
        else:
            assert leaf["measured"] is None


@pytest.mark.parametrize(("processes", "devices", "name"), COUNTED)
def test_needed_bytes_are_those_on_disk(processes, devices, name):
    run = restore_runs.run_of(processes, devices, name)
    # Compressed chunks outside of OCDBT have sizes that nobody knows beforehand, and
    # inner chunks share a stored value whose index is fetched too.
    tolerance = 0 if run.report["forecast"]["bytes_are_exact"] else 0.01
    difference = abs(run.report["needed_bytes"] - run.stored_bytes)
    assert difference <= tolerance * run.stored_bytes


@pytest.mark.parametrize(("processes", "devices", "name"), COUNTED)
def test_bytes_are_exact_where_sizes_are_known(processes, devices, name):
    run = restore_runs.run_of(processes, devices, name)
    how = {d for d, _ in run.words[0]["reasons"].values()}
    known = run.scenario.ocdbt and run.scenario.inner_chunks is None
    if how == {"planned"}:
        assert run.report["forecast"]["bytes_are_exact"] == known


@pytest.mark.parametrize(("processes", "devices", "name"), RUNS)
def test_at_most_one_program_per_signature(processes, devices, name):
    run = restore_runs.run_of(processes, devices, name)
    for word in run.words:
        assert word["report"]["num_programs"] <= word["num_signatures"]
        assert word["compiled"][0] <= word["report"]["num_programs"]


@pytest.mark.parametrize(("processes", "devices", "name"), RUNS)
def test_never_forecast_above_direct(processes, devices, name):
    run = restore_runs.run_of(processes, devices, name)
    plan = json.loads(run.words[0]["plan"])
    assert sum(plan["forecast"]["chunk_reads_per_host"]) <= sum(
        plan["stock"]["chunk_reads_per_host"]
    )


@pytest.mark.parametrize(("processes", "devices", "name"), runs_of("R26"))
def test_aligned_leaves_exchange_nothing(processes, devices, name):
    run = restore_runs.run_of(processes, devices, name)
    reasons = run.words[0]["reasons"]
    aligned = {n: tuple(r) for n, r in reasons.items() if n.startswith("aligned")}
    assert len(aligned) == 8
    assert set(aligned.values()) == {("direct", "already_read_once")}
    assert run.report["num_programs"] <= 1  # the scalars


@pytest.mark.parametrize(("processes", "devices", "name"), runs_of("R27"))
def test_300_leaves_of_6_shapes_compile_little(processes, devices, name):
    for word in restore_runs.run_of(processes, devices, name).words:
        first, second = word["compiled"]
        assert first <= 12
        assert (first > 0) == (processes > 1)
        assert second == 0


@pytest.mark.parametrize(("processes", "devices", "name"), runs_of("R104"))
def test_20_restores_compile_and_plan_once(processes, devices, name):
    for word in restore_runs.run_of(processes, devices, name).words:
        assert len(word["compiled"]) == 20
        assert not any(word["compiled"][1:])
        assert word["planned_anew"] == [True] + [False] * 19
