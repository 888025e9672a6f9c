"""Stored arrays: their grid, against walking over all elements."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_oracle import fixed, stored


@st.composite
def arrays(draw):
    rank = draw(st.integers(0, 3))
    shape = [draw(st.integers(0, 7)) for _ in range(rank)]
    return stored("a", shape, [draw(st.integers(1, 8)) for _ in range(rank)])


@fixed(200)
@given(arrays(), st.data())
def test_chunks_touched_against_every_element(array, data):
    box = tuple(
        tuple(sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n)))))
        for n in array.shape
    )

    def chunks(found):
        return {
            tuple(i // c for i, c in zip(at, array.chunk_shape, strict=True))
            for at in itertools.product(*(range(*ends) for ends in found))
        }

    assert array.num_chunks_touched(box) == len(chunks(box))
    assert array.num_chunks_touched(array.whole) == len(chunks(array.whole))
    assert array.num_chunks == len(chunks(array.whole))
    elements = list(itertools.product(*map(range, array.shape)))
    assert array.decoded_bytes == 4 * len(elements)


def test_edge_chunks_have_full_size():
    array = stored("w", (10, 8), (4, 8))
    assert (array.grid_shape, array.num_chunks) == ((3, 1), 3)
    assert (array.chunk_bytes, array.decoded_bytes) == (128, 320)
    scalar = stored("s", (), ())
    assert (scalar.num_chunks, scalar.chunk_bytes, scalar.whole) == (1, 4, ())


@pytest.mark.parametrize(
    ("shape", "chunks", "sizes", "message"),
    [
        ((4,), (2, 2), None, "a.b: the chunk grid has rank 2, the array has rank 1"),
        ((4, 4), (2, 0), None, "a.b: a chunk extent below 1: (2, 0)"),
        ((4,), (2,), (1, 2, 3), "a.b: 3 chunk sizes for 2 chunks"),
    ],
)
def test_what_does_not_belong_together(shape, chunks, sizes, message):
    with pytest.raises(ValueError) as error:
        stored("a.b", shape, chunks, encoded_bytes=sizes)
    assert str(error.value) == message
