"""`find_intermediate_sharding`: the cases, on devices, what is kept, and the errors."""

import doctest
import json
import math
import pathlib
from fractions import Fraction

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from intermediate_oracle import boxes, brute_force, devices_that_lose, layouts, volume
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from orbax_reshard import live
from orbax_reshard.errors import (
    NoIntermediateShardingError,
    NoIntermediateShardingNeededError,
)
from orbax_reshard.live import find_intermediate_sharding
from orbax_reshard.planning.splits import shard_counts

DATA = pathlib.Path(__file__).parent / "data" / "intermediate_shardings.json"
CASES = {case["id"]: case for case in json.loads(DATA.read_text())["cases"]}
assert len(CASES) == 22

# What conftest.py gives every test.
NUM_DEVICES = 16


def abstract(sizes: dict[str, int], *spec, **kwargs) -> NamedSharding:
    # Types given, because what JAX takes without differs between its versions.
    types = (AxisType.Auto,) * len(sizes)
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=types)
    return NamedSharding(mesh, P(*spec), **kwargs)


def concrete(sizes: dict[str, int], *spec, types=None, **kwargs) -> NamedSharding:
    """Over the first devices, in an order that is not the order of their ids."""
    num_devices = math.prod(sizes.values())
    devices = np.roll(np.array(jax.devices()[:num_devices])[::-1], 1)
    mesh = Mesh(devices.reshape(tuple(sizes.values())), tuple(sizes), axis_types=types)
    return NamedSharding(mesh, P(*spec), **kwargs)


def target_of(counts) -> NamedSharding:
    """A target with so many shards per dimension, one mesh axis each."""
    sizes = {f"t{dim}": count for dim, count in enumerate(counts)}
    return abstract(sizes, *sizes)


# --- the cases ------------------------------------------------------------------------


def spec_names(sharding: NamedSharding) -> list[str]:
    """The mesh axes on any dimension."""
    entries = [entry for entry in sharding.spec if entry is not None]
    return [
        n for entry in entries for n in ([entry] if isinstance(entry, str) else entry)
    ]


def spec_entry(entry):
    return tuple(entry) if isinstance(entry, list) else entry


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_cases(case):
    expected = case["expected"]
    num_devices = max(
        math.prod(case[side]["mesh"].values()) for side in ("source", "target")
    )
    for make in (abstract, concrete)[: 2 if num_devices <= NUM_DEVICES else 1]:
        source, target = (
            make(case[side]["mesh"], *map(spec_entry, case[side]["spec"]))
            for side in ("source", "target")
        )
        if "error" in expected:
            with pytest.raises(NoIntermediateShardingNeededError):
                find_intermediate_sharding(source, target)
            continue
        intermediate, replicated_axes = find_intermediate_sharding(source, target)
        num_source, num_shards = (
            math.prod(sharding.mesh.shape[name] for name in spec_names(sharding))
            for sharding in (source, intermediate)
        )
        received = Fraction(1, num_shards) - Fraction(1, num_source)
        assert received == Fraction(*expected["received_fraction_per_device"])
        if "shards" in expected:
            assert num_shards == expected["shards"]
            continue
        # A list, because the order of axes is the order of devices.
        assert list(intermediate.mesh.shape.items()) == list(expected["mesh"].items())
        assert intermediate.spec == P(*map(spec_entry, expected["spec"]))
        assert replicated_axes == tuple(expected["replicated_axes"])


# --- on devices -----------------------------------------------------------------------


