"""Starts a cluster of JAX CPU processes on this machine, and always ends it.

Sharded restores differ from plain ones only when there are several hosts, so the demo
and the tests need some. `run_cluster` plays them with local processes::

    parent                              children (one session each)
    run_cluster(("-m", "my.module"))
      port, environment  ------------>  initialize_from_environment()
      on_message(1, {...}) <----------  emit({...})       JSON on a pipe of its own
      on_line(0, "text")   <----------  print("text")     lines of standard output
      ProcessResult.stderr_tail <-----  logs, tracebacks

A child says what it found with `emit`; the values arrive in order, while it runs
through ``on_message``, and at the end as `ProcessResult.messages`. No files are needed.

What is promised about the end. The call returns when all children have exited, and no
child outlives it: not after a timeout, not when a sibling failed, not after an
exception or ^C in the parent. Children are ended by their own process-group ids. If
the parent itself is killed, the Linux kernel kills the children
(``PR_SET_PDEATHSIG``); elsewhere they end when their own timeouts do.

What is not done: no remote hosts, no restarts, no standard input.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import pathlib
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from orbax_reshard.errors import ReshardError
from orbax_reshard.tools import supervised
from orbax_reshard.tools.supervised import ProcessResult

# Names of the variables that tell a child its place.
COORDINATOR_VARIABLE = "ORESH_COORDINATOR"
NUM_PROCESSES_VARIABLE = "ORESH_NUM_PROCESSES"
PROCESS_ID_VARIABLE = "ORESH_PROCESS_ID"

# JAX's default is 300 s; local processes that need more than this are stuck.
_INITIALIZATION_TIMEOUT_SECONDS = 120

# At exit the processes wait for each other for this long (JAX's default is 300 s).
_SHUTDOWN_TIMEOUT_SECONDS = 60

# Every child's program runs inside of this one.
_CHILD_MAIN = str(pathlib.Path(__file__).with_name("child_main.py"))

# Two threads of a child may have something to say; a long message takes many writes.
_EMIT_LOCK = threading.Lock()


class ClusterError(ReshardError, RuntimeError):
    """A process of a local cluster failed or ran out of time; says which, and why."""


def run_cluster(
    python_arguments: Sequence[str],
    *,
    num_processes: int,
    devices_per_process: int,
    timeout_seconds: float,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    on_line: Callable[[int, str], None] | None = None,
    on_message: Callable[[int, Any], None] | None = None,
    wrap: Callable[[int], Sequence[str]] | None = None,
    coordinator_host: str = "127.0.0.1",
) -> tuple[ProcessResult, ...]:
    r"""Runs one Python program as ``num_processes`` JAX processes, to the end.

    Args:
        python_arguments: what follows ``python`` on the command line, the same for
            every process: ``("-m", "package.module", ...)``, ``("script.py", ...)`` or
            ``("-c", "...")``. The interpreter is the parent's.
        num_processes: processes of the cluster, at least 1.
        devices_per_process: virtual CPU devices of each process, at least 1.
        timeout_seconds: for everything, from start to last exit.
        env: variables to add to (or to put in place of) those inherited. Inherited
            are all but the ones that would change the cluster: device counts, JAX's
            own cluster variables, and proxies, which gRPC would use even for
            127.0.0.1.
        cwd: working directory of the children; default: the parent's.
        on_line: called as ``on_line(process_index, line)`` for each line on standard
            output, from this thread.
        on_message: called as ``on_message(process_index, value)`` for each `emit`.
        wrap: gives, per process index, words to put in front of the command: a program
            with an absolute path that runs its remaining arguments, in a network
            namespace for example.
        coordinator_host: address of process 0, as the processes see it.

    Returns:
        One `ProcessResult` per process, by process index. A failure is a result here;
        `raise_for_failure` makes an exception of it.

    Raises:
        ValueError: a count or the time limit is not positive, or the arguments begin
            with an option of the interpreter.
        OSError: the interpreter could not be started.

    When one process fails, the others have ten seconds to say what they know. How a
    child ends is in `child_main`; in short: exit functions run, destructors do not.

    Example:
        >>> program = '''
        ... import os
        ... from orbax_reshard.tools import launch
        ... launch.emit({"host": int(os.environ["ORESH_PROCESS_ID"])})
        ... '''
        >>> results = run_cluster(
        ...     ("-c", program), num_processes=2, devices_per_process=1,
        ...     timeout_seconds=60)
        >>> [(r.outcome, r.messages) for r in results]
        [('succeeded', ({'host': 0},)), ('succeeded', ({'host': 1},))]
    """
    for name, value in (
        ("num_processes", num_processes),
        ("devices_per_process", devices_per_process),
        ("timeout_seconds", timeout_seconds),
    ):
        if value <= 0:
            raise ValueError(f"{name} is {value}, but must be greater than 0.")

    if python_arguments[0].startswith("-") and python_arguments[0] not in ("-c", "-m"):
        raise ValueError(
            f"python_arguments begin with {python_arguments[0]}, but must begin with "
            "-c, -m or the path of a script."
        )

    command = (sys.executable, _CHILD_MAIN, *python_arguments)
    started = time.monotonic()
    children: list[supervised.Child] = []
    with _reserved_port() as port, selectors.DefaultSelector() as selector:
        try:
            for index in range(num_processes):
                place = {
                    COORDINATOR_VARIABLE: f"{coordinator_host}:{port}",
                    NUM_PROCESSES_VARIABLE: str(num_processes),
                    PROCESS_ID_VARIABLE: str(index),
                }
                child_env = child_environment(devices_per_process) | place
                child_env.update(env or {})
                front = tuple(wrap(index)) if wrap is not None else ()
                child = supervised.Child(index, (*front, *command), child_env, cwd)
                children.append(child)
                child.listen(selector, on_line, on_message)
            supervised.wait(children, selector, started + timeout_seconds)
            supervised.end(children)
            supervised.drain(selector)
        finally:
            supervised.end(children)
            for child in children:
                child.close()
    return tuple(child.result(started) for child in children)


def raise_for_failure(results: Sequence[ProcessResult]) -> None:
    """Raises what went wrong first, with the words of the process it happened to.

    Raises:
        ClusterError: a process did not succeed. The message holds the index and the
            end of the standard error of the first one that failed.
    """
    rank = {"failed": 0, "timed_out": 1, "ended": 2}
    bad = [result for result in results if result.outcome != "succeeded"]
    if not bad:
        return
    # Those that were ended say little; the earliest failure is nearest to the cause.
    first = min(bad, key=lambda result: (rank[result.outcome], result.seconds))
    what = {
        "failed": f"ended with {_describe_status(first.returncode)}",
        "timed_out": "was still running at the time limit",
        "ended": "was ended",
    }[first.outcome]
    raise ClusterError(
        f"Process {first.process_index} of {len(results)} {what} after "
        f"{first.seconds:.1f} s. The end of what it wrote to standard error:\n"
        f"{first.stderr_tail or '(nothing)'}",
        code=f"cluster_{first.outcome}",
    )


def child_environment(devices_per_process: int) -> dict[str, str]:
    """The parent's environment, made fit for a CPU process with so many devices."""
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.lower().endswith("_proxy")
    }
    for name in (
        "JAX_NUM_CPU_DEVICES",
        "JAX_COORDINATOR_ADDRESS",
        "JAX_COORDINATOR_BIND_ADDRESS",
        "JAX_LOCAL_DEVICE_IDS",
    ):
        env.pop(name, None)
    count_flag = "--xla_force_host_platform_device_count"
    flags = [
        flag
        for flag in env.get("XLA_FLAGS", "").split()
        if not flag.startswith(count_flag)
    ]
    env["XLA_FLAGS"] = " ".join([*flags, f"{count_flag}={devices_per_process}"])
    env["JAX_PLATFORMS"] = "cpu"
    env["PYTHONUNBUFFERED"] = "1"  # lines arrive when they are printed

    # Children import this very package, also from a checkout that is not installed.
    root = pathlib.Path(__file__).resolve().parents[2]
    if root.name not in ("site-packages", "dist-packages"):
        paths = [str(root), *env.get("PYTHONPATH", "").split(os.pathsep)]
        env["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return env


def initialize_from_environment(*, heartbeat_timeout_seconds: int = 100) -> int:
    """Joins the cluster of the `run_cluster` that started this process.

    Call it before anything that starts a JAX backend. From then on SIGTERM also
    writes the stacks of all threads to standard error, so that a process that hung
    until the time limit shows where.

    Args:
        heartbeat_timeout_seconds: how long JAX waits for a sign of life of a process
            before it ends all others. The default is JAX's.

    Returns:
        The process index.

    Raises:
        ClusterError: this process was not started by `run_cluster`.
    """
    try:
        coordinator = os.environ[COORDINATOR_VARIABLE]
        num_processes = int(os.environ[NUM_PROCESSES_VARIABLE])
        process_index = int(os.environ[PROCESS_ID_VARIABLE])
    except KeyError as error:
        raise ClusterError(
            f"The environment variable {error.args[0]} is not set: this program is "
            "meant to be started by orbax_reshard.tools.launch.run_cluster.",
            code="not_launched",
        ) from None

    import jax

    # Gloo is the default of JAX 0.10 to 0.12; another value may be in the environment.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        coordinator_address=coordinator,
        coordinator_bind_address=coordinator,  # the default listens on all interfaces
        num_processes=num_processes,
        process_id=process_index,
        cluster_detection_method="deactivate",  # also inside a Slurm job
        initialization_timeout=_INITIALIZATION_TIMEOUT_SECONDS,
        heartbeat_timeout_seconds=heartbeat_timeout_seconds,
        shutdown_timeout_seconds=_SHUTDOWN_TIMEOUT_SECONDS,
    )
    faulthandler.register(signal.SIGTERM, all_threads=True, chain=True)
    return process_index


def emit(value: Any) -> None:
    """Sends one JSON-serialisable value to the `run_cluster` that started this process.

    A program that was started by hand prints the value instead.
    """
    text = json.dumps(value)
    messages_fd = os.environ.get(supervised.MESSAGES_FD_VARIABLE)
    if messages_fd is None:
        print(text)
        return
    with _EMIT_LOCK, open(int(messages_fd), "w", closefd=False) as pipe:
        pipe.write(text + "\n")


@contextlib.contextmanager
def _reserved_port() -> Generator[int]:
    """A free TCP port of 127.0.0.1 that nobody else is given while this is open.

    The socket is bound but does not listen. gRPC sets SO_REUSEPORT, so that the
    coordinator in process 0 can bind the same port, and all connections are its own.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def _describe_status(returncode: int) -> str:
    if returncode >= 0:
        return f"exit status {returncode}"
    try:
        return f"signal {signal.Signals(-returncode).name}"
    except ValueError:
        return f"signal {-returncode}"
