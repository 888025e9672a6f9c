"""Hosts meet: what they hear, what they raise, and how long they wait. In threads."""

import itertools
import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from orbax_reshard.engine import agreement
from orbax_reshard.engine.agreement import (
    Failure,
    Hosts,
    agree,
    first_failure,
    say,
)
from orbax_reshard.errors import (
    PlanMismatchError,
    RestoreReadError,
    RestoreTimeoutError,
)


class Memory:
    """A coordination service in this process, for hosts that are threads."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.barriers: dict[str, threading.Barrier] = {}
        self.lock = threading.Lock()

    def put(self, key: str, value: str) -> None:
        with self.lock:
            assert key not in self.values, f"{key} is written twice"
            self.values[key] = value

    def directory(self, prefix: str) -> list[tuple[str, str]]:
        assert prefix.endswith("/")
        with self.lock:
            return [(k, v) for k, v in self.values.items() if k.startswith(prefix)]

    def barrier(self, key: str, timeout_seconds: float, hosts) -> None:
        with self.lock:
            barrier = self.barriers.setdefault(key, threading.Barrier(len(hosts)))
        try:
            barrier.wait(timeout_seconds)
        except threading.BrokenBarrierError:
            raise TimeoutError("DEADLINE_EXCEEDED: barrier timed out") from None

    def delete(self, prefix: str) -> None:
        with self.lock:
            for key in [k for k in self.values if k.startswith(prefix)]:
                del self.values[key]


@pytest.fixture(autouse=True)
def fresh_numbers(monkeypatch):
    """Each test's hosts are processes of their own, which number their restores."""
    monkeypatch.setattr(agreement, "_numbers", Numbers())


