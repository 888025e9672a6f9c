"""Live arrays as planning values, and why some go through ``jax.device_put``."""

from __future__ import annotations

import math
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from orbax_reshard.engine.meshes import default_memory_kind, device_mesh, full_spec
from orbax_reshard.engine.transport import carried
from orbax_reshard.errors import TargetError
from orbax_reshard.planning.relayout import Spec
from orbax_reshard.planning.reshard_plan import ReshardRequest


def is_key(leaf: Any) -> bool:
    """Whether a leaf is an array of typed PRNG keys."""
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def key_target(target: Any, key: Any) -> Any:
    """The sharding of a key's data: trailing dimensions are never split."""
    if not isinstance(target, NamedSharding):
        return target
    spec = (*target.spec, *[None] * (key.ndim - len(target.spec)), None)
    return NamedSharding(
        target.mesh, PartitionSpec(*spec), memory_kind=target.memory_kind
    )


def live_request(name: str, leaf: Any, target: Any) -> ReshardRequest:
    """One leaf as a planning value.

    Args:
        name: its path.
        leaf: an array, a ``jax.ShapeDtypeStruct``, or what ``jax.device_put`` takes.
        target: its sharding, or what else ``jax.device_put`` takes as one.

    Raises:
        TargetError: the sharding does not fit the leaf's shape.
    """
    _check_fit(name, leaf, target)
    if is_key(leaf):
        struct = jax.eval_shape(
            jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        )
        held = key_target(leaf.sharding, leaf)
        leaf, target = (
            jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=held),
            key_target(target, leaf),
        )
    shape = tuple(np.shape(leaf))
    dtype = np.dtype(getattr(leaf, "dtype", None) or np.result_type(leaf))
    source = getattr(leaf, "sharding", None)
    declined = _declined(leaf, source, target, dtype)
    meshes: dict[str, Any] = {"source_mesh": None, "target_mesh": None}
    if declined is None:
        meshes = {
            "source_mesh": device_mesh(cast(Any, source).mesh),
            "target_mesh": device_mesh(target.mesh),
            "platform": _platform(target),
        }
    return ReshardRequest(
        name=name,
        shape=shape,
        dtype=dtype.name,
        dtype_bytes=dtype.itemsize,
        source_spec=_spec(source, len(shape)),
        target_spec=_spec(target, len(shape)),
        declined=declined,
        source_block_bytes=_block_bytes(source, shape, dtype),
        target_block_bytes=_block_bytes(target, shape, dtype),
        **meshes,
    )


def _spec(sharding: Any, rank: int) -> Spec:
    """Mesh axes per dimension; none where a sharding does not name them."""
    if not isinstance(sharding, NamedSharding) or _is_unconstrained(sharding):
        return ((),) * rank
    return full_spec(sharding.spec, rank)


def _is_unconstrained(sharding: NamedSharding) -> bool:
    return any(entry is PartitionSpec.UNCONSTRAINED for entry in sharding.spec)


def _check_fit(name: str, leaf: Any, target: Any) -> None:
    """Refuses a sharding that cannot hold the leaf, before anything has moved."""
    if not isinstance(target, Sharding):
        return
    shape = tuple(np.shape(leaf))
    try:
        if isinstance(target, NamedSharding):
            target.check_compatible_aval(shape)
        target.shard_shape(shape)
    except ValueError as error:
        raise TargetError(
            f"leaf {name!r} of shape {list(shape)} cannot have the target {target}: "
            f"{error}",
            code="target_does_not_fit",
        ) from error


def _block_bytes(sharding: Any, shape: tuple[int, ...], dtype: np.dtype) -> int:
    """What one device holds under a sharding, 0 for none."""
    if not isinstance(sharding, Sharding):
        return 0
    return math.prod(sharding.shard_shape(shape)) * dtype.itemsize


def _platform(sharding: NamedSharding) -> str:
    return cast(Any, sharding.mesh).devices.flat[0].platform


def _declined(leaf: Any, source: Any, target: Any, dtype: np.dtype) -> str | None:
    """Why a leaf goes through ``jax.device_put``."""
    if source is None:
        return "host_array"
    for sharding in (source, target):
        if not isinstance(sharding, NamedSharding):
            return "not_named_sharding"
        if (
            not isinstance(sharding.mesh, Mesh)
            or sharding.spec.unreduced
            or _is_unconstrained(sharding)
        ):
            return "not_named_sharding"
        kind = sharding.memory_kind
        if kind is not None and kind != default_memory_kind(sharding.mesh):
            return "memory_kind"
    if _platform(source) != _platform(target):
        return "other_platform"
    if not math.prod(np.shape(leaf)):
        return "empty_array"
    if getattr(leaf, "weak_type", False):
        return "weak_type"
    return None if carried(dtype) else "dtype_not_carried"
