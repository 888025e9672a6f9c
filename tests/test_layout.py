"""Intermediates: who holds which element, before, between and after the moves."""

import itertools
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_oracle import (
    chunks_of,
    coordinates,
    fixed,
    held,
    index_of,
    layouts,
    mesh_of,
)

from orbax_reshard.planning.candidates import GroupShape, target_intermediate
from orbax_reshard.planning.digits import factorise
from orbax_reshard.planning.layout import (
    Step,
    block_bytes,
    make_intermediate,
    rotated,
)
from orbax_reshard.planning.plan import partial_wave


def make(mesh, shape, chunks, target, num_kept, extras):
    return make_intermediate(
        shape=shape,
        chunk_shape=chunks,
        target=target,
        digits=factorise(mesh),
        num_kept=num_kept,
        extras=extras,
    )


def spans(box) -> tuple[range, ...]:
    return tuple(range(start, stop) for start, stop in box)


def coverage(boxes) -> Counter:
    return Counter(e for box in boxes for e in itertools.product(*spans(box)))


@fixed(300)
@given(layouts())
def test_boxes_against_slicing_ranges(layout):
    digits, _, intermediate = layout
    boxes = intermediate.device_boxes(digits)
    assert len(boxes) == digits.mesh.num_devices
    for box, expected in zip(boxes, held(intermediate, digits), strict=True):
        # An empty range says nothing of where it starts.
        if all(expected) or math.prod(b - a for a, b in box):
            assert spans(box) == expected
        for (start, stop), extent, width in zip(
            box, intermediate.shape, intermediate.piece_width, strict=True
        ):
            assert 0 <= start <= stop <= extent
            assert stop - start <= width


@fixed(300)
@given(layouts(), st.integers(0, 5))
def test_every_element_is_held_once_per_unused_place(layout, by):
    digits, group, intermediate = layout
    used = set(itertools.chain.from_iterable(intermediate.layout))
    copies = math.prod(n for d, n in enumerate(digits.sizes) if d not in used)
    for some in (intermediate, rotated(intermediate, by, digits)):
        covered = coverage(some.device_boxes(digits))
        # All of the array, and each element exactly as often as digits are unused:
        # so boxes overlap only along those, with padding or without, turned or not.
        assert len(covered) == math.prod(group.shape)
        assert set(covered.values()) <= {copies}


def test_the_coverage_check_can_fail():
    mesh = mesh_of({"x": 4}, 4)
    whole = make(mesh, (8,), (2,), ((),), (0,), ((0, 1),))
    boxes = whole.device_boxes(factorise(mesh))
    assert set(coverage(boxes).values()) == {1}
    assert set(coverage([*boxes[:-1], boxes[0]]).values()) == {1, 2}
    assert len(coverage(boxes[:-1])) == 6


@fixed(300)
@given(layouts())
def test_hosts_share_no_chunk_of_a_dimension_that_starts_on_the_grid(layout):
    digits, group, intermediate = layout
    for dim, chunk in enumerate(group.chunk_shape):
        width = intermediate.shard_width[dim]
        if width % chunk and width != group.shape[dim]:
            continue
        cross = intermediate.cross_extras(dim, digits)
        own = [*intermediate.kept[dim], *cross]
        readers: dict[int, set[int]] = {}
        for place, box in zip(
            coordinates(digits), held(intermediate, digits), strict=True
        ):
            for (at,) in chunks_of(box[dim : dim + 1], (chunk,)):
                readers.setdefault(at, set()).add(index_of(place, own, digits))
        if cross:
            assert all(len(found) == 1 for found in readers.values())


@fixed(300)
@given(layouts())
def test_each_digit_makes_exactly_one_move(layout):
    digits, _, intermediate = layout
    steps = intermediate.steps(digits)
    moved = Counter(d for s in steps for d in s.digits)
    target = set(itertools.chain.from_iterable(intermediate.target))
    kept = set(itertools.chain.from_iterable(intermediate.kept))
    extras = set(itertools.chain.from_iterable(intermediate.extras))
    assert moved == Counter((target - kept) | (extras - target))
    for step in steps:
        group = set(step.digits)
        if step.kind == "slice":
            assert group <= target - kept - extras and step.receivers == ()
        elif step.kind == "all_to_all":
            assert group <= extras & target
        else:
            assert group <= extras - target and step.donor is None
            assert len({digits.cross_host[d] for d in group}) == 1
        for digit, to in zip(step.digits, step.receivers, strict=False):
            assert digit in intermediate.extras[to]
    kinds = [s.kind for s in steps]
    assert kinds == sorted(kinds, key=["slice", "all_to_all", "all_gather"].index)
    gathers = [digits.cross_host[s.digits[0]] for s in steps if s.kind == "all_gather"]
    assert gathers in ([], [True], [False], [True, False])
    for extra in intermediate.extras:
        crossing = [digits.cross_host[d] for d in extra]
        assert crossing == sorted(crossing, reverse=True)
    assert intermediate.is_target == (not steps)


