"""`reshard` and `plan_reshard` on 16 CPU devices of one process.

The reference is ``jax.device_put``, compared shard by shard and bit by bit.
"""

import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from planning_oracle import fixed

from orbax_reshard import BudgetError, Options, plan_reshard, reshard
from orbax_reshard.engine import exchange
from orbax_reshard.errors import TargetError
from orbax_reshard.planning import reshard_text

COMPILED: list[str] = []


def _on_duration(name: str, _seconds: float, **_kwargs) -> None:
    if name == "/jax/core/compile/backend_compile_duration":
        COMPILED.append(name)


jax.monitoring.register_event_duration_secs_listener(_on_duration)


def mesh(sizes: dict[str, int], order="forward", first=0, types=None) -> Mesh:
    count = math.prod(sizes.values())
    devices = np.array(jax.devices()[first : first + count], dtype=object)
    shape = tuple(sizes.values())
    if order == "reversed":
        devices = devices[::-1]
    elif order == "mixed":
        devices = np.concatenate([devices[::2], devices[1::2]])
    elif order == "transposed":
        devices = devices.reshape(shape[::-1]).T
    return Mesh(devices.reshape(shape), tuple(sizes), axis_types=types)


def on(sizes: dict[str, int], *spec, memory_kind=None, **kwargs) -> NamedSharding:
    return NamedSharding(mesh(sizes, **kwargs), P(*spec), memory_kind=memory_kind)


def rows(**kwargs) -> NamedSharding:
    return on({"f": 8}, "f", None, **kwargs)


def columns(**kwargs) -> NamedSharding:
    return on({"r": 2, "t": 4}, None, "t", **kwargs)


def numbers(shape=(16, 16), dtype=np.float32, seed=0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 100, shape).astype(dtype)


def put(sharding, shape=(16, 16), dtype=np.float32, seed=0) -> jax.Array:
    return jax.device_put(numbers(shape, dtype, seed), sharding)


def assert_same(got, expected) -> None:
    """Bits, dtype, weak type, sharding and where each shard is."""
    assert got.dtype == expected.dtype
    assert got.sharding == expected.sharding
    assert got.sharding.memory_kind == expected.sharding.memory_kind
    assert got.committed == expected.committed
    if jnp.issubdtype(got.dtype, jax.dtypes.prng_key):
        got, expected = jax.random.key_data(got), jax.random.key_data(expected)
    assert got.weak_type == expected.weak_type
    pairs = zip(got.addressable_shards, expected.addressable_shards, strict=True)
    for one, other in pairs:
        assert (one.device, one.index) == (other.device, other.index)
        assert one.data.devices() == {one.device}
        assert np.asarray(one.data).tobytes() == np.asarray(other.data).tobytes()


def assert_like_device_put(tree, shardings, **kwargs):
    expected = jax.device_put(tree, shardings)
    got = reshard(tree, shardings, **kwargs)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert_same(one, other)
    return got


@pytest.fixture
def programs(monkeypatch):
    """A cache of its own, which remembers what it was asked for."""

    class Remembering(exchange.ProgramCache):
        def __init__(self):
            super().__init__()
            self.used = []

        def get(self, key, devices):
            program = super().get(key, devices)
            self.used.append(program)
            return program

    cache = Remembering()
    monkeypatch.setattr(exchange, "PROGRAMS", cache)
    return cache


# --- values ---------------------------------------------------------------------------

DTYPES = [
    *("bool", "int2", "int4", "int8", "int16", "int32", "int64", "uint2", "uint4"),
    *("uint8", "uint16", "uint32", "uint64", "bfloat16", "float16", "float32"),
    *("float64", "complex64", "complex128", "float4_e2m1fn", "float8_e3m4"),
    *("float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz"),
    *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
]

# JAX knows them, and moves them only by device_put (or, in 0.10, not at all).
NOT_CARRIED = ["int1", "uint1", "float6_e2m3fn", "float6_e3m2fn"]

NO_DTYPES = {"bool_", "complexfloating", "floating", "float_power", "float_", "int_"}
NO_DTYPES |= {"integer", "interp", "intersect1d", "uint", "complex_"}


