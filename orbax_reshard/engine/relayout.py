"""Moves live arrays between shardings, as a plan says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from orbax_reshard.engine import exchange
from orbax_reshard.planning.reshard_plan import ReshardGroup


def run_group(
    group: ReshardGroup,
    arrays: Sequence[jax.Array],
    targets: Sequence[NamedSharding],
    *,
    donate: bool,
) -> list[jax.Array]:
    """Exchanges the leaves of one group, wave after wave.

    Args:
        group: a group whose decision is ``"exchange"``.
        arrays: its leaves, in the group's order.
        targets: what each becomes.
        donate: delete each leaf as soon as its wave is done.

    Returns:
        The leaves under their targets. Each wave is finished before the next is
        launched, so that the bound on a wave bounds the whole.
    """
    made: list[jax.Array] = []
    size = group.wave_size
    for start in range(0, len(arrays), size):
        wave = arrays[start : start + size]
        results = _run_wave(group, wave, targets[start])
        made += [
            exchange.relabel(result, target, array.shape)
            for result, target, array in zip(
                results, targets[start : start + size], wave, strict=False
            )
        ]
        if donate:
            jax.block_until_ready(results)
            for array in wave:
                array.delete()
        elif start + size < len(arrays):
            jax.block_until_ready(results)
    return made


def _run_wave(
    group: ReshardGroup, wave: Sequence[jax.Array], target: NamedSharding
) -> Sequence[jax.Array]:
    relayout = group.relayout
    assert relayout is not None
    mesh = cast(Mesh, target.mesh)
    devices = list(mesh.devices.flat)
    key = exchange.ExchangeKey(
        intermediate=relayout.intermediate,
        steps=relayout.steps,
        digits=relayout.digits,
        dtype=np.dtype(wave[0].dtype),
        platform=devices[0].platform,
        permutation=relayout.permutation,
        live=True,
    )
    program = exchange.PROGRAMS.get(key, devices)
    # The last wave may be short: its first leaf stands in for the missing ones.
    filled = [*wave, *[wave[0]] * (group.wave_size - len(wave))]
    arguments = [_placed(a, program.argument) for a in filled]
    with jax.enable_x64(key.dtype.itemsize >= 8):
        return program.run(*arguments)


def _placed(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    """The array's buffers under the program's sharding, which may order devices
    differently; the program's permutation puts that right.
    """  # fmt: skip
    by_device = {s.device: s.data for s in array.addressable_shards}
    mesh = cast(Any, sharding.mesh)
    here = jax.process_index()
    return jax.make_array_from_single_device_arrays(
        array.shape,
        sharding,
        [by_device[d] for d in mesh.devices.flat if d.process_index == here],
    )


def relabelled(array: jax.Array, target: NamedSharding) -> jax.Array:
    """The same buffers under a sharding that puts each block where it is."""
    if array.sharding == target:
        return array
    return _placed(array, target)


def one_replica(array: jax.Array) -> jax.Array:
    """The array on just the devices of its first replica; nothing is copied."""
    sharding = array.sharding
    if not isinstance(sharding, NamedSharding):
        return array
    mesh = cast(Mesh, sharding.mesh)
    used = {
        axis
        for entry in sharding.spec
        if entry is not None
        for axis in (entry if isinstance(entry, tuple) else (entry,))
    }
    first = tuple(slice(None) if a in used else slice(0, 1) for a in mesh.axis_names)
    smaller = NamedSharding(Mesh(mesh.devices[first], mesh.axis_names), sharding.spec)
    if jax.process_count() > 1:
        return array  # other processes hold a part; a transfer needs all of them
    return _placed(array, smaller)
