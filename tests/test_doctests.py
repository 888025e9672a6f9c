"""The examples in the docstrings of every module run, and say what they say."""

import doctest
import importlib
import pkgutil

import pytest

import orbax_reshard

MODULES = sorted(
    found.name
    for found in pkgutil.walk_packages(orbax_reshard.__path__, "orbax_reshard.")
    # Entry points of child processes do their work when they are imported.
    if not found.name.endswith(("__main__", "child_main"))
)

# Modules whose examples are what they are understood by; a lower bound, so that an
# example that doctest no longer finds is missed.
WITH_EXAMPLES = {
    "orbax_reshard.planning.boxes",
    "orbax_reshard.planning.digits",
    "orbax_reshard.planning.explain",
    "orbax_reshard.planning.record",
    "orbax_reshard.planning.stored",
    "orbax_reshard.engine.exchange",
}


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0
    assert result.attempted > 0 or name not in WITH_EXAMPLES


def test_the_walk_finds_every_layer():
    assert set(MODULES) >= WITH_EXAMPLES
    assert {name.split(".")[1] for name in MODULES} >= {
        *("errors", "planning", "engine", "live", "plugin", "tools")
    }
    assert len(MODULES) > 30


def test_a_wrong_example_fails():
    def wrong():
        """
        >>> 1 + 1
        3
        """

    test = doctest.DocTestFinder().find(wrong, "wrong")[0]
    runner = doctest.DocTestRunner(verbose=False)
    assert runner.run(test, out=lambda text: None).failed == 1