# Most random pairs need no intermediate, and are filtered: that is no sign of trouble.
@settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.filter_too_much],
)
@given(data=st.data())
def test_on_devices_nothing_moves_off_its_device(data):
    axes, dims = data.draw(layouts(max_devices=NUM_DEVICES))
    counts = shard_counts(axes, dims)
    assume(math.prod(counts) > 1)
    target_counts = tuple(data.draw(st.integers(1, 5)) for _ in dims)
    assume(math.prod(target_counts) < math.prod(counts))
    entries = [names or None for names in dims]
    if data.draw(st.booleans(), "rank left open"):
        while entries and entries[-1] is None:
            entries.pop()
    source = concrete({axis.name: axis.size for axis in axes}, *entries)
    target = target_of(target_counts)
    if all(s % t == 0 for s, t in zip(counts, target_counts, strict=True)):
        with pytest.raises(NoIntermediateShardingNeededError):
            find_intermediate_sharding(source, target)
        return
    intermediate, replicated_axes = find_intermediate_sharding(source, target)

    # Device order and the spec's length stay.
    assert list(intermediate.mesh.devices.flat) == list(source.mesh.devices.flat)
    assert len(intermediate.spec) == len(source.spec)
    # Nobody loses anything, and everybody receives the same, least amount.
    shape = tuple(n * data.draw(st.integers(1, 2)) for n in counts)
    assert devices_that_lose(source, intermediate, shape) == []
    ways = map(math.prod, brute_force(axes, dims))
    most = max(way for way in ways if way <= math.prod(target_counts))
    share = Fraction(1, most) - Fraction(1, math.prod(counts))
    pieces = boxes(intermediate, shape)
    for device, shard in boxes(source, shape).items():
        assert volume(pieces[device]) - volume(shard) == share * math.prod(shape)
    # One replica is enough for a caller that goes on from there: like the published
    # one it takes index 0 of each axis that the function names.
    names = intermediate.mesh.axis_names
    first = tuple(0 if name in replicated_axes else slice(None) for name in names)
    chosen = np.asarray(intermediate.mesh.devices[first]).reshape(-1)
    assert len({pieces[device] for device in chosen}) == most
    assert len(chosen) == most * intermediate.mesh.size // math.prod(counts)
    # JAX takes it, and the values are the same.
    values = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    array = jax.device_put(jax.device_put(values, source), intermediate)
    assert array.sharding == intermediate
    for shard in array.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), values[shard.index])


def test_the_check_sees_a_device_that_loses_its_shard():
    # Replica major and split minor: the layout that the published code builds.
    source = concrete({"fsdp": 8}, "fsdp")
    wrong = concrete({"replica": 2, "split": 4}, "split")
    assert list(wrong.mesh.devices.flat) == list(source.mesh.devices.flat)
    # Device 0 has row 0 of pieces 0-1, and the last has row 7 of pieces 6-7.
    assert len(devices_that_lose(source, wrong, (8,))) == 6


def test_source_and_target_on_different_devices():
    mesh = Mesh(np.array(jax.devices()[8:12]), ("tp",))
    source = concrete({"fsdp": 8}, "fsdp")
    intermediate, _ = find_intermediate_sharding(
        source, NamedSharding(mesh, P(None, "tp"))
    )
    assert intermediate.device_set == source.device_set


# --- what is kept ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["device", "pinned_host", "unpinned_host"])
def test_memory_kind_is_the_sources(kind):
    source = concrete({"fsdp": 8}, "fsdp", memory_kind=kind)
    target = concrete({"tp": 4}, None, "tp", memory_kind="device")
    intermediate, _ = find_intermediate_sharding(source, target)
    assert intermediate.memory_kind == kind
    array = jax.device_put(np.arange(16).reshape(8, 2), intermediate)
    assert array.sharding.memory_kind == kind


def test_both_parts_of_a_split_axis_have_its_type():
    types = (AxisType.Explicit, AxisType.Auto, AxisType.Explicit)
    sizes = {"data": 2, "fsdp": 4, "tp": 2}
    expected = {
        "data": AxisType.Explicit,
        "fsdp_intermediate_split": AxisType.Auto,
        "fsdp_intermediate_replica": AxisType.Auto,
        "tp_intermediate_split": AxisType.Explicit,
        "tp_intermediate_replica": AxisType.Explicit,
    }
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=types)
    for source in (
        NamedSharding(mesh, P("data", ("fsdp", "tp"))),
        concrete(sizes, "data", ("fsdp", "tp"), types=types),
    ):
        mesh = find_intermediate_sharding(source, target_of((5, 1)))[0].mesh
        assert dict(zip(mesh.axis_names, mesh.axis_types, strict=True)) == expected


