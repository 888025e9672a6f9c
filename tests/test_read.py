"""Reading a host's part of a wave from real arrays on disk, every chunk once."""

import asyncio
import itertools
import math

import numpy as np
import pytest
import tensorstore as ts
from hypothesis import assume, given
from hypothesis import strategies as st
from planning_oracle import chunks_per_host, fixed, held, layouts

from orbax_reshard.engine import read
from orbax_reshard.engine.read import (
    Block,
    ByteBudget,
    ReadCounter,
    allocate,
    gather_all,
    read_wave,
)

CHUNK_READS = "/tensorstore/cache/chunk_cache/reads"


def chunk_reads() -> int:
    """Chunks that TensorStore has decoded in this process so far."""
    found = ts.experimental_collect_matching_metrics(CHUNK_READS)
    return sum(value["value"] for metric in found for value in metric["values"])


def write(path, values: np.ndarray, chunk_shape, driver: str) -> ts.TensorStore:
    """Stores ``values``, and opens them again without what was cached."""
    names = {"zarr": "chunks", "zarr3": "chunk_grid"}
    grid: object = list(chunk_shape)
    if driver == "zarr3":
        grid = {"name": "regular", "configuration": {"chunk_shape": grid}}
    spec = {"driver": driver, "kvstore": {"driver": "file", "path": str(path)}}
    array = ts.open(
        {**spec, "metadata": {names[driver]: grid}},
        dtype=ts.dtype(values.dtype),
        shape=values.shape,
        create=True,
    ).result()
    array.write(values).result()
    return ts.open(spec, context=ts.Context()).result()


def in_memory(values: np.ndarray, chunk_shape) -> ts.TensorStore:
    """The same in a store of its own, for tests of many arrays."""
    spec = {"driver": "zarr3", "kvstore": {"driver": "memory", "path": "a/"}}
    grid = {"name": "regular", "configuration": {"chunk_shape": list(chunk_shape)}}
    array = ts.open(
        {**spec, "metadata": {"chunk_grid": grid}},
        dtype=ts.dtype(values.dtype),
        shape=values.shape,
        create=True,
        context=ts.Context(),
    ).result()
    array.write(values).result()
    return array


def numbers(shape, dtype="int32") -> np.ndarray:
    return np.arange(1, math.prod(shape) + 1).reshape(shape).astype(dtype)


def wave(blocks, arrays, chunk_shape, budget=None, counter=None, **kwargs):
    asyncio.run(
        read_wave(
            blocks,
            arrays,
            leaves=kwargs.pop("leaves", range(len(arrays))),
            chunk_shape=chunk_shape,
            budget=budget or ByteBudget(None),
            counter=counter or ReadCounter(),
            **kwargs,
        )
    )


# --- what is read ---------------------------------------------------------------------


@fixed(80)
@given(layouts(max_devices=8, max_rank=2), st.integers(1, 400))
def test_random_layouts_against_slices_of_the_values(layout, max_bytes):
    digits, group, intermediate = layout
    # A shape of no dimensions is one chunk; the rest has at least one.
    leaves = numbers(group.shape)
    arrays = [in_memory(leaf, group.chunk_shape[1:]) for leaf in leaves]
    host = digits.mesh.host_ids[-1]
    pairs = zip(intermediate.device_boxes(digits), digits.mesh.hosts, strict=True)
    boxes = [box for box, h in pairs if h == host]
    blocks = allocate(boxes, intermediate.piece_width, np.dtype("int32"))
    budget, counter = ByteBudget(max_bytes), ReadCounter()
    before = chunk_reads()
    wave(blocks, arrays, group.chunk_shape[1:], budget, counter)
    expected, _ = chunks_per_host(intermediate, digits, group.chunk_shape)[host]
    assert counter.chunks == len(expected) == chunk_reads() - before
    assert sum(counter.by_leaf.values()) == counter.chunks
    assert budget.peak_bytes <= max(max_bytes, group.chunk_bytes)
    by_box = {block.box: block.data for block in blocks}
    spans = [
        own
        for own, h in zip(held(intermediate, digits), digits.mesh.hosts, strict=True)
        if h == host
    ]
    for box, own in zip(boxes, spans, strict=True):
        full = np.zeros(intermediate.piece_width, np.int32)
        part = leaves[tuple(slice(s.start, s.stop) for s in own)]
        full[tuple(slice(0, len(s)) for s in own)] = part
        np.testing.assert_array_equal(by_box[box], full)


