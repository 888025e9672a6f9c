"""A lane does its jobs one after the other, in one thread that keeps nobody alive."""

import gc
import threading
import weakref

import pytest

from orbax_reshard.engine.lane import Lane, swallow


def test_jobs_run_in_order_in_one_thread():
    lane, done = Lane("test-lane"), []

    def job(number):
        done.append((number, threading.current_thread().name))
        return number

    futures = [lane.submit(lambda n=n: job(n)) for n in range(50)]
    assert [future.result(10) for future in futures] == list(range(50))
    assert done == [(n, "test-lane") for n in range(50)]
    lane.close()


def test_a_failure_stays_in_its_future():
    lane = Lane("test-lane")

    def bad():
        raise OSError("disk")

    first, second = lane.submit(bad), lane.submit(lambda: 7)
    with pytest.raises(OSError, match="disk"):
        first.result(10)
    assert second.result(10) == 7
    lane.close()


def test_closing_ends_the_thread_behind_what_is_queued():
    lane = Lane("test-lane")
    future = lane.submit(lambda: 1)
    thread = lane._thread
    assert thread.daemon
    lane.close()
    thread.join(10)
    assert not thread.is_alive() and future.result() == 1
    # A lane that had no job has no thread to end.
    Lane("idle").close()


def test_a_cancelled_job_is_left_out():
    lane, gate, done = Lane("test-lane"), threading.Event(), []
    first = lane.submit(lambda: gate.wait(10))
    second = lane.submit(lambda: done.append(2))
    assert second.cancel()
    gate.set()
    assert first.result(10) is True
    lane.submit(lambda: None).result(10)
    assert done == []
    lane.close()


def test_a_result_does_not_live_on_in_the_thread():
    class Large:
        pass

    lane = Lane("test-lane")
    future = lane.submit(Large)
    alive = weakref.ref(future.result(10))
    del future
    lane.submit(lambda: None).result(10)
    gc.collect()
    assert alive() is None
    lane.close()


def test_swallowing_marks_an_exception_as_seen():
    lane = Lane("test-lane")

    def bad():
        raise OSError("disk")

    future = lane.submit(bad)
    swallow(future)
    assert isinstance(future.exception(10), OSError)
    lane.close()
