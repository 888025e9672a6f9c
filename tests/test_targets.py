"""Targets as planning values: each reason to go direct, and targets that cannot be."""

import types

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import AbstractMesh, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from planning_oracle import stored

from orbax_reshard.errors import TargetError
from orbax_reshard.planning.explain import REASONS
from orbax_reshard.plugin.targets import leaf_request


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("r", "t"))


def opened(dtype="float32"):
    """What is looked at of an opened array."""
    return types.SimpleNamespace(
        dtype=types.SimpleNamespace(numpy_dtype=np.dtype(dtype))
    )


def ask(target, *, shape=(8, 4), asked=None, strict=True, dtype="float32", **kwargs):
    array = stored("layer/w", shape, [max(1, n) for n in shape], **kwargs)
    return leaf_request(array, opened(dtype), shape=asked, target=target, strict=strict)


def named(*spec, **kwargs) -> NamedSharding:
    return NamedSharding(mesh(), P(*spec), **kwargs)


def test_a_plain_target():
    request, target = ask(named(("t", "r")))
    assert request.declined is None
    assert request.spec == (("t", "r"), ())
    assert (request.mesh.axis_names, request.mesh.axis_sizes) == (("r", "t"), (2, 4))
    assert request.mesh.device_ids == tuple(range(8))
    assert set(request.mesh.hosts) == {0}
    assert (request.dtype, request.moved_bytes) == ("float32", 4)
    assert target.sharding == named(("t", "r"))
    assert target.devices == tuple(mesh().devices.flat)
    assert (target.dtype, target.shape) == (np.dtype("float32"), (8, 4))


def test_64_bits_become_32_as_jax_has_them():
    for dtype, moved in (("int64", 4), ("complex128", 8)):
        request, target = ask(named("t"), dtype=dtype)
        assert request.moved_bytes == target.dtype.itemsize == moved
    with jax.enable_x64(True):
        assert ask(named("t"), dtype="int64")[0].moved_bytes == 8


REASON_CASES = {
    "single_device": lambda: ask(SingleDeviceSharding(jax.devices()[0])),
    "not_named_sharding": lambda: ask(
        NamedSharding(AbstractMesh((8,), ("x",)), P("x"))
    ),
    "custom_layout": lambda: ask(Format(Layout((1, 0)), named("t"))),
    "memory_kind": lambda: ask(named("t", memory_kind="pinned_host")),
    "shape_differs": lambda: ask(named("t"), asked=(12, 4), strict=False),
    "empty_array": lambda: ask(named(), shape=(0, 4)),
    "driver_not_planned": lambda: ask(named("t"), driver="n5"),
    "dtype_not_carried": lambda: ask(named("t"), dtype=ml_dtypes.float6_e2m3fn),
}


@pytest.mark.parametrize("reason", REASON_CASES)
def test_reasons_to_go_direct(reason):
    request, target = REASON_CASES[reason]()
    assert (request.declined, target, request.mesh) == (reason, None, None)
    assert reason in REASONS
    assert request.target_text


def test_other_shardings_are_not_named():
    unconstrained = named(P.UNCONSTRAINED)
    assert ask(unconstrained)[0].declined == "not_named_sharding"
    assert ask(None)[0].declined == "not_named_sharding"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (
            {"target": lambda: named("t"), "asked": (4, 4)},
            "shape_mismatch",
            "leaf 'layer/w': the target has shape (4, 4), the checkpoint has (8, 4). "
            "To pad or cut, pass strict=False in ArrayRestoreArgs.",
        ),
        (
            {"target": lambda: named(None, None, "t")},
            "rank_mismatch",
            "leaf 'layer/w': the target's spec PartitionSpec(None, None, 't') names 3 "
            "dimensions, the array has 2",
        ),
        (
            {"target": lambda: named(None, ("r", "t"))},
            "not_divisible",
            "leaf 'layer/w': dimension 1 of 4 does not divide into the 8 shards of "
            "mesh axes ('r', 't') ({'r': 2, 't': 4}) in the target "
            "PartitionSpec(None, ('r', 't'))",
        ),
    ],
)
def test_targets_that_cannot_hold_the_array(arguments, code, message):
    with pytest.raises(TargetError) as error:
        ask(**{**arguments, "target": arguments["target"]()})
    assert error.value.code == code
    text = str(error.value)
    # JAX 0.12 writes P(...) for what 0.10 writes PartitionSpec(...).
    assert (
        text.replace("spec P(", "spec PartitionSpec(").replace(
            "target P(", "target PartitionSpec("
        )
        == message
    )
