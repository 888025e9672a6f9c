"""Decisions and their reasons, budgets, and that a plan follows from its arguments."""

import ast
import json
import os
import pathlib
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_oracle import chunks_per_host, fixed, groups, mesh_of, meshes, request

from orbax_reshard.errors import OptionsError
from orbax_reshard.planning import reads
from orbax_reshard.planning.candidates import GroupShape, target_intermediate
from orbax_reshard.planning.digits import factorise
from orbax_reshard.planning.explain import REASONS
from orbax_reshard.planning.plan import RestorePlan
from orbax_reshard.planning.planner import build_plan
from orbax_reshard.planning.profile import CPU_FILE, CPU_OBJECT_STORE

PACKAGE = pathlib.Path(reads.__file__).parents[1]
MIB = 2**20


def plan(requests, policy="read_once", profile=CPU_OBJECT_STORE, **kwargs):
    return build_plan(requests, policy=policy, profile=profile, **kwargs)


def columns(count: int = 1, *, hosts=4, rows: int = 8, prefix: str = "w"):
    """Row chunks on disk, columns wanted: stock reads everything on every host."""
    mesh = mesh_of({"t": 8}, hosts)
    return [
        request(f"{prefix}{i}", mesh, (8 * rows, 64), (rows, 64), None, "t")
        for i in range(count)
    ]


@st.composite
def requests(draw, max_signatures: int = 3):
    """Leaves of a few signatures over one mesh, mixed."""
    mesh = draw(meshes(max_devices=8))
    found = []
    for number in range(draw(st.integers(1, max_signatures))):
        _, spec, group = draw(groups(mesh, max_rank=2))
        with_sizes = draw(st.booleans())
        for leaf in range(draw(st.integers(1, 6))):
            one = request(
                f"{number}.{leaf}",
                mesh,
                group.shape[1:],
                group.chunk_shape[1:],
                *[axes or None for axes in spec],
                encoded_bytes=None,
            )
            if with_sizes:
                count = one.stored.num_chunks
                sizes = tuple(draw(st.integers(1, 99)) for _ in range(min(count, 4)))
                sizes = (sizes * count)[:count]
                one = request(
                    one.stored.name,
                    mesh,
                    group.shape[1:],
                    group.chunk_shape[1:],
                    *[axes or None for axes in spec],
                    encoded_bytes=sizes,
                )
            found.append(one)
    return draw(st.permutations(found))


def direct_bytes(made: RestorePlan, asked) -> int:
    """Bytes when each host fetches the chunks of its own shards, each chunk once."""
    total = 0
    for group in made.planned:
        for index in group.leaves:
            one = asked[index]
            digits = factorise(one.mesh)
            whole = GroupShape(
                shape=(1, *one.stored.shape),
                chunk_shape=(1, *one.stored.chunk_shape),
                element_bytes=4,
                moved_bytes=4,
                target=((), *digits.layout(one.spec)),
            )
            found = chunks_per_host(
                target_intermediate(whole, digits), digits, whole.chunk_shape
            )
            sizes = one.stored.encoded_bytes
            flat = range(one.stored.num_chunks)
            order = dict(zip(_grid(whole.grid_shape), flat, strict=True))
            for chunks, _ in found.values():
                total += sum(
                    sizes[order[c]] if sizes else one.stored.chunk_bytes for c in chunks
                )
    return total


def _grid(shape):
    """All chunk positions in row-major order."""
    if not shape:
        return [()]
    rest = _grid(shape[1:])
    return [(i, *tail) for i in range(shape[0]) for tail in rest]


# --- a function of its arguments ------------------------------------------------------


@fixed(60)
@given(requests(), st.sampled_from(["auto", "read_once", "direct"]))
def test_the_same_arguments_give_the_same_text(asked, policy):
    first, second = plan(asked, policy), plan(list(asked), policy)
    assert first.to_json() == second.to_json()
    assert first.digest() == second.digest()
    assert json.loads(first.to_json())["policy"] == policy


