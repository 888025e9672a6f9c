"""Live arrays as planning values, and why some go through ``jax.device_put``."""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from orbax_reshard.engine.meshes import default_memory_kind, device_mesh, full_spec
from orbax_reshard.engine.transport import carried
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
    """One leaf as a planning value."""
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
    declined = _declined(source, target, dtype)
    common: dict[str, Any] = {
        "name": name,
        "shape": shape,
        "dtype": dtype.name,
        "dtype_bytes": dtype.itemsize,
        "declined": declined,
    }
    if declined is not None:
        none = ((),) * len(shape)
        return ReshardRequest(
            source_mesh=None,
            source_spec=none,
            target_mesh=None,
            target_spec=none,
            **common,
        )
    return ReshardRequest(
        source_mesh=device_mesh(cast(Any, source).mesh),
        source_spec=full_spec(cast(Any, source).spec, len(shape)),
        target_mesh=device_mesh(target.mesh),
        target_spec=full_spec(target.spec, len(shape)),
        **common,
    )


def _declined(source: Any, target: Any, dtype: np.dtype) -> str | None:
    """Why a leaf goes through ``jax.device_put``."""
    if source is None:
        return "host_array"
    for sharding in (source, target):
        if not isinstance(sharding, NamedSharding):
            return "not_named_sharding"
        if not isinstance(sharding.mesh, Mesh) or any(
            entry is PartitionSpec.UNCONSTRAINED for entry in sharding.spec
        ):
            return "not_named_sharding"
        kind = sharding.memory_kind
        if kind is not None and kind != default_memory_kind(sharding.mesh):
            return "memory_kind"
    return None if carried(dtype) else "not_named_sharding"
