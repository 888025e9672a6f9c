"""Compares two restored arrays bit for bit, in the process that holds their shards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import jax


def describe_difference(stock: jax.Array, planned: jax.Array) -> str | None:
    """Says how two arrays differ on this process's devices; None if they do not.

    Bytes are compared as unsigned integers, so that a NaN equals itself, -0.0 is not
    0.0, and a payload that was lost is seen. Every addressable shard is compared, also
    each of several replicas: a transfer can go wrong for one device alone.

    Args:
        stock: what the stock handler restored.
        planned: what is compared with it.

    Returns:
        A phrase that fits after "leaf x differs: ", about the first difference only.

    Example:
        >>> import jax
        >>> describe_difference(jax.numpy.float32([0, 1]), jax.numpy.float32([0, 1]))
        >>> describe_difference(jax.numpy.float32([0, 1]), jax.numpy.float32([-0.0, 1]))
        'element (0,) on device 0 is 0x00000000 from stock and 0x80000000 as planned \
(1 of 2 elements of that shard)'
    """
    facts: tuple[tuple[str, Any, Any], ...] = (
        ("shape", stock.shape, planned.shape),
        ("dtype", stock.dtype, planned.dtype),
        ("sharding", stock.sharding, planned.sharding),
    )
    for name, expected, got in facts:
        if expected != got:
            return f"its {name} is {expected} from stock and {got} as planned"

    planned_by_device = {shard.device: shard for shard in planned.addressable_shards}
    for shard in stock.addressable_shards:
        other = planned_by_device[shard.device]
        expected_bytes, got_bytes = _bytes(shard.data), _bytes(other.data)
        if np.array_equal(expected_bytes, got_bytes):
            continue
        differing = np.argwhere((expected_bytes != got_bytes).any(axis=-1))
        local = tuple(int(i) for i in differing[0])
        # Where the element is in the whole array; a shard's index is made of slices.
        position = tuple(
            (part.start or 0) + i for part, i in zip(shard.index, local, strict=True)
        )
        return (
            f"element {position} on device {shard.device.id} is "
            f"{_hex(expected_bytes[local])} from stock and {_hex(got_bytes[local])} "
            f"as planned ({len(differing)} of {shard.data.size} elements of that shard)"
        )
    return None


def _bytes(data: jax.Array) -> np.ndarray:
    """The bytes of the elements, as unsigned integers along one more dimension."""
    values = np.ascontiguousarray(np.asarray(data))
    itemsize = values.dtype.itemsize
    return values.view(np.uint8).reshape((*data.shape, itemsize))


def _hex(element: np.ndarray) -> str:
    """An element's bytes as one number; JAX runs on little-endian machines only."""
    return "0x" + element[::-1].tobytes().hex()
