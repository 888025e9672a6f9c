"""JAX meshes and specs as planning values."""

from __future__ import annotations

import functools

from jax.sharding import Mesh, PartitionSpec

from orbax_reshard.engine.exchange import Device
from orbax_reshard.planning.digits import DeviceMesh
from orbax_reshard.planning.plan import Spec


@functools.lru_cache(maxsize=64)
def device_mesh(mesh: Mesh) -> DeviceMesh:
    """A JAX mesh as plain values."""
    flat: list[Device] = list(mesh.devices.flat)
    return DeviceMesh(
        axis_names=tuple(map(str, mesh.axis_names)),
        axis_sizes=tuple(mesh.devices.shape),
        device_ids=tuple(d.id for d in flat),
        hosts=tuple(d.process_index for d in flat),
    )


def full_spec(spec: PartitionSpec, rank: int) -> Spec:
    """A partition spec as axis names per dimension, ``rank`` of them."""
    dims: list[tuple[str, ...]] = []
    for entry in tuple(spec) + (None,) * (rank - len(spec)):
        if entry is None:
            dims.append(())
        elif isinstance(entry, tuple):
            dims.append(tuple(map(str, entry)))
        else:
            dims.append((str(entry),))
    return tuple(dims)


@functools.lru_cache(maxsize=64)
def default_memory_kind(mesh: Mesh) -> str:
    """The memory kind that a device's arrays have when nobody asks."""
    first: Device = mesh.devices.flat[0]
    return first.default_memory().kind
