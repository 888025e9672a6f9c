"""Reshard plans by brute force: which device holds which elements after each move.

The oracle knows a device's block as a set of element numbers. It takes the blocks of
the source from the mesh's coordinates, makes each move on the sets, and compares what
is left with the blocks of the target. It uses no formula of the planner.
"""

import dataclasses
import doctest
import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_oracle import fixed

from orbax_reshard.planning import relayout, relayout_cost
from orbax_reshard.planning.digits import DeviceMesh
from orbax_reshard.planning.relayout import plan_relayout, same_blocks
from orbax_reshard.planning.relayout_cost import relayout_cost as cost_of

COUNTS = (1, 2, 3, 4, 6, 8, 12, 16)


# --- the oracle -----------------------------------------------------------------------


def blocks(mesh: DeviceMesh, spec, shape) -> dict[int, frozenset[int]]:
    """Device id -> the numbers of the elements that it holds."""
    places = itertools.product(*map(range, mesh.axis_sizes))
    held = {}
    for device, place in zip(mesh.device_ids, places, strict=True):
        at = dict(zip(mesh.axis_names, place, strict=True))
        size = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
        ranges = []
        for extent, axes in zip(shape, spec, strict=True):
            indices = list(range(extent))
            for axis in axes:
                width = len(indices) // size[axis]
                indices = indices[at[axis] * width :][:width]
            ranges.append(indices)
        held[device] = frozenset(
            int(np.ravel_multi_index(index, shape)) if shape else 0
            for index in itertools.product(*ranges)
        )
    return held


