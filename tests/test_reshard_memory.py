"""Memory and collectives of `reshard` as XLA sees them, against plain ``jit``.

One process with 64 CPU devices compiles both; 16 MiB of float32.
"""

import functools
import pathlib

import pytest
from reshard_memory_worker import gathered_bytes

from orbax_reshard.tools.launch import raise_for_failure, run_cluster

WORKER = str(pathlib.Path(__file__).parent / "reshard_memory_worker.py")
MIB = 2**20

# A CPU all-to-all takes its pieces through two tables of pointers.
TABLES_BYTES = 128

NUM_RANDOM = 30


@functools.cache
def cases(which: str, num_devices: int) -> dict[str, dict]:
    results = run_cluster(
        (WORKER, which),
        num_processes=1,
        devices_per_process=num_devices,
        timeout_seconds=120,
    )
    raise_for_failure(results)
    return {case["name"]: case for case in results[0].messages}


@pytest.mark.parametrize(
    ("name", "peak_mib", "plain_mib"),
    [
        # An eighth of 64 slivers: 1/64 + 1/8 + 1/8 of the array.
        ("64 to 8 x 8", 4.25, 18.25),
        ("64 to 16 x 4", 2.25, 17.25),
        ("8 to 4 x 2", 10.0, 22.0),
    ],
)
def test_peak_of_rows_to_columns(name, peak_mib, plain_mib):
    case = cases("named", 64)[name]
    ours, plain = case["ours"], case["plain"]
    assert ours["equal"] and ours["decision"] == "exchange"
    assert ours["peak"] <= peak_mib * MIB + TABLES_BYTES
    # Plain jit gathers the whole array on every device.
    assert plain["peak"] >= plain_mib * MIB > 2 * ours["peak"]
    assert plain["gathered"] == 16 * MIB
    # The plan knew, with a sixth to spare at most.
    assert ours["peak"] <= ours["planned_peak"] <= 1.2 * ours["peak"] + 1024
    assert ours["collectives"] == [{"all-gather": 1, "all-to-all": 1}]
    assert ours["planned"] == {"all-gather": 1, "all-to-all": 1}


@pytest.mark.parametrize("name", ["64 to 8 x 8", "64 to 16 x 4", "8 to 4 x 2", "R102"])
def test_strictly_fewer_bytes_through_all_gathers(name):
    case = cases("named", 64)[name]
    assert case["ours"]["gathered"] < case["plain"]["gathered"]


def test_r102_takes_no_all_gather_at_all():
    ours = cases("named", 64)["R102"]["ours"]
    assert ours["collectives"] == [{"all-to-all": 2}]
    assert ours["gathered"] == 0 and ours["equal"]


def test_never_more_bytes_through_all_gathers():
    found = cases(str(NUM_RANDOM), 8)
    assert len(found) == NUM_RANDOM
    fewer = 0
    for case in found.values():
        ours, plain = case["ours"], case["plain"]
        assert ours["gathered"] <= plain["gathered"], case["layouts"]
        fewer += ours["gathered"] < plain["gathered"]
        assert ours["equal"], case["layouts"]
        ran = {}
        for program in ours["collectives"]:
            ran.update(program)
        assert ran == ours["planned"], case["layouts"]
        assert ours["peak"] <= ours["planned_peak"], case["layouts"]
    # The comparison is about something: in some cases there is less, in some nothing.
    assert 0 < fewer < NUM_RANDOM


def test_the_counter_counts():
    line = "  %a = f32[16,2,8]{2,1,0} all-gather(%p), channel_id=1, dimensions={0}"
    assert gathered_bytes(line) == 16 * 2 * 8 * 4
    assert gathered_bytes(line.replace("f32", "u8") + "\n" + line) == 5 * 256
    assert gathered_bytes("  %a = u8[] all-gather(%p)") == 1
    assert gathered_bytes("  %a = f32[4]{0} all-to-all(%p)") == 0