@fixed(60)
@given(requests(), st.randoms(use_true_random=False))
def test_the_order_of_leaves_decides_nothing_for_a_leaf(asked, random):
    shuffled = list(asked)
    random.shuffle(shuffled)

    def decisions(made):
        return {
            leaf.name: (leaf.decision, leaf.reason, leaf.intermediate_spec)
            for leaf in made.leaves
        }

    one, other = plan(asked), plan(shuffled)
    assert decisions(one) == decisions(other)
    assert one.forecast.chunk_reads == other.forecast.chunk_reads
    assert one.needed_bytes == other.needed_bytes


# The package's own __init__ needs JAX and Orbax; planning does not, and starts faster.
_IN_ANOTHER_PROCESS = """
import sys, types
package = types.ModuleType("orbax_reshard")
package.__path__ = [sys.argv[1]]
sys.modules["orbax_reshard"] = package
from orbax_reshard.planning.digits import DeviceMesh
from orbax_reshard.planning.plan import LeafRequest
from orbax_reshard.planning.planner import build_plan
from orbax_reshard.planning.profile import CPU_OBJECT_STORE
from orbax_reshard.planning.stored import StoredArray
mesh = DeviceMesh(axis_names=("r", "t"), axis_sizes=(2, 4), device_ids=tuple(range(8)),
                  hosts=(0, 0, 1, 1, 2, 2, 3, 3))
shapes = {"w": (64, 64), "e": (8, 32, 16), "b": (64,), "s": ()}
specs = {"w": ((), ("t",)), "e": (("r",), (), ("t",)), "b": (("r", "t"),), "s": ()}
requests = [
    LeafRequest(
        stored=StoredArray(name=f"{key}{i}", shape=shape, dtype="float32",
                           dtype_bytes=4, chunk_shape=shape, driver="zarr3"),
        mesh=mesh, spec=specs[key], dtype="float32", moved_bytes=4)
    for i in range(5) for key, shape in shapes.items()
]
print(build_plan(requests, policy="read_once", profile=CPU_OBJECT_STORE).to_json())
assert not {"jax", "orbax", "tensorstore"} & set(sys.modules)
"""