@pytest.mark.parametrize("driver", ["zarr", "zarr3"])
def test_each_chunk_is_decoded_once_from_files(tmp_path, driver):
    # Three boxes of one host: two column shards that share all chunks, and one row.
    leaves = [numbers((12, 8)), numbers((12, 8)) * 100]
    arrays = [
        write(tmp_path / str(i), leaf, (4, 8), driver) for i, leaf in enumerate(leaves)
    ]
    boxes = [
        ((0, 2), (0, 12), (0, 4)),
        ((0, 2), (0, 12), (4, 8)),
        ((0, 2), (3, 5), (0, 8)),
    ]
    blocks = [
        Block(box, np.zeros(tuple(b - a for a, b in box), np.int32)) for box in boxes
    ]
    counter, told = ReadCounter(), []
    before = chunk_reads()
    wave(blocks, arrays, (4, 8), counter=counter, leaves=[7, 9], on_bytes=told.append)
    assert chunk_reads() - before == counter.chunks == 6
    assert counter.by_leaf == {7: 3, 9: 3}
    assert counter.decoded_bytes == sum(told) == 6 * 4 * 8 * 4
    assert counter.pieces == len(told)
    for block in blocks:
        expected = np.stack(leaves)[tuple(slice(*ends) for ends in block.box)]
        np.testing.assert_array_equal(block.data, expected)


def test_the_metric_sees_a_chunk_that_is_read_twice(tmp_path):
    array = write(tmp_path / "a", numbers((4, 8)), (4, 8), "zarr3")
    before = chunk_reads()
    array[:, :4].read().result()
    array[:, 4:].read().result()
    assert chunk_reads() - before == 2


@pytest.mark.parametrize(
    ("stored", "asked"),
    [
        ("int64", "int32"),
        ("float64", "float32"),
        ("uint64", "uint32"),
        ("int8", "int8"),
    ],
)
@pytest.mark.parametrize("num_boxes", [1, 2])
def test_wide_stored_types_narrow_as_numpy_does(tmp_path, stored, asked, num_boxes):
    values = numbers((6, 4), stored)
    if stored == "int64":
        values[0, 0] = 2**40 + 5
    array = write(tmp_path / "a", values, (2, 4), "zarr3")
    boxes = [((0, 1), (0, 6), (0, 4)), ((0, 1), (1, 3), (0, 4))][:num_boxes]
    blocks = [
        Block(box, np.zeros(tuple(b - a for a, b in box), asked)) for box in boxes
    ]
    counter = ReadCounter()
    wave(blocks, [array], (2, 4), counter=counter)
    assert counter.chunks == 3
    # Bytes in flight are those that are decoded, not those that are asked for.
    assert counter.decoded_bytes == values.nbytes
    for block in blocks:
        expected = values[tuple(slice(*ends) for ends in block.box[1:])].astype(asked)
        np.testing.assert_array_equal(block.data[0], expected)


def test_scalars_and_a_large_piece_that_is_copied_in_a_thread(tmp_path, monkeypatch):
    scalar = write(tmp_path / "s", np.array(7, np.int32), (), "zarr3")
    for count in (1, 2):
        boxes = [((0, 1),), ((0, 2),)][:count]
        blocks = [Block(box, np.zeros(box[0][1], np.int32)) for box in boxes]
        wave(blocks, [scalar], ())
        assert [block.data[0] for block in blocks] == [7] * count
    monkeypatch.setattr(read, "_INLINE_COPY_BYTES", 0)
    array = write(tmp_path / "a", numbers((4, 4)), (4, 4), "zarr3")
    blocks = [
        Block(((0, 1), (0, 4), ends), np.zeros((1, 4, 2), np.int32))
        for ends in ((0, 2), (2, 4))
    ]
    wave(blocks, [array], (4, 4))
    whole = np.concatenate([block.data[0] for block in blocks], axis=1)
    np.testing.assert_array_equal(whole, numbers((4, 4)))


def test_a_host_without_a_part_reads_nothing(tmp_path):
    array = write(tmp_path / "a", numbers((4,)), (4,), "zarr3")
    counter = ReadCounter()
    wave(allocate([((0, 0), (0, 4))], (1, 4), np.dtype("int32")), [array], (4,))
    wave([], [array], (4,), counter=counter)
    assert (counter.chunks, counter.pieces) == (0, 0)


def test_blocks_are_one_per_distinct_box_and_zero_where_padding_shows():
    boxes = [((0, 2), (0, 4)), ((0, 2), (0, 4)), ((2, 3), (0, 4)), ((3, 3), (0, 4))]
    blocks = allocate(boxes, (2, 4), np.dtype("int16"))
    assert [block.box for block in blocks] == [boxes[0], boxes[2], boxes[3]]
    assert all(block.data.shape == (2, 4) for block in blocks)
    assert not blocks[1].data.any() and not blocks[2].data.any()