def test_explicit_axes_are_accepted_by_device_put():
    source = concrete({"fsdp": 8}, "fsdp", None, types=(AxisType.Explicit,))
    intermediate, _ = find_intermediate_sharding(source, target_of((1, 4)))
    values = np.arange(32, dtype=np.int32).reshape(8, 4)
    array = jax.device_put(jax.device_put(values, source), intermediate)
    assert jax.typeof(array).sharding.spec == P("fsdp_intermediate_split", None)
    np.testing.assert_array_equal(np.asarray(array), values)


def test_an_abstract_mesh_stays_abstract_and_keeps_its_device():
    concrete_mesh = concrete({"fsdp": 8}, "fsdp").mesh
    source = NamedSharding(concrete_mesh.abstract_mesh, P("fsdp"))
    intermediate, _ = find_intermediate_sharding(source, target_of((1, 4)))
    assert isinstance(intermediate.mesh, AbstractMesh)
    assert intermediate.mesh.abstract_device == source.mesh.abstract_device
    assert intermediate.memory_kind is None


def test_reduced_axes_of_the_spec_are_kept():
    types = (AxisType.Explicit, AxisType.Explicit)
    mesh = AbstractMesh((8, 2), ("fsdp", "tp"), axis_types=types)
    source = NamedSharding(mesh, P("fsdp", reduced={"tp"}))
    intermediate, _ = find_intermediate_sharding(source, target_of((1, 4)))
    assert intermediate.spec == P("fsdp_intermediate_split", reduced={"tp"})


@pytest.mark.parametrize(
    ("source_spec", "target_spec", "expected"),
    [
        # The usual short form of a 2-D layout, and the long one.
        (("fsdp",), (None, "tp"), ("fsdp_intermediate_split",)),
        (("fsdp", None), (None, "tp"), ("fsdp_intermediate_split", None)),
        ((None, "fsdp"), ("tp",), (None, "fsdp_intermediate_split")),
        # None beyond what the other spells out says nothing.
        (("fsdp", None), (None, "tp", None), ("fsdp_intermediate_split", None)),
    ],
)
def test_specs_of_different_length(source_spec, target_spec, expected):
    intermediate, _ = find_intermediate_sharding(
        abstract({"fsdp": 8}, *source_spec), abstract({"tp": 4}, *target_spec)
    )
    assert intermediate.spec == P(*expected)
    assert len(intermediate.spec) == len(source_spec)


def test_size_1_axes_are_left_alone():
    source = abstract({"a": 1, "fsdp": 8, "b": 1, "c": 1}, ("a", "fsdp", "b"), "c")
    intermediate, replicated_axes = find_intermediate_sharding(
        source, abstract({"tp": 4}, None, "tp")
    )
    assert list(intermediate.mesh.shape.items()) == [
        ("a", 1),
        ("fsdp_intermediate_split", 4),
        ("fsdp_intermediate_replica", 2),
        ("b", 1),
        ("c", 1),
    ]
    assert intermediate.spec == P(("a", "fsdp_intermediate_split", "b"), "c")
    assert replicated_axes == ("fsdp_intermediate_replica",)


def test_an_intermediate_can_be_a_source_again():
    source = abstract({"fsdp": 16}, "fsdp")
    first, _ = find_intermediate_sharding(source, abstract({"tp": 8}, None, "tp"))
    second, replicated_axes = find_intermediate_sharding(
        first, abstract({"tp": 4}, None, "tp")
    )
    name = "fsdp_intermediate_split"
    assert second.spec == P(f"{name}_intermediate_split")
    assert replicated_axes == (f"{name}_intermediate_replica",)


# --- errors ---------------------------------------------------------------------------

FSDP8 = abstract({"fsdp": 8}, "fsdp", None)
TP4 = abstract({"tp": 4}, None, "tp")


