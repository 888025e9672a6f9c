"""A plan is a function of its arguments, and is made without reading an array."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import restore_cases
import scenarios
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from restore_worker import storage_bytes

import orbax_reshard as oresh
from orbax_reshard.tools import launch

TIMEOUT_SECONDS = 120
SCENARIO = restore_cases.BY_ID["demo-2-2-2"]
SEEDS = ("0", "12345")

# Plans one restore, and prints the plan.
PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
import restore_cases, scenarios
import orbax_reshard as oresh
scenario = restore_cases.BY_ID[sys.argv[2]]
target = scenarios.target_tree(scenario)
for policy in ("read_once", "auto", "direct"):
    plan = oresh.plan_restore(sys.argv[3], target, oresh.Options(policy=policy))
    print(plan.to_json())
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    # 32 devices saved the demo; 16 of them make the same leaves with larger chunks.
    path = str(tmp_path_factory.mktemp("plan") / "checkpoint")
    saved = {**SCENARIO.saved, "data": 2}
    scenarios.save(
        scenarios.Scenario("plan", saved, SCENARIO.target, SCENARIO.leaves), path
    )
    return path


def test_hash_seeds_do_not_change_the_plan(checkpoint):
    tests = str(pathlib.Path(__file__).parent)
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, tests, SCENARIO.id, checkpoint],
            env=launch.child_environment(8) | {"PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed in SEEDS
    ]
    try:
        ended = [process.communicate(timeout=TIMEOUT_SECONDS) for process in started]
    finally:
        for process in started:
            process.kill()
    first, second = ended
    assert first[0] == second[0], (first[1], second[1])
    plans = [json.loads(line) for line in first[0].splitlines()]
    assert [plan["policy"] for plan in plans] == ["read_once", "auto", "direct"]
    assert all(len(plan["leaves"]) == len(SCENARIO.leaves) for plan in plans)
    # The other side: the processes did hash differently.
    words = [
        subprocess.run(
            [sys.executable, "-c", "print(hash('leaf'))"],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            timeout=TIMEOUT_SECONDS,
            check=True,
        ).stdout
        for seed in SEEDS
    ]
    assert words[0] != words[1]


def test_a_repeated_plan_is_equal(checkpoint):
    target = scenarios.target_tree(SCENARIO)
    one, two = (oresh.plan_restore(checkpoint, target) for _ in range(2))
    assert one == two
    assert one.to_json() == two.to_json()


def test_the_restore_follows_the_plan(checkpoint):
    target = scenarios.target_tree(SCENARIO)
    options = oresh.Options(policy="read_once")
    plan = oresh.plan_restore(checkpoint, target, options)
    handler = oresh.ReshardingArrayHandler(options)
    scenarios.restore(checkpoint, target, handler)
    assert handler.last_plan == plan


# --- what plan_restore refuses --------------------------------------------------------


def struct(shape, *spec) -> jax.ShapeDtypeStruct:
    mesh = scenarios.mesh_of({"x": 3})
    sharding = NamedSharding(mesh, P(*spec))
    return jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding)


# What is wrong -> (folder, changed leaves, class, code, message).
BAD_INPUT = {
    "missing-path": (
        "nowhere",
        {},
        oresh.CheckpointError,
        "missing_path",
        "no checkpoint at DIR/nowhere: the path does not exist",
    ),
    "empty-folder": (
        "empty",
        {},
        oresh.CheckpointError,
        "not_a_checkpoint",
        "DIR/empty is not the folder of one saved tree: no saved tree in it",
    ),
    "missing-leaf": (
        "checkpoint",
        {"nope": struct((6,), "x")},
        oresh.CheckpointError,
        "missing_leaf",
        "leaf 'nope' of the target is not in the checkpoint at DIR/checkpoint",
    ),
    "not-divisible": (
        "checkpoint",
        {"scale_0": struct((16384,), "x")},
        oresh.TargetError,
        "not_divisible",
        "leaf 'scale_0': dimension 0 of 16384 does not divide into the 3 shards of "
        "mesh axes ('x',) ({'x': 3}) in the target P('x',)",
    ),
    "another-shape": (
        "checkpoint",
        {"scale_0": struct((63,), "x")},
        oresh.TargetError,
        "shape_mismatch",
        "leaf 'scale_0': the target has shape (63,), the checkpoint has (16384,). To "
        "pad or cut, pass strict=False in ArrayRestoreArgs.",
    ),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input(checkpoint, name):
    folder, leaves, kind, code, message = BAD_INPUT[name]
    root = pathlib.Path(checkpoint).parent
    (root / "empty").mkdir(exist_ok=True)
    target = scenarios.target_tree(SCENARIO) | leaves
    before = storage_bytes()
    with pytest.raises(kind) as caught:
        oresh.plan_restore(root / folder, target)
    assert caught.value.code == code
    assert str(caught.value).replace(str(root), "DIR") == message
    # OCDBT's index is read, but no array: the smallest has more bytes than that.
    assert storage_bytes() - before < 16384 * 4


def test_an_unknown_policy_is_refused_where_it_is_given():
    with pytest.raises(oresh.OptionsError) as caught:
        oresh.Options(policy="fast")
    assert caught.value.code == "unknown_policy"
    text = "policy is 'fast'; it must be one of auto, read_once, direct"
    assert str(caught.value) == text


def test_leaves_that_are_no_arrays_are_neither_planned_nor_read(tmp_path):
    tree = {"list": [np.zeros(2**16), {"deep": jax.numpy.arange(8.0)}], "step": 3}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "checkpoint", args=ocp.args.PyTreeSave(tree))
    deep = jax.ShapeDtypeStruct((8,), np.float32, sharding=struct((6,)).sharding)
    target = {"list": [np.zeros(2**16), {"deep": deep}], "step": 3}
    before = storage_bytes()
    plan = oresh.plan_restore(tmp_path / "checkpoint", target)
    assert [leaf.name for leaf in plan.leaves] == ["list.1.deep"]
    assert storage_bytes() - before < 2**16
