"""What the caller asked for, as planning values, and why a leaf has to go direct."""

from __future__ import annotations

from typing import Any, cast

import jax
import numpy as np
import tensorstore as ts
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from orbax_reshard.engine.meshes import default_memory_kind, device_mesh, full_spec
from orbax_reshard.engine.transport import carried, result_dtype
from orbax_reshard.engine.work import Target
from orbax_reshard.errors import TargetError
from orbax_reshard.planning.plan import LeafRequest
from orbax_reshard.planning.stored import StoredArray


def plain_sharding(target: Any) -> tuple[Any, str | None]:
    """The sharding inside a target, and the reason it must be read directly."""
    layout = getattr(target, "layout", None)
    if not isinstance(target, jax.sharding.Sharding) and hasattr(target, "sharding"):
        target = target.sharding
        if layout is not None:
            return target, "custom_layout"
    if isinstance(target, jax.sharding.SingleDeviceSharding):
        return target, "single_device"
    if not isinstance(target, NamedSharding) or not isinstance(target.mesh, Mesh):
        return target, "not_named_sharding"
    if any(entry is PartitionSpec.UNCONSTRAINED for entry in target.spec):
        return target, "not_named_sharding"
    kind = target.memory_kind
    if kind is not None and kind != default_memory_kind(target.mesh):
        return target, "memory_kind"
    return target, None


def check_target(
    stored: StoredArray, shape: tuple[int, ...] | None, sharding: Any, strict: bool
) -> None:
    """Refuses a target that cannot hold the stored array.

    Raises:
        TargetError: names the leaf, the dimension and both numbers.
    """
    name = stored.name
    asked = stored.shape if shape is None else tuple(shape)
    if asked != stored.shape and strict:
        raise TargetError(
            f"leaf {name!r}: the target has shape {asked}, the checkpoint has "
            f"{stored.shape}. To pad or cut, pass strict=False in ArrayRestoreArgs.",
            code="shape_mismatch",
        )
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return
    if len(sharding.spec) > len(asked):
        raise TargetError(
            f"leaf {name!r}: the target's spec {sharding.spec} names "
            f"{len(sharding.spec)} dimensions, the array has {len(asked)}",
            code="rank_mismatch",
        )
    sizes = dict(sharding.mesh.shape)
    for dim, axes in enumerate(full_spec(sharding.spec, len(asked))):
        parts = 1
        for axis in axes:
            parts *= sizes.get(axis, 1)
        if asked[dim] % parts:
            raise TargetError(
                f"leaf {name!r}: dimension {dim} of {asked[dim]} does not divide "
                f"into the {parts} shards of mesh axes {axes} "
                f"({ {a: sizes[a] for a in axes} }) in the target {sharding.spec}",
                code="not_divisible",
            )


def leaf_request(
    stored: StoredArray,
    array: ts.TensorStore,
    *,
    shape: tuple[int, ...] | None,
    target: Any,
    strict: bool,
) -> tuple[LeafRequest, Target | None]:
    """A leaf as a planning value, and what to build if it is planned.

    Raises:
        TargetError: the target cannot hold the array.
    """
    sharding, declined = plain_sharding(target)
    check_target(stored, shape, sharding, strict)
    dtype = result_dtype(array.dtype.numpy_dtype)
    if declined is None:
        declined = _decline(stored, shape, dtype)
    text = str(getattr(sharding, "spec", type(sharding).__name__))
    if declined is not None:
        return _direct(stored, dtype, declined, text), None
    named: NamedSharding = sharding
    mesh = cast(Mesh, named.mesh)
    request = LeafRequest(
        stored=stored,
        mesh=device_mesh(mesh),
        spec=full_spec(named.spec, len(stored.shape)),
        dtype=dtype.name,
        moved_bytes=dtype.itemsize,
        kind=named.memory_kind,
    )
    return request, Target(
        sharding=sharding,
        devices=tuple(mesh.devices.flat),
        dtype=dtype,
        shape=stored.shape,
    )


def _direct(
    stored: StoredArray, dtype: np.dtype, reason: str, text: str
) -> LeafRequest:
    return LeafRequest(
        stored=stored,
        mesh=None,
        spec=((),) * len(stored.shape),
        dtype=dtype.name,
        moved_bytes=dtype.itemsize,
        declined=reason,
        target_text=text,
    )


def _decline(
    stored: StoredArray, shape: tuple[int, ...] | None, dtype: np.dtype
) -> str | None:
    """Why an array with a plain NamedSharding still has to be read directly."""
    if shape is not None and tuple(shape) != stored.shape:
        return "shape_differs"
    if 0 in stored.shape:
        return "empty_array"
    if stored.driver not in ("zarr", "zarr3"):
        return "driver_not_planned"
    return None if carried(dtype) else "dtype_not_carried"