def test_the_list_of_dtypes_is_jax_s():
    names = re.compile("(bool|u?int|float|bfloat|complex)")
    known = {n for n in dir(jnp) if names.match(n)} - NO_DTYPES
    assert known == {*DTYPES, *NOT_CARRIED}


def any_bits(dtype: np.dtype, shape) -> np.ndarray:
    """Random bits, NaN payloads among them; 1/8 of the floats are -0.0."""
    rng = np.random.default_rng(1)
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    bits = exchange.bit_width(dtype)
    if bits < 8:
        return rng.integers(0, 2**bits, shape).astype(np.uint8).view(dtype)
    raw = rng.integers(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), np.uint8)
    made = np.ascontiguousarray(raw).view(dtype)
    if jnp.issubdtype(dtype, jnp.floating) and bits >= 16:
        made.reshape(-1)[::8] = dtype.type(-0.0)
        made.reshape(-1)[1::8] = dtype.type(np.nan)
        words = made.view(f"u{dtype.itemsize}").reshape(-1)
        words[1::8] |= np.arange(words[1::8].size, dtype=words.dtype) % 7 + 1
    return made


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_bit_by_bit(name, programs):
    dtype = np.dtype(getattr(jnp, name))
    with jax.enable_x64(True):
        value = any_bits(dtype, (8, 32))
        array = jax.device_put(value, rows())
        (group,) = plan_reshard(array, columns()).groups
        assert group.collectives == {"all-gather": 1, "all-to-all": 1}
        got = assert_like_device_put(array, columns())
        mask = 2 ** min(8, exchange.bit_width(dtype)) - 1  # what a byte says beyond it
        bits = [np.asarray(x).view(np.uint8) & mask for x in (got, value)]
        assert np.array_equal(*bits)
        (program,) = programs.used
        assert dict(program.collectives) == group.collectives
        assert program.peak_bytes <= group.peak_device_bytes
    if dtype.itemsize * 8 // (1 + (dtype.kind == "c")) < 64:
        # Without x64, too; there JAX 0.10 itself crashes with complex128.
        assert_like_device_put(array, columns())


@pytest.mark.parametrize("name", NOT_CARRIED)
def test_dtypes_that_collectives_do_not_carry_go_through_device_put(name):
    dtype = np.dtype(getattr(jnp, name))
    try:
        array = jax.device_put(np.zeros((8, 8), dtype), rows())
    except jax.errors.JaxRuntimeError:
        pytest.skip(f"this JAX has no arrays of {name}")
    (group,) = plan_reshard(array, columns()).groups
    assert (group.decision, group.reason) == ("device_put", "dtype_not_carried")
    assert_like_device_put(array, columns())


def test_the_comparison_sees_one_bit():
    value = any_bits(np.dtype(np.float32), (16, 16))
    other = value.copy()
    other.view(np.uint32)[0, 1] ^= 1  # another payload of the same NaN
    assert np.array_equal(value, other, equal_nan=True)
    with pytest.raises(AssertionError):
        assert_same(jax.device_put(value, rows()), jax.device_put(other, rows()))
    with pytest.raises(AssertionError):
        assert_same(put(rows()), put(rows(order="reversed")))


