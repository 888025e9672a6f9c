"""Moves live arrays between shardings, as a plan says."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from orbax_reshard.engine import exchange
from orbax_reshard.engine.requests import is_key, key_target
from orbax_reshard.planning.reshard_plan import ReshardGroup, ReshardPlan


class Sources:
    """The caller's arrays, and when each may be given up.

    An array may be in a tree several times, and a result may be made of its buffers.
    It is deleted behind the last of its uses, and never in the second case.
    """

    def __init__(self, leaves: Sequence[Any], *, donate: bool) -> None:
        """The leaves of the tree; without ``donate`` nothing is ever deleted."""
        self._donate = donate
        self._uses = Counter(map(id, leaves))
        self._shared: set[int] = set()

    def used(self, leaf: Any, result: Any) -> None:
        """``leaf`` has become ``result`` once more; deletes it if that was the last."""
        if not self._donate or not isinstance(leaf, jax.Array):
            return
        self._uses[id(leaf)] -= 1
        if _buffers(leaf) & _buffers(result):
            self._shared.add(id(leaf))
        if not self._uses[id(leaf)] and id(leaf) not in self._shared:
            jax.block_until_ready(result)
            leaf.delete()


def _buffers(array: Any) -> set[tuple[Any, int]]:
    """Where a jax array is in memory on this process's devices."""
    data = jax.random.key_data(array) if is_key(array) else array
    return {
        (shard.device, shard.data.unsafe_buffer_pointer())
        for shard in data.addressable_shards
        if shard.data.size
    }


def run_plan(
    plan: ReshardPlan, leaves: Sequence[Any], targets: Sequence[Any], *, donate: bool
) -> list[Any]:
    """Moves the leaves of a plan, group after group and wave after wave.

    Args:
        plan: of these leaves.
        leaves: in the plan's order; typed keys as they are.
        targets: what each becomes.
        donate: delete each leaf as soon as its wave is done, unless its result has the
            same buffers.

    Returns:
        The leaves under their targets. A wave is finished before the next is
        launched, so that the bound on a wave bounds the whole.
    """
    sources = Sources(leaves, donate=donate)
    made: list[Any] = [None] * len(leaves)
    for group in plan.groups:
        for wave in group.waves:
            arrays = [_data(leaves[i]) for i in wave]
            goals = [
                key_target(targets[i], leaves[i]) if is_key(leaves[i]) else targets[i]
                for i in wave
            ]
            results = _run_wave(group, arrays, goals)
            for i, result in zip(wave, results, strict=True):
                if is_key(leaves[i]):
                    kind = jax.random.key_impl(leaves[i])
                    result = jax.random.wrap_key_data(result, impl=kind)
                made[i] = result
                sources.used(leaves[i], result)
    return made


def _data(leaf: Any) -> Any:
    """The numbers of an array of keys, everything else as it is."""
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def _run_wave(
    group: ReshardGroup, arrays: Sequence[Any], targets: Sequence[Any]
) -> list[Any]:
    """One wave of a group, by its decision; waits where memory is at stake."""
    if group.decision == "relabel":
        return [relabelled(*pair) for pair in zip(arrays, targets, strict=True)]
    if group.decision == "device_put":
        return [jax.device_put(*pair) for pair in zip(arrays, targets, strict=True)]
    if group.decision == "other_devices":
        (array,), (target,) = arrays, targets
        if group.relayout is not None:
            array = one_replica(_exchange(group, [array])[0])
        return [jax.block_until_ready(jax.device_put(array, target))]
    results = [
        exchange.relabel(result, target, array.shape)
        for result, target, array in zip(
            _exchange(group, arrays), targets, arrays, strict=False
        )
    ]
    return jax.block_until_ready(results)


def _exchange(group: ReshardGroup, wave: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """Runs the group's program; results are over its mesh of digits."""
    relayout = group.relayout
    assert relayout is not None
    by_id: dict[int, exchange.Device] = {d.id: d for d in wave[0].sharding.device_set}
    devices = [by_id[i] for i in relayout.digits.mesh.device_ids]
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
    run = program.run if all(map(_row_major, arguments)) else program.run_any_layout
    mesh = cast(Mesh, program.argument.mesh)
    with contextlib.ExitStack() as context:
        context.enter_context(jax.enable_x64(key.dtype.itemsize >= 8))
        context.enter_context(jax.set_mesh(mesh))
        return run(*arguments)


def _row_major(array: jax.Array) -> bool:
    """Whether the array has the device layout that programs are compiled for."""
    layout = cast(Any, array).format.layout
    return layout is None or layout.major_to_minor == tuple(range(array.ndim))


def _placed(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    """The array's buffers under a sharding that may order the devices differently."""
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
    """The array on just the devices of its first replica; nothing is copied.

    An array that other processes have a part of stays as it is: a transfer between
    processes needs all of them.
    """
    sharding = array.sharding
    if not isinstance(sharding, NamedSharding) or not array.is_fully_addressable:
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
    return _placed(array, smaller)
