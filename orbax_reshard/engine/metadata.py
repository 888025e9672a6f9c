"""Opens the stored arrays and describes them as planning values.

All arrays are opened at once, with specs that Orbax's own helpers built, and the
handles are kept: the chunk grid comes from the opened array (old checkpoints have no
metadata files of their own), and the same handle reads later.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorstore as ts

from orbax_reshard.errors import CheckpointError
from orbax_reshard.planning.stored import StoredArray

# Asking OCDBT for the sizes of this many chunks takes about 0.1 s beside the reads and
# no storage request; beyond it the forecast keeps to decoded sizes.
MAX_SIZED_CHUNKS = 4096

# A byte range that no value reaches: OCDBT answers with the value's size from its
# B-tree, before any data is fetched.
_BEYOND = slice(2**60, 2**60 + 1)
_SIZE_IN_MESSAGE = re.compile(r"value of size (\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRequest:
    """One array to open.

    Attributes:
        name: the leaf's name, for errors.
        spec: TensorStore JSON spec, cast driver included where a dtype was asked.
        context: the TensorStore context of the restore.
        stock_reads_gaps: what ``StoredArray`` says of it.
    """

    name: str
    spec: dict[str, Any]
    context: ts.Context | None
    stock_reads_gaps: bool = False


async def open_arrays(requests: Sequence[OpenRequest]) -> list[ts.TensorStore]:
    """Opens all arrays concurrently.

    Raises:
        CheckpointError: a leaf's metadata is not there; names the leaf.
        Exception: what TensorStore raised otherwise, with the leaf's name in front.
    """
    opened = await asyncio.gather(
        *(ts.open(ts.Spec(r.spec), open=True, context=r.context) for r in requests),
        return_exceptions=True,
    )
    for request, result in zip(requests, opened, strict=True):
        if not isinstance(result, BaseException):
            continue
        text = f"leaf {request.name!r} cannot be opened: {result}"
        if "NOT_FOUND" in str(result):
            raise CheckpointError(text, code="missing_leaf") from result
        raise type(result)(text) from result
    return [t for t in opened if not isinstance(t, BaseException)]


def stored_base(array: ts.TensorStore) -> ts.TensorStore:
    """The array as it lies in storage, below any cast."""
    while array.base is not None:
        array = array.base
    return array


def describe(request: OpenRequest, array: ts.TensorStore) -> StoredArray:
    """The opened array as a planning value; stored chunk sizes still unknown."""
    base = stored_base(array)
    chunk = base.chunk_layout.read_chunk.shape or ()
    return StoredArray(
        name=request.name,
        shape=tuple(base.shape),
        dtype=base.dtype.name,
        dtype_bytes=base.dtype.numpy_dtype.itemsize,
        chunk_shape=tuple(c or s for c, s in zip(chunk, base.shape, strict=True)),
        driver=base.spec().to_json()["driver"],
        stock_reads_gaps=request.stock_reads_gaps,
    )


def sizes_of(
    described: Mapping[int, StoredArray], arrays: Mapping[int, ts.TensorStore]
) -> dict[int, tuple[int, ...]]:
    """The stored size of every chunk, where that costs no storage request.

    That is: OCDBT, whose B-tree holds the sizes, and no inner chunks. A chunk small
    enough to lie inline in the B-tree was fetched with the metadata and counts as 0.
    Blocks for about 25 us per chunk; meant for a thread beside the reads.

    Args:
        described: the arrays to ask about, by leaf index.
        arrays: their handles.

    Returns:
        Sizes in row-major order of the grid, by leaf index; leaves that cannot be
        asked are left out.
    """
    asked: dict[int, list[ts.Future]] = {}
    inline: dict[int, int] = {}
    for index, stored in described.items():
        base = stored_base(arrays[index])
        if not _is_sizable(base):
            continue
        store = base.kvstore
        assert store is not None
        inline[index] = _inline_bytes(store.spec().to_json())
        asked[index] = [
            store.read(key, byte_range=_BEYOND) for key in _chunk_keys(stored, base)
        ]
    found: dict[int, tuple[int, ...]] = {}
    for index, futures in asked.items():
        sizes = [_size(future) for future in futures]
        if None not in sizes:
            found[index] = tuple(
                0 if size <= inline[index] else size
                for size in sizes
                if size is not None
            )
    return found


def _is_sizable(base: ts.TensorStore) -> bool:
    """OCDBT, a known driver, and one read chunk per stored value."""
    layout = base.chunk_layout
    return (
        base.spec().to_json()["driver"] in ("zarr", "zarr3")
        and base.kvstore is not None
        and base.kvstore.spec().to_json().get("driver") == "ocdbt"
        and layout.read_chunk.shape == layout.write_chunk.shape
    )


def _inline_bytes(kvstore_spec: dict[str, Any]) -> int:
    """Largest value that OCDBT keeps inside its B-tree nodes."""
    return int(kvstore_spec.get("config", {}).get("max_inline_value_bytes", 100))


def _chunk_keys(stored: StoredArray, base: ts.TensorStore) -> list[str]:
    """Keys of the chunks in row-major order of the grid, relative to the array."""
    coords = itertools.product(*(range(n) for n in stored.grid_shape))
    metadata = base.spec().to_json().get("metadata", {})
    if stored.driver == "zarr3":
        encoding = metadata.get("chunk_key_encoding", {})
        separator = encoding.get("configuration", {}).get("separator", "/")
        return [separator.join(["c", *map(str, c)]) for c in coords]
    separator = metadata.get("dimension_separator", ".")
    return [separator.join(map(str, c)) or "0" for c in coords]


def _size(future: ts.Future) -> int | None:
    """Stored size of a value, 0 when it is missing, None when OCDBT does not say."""
    try:
        result = future.result()
    except ValueError as error:
        found = _SIZE_IN_MESSAGE.search(str(error))
        return int(found.group(1)) if found else None
    return 0 if result.state == "missing" else None


def fetched_bytes() -> int:
    """Bytes that TensorStore has read from any storage in this process so far."""
    found = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/")
    return sum(
        int(value.get("value", 0))
        for metric in found
        if metric["name"].endswith("/bytes_read")
        for value in metric["values"]
    )