LAYOUTS = {
    "tuple axes": (on({"a": 2, "b": 4}, ("a", "b")), on({"a": 2, "b": 4}, ("b", "a"))),
    "tuple to dims": (
        on({"a": 2, "b": 4}, ("b", "a"), None),
        on({"a": 2, "b": 4}, "a", "b"),
    ),
    "axes of size 1": (
        on({"a": 1, "b": 8, "c": 1}, ("c", "b"), "a"),
        on({"a": 8, "b": 1}, "b", "a"),
    ),
    "explicit": (
        on({"f": 8}, "f", types=(AxisType.Explicit,)),
        on({"r": 2, "t": 4}, "t", "r", types=(AxisType.Explicit, AxisType.Auto)),
    ),
    "reversed": (rows(), columns(order="reversed")),
    "mixed": (rows(order="mixed"), columns()),
    "transposed": (columns(order="transposed"), columns()),
    "both": (rows(order="reversed"), columns(order="mixed")),
    "16": (on({"f": 16}, "f"), on({"a": 4, "b": 2, "c": 2}, "b", ("c", "a"))),
    "replicas to shards": (on({"a": 8}), on({"a": 8}, None, "a")),
    "shards to replicas": (on({"a": 8}, None, "a"), on({"a": 8})),
    "no common digits": (on({"x": 2, "y": 6}, "x"), on({"x": 3, "y": 4}, "x")),
    "as one axis": (
        on({"x": 2, "y": 3}, ("x", "y")),
        on({"x": 3, "y": 2}, None, ("x", "y")),
    ),
    "same blocks": (
        on({"x": 2, "y": 3}, ("x", "y")),
        on({"x": 3, "y": 2}, ("x", "y"), None),
    ),
    "other devices": (rows(), columns(first=8)),
    "some devices": (rows(), on({"t": 4}, None, "t", first=4)),
    "more devices": (on({"t": 4}, "t"), on({"t": 16}, None, "t")),
    "from one device": (SingleDeviceSharding(jax.devices()[2]), columns()),
    "to one device": (rows(), SingleDeviceSharding(jax.devices()[2])),
    "pinned": (rows(), columns(memory_kind="pinned_host")),
    "unpinned": (rows(memory_kind="unpinned_host"), columns()),
    "from pinned to itself": (
        rows(memory_kind="pinned_host"),
        rows(memory_kind="pinned_host"),
    ),
    "the default kind": (rows(memory_kind="device"), columns()),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_layouts(case):
    source, target = LAYOUTS[case]
    array = put(source, shape=(48, 48))
    before = np.asarray(array).tobytes()
    got = assert_like_device_put(array, target)
    # The source is untouched.
    assert array.sharding == source and np.asarray(array).tobytes() == before
    assert got.sharding is target or got.sharding == source


def test_one_tree_of_everything():
    keys = jax.random.split(jax.random.key(0), 8)
    rbg = jax.random.split(jax.random.key(1, impl="rbg"), 16).reshape(8, 2)
    tree = {
        "sharded": [put(rows(), seed=1), put(rows(), seed=2), put(columns(first=4))],
        "scalar": put(on({"f": 8}), shape=()),
        "weak": jax.device_put(jnp.asarray(1.5), on({"f": 8})),
        "host": numbers(),
        "bool": np.bool_(True),
        "python": (3, 2.5, 1j, True),
        "keys": jax.device_put(keys, on({"f": 8}, "f")),
        "rbg": jax.device_put(rbg, on({"f": 8}, "f", None)),
        "key": jax.random.key(7),
        "spread key": jax.device_put(jax.random.key(7), on({"f": 8})),
        "none": None,
        "empty": {},
        "no elements": put(rows(), shape=(0, 8)),
        "other": put(columns(order="reversed"), dtype=np.int8),
    }
    shardings = {
        "sharded": columns(),
        "scalar": on({"r": 2, "t": 4}),
        "weak": on({"r": 2, "t": 4}),
        "host": columns(),
        "bool": on({"r": 2, "t": 4}),
        "python": on({"f": 8}),
        "keys": on({"r": 2, "t": 4}, "t"),
        "rbg": on({"r": 2, "t": 4}, "t", "r"),
        "key": on({"r": 2, "t": 4}),
        "spread key": on({"r": 2, "t": 4}),
        "none": None,
        "empty": columns(),
        "no elements": columns(),
        "other": rows(first=8),
    }
    got = reshard(tree, shardings)
    full = {k: v for k, v in tree.items() if k not in ("none", "empty")}
    expected = {k: jax.device_put(v, shardings[k]) for k, v in full.items()}
    assert got["none"] is None and got["empty"] == {}
    found = {k: v for k, v in got.items() if k not in ("none", "empty")}
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(assert_same, found, expected)
    # Keys still make the same numbers.
    draw = jax.random.key_data(jax.vmap(jax.random.key)(jnp.arange(2)))
    assert draw.shape == (2, 2)
    assert jax.random.bits(got["key"]) == jax.random.bits(tree["key"])


@pytest.mark.parametrize("tree", [{}, [], None, {"a": None}, ()])
def test_nothing_to_move(tree):
    assert reshard(tree, rows()) == tree
    assert plan_reshard(tree, rows()).groups == ()


def test_a_target_of_none_or_a_device_is_what_device_put_makes_of_it():
    array = put(rows())
    assert reshard(array, None).sharding == rows()
    assert_like_device_put(array, jax.devices()[3])


def test_prefixes_and_mismatches():
    tree = {"a": [put(rows()), put(rows())], "b": put(rows())}
    got = reshard(tree, {"a": columns(), "b": rows()})
    assert [x.sharding for x in jax.tree.leaves(got)] == [columns()] * 2 + [rows()]
    assert got["b"] is tree["b"]
    with pytest.raises(ValueError, match="pytree structure error"):
        reshard(tree, {"a": columns(), "c": rows()})


def test_arrays_with_a_device_layout_of_their_own():
    layout = pytest.importorskip("jax.experimental.layout")
    own = layout.Format(layout.Layout((1, 0)), rows())
    array = jax.device_put(numbers(), own)
    assert array.format.layout.major_to_minor == (1, 0)
    assert_like_device_put(array, columns())


@pytest.mark.parametrize("types", [None, (AxisType.Explicit,) * 2])
@pytest.mark.parametrize("dtype", [np.float32, jnp.int4])
def test_under_a_mesh_that_the_caller_has_set(types, dtype):
    array = jax.device_put(numbers().astype(dtype), rows())
    key = jax.device_put(jax.random.key(0), on({"f": 8}))
    with jax.set_mesh(mesh({"p": 4, "q": 4}, types=types)):
        got = reshard([array, key], [columns(), on({"r": 2, "t": 4})])
    assert_same(got[0], jax.device_put(array, columns()))
    assert_same(got[1], jax.device_put(key, on({"r": 2, "t": 4})))


@st.composite
def random_pairs(draw):
    count = draw(st.sampled_from([4, 6, 8, 16]))
    rank = draw(st.integers(1, 3))

    def sharding():
        shapes = [
            (a, b, count // a // b)
            for a in range(1, count + 1)
            for b in range(1, count + 1)
            if count % (a * b) == 0
        ]
        sizes = dict(zip("xyz", draw(st.sampled_from(shapes)), strict=True))
        order = draw(st.sampled_from(["forward", "reversed", "mixed", "transposed"]))
        dims = [[] for _ in range(rank)]
        for axis in draw(st.permutations("xyz")):
            dim = draw(st.integers(-1, rank - 1))
            if dim >= 0:
                dims[dim].append(axis)
        return on(sizes, *(tuple(d) or None for d in dims), order=order)

    dtype = np.dtype(
        draw(st.sampled_from(["float32", "complex64", "bfloat16", "bool"]))
    )
    leaves = draw(st.sampled_from([1, 1, 3]))
    return sharding(), sharding(), (48,) * rank, leaves, dtype


@fixed(30)
@given(random_pairs())
def test_random_layouts(pair):
    source, target, shape, leaves, dtype = pair
    tree = [put(source, shape, dtype, seed) for seed in range(leaves)]
    plan = plan_reshard(tree, target)
    assert_like_device_put(tree, [target] * leaves)
    for group in plan.groups:
        if group.decision == "exchange":
            program = program_of(group, tree[0])
            assert dict(program.collectives) == group.collectives
            assert 0 < program.peak_bytes <= group.peak_device_bytes


def program_of(group, array) -> exchange.Program:
    """The compiled program of a group that has run."""
    digits = group.relayout.digits
    key = exchange.ExchangeKey(
        intermediate=group.relayout.intermediate,
        steps=group.relayout.steps,
        digits=digits,
        dtype=np.dtype(array.dtype),
        platform="cpu",
        permutation=group.relayout.permutation,
        live=True,
    )
    by_id = {d.id: d for d in jax.devices()}
    compiled = exchange.PROGRAMS.num_compiled
    program = exchange.PROGRAMS.get(key, [by_id[i] for i in digits.mesh.device_ids])
    assert exchange.PROGRAMS.num_compiled == compiled, "it has not run"
    return program


# --- programs -------------------------------------------------------------------------


def test_many_leaves_few_programs_and_nothing_compiled_twice(programs):
    shapes = [(8, 8 * (1 + i % 6)) for i in range(300)]
    tree = [put(rows(), shape, seed=i) for i, shape in enumerate(shapes)]
    keys = jax.device_put(jax.random.split(jax.random.key(0), 8), on({"f": 8}, "f"))
    trees = (tree, {"keys": keys, "host": numbers(), "int4": put(rows(), dtype="int4")})
    targets = (columns(), {"keys": on({"r": 2, "t": 4}, "t"), "host": columns()})
    targets[1]["int4"] = columns()
    COMPILED.clear()
    got = reshard(trees, targets)
    assert COMPILED, "the listener hears of compilations"
    assert programs.num_compiled == 8  # six shapes, keys, int4
    for one, array in zip(got[0], tree, strict=True):
        assert np.array_equal(np.asarray(one), np.asarray(array))

    # Other arrays, other sharding objects, the same signatures.
    again = jax.tree.map(lambda x: x if isinstance(x, np.ndarray) else x.copy(), trees)
    jax.block_until_ready(again)
    COMPILED.clear()
    got = reshard(again, targets)
    assert programs.num_compiled == 8 and COMPILED == []
    for one, array in zip(got[0], tree, strict=True):
        assert np.array_equal(np.asarray(one), np.asarray(array))


def test_waves_have_one_size_and_the_last_may_be_short(programs):
    tree = [put(rows(), (8, 8), seed=i) for i in range(100)]
    plan = plan_reshard(tree, columns())
    (group,) = plan.groups
    # 7 waves of at most 16, of the size that leaves the least to fill up.
    assert [len(wave) for wave in group.waves] == [15] * 6 + [10]
    assert plan.forecast.collectives == (("all-gather", 7), ("all-to-all", 7))
    received = group.cost.in_host_bytes + group.cost.cross_host_bytes
    assert plan.forecast.received_bytes_per_device == 7 * received
    got = reshard(tree, columns())
    assert programs.num_compiled == 1
    for one, array in zip(got, tree, strict=True):
        assert np.array_equal(np.asarray(one), np.asarray(array))


def test_two_all_to_alls_and_no_gather(programs):
    # R102, which plain jit does with all-gathers; see test_reshard_memory.
    source = on({"x": 4, "y": 2}, "y", None, "x")
    target = on({"x": 4, "y": 2}, None, ("x", "y"), None)
    array = put(source, (16, 16, 16))
    assert_like_device_put(array, target)
    (program,) = programs.used
    assert dict(program.collectives) == {"all-to-all": 2}


# --- who owns what --------------------------------------------------------------------


def donations():
    return {
        "exchange": put(rows(), seed=1),
        "again": put(rows(), seed=2),
        "other": put(rows(), seed=3),
        "one": put(SingleDeviceSharding(jax.devices()[1]), seed=4),
        "key": jax.device_put(
            jax.random.split(jax.random.key(0), 8), on({"f": 8}, "f")
        ),
    }


DONATION_TARGETS = {
    "exchange": columns(),
    "again": columns(),
    "other": columns(first=8),
    "one": columns(),
    "key": on({"r": 2, "t": 4}, "t"),
}


def test_nothing_is_deleted_unless_asked():
    tree = donations()
    first = reshard(tree, DONATION_TARGETS)
    assert not any(x.is_deleted() for x in tree.values())
    jax.tree.map(assert_same, first, jax.device_put(tree, DONATION_TARGETS))


def test_donated_sources_are_deleted_and_results_are_whole():
    tree = donations()
    expected = jax.device_put(tree, DONATION_TARGETS)
    got = reshard(tree, DONATION_TARGETS, donate=True)
    assert {k: v.is_deleted() for k, v in tree.items()} == dict.fromkeys(tree, True)
    jax.tree.map(assert_same, got, expected)


def test_donation_spares_what_results_are_made_of():
    array, other = put(rows()), put(rows(), seed=1)
    tree = {
        "stays": array,
        "moves": array,
        "relabelled": other,
        "host": numbers(),
        "same": put(columns(), seed=2),
        "pinned": put(rows(memory_kind="pinned_host"), seed=3),
    }
    targets = {
        "stays": rows(),
        "moves": columns(),
        "relabelled": on({"g": 8}, "g"),
        "host": columns(),
        "same": columns(),
        "pinned": on({"g": 8}, "g", memory_kind="pinned_host"),
    }
    expected = jax.tree.map(np.asarray, tree)
    got = reshard(tree, targets, donate=True)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, got), expected)


