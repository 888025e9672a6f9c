"""What people read: the text of a plan, of its layouts and steps, and its JSON."""

import json
import re

import pytest
from planning_oracle import mesh_of, request

from orbax_reshard.planning import explain
from orbax_reshard.planning.digits import factorise
from orbax_reshard.planning.layout import Step
from orbax_reshard.planning.planner import build_plan
from orbax_reshard.planning.profile import CPU_OBJECT_STORE


def made(policy="read_once"):
    mesh = mesh_of({"data": 2, "tensor": 4}, 4)
    return build_plan(
        [
            request("w", mesh, (64, 256), (8, 256), None, "tensor"),
            request("b0", mesh, (256,), (256,)),
            request("b1", mesh, (256,), (256,)),
            request("k", None, (4,), (4,), declined="memory_kind", target_text="pin"),
            request("a", mesh, (64, 8), (8, 8), ("data", "tensor")),
        ],
        policy=policy,
        profile=CPU_OBJECT_STORE,
    )


def test_the_whole_text():
    lines = made().explain().splitlines()
    # Peaks are forecast by `cost`, and have their tests there.
    lines = [re.sub(r"peak .* per device", "peak X per device", line) for line in lines]
    assert lines == [
        "Restore plan, policy read_once, 5 leaves on 4 host(s): 3 read once, 2 direct.",
        "Read once: 66.0 KiB fetched for 66.0 KiB needed, amplification 1.00 (stock up "
        "to 7.88); 2 exchange program(s).",
        "",
        "[0] w: float32[64, 256] in 8 chunk(s) of [8, 256]",
        "    decision      planned: read once and exchange: fewer bytes from storage",
        "    target        P(None, 'tensor')",
        "    intermediate  P(('data', 'tensor'), None)",
        "    exchange      all_to_all tensor (dim 0 to dim 1), all_gather data",
        "    waves         1 of 1, peak X per device",
        "    fetched       64.0 KiB for 64.0 KiB needed; per host 16.0 KiB to 16.0 KiB",
        "",
        "[1] b0 and 1 more: float32[256] in 1 chunk(s) of [256]",
        "    decision      planned: read once and exchange: fewer bytes from storage",
        "    target        P(None)",
        "    intermediate  leaves=data+tensor[2] P(None)",
        "    exchange      all_gather data+tensor[2]",
        "    waves         1 of 2, peak X per device",
        "    fetched       2.0 KiB for 2.0 KiB needed; per host 0 B to 1.0 KiB",
        "",
        "[2] k: float32[4] in 1 chunk(s) of [4]",
        "    decision      direct: the target is not in the device's default memory",
        "    target        pin",
        "",
        "[3] a: float32[64, 8] in 8 chunk(s) of [8, 8]",
        "    decision      direct: the target's shards already read every chunk once",
        "    target        P(('data', 'tensor'), None)",
        "    fetched       up to 2.0 KiB for 2.0 KiB needed; per host 512 B to 512 B",
    ]


def test_a_plan_of_direct_leaves_has_no_summary_of_bytes():
    lines = made("direct").explain().splitlines()
    assert lines[0] == (
        "Restore plan, policy direct, 5 leaves on 4 host(s): 0 read once, 5 direct."
    )
    assert lines[1] == ""


def test_json_holds_what_hosts_must_agree_on():
    plan = made()
    found = json.loads(plan.to_json())
    assert list(found) == sorted(found)
    assert [leaf["name"] for leaf in found["leaves"]] == ["w", "b0", "b1", "k", "a"]
    assert [leaf["group"] for leaf in found["leaves"]] == [0, 1, 1, 2, 3]
    first = found["groups"][0]
    assert first["layout"] == [[], [0, 1, 2], []]
    assert first["rotation"] == [0, 0, 0]
    assert first["steps"] == [
        {"kind": "all_to_all", "digits": [1, 2], "receivers": [1, 1]},
        {"kind": "all_gather", "digits": [0], "receivers": [1]},
    ]
    assert first["forecast"]["collectives"] == {"all-gather": 1, "all-to-all": 1}
    assert first["forecast"]["fetched_bytes"] == 65536
    assert found["groups"][2]["forecast"] is None
    assert found["amplification"] == plan.amplification == 1.0
    assert (found["hosts"], found["profile"]) == ([0, 1, 2, 3], "cpu, object store")


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (2**20, "1.0 MiB"),
        (5 * 2**30, "5.0 GiB"),
        (2**40, "1.0 TiB"),
        (2**52, "4096.0 TiB"),
    ],
)
def test_bytes_text(count, text):
    assert explain.bytes_text(count) == text


def test_parts_of_axes_are_named_by_their_factors():
    digits = factorise(mesh_of({"data": 2, "fsdp": 12, "one": 1}, 2))
    assert digits.sizes == (2, 2, 2, 3)
    assert explain.digits_text((0, 1, 2, 3), digits) == ["data", "fsdp"]
    assert explain.digits_text((1, 2), digits) == ["fsdp[2,2]"]
    assert explain.digits_text((3, 0), digits) == ["fsdp[3]", "data"]
    assert explain.digits_text((), digits) == []


def test_steps_text():
    digits = factorise(mesh_of({"data": 2, "fsdp": 4}, 2))
    assert explain.steps_text((), digits) == "none"
    steps = [
        Step(kind="slice", digits=(1,), donor=2, receivers=()),
        Step(kind="all_to_all", digits=(2,), donor=2, receivers=(0,)),
        Step(kind="all_gather", digits=(0,), donor=None, receivers=(1,)),
    ]
    assert explain.steps_text(steps, digits) == (
        "slice fsdp[2], all_to_all fsdp[2] (leaves to dim 1), all_gather data"
    )


def test_ratio_of_nothing():
    assert (explain.ratio(0, 0), explain.ratio(3, 2)) == (1.0, 1.5)
    assert explain.record_dict(None) is None
