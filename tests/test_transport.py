"""Words on the wire, without a wire."""

import jax
import numpy as np
import pytest
from exchange_oracle import bits, random_bits
from test_exchange import BYTES, NARROW, WIDE, WIDER

from orbax_reshard.engine.transport import (
    Transport,
    bit_width,
    carried,
    result_dtype,
)

ALL = [*NARROW, *BYTES, *WIDE, *WIDER]


def dtype_of(name: str) -> np.dtype:
    return np.dtype(getattr(jax.numpy, "bool_" if name == "bool" else name))


@pytest.mark.parametrize("name", ALL)
def test_packing_and_unpacking_change_no_bit(name):
    dtype = dtype_of(name)
    transport = Transport(dtype)
    block = random_bits(np.random.default_rng(0), (3, 5), dtype)
    words = transport.pack(block)
    assert words.dtype.kind == "u" and words.dtype == transport.word
    assert words.shape == (3, 5, *transport.suffix)
    assert words.nbytes == block.nbytes
    # A view of the same memory: a host block may be a gigabyte.
    assert np.shares_memory(words, block)
    with jax.enable_x64(dtype.itemsize >= 8):
        made = jax.jit(transport.unpack)(words)
        again = jax.jit(transport.pack_traced)(made)
    assert (made.dtype, made.shape) == (dtype, (3, 5))
    assert bits(made) == bits(block)
    assert (again.dtype, again.shape) == (words.dtype, words.shape)
    if bit_width(dtype) >= 8:
        assert np.asarray(again).tobytes() == words.tobytes()
    assert carried(dtype)


@pytest.mark.parametrize("name", ["int32", "complex64", "float64", "int4"])
def test_scalars(name):
    dtype = dtype_of(name)
    block = random_bits(np.random.default_rng(1), (2,), dtype)
    with jax.enable_x64(dtype.itemsize >= 8):
        made = jax.jit(Transport(dtype).unpack)(Transport(dtype).pack(block)[0])
    assert made.shape == () and bits(made) == bits(block[:1])


@pytest.mark.parametrize(
    ("name", "width", "word", "words"),
    [
        ("int2", 2, "uint8", 1),
        ("uint4", 4, "uint8", 1),
        ("float4_e2m1fn", 4, "uint8", 1),
        ("bool", 8, "uint8", 1),
        ("float8_e5m2", 8, "uint8", 1),
        ("bfloat16", 16, "uint16", 1),
        ("float32", 32, "uint32", 1),
        ("int64", 64, "uint32", 2),
        ("complex64", 64, "uint32", 2),
        ("complex128", 128, "uint32", 4),
    ],
)
def test_words(name, width, word, words):
    transport = Transport(dtype_of(name))
    assert bit_width(transport.dtype) == width
    assert (transport.word, transport.words) == (np.dtype(word), words)
    assert transport.suffix == ((words,) if words > 1 else ())


def test_what_is_not_carried():
    for dtype in ("datetime64[s]", "S4", "U2", "O", "longdouble", "clongdouble"):
        assert not carried(np.dtype(dtype))
    # XLA has no bitcast from a byte to these.
    for name in ("int1", "uint1", "float6_e2m3fn", "float6_e3m2fn"):
        if hasattr(jax.numpy, name):
            assert not carried(dtype_of(name))


def test_result_dtype_is_what_jax_makes_of_it():
    assert result_dtype(np.dtype("int64")) == np.dtype("int32")
    assert result_dtype(np.dtype("complex128")) == np.dtype("complex64")
    assert result_dtype(np.dtype("uint8")) == np.dtype("uint8")
    with jax.enable_x64(True):
        assert result_dtype(np.dtype("int64")) == np.dtype("int64")
