"""Pieces: every chunk that is needed in exactly one, every element exactly once."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_oracle import fixed

from orbax_reshard.planning.boxes import (
    Piece,
    box_size,
    ceil_div,
    intersect,
    local_slices,
    pieces,
)


@st.composite
def situations(draw):
    """A shape, a chunk grid, boxes (some empty, some equal), and a bound."""
    rank = draw(st.integers(0, 3))
    shape = [draw(st.integers(1, 12)) for _ in range(rank)]
    chunk_shape = [draw(st.integers(1, extent + 2)) for extent in shape]
    boxes = []
    for _ in range(draw(st.integers(0, 5))):
        ends = [
            sorted((draw(st.integers(0, extent)), draw(st.integers(0, extent))))
            for extent in shape
        ]
        boxes.append(tuple((a, b) for a, b in ends))
    return shape, chunk_shape, boxes, draw(st.integers(1, 9))


def elements(box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(start, stop) for start, stop in box)))


def chunks(found, chunk_shape) -> set[tuple[int, ...]]:
    return {tuple(i // c for i, c in zip(at, chunk_shape, strict=True)) for at in found}


def faults(parts: list[Piece], shape, chunk_shape, boxes, max_chunks) -> list[str]:
    """What is wrong with ``parts``, by looking at every element and every chunk."""
    found = []
    touched = [chunks(elements(p.region), chunk_shape) for p in parts]
    needed = set().union(*(chunks(elements(b), chunk_shape) for b in boxes), set())
    if sum(map(len, touched)) != len(set().union(*touched, set())):
        found.append("a chunk lies in two pieces")
    if set().union(*touched, set()) != needed:
        found.append("chunks that are needed and chunks that are read differ")
    if any(len(t) != p.num_chunks for t, p in zip(touched, parts, strict=True)):
        found.append("num_chunks is not the number of chunks")
    if any(p.num_chunks > max_chunks for p in parts):
        found.append("a piece above the bound")
    for index, box in enumerate(boxes):
        covered = [
            e
            for p in parts
            if index in p.boxes
            for e in elements(p.region) & elements(box)
        ]
        if len(covered) != len(set(covered)) or set(covered) != elements(box):
            found.append(f"box {index} is not covered exactly once")
    for p in parts:
        if not elements(p.region) <= elements([(0, n) for n in shape]):
            found.append("a region outside the array")
        if any(not elements(p.region) & elements(boxes[i]) for i in p.boxes):
            found.append("a box that takes nothing from a piece")
        if list(p.boxes) != sorted(set(p.boxes)):
            found.append("boxes out of order")
    return found


@fixed(400)
@given(situations())
def test_pieces_against_every_element(situation):
    shape, chunk_shape, boxes, max_chunks = situation
    parts = list(pieces(boxes, chunk_shape=chunk_shape, max_chunks=max_chunks))
    assert faults(parts, shape, chunk_shape, boxes, max_chunks) == []


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (lambda p: p[:-1], "needed"),
        (lambda p: [*p, p[0]], "two pieces"),
        (lambda p: [Piece(region=((0, 12),), num_chunks=3, boxes=(0, 1))], "bound"),
        (
            lambda p: [Piece(region=p[0].region, num_chunks=2, boxes=(0,)), *p[1:]],
            "num_",
        ),
        (
            lambda p: [Piece(region=((0, 3),), num_chunks=1, boxes=(0,)), *p[1:]],
            "exactly",
        ),
        (
            lambda p: [Piece(region=((0, 4),), num_chunks=1, boxes=(1,)), *p[1:]],
            "nothing",
        ),
        (
            lambda p: [*p[:-1], Piece(region=((8, 13),), num_chunks=1, boxes=(1,))],
            "outs",
        ),
    ],
)
def test_the_check_can_fail(spoil, fault):
    boxes = [((0, 6),), ((5, 12),)]
    parts = list(pieces(boxes, chunk_shape=(4,), max_chunks=2))
    assert faults(parts, [12], [4], boxes, 2) == []
    assert any(fault in f for f in faults(spoil(parts), [12], [4], boxes, 2))


def test_pieces_come_cell_by_cell():
    # Three cells of two rows each: the first box's, what both need, the second's.
    boxes = [((0, 8), (0, 8)), ((0, 8), (4, 12))]
    parts = list(pieces(boxes, chunk_shape=(4, 4), max_chunks=1))
    firsts = [tuple(start // 4 for start, _ in p.region) for p in parts]
    assert firsts == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]
    assert [p.boxes for p in parts] == [(0,), (0,), (0, 1), (0, 1), (1,), (1,)]


def test_a_bound_cuts_rows_before_columns():
    # 4 x 4 chunks, 6 at a time: whole rows of the grid, as they lie in storage.
    parts = list(pieces([((0, 4), (0, 4))], chunk_shape=(1, 1), max_chunks=6))
    assert [p.region for p in parts] == [((i, i + 1), (0, 4)) for i in range(4)]
    # 9 at a time: two rows; 16 or more: everything.
    for bound, count in ((8, 2), (15, 2), (16, 1), (17, 1)):
        found = list(pieces([((0, 4), (0, 4))], chunk_shape=(1, 1), max_chunks=bound))
        assert len(found) == count


def test_regions_are_trimmed_to_what_is_taken():
    (piece,) = pieces([((5, 6),), ((7, 9),)], chunk_shape=(16,), max_chunks=1)
    assert piece == Piece(region=((5, 9),), num_chunks=1, boxes=(0, 1))


def test_scalars_and_nothing():
    (piece,) = pieces([(), ()], chunk_shape=(), max_chunks=1)
    assert piece == Piece(region=(), num_chunks=1, boxes=(0, 1))
    assert list(pieces([], chunk_shape=(4,), max_chunks=1)) == []
    assert list(pieces([((2, 2),)], chunk_shape=(4,), max_chunks=1)) == []


@fixed(200)
@given(st.integers(0, 1000), st.integers(1, 50))
def test_ceil_div(value, by):
    assert ceil_div(value, by) == math.ceil(value / by)


@fixed(200)
@given(situations())
def test_intersect_box_size_and_local_slices(situation):
    shape, _, boxes, _ = situation
    values = np.arange(math.prod(shape)).reshape(shape)
    for one, other in itertools.product(boxes, repeat=2):
        common = intersect(one, other)
        assert elements(common) == elements(one) & elements(other)
        assert box_size(common) == len(elements(common))
        if box_size(common):
            own = values[tuple(slice(*ends) for ends in one)]
            np.testing.assert_array_equal(
                own[local_slices(common, one)],
                values[tuple(slice(*ends) for ends in common)],
            )
