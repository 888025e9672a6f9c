"""Errors are builtins too, and carry a code beside their message."""

import inspect

import pytest

import orbax_reshard
from orbax_reshard import errors

BUILTIN = {
    "BudgetError": ValueError,
    "CheckpointError": FileNotFoundError,
    "NoIntermediateShardingError": ValueError,
    "NoIntermediateShardingNeededError": ValueError,
    "OptionsError": ValueError,
    "PlanMismatchError": ValueError,
    "RestoreReadError": OSError,
    "RestoreTimeoutError": TimeoutError,
    "TargetError": ValueError,
}
CLASSES = {
    name: value
    for name, value in vars(errors).items()
    if inspect.isclass(value) and name != "ReshardError"
}


@pytest.mark.parametrize("name", CLASSES)
def test_code_written_for_builtins_keeps_catching(name):
    builtin = BUILTIN[name]
    with pytest.raises(builtin) as caught:
        raise CLASSES[name]("leaf 'w': what happened", code="some_code")
    assert isinstance(caught.value, errors.ReshardError)
    assert caught.value.code == "some_code"
    # An OSError with more than one argument would print an errno.
    assert str(caught.value) == "leaf 'w': what happened"
    assert caught.value.args == ("leaf 'w': what happened",)


def test_none_is_missing_and_all_are_public():
    assert set(CLASSES) == set(BUILTIN)
    assert {*CLASSES, "ReshardError"} <= set(orbax_reshard.__all__)
    assert all(getattr(orbax_reshard, name) for name in orbax_reshard.__all__)


def test_a_code_is_required():
    with pytest.raises(TypeError):
        errors.TargetError("message")