def test_an_array_that_is_in_the_tree_twice_is_donated_once():
    array = put(rows())
    expected = np.asarray(array)
    got = reshard(
        [array, array, array], [columns(), columns(), rows(first=8)], donate=True
    )
    assert array.is_deleted()
    for one in got:
        assert np.array_equal(np.asarray(one), expected)


def test_a_wave_s_sources_go_before_the_next_wave(monkeypatch):
    # Two of the three leaves fit the budget, so one wave is over when two are deleted.
    tree = [put(rows(), (64, 64), seed=i) for i in range(4)]
    deleted = []
    real = exchange.PROGRAMS.get

    def get(key, devices):
        deleted.append([x.is_deleted() for x in tree])
        return real(key, devices)

    monkeypatch.setattr(exchange.PROGRAMS, "get", get)
    two = plan_reshard(tree[:2], columns()).peak_device_bytes
    reshard(tree, columns(), donate=True, device_budget_bytes=two)
    assert deleted == [[False] * 4, [True, True, False, False]]


def pointers(array) -> dict:
    return {s.device: s.data.unsafe_buffer_pointer() for s in array.addressable_shards}


def test_blocks_that_stay_are_not_copied():
    array = put(rows(), (48, 48))
    where = pointers(array)
    assert pointers(reshard(array, on({"g": 2, "h": 4}, ("g", "h")))) == where
    assert pointers(array) == where  # looking at shards makes no copies
    assert pointers(reshard(array, columns())) != where
    key = jax.device_put(jax.random.split(jax.random.key(0), 8), on({"f": 8}, "f"))
    made = reshard(key, on({"g": 8}, "g"))
    assert pointers(jax.random.key_data(made)) == pointers(jax.random.key_data(key))


