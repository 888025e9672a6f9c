"""The exchange: one compiled program per signature, with exactly the planned moves.

The program is written with ``jax.shard_map`` and explicit collectives over a mesh of
digits, because a bare ``jit(identity, out_shardings=...)`` leaves the choice of
collectives to XLA, which falls back to gathering whole arrays. A device holds

    intermediate block   ->   [ target suffix digits of each donor | rest ]

as labelled dimensions. A slice removes a digit's dimension, a permutation changes none,
an all-to-all turns a target digit into an extra digit in the same place, an all-gather
adds an extra digit in front, and one transpose at the end moves the extras before the
rest that they belong to.
"""

from __future__ import annotations

import collections
import contextlib
import math
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from orbax_reshard.engine.transport import Transport, bit_width
from orbax_reshard.planning.digits import DigitMesh, Layout
from orbax_reshard.planning.layout import Intermediate, Step

_HLO_COLLECTIVES = re.compile(
    r" (all-gather|all-to-all|all-reduce|reduce-scatter|collective-permute|"
    r"collective-broadcast|ragged-all-to-all)(?:-start)?\("
)

Device: TypeAlias = Any
"""A ``jax.Device``, which is a variable and no type to type checkers."""

# XLA's newer fusion emitters for the CPU take twice as long to compile transposes and
# slices, and their code is no faster (16 leaves of 1 MiB gathered on 8 devices: 0.34 s
# and 0.28 s against 0.75 s and 0.65 s).
_COMPILER_OPTIONS: dict[str, dict[str, str | bool]] = {
    "cpu": {"xla_cpu_use_fusion_emitters": False}
}

# Programs kept for later restores in the process. One is some hundred kilobytes of
# code; a model has tens of signatures, and two or three targets are in use at once.
_MAX_PROGRAMS = 512


@dataclass(frozen=True, slots=True)
class ExchangeKey:
    """Everything a program depends on; equal keys share one compiled program.

    Attributes:
        intermediate: the layout of the argument, dimension 0 counting leaves.
        steps: the moves.
        digits: the mesh in digits.
        dtype: name of the leaves' dtype.
        platform: backend of the devices.
        permutation: pairs of positions that blocks travel, behind the slices and
            before the other steps; every position is in one pair as the first.
        live: True when the argument is one array per leaf in the leaves' own dtype,
            False when it is one stacked array of words.
    """

    intermediate: Intermediate
    steps: tuple[Step, ...]
    digits: DigitMesh
    dtype: np.dtype
    platform: str
    permutation: tuple[tuple[int, int], ...] = ()
    live: bool = False


@dataclass(frozen=True, slots=True)
class Program:
    """A compiled exchange.

    Attributes:
        run: takes the stacked intermediate, or one array per leaf when live; returns
            one array per leaf.
        run_any_layout: the same for arguments in a device layout of their own, at
            the price of a compilation for each.
        argument: sharding of the stacked intermediate, or of each live leaf.
        result: sharding of each leaf, over the mesh of digits.
        collectives: kinds and counts, read from the compiled HLO.
        peak_bytes: XLA's own figure of argument, result and temporary bytes per
            device; 0 if unknown.
    """

    run: Callable[..., Sequence[jax.Array]]
    run_any_layout: Callable[..., Sequence[jax.Array]]
    argument: NamedSharding
    result: NamedSharding
    collectives: tuple[tuple[str, int], ...]
    peak_bytes: int


def digit_names(digits: DigitMesh) -> tuple[str, ...]:
    """Mesh axis names of the digits; one axis of size 1 for a single device."""
    return tuple(f"d{i}" for i in range(max(1, len(digits.sizes))))


def digit_mesh(digits: DigitMesh, devices: Sequence[Device]) -> Mesh:
    """The target's devices, in the target's order, as a mesh of digits."""
    grid = np.asarray(devices, dtype=object).reshape(digits.sizes or (1,))
    return Mesh(grid, digit_names(digits))


def layout_sharding(
    mesh: Mesh, digits: DigitMesh, layout: Layout, *, trailing: int = 0
) -> NamedSharding:
    """A layout as a sharding over the mesh of digits."""
    names = digit_names(digits)
    dims = [tuple(names[d] for d in run) or None for run in layout]
    return NamedSharding(mesh, PartitionSpec(*dims, *([None] * trailing)))


def stacked_shape(
    intermediate: Intermediate, digits: DigitMesh, transport: Transport
) -> tuple[int, ...]:
    """Global shape of the argument: every block at full width, padding included."""
    return (
        tuple(
            digits.num_parts(run) * width
            for run, width in zip(
                intermediate.layout, intermediate.piece_width, strict=True
            )
        )
        + transport.suffix
    )


