"""A lane: one thread that does jobs in the order in which they were given.

All programs of a process are launched from one lane, in one order, because
collectives that start in different orders on two hosts wait for each other for ever.
The thread is a daemon: a collective whose peer died never returns, and must not keep
the interpreter from exiting (``ThreadPoolExecutor`` joins its threads at exit).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

_T = TypeVar("_T")


class Lane:
    """Runs jobs one after the other in a thread of its own."""

    def __init__(self, name: str) -> None:
        """The thread starts with the first job."""
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], _T]) -> Future[_T]:
        """Queues ``job``; its result or exception arrives in the future."""
        future: Future[_T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)

        if self._thread is None:
            self._thread = threading.Thread(
                target=self._work, name=self._name, daemon=True
            )
            self._thread.start()
        self._jobs.put(run)
        return future

    def close(self) -> None:
        """Lets the thread end after the jobs that are queued."""
        if self._thread is not None:
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # its result must not live on in this frame


def swallow(future: Future[Any]) -> None:
    """Marks a future's exception as seen, for jobs that nobody waits for any more."""
    future.add_done_callback(lambda f: f.cancelled() or f.exception())