# --- budgets --------------------------------------------------------------------------


def test_waves_stay_within_the_budget_and_would_not_without(programs):
    tree = [put(rows(), (64, 64), seed=i) for i in range(12)]
    budget = 4 * plan_reshard(tree[:2], columns()).peak_device_bytes // 2
    expected = reshard(tree, columns())
    (unbounded,) = programs.used
    assert unbounded.peak_bytes > budget
    programs.used.clear()
    got = reshard(tree, columns(), device_budget_bytes=budget)
    assert len(programs.used) == 3
    assert all(0 < p.peak_bytes <= budget for p in programs.used)
    jax.tree.map(assert_same, got, expected)
    programs.used.clear()
    got = reshard(tree, columns(), options=Options(device_budget_bytes=budget))
    assert len(programs.used) == 3
    # The argument goes before the options.
    programs.used.clear()
    loose = Options(device_budget_bytes=10**9)
    reshard(tree, columns(), options=loose, device_budget_bytes=budget)
    assert len(programs.used) == 3


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (rows(), columns()),
        (rows(), columns(first=8)),
        (on({"x": 2, "y": 6}, "x"), on({"x": 3, "y": 4}, "x")),
        (None, columns()),
        (SingleDeviceSharding(jax.devices()[1]), columns()),
        (rows(memory_kind="pinned_host"), columns()),
    ],
)
def test_the_budget_is_inclusive(source, target, programs):
    small = put(rows(), (48, 48))
    big = numbers((48, 480)) if source is None else put(source, (48, 480))
    needed = plan_reshard([big], target).peak_device_bytes
    assert needed >= big.nbytes // 8
    reshard([big], target, device_budget_bytes=needed)
    programs.used.clear()
    COMPILED.clear()
    with pytest.raises(BudgetError, match=f"needs {needed} bytes"):
        reshard([small, big], [columns(), target], device_budget_bytes=needed - 1)
    # It is one error before anything moves.
    assert programs.used == [] and COMPILED == []
    with pytest.raises(BudgetError):
        plan_reshard([big], target, device_budget_bytes=needed - 1)


