"""Runs an exchange on 16 devices of one process, and what each device must hold after.

Hosts are only described: a `DeviceMesh` may say that device 3 belongs to host 1, and
the planner and the program believe it.
"""

from __future__ import annotations

import math
from collections import Counter

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from planning_oracle import held, request

from orbax_reshard.engine.exchange import (
    ExchangeKey,
    Program,
    ProgramCache,
    relabel,
    stacked_shape,
)
from orbax_reshard.engine.transport import Transport, bit_width
from orbax_reshard.planning.candidates import GroupShape
from orbax_reshard.planning.digits import DigitMesh
from orbax_reshard.planning.layout import Intermediate
from orbax_reshard.planning.plan import GroupPlan
from orbax_reshard.planning.planner import build_plan
from orbax_reshard.planning.profile import CPU_OBJECT_STORE


def devices_of(digits: DigitMesh) -> list[jax.Device]:
    """The mesh's devices in mesh order; ids are places in ``jax.devices()``."""
    return [jax.devices()[i] for i in digits.mesh.device_ids]


def sharding_of(digits: DigitMesh, spec) -> NamedSharding:
    """What the caller asked for: a spec over the mesh's own axes."""
    mesh = digits.mesh
    grid = np.array(devices_of(digits), dtype=object).reshape(mesh.axis_sizes)
    return NamedSharding(
        Mesh(grid, mesh.axis_names), P(*[tuple(axes) or None for axes in spec])
    )


def random_bits(rng: np.random.Generator, shape, dtype: np.dtype) -> np.ndarray:
    """Any pattern that an element can have: NaNs, denormals and both zeros too."""
    count = math.prod(shape)
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(bool)
    raw = rng.integers(0, 256, count * dtype.itemsize, dtype=np.uint8)
    if bit_width(dtype) < 8:
        raw &= (1 << bit_width(dtype)) - 1
    return raw.view(dtype).reshape(shape)


def bits(array) -> bytes:
    """The bits of the elements, without those that narrow types leave unused."""
    host = np.ascontiguousarray(array)
    raw = host.reshape(-1).view(np.uint8)
    width = bit_width(host.dtype)
    return (raw & ((1 << width) - 1) if width < 8 else raw).tobytes()


def blocks(
    intermediate: Intermediate, digits: DigitMesh, leaves: np.ndarray
) -> list[np.ndarray]:
    """Per device in mesh order its block, padding filled with something that shows."""
    found = []
    for spans in held(intermediate, digits):
        block = np.full(intermediate.piece_width, 1, np.uint8).astype(leaves.dtype)
        part = leaves[tuple(slice(s.start, s.stop) for s in spans)]
        block[tuple(slice(0, len(s)) for s in spans)] = part
        found.append(block)
    return found


def compiled(intermediate: Intermediate, digits: DigitMesh, dtype: np.dtype) -> Program:
    key = ExchangeKey(
        intermediate=intermediate,
        steps=intermediate.steps(digits),
        digits=digits,
        dtype=np.dtype(dtype),
        platform="cpu",
    )
    return ProgramCache().get(key, devices_of(digits))


def exchanged(
    program: Program,
    intermediate: Intermediate,
    digits: DigitMesh,
    spec,
    leaves: np.ndarray,
) -> list[jax.Array]:
    """Places the blocks, runs the program, and relabels to the asked sharding."""
    transport = Transport(leaves.dtype)
    placed = [
        jax.device_put(transport.pack(block), device)
        for block, device in zip(
            blocks(intermediate, digits, leaves), devices_of(digits), strict=True
        )
    ]
    stacked = jax.make_array_from_single_device_arrays(
        stacked_shape(intermediate, digits, transport), program.argument, placed
    )
    sharding = sharding_of(digits, spec)
    return [relabel(made, sharding, leaves.shape[1:]) for made in program.run(stacked)]


def faults(arrays: list[jax.Array], leaves: np.ndarray, sharding) -> list[str]:
    """What differs from the leaves, whole and shard by shard."""
    found = []
    if len(arrays) != len(leaves):
        found.append(f"{len(arrays)} arrays for {len(leaves)} leaves")
    for number, (array, leaf) in enumerate(zip(arrays, leaves, strict=False)):
        if (array.dtype, array.shape) != (leaf.dtype, leaf.shape):
            found.append(f"leaf {number}: {array.dtype}{array.shape}")
        if array.sharding is not sharding and array.sharding != sharding:
            found.append(f"leaf {number}: sharding {array.sharding}")
        if bits(array) != bits(leaf):
            found.append(f"leaf {number}: bits differ")
        expected = sharding.devices_indices_map(leaf.shape)
        for shard in array.addressable_shards:
            if bits(shard.data) != bits(leaf[expected[shard.device]]):
                found.append(f"leaf {number}: bits differ on {shard.device}")
    return found


def planned_collectives(steps) -> tuple[tuple[str, int], ...]:
    kinds = Counter(step.hlo_name for step in steps if step.kind != "slice")
    return tuple(sorted(kinds.items()))


def planned_group(mesh, shape, chunks, *spec, leaves=1, **kwargs) -> GroupPlan:
    """The plan for equal leaves that fetches least."""
    asked = [
        request(f"leaf{i}", mesh, shape, chunks, *spec, **kwargs) for i in range(leaves)
    ]
    (group,) = build_plan(asked, policy="read_once", profile=CPU_OBJECT_STORE).groups
    return group


def with_leaves(group: GroupShape, digits: DigitMesh, dtype, seed: int) -> np.ndarray:
    """Random leaves of a group, stacked."""
    return random_bits(np.random.default_rng(seed), group.shape, np.dtype(dtype))
