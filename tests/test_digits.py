"""Digits against JAX's own index maps, and against walking over all devices."""

import itertools
import math

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from planning_oracle import coordinates, fixed, groups, index_of, mesh_of, meshes

from orbax_reshard.planning.digits import DeviceMesh, factorise


def neighbours(digits, digit):
    """Pairs of devices (by position) that differ in one digit only."""
    places = coordinates(digits)
    lines = {}
    for position, place in enumerate(places):
        rest = place[:digit] + place[digit + 1 :]
        lines.setdefault(rest, []).append(position)
    return [pair for line in lines.values() for pair in itertools.combinations(line, 2)]


def is_regular(hosts, sizes) -> bool:
    """Whether hosts are exactly the groups that share their crossing digits."""
    places = list(itertools.product(*map(range, sizes)))
    crossing = []
    for digit in range(len(sizes)):
        by_rest = {}
        for place, host in zip(places, hosts, strict=True):
            by_rest.setdefault(place[:digit] + place[digit + 1 :], set()).add(host)
        crossing.append(any(len(found) > 1 for found in by_rest.values()))
    pairs = {
        (tuple(n for n, c in zip(place, crossing, strict=True) if c), host)
        for place, host in zip(places, hosts, strict=True)
    }
    return len(pairs) == len({p for p, _ in pairs}) == len({h for _, h in pairs})


def prime_orders(size: int) -> set[tuple[int, ...]]:
    primes, left = [], size
    for prime in range(2, size + 1):
        while left % prime == 0:
            primes.append(prime)
            left //= prime
    return set(itertools.permutations(primes))


@fixed(150)
@given(meshes(max_devices=24))
def test_factorise_against_walking_over_devices(mesh):
    digits = factorise(mesh)
    per_axis = [
        math.prod(digits.sizes[d] for d in digits.digits_of_axis(name))
        for name in mesh.axis_names
    ]
    assert tuple(per_axis) == mesh.axis_sizes
    assert list(digits.axis_of) == sorted(digits.axis_of)
    assert all(len(prime_orders(size)) == 1 for size in digits.sizes)
    assert digits.cross_host == tuple(
        any(mesh.hosts[a] != mesh.hosts[b] for a, b in neighbours(digits, digit))
        for digit in range(len(digits.sizes))
    )
    assert digits.regular == is_regular(mesh.hosts, digits.sizes)
    # Some order of the primes is regular: then a regular one was taken.
    orders = itertools.product(*map(prime_orders, mesh.axis_sizes))
    possible = any(
        is_regular(mesh.hosts, list(itertools.chain.from_iterable(order)))
        for order in orders
    )
    assert digits.regular == possible


@fixed(150)
@given(st.data())
def test_part_indices_against_counting(data):
    digits = factorise(data.draw(meshes(max_devices=24)))
    chosen = [d for d in range(len(digits.sizes)) if data.draw(st.booleans())]
    run = data.draw(st.permutations(chosen))
    expected = [index_of(place, run, digits) for place in coordinates(digits)]
    assert digits.part_indices(run).tolist() == expected
    assert digits.num_parts(run) == math.prod(digits.sizes[d] for d in run)


@fixed(100)
@given(st.data())
def test_layouts_against_the_index_map_of_jax(data):
    mesh = data.draw(meshes(max_devices=16))
    digits, spec, group = data.draw(groups(mesh))
    devices = np.array(jax.devices()[: mesh.num_devices], dtype=object)
    devices = devices[np.argsort(np.argsort(mesh.device_ids))]
    names = mesh.axis_names
    sharding = NamedSharding(
        Mesh(devices.reshape(mesh.axis_sizes), names), P(*[d or None for d in spec])
    )
    shape = group.shape[1:]
    expected = {
        device: tuple(part.indices(n)[:2] for part, n in zip(index, shape, strict=True))
        for device, index in sharding.devices_indices_map(shape).items()
    }
    layout = digits.layout(spec)
    per_dim = [digits.part_indices(run) for run in layout]
    for position, device in enumerate(devices):
        box = []
        for dim, extent in enumerate(shape):
            width = extent // digits.num_parts(layout[dim])
            at = int(per_dim[dim][position]) * width
            box.append((at, at + width))
        assert tuple(box) == expected[device]
    # An abstract mesh has no devices, but the same shard shapes.
    abstract = NamedSharding(
        AbstractMesh(mesh.axis_sizes, names), P(*[d or None for d in spec])
    )
    assert abstract.shard_shape(shape) == tuple(
        extent // digits.num_parts(run)
        for extent, run in zip(shape, layout, strict=True)
    )


@pytest.mark.parametrize(
    ("axes", "hosts", "sizes", "cross", "regular"),
    [
        # Hosts of 3 and of 2 in an axis of 6: the order of the primes follows them.
        ({"x": 6}, 2, (2, 3), (True, False), True),
        ({"x": 6}, 3, (3, 2), (True, False), True),
        ({"x": 12}, 3, (3, 2, 2), (True, False, False), True),
        ({"x": 12}, 4, (2, 2, 3), (True, True, False), True),
        # Columns: the minor digit leaves the process.
        ({"x": 4}, (0, 1, 0, 1), (2, 2), (False, True), True),
        # A host that has devices of two others' lines: no order is regular.
        ({"x": 4}, (0, 1, 1, 0), (2, 2), (True, True), False),
        ({"x": 3}, (0, 1, 1), (3,), (True,), False),
        ({"a": 2, "b": 2}, (0, 0, 1, 2), (2, 2), (True, True), False),
        # Sizes of 1 have no digits; one device has none at all.
        ({"a": 1, "b": 4, "c": 1}, 2, (2, 2), (True, False), True),
        ({"a": 1}, 1, (), (), True),
        ({}, 1, (), (), True),
    ],
)
def test_examples(axes, hosts, sizes, cross, regular):
    digits = factorise(mesh_of(axes, hosts))
    assert (digits.sizes, digits.cross_host, digits.regular) == (sizes, cross, regular)
    assert digits.part_indices(()).tolist() == [0] * digits.mesh.num_devices


def test_hosts_of_a_mesh():
    mesh = mesh_of({"x": 5}, (7, 2, 2, 2, 7))
    assert (mesh.host_ids, mesh.devices_per_host, mesh.num_devices) == ((2, 7), 3, 5)


def test_counts_that_do_not_belong_together():
    with pytest.raises(ValueError) as error:
        DeviceMesh(
            axis_names=("x", "y"), axis_sizes=(2, 2), device_ids=(0, 1), hosts=(0,) * 4
        )
    assert str(error.value) == (
        "mesh {'x': 2, 'y': 2} has 4 positions but 2 device ids and 4 process indices"
    )
