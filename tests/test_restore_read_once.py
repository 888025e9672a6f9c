"""Every stored byte is fetched once in the whole cluster, and by all hosts alike."""

import pytest
import restore_cases
import restore_runs

# The bound of the promise; what is above 1.0 is headers and rounding.
MAX_AMPLIFICATION = 1.02

# Hosts may differ by this part of their mean where the grid allows it.
MAX_UNEVENNESS = 0.10

COUNTED = restore_runs.every_run(lambda s: s.id in restore_cases.COUNTED)
READ_ONCE = restore_runs.every_run(
    lambda s: s.id in restore_cases.COUNTED and s.read_once
)
EVEN = [p for p in restore_runs.every_run(lambda s: s.even) if p.values[0] > 1]


def row(run: restore_runs.Run, processes: int, devices: int) -> str:
    """A line of the table: who, what stock fetched, what we fetched."""
    where = f"{processes} x {devices // processes}"
    return (
        f"{run.scenario.id:28} {where:>7}  stored {run.stored_bytes:>10,}  "
        f"stock {run.stock_amplification:5.2f}x  ours {run.amplification:6.3f}x"
    )


@pytest.mark.parametrize(("processes", "devices", "name"), READ_ONCE)
def test_read_once(processes, devices, name):
    run = restore_runs.run_of(processes, devices, name)
    print(row(run, processes, devices))
    assert run.stored_bytes > 0
    # Twice: against the files on disk, and as the report says.
    assert 1.0 <= run.amplification <= MAX_AMPLIFICATION
    assert 1.0 <= run.report["amplification"] <= MAX_AMPLIFICATION


@pytest.mark.parametrize(("processes", "devices", "name"), COUNTED)
def test_the_report_hides_no_bytes(processes, devices, name):
    run = restore_runs.run_of(processes, devices, name)
    for host, word in enumerate(run.words):
        report = word["report"]
        assert report["hosts"] == list(range(processes))
        fetched = report["fetched_bytes_per_host"][host] + report["metadata_bytes"]
        # The worker counted around the whole restore, Orbax's own reads included.
        assert fetched == word["planned_bytes"]


@pytest.mark.parametrize(("processes", "devices", "name"), COUNTED)
def test_never_more_than_stock(processes, devices, name):
    run = restore_runs.run_of(processes, devices, name)
    assert run.amplification <= run.stock_amplification


@pytest.mark.parametrize(("processes", "devices", "name"), EVEN)
def test_hosts_read_alike(processes, devices, name):
    run = restore_runs.run_of(processes, devices, name)
    fetched = run.report["fetched_bytes_per_host"]
    assert max(fetched) - min(fetched) <= MAX_UNEVENNESS * sum(fetched) / len(fetched)


def test_stock_repeats_reads_and_we_do_not():
    """The public scenarios and the demo as one table; ``pytest -rA`` shows it."""
    runs = [
        (processes, devices, restore_runs.run_of(processes, devices, s.id))
        for processes, devices in restore_cases.CLUSTERS
        for s in restore_cases.of_cluster(processes, devices)
        if s.id in restore_cases.COUNTED
    ]
    print("\n".join(row(run, p, d) for p, d, run in runs))
    # The other side: these bounds would not hold for stock.
    repeated = [r for p, _, r in runs if p == 4 and r.stock_amplification >= 2]
    assert len(repeated) > 10
