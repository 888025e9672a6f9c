"""`reshard` over 2 and 4 processes with 8 devices in all."""

import pathlib

import pytest

from orbax_reshard.tools.launch import raise_for_failure, run_cluster

WORKER = str(pathlib.Path(__file__).parent / "reshard_worker.py")

EXPECTED = {
    "rows to columns": {"all-gather": 1, "all-to-all": 1},
    "reversed": {"collective-permute": 1},
    # The same digits in another order: names change, nothing is permuted.
    "mixed": {"all-gather": 1, "all-to-all": 1},
    "transposed": {"collective-permute": 1},
    "R102": {"all-to-all": 2},
    "replicate": {"all-gather": 2},
    "slice": {},
    "swap": {"collective-permute": 1},
    "relabel": {},
}


@pytest.mark.parametrize("num_processes", [2, 4])
def test_processes(num_processes, no_leftovers):
    results = run_cluster(
        (WORKER,),
        num_processes=num_processes,
        devices_per_process=8 // num_processes,
        timeout_seconds=150,
    )
    raise_for_failure(results)
    for result in results:
        plain, under, tree, local, budget = result.messages
        assert (plain["under"], under["under"]) == ("no mesh", "a mesh")
        for found in (plain["cases"], under["cases"]):
            assert set(found) == set(EXPECTED)
            for name, case in found.items():
                assert case["equal"], name
                assert case["kept"], name
                assert case["collectives"] == EXPECTED[name], name
                expected = "relabel" if name == "relabel" else "exchange"
                assert case["decision"] == expected, name
        assert tree == {"compiled": 0, "leaves": True, "keys": True, "deleted": True}
        assert local == {"local": True}
        assert "needs" in budget["budget"] and "is 1000." in budget["budget"]
    assert len({str(r.messages[-1]) for r in results}) == 1
