"""Meshes as digits, and layouts as lists of digits.

Every mesh axis is factored into prime *digits*, kept in device order. A device's
position in the flattened mesh is then a mixed-radix number, major digit first, and a
sharding is nothing but a choice, per array dimension, of an ordered list of digits:

    mesh (data=2, fsdp=4), 4 hosts x 2 devices       digits   0    1    2
                                                     size     2    2    2
    P('fsdp', None)  ->  dims ((1, 2), ())           from   data  fsdp fsdp
    replicas: digit 0                                cross   yes  yes   no

``cross_host`` says whether moving along a digit leaves the process. When each digit
does so always or never, the mesh is *regular*: a host's devices are then a
sub-grid of the digits, and all that a host touches is a product over dimensions,
which makes counting chunks a closed formula at any number of devices.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

Layout = tuple[tuple[int, ...], ...]
"""Per array dimension the digits that split it, major first."""

# An axis of n devices has at most this many orders of its prime factors tried when
# looking for one in which every digit is purely in-host or purely cross-host. Axes
# with more are rare (2^a * 3^b * 5^c); the first orders tried are the common ones.
_MAX_FACTOR_ORDERS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMesh:
    """A device mesh as plain values: no devices, only where they are.

    Attributes:
        axis_names: mesh axes, major first.
        axis_sizes: devices along each axis.
        device_ids: global device ids in row-major mesh order.
        hosts: process index of each of those devices.
    """

    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]
    device_ids: tuple[int, ...]
    hosts: tuple[int, ...]

    def __post_init__(self) -> None:
        """Checks that the counts belong together."""
        total = math.prod(self.axis_sizes)
        if not len(self.device_ids) == len(self.hosts) == total:
            raise ValueError(
                f"mesh {dict(zip(self.axis_names, self.axis_sizes, strict=True))} "
                f"has {total} positions but {len(self.device_ids)} device ids and "
                f"{len(self.hosts)} process indices"
            )

    @property
    def num_devices(self) -> int:
        """Number of devices in the mesh."""
        return len(self.device_ids)

    @property
    def digest(self) -> str:
        """A short hash of all of it; two orders of the same devices differ."""
        return _digest(self)

    @property
    def host_ids(self) -> tuple[int, ...]:
        """The distinct process indices, ascending."""
        return tuple(sorted(set(self.hosts)))

    @property
    def devices_per_host(self) -> int:
        """Devices of the host that has most."""
        return max(Counter(self.hosts).values())


@dataclass(frozen=True, slots=True, kw_only=True)
class DigitMesh:
    """A mesh in digits.

    Attributes:
        mesh: the mesh that was factored.
        sizes: the digits' sizes in device order, each a prime.
        axis_of: for each digit the index of its mesh axis.
        cross_host: for each digit whether moving along it leaves the process, for at
            least one device.
        regular: True when every digit leaves the process always or never.
    """

    mesh: DeviceMesh
    sizes: tuple[int, ...]
    axis_of: tuple[int, ...]
    cross_host: tuple[bool, ...]
    regular: bool

    def digits_of_axis(self, name: str) -> tuple[int, ...]:
        """The digits of one mesh axis, major first."""
        axis = self.mesh.axis_names.index(name)
        return tuple(i for i, a in enumerate(self.axis_of) if a == axis)

    def layout(self, spec: Sequence[Sequence[str]]) -> Layout:
        """A partition spec (axis names per dimension) as digits per dimension."""
        return tuple(
            tuple(itertools.chain.from_iterable(map(self.digits_of_axis, axes)))
            for axes in spec
        )

    def num_parts(self, digits: Sequence[int]) -> int:
        """How many parts a dimension has under ``digits``."""
        # A loop and no generator: planning calls this half a million times.
        count = 1
        for digit in digits:
            count *= self.sizes[digit]
        return count

    def part_indices(self, digits: Sequence[int]) -> np.ndarray:
        """For each device in mesh order the index of its part under ``digits``.

        Returns:
            int64 array of shape ``(num_devices,)``.
        """
        grid = np.zeros(self.sizes or (1,), np.int64)
        for digit in digits:
            shape = [1] * max(1, len(self.sizes))
            shape[digit] = self.sizes[digit]
            grid = grid * self.sizes[digit] + np.arange(self.sizes[digit]).reshape(
                shape
            )
        return np.broadcast_to(grid, self.sizes or (1,)).reshape(-1)


@functools.lru_cache(maxsize=256)
def _digest(mesh: DeviceMesh) -> str:
    text = repr((mesh.axis_names, mesh.axis_sizes, mesh.device_ids, mesh.hosts))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@functools.lru_cache(maxsize=256)
def factorise(mesh: DeviceMesh) -> DigitMesh:
    """Factors a mesh into digits, host boundaries between digits where possible.

    An axis of 6 devices on hosts of 3 must be (2, 3), on hosts of 2 (3, 2): of the
    orders of the prime factors the first regular one is taken, else the ascending
    one. The choice depends on nothing but ``mesh``.

    >>> mesh = DeviceMesh(axis_names=("x",), axis_sizes=(6,),
    ...                   device_ids=tuple(range(6)), hosts=(0, 0, 1, 1, 2, 2))
    >>> digits = factorise(mesh)
    >>> digits.sizes, digits.cross_host
    ((3, 2), (True, False))
    """
    per_axis = [
        list(itertools.islice(_factor_orders(size), _MAX_FACTOR_ORDERS))
        for size in mesh.axis_sizes
    ]
    first: DigitMesh | None = None
    orders = itertools.islice(itertools.product(*per_axis), _MAX_FACTOR_ORDERS)
    for order in orders:
        sizes = tuple(itertools.chain.from_iterable(order))
        axis_of = tuple(a for a, factors in enumerate(order) for _ in factors)
        cross, regular = _cross_host(np.asarray(mesh.hosts), sizes)
        made = DigitMesh(
            mesh=mesh, sizes=sizes, axis_of=axis_of, cross_host=cross, regular=regular
        )
        if regular:
            return made
        first = first or made
    assert first is not None
    return first


def _factor_orders(size: int) -> Iterator[tuple[int, ...]]:
    """The distinct orders of the prime factors of ``size``, ascending order first."""
    counts: dict[int, int] = {}
    prime = 2
    while size > 1:
        while size % prime == 0:
            counts[prime] = counts.get(prime, 0) + 1
            size //= prime
        prime += 1
    yield from _arrangements(counts)


def _arrangements(counts: dict[int, int]) -> Iterator[tuple[int, ...]]:
    """All arrangements of a multiset, in lexicographic order, each once."""
    if not counts:
        yield ()
    for value in sorted(counts):
        rest = {v: n - (v == value) for v, n in counts.items() if n - (v == value)}
        for tail in _arrangements(rest):
            yield (value, *tail)


def _cross_host(
    hosts: np.ndarray, sizes: tuple[int, ...]
) -> tuple[tuple[bool, ...], bool]:
    """Per digit whether moving along it leaves the process, and regularity.

    Regular: each digit changes the process for every device or for none, and devices
    that differ in a cross-host digit never share a process.
    """
    if not sizes:
        return (), True
    grid = hosts.reshape(sizes)
    cross: list[bool] = []
    pure = True
    for axis in range(len(sizes)):
        first = np.take(grid, [0], axis=axis)
        rest = np.delete(grid, 0, axis=axis)
        differs = rest != first
        cross.append(bool(differs.any()))
        pure = pure and bool(differs.all() or not differs.any())
    num_hosts = len(np.unique(hosts))
    expected = math.prod(s for s, c in zip(sizes, cross, strict=True) if c)
    return tuple(cross), pure and num_hosts == expected
