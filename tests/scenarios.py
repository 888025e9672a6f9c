"""Restore scenarios: what is saved, on which mesh, and onto which it is restored.

Every array carries its address: element i of a leaf holds a value made from i, so that
a piece in the wrong place cannot go unnoticed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Spec = tuple[Any, ...]


@dataclass(frozen=True)
class Leaf:
    """A leaf: its shape, dtype, and specs when saved and when restored."""

    shape: tuple[int, ...]
    saved: Spec
    target: Spec
    dtype: str = "float32"


@dataclass(frozen=True)
class Scenario:
    """A checkpoint and a restore of it.

    ``order`` is how the target's devices are listed: ``forward``, ``reversed`` or
    ``interleaved`` (even ones, then odd ones). ``save_args`` holds arguments of
    ``ocp.SaveArgs`` for every leaf. ``read_once`` and ``even`` say what the chunk grid
    allows; tests hold the restore to it. ``processes`` are the cluster sizes with
    which it is run, ``devices`` the devices of all processes together. Without
    ``replica_parallel`` replicas write nothing, so that chunks are as large as shards
    (and saving is quicker: it compiles no slice per device). With ``inner_chunks``
    (zarr3 only) the arrays are written again with that many elements per inner chunk.
    """

    id: str
    saved: Mapping[str, int]
    target: Mapping[str, int]
    leaves: Mapping[str, Leaf]
    order: str = "forward"
    zarr3: bool = True
    ocdbt: bool = True
    read_once: bool = True
    even: bool = False
    policy: str = "read_once"
    repeats: int = 1
    processes: tuple[int, ...] = (1, 2, 4)
    devices: int = 8
    replica_parallel: bool = True
    save_args: Mapping[str, Any] = field(default_factory=dict)
    inner_chunks: tuple[int, ...] | None = None

    @property
    def checkpoint(self) -> str:
        """Scenarios that save alike share a checkpoint."""
        leaves = {n: (v.shape, v.saved, v.dtype) for n, v in self.leaves.items()}
        mesh, how = list(self.saved.items()), sorted(self.save_args.items())
        how = (self.zarr3, self.ocdbt, self.replica_parallel, self.inner_chunks, how)
        text = repr((mesh, leaves, how))
        return f"{abs(hash_text(text)):x}"


def hash_text(text: str) -> int:
    """A hash that does not depend on the process."""
    value = 0
    for char in text.encode():
        value = (value * 1000003 + char) % 2**61
    return value


def to_json(scenario: Scenario) -> dict[str, Any]:
    """A scenario for a worker process."""
    return dataclasses.asdict(scenario)


def from_json(plain: dict[str, Any]) -> Scenario:
    """The scenario that ``to_json`` wrote."""

    def spec(entries: list[Any]) -> Spec:
        return tuple(tuple(e) if isinstance(e, list) else e for e in entries)

    leaves = {
        name: Leaf(
            tuple(leaf["shape"]),
            spec(leaf["saved"]),
            spec(leaf["target"]),
            leaf["dtype"],
        )
        for name, leaf in plain["leaves"].items()
    }
    inner = plain["inner_chunks"]
    tuples = {
        "processes": tuple(plain["processes"]),
        "inner_chunks": None if inner is None else tuple(inner),
    }
    return Scenario(**{**plain, **tuples, "leaves": leaves})


def addressed(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    """An array whose elements carry their address, incompressible for wide types.

    With different seeds, so that a leaf in another's place is a difference too.
    """
    count = math.prod(shape)
    index = np.arange(1, count + 1, dtype=np.uint64) + np.uint64(seed % 2**32 << 24)
    mixed = (index * np.uint64(0x9E3779B97F4A7C15)) ^ (index << np.uint64(7))
    kind = np.dtype(dtype)
    if kind == np.bool_:
        return (mixed >> np.uint64(33) & np.uint64(1)).astype(bool).reshape(shape)
    if kind.itemsize == 1 and kind.name in ("int4", "uint4", "float4_e2m1fn"):
        return (mixed % np.uint64(8)).astype(np.uint8).view(kind).reshape(shape)
    raw = mixed.view(np.uint8).reshape(count, 8)
    times = -(-kind.itemsize // 8)
    raw = np.tile(raw, (1, times))[:, : kind.itemsize]
    return np.ascontiguousarray(raw).view(kind).reshape(shape)


def devices_of(process: int) -> list[jax.Device]:
    """The devices of a process, in the order of the backend."""
    return [d for d in jax.devices() if d.process_index == process]


def mesh_of(axes: Mapping[str, int], order: str = "forward") -> Mesh:
    """A mesh over the first devices of every process, in the asked order.

    All processes give alike where the count allows it, so that a mesh smaller than
    the cluster still spans its hosts.
    """
    count, processes = math.prod(axes.values()), jax.process_count()
    each = -(-count // processes)
    devices = [
        device for process in range(processes) for device in devices_of(process)[:each]
    ][:count]
    if order == "reversed":
        devices = devices[::-1]
    elif order == "interleaved":
        devices = devices[::2] + devices[1::2]
    grid = np.array(devices, dtype=object).reshape(tuple(axes.values()))
    return Mesh(grid, tuple(axes))


def sharding_of(mesh: Mesh, spec: Spec) -> NamedSharding:
    """A NamedSharding for a spec given as plain values."""
    return NamedSharding(mesh, PartitionSpec(*spec))


def save(scenario: Scenario, path: str) -> None:
    """Saves the scenario's checkpoint with stock Orbax."""
    import orbax.checkpoint as ocp
    from orbax.checkpoint._src.metadata import array_metadata_store

    mesh = mesh_of(scenario.saved)
    tree = {
        name: jax.device_put(
            addressed(leaf.shape, leaf.dtype, hash_text(name)),
            sharding_of(mesh, leaf.saved),
        )
        for name, leaf in scenario.leaves.items()
    }
    how = {name: ocp.SaveArgs(**scenario.save_args) for name in tree}
    arrays = ocp.type_handlers.ArrayHandler(
        use_replica_parallel=scenario.replica_parallel,
        array_metadata_store=array_metadata_store.Store(),
    )
    handler = ocp.PyTreeCheckpointHandler(
        use_zarr3=scenario.zarr3,
        use_ocdbt=scenario.ocdbt,
        type_handler_registry=ocp.type_handlers.create_type_handler_registry(
            (jax.Array, arrays)
        ),
    )
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(tree, save_args=how))
    if scenario.inner_chunks is not None:
        for name in scenario.leaves:
            _write_inner_chunks(scenario, path, name)