def digit_values(plan, shape) -> dict[int, list[int]]:
    """For each target digit on a dimension, the value it has at each element."""
    values = {}
    sizes = plan.digits.sizes
    for dim, run in enumerate(plan.intermediate.target):
        indices = np.indices(shape)[dim].reshape(-1) if shape else np.zeros(1, int)
        width = shape[dim] if run else 1
        for digit in run:
            width //= sizes[digit]
            values[digit] = (indices // width % sizes[digit]).tolist()
    return values


def simulate(plan, held, shape):
    """The blocks after all moves, by device id, and the elements each received."""
    digits = plan.digits
    ids = digits.mesh.device_ids
    places = list(itertools.product(*map(range, digits.sizes)))
    value = digit_values(plan, shape)
    now = [held[d] for d in ids]
    received = [0] * len(ids)
    goes_to = dict(plan.permutation) or {i: i for i in range(len(ids))}
    assert sorted(goes_to) == sorted(goes_to.values()) == list(range(len(ids)))

    def wanted(block, position, moved):
        return frozenset(
            e for e in block if all(value[d][e] == places[position][d] for d in moved)
        )

    kinds = [step.kind for step in plan.steps]
    assert kinds == sorted(kinds, key=["slice", "all_to_all", "all_gather"].index)
    num_slices = kinds.count("slice")
    for step in plan.steps[:num_slices]:
        now = [wanted(b, goes_to[i], step.digits) for i, b in enumerate(now)]
    came = {to: now[i] for i, to in goes_to.items()}
    for source, to in goes_to.items():
        received[to] += len(came[to]) if source != to else 0
    now = [came[i] for i in range(len(ids))]
    for step in plan.steps[num_slices:]:
        after = []
        for i, place in enumerate(places):
            parts = []
            for j, other in enumerate(places):
                alike = (
                    a == b
                    for d, (a, b) in enumerate(zip(place, other, strict=True))
                    if d not in step.digits
                )
                if all(alike):
                    part = now[j]
                    if step.kind == "all_to_all":
                        part = wanted(part, i, step.digits)
                    parts.append(part)
                    received[i] += len(part) if i != j else 0
            block = frozenset().union(*parts)
            assert len(block) == sum(map(len, parts)), "an element came twice"
            after.append(block)
        if step.kind == "all_to_all":
            assert list(map(len, after)) == list(map(len, now))
        now = after
    return dict(zip(ids, now, strict=True)), received


# --- random pairs ---------------------------------------------------------------------


@st.composite
def meshes(draw, num_devices: int) -> DeviceMesh:
    """Axes of any size, 1 included; devices forward, reversed, interleaved, ..."""
    sizes, left = [], num_devices
    for _ in range(draw(st.integers(0, 3))):
        size = draw(st.sampled_from([n for n in COUNTS if left % n == 0]))
        sizes.append(size)
        left //= size
    sizes.append(left)
    ids = np.arange(num_devices)
    order = draw(
        st.sampled_from(
            ["forward", "forward", "reversed", "mixed", "transposed", "any"]
        )
    )
    if order == "reversed":
        ids = ids[::-1]
    elif order == "mixed":
        ids = np.concatenate([ids[::2], ids[1::2]])
    elif order == "transposed":
        ids = ids.reshape(sizes[::-1]).T
    elif order == "any":
        ids = np.array(draw(st.permutations(range(num_devices))))
    per_host = draw(st.sampled_from([n for n in COUNTS if num_devices % n == 0]))
    flat = tuple(int(i) for i in ids.reshape(-1))
    return DeviceMesh(
        axis_names=tuple(f"a{i}" for i in range(len(sizes))),
        axis_sizes=tuple(sizes),
        device_ids=flat,
        hosts=tuple(i // per_host for i in flat),
    )


@st.composite
def specs(draw, mesh: DeviceMesh, rank: int):
    """Axes in any order on any dimension, or on none."""
    dims = [[] for _ in range(rank)]
    for axis in draw(st.permutations(mesh.axis_names)):
        dim = draw(st.integers(-1, rank - 1))
        if dim >= 0:
            dims[dim].append(axis)
    return tuple(map(tuple, dims))


def parts(mesh, axes) -> int:
    return math.prod(mesh.axis_sizes[mesh.axis_names.index(axis)] for axis in axes)


@st.composite
def pairs(draw, counts=COUNTS):
    """What ``plan_relayout`` takes, with an extent that every spec divides."""
    num_devices = draw(st.sampled_from(counts))
    rank = draw(st.integers(0, 3))
    source, target = draw(meshes(num_devices)), draw(meshes(num_devices))
    asked = {
        "source_mesh": source,
        "source_spec": draw(specs(source, rank)),
        "target_mesh": target,
        "target_spec": draw(specs(target, rank)),
    }
    shape = tuple(
        math.lcm(parts(source, own), parts(target, wanted))
        for own, wanted in zip(asked["source_spec"], asked["target_spec"], strict=True)
    )
    leaves = draw(st.sampled_from([1, 1, 3]))
    return asked, (leaves, *shape)


def holds(asked, side: str, shape):
    """Blocks of a wave: dimension 0 counts leaves and is never cut."""
    return blocks(asked[f"{side}_mesh"], ((), *asked[f"{side}_spec"]), shape)


@fixed(300)
@given(pairs())
def test_moves_end_at_the_target(pair):
    asked, shape = pair
    plan = plan_relayout(shape=shape, **asked)
    source, target = holds(asked, "source", shape), holds(asked, "target", shape)
    assert same_blocks(**asked) == (source == target)
    if plan is None:
        return
    after, received = simulate(plan, source, shape)
    assert after == target
    # Bytes that the plan says a device receives: those of the one that gets most.
    cost = cost_of(plan, element_bytes=3)
    assert cost.in_host_bytes + cost.cross_host_bytes == 3 * max(received)
    assert cost.result_bytes == 3 * max(map(len, target.values()))
    most = max(map(len, source.values())) + max(map(len, target.values()))
    if plan.steps or plan.permutation:
        assert cost.peak_bytes >= 3 * most


@fixed(150)
@given(pairs(counts=(2, 4, 8, 16)))
def test_powers_of_two_always_have_a_plan(pair):
    asked, shape = pair
    assert plan_relayout(shape=shape, **asked) is not None


@fixed(50)
@given(pairs())
def test_equal_questions_have_equal_answers(pair):
    asked, shape = pair
    assert plan_relayout(shape=shape, **asked) == plan_relayout(shape=shape, **asked)


# --- examples -------------------------------------------------------------------------


def mesh(sizes, ids=None, per_host=64) -> DeviceMesh:
    total = math.prod(sizes)
    ids = tuple(range(total)) if ids is None else tuple(ids)
    return DeviceMesh(
        axis_names=("x", "y", "z")[: len(sizes)],
        axis_sizes=tuple(sizes),
        device_ids=ids,
        hosts=tuple(i // per_host for i in ids),
    )


@pytest.mark.parametrize(
    ("source", "target", "moves"),
    [
        # What is unused becomes a slice; what is used elsewhere an all-to-all.
        (((4, 2), ("x",), ()), ((4, 2), ("x",), ("y",)), "slice"),
        (((4, 2), ("x",), ()), ((4, 2), (), ("x",)), "all_to_all"),
        (((4, 2), ("x",), ()), ((4, 2), (), ("y",)), "slice all_gather"),
        # One axis for another on the same dimension: whole blocks change hands.
        (((2, 2), ("x",), ()), ((2, 2), ("y",), ()), "permute"),
        (((2, 2), ("x",), ("y",)), ((2, 2), ("y",), ("x",)), "permute"),
        # ... but only what the receiver needs.
        (((2, 2), ("x",), ()), ((2, 2), ("y",), ("x",)), "slice permute"),
        # R102.
        (((4, 2), ("y",), (), ("x",)), ((4, 2), (), ("x", "y"), ()), "a2a a2a"),
        # Cut at places that do not divide, but as one axis they are the same six.
        (((2, 3), ("x", "y"), ()), ((3, 2), (), ("x", "y")), "all_to_all"),
        (((2, 3), ("x", "y"), ()), ((3, 2), ("x", "y"), ()), ""),
        (((2, 3), (), ()), ((3, 2), ("x",), ("y",)), "slice slice"),
        (((2, 3, 1), ("x", "z", "y"), ()), ((3, 2), (), ()), "all_gather"),
    ],
)
def test_moves(source, target, moves):
    asked = {
        "source_mesh": mesh(source[0]),
        "source_spec": source[1:],
        "target_mesh": mesh(target[0]),
        "target_spec": target[1:],
    }
    plan = plan_relayout(shape=(1, *[24] * len(source[1:])), **asked)
    kinds = [step.kind for step in plan.steps]
    if plan.permutation:
        kinds.insert(kinds.count("slice"), "permute")
    assert " ".join(kinds) == moves.replace("a2a", "all_to_all")


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (((2, 3), ("x",), ("y",)), ((3, 2), ("x",), ("y",))),
        (((2, 3), ("x",)), ((2, 3), ("y",))),
        (((6,), ("x",)), ((2, 3), ("y", "x"))),
    ],
)
def test_no_common_digits(source, target):
    assert (
        plan_relayout(
            shape=(1, *[24] * len(source[1:])),
            source_mesh=mesh(source[0]),
            source_spec=source[1:],
            target_mesh=mesh(target[0]),
            target_spec=target[1:],
        )
        is None
    )


def test_other_devices_have_no_plan_and_no_same_blocks():
    asked = {
        "source_mesh": mesh((2,)),
        "source_spec": (("x",),),
        "target_mesh": mesh((2,), (2, 3)),
        "target_spec": (("x",),),
    }
    assert plan_relayout(shape=(1, 2), **asked) is None
    assert not same_blocks(**asked)


@pytest.mark.parametrize("order", [(3, 2, 1, 0), (0, 2, 1, 3), (1, 2, 3, 0)])
def test_device_order_is_one_permutation(order):
    plan = plan_relayout(
        shape=(1, 4),
        source_mesh=mesh((4,)),
        source_spec=(("x",),),
        target_mesh=mesh((4,), order),
        target_spec=(("x",),),
    )
    assert plan.steps == ()
    assert plan.permutation == tuple(sorted((order.index(d), d) for d in range(4)))


def test_transposed_replicas_do_not_move():
    # Minor axis of the source's device order, major axis of the target's.
    plan = plan_relayout(
        shape=(1, 4),
        source_mesh=mesh((2, 2), (0, 2, 1, 3)),
        source_spec=(("x",),),
        target_mesh=mesh((2, 2)),
        target_spec=(("y",),),
    )
    assert plan.permutation == () and plan.steps == ()


def test_bytes_within_and_between_hosts():
    # Four hosts of two: x is between hosts, y within.
    plan = plan_relayout(
        shape=(1, 8, 8),
        source_mesh=mesh((4, 2), per_host=2),
        source_spec=(("x", "y"), ()),
        target_mesh=mesh((4, 2), per_host=2),
        target_spec=((), ()),
    )
    cost = cost_of(plan, element_bytes=4)
    # From 32 bytes: across hosts 3 x 32, then in the host 1 x 128.
    assert (cost.cross_host_bytes, cost.in_host_bytes) == (96, 128)
    assert [step.kind for step in plan.steps] == ["all_gather", "all_gather"]
    swap = plan_relayout(
        shape=(1, 8),
        source_mesh=mesh((2,), per_host=1),
        source_spec=(("x",),),
        target_mesh=mesh((2,), (1, 0), per_host=1),
        target_spec=(("x",),),
    )
    cost = cost_of(swap, element_bytes=1)
    assert (cost.cross_host_bytes, cost.in_host_bytes, cost.num_collectives) == (
        4,
        0,
        1,
    )


def test_the_oracle_can_fail():
    asked = {
        "source_mesh": mesh((2, 2)),
        "source_spec": (("x",), ()),
        "target_mesh": mesh((2, 2)),
        "target_spec": (("y",), ("x",)),
    }
    shape = (1, 4, 4)
    plan = plan_relayout(shape=shape, **asked)
    source, target = holds(asked, "source", shape), holds(asked, "target", shape)
    assert simulate(plan, source, shape)[0] == target
    for wrong in (
        dataclasses.replace(plan, permutation=()),
        dataclasses.replace(plan, steps=()),
        dataclasses.replace(plan, permutation=((0, 1), (1, 0), (2, 3), (3, 2))),
    ):
        assert simulate(wrong, source, shape)[0] != target


def test_the_examples_in_the_docstrings():
    result = doctest.testmod(relayout)
    assert result.attempted > 0 and result.failed == 0
    assert doctest.testmod(relayout_cost).failed == 0
