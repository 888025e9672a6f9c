"""Boxes: half-open regions of an array, and the chunk-aligned pieces that fill them.

A box is a tuple of ``(start, stop)`` pairs, one per dimension, in elements; it is
empty when any ``stop <= start``. Pairs and not slices, because slices are not
hashable on Python 3.11.

The one algorithm here answers: several boxes of one host overlap the same stored
chunks; which regions must be read so that every chunk is decoded once per host?

    chunks   |----0----|----1----|----2----|
    box A    [=========+====)                     cell 0: A      (only A needs it)
    box B                [==+=========)           cell 1: A, B   (read once, copied)
                                                  cell 2: B
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Box = tuple[tuple[int, int], ...]


def ceil_div(value: int, by: int) -> int:
    """``value / by`` rounded up; both at least 0, ``by`` at least 1."""
    return -(-value // by)


def box_size(box: Box) -> int:
    """Number of elements in ``box``; 0 when it is empty, 1 for a scalar's box.

    >>> box_size(((0, 2), (1, 4)))
    6
    >>> box_size(((3, 3), (0, 9)))
    0
    """
    return math.prod(max(0, stop - start) for start, stop in box)


def intersect(one: Box, other: Box) -> Box:
    """The common part of two boxes of one rank; possibly empty.

    >>> intersect(((0, 4),), ((2, 9),))
    ((2, 4),)
    """
    return tuple(
        (max(a, c), max(a, c, min(b, d)))
        for (a, b), (c, d) in zip(one, other, strict=True)
    )


def local_slices(box: Box, origin: Box) -> tuple[slice, ...]:
    """``box`` as slices into a buffer whose first element is ``origin``'s start."""
    return tuple(
        slice(start - base, stop - base)
        for (start, stop), (base, _) in zip(box, origin, strict=True)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A chunk-aligned region that is read once and scattered to local boxes.

    Attributes:
        region: the elements to read; within the array and within the chunks' hull.
        num_chunks: how many chunks the region decodes.
        boxes: indices of the boxes that take something from it, ascending.
    """

    region: Box
    num_chunks: int
    boxes: tuple[int, ...]


def pieces(
    boxes: Sequence[Box],
    *,
    chunk_shape: Sequence[int],
    max_chunks: int,
) -> Iterator[Piece]:
    """Splits the union of ``boxes`` into pieces so that no chunk lies in two of them.

    Args:
        boxes: the boxes of one host, in elements; empty ones are ignored.
        chunk_shape: the extent of a stored chunk per dimension; grid origin at 0.
        max_chunks: inclusive bound on the chunks of one piece, at least 1.

    Yields:
        Pieces cell by cell (regions that the same boxes need), cells and the pieces
        of each in row-major order. Every chunk that some box touches is in exactly
        one piece, and no other chunk is in any.

    >>> for piece in pieces([((0, 6),), ((5, 9),)], chunk_shape=(4,), max_chunks=8):
    ...     print(piece.region, piece.boxes)
    ((0, 4),) (0,)
    ((4, 8),) (0, 1)
    ((8, 9),) (1,)
    """
    hulls = [
        tuple(
            (start // chunk, ceil_div(stop, chunk))
            for (start, stop), chunk in zip(box, chunk_shape, strict=True)
        )
        if box_size(box)
        else None
        for box in boxes
    ]
    present = [hull for hull in hulls if hull is not None]
    if not present:
        return
    rank = len(chunk_shape)
    cuts = [
        sorted({edge for hull in present for edge in hull[dim]}) for dim in range(rank)
    ]
    for cell in itertools.product(*(itertools.pairwise(c) for c in cuts)):
        users = tuple(
            index
            for index, hull in enumerate(hulls)
            if hull is not None
            and all(
                lo <= a and b <= hi for (a, b), (lo, hi) in zip(cell, hull, strict=True)
            )
        )
        if not users:
            continue
        for part in _split_cell(cell, max_chunks):
            span: Box = tuple(
                (a * chunk, b * chunk)
                for (a, b), chunk in zip(part, chunk_shape, strict=True)
            )
            taken = [intersect(span, boxes[index]) for index in users]
            region: Box = tuple(
                (min(t[dim][0] for t in taken), max(t[dim][1] for t in taken))
                for dim in range(rank)
            )
            yield Piece(region=region, num_chunks=box_size(part), boxes=users)


def _split_cell(cell: Box, max_chunks: int) -> Iterator[Box]:
    """Cuts a box of chunk coordinates into row-major runs of at most ``max_chunks``."""
    extents = [stop - start for start, stop in cell]
    steps = [1] * len(cell)
    room = max_chunks
    for dim in reversed(range(len(cell))):
        steps[dim] = max(1, min(extents[dim], room))
        room //= steps[dim]
        if steps[dim] < extents[dim]:
            break
    starts = (
        range(start, stop, step)
        for (start, stop), step in zip(cell, steps, strict=True)
    )
    for corner in itertools.product(*starts):
        yield tuple(
            (start, min(start + step, stop))
            for start, step, (_, stop) in zip(corner, steps, cell, strict=True)
        )
