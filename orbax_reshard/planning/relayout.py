"""From one sharding of a live array to another on the same devices.

Here the source is given, and no longer chosen like the intermediate of a restore; but
both are lists of digits per dimension, and nearly every pair is a member of the same
family, up to one permutation:

    source  P('a', 'b')   dim 0: a    dim 1: b        index digit 0 of dim 0: a -> b
    target  P('b', 'a')   dim 0: b    dim 1: a        index digit 0 of dim 1: b -> a

An *index digit* is a place in a dimension's mixed-radix number. Where source and
target give one place to different mesh digits, blocks have to change hands whole: one
collective-permute, which a different device order needs too, and both are the same
one. After it each dimension only lost a suffix or only gained one, which is
``layout``'s family: slices, all-to-alls, then gathers.

Slices come first, before the permutation, so that less travels: a device cuts out what
the device that it sends to will need.

What has no such form: specs whose axes cut the devices at places that do not divide
(P('x', 'y') on 2 x 3 against 3 x 2), or a dimension cut by 2 first here and by 3 first
there. Axes that follow each other in mesh and spec, or that nobody uses, count as one:
P(('x', 'y'), None) on 2 x 3 and P(None, ('x', 'y')) on 3 x 2 do have common digits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from orbax_reshard.planning.digits import DeviceMesh, DigitMesh, Layout, factorise
from orbax_reshard.planning.layout import Intermediate, Step

Spec = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Relayout:
    """How blocks under the source become blocks under the target.

    Attributes:
        digits: the target's devices in digits fine enough for both meshes.
        permutation: pairs of positions ``(from, to)`` in target device order that
            blocks travel, after the slices and before the other steps; empty when
            all stay.
        intermediate: the source, as if permuted; dimension 0 counts leaves.
        steps: the moves, slices first.
    """

    digits: DigitMesh
    permutation: tuple[tuple[int, int], ...]
    intermediate: Intermediate
    steps: tuple[Step, ...]

    @property
    def slices(self) -> tuple[Step, ...]:
        """The steps without traffic, with which every plan begins."""
        return tuple(step for step in self.steps if step.kind == "slice")


def same_blocks(
    *,
    source_mesh: DeviceMesh,
    source_spec: Spec,
    target_mesh: DeviceMesh,
    target_spec: Spec,
) -> bool:
    """Whether every device holds its target block already, whatever the meshes.

    >>> one, other = (
    ...     DeviceMesh(axis_names=("x", "y"), axis_sizes=sizes,
    ...                device_ids=tuple(range(6)), hosts=(0,) * 6)
    ...     for sizes in ((2, 3), (3, 2)))
    >>> spec = (("x", "y"),)
    >>> same_blocks(source_mesh=one, source_spec=spec,
    ...             target_mesh=other, target_spec=spec)
    True
    """
    if sorted(source_mesh.device_ids) != sorted(target_mesh.device_ids):
        return False
    source, target = (
        _blocks(mesh, spec)
        for mesh, spec in ((source_mesh, source_spec), (target_mesh, target_spec))
    )
    return all(
        counts == asked and np.array_equal(parts, wanted)
        for (counts, parts), (asked, wanted) in zip(source, target, strict=True)
    )


def _blocks(mesh: DeviceMesh, spec: Spec) -> list[tuple[int, np.ndarray]]:
    """Per dimension the number of parts, and the part of each device by its id."""
    sizes = mesh.axis_sizes or (1,)
    coords = np.unravel_index(np.argsort(mesh.device_ids), sizes)
    found: list[tuple[int, np.ndarray]] = []
    for axes in spec:
        count, part = 1, np.zeros(mesh.num_devices, np.int64)
        for axis in map(mesh.axis_names.index, axes):
            count *= sizes[axis]
            part = part * sizes[axis] + coords[axis]
        found.append((count, part))
    return found


def plan_relayout(
    *,
    shape: Sequence[int],
    source_mesh: DeviceMesh,
    source_spec: Spec,
    target_mesh: DeviceMesh,
    target_spec: Spec,
) -> Relayout | None:
    """Plans the exchange of a wave of leaves on one device set.

    Args:
        shape: ``(leaves, *leaf shape)`` in elements.
        source_mesh: where the leaves are; the same devices as ``target_mesh``, in any
            order.
        source_spec: mesh axes per leaf dimension, major first.
        target_mesh: where they go.
        target_spec: mesh axes per leaf dimension.

    Returns:
        The plan, or None when the two have no common digits.
    """
    source_mesh, source_spec = _merged(source_mesh, source_spec)
    target_mesh, target_spec = _merged(target_mesh, target_spec)
    digits = _common_digits(source_mesh, target_mesh)
    if digits is None:
        return None
    source = ((), *_on_positions(source_mesh, source_spec, digits))
    target = ((), *_on_positions(target_mesh, target_spec, digits))
    # Where the device that holds source position p stands in the target's order.
    position = {d: i for i, d in enumerate(target_mesh.device_ids)}
    holder = np.array([position[d] for d in source_mesh.device_ids])
    renamed = _renamed(source, holder, digits)
    if renamed is not None:
        source, holder = renamed, np.arange(len(holder))
    swap = _conflicts(source, target, digits)
    if swap is None:
        return None
    # A block at source position p lies on device holder[p] and belongs at swap[p].
    moved = tuple(
        sorted(
            (int(a), int(b))
            for a, b in zip(holder, _permuted(swap, digits), strict=True)
        )
    )
    source = tuple(tuple(swap[x] for x in run) for run in source)
    intermediate = _as_intermediate(shape, source, target, digits)
    return Relayout(
        digits=digits,
        permutation=() if all(a == b for a, b in moved) else moved,
        intermediate=intermediate,
        steps=intermediate.steps(digits),
    )


def _merged(mesh: DeviceMesh, spec: Spec) -> tuple[DeviceMesh, Spec]:
    """Mesh and spec with neighbouring axes that act as one made one, none of size 1."""
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    dims = [[axis for axis in axes if sizes[axis] > 1] for axes in spec]
    follows = {b: a for axes in dims for a, b in itertools.pairwise(axes)}
    used = set(itertools.chain.from_iterable(dims))
    names: list[str] = []
    counts: list[int] = []
    before: str | None = None
    joined: set[str] = set()
    for axis in mesh.axis_names:
        if sizes[axis] == 1:
            continue
        idle = before is not None and not used & {before, axis}
        if before is not None and (idle or follows.get(axis) == before):
            counts[-1] *= sizes[axis]
            joined.add(axis)
        else:
            names.append(axis)
            counts.append(sizes[axis])
        before = axis
    merged = DeviceMesh(
        axis_names=tuple(names),
        axis_sizes=tuple(counts),
        device_ids=mesh.device_ids,
        hosts=mesh.hosts,
    )
    return merged, tuple(
        tuple(axis for axis in axes if axis not in joined) for axes in dims
    )


def _common_digits(one: DeviceMesh, other: DeviceMesh) -> DigitMesh | None:
    """Digits of the target's devices that refine the axes of both meshes."""
    total = one.num_devices
    if sorted(one.device_ids) != sorted(other.device_ids):
        return None
    cuts = {1, total}
    for mesh in (one, other):
        below = 1
        for size in reversed(mesh.axis_sizes):
            below *= size
            cuts.add(below)
    ordered = sorted(cuts)
    if any(b % a for a, b in itertools.pairwise(ordered)):
        return None
    sizes = tuple(b // a for a, b in reversed(list(itertools.pairwise(ordered))))
    return factorise(
        DeviceMesh(
            axis_names=tuple(f"r{i}" for i in range(len(sizes))),
            axis_sizes=sizes,
            device_ids=other.device_ids,
            hosts=other.hosts,
        )
    )


def _on_positions(mesh: DeviceMesh, spec: Spec, digits: DigitMesh) -> Layout:
    """A spec over mesh axes as digits of positions in that mesh's device order."""
    runs: dict[str, tuple[int, ...]] = {}
    stop = len(digits.sizes)
    for name, size in zip(
        reversed(mesh.axis_names), reversed(mesh.axis_sizes), strict=True
    ):
        start = stop
        while math.prod(digits.sizes[start:stop]) < size:
            start -= 1
        runs[name] = tuple(range(start, stop))
        stop = start
    return tuple(tuple(x for axis in axes for x in runs[axis]) for axes in spec)


def _renamed(source: Layout, holder: np.ndarray, digits: DigitMesh) -> Layout | None:
    """The source in the target's own digits, when its device order allows that.

    A transposed mesh lists the same devices with the digits in another order: then
    nothing has to move, only names change.
    """
    sizes = digits.sizes or (1,)
    coords = np.unravel_index(np.arange(len(holder)), sizes)
    there = np.unravel_index(holder, sizes)
    names: dict[int, int] = {}
    for x in {x for run in source for x in run}:
        for y in range(len(digits.sizes)):
            if sizes[x] == sizes[y] and np.array_equal(coords[x], there[y]):
                names[x] = y
    if any(x not in names for run in source for x in run):
        return None
    return tuple(tuple(names[x] for x in run) for run in source)


def _conflicts(
    source: Layout, target: Layout, digits: DigitMesh
) -> dict[int, int] | None:
    """A permutation of digits that gives each index digit its target's owner."""
    wanted: dict[int, int] = {}
    for own, asked in zip(source, target, strict=True):
        for x, y in zip(own, asked, strict=False):
            if digits.sizes[x] != digits.sizes[y]:
                return None
            wanted[x] = y
    # Who is pushed out takes the place that its pusher left: cycles close, chains
    # become cycles, and every other digit stays.
    swap = dict(wanted)
    taken = set(wanted.values())
    free = [x for x in wanted if x not in taken]
    for y in sorted(taken - set(wanted)):
        fit = next(x for x in free if digits.sizes[x] == digits.sizes[y])
        free.remove(fit)
        swap[y] = fit
    return {x: swap.get(x, x) for x in range(len(digits.sizes))}


def _permuted(swap: dict[int, int], digits: DigitMesh) -> np.ndarray:
    """Where each position goes when digit x's value is handed to digit swap[x]."""
    if not digits.sizes:
        return np.zeros(1, np.int64)
    coords = np.unravel_index(np.arange(math.prod(digits.sizes)), digits.sizes)
    handed = [coords[0]] * len(digits.sizes)
    for x, y in swap.items():
        handed[y] = coords[x]
    return np.ravel_multi_index(tuple(handed), digits.sizes)


def _as_intermediate(
    shape: Sequence[int], source: Layout, target: Layout, digits: DigitMesh
) -> Intermediate:
    """The source as a member of the family: no padding, extras as they are."""
    kept = [
        len(asked) if len(own) >= len(asked) else len(own)
        for own, asked in zip(source, target, strict=True)
    ]
    extras = tuple(own[num:] for own, num in zip(source, kept, strict=True))
    shard = tuple(
        extent // digits.num_parts(own[:num])
        for extent, own, num in zip(shape, source, kept, strict=True)
    )
    host: list[int] = []
    for width, extra in zip(shard, extras, strict=True):
        across = digits.num_parts([x for x in extra if digits.cross_host[x]])
        host.append(width // across)
    return Intermediate(
        shape=tuple(shape),
        target=target,
        num_kept=tuple(kept),
        extras=extras,
        shard_width=shard,
        host_width=tuple(host),
        piece_width=tuple(
            width // digits.num_parts(extra)
            for width, extra in zip(shard, extras, strict=True)
        ),
        rotation=(0,) * len(shard),
    )
