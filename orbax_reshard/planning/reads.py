"""Who reads which chunks: counted in closed form, and per host.

On a regular mesh (see ``digits``) a host's devices are a sub-grid of the digits, so
the chunks that it touches are a product over dimensions: count per dimension,
multiply. On any other mesh the devices are enumerated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from orbax_reshard.planning.boxes import ceil_div
from orbax_reshard.planning.digits import DigitMesh
from orbax_reshard.planning.layout import Intermediate

# Enumerating an irregular mesh costs devices x chunk grid; beyond this the planner
# declines instead of stalling (about a second of numpy on one core).
MAX_ENUMERATED_CELLS = 20_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class DimReads:
    """Chunks along one dimension, for hosts told apart by its cross-host digits.

    Attributes:
        once: int64 (num_cross,), distinct chunks that the host's boxes touch.
        boxes: int64 (num_cross,), the same summed over the host's distinct boxes:
            a chunk that two boxes share counts twice.
    """

    once: np.ndarray
    boxes: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """Chunks read by each host of a mesh, hosts ascending.

    Attributes:
        chunks: per host the distinct chunks that it touches.
        box_chunks: per host the chunks of its distinct boxes, shared ones repeated;
            what a reader that treats each box alone may fetch.
        encoded_bytes: per host the stored bytes of ``chunks``; None when unknown.
    """

    chunks: tuple[int, ...]
    box_chunks: tuple[int, ...]
    encoded_bytes: tuple[int, ...] | None = None


def _cross_index(digits: DigitMesh, layout: Sequence[int]) -> tuple[np.ndarray, int]:
    """For each part of a dimension the index over its cross-host digits."""
    sizes = [digits.sizes[x] for x in layout]
    coords = np.unravel_index(np.arange(math.prod(sizes)), sizes or (1,))
    index = np.zeros(math.prod(sizes), np.int64)
    count = 1
    for digit, coord in zip(layout, coords, strict=False):
        if digits.cross_host[digit]:
            index = index * digits.sizes[digit] + coord
            count *= digits.sizes[digit]
    return index, count


def _chunk_spans(
    intermediate: Intermediate, dim: int, chunk: int, digits: DigitMesh
) -> np.ndarray:
    """Per part of ``dim`` the half-open range of chunks; (num_parts, 2)."""
    spans = intermediate.intervals(dim, digits)
    first = spans[:, 0] // chunk
    last = np.where(spans[:, 1] > spans[:, 0], -(-spans[:, 1] // chunk), first)
    return np.stack([first, last], axis=1)


def dim_reads(
    intermediate: Intermediate, dim: int, chunk: int, digits: DigitMesh
) -> DimReads:
    """Counts the chunks along one dimension; regular meshes only."""
    spans = _chunk_spans(intermediate, dim, chunk, digits)
    index, count = _cross_index(digits, intermediate.layout[dim])
    per_host = spans[np.argsort(index, kind="stable")].reshape(count, -1, 2)
    order = np.argsort(per_host[:, :, 0], axis=1, kind="stable")
    lo = np.take_along_axis(per_host[:, :, 0], order, axis=1)
    hi = np.take_along_axis(per_host[:, :, 1], order, axis=1)
    reached = np.maximum.accumulate(hi, axis=1)
    before = np.concatenate([lo[:, :1], reached[:, :-1]], axis=1)
    once = np.maximum(hi - np.maximum(lo, before), 0).sum(axis=1)
    return DimReads(once=once, boxes=(hi - lo).sum(axis=1))


def count_reads(
    intermediate: Intermediate,
    chunk_shape: Sequence[int],
    digits: DigitMesh,
    encoded_bytes: np.ndarray | None = None,
) -> Reads:
    """Chunks and stored bytes per host under a layout.

    Args:
        intermediate: the layout under which hosts read.
        chunk_shape: chunk extents per dimension of the (grouped) array.
        digits: the mesh.
        encoded_bytes: stored size of each chunk, shaped like the chunk grid.

    Raises:
        ValueError: an irregular mesh that is too large to enumerate.
    """
    if not digits.regular:
        return _enumerate_reads(intermediate, chunk_shape, digits, encoded_bytes)
    hosts = np.asarray(digits.mesh.hosts)
    _, first_device = np.unique(hosts, return_index=True)
    chunks = np.ones(len(first_device), np.int64)
    boxes = np.ones(len(first_device), np.int64)
    where: list[np.ndarray] = []
    weights = encoded_bytes
    for dim, layout in enumerate(intermediate.layout):
        reads = dim_reads(intermediate, dim, chunk_shape[dim], digits)
        index, count = _cross_index(digits, layout)
        host_index = index[digits.part_indices(layout)[first_device]]
        chunks *= reads.once[host_index]
        boxes *= reads.boxes[host_index]
        where.append(host_index)
        if weights is not None and encoded_bytes is not None:
            # Contract this dimension's chunks; the hosts' index takes the last place.
            mask = np.zeros((count, encoded_bytes.shape[dim]), np.int64)
            spans = _chunk_spans(intermediate, dim, chunk_shape[dim], digits)
            for host, (lo, hi) in zip(index.tolist(), spans.tolist(), strict=True):
                mask[host, lo:hi] = 1
            weights = np.tensordot(weights, mask, axes=([0], [1]))
    return Reads(
        chunks=tuple(chunks.tolist()),
        box_chunks=tuple(boxes.tolist()),
        encoded_bytes=None
        if weights is None
        else tuple(weights[tuple(where)].tolist()),
    )


def _enumerate_reads(
    intermediate: Intermediate,
    chunk_shape: Sequence[int],
    digits: DigitMesh,
    encoded_bytes: np.ndarray | None,
) -> Reads:
    """The same by walking over all devices; for meshes of any order."""
    grid = tuple(
        ceil_div(extent, chunk)
        for extent, chunk in zip(intermediate.shape, chunk_shape, strict=True)
    )
    if math.prod(grid) * digits.mesh.num_devices > MAX_ENUMERATED_CELLS:
        raise ValueError(
            f"{digits.mesh.num_devices} devices in an order that mixes hosts, and "
            f"{math.prod(grid)} chunks, are too many to enumerate"
        )
    boxes = intermediate.device_boxes(digits)
    chunks: list[int] = []
    box_chunks: list[int] = []
    stored: list[int] = []
    for host in digits.mesh.host_ids:
        own = {b for b, h in zip(boxes, digits.mesh.hosts, strict=True) if h == host}
        touched = np.zeros(grid, bool)
        repeated = 0
        for box in own:
            if any(stop <= start for start, stop in box):
                continue
            spans = tuple(
                slice(start // chunk, ceil_div(stop, chunk))
                for (start, stop), chunk in zip(box, chunk_shape, strict=True)
            )
            touched[spans] = True
            repeated += math.prod(s.stop - s.start for s in spans)
        chunks.append(int(touched.sum()))
        box_chunks.append(repeated)
        if encoded_bytes is not None:
            stored.append(int(encoded_bytes[touched].sum()))
    return Reads(
        chunks=tuple(chunks),
        box_chunks=tuple(box_chunks),
        encoded_bytes=tuple(stored) if encoded_bytes is not None else None,
    )
