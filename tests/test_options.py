"""Options are checked where they are given."""

import dataclasses

import pytest

import orbax_reshard as oresh


def test_defaults():
    options = oresh.Options()
    assert (options.policy, options.timeout_seconds) == ("auto", 600.0)
    assert (options.profile, options.progress) == (None, None)
    assert (options.read_budget_bytes, options.device_budget_bytes) == (None, None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.policy = "direct"
    with pytest.raises(TypeError):
        oresh.Options("direct")


@pytest.mark.parametrize("policy", ["auto", "read_once", "direct"])
def test_policies(policy):
    assert oresh.Options(policy=policy).policy == policy


@pytest.mark.parametrize("policy", ["READ_ONCE", "", None, "stock"])
def test_an_unknown_policy(policy):
    with pytest.raises(oresh.OptionsError) as error:
        oresh.Options(policy=policy)
    assert error.value.code == "unknown_policy"
    assert str(error.value) == (
        f"policy is {policy!r}; it must be one of auto, read_once, direct"
    )


@pytest.mark.parametrize(
    "name", ["read_budget_bytes", "device_budget_bytes", "timeout_seconds"]
)
def test_bounds_are_above_0(name):
    assert getattr(oresh.Options(**{name: 1}), name) == 1
    for value in (0, -5):
        with pytest.raises(oresh.OptionsError) as error:
            oresh.Options(**{name: value})
        assert error.value.code == "bad_bound"
        assert str(error.value) == f"{name} is {value}; it must be above 0"
