"""Profiles: the named ones, and rates that make no sense."""

import dataclasses
import math

import pytest

from orbax_reshard.errors import OptionsError
from orbax_reshard.planning import profile
from orbax_reshard.planning.profile import CPU_FILE, default_profile


@pytest.mark.parametrize(
    ("platform", "scheme", "expected"),
    [
        ("cpu", "file", profile.CPU_FILE),
        ("cpu", "gs", profile.CPU_OBJECT_STORE),
        ("cpu", "s3", profile.CPU_OBJECT_STORE),
        ("gpu", "file", profile.GPU_FILE),
        ("cuda", "gs", profile.GPU_OBJECT_STORE),
        ("rocm", "file", profile.GPU_FILE),
        ("tpu", "gs", profile.TPU_OBJECT_STORE),
        ("tpu", "file", profile.TPU_OBJECT_STORE),
    ],
)
def test_defaults(platform, scheme, expected):
    assert default_profile(platform=platform, scheme=scheme) is expected


def test_names_are_distinct():
    found = [v for v in vars(profile).values() if isinstance(v, type(CPU_FILE))]
    assert len({one.name for one in found}) == len(found) == 5


def fields(*, seconds: bool) -> list[str]:
    """Rates, or latencies: the names that end in ``_seconds`` alone."""
    names = [f.name for f in dataclasses.fields(CPU_FILE) if f.name != "name"]
    return [n for n in names if n.endswith("_per_second") is not seconds]


def test_every_field_is_a_rate_or_a_latency():
    assert fields(seconds=True) == [
        "request_seconds",
        "collective_seconds",
        "compile_seconds",
    ]
    assert len(fields(seconds=False)) == 6


@pytest.mark.parametrize("name", fields(seconds=False))
def test_rates_are_above_0(name):
    dataclasses.replace(CPU_FILE, **{name: 1e-9})
    dataclasses.replace(CPU_FILE, **{name: math.inf})
    for value in (0.0, -1.0, math.nan):
        with pytest.raises(OptionsError) as error:
            dataclasses.replace(CPU_FILE, **{name: value})
        assert error.value.code == "bad_profile"
        assert str(error.value) == (
            f"profile 'cpu, local files': {name} is {value}, but must be above 0"
        )


@pytest.mark.parametrize("name", fields(seconds=True))
def test_latencies_are_at_least_0(name):
    dataclasses.replace(CPU_FILE, **{name: 0.0})
    for value in (-1e-9, math.nan):
        with pytest.raises(OptionsError) as error:
            dataclasses.replace(CPU_FILE, **{name: value})
        assert str(error.value) == (
            f"profile 'cpu, local files': {name} is {value}, but must be at least 0"
        )
