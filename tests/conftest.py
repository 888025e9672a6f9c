"""What every test needs: 16 CPU devices, a folder, and no process left behind."""

import os
import pathlib
import time
import uuid
from collections.abc import Iterator

import pytest

# Before JAX is imported by any test: 16 is the smallest count that holds the meshes
# 4-2-2 and 2-8 of the planner tests. Processes started by `launch` get their own count.
_COUNT_FLAG = "--xla_force_host_platform_device_count"
_OTHER_FLAGS = [
    flag
    for flag in os.environ.get("XLA_FLAGS", "").split()
    if not flag.startswith(_COUNT_FLAG)
]
os.environ["XLA_FLAGS"] = " ".join([*_OTHER_FLAGS, f"{_COUNT_FLAG}=16"])
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.pop("JAX_NUM_CPU_DEVICES", None)

# Inherited by every process that a test starts, however deep; see `leftover_processes`.
_SESSION_VARIABLE = "ORESH_TEST_SESSION"
_SESSION = uuid.uuid4().hex
os.environ[_SESSION_VARIABLE] = _SESSION

# A killed process needs a moment until the kernel has taken it off the list.
_LEFTOVER_GRACE_SECONDS = 5.0


def leftover_processes() -> dict[int, str]:
    """Processes started under this test session that still run: id -> command line.

    Read from /proc; empty on systems without one. A process is known by the variable
    that it inherited, so that it is found also when its parent has died.
    """
    wanted = f"{_SESSION_VARIABLE}={_SESSION}".encode()
    found: dict[int, str] = {}
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        if int(folder.name) == os.getpid():
            continue
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                found[int(folder.name)] = command.decode(errors="replace")[:200]
        except OSError:  # it ended while we looked, or belongs to somebody else
            continue
    return found


def wait_for_no_leftovers(timeout_seconds: float = _LEFTOVER_GRACE_SECONDS) -> None:
    """Fails with the command lines of what still runs after the time is up."""
    deadline = time.monotonic() + timeout_seconds
    while (found := leftover_processes()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not found, f"processes left behind: {found}"


@pytest.fixture
def no_leftovers() -> Iterator[None]:
    """Fails the test when a process that it started outlives it."""
    yield
    wait_for_no_leftovers()


@pytest.fixture(scope="session", autouse=True)
def no_leftovers_at_the_end() -> Iterator[None]:
    """Fails the session when any process started by any test is still alive."""
    yield
    wait_for_no_leftovers()


@pytest.fixture
def tmp_checkpoint_dir(tmp_path: pathlib.Path) -> pathlib.Path:
    """A path for a checkpoint, which Orbax wants absent and absolute."""
    return tmp_path / "checkpoint"