def test_other_hash_seeds_give_the_same_text_and_planning_needs_no_jax():
    running = [
        subprocess.Popen(
            [sys.executable, "-c", _IN_ANOTHER_PROCESS, str(PACKAGE)],
            env=os.environ | {"PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2", "3")
    ]
    texts = [process.communicate(timeout=120)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0, 0]
    assert texts[0] == texts[1] == texts[2]
    groups_of = json.loads(texts[0])["groups"]
    assert {g["decision"] for g in groups_of} == {"planned"}


def test_digests_differ_where_plans_do():
    base = columns(2)
    others = [
        plan(base, "auto"),
        plan(columns(3)),
        plan(columns(2, hosts=2)),
        plan(columns(2, rows=4)),
        plan(base, device_budget_bytes=5000),
        plan(base, read_budget_bytes=4 * 2**10),
    ]
    digests = {made.digest() for made in [plan(base), *others]}
    assert len(digests) == 7


# --- never above direct ---------------------------------------------------------------


@fixed(100)
@given(requests(), st.sampled_from(["auto", "read_once"]))
def test_never_above_direct(asked, policy):
    made = plan(asked, policy)
    limit = direct_bytes(made, asked)
    assert made.forecast.fetched_bytes <= limit
    # Stock may fetch a chunk once per box of a host: told as an upper bound.
    assert made.forecast.chunk_reads <= made.stock.chunk_reads
    for leaf in made.leaves:
        assert leaf.reason in REASONS
        assert (leaf.decision == "planned") == (leaf.reason in ("reads_once", "faster"))


# --- reasons --------------------------------------------------------------------------


def reason(asked, policy="read_once", **kwargs) -> str:
    (only,) = {leaf.reason for leaf in plan(asked, policy, **kwargs).leaves}
    return only


def test_reasons_of_planning(monkeypatch):
    large = columns(8, rows=4096)
    aligned = [request("a", mesh_of({"f": 8}, 4), (64, 8), (8, 8), "f")]
    assert reason(columns()) == "reads_once"
    assert reason(large, "auto") == "faster"
    assert reason(columns(), "direct") == "policy_direct"
    assert reason(aligned) == reason(aligned, "auto") == "already_read_once"
    # R26: scalars on one host are already there; on four hosts they are read once.
    scalar = [request("s", mesh_of({"f": 8}, 1), (), ())]
    assert reason(columns(), device_budget_bytes=10) == "device_budget"
    assert reason(columns(), "auto", device_budget_bytes=10) == "device_budget"
    # Eight devices of one host hold the same scalar: one distinct box, read once.
    assert reason(scalar) == "already_read_once"
    mixed = [request("m", mesh_of({"t": 4}, (0, 1, 1, 0)), (8, 8), (2, 8), None, "t")]
    assert reason(mixed) == "reads_once"
    monkeypatch.setattr(reads, "MAX_ENUMERATED_CELLS", 3)
    assert reason(mixed) == "irregular_mesh_too_large"


def test_auto_declines_tiny_arrays_on_a_warm_local_disk():
    made = plan(columns(4), "auto", CPU_FILE)
    assert {(leaf.decision, leaf.reason) for leaf in made.leaves} == {
        ("direct", "not_faster")
    }
    # The same arrays are worth it where each byte is dear, and there are enough.
    made = plan(columns(4, rows=16384), "auto", CPU_OBJECT_STORE)
    assert {leaf.reason for leaf in made.leaves} == {"faster"}


def test_what_was_declined_before_stays_declined():
    asked = [
        request("k", None, (4,), (4,), declined="memory_kind", target_text="pinned"),
        *columns(),
    ]
    made = plan(asked)
    leaf = made.leaves[0]
    assert (leaf.decision, leaf.reason, leaf.target_spec, leaf.forecast) == (
        "direct",
        "memory_kind",
        "pinned",
        None,
    )
    assert made.leaves[1].decision == "planned"
    assert (made.hosts, len(made.planned)) == ((0, 1, 2, 3), 1)


def literals(path: pathlib.Path) -> set[str]:
    return {
        node.value
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def test_no_reason_is_missing_and_none_is_idle():
    used = set()
    for path in PACKAGE.rglob("*.py"):
        if path.name != "explain.py":
            used |= literals(path)
    assert set(REASONS) <= used
    # What targets.py returns as a reason is a literal with underscores.
    told = {"single_device", "custom_layout", "shape_differs", "empty_array"}
    assert told <= set(REASONS)


def test_an_unknown_policy():
    with pytest.raises(OptionsError) as error:
        plan(columns(), "fast")
    assert error.value.code == "unknown_policy"
    assert str(error.value) == (
        "policy is 'fast'; it must be one of auto, read_once, direct"
    )


def test_no_leaves():
    made = plan([])
    assert (made.leaves, made.groups, made.hosts, made.amplification) == ((), (), (), 1)


# --- bounds ---------------------------------------------------------------------------


def test_the_device_budget_on_both_sides_of_the_bound():
    free = plan(columns(4)).planned[0]
    peak = free.peak_device_bytes
    at = plan(columns(4), device_budget_bytes=peak).planned[0]
    assert at == free
    below = plan(columns(4), device_budget_bytes=peak - 1).planned[0]
    assert below.peak_device_bytes < peak
    # Smaller waves rather than no plan: fewer leaves at a time, each read once.
    assert below.wave_size < free.wave_size
    assert below.forecast.fetched_bytes == free.forecast.fetched_bytes
    one = plan(columns(1)).planned[0].peak_device_bytes
    at = plan(columns(4), device_budget_bytes=one)
    assert (at.planned[0].wave_size, at.amplification) == (1, 1.0)
    # No exchange fits: each host reads what it keeps, which is all of it.
    below = plan(columns(4), device_budget_bytes=one - 1)
    assert (below.planned[0].steps, below.amplification) == ((), 4.0)
    # Not even a device's own shard of one leaf fits.
    shard = 64 * 64 * 4 // 8
    assert reason(columns(4), device_budget_bytes=shard) == "reads_once"
    assert reason(columns(4), device_budget_bytes=shard - 1) == "device_budget"


@fixed(60)
@given(requests(), st.integers(1, 4000), st.sampled_from(["auto", "read_once"]))
def test_no_plan_is_above_the_device_budget(asked, budget, policy):
    made = plan(asked, policy, device_budget_bytes=budget)
    assert all(group.peak_device_bytes <= budget for group in made.planned)