def test_what_the_budget_error_says():
    tree = {"small": put(rows(), (8, 8)), "big": [put(rows(), (64, 64))]}
    with pytest.raises(BudgetError) as error:
        reshard(tree, columns(), device_budget_bytes=12_000, donate=True)
    assert str(error.value) == (
        "leaf \"['big'][0]\" (float32[64, 64]) needs 12360 bytes on a device to reach "
        "P(None, 't'), but device_budget_bytes is 12000. Raise the budget, or choose a "
        "target with more shards."
    )
    assert error.value.code == "device_budget"
    assert isinstance(error.value, ValueError)
    assert not any(x.is_deleted() for x in jax.tree.leaves(tree))


def test_a_leaf_that_does_not_move_needs_no_budget():
    array = put(rows(), (64, 64))
    got = reshard(array, on({"g": 8}, "g"), device_budget_bytes=1)
    assert np.array_equal(np.asarray(got), np.asarray(array))


@pytest.mark.parametrize(
    ("shape", "target", "word"),
    [
        ((6, 3), on({"t": 4}, None, "t"), "divisible|divide|partitioned"),
        ((6, 3), on({"t": 4}, None, None, "t"), "rank|dim"),
        ((), on({"t": 4}, "t"), "rank|dim"),
    ],
)
@pytest.mark.parametrize("where", ["device", "host", "struct"])
def test_a_target_that_does_not_fit(shape, target, word, where):
    array = numbers(shape)
    if where == "device":
        array = jax.device_put(array, on({"f": 8}))
    if where == "struct":
        array = jax.ShapeDtypeStruct(shape, np.float32, sharding=on({"f": 8}))
    good = put(rows())
    with pytest.raises(TargetError, match=word) as error:
        plan_reshard({"good": good, "bad": array}, {"good": columns(), "bad": target})
    assert str(error.value).startswith(
        f"leaf \"['bad']\" of shape {list(shape)} cannot have the target NamedSharding("
    )
    assert error.value.code == "target_does_not_fit"
    if where != "struct":
        with pytest.raises(TargetError):
            reshard([good, array], [columns(), target], donate=True)
        assert not good.is_deleted()


