"""Reads a host's part of a wave: chunk-aligned pieces, each once, under a budget.

The local devices' boxes overlap the same chunks more often than not (two column
shards of a row-chunked matrix share all of them). TensorStore joins reads of one
chunk only while they are in flight, so two shards read separately fetch it once or
twice, at random. Here the union of the boxes is cut into pieces on chunk edges; a
piece is read once, straight into the buffer when one box needs it, else into a
temporary and copied.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import tensorstore as ts

from orbax_reshard.planning.boxes import (
    Box,
    Piece,
    box_size,
    intersect,
    local_slices,
    pieces,
)

# A piece is at most this large, so that decoding, copying and placing overlap, and at
# most this part of the read budget, so that several are in flight under any budget.
MAX_PIECE_BYTES = 32 * 2**20
_PIECES_PER_BUDGET = 4

# Copies below this size cost less than handing them to another thread (about 50 us).
_INLINE_COPY_BYTES = 2**18


class ByteBudget:
    """Bounds bytes in flight; a request above the bound waits to be alone.

    Unlike a limiter that refuses what it can never grant, an oversized request is
    granted when nothing else is in flight: pieces are cut to fit, so only a single
    chunk larger than the whole budget comes here, and that has to be read.
    """

    def __init__(self, max_bytes: int | None) -> None:
        """``max_bytes`` is inclusive; None means no bound."""
        self.max_bytes = max_bytes
        self.peak_bytes = 0
        self._used = 0
        self._changed = asyncio.Condition()

    async def acquire(self, count: int) -> None:
        """Waits until ``count`` more bytes fit."""
        bound = self.max_bytes
        async with self._changed:
            if bound is not None:
                await self._changed.wait_for(
                    lambda: self._used == 0 or self._used + count <= bound
                )
            self._used += count
            self.peak_bytes = max(self.peak_bytes, self._used)

    async def release(self, count: int) -> None:
        """Gives bytes back."""
        async with self._changed:
            self._used -= count
            self._changed.notify_all()


@dataclass(slots=True)
class ReadCounter:
    """What a host really read; filled while reading.

    Attributes:
        chunks: chunks decoded.
        pieces: regions requested.
        decoded_bytes: bytes of those chunks, decoded.
    """

    chunks: int = 0
    pieces: int = 0
    decoded_bytes: int = 0
    by_leaf: dict[int, int] = field(default_factory=dict)

    def add(self, leaf: int, piece: Piece, chunk_bytes: int) -> None:
        """Counts one piece that has arrived."""
        self.chunks += piece.num_chunks
        self.pieces += 1
        self.decoded_bytes += piece.num_chunks * chunk_bytes
        self.by_leaf[leaf] = self.by_leaf.get(leaf, 0) + piece.num_chunks


@dataclass(frozen=True, slots=True)
class Block:
    """The buffer of one distinct box of this host.

    Attributes:
        box: what it covers, dimension 0 counting the leaves of the wave.
        data: C-contiguous, at full block width; padding is zero.
    """

    box: Box
    data: np.ndarray


def allocate(
    boxes: Sequence[Box], piece_width: Sequence[int], dtype: np.dtype
) -> list[Block]:
    """A buffer per distinct box; zeroed only where padding shows."""
    made: list[Block] = []
    for box in dict.fromkeys(boxes):
        full = box_size(box) == math.prod(piece_width)
        make = np.empty if full else np.zeros
        made.append(Block(box, make(tuple(piece_width), dtype)))
    return made


async def read_wave(
    blocks: Sequence[Block],
    arrays: Sequence[ts.TensorStore],
    *,
    leaves: Sequence[int],
    chunk_shape: Sequence[int],
    budget: ByteBudget,
    counter: ReadCounter,
    on_bytes: Callable[[int], None] | None = None,
) -> None:
    """Fills the blocks of one wave.

    Args:
        blocks: distinct boxes of this host and their buffers.
        arrays: the opened arrays of the wave's leaves, in order.
        leaves: the leaves' numbers in the plan, for the counter.
        chunk_shape: chunk extents of a leaf.
        budget: bytes in flight of this host.
        counter: filled with what was read.
        on_bytes: told the decoded bytes of each piece as it arrives.

    Raises:
        Exception: what TensorStore raised for the first piece that failed.
    """
    jobs = [
        _read_leaf(
            [b for b in blocks if b.box[0][0] <= slot < b.box[0][1]],
            slot,
            array,
            leaf,
            chunk_shape,
            budget,
            counter,
            on_bytes,
        )
        for slot, (array, leaf) in enumerate(zip(arrays, leaves, strict=True))
    ]
    await gather_all(jobs)


async def gather_all(jobs: Sequence[object]) -> None:
    """Runs coroutines together; on a failure cancels the rest and waits for them."""
    tasks = [asyncio.ensure_future(job) for job in jobs]  # type: ignore[arg-type]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def _read_leaf(
    blocks: Sequence[Block],
    slot: int,
    array: ts.TensorStore,
    leaf: int,
    chunk_shape: Sequence[int],
    budget: ByteBudget,
    counter: ReadCounter,
    on_bytes: Callable[[int], None] | None,
) -> None:
    """Reads one leaf of a wave into all blocks that hold a part of it."""
    if not blocks:
        return
    chunk_bytes = math.prod(chunk_shape) * array.dtype.numpy_dtype.itemsize
    limit = MAX_PIECE_BYTES
    if budget.max_bytes is not None:
        limit = min(limit, budget.max_bytes // _PIECES_PER_BUDGET)
    boxes = [block.box[1:] for block in blocks]
    # The ellipsis keeps the views of a scalar leaf views; without it they are copies.
    views = [block.data[slot - block.box[0][0], ...] for block in blocks]

    async def one(piece: Piece) -> None:
        count = piece.num_chunks * chunk_bytes
        await budget.acquire(count)
        try:
            await _read_piece(piece, array, boxes, views)
        finally:
            await budget.release(count)
        counter.add(leaf, piece, chunk_bytes)
        if on_bytes is not None:
            on_bytes(count)

    await gather_all(
        [
            one(piece)
            for piece in pieces(
                boxes,
                chunk_shape=chunk_shape,
                max_chunks=max(1, limit // max(1, chunk_bytes)),
            )
        ]
    )


async def _read_piece(
    piece: Piece,
    array: ts.TensorStore,
    boxes: Sequence[Box],
    views: Sequence[np.ndarray],
) -> None:
    """Reads one piece once, and hands its parts to the boxes that need it."""
    region = tuple(slice(start, stop) for start, stop in piece.region)
    dtype = array.dtype.numpy_dtype
    if len(piece.boxes) == 1 and views[piece.boxes[0]].dtype == dtype:
        box = boxes[piece.boxes[0]]
        view = views[piece.boxes[0]][(*local_slices(piece.region, box), ...)]
        await ts.array(view).write(array[region].translate_to[(0,) * view.ndim])
        return
    shape = tuple(stop - start for start, stop in piece.region)
    data = np.empty(shape, dtype)
    await ts.array(data).write(array[region].translate_to[(0,) * data.ndim])

    def scatter() -> None:
        for index in piece.boxes:
            part = intersect(piece.region, boxes[index])
            views[index][local_slices(part, boxes[index])] = data[
                local_slices(part, piece.region)
            ]

    if data.nbytes < _INLINE_COPY_BYTES:
        scatter()
    else:
        await asyncio.to_thread(scatter)
