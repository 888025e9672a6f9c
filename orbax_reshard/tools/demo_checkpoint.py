"""The demo's checkpoint: a small transformer, laid out as MaxText lays out a large one.

Kernels are sharded over ``fsdp`` on one dimension and ``tensor`` on another, norm
scales are replicated, nothing uses ``data``. Kernels are bfloat16; embeddings and
scales are float32. It is saved under a 4-8-1 (data, fsdp, tensor) mesh, that is, in
eight pieces along the ``fsdp`` dimension: rows of some kernels, columns of others.
"""

from __future__ import annotations

import dataclasses
import math
import os
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import jax

AXIS_NAMES = ("data", "fsdp", "tensor")

# The sizes with which docs/design.md, section 8, was measured.
SAVED_MESH = (4, 8, 1)

# Every sharded dimension divides by it, so any target of up to 16 devices is possible.
MAX_DEVICES = 16

# Bounds for the width of the model: below 64 a head has less than 4 elements, above
# 4096 the checkpoint has more than 2 GB, which is no longer a demo.
_WIDTHS = tuple(2**power for power in range(6, 13))
_NUM_HEADS = 16
_MLP_FACTOR = 4  # as in the original transformer
_VOCABULARY_FACTOR = 16  # a quarter of the demo's bytes: a plausible share


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One array of the checkpoint.

    Attributes:
        path: its keys in the tree, outermost first.
        shape: its global shape.
        dtype: name of its dtype.
        axes: per dimension, the mesh axis over which it is sharded, or None.
    """

    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str | None, ...]

    @property
    def name(self) -> str:
        """The keys as one word, as in messages."""
        return "/".join(self.path)

    @property
    def num_bytes(self) -> int:
        """Size of its values."""
        return math.prod(self.shape) * (2 if self.dtype == "bfloat16" else 4)


def transformer(size_bytes: int) -> tuple[Leaf, ...]:
    """The leaves of the widest model with two layers or more that fits, filled up.

    Args:
        size_bytes: what all arrays together should have; met to about one layer.

    Returns:
        Leaves in the order of the model. The smallest has about half a megabyte.

    Example:
        >>> leaves = transformer(64_000_000)
        >>> len(leaves), sum(leaf.num_bytes for leaf in leaves)
        (56, 67135488)
        >>> leaves[1]
        Leaf(path=('decoder', 'layers_0', 'self_attention', 'query', 'kernel'), \
shape=(512, 16, 32), dtype='bfloat16', axes=('fsdp', 'tensor', None))
    """
    fitting = [w for w in _WIDTHS if _total_bytes(_model(w, 2)) <= size_bytes]
    width = max(fitting, default=_WIDTHS[0])
    two, three = (_total_bytes(_model(width, layers)) for layers in (2, 3))
    return _model(width, 2 + max(0, round((size_bytes - two) / (three - two))))


def _total_bytes(leaves: tuple[Leaf, ...]) -> int:
    return sum(leaf.num_bytes for leaf in leaves)


def _model(width: int, num_layers: int) -> tuple[Leaf, ...]:
    heads = (_NUM_HEADS, width // _NUM_HEADS)
    mlp, vocabulary = _MLP_FACTOR * width, _VOCABULARY_FACTOR * width

    def kernel(path: str, shape: tuple[int, ...], *axes: str | None) -> Leaf:
        keys = ("decoder", *path.split("/"), "kernel")
        return Leaf(path=keys, shape=shape, dtype="bfloat16", axes=axes)

    def scale(path: str) -> Leaf:
        keys = ("decoder", *path.split("/"), "scale")
        return Leaf(path=keys, shape=(width,), dtype="float32", axes=(None,))

    leaves = [
        Leaf(
            path=("token_embedder", "embedding"),
            shape=(vocabulary, width),
            dtype="float32",
            axes=("tensor", "fsdp"),
        )
    ]
    for layer in (f"layers_{i}" for i in range(num_layers)):
        attention = f"{layer}/self_attention"
        leaves += [
            *(
                kernel(f"{attention}/{part}", (width, *heads), "fsdp", "tensor", None)
                for part in ("query", "key", "value")
            ),
            kernel(f"{attention}/out", (*heads, width), "tensor", None, "fsdp"),
            kernel(f"{layer}/mlp/wi_0", (width, mlp), "fsdp", "tensor"),
            kernel(f"{layer}/mlp/wi_1", (width, mlp), "fsdp", "tensor"),
            kernel(f"{layer}/mlp/wo", (mlp, width), "tensor", "fsdp"),
            scale(f"{layer}/pre_self_attention_norm"),
            scale(f"{layer}/post_self_attention_norm"),
        ]
    return (*leaves, scale("decoder_norm"))


def values(leaf: Leaf, seed: int) -> np.ndarray:
    """Values in which every element carries its own address, hashed.

    Neighbours and leaves have unrelated bits, so that a piece in a wrong place is a
    difference, and compression finds nothing. All bit patterns occur, NaNs too.
    """
    # The finaliser of MurmurHash3 is a bijection of 32-bit words.
    word = np.arange(math.prod(leaf.shape), dtype=np.uint32)
    word ^= np.uint32(seed * 0x9E3779B9 & 0xFFFFFFFF)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        word ^= word >> np.uint32(shift)
        word *= np.uint32(factor)
    word ^= word >> np.uint32(16)
    if leaf.dtype == "float32":
        return word.view(np.float32).reshape(leaf.shape)
    import ml_dtypes

    half = (word >> np.uint32(16)).astype(np.uint16)
    return half.view(ml_dtypes.bfloat16).reshape(leaf.shape)


def mesh(sizes: tuple[int, ...]) -> jax.sharding.Mesh:
    """A (data, fsdp, tensor) mesh of the first devices, in their own order."""
    import jax

    devices = np.asarray(jax.devices()[: math.prod(sizes)]).reshape(sizes)
    return jax.sharding.Mesh(devices, AXIS_NAMES)


def abstract_tree(leaves: tuple[Leaf, ...], target: jax.sharding.Mesh) -> Any:
    """The tree to ask for: shapes, dtypes, and the leaves' axes on another mesh."""
    import jax

    tree: dict[str, Any] = {}
    for leaf in leaves:
        spec = jax.sharding.PartitionSpec(*leaf.axes)
        value = jax.ShapeDtypeStruct(
            leaf.shape,
            jax.numpy.dtype(leaf.dtype),
            sharding=jax.sharding.NamedSharding(target, spec),
        )
        _insert(tree, leaf.path, value)
    return tree


def save(path: str | os.PathLike[str], leaves: tuple[Leaf, ...]) -> None:
    """Saves the checkpoint (OCDBT, zarr3) from this process, on `SAVED_MESH`."""
    import jax
    import orbax.checkpoint as ocp

    saved = mesh(SAVED_MESH)
    tree: dict[str, Any] = {}
    for seed, leaf in enumerate(leaves):
        spec = jax.sharding.PartitionSpec(*leaf.axes)
        sharding = jax.sharding.NamedSharding(saved, spec)
        _insert(tree, leaf.path, jax.device_put(values(leaf, seed), sharding))
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(tree))


def stored_chunk_bytes(path: str | os.PathLike[str]) -> int:
    """Size of all chunks as stored, which is what one complete restore needs.

    Not the size of the files: OCDBT writes its index several times while it saves, and
    what is out of date stays in the files until somebody rewrites them.
    """
    import tensorstore as ts

    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{path}/"}).result()
    keys = [key for key in store.list().result() if not key.endswith(b"/zarr.json")]
    return sum(len(read.result().value) for read in [store.read(key) for key in keys])


def _insert(tree: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value