# --- other devices --------------------------------------------------------------------


def test_to_other_devices_shards_are_merged_where_they_are(programs, monkeypatch):
    array, target = put(rows(), (64, 64)), columns(first=8)
    (group,) = plan_reshard(array, target).groups
    assert group.decision == "other_devices"
    assert group.collectives == {"all-gather": 1}
    moved = []
    real = jax.device_put

    def device_put(x, *args, **kwargs):
        moved.append(x)
        return real(x, *args, **kwargs)

    monkeypatch.setattr(jax, "device_put", device_put)
    got = reshard(array, target)
    monkeypatch.undo()
    assert_same(got, jax.device_put(array, target))
    # 8 shards became 4, on the source's devices, and one replica of them travelled.
    (sent,) = moved
    assert sent.sharding.device_set == set(jax.devices()[:8:2])
    assert sum(shard.data.nbytes for shard in sent.addressable_shards) == array.nbytes
    (program,) = programs.used
    assert dict(program.collectives) == group.collectives
    assert program.peak_bytes <= group.peak_device_bytes
    assert not array.is_deleted()


def test_to_other_devices_directly_when_no_intermediate_is_needed(programs):
    array = put(rows())
    plan = plan_reshard(array, rows(first=8))
    assert plan.groups[0].relayout is None and plan.forecast.collectives == ()
    assert_like_device_put(array, rows(first=8))
    assert programs.used == []


# --- plans ----------------------------------------------------------------------------


def structs():
    def struct(shape, sharding, dtype=np.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    key = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 8))
    tree = {
        "layers": [struct((64, 64), rows()) for _ in range(3)],
        "norm": struct((64,), on({"f": 8}, "f")),
        "keys": jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=on({"f": 8}, "f")),
        "odd": struct((48, 8), on({"x": 2, "y": 6}, "x")),
        "host": jax.ShapeDtypeStruct((8, 8), np.int8),
        "there": struct((64, 64), rows()),
    }
    shardings = {
        "layers": columns(),
        "norm": on({"g": 8}, "g"),
        "keys": on({"r": 2, "t": 4}, "t"),
        "odd": on({"x": 3, "y": 4}, "x"),
        "host": columns(),
        "there": columns(first=8),
    }
    return tree, shardings