def exchange_body(
    key: ExchangeKey, *, names: Sequence[str]
) -> Callable[..., list[jax.Array]]:
    """The per-device function: a block under the intermediate to one per leaf."""
    inter, digits = key.intermediate, key.digits
    transport = Transport(key.dtype)
    sizes = digits.sizes
    local_target = [
        extent // digits.num_parts(run)
        for extent, run in zip(inter.shape, inter.target, strict=True)
    ]

    def body(*blocks: jax.Array) -> list[jax.Array]:
        block = blocks[0]
        if key.live:
            packed = [transport.pack_traced(b)[None] for b in blocks]
            block = packed[0] if len(packed) == 1 else jnp.concatenate(packed)
        labels: list[tuple[str, int]] = []
        dims: list[int] = []
        for dim, width in enumerate(inter.piece_width):
            suffix = inter.target[dim][inter.num_kept[dim] :]
            labels += [("target", digit) for digit in suffix] + [("rest", dim)]
            dims += [sizes[digit] for digit in suffix]
            dims.append(width // digits.num_parts(suffix))
        x = block.reshape(*dims, *transport.suffix)
        slices = [step for step in key.steps if step.kind == "slice"]
        for step in slices:
            x, labels = _slice(x, labels, step, key, names)
        if key.permutation:
            x = lax.ppermute(x, tuple(names), key.permutation)
        for step in key.steps[len(slices) :]:
            x, labels = _move(x, labels, step, sizes, names)
        order: list[int] = []
        for dim, extras in enumerate(inter.extras):
            order += [labels.index(("extra", digit)) for digit in extras]
            order.append(labels.index(("rest", dim)))
        order += range(len(labels), x.ndim)
        x = _join(x.transpose(order), inter, digits)
        return [
            transport.unpack(
                lax.slice_in_dim(x, i, i + 1, axis=0).reshape(
                    *local_target[1:], *transport.suffix
                )
            )
            for i in range(inter.shape[0])
        ]

    return body


def _slice(
    x: jax.Array,
    labels: list[tuple[str, int]],
    step: Step,
    key: ExchangeKey,
    names: Sequence[str],
) -> tuple[jax.Array, list[tuple[str, int]]]:
    """Keeps what the device needs that this block goes to, itself or another."""
    sizes = key.digits.sizes
    index = lax.axis_index(tuple(names[d] for d in step.digits))
    if key.permutation:
        parts = key.digits.part_indices(step.digits)
        receiver = dict(key.permutation)
        sent = np.array([parts[receiver[i]] for i in range(len(parts))], np.int32)
        index = jnp.asarray(sent)[lax.axis_index(tuple(names))]
    first = labels.index(("target", step.digits[0]))
    last = first + len(step.digits)
    count = math.prod(sizes[d] for d in step.digits)
    merged = x.reshape(*x.shape[:first], count, *x.shape[last:])
    x = lax.dynamic_index_in_dim(merged, index, first, keepdims=False)
    return x, labels[:first] + labels[last:]


def _move(
    x: jax.Array,
    labels: list[tuple[str, int]],
    step: Step,
    sizes: Sequence[int],
    names: Sequence[str],
) -> tuple[jax.Array, list[tuple[str, int]]]:
    """Makes one collective step on a device's labelled block."""
    axes = tuple(names[d] for d in step.digits)
    count = math.prod(sizes[d] for d in step.digits)
    if step.kind == "all_gather":
        x = lax.all_gather(x, axes, axis=0, tiled=False)
        x = x.reshape(*(sizes[d] for d in step.digits), *x.shape[1:])
        return x, [("extra", d) for d in step.digits] + labels
    first = labels.index(("target", step.digits[0]))
    last = first + len(step.digits)
    shape = x.shape
    merged = x.reshape(*shape[:first], count, *shape[last:])
    x = lax.all_to_all(merged, axes, split_axis=first, concat_axis=first, tiled=True)
    moved = [("extra", d) for d in step.digits]
    return x.reshape(shape), labels[:first] + moved + labels[last:]


def _join(x: jax.Array, inter: Intermediate, digits: DigitMesh) -> jax.Array:
    """Joins each dimension's extras with its rest, and cuts the padding off."""
    for at, extras in enumerate(inter.extras):
        across = digits.num_parts(inter.cross_extras(at, digits))
        inside = digits.num_parts(extras) // across
        after = x.shape[at + len(extras) + 1 :]
        rest = x.shape[at + len(extras)]
        before = x.shape[:at]
        x = x.reshape(*before, across, inside * rest, *after)
        if extras:
            x = lax.slice_in_dim(x, 0, inter.host_width[at], axis=at + 1)
        if inter.rotation[at]:
            x = jnp.roll(x, -inter.rotation[at], axis=at)
        x = x.reshape(*before, x.shape[at] * x.shape[at + 1], *after)
        if extras:
            x = lax.slice_in_dim(x, 0, inter.shard_width[at], axis=at)
    return x


def build_exchange(
    key: ExchangeKey, mesh: Mesh
) -> tuple[Any, list[jax.ShapeDtypeStruct], NamedSharding]:
    """The jitted, not yet compiled program, its arguments, and its result sharding."""
    inter, digits = key.intermediate, key.digits
    transport = Transport(key.dtype)
    count = inter.shape[0]
    if key.live:
        argument = layout_sharding(mesh, digits, inter.layout[1:])
        struct = jax.ShapeDtypeStruct(inter.shape[1:], key.dtype, sharding=argument)
    else:
        trailing = len(transport.suffix)
        argument = layout_sharding(mesh, digits, inter.layout, trailing=trailing)
        struct = jax.ShapeDtypeStruct(
            stacked_shape(inter, digits, transport), transport.word, sharding=argument
        )
    structs = [struct] * (count if key.live else 1)
    result = layout_sharding(mesh, digits, inter.target[1:])
    mapped = jax.shard_map(
        exchange_body(key, names=digit_names(digits)),
        mesh=mesh,
        in_specs=(argument.spec,) * len(structs),
        out_specs=[result.spec] * count,
        check_vma=False,
    )
    return jax.jit(mapped), structs, result


class ProgramCache:
    """Compiled exchanges, kept for the process; safe to use from several threads."""

    def __init__(self, max_programs: int = _MAX_PROGRAMS) -> None:
        """An empty cache of at most ``max_programs``, the oldest given up first."""
        self._programs: collections.OrderedDict[object, Program] = (
            collections.OrderedDict()
        )
        self._max_programs = max_programs
        self._lock = threading.Lock()
        self.num_compiled = 0

    def get(self, key: ExchangeKey, devices: Sequence[Device]) -> Program:
        """The program for ``key``, compiled now if it is new."""
        with self._lock:
            found = self._programs.get(key)
            if found is not None:
                self._programs.move_to_end(key)
                return found
        # 64-bit leaves exist only where x64 is on; this thread may not have it.
        mesh = digit_mesh(key.digits, devices)
        # A mesh that the caller has set would have to be the program's own.
        with jax.enable_x64(key.dtype.itemsize >= 8), jax.set_mesh(mesh):
            jitted, structs, result = build_exchange(key, mesh)
            compiled = _compile(jitted.lower(*structs), key.platform)
        # An int4 array made by device_put says nothing of its packing, and compiled
        # programs are strict about that; the jitted function is not.
        lenient = key.live and bit_width(key.dtype) < 8
        program = Program(
            run=jitted if lenient else compiled,
            run_any_layout=jitted,
            argument=structs[0].sharding,
            result=result,
            collectives=count_collectives(compiled.as_text()),
            peak_bytes=_peak_bytes(compiled.memory_analysis()),
        )
        with self._lock:
            self.num_compiled += 1
            self._programs[key] = program
            while len(self._programs) > self._max_programs:
                self._programs.popitem(last=False)
        return program


PROGRAMS = ProgramCache()


def _compile(lowered: Any, platform: str) -> Any:
    """Compiles, with the options that suit pure data movement where XLA knows them."""
    options = _COMPILER_OPTIONS.get(platform)
    if options is not None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            return lowered.compile(compiler_options=options)
    return lowered.compile()


def _peak_bytes(memory: Any) -> int:
    """Bytes that XLA plans per device: arguments, results and temporaries."""
    if memory is None:
        return 0
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes
    )


def count_collectives(hlo_text: str) -> tuple[tuple[str, int], ...]:
    """Collectives in compiled HLO: pairs of kind and count, kinds ascending.

    >>> count_collectives("  %a = u8[4]{0} all-gather(%p), dimensions={0}")
    (('all-gather', 1),)
    """
    found = collections.Counter(_HLO_COLLECTIVES.findall(hlo_text))
    return tuple(sorted(found.items()))


def relabel(
    array: jax.Array, sharding: jax.sharding.Sharding, shape: tuple[int, ...]
) -> jax.Array:
    """The same buffers under the caller's sharding object; nothing is copied."""
    return jax.make_array_from_single_device_arrays(
        shape, sharding, [shard.data for shard in array.addressable_shards]
    )
