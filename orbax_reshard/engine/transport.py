"""Bits in motion: every dtype travels as unsigned words.

Collectives move words and never numbers, so that no backend can canonicalise a NaN,
flush a denormal or widen a bfloat16 on the way. Elements of 1, 2 and 4 bytes travel
as one unsigned word of that width, wider ones as several 32-bit words in a trailing
dimension, types narrower than a byte as one byte (2-bit types crash XLA's CPU
collectives across processes; whole bytes do not).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_WORD_OF_BYTES = {1: np.uint8, 2: np.uint16, 4: np.uint32}

# How JAX names the unsigned type whose low bits a byte is cut to, by bit width.
_NARROW = {2: "uint2", 4: "uint4"}


def bit_width(dtype: np.dtype) -> int:
    """Bits that carry an element's value; 4 for int4 although numpy stores a byte."""
    name = dtype.name
    if name in ("int2", "uint2"):
        return 2
    if name in ("int4", "uint4") or name.startswith("float4_"):
        return 4
    return dtype.itemsize * 8


@dataclass(frozen=True, slots=True)
class Transport:
    """How elements of one dtype travel.

    Attributes:
        dtype: what the caller gets.
    """

    dtype: np.dtype

    @property
    def word(self) -> np.dtype:
        """The unsigned dtype on the wire."""
        return np.dtype(_WORD_OF_BYTES.get(self.dtype.itemsize, np.uint32))

    @property
    def words(self) -> int:
        """Words per element; more than one adds a trailing dimension."""
        return self.dtype.itemsize // self.word.itemsize

    @property
    def suffix(self) -> tuple[int, ...]:
        """The trailing dimension, if any."""
        return (self.words,) if self.words > 1 else ()

    def pack(self, block: np.ndarray) -> np.ndarray:
        """A C-contiguous host block as words, without a copy."""
        return block.view(self.word).reshape(*block.shape, *self.suffix)

    def pack_traced(self, block: jax.Array) -> jax.Array:
        """Elements on the device as words; traced, bit-exact, undone by ``unpack``."""
        dtype, bits = self.dtype, bit_width(self.dtype)
        if dtype == np.bool_:
            return lax.convert_element_type(block, np.uint8)
        if bits < 8:
            narrow = np.dtype(_NARROW[bits])
            same = block.dtype == narrow
            words = block if same else lax.bitcast_convert_type(block, narrow)
            return lax.convert_element_type(words, np.uint8)
        if dtype.kind == "c":
            parts = jnp.stack([lax.real(block), lax.imag(block)], axis=-1)
            words = lax.bitcast_convert_type(parts, np.uint32)
            return words.reshape(*block.shape, self.words)
        return lax.bitcast_convert_type(block, self.word)

    def unpack(self, words: jax.Array) -> jax.Array:
        """Words on the device as elements; traced, bit-exact."""
        dtype, bits = self.dtype, bit_width(self.dtype)
        if dtype == np.bool_:
            return words != 0
        if bits < 8:
            narrow = lax.convert_element_type(
                words & np.uint8(2**bits - 1), _NARROW[bits]
            )
            same = narrow.dtype == dtype
            return narrow if same else lax.bitcast_convert_type(narrow, dtype)
        if dtype.kind == "c":
            half = np.dtype(f"float{dtype.itemsize * 4}")
            parts = (
                words if half.itemsize == 4 else words.reshape(*words.shape[:-1], 2, 2)
            )
            real_imag = lax.bitcast_convert_type(parts, half)
            return lax.complex(real_imag[..., 0], real_imag[..., 1])
        return lax.bitcast_convert_type(words, dtype)


def result_dtype(dtype: np.dtype) -> np.dtype:
    """What JAX makes of a host dtype here: 64-bit types narrow without x64."""
    return np.dtype(jax.dtypes.canonicalize_dtype(dtype))


def carried(dtype: np.dtype) -> bool:
    """Whether a dtype can travel: any that JAX has, and that numpy can view.

    Types of 1 and 6 bits have no unsigned twin that XLA converts bit by bit.
    """
    if dtype.name in ("int1", "uint1") or dtype.name.startswith("float6_"):
        return False
    if dtype.kind == "c":
        return dtype.itemsize in (8, 16)
    # XLA cannot cut a byte to one bit, nor to six.
    if dtype.name in ("int1", "uint1") or dtype.name.startswith("float6_"):
        return False
    try:
        jnp.dtype(dtype)
    except TypeError:
        return False
    return dtype.itemsize in (1, 2, 4, 8) and dtype.kind in "biufV"