def unreduced() -> NamedSharding:
    types = (AxisType.Explicit, AxisType.Explicit)
    mesh = AbstractMesh((8, 2), ("fsdp", "tp"), axis_types=types)
    return NamedSharding(mesh, P("fsdp", unreduced={"tp"}))


@pytest.mark.parametrize(
    ("make", "code", "message"),
    [
        (
            lambda: (jax.sharding.SingleDeviceSharding(jax.devices()[0]), TP4),
            "not_named_sharding",
            "in_sharding is a SingleDeviceSharding, not a NamedSharding, and has no "
            "mesh axes to split; reshard directly, or name the layout with a "
            "NamedSharding.",
        ),
        (
            lambda: (FSDP8, jax.sharding.SingleDeviceSharding(jax.devices()[0])),
            "not_named_sharding",
            "out_sharding is a SingleDeviceSharding, not a NamedSharding, and has no "
            "mesh axes to split; reshard directly, or name the layout with a "
            "NamedSharding.",
        ),
        (
            lambda: (abstract({"fsdp": 8}, "fsdp", P.UNCONSTRAINED), TP4),
            "unconstrained",
            "in_sharding leaves dimension 1 UNCONSTRAINED, so its number of shards is "
            "not known; name the mesh axes, or None, for that dimension.",
        ),
        (
            lambda: (FSDP8, abstract({"tp": 4}, P.UNCONSTRAINED, "tp")),
            "unconstrained",
            "out_sharding leaves dimension 0 UNCONSTRAINED, so its number of shards is "
            "not known; name the mesh axes, or None, for that dimension.",
        ),
        (
            lambda: (unreduced(), TP4),
            "unreduced",
            "in_sharding is unreduced over ['tp']: its shards are terms of a sum and "
            "not parts of the array; reduce it first.",
        ),
        (
            lambda: (FSDP8, abstract({"tp": 4}, None, None, "tp")),
            "rank_mismatch",
            "in_sharding ends in None and so spells out rank 2, but out_sharding "
            "shards dimension 2 and so has rank 3 or more; give both specs the "
            "array's rank, or leave the trailing None away.",
        ),
        (
            lambda: (
                abstract({"fsdp": 8}, None, None, "fsdp"),
                abstract({"tp": 4}, "tp", None),
            ),
            "rank_mismatch",
            "out_sharding ends in None and so spells out rank 2, but in_sharding "
            "shards dimension 2 and so has rank 3 or more; give both specs the "
            "array's rank, or leave the trailing None away.",
        ),
        (
            lambda: (
                abstract({"fsdp": 8, "fsdp_intermediate_split": 2}, "fsdp"),
                TP4,
            ),
            "axis_name_taken",
            "splitting ['fsdp'] of in_sharding would make axes named "
            "['fsdp_intermediate_split'], but its mesh ['fsdp', "
            "'fsdp_intermediate_split'] has them already; rename those axes.",
        ),
        (
            lambda: (abstract({"fsdp": 4}, "fsdp"), TP4),
            "source_not_finer",
            "in_sharding has no more shards than out_sharding, so there are none to "
            "merge (shards per dimension: in (4, 1), out (1, 4)); reshard directly.",
        ),
        (
            lambda: (FSDP8, abstract({"tp": 4}, "tp")),
            "target_shards_whole",
            "every shard of out_sharding is a union of whole shards of in_sharding "
            "(shards per dimension: in (8, 1), out (4, 1)); reshard directly.",
        ),
    ],
)
def test_errors(make, code, message):
    source, target = make()
    with pytest.raises(NoIntermediateShardingError) as error:
        find_intermediate_sharding(source, target)
    both = f"in_sharding={source}, out_sharding={target}"
    assert str(error.value) == f"{message} {both}"
    assert error.value.code == code
    not_needed = isinstance(error.value, NoIntermediateShardingNeededError)
    assert not_needed == (code in {"source_not_finer", "target_shards_whole"})


def test_the_examples_in_the_docstrings():
    result = doctest.testmod(live)
    assert result.attempted > 0
    assert result.failed == 0