def _write_inner_chunks(scenario: Scenario, path: str, name: str) -> None:
    """Writes a saved array again, with inner chunks in its old chunks.

    Orbax 0.12.8 reads such arrays, but makes inner and outer chunks alike.
    """
    import tensorstore as ts

    kvstore: Any = {"driver": "file", "path": f"{path}/{name}/"}
    if scenario.ocdbt:
        base = f"file://{path}/"
        kvstore = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
    spec: dict[str, Any] = {"driver": "zarr3", "kvstore": kvstore}
    array = ts.open(spec, open=True).result()
    metadata = array.spec().to_json()["metadata"]
    (sharding,) = metadata["codecs"]
    sharding["configuration"]["chunk_shape"] = list(scenario.inner_chunks or ())
    values = array.read().result()
    spec = {**spec, "metadata": metadata, "create": True, "delete_existing": True}
    ts.open(spec).result().write(values).result()


def target_tree(scenario: Scenario) -> dict[str, jax.ShapeDtypeStruct]:
    """What the scenario asks for."""
    mesh = mesh_of(scenario.target, scenario.order)
    return {
        name: jax.ShapeDtypeStruct(
            leaf.shape, np.dtype(leaf.dtype), sharding=sharding_of(mesh, leaf.target)
        )
        for name, leaf in scenario.leaves.items()
    }


def restore(path: str, target: Any, handler: Any = None) -> Any:
    """Restores through ``PyTreeCheckpointHandler`` with the given array handler."""
    import orbax.checkpoint as ocp

    given = {}
    if handler is not None:
        given["type_handler_registry"] = ocp.type_handlers.create_type_handler_registry(
            (jax.Array, handler), (np.ndarray, ocp.type_handlers.NumpyHandler())
        )
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**given)) as checkpointer:
        return checkpointer.restore(
            path,
            args=ocp.args.PyTreeRestore(
                item=target,
                restore_args=ocp.checkpoint_utils.construct_restore_args(target),
            ),
        )


def difference(stock: Any, planned: Any) -> str | None:
    """The first leaf that differs in bits, dtype, sharding or placement, or None."""
    for name in stock:
        one, two = stock[name], planned[name]
        if one.dtype != two.dtype or one.shape != two.shape:
            return f"{name}: {one.dtype}{one.shape} and {two.dtype}{two.shape}"
        if one.sharding != two.sharding:
            return f"{name}: sharding {one.sharding} and {two.sharding}"
        pairs = zip(one.addressable_shards, two.addressable_shards, strict=True)
        for a, b in pairs:
            if a.device != b.device or a.index != b.index:
                return f"{name}: shard {a.device} {a.index} and {b.device} {b.index}"
            if bits(a.data).tobytes() != bits(b.data).tobytes():
                return f"{name}: bits on {a.device}"
    return None


def bits(array: Any) -> np.ndarray:
    """An array's elements as unsigned integers."""
    host = np.asarray(array)
    width = host.dtype.itemsize
    word = {1: np.uint8, 2: np.uint16, 4: np.uint32}.get(width, np.uint64)
    return np.ascontiguousarray(host).view(word)
