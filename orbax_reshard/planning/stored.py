"""What is on disk: an array's shape, dtype and chunk grid.

The unit of everything that follows is the *read chunk*: the smallest region that the
format decodes on its own. For zarr2 and plain zarr3 it is the chunk; for a zarr3
array with inner chunks (the ``sharding_indexed`` codec) it is the inner chunk; for a
subchunked save it is the smaller chunk that was written.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from orbax_reshard.planning.boxes import Box, box_size, ceil_div


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredArray:
    """One array as it lies in storage; the grid starts at the origin.

    Attributes:
        name: the leaf's name in the checkpoint, as Orbax spells it.
        shape: extents in elements.
        dtype: name of the stored dtype, as TensorStore spells it.
        dtype_bytes: bytes of one decoded element on the host. Narrow types such as
            int4 take one byte there.
        chunk_shape: extents of a read chunk in elements, each at least 1.
        driver: ``"zarr"`` or ``"zarr3"``; other drivers are not planned for.
        encoded_bytes: stored size of every chunk in row-major order of the grid, or
            None where it cannot be known without reading. With it, the forecast of
            fetched bytes is exact for compressed chunks too.
        stock_reads_gaps: True where stock joins reads over gaps between a host's
            chunks and fetches the gaps too (remote OCDBT).

    >>> a = StoredArray(name="w", shape=(10, 8), dtype="float32", dtype_bytes=4,
    ...                 chunk_shape=(4, 8), driver="zarr3")
    >>> a.grid_shape, a.num_chunks, a.chunk_bytes
    ((3, 1), 3, 128)
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    dtype_bytes: int
    chunk_shape: tuple[int, ...]
    driver: str
    encoded_bytes: tuple[int, ...] | None = None
    stock_reads_gaps: bool = False

    def __post_init__(self) -> None:
        """Checks ranks and extents once, so that nobody else has to."""
        if len(self.shape) != len(self.chunk_shape):
            raise ValueError(
                f"{self.name}: the chunk grid has rank {len(self.chunk_shape)}, the "
                f"array has rank {len(self.shape)}"
            )
        if any(extent < 1 for extent in self.chunk_shape):
            raise ValueError(f"{self.name}: a chunk extent below 1: {self.chunk_shape}")
        known = self.encoded_bytes
        if known is not None and len(known) != self.num_chunks:
            raise ValueError(
                f"{self.name}: {len(known)} chunk sizes for {self.num_chunks} chunks"
            )

    @property
    def grid_shape(self) -> tuple[int, ...]:
        """Number of chunks per dimension."""
        return tuple(
            ceil_div(extent, chunk)
            for extent, chunk in zip(self.shape, self.chunk_shape, strict=True)
        )

    @property
    def num_chunks(self) -> int:
        """Number of chunks in the whole grid; 1 for a scalar."""
        return math.prod(self.grid_shape)

    @property
    def chunk_bytes(self) -> int:
        """Decoded bytes of one chunk; edge chunks are stored at full size."""
        return math.prod(self.chunk_shape) * self.dtype_bytes

    @property
    def decoded_bytes(self) -> int:
        """Bytes of the whole array in host memory."""
        return math.prod(self.shape) * self.dtype_bytes

    @property
    def whole(self) -> Box:
        """The box of all elements."""
        return tuple((0, extent) for extent in self.shape)

    def num_chunks_touched(self, box: Box) -> int:
        """How many chunks hold an element of ``box``; 0 when it is empty."""
        if not box_size(box):
            return 0
        return math.prod(
            ceil_div(stop, chunk) - start // chunk
            for (start, stop), chunk in zip(box, self.chunk_shape, strict=True)
        )