# --- budgets --------------------------------------------------------------------------


@pytest.mark.parametrize("max_bytes", [None, 10_000, 4_096, 512, 400])
def test_bytes_in_flight_stay_within_the_budget(tmp_path, max_bytes):
    # 64 chunks of 128 bytes, in two leaves.
    leaves = [numbers((64, 16)), numbers((64, 16))]
    arrays = [
        write(tmp_path / str(i), leaf, (2, 16), "zarr3")
        for i, leaf in enumerate(leaves)
    ]
    block = Block(((0, 2), (0, 64), (0, 16)), np.zeros((2, 64, 16), np.int32))
    budget, counter = ByteBudget(max_bytes), ReadCounter()
    wave([block], arrays, (2, 16), budget, counter)
    np.testing.assert_array_equal(block.data, np.stack(leaves))
    assert counter.chunks == 64
    if max_bytes is None:
        # One piece per leaf, both at once.
        assert (budget.peak_bytes, counter.pieces) == (64 * 128, 2)
    else:
        assert budget.peak_bytes <= max_bytes
        # Several are in flight: a budget that is used for one piece serialises.
        assert budget.peak_bytes >= max_bytes // 2
        # A quarter of the budget at most, in each of two leaves of 32 chunks.
        per_piece = max(1, max_bytes // 4 // 128)
        assert counter.pieces == 2 * math.ceil(32 / per_piece)


def test_a_chunk_larger_than_the_budget_is_read_alone(tmp_path):
    array = write(tmp_path / "a", numbers((8, 16)), (2, 16), "zarr3")
    block = Block(((0, 1), (0, 8), (0, 16)), np.zeros((1, 8, 16), np.int32))
    budget = ByteBudget(100)
    wave([block], [array], (2, 16), budget)
    np.testing.assert_array_equal(block.data[0], numbers((8, 16)))
    assert budget.peak_bytes == 128


def test_a_budget_on_both_sides_of_its_bound():
    async def flow(bound: int | None, counts: list[int]) -> tuple[int, int]:
        budget = ByteBudget(bound)
        together = most = 0

        async def one(count: int) -> None:
            nonlocal together, most
            await budget.acquire(count)
            together += 1
            most = max(most, together)
            await asyncio.sleep(0)
            together -= 1
            await budget.release(count)

        await asyncio.gather(*map(one, counts))
        return most, budget.peak_bytes

    assert asyncio.run(flow(10, [5, 5])) == (2, 10)
    assert asyncio.run(flow(9, [5, 5])) == (1, 5)
    assert asyncio.run(flow(9, [5, 20, 4])) == (2, 20)
    assert asyncio.run(flow(None, [5, 20, 4])) == (3, 29)


# --- failures -------------------------------------------------------------------------


def test_a_broken_chunk_raises_what_tensorstore_says(tmp_path):
    array = write(tmp_path / "a", numbers((8, 4)), (2, 4), "zarr")
    (tmp_path / "a" / "2.0").write_bytes(b"not a chunk")
    block = Block(((0, 1), (0, 8), (0, 4)), np.zeros((1, 8, 4), np.int32))
    budget = ByteBudget(40)
    with pytest.raises(Exception, match=r"2\.0"):
        wave([block], [array], (2, 4), budget)
    assert budget._used == 0


def test_a_failure_cancels_the_others_and_waits_for_them():
    ended = []

    async def slow() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            ended.append("slow")

    async def bad() -> None:
        await asyncio.sleep(0)
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        asyncio.run(gather_all([slow(), bad(), slow()]))
    assert ended == ["slow", "slow"]


def test_oracle_covers_padding_and_several_boxes():
    """The random test above would prove little if hosts had one full box each."""
    seen = set()

    @fixed(80)
    @given(layouts(max_devices=8, max_rank=2))
    def collect(layout):
        digits, _, intermediate = layout
        assume(digits.mesh.num_devices > 1)
        host = digits.mesh.host_ids[-1]
        spans = held(intermediate, digits)
        own = {s for s, h in zip(spans, digits.mesh.hosts, strict=True) if h == host}
        full = all(
            tuple(map(len, s)) == intermediate.piece_width for s in itertools.chain(own)
        )
        seen.add((len(own) > 1, full))

    collect()
    assert seen == set(itertools.product([True, False], repeat=2))
