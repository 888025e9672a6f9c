"""Splitting mesh axes so that each device only *adds to* the shard it already has.

An array dimension cut into 8 by axis ``fsdp`` is to be cut into 4. Write the axis as
two, split (major) x replica (minor); drop the replica from the spec:

    device                 0   1   2   3   4   5   6   7
    fsdp=8                [0] [1] [2] [3] [4] [5] [6] [7]     its source shard
    split=4 x replica=2   [0   1] [2   3] [4   5] [6   7]     its intermediate piece

Device 5 keeps shard 5 and receives shard 4 from its neighbour. The replica part is the
minor one, and that is the whole trick: with replica major, device 5 would own piece
``5 % 4 = 1`` and throw away what it has.

**Tuples of axes.** With axes of sizes ``n_1 .. n_k`` (major first) on one dimension and
replica parts ``r_1 .. r_k``, a device keeps its shard only if *every axis to the right
of a gathered one is gathered whole*. Proof: fix the split digits, so that the piece is
fixed. The devices that share it hold shards whose numbers span
``sum((r_i - 1) * prod(n_j for j > i))``, and the piece is ``prod(r_i)`` shards wide, so
the span may be at most ``prod(r_i) - 1 = sum((r_i - 1) * prod(r_j for j > i))``. As
``n_j >= r_j``, that needs ``n_j == r_j`` for all j to the right of any ``r_i > 1``.
So the choices of one dimension are: some minor axes whole, then a divisor of the next.
Dimensions are independent of each other.

**What is chosen.** The most shards not above the target's count; that receives least,
``1/I - 1/S`` of the array per device, as the piece contains the shard. Of several
equal ones, in this order:

1. gather least on dimensions that the target cuts at least as finely as the source;
2. overshoot least: do not gather a dimension that the target then has to cut again;
3. split the fewest axes, hence the fewest collectives;
4. gather the minor mesh axes: their devices are neighbours, mostly on one host.

What is *not* optimised: the hop from intermediate to target, beyond rules 1 and 2.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

SPLIT_SUFFIX = "_intermediate_split"
REPLICA_SUFFIX = "_intermediate_replica"

SOURCE_NOT_FINER = "source_not_finer"
"""Code: the source has no more shards than the target, so there is none to merge."""

TARGET_SHARDS_WHOLE = "target_shards_whole"
"""Code: every target shard is a union of whole source shards."""

DimAxes = tuple[tuple[str, ...], ...]
"""Per array dimension the mesh axes that cut it, major first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshAxis:
    """One axis of a mesh: ``size`` devices along it."""

    name: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisSplits:
    """An intermediate layout: the source's axes, some of them split in place.

    Attributes:
        source_axes: the source's mesh axes, major first.
        source_dims: the mesh axes that cut each array dimension in the source.
        num_replicas: for each of ``source_axes`` the size of its replica part; 1 for
            an axis that stays whole.

    >>> plan = AxisSplits(
    ...     source_axes=(MeshAxis(name="fsdp", size=8), MeshAxis(name="tp", size=1)),
    ...     source_dims=(("fsdp",), ("tp",)),
    ...     num_replicas=(2, 1),
    ... )
    >>> [(axis.name, axis.size) for axis in plan.axes]
    [('fsdp_intermediate_split', 4), ('fsdp_intermediate_replica', 2), ('tp', 1)]
    >>> plan.dims
    (('fsdp_intermediate_split',), ('tp',))
    >>> plan.received_fraction
    Fraction(1, 8)
    """

    source_axes: tuple[MeshAxis, ...]
    source_dims: DimAxes
    num_replicas: tuple[int, ...]

    def __post_init__(self) -> None:
        """Checks that every replica part divides its axis."""
        for axis, replicas in zip(self.source_axes, self.num_replicas, strict=True):
            if replicas < 1 or axis.size % replicas:
                raise ValueError(
                    f"axis {axis.name!r} of size {axis.size} has no replica part of "
                    f"size {replicas}; it must divide the axis"
                )

    @property
    def split_names(self) -> tuple[str, ...]:
        """Source axes that were split, in mesh order."""
        return tuple(
            axis.name
            for axis, replicas in zip(self.source_axes, self.num_replicas, strict=True)
            if replicas > 1
        )

    @property
    def origins(self) -> tuple[int, ...]:
        """For each of ``axes`` the position in ``source_axes`` that it came from."""
        return tuple(
            position
            for position, replicas in enumerate(self.num_replicas)
            for _ in range(2 if replicas > 1 else 1)
        )

    @property
    def axes(self) -> tuple[MeshAxis, ...]:
        """Mesh axes of the intermediate; same devices in the same flattened order."""
        axes: list[MeshAxis] = []
        for axis, replicas in zip(self.source_axes, self.num_replicas, strict=True):
            if replicas == 1:
                axes.append(axis)
                continue
            split, replica = axis.name + SPLIT_SUFFIX, axis.name + REPLICA_SUFFIX
            axes.append(MeshAxis(name=split, size=axis.size // replicas))
            axes.append(MeshAxis(name=replica, size=replicas))
        return tuple(axes)

    @property
    def dims(self) -> DimAxes:
        """Mesh axes that cut each array dimension; a split axis gives its split part.

        An axis that is gathered whole stays, as a split part of size 1.
        """
        split = set(self.split_names)
        return tuple(
            tuple(name + SPLIT_SUFFIX if name in split else name for name in names)
            for names in self.source_dims
        )

    @property
    def replicated_names(self) -> tuple[str, ...]:
        """Replica axes that the splits made, in mesh order."""
        return tuple(name + REPLICA_SUFFIX for name in self.split_names)

    @property
    def num_source_shards(self) -> int:
        """Shards of the source."""
        return math.prod(shard_counts(self.source_axes, self.source_dims))

    @property
    def num_shards(self) -> int:
        """Shards of the intermediate."""
        return math.prod(shard_counts(self.axes, self.dims))

    @property
    def received_fraction(self) -> Fraction:
        """Part of the whole array that each device receives: 1/I - 1/S."""
        return Fraction(1, self.num_shards) - Fraction(1, self.num_source_shards)


def shard_counts(axes: Sequence[MeshAxis], dims: DimAxes) -> tuple[int, ...]:
    """Number of shards along each array dimension.

    Args:
        axes: the mesh.
        dims: per array dimension the names of the axes that cut it.

    >>> shard_counts(
    ...     (MeshAxis(name="data", size=2), MeshAxis(name="fsdp", size=4)),
    ...     (("data", "fsdp"), ()),
    ... )
    (8, 1)
    """
    sizes = {axis.name: axis.size for axis in axes}
    return tuple(math.prod(sizes[name] for name in names) for names in dims)


def direct_reason(
    source_counts: Sequence[int], target_counts: Sequence[int]
) -> str | None:
    """The code that says why no intermediate is needed, or None if one is.

    Args:
        source_counts: shards per dimension of the source.
        target_counts: the same of the target, of the same length.

    >>> direct_reason((4, 1), (1, 8)), direct_reason((8, 1), (4, 1))
    ('source_not_finer', 'target_shards_whole')
    >>> direct_reason((8, 1), (1, 4)) is None
    True
    """
    if math.prod(source_counts) <= math.prod(target_counts):
        return SOURCE_NOT_FINER
    pairs = zip(source_counts, target_counts, strict=True)
    if all(source % target == 0 for source, target in pairs):
        return TARGET_SHARDS_WHOLE
    return None


def plan_splits(
    source_axes: Sequence[MeshAxis],
    source_dims: DimAxes,
    target_counts: Sequence[int],
) -> AxisSplits:
    """The splits that leave the most shards not above the target's count.

    The method is the module's own; the idea of an intermediate sharding with split and
    replica axes is that of pathways-utils (``pathwaysutils/reshard.py``).

    Args:
        source_axes: the source's mesh axes, major first.
        source_dims: per array dimension the names of the axes that cut it, major
            first; each axis at most once. Axes on no dimension are never split.
        target_counts: shards per dimension of the target, one for each of
            ``source_dims``.

    Returns:
        The plan. It never fails: one shard, all axes gathered, is always a candidate.
        Where ``direct_reason`` gives a code, going directly is as good.

    >>> plan = plan_splits(
    ...     (MeshAxis(name="data", size=2), MeshAxis(name="fsdp", size=4)),
    ...     (("data", "fsdp"), ()),
    ...     (1, 4),
    ... )
    >>> plan.dims, plan.replicated_names
    ((('data', 'fsdp_intermediate_split'), ()), ('fsdp_intermediate_replica',))
    """
    sizes = {axis.name: axis.size for axis in source_axes}
    source_counts = shard_counts(source_axes, source_dims)
    num_source_shards = math.prod(source_counts)
    num_target_shards = math.prod(target_counts)
    counts = tuple(zip(source_counts, target_counts, strict=True))
    positions = tuple(
        position
        for names in source_dims
        for position in (_position(source_axes, name) for name in names)
    )

    def rank(
        choice: tuple[tuple[int, ...], ...],
    ) -> tuple[int, int, Fraction, int, tuple[int, ...]]:
        """Smaller is better; the module's docstring gives the order."""
        gathered = tuple(math.prod(replicas) for replicas in choice)
        unwanted, overshoot = 1, Fraction(1)
        for replicas, (source, target) in zip(gathered, counts, strict=True):
            unwanted *= replicas if source <= target else 1
            overshoot *= max(Fraction(1), Fraction(target * replicas, source))
        flat = _per_axis(choice, positions, len(source_axes))
        num_split_axes = sum(replicas > 1 for replicas in flat)
        minor_first = tuple(-replicas for replicas in reversed(flat))
        return math.prod(gathered), unwanted, overshoot, num_split_axes, minor_first

    best = min(
        (
            choice
            for choice in itertools.product(
                *(
                    tuple(_dim_choices([sizes[name] for name in names]))
                    for names in source_dims
                )
            )
            # Shards left = num_source_shards / gathered, so fewest gathered is best.
            if num_source_shards
            <= num_target_shards * math.prod(itertools.chain.from_iterable(choice))
        ),
        key=rank,
    )
    return AxisSplits(
        source_axes=tuple(source_axes),
        source_dims=source_dims,
        num_replicas=_per_axis(best, positions, len(source_axes)),
    )


def _dim_choices(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Replica parts of one dimension's axes under which devices keep their shards.

    >>> list(_dim_choices((2, 4)))
    [(1, 1), (1, 2), (1, 4), (2, 4)]
    """
    yield (1,) * len(sizes)
    for position in reversed(range(len(sizes))):
        for replicas in range(2, sizes[position] + 1):
            if sizes[position] % replicas == 0:
                yield (1,) * position + (replicas, *sizes[position + 1 :])


def _per_axis(
    choice: tuple[tuple[int, ...], ...], positions: tuple[int, ...], num_axes: int
) -> tuple[int, ...]:
    """``choice``, given by dimension, as one number for each axis of the mesh."""
    replicas = [1] * num_axes
    for position, size in zip(positions, itertools.chain(*choice), strict=True):
        replicas[position] = size
    return tuple(replicas)


def _position(axes: Sequence[MeshAxis], name: str) -> int:
    """Where the axis called ``name`` stands in the mesh."""
    return next(position for position, axis in enumerate(axes) if axis.name == name)