@fixed(200)
@given(layouts(), st.integers(1, 4))
def test_a_partial_wave_only_leaves_leaves_out(layout, count):
    digits, _, intermediate = layout
    count = min(count, intermediate.shape[0])
    part = partial_wave(intermediate, count)
    assert part.piece_width == intermediate.piece_width
    for whole, some in zip(held(intermediate, digits), held(part, digits), strict=True):
        assert list(some[0]) == [leaf for leaf in whole[0] if leaf < count]
        assert some[1:] == whole[1:]


# --- examples -------------------------------------------------------------------------


def test_the_picture_of_the_docstring():
    # Columns a b c on the target, rows replicated; b and c give way to rows.
    mesh = mesh_of({"d": 2, "a": 2, "b": 2, "c": 2}, 4)
    digits = factorise(mesh)
    made = make(mesh, (16, 8), (2, 8), ((), (1, 2, 3)), (0, 1), ((2, 3, 0), ()))
    # d (digit 0) and a leave the process, b and c do not: d comes first.
    assert digits.cross_host == (True, True, False, False)
    assert made.layout == ((0, 2, 3), (1,))
    assert (made.shard_width, made.host_width, made.piece_width) == (
        (16, 4),
        (8, 4),
        (2, 4),
    )
    assert made.steps(digits) == (
        Step(kind="all_to_all", digits=(2, 3), donor=1, receivers=(0, 0)),
        Step(kind="all_gather", digits=(0,), donor=None, receivers=(0,)),
    )
    assert [s.hlo_name for s in made.steps(digits)] == ["all-to-all", "all-gather"]


def test_a_suffix_that_is_used_nowhere_is_a_slice():
    mesh = mesh_of({"x": 4}, 1)
    made = make(mesh, (4, 8), (4, 8), ((0, 1), ()), (0, 0), ((), (1,)))
    assert made.steps(factorise(mesh)) == (
        Step(kind="slice", digits=(0,), donor=0, receivers=()),
        Step(kind="all_to_all", digits=(1,), donor=0, receivers=(1,)),
    )


def test_six_chunks_for_four_hosts_stay_on_chunk_edges():
    # 6 rows of chunks, 4 hosts: two each for three of them, and one host idles.
    mesh = mesh_of({"x": 4}, 4)
    digits = factorise(mesh)
    made = make(mesh, (12, 4), (2, 4), ((), ()), (0, 0), ((0, 1), ()))
    rows = [box[0] for box in made.device_boxes(digits)]
    assert rows == [(0, 4), (4, 8), (8, 12), (12, 12)]
    turned = [box[0] for box in rotated(made, 1, digits).device_boxes(digits)]
    assert turned == [(12, 12), (0, 4), (4, 8), (8, 12)]
    # Off the grid there is no such edge to keep to: 9 of 18 rows in chunks of 4.
    mesh = mesh_of({"x": 4}, 4)
    made = make(mesh, (18, 4), (4, 4), ((0,), ()), (1, 0), ((1,), ()))
    assert (made.shard_width[0], made.host_width[0]) == (9, 5)


def test_turning_leaves_alone_what_has_no_padding():
    mesh = mesh_of({"x": 4}, 4)
    digits = factorise(mesh)
    made = make(mesh, (16, 4), (2, 4), ((), ()), (0, 0), ((0, 1), ()))
    assert rotated(made, 3, digits) == made


def test_two_padded_dimensions_turn_through_all_pairs():
    mesh = mesh_of({"x": 2, "y": 2}, 4)
    digits = factorise(mesh)
    made = make(mesh, (1, 1), (1, 1), ((), ()), (0, 0), ((0,), (1,)))
    readers = []
    for by in range(4):
        boxes = rotated(made, by, digits).device_boxes(digits)
        readers.append([box == ((0, 1), (0, 1)) for box in boxes].index(True))
    assert sorted(readers) == [0, 1, 2, 3]


def test_extras_belong_behind_a_complete_prefix():
    with pytest.raises(ValueError) as error:
        make(mesh_of({"x": 4}), (8,), (8,), ((0, 1),), (1,), ((1,),))
    assert str(error.value) == "extras (1,) on a dimension that dropped digits"


def test_block_bytes_count_the_padding():
    mesh = mesh_of({"x": 4}, 4)
    made = make(mesh, (1, 6), (1, 4), ((), ()), (0, 0), ((0, 1), ()))
    assert (made.piece_width, block_bytes(made, 2)) == ((1, 6), 12)


def test_the_target_itself():
    mesh = mesh_of({"x": 4}, 2)
    digits = factorise(mesh)
    group = GroupShape(
        shape=(3, 8),
        chunk_shape=(1, 8),
        element_bytes=4,
        moved_bytes=4,
        target=((), (0, 1)),
    )
    made = target_intermediate(group, digits)
    assert made.is_target and made.steps(digits) == ()
    assert made.device_boxes(digits)[1] == ((0, 3), (2, 4))
