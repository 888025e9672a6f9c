"""One child process of `launch.run_cluster`: its words, its end, and its ending.

The unit is a process in a session of its own, with three pipes to the parent: standard
output and standard error as lines, and a third one for JSON messages. Messages have
their own pipe because C++ libraries (Gloo) print to standard output whenever they
like, also in the middle of somebody's line.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, Literal

Outcome = Literal["succeeded", "failed", "timed_out", "ended"]

# Tells a child the number of the file descriptor on which its messages go.
MESSAGES_FD_VARIABLE = "ORESH_MESSAGES_FD"

# A sibling of a failed process is often about to report the same error (section 7 of
# docs/design.md: within seconds). Longer only delays the report of a plain crash.
_SIBLING_GRACE_SECONDS = 10.0

# JAX's preemption service catches SIGTERM and stays, so this is not time to finish in;
# it is for a child without JAX to remove its temporary files.
_TERMINATE_GRACE_SECONDS = 2.0

# An exit is noticed at once by the end of the child's pipes; this bounds the delay for
# a child that closed them early, and for deadlines.
_POLL_SECONDS = 0.05

# Output that is still in the pipes when everything has exited; only a stranger that
# inherited a pipe can make this wait matter.
_DRAIN_SECONDS = 1.0

# Enough for two Python tracebacks through JAX with some logging in front.
_STDERR_TAIL_LINES = 120

# Runs before the child's program and becomes it: the death signal survives exec. A
# ``preexec_fn`` would run Python in a fork of a parent that has JAX's threads.
_LEASH = """
import os, sys
if sys.platform == "linux":
    import ctypes, signal
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG
    if os.getppid() != int(sys.argv[1]):  # the parent died before the call
        sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProcessResult:
    """How one process ended, and everything that it said.

    Attributes:
        process_index: the JAX process index, from 0.
        outcome: ``"succeeded"`` (exit status 0), ``"failed"`` (ended by itself with
            another status), ``"timed_out"`` (was running at the time limit), or
            ``"ended"`` (was ended because another process had failed).
        returncode: the exit status, or minus the number of the signal that ended it.
        seconds: from the start of the cluster to the end of this process.
        messages: the values that the process gave to `emit`, in order.
        stdout: its lines on standard output.
        stderr_tail: the last lines on standard error.
    """

    process_index: int
    outcome: Outcome
    returncode: int
    seconds: float
    messages: tuple[Any, ...]
    stdout: str
    stderr_tail: str