EXPLAINED = """\
Reshard plan, 8 leaves in 6 group(s): 3 all-gather, 1 all-to-all, \
1 collective-permute; a device receives 12.5 KiB, peak 42.1 KiB per device and wave.
A device may hold a full copy of: ['odd']

[0] ['host']: int8[8, 8]
    decision      device_put: the leaf is not on devices yet
    layout        P(None, None) to P(None, 't')
    collectives   none per wave
    waves         1 of 1, peak 16 B per device

[1] ['keys']: uint32[8, 2]
    decision      exchange: blocks move by slices, all-to-alls and all-gathers
    layout        P('f', None) to P('t', None)
    collectives   1 all-gather, 1 collective-permute per wave
    waves         1 of 1, peak 160 B per device

[2] ['layers'][0] and 2 more: float32[64, 64]
    decision      exchange: blocks move by slices, all-to-alls and all-gathers
    layout        P('f', None) to P(None, 't')
    collectives   1 all-gather, 1 all-to-all per wave
    waves         1 of 3, peak 42.1 KiB per device

[3] ['norm']: float32[64]
    decision      relabel: every device already holds its target block
    layout        P('f') to P('g')
    collectives   none per wave
    waves         1 of 1, peak 0 B per device

[4] ['odd']: float32[48, 8]
    decision      device_put: the two meshes cut the devices at places \
that do not divide
    layout        P('x', None) to P('x', None)
    collectives   none per wave
    waves         1 of 1, peak 4.2 KiB per device

[5] ['there']: float32[64, 64]
    decision      other_devices: the target is on other devices: merge there, \
move one replica
    layout        P('f', None) to P(None, 't')
    collectives   1 all-gather per wave
    waves         1 of 1, peak 12.0 KiB per device"""


def test_a_plan_of_structs_in_words():
    plan = plan_reshard(*structs())
    assert plan.explain() == EXPLAINED
    assert plan.full_copies == ("['odd']",)
    assert plan == plan_reshard(*structs())


def test_a_plan_as_json():
    plan = plan_reshard(*structs())
    plain = json.loads(plan.to_json())
    assert plan.to_json() == plan_reshard(*structs()).to_json()
    assert plain["full_copies"] == ["['odd']"]
    assert plain["peak_device_bytes"] == plan.peak_device_bytes
    assert plain["forecast"]["collectives"] == dict(plan.forecast.collectives)
    layers = next(g for g in plain["groups"] if "['layers'][0]" in g["leaves"])
    assert layers == {
        "leaves": ["['layers'][0]", "['layers'][1]", "['layers'][2]"],
        "shape": [64, 64],
        "dtype": "float32",
        "source": "P('f', None)",
        "target": "P(None, 't')",
        "decision": "exchange",
        "reason": "digits",
        "wave_size": 3,
        "collectives": {"all-gather": 1, "all-to-all": 1},
        "cost": {
            "in_host_bytes": 10752,
            "cross_host_bytes": 0,
            "num_collectives": 2,
            "peak_bytes": 43096,
            "result_bytes": 12288,
        },
        "full_copy": False,
        "peak_device_bytes": 43096,
    }


def test_the_plan_of_structs_is_the_plan_of_the_arrays(programs):
    tree, shardings = structs()

    def real(struct):
        if jnp.issubdtype(struct.dtype, jax.dtypes.prng_key):
            key = jax.random.split(jax.random.key(0), 8)
            return jax.device_put(key, struct.sharding)
        value = numbers(struct.shape, struct.dtype)
        return (
            value if struct.sharding is None else jax.device_put(value, struct.sharding)
        )

    arrays = jax.tree.map(real, tree)
    plan = plan_reshard(arrays, shardings)
    assert plan == plan_reshard(tree, shardings)
    reshard(arrays, shardings)
    # What was forecast is what ran.
    ran = {}
    for program in programs.used:
        for kind, count in program.collectives:
            ran[kind] = ran.get(kind, 0) + count
    assert tuple(sorted(ran.items())) == plan.forecast.collectives
    assert max(p.peak_bytes for p in programs.used) <= plan.peak_device_bytes


def test_every_reason_has_words():
    plan = plan_reshard(*structs())
    assert {g.reason for g in plan.groups} <= set(reshard_text.REASONS)
    assert {g.decision for g in plan.groups} == {
        "exchange",
        "relabel",
        "other_devices",
        "device_put",
    }
