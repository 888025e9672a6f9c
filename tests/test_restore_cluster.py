"""Restores in real clusters: bits as stock, shardings as asked, programs as planned."""

import pytest
import restore_cases
import restore_runs

from orbax_reshard.tools import supervised

CLUSTERS = [
    pytest.param(processes, devices, id=f"{processes}x{devices // processes}")
    for processes, devices in restore_cases.CLUSTERS
]
SEVERAL_HOSTS = [c for c in CLUSTERS if c.values[0] > 1]


@pytest.mark.parametrize(("processes", "devices", "name"), restore_runs.every_run())
def test_bits_and_shardings(processes, devices, name):
    run = restore_runs.run_of(processes, devices, name)
    assert len(run.words) == processes
    for word in run.words:
        assert word["difference"] is None
        assert word["not_as_asked"] == []


@pytest.mark.parametrize(("processes", "devices", "name"), restore_runs.every_run())
def test_all_hosts_make_one_plan_and_one_report(processes, devices, name):
    run = restore_runs.run_of(processes, devices, name)
    first = run.words[0]
    for word in run.words[1:]:
        assert word["plan"] == first["plan"]
        for field in ("hosts", "fetched_bytes_per_host", "needed_bytes", "forecast"):
            assert word["report"][field] == first["report"][field]
        for field in ("chunk_reads_per_host", "fetched_bytes_per_host", "collectives"):
            ours, other = first["report"]["measured"], word["report"]["measured"]
            assert ours[field] == other[field]


@pytest.mark.parametrize(("processes", "devices"), SEVERAL_HOSTS)
def test_programs_have_exactly_the_planned_collectives(processes, devices):
    for programs in restore_runs.cluster(processes, devices)["programs"]:
        assert programs
        for program in programs:
            assert program["compiled"] == program["planned"] == program["counted"]
        # All kinds of moves occur, so that none was compared with nothing only.
        kinds = {kind for program in programs for kind in program["compiled"]}
        if devices == 8:
            assert kinds == {"all-gather", "all-to-all"}


@pytest.mark.parametrize(("processes", "devices"), CLUSTERS)
def test_nothing_is_rematerialized(processes, devices):
    for stderr in restore_runs.cluster(processes, devices)["stderr"]:
        # Nothing was cut off where it could have been said.
        assert len(stderr.splitlines()) < supervised._STDERR_TAIL_LINES
        assert "rematerialization" not in stderr.lower()