class Child:
    """One running process: its pipes cut into lines, its end noted once."""

    def __init__(
        self,
        index: int,
        command: Sequence[str],
        env: Mapping[str, str],
        cwd: str | os.PathLike[str] | None,
    ) -> None:
        """Starts the process; `listen` must follow, or it blocks on a full pipe."""
        self.index = index
        self.outcome: Outcome | None = None
        self.ended_at = 0.0
        self._messages: list[Any] = []
        self._stdout: list[str] = []
        self._stderr: collections.deque[str] = collections.deque(
            maxlen=_STDERR_TAIL_LINES
        )
        reader, writer = os.pipe()
        self._pipe = os.fdopen(reader, "rb", buffering=0)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _LEASH, str(os.getpid()), *command],
                env={**env, MESSAGES_FD_VARIABLE: str(writer)},
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(writer,),
                start_new_session=True,  # ^C reaches the parent only, which ends all
            )
        except BaseException:
            self._pipe.close()
            raise
        finally:
            os.close(writer)

    def listen(
        self,
        selector: selectors.BaseSelector,
        on_line: Callable[[int, str], None] | None,
        on_message: Callable[[int, Any], None] | None,
    ) -> None:
        """Registers the pipes; a key's data is what to do with the bytes."""

        def take_line(line: str) -> None:
            self._stdout.append(line)
            if on_line is not None:
                on_line(self.index, line)

        def take_message(line: str) -> None:
            value = json.loads(line)
            self._messages.append(value)
            if on_message is not None:
                on_message(self.index, value)

        takers = (take_line, self._stderr.append, take_message)
        for pipe, take in zip(self._pipes(), takers, strict=True):
            os.set_blocking(pipe.fileno(), False)
            selector.register(pipe, selectors.EVENT_READ, _LineCutter(take))

    def poll(self) -> bool:
        """Whether it still runs; notes the end when it sees it."""
        if self.outcome is not None:
            return False
        returncode = self._process.poll()
        if returncode is None:
            return True
        self.note_end("succeeded" if returncode == 0 else "failed")
        self.signal_group(signal.SIGKILL)  # what it may have started itself
        return False

    def note_end(self, outcome: Outcome) -> None:
        """Decides the outcome; the first decision stands."""
        if self.outcome is None:
            self.outcome = outcome
            self.ended_at = time.monotonic()

    def signal_group(self, number: signal.Signals) -> None:
        """Signals the process and everything in its own session."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def wait(self, timeout_seconds: float | None) -> None:
        """Waits for the end of the process itself."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_seconds)

    @property
    def exited(self) -> bool:
        """Whether the process itself has ended, however that came."""
        return self._process.poll() is not None

    def close(self) -> None:
        """Closes the parent's ends of the pipes."""
        for pipe in self._pipes():
            pipe.close()

    def _pipes(self) -> tuple[IO[bytes], ...]:
        assert self._process.stdout is not None and self._process.stderr is not None
        return self._process.stdout, self._process.stderr, self._pipe

    def result(self, started: float) -> ProcessResult:
        """What is left of it, after its end."""
        assert self.outcome is not None and self._process.returncode is not None
        return ProcessResult(
            process_index=self.index,
            outcome=self.outcome,
            returncode=self._process.returncode,
            seconds=self.ended_at - started,
            messages=tuple(self._messages),
            stdout="\n".join(self._stdout),
            stderr_tail="\n".join(self._stderr),
        )


class _LineCutter:
    """Cuts a stream of bytes into lines; the last one may lack its newline."""

    def __init__(self, take: Callable[[str], None]) -> None:
        self._take = take
        self._rest = b""

    def feed(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._take(line.decode(errors="replace"))

    def finish(self) -> None:
        if self._rest:
            self.feed(b"\n")


def wait(
    children: Sequence[Child],
    selector: selectors.BaseSelector,
    deadline: float,
) -> None:
    """Returns when all have exited, or when time is up for those that have not.

    Args:
        children: the processes, all listening through ``selector``.
        selector: where their pipes are registered.
        deadline: on the clock of `time.monotonic`.
    """
    late: Outcome = "timed_out"
    while any([child.poll() for child in children]):  # a list: every child is polled
        _read(selector, _POLL_SECONDS)
        now = time.monotonic()
        failed = any(child.outcome == "failed" for child in children)
        if failed and late == "timed_out":
            deadline, late = min(deadline, now + _SIBLING_GRACE_SECONDS), "ended"
        if now >= deadline:
            for child in children:
                child.note_end(late)
            return


def _read(selector: selectors.BaseSelector, timeout_seconds: float) -> None:
    """Hands on what is in the pipes; forgets a pipe at its end."""
    for key, _ in selector.select(timeout_seconds):
        try:
            data = os.read(key.fd, 1 << 16)  # the capacity of a Linux pipe
        except BlockingIOError:
            continue
        if data:
            key.data.feed(data)
        else:
            selector.unregister(key.fileobj)
            key.data.finish()


def drain(selector: selectors.BaseSelector) -> None:
    """Hands on the last words, after the end of all processes."""
    deadline = time.monotonic() + _DRAIN_SECONDS
    while selector.get_map() and time.monotonic() < deadline:
        _read(selector, _POLL_SECONDS)


def end(children: Sequence[Child]) -> None:
    """Ends what still runs: asks, waits a little, then kills. Safe against ^C."""
    running = [child for child in children if child.poll() or not child.exited]
    try:
        for child in running:
            child.signal_group(signal.SIGTERM)
        deadline = time.monotonic() + _TERMINATE_GRACE_SECONDS
        for child in running:
            child.wait(max(0.0, deadline - time.monotonic()))
    finally:
        for child in running:
            child.signal_group(signal.SIGKILL)
        for child in running:
            child.wait(None)  # a killed process ends; this only collects it