class Numbers:
    """In one process all hosts would count one counter; here each has its own."""

    def __init__(self) -> None:
        self.counts: dict[tuple[int, ...], int] = {}

    def __getitem__(self, hosts):
        made = self.counts.get(hosts, 0)
        self.counts[hosts] = made + 1
        return iter([made // len(hosts)])


def hosts_of(service, count=3, timeout_seconds=20.0) -> list[Hosts]:
    ids = range(count)
    return [Hosts(ids, here, service, timeout_seconds) for here in ids]


def on_each(hosts, job) -> list[object]:
    """Results or errors of ``job(host)``, all at once, in order."""

    def one(host):
        try:
            return job(host)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(hosts)) as pool:
        return list(pool.map(one, hosts))


# --- meetings -------------------------------------------------------------------------


def test_everybody_hears_everybody():
    hosts = hosts_of(Memory())
    heard = on_each(hosts, lambda h: h.meet("plan", f"word {h.here}"))
    assert heard == [{0: "word 0", 1: "word 1", 2: "word 2"}] * 3
    # A second phase is a meeting of its own, with some of the hosts.
    heard = on_each(hosts[1:], lambda h: h.meet("wave 0", str(h.here), (1, 2)))
    assert heard == [{1: "1", 2: "2"}] * 2


def test_one_host_talks_to_nobody():
    class Nobody(Memory):
        put = directory = barrier = delete = None

    alone = Hosts([4], 4, Nobody(), 1.0)
    assert alone.alone
    assert alone.meet("plan", "word") == {4: "word"}
    alone.forget_previous()
    many = Hosts([0, 4], 4, None, 1.0)
    assert not many.alone
    assert many.meet("wave 0", "word", (4,)) == {4: "word"}


def test_a_missing_host_is_named_with_the_phase():
    hosts = hosts_of(Memory(), count=4, timeout_seconds=0.2)
    errors = on_each(hosts[::2], lambda h: h.meet("wave 3", "here"))
    for error in errors:
        assert isinstance(error, RestoreTimeoutError)
        assert error.code == "host_missing"
        assert str(error) == (
            "restore gave up after 0.2 s in phase 'wave 3': waiting for host(s) "
            "[1, 3]; hosts [0, 1, 2, 3] take part. Look at the logs of the missing "
            "hosts, or raise Options(timeout_seconds=...). Cause: DEADLINE_EXCEEDED: "
            "barrier timed out"
        )
        assert isinstance(error.__cause__, TimeoutError)


def test_a_service_that_is_gone_names_nobody():
    class Gone(Memory):
        def directory(self, prefix):
            raise ConnectionError

    (error,) = on_each(
        hosts_of(Gone(), timeout_seconds=0.1)[:1], lambda h: h.meet("plan", "here")
    )
    assert "waiting for host(s) unknown; hosts [0, 1, 2]" in str(error)


def test_a_long_wait_is_told_in_the_log(monkeypatch, caplog):
    monkeypatch.setattr(agreement, "FIRST_NOTICE_SECONDS", 0.1)
    monkeypatch.setattr(agreement, "NEXT_NOTICE_SECONDS", 0.1)
    hosts = hosts_of(Memory(), count=2, timeout_seconds=0.5)
    with caplog.at_level(logging.WARNING, "orbax_reshard"):
        on_each(hosts[:1], lambda h: h.meet("plan", "here"))
    messages = [record.getMessage() for record in caplog.records]
    assert messages[0] == "host 0 has waited 0 s in phase 'plan' for host(s) [1]"
    assert len(messages) >= 2


def test_restores_are_numbered_and_the_previous_one_is_forgotten():
    service = Memory()
    for _ in range(3):
        hosts = hosts_of(service)
        on_each(hosts, lambda h: h.meet("plan", "x"))
        hosts[0].forget_previous()
        hosts[1].forget_previous()
    restores = {key.split("/")[2] for key in service.values}
    assert restores == {"2"}


def test_other_sets_of_hosts_do_not_hear_each_other():
    service = Memory()
    one, other = Hosts([0, 1], 0, service, 1.0), Hosts([0, 2], 0, service, 1.0)
    assert one._base != other._base


def test_the_real_counter_counts_each_set_of_hosts(monkeypatch):
    monkeypatch.undo()
    names = [Hosts([90, n], 90, None, 1.0)._name.split("/")[2] for n in (91, 92, 91)]
    assert names == ["0", "0", "1"]


# --- agreeing -------------------------------------------------------------------------

LEAVES = {"a": "1" * 64, "b": "2" * 64}


def agreed(digests, plans, failures=None):
    hosts = hosts_of(Memory(), count=len(digests))
    failures = failures or [None] * len(digests)
    return on_each(
        hosts,
        lambda h: agree(h, lambda: digests[h.here], plans[h.here], failures[h.here]),
    )


def test_equal_plans_agree():
    assert agreed([LEAVES] * 3, ["p"] * 3) == [None] * 3


@pytest.mark.parametrize(
    ("second", "difference"),
    [
        (
            {"a": "1" * 64, "b": "3" * 64},
            "First difference at leaf 'b' (shape, dtype, sharding or eligibility): "
            "host(s) 0, 2: 'b' [22222222]; host(s) 1: 'b' [33333333]. ",
        ),
        (
            {"b": "2" * 64, "a": "1" * 64},
            "First difference at leaf 'a' (shape, dtype, sharding or eligibility): "
            "host(s) 0, 2: 'a' [11111111]; host(s) 1: 'b' [22222222]. ",
        ),
        (
            {"a": "1" * 64},
            "First difference at leaf 'b' (shape, dtype, sharding or eligibility): "
            "host(s) 0, 2: 'b' [22222222]; host(s) 1: '(no leaf)' []. ",
        ),
    ],
)
def test_every_host_names_the_first_leaf_that_differs(second, difference):
    errors = agreed([LEAVES, second, LEAVES], ["p", "q", "p"])
    assert len({str(error) for error in errors}) == 1
    for error in errors:
        assert isinstance(error, PlanMismatchError) and error.code == "plan_mismatch"
        assert str(error) == (
            "the hosts do not ask for the same restore. "
            f"{difference}Every process must pass the same target."
        )


def test_equal_leaves_with_other_options():
    errors = agreed([LEAVES] * 2, ["p", "q"])
    assert [str(error) for error in errors] == [
        "the hosts ask for the same leaves but made different plans: their Options "
        "(policy, profile, budgets) or package versions differ."
    ] * 2


# --- failures -------------------------------------------------------------------------

FAILURE = Failure(host=1, leaf="'w'", text="no such file", kind="FileNotFoundError")


def test_the_failure_of_the_lowest_host_is_heard_by_all():
    other = Failure(host=2, leaf="'z'", text="later", kind="OSError")
    # Also when plans differ: a host that could not plan has no plan to compare.
    heard = agreed([LEAVES] * 3, ["p", "q", "r"], [None, FAILURE, other])
    assert heard == [FAILURE] * 3


def test_words_and_the_error_that_all_raise():
    assert json.loads(say(None)) == {}
    assert json.loads(say(None, {"plan": "p"})) == {"plan": "p"}
    word = say(FAILURE, {"plan": "p"})
    assert json.loads(word) == {
        "plan": "p",
        "failure": {
            "host": 1,
            "leaf": "'w'",
            "text": "no such file",
            "kind": "FileNotFoundError",
        },
    }
    assert first_failure({0: say(None), 1: word}) == FAILURE
    assert first_failure({0: say(None), 1: say(None)}) is None
    orders = itertools.permutations({0: word, 3: say(None), 2: say(FAILURE)}.items())
    assert all(first_failure(dict(order)) == FAILURE for order in orders)
    error = FAILURE.error()
    assert isinstance(error, RestoreReadError) and error.code == "host_failed"
    assert str(error) == "host 1 failed at leaf 'w': FileNotFoundError: no such file"
