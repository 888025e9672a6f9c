"""Hosts meet: each says what it has, all hear the same, and nobody waits for ever.

A running collective cannot be given a timeout, so hosts meet at JAX's coordination
service first: each writes its word under the meeting's name and waits at a barrier
that has a timeout; behind it everybody reads all words. A host that failed still
comes and says so, and all raise the same error.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from orbax_reshard.errors import (
    PlanMismatchError,
    RestoreReadError,
    RestoreTimeoutError,
)

_LOG = logging.getLogger("orbax_reshard")

# When a wait gets its first line in the log, and how often after that.
FIRST_NOTICE_SECONDS = 30.0
NEXT_NOTICE_SECONDS = 60.0


class Coordinator(Protocol):
    """What is needed of a coordination service; see ``plugin.compat``."""

    def put(self, key: str, value: str) -> None:
        """Writes a value once."""
        ...

    def directory(self, prefix: str) -> Sequence[tuple[str, str]]:
        """All keys and values below a prefix that ends with a slash."""
        ...

    def barrier(self, key: str, timeout_seconds: float, hosts: Sequence[int]) -> None:
        """Waits for all ``hosts``; raises TimeoutError."""
        ...

    def delete(self, prefix: str) -> None:
        """Forgets everything below a prefix that ends with a slash."""
        ...


# Restores are numbered per set of hosts. Every host of a set makes the same restores
# in the same order, as it must for any collective.
_numbers: defaultdict[tuple[int, ...], Iterator[int]] = defaultdict(itertools.count)
_numbers_lock = threading.Lock()


class Hosts:
    """The hosts of one restore, as seen by one of them.

    Args:
        hosts: process indices that take part, ascending.
        here: this process.
        coordinator: the service; not used when ``hosts`` is just this process.
        timeout_seconds: for each single wait.
    """

    def __init__(
        self,
        hosts: Sequence[int],
        here: int,
        coordinator: Coordinator | None,
        timeout_seconds: float,
    ) -> None:
        """Takes the next number of this set of hosts; talks to nobody."""
        self.hosts = tuple(hosts)
        self.here = here
        self.timeout_seconds = timeout_seconds
        self._coordinator = coordinator
        with _numbers_lock:
            self._number = next(_numbers[self.hosts])
        members = hashlib.sha256(repr(self.hosts).encode()).hexdigest()[:12]
        self._base = f"orbax_reshard/{members}"
        self._name = f"{self._base}/{self._number}"

    @property
    def alone(self) -> bool:
        """True when nobody else takes part."""
        return self.hosts == (self.here,)

    def meet(
        self, phase: str, word: str, hosts: Sequence[int] | None = None
    ) -> dict[int, str]:
        """Gives this host's word and returns everybody's, by host.

        Args:
            phase: unique within the restore, the same on every host.
            word: what to say.
            hosts: a subset that meets, all by default.

        Raises:
            RestoreTimeoutError: somebody did not come; names who, and the phase.
        """
        expected = tuple(self.hosts if hosts is None else hosts)
        if expected == (self.here,) or self._coordinator is None:
            return {self.here: word}
        prefix = f"{self._name}/{phase}/"
        self._coordinator.put(f"{prefix}{self.here}", word)
        done = threading.Event()
        watcher = threading.Thread(
            target=self._watch, args=(prefix, phase, expected, done), daemon=True
        )
        watcher.start()
        try:
            self._coordinator.barrier(
                f"{prefix}barrier", self.timeout_seconds, expected
            )
        except TimeoutError as error:
            missing = self._missing(prefix, expected)
            raise RestoreTimeoutError(
                f"restore gave up after {self.timeout_seconds:g} s in phase "
                f"{phase!r}: waiting for host(s) {missing or 'unknown'}; hosts "
                f"{list(expected)} take part. Look at the logs of the missing hosts, "
                f"or raise Options(timeout_seconds=...). Cause: {error}",
                code="host_missing",
            ) from error
        finally:
            done.set()
        return self._words(prefix)

    def forget_previous(self) -> None:
        """Deletes the keys of the restore before this one.

        Call behind a meeting of all hosts: whoever came has left the previous
        restore. (Deleting one's own keys at the end would race with slow readers.)
        """
        first = self.here == self.hosts[0]
        if self._coordinator is not None and first and not self.alone and self._number:
            self._coordinator.delete(f"{self._base}/{self._number - 1}/")

    def _words(self, prefix: str) -> dict[int, str]:
        assert self._coordinator is not None
        found = self._coordinator.directory(prefix)
        return {int(key.rsplit("/", 1)[1]): value for key, value in sorted(found)}

    def _missing(self, prefix: str, expected: Sequence[int]) -> list[int]:
        try:
            came = self._words(prefix)
        except Exception:  # the service itself may be gone
            return []
        return [host for host in expected if host not in came]

    def _watch(
        self,
        prefix: str,
        phase: str,
        expected: Sequence[int],
        done: threading.Event,
    ) -> None:
        """Says in the log who is awaited, first after 30 s, then every minute."""
        start = time.monotonic()
        wait = FIRST_NOTICE_SECONDS
        while not done.wait(wait):
            wait = NEXT_NOTICE_SECONDS
            missing = self._missing(prefix, expected)
            if missing:
                _LOG.warning(
                    "host %d has waited %.0f s in phase %r for host(s) %s",
                    self.here,
                    time.monotonic() - start,
                    phase,
                    missing,
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a host cannot go on; the same words are raised everywhere.

    Attributes:
        host: the process that failed.
        leaf: the leaf or leaves it was working on.
        text: the original error.
        kind: class name of the original error.
    """

    host: int
    leaf: str
    text: str
    kind: str

    def error(self) -> RestoreReadError:
        """The error that every host raises."""
        return RestoreReadError(
            f"host {self.host} failed at leaf {self.leaf}: {self.kind}: {self.text}",
            code="host_failed",
        )


def say(failure: Failure | None, extra: Mapping[str, object] | None = None) -> str:
    """A host's word at a meeting."""
    word: dict[str, object] = dict(extra or {})
    if failure is not None:
        word["failure"] = {
            "host": failure.host,
            "leaf": failure.leaf,
            "text": failure.text,
            "kind": failure.kind,
        }
    return json.dumps(word)


def first_failure(words: Mapping[int, str]) -> Failure | None:
    """The failure of the lowest host, if any host failed."""
    for host in sorted(words):
        found = json.loads(words[host]).get("failure")
        if found:
            return Failure(**found)
    return None


def agree(
    hosts: Hosts,
    leaf_digests: Callable[[], Mapping[str, str]],
    plan_digest: str,
    failure: Failure | None = None,
    *,
    folder: str = "",
) -> Failure | None:
    """Makes sure that all hosts are about to do the same.

    Args:
        hosts: who takes part.
        leaf_digests: gives per leaf name a digest of what was asked of it, in order;
            called only to tell a difference.
        plan_digest: digest of the plan made from that.
        failure: why this host could not plan, or None.
        folder: the checkpoint that this host reads. Hosts that share the reads of two
            checkpoints of one structure (two steps, say) would mix them unseen.

    Returns:
        The first failure among the hosts, or None when all agree.

    Raises:
        PlanMismatchError: the same on every host; names the first differing leaf.
        RestoreTimeoutError: a host did not come.
    """
    words = hosts.meet("agree", say(failure, {"plan": plan_digest, "folder": folder}))
    hosts.forget_previous()
    found = first_failure(words)
    if found is not None:
        return found
    folders = {host: json.loads(word)["folder"] for host, word in words.items()}
    if len(set(folders.values())) > 1:
        raise PlanMismatchError(
            "the hosts do not restore one checkpoint: "
            + "; ".join(f"host {host}: {text!r}" for host, text in folders.items())
            + ". Every process must pass the same path and step.",
            code="path_mismatch",
        )
    if len({json.loads(word)["plan"] for word in words.values()}) == 1:
        return None
    lists = hosts.meet(
        "compare", say(None, {"leaves": list(map(list, leaf_digests().items()))})
    )
    raise PlanMismatchError(
        _difference({h: json.loads(w)["leaves"] for h, w in lists.items()}),
        code="plan_mismatch",
    )


def _difference(leaves: Mapping[int, Sequence[Sequence[str]]]) -> str:
    """Which leaf differs first, and between which hosts."""
    for row in itertools.zip_longest(*leaves.values(), fillvalue=("(no leaf)", "")):
        groups: dict[tuple[str, str], list[int]] = {}
        for host, (name, digest) in zip(leaves, row, strict=True):
            groups.setdefault((name, digest), []).append(host)
        if len(groups) > 1:
            said = "; ".join(
                f"host(s) {', '.join(map(str, members))}: {name!r} [{digest[:8]}]"
                for (name, digest), members in groups.items()
            )
            name = next(iter(groups))[0]
            return (
                f"the hosts do not ask for the same restore. First difference at leaf "
                f"{name!r} (shape, dtype, sharding or eligibility): {said}. Every "
                f"process must pass the same target."
            )
    return (
        "the hosts ask for the same leaves but made different plans: their Options "
        "(policy, profile, budgets) or package versions differ."
    )
