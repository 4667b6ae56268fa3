"""Work spread over the cores: order, memory, cancellation, and every exception."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from kvstore.errors import CancelledError
from kvstore.store.parallel import Stop, map_parallel, run_parallel, wait_parallel


def test_results_come_in_the_order_of_the_items() -> None:
    gate = threading.Event()

    def work(n: int) -> int:
        if n == 0:
            gate.wait(10)
        elif n == 1:
            gate.set()
        return n * n

    assert run_parallel(work, range(50), window=4) == [n * n for n in range(50)]


def test_without_order_nothing_waits_for_a_slow_one() -> None:
    gate = threading.Event()

    def work(n: int) -> int:
        if n == 0:
            gate.wait(10)
        return n

    with closing(map_parallel(work, range(2), ordered=False)) as results:
        assert next(results) == 1
        gate.set()
        assert next(results) == 0


def test_items_are_made_on_the_calling_thread_and_only_as_room_appears() -> None:
    made: list[threading.Thread] = []

    def items() -> Iterator[int]:
        for n in range(20):
            made.append(threading.current_thread())
            yield n

    with closing(map_parallel(lambda n: n, items(), window=3)) as results:
        for number, _ in enumerate(results):
            assert len(made) <= number + 4
    assert set(made) == {threading.current_thread()}


def test_the_first_failure_stops_the_rest_and_the_others_are_noted() -> None:
    both = threading.Barrier(2, timeout=10)
    begun: list[int] = []

    def work(n: int) -> int:
        begun.append(n)
        if n < 2:
            both.wait()
            raise ValueError(f"piece {n}")
        return n

    with pytest.raises(ValueError, match="piece") as caught:
        run_parallel(work, range(1000), window=2)
    assert len(begun) < 1000
    notes = getattr(caught.value, "__notes__", [])
    assert {f"piece {n}" for n in (0, 1) if str(caught.value) == f"piece {n}" or f"piece {n}" in str(notes)} == {
        "piece 0", "piece 1"
    }  # fmt: skip


def test_a_failing_iterator_of_items_ends_the_work() -> None:
    running = threading.Event()

    def items() -> Iterator[int]:
        yield 1
        running.wait(10)
        raise LookupError("items")

    def work(n: int) -> int:
        running.set()
        return n

    with pytest.raises(LookupError, match="items"):
        run_parallel(work, items())


def test_nothing_runs_any_more_when_the_caller_goes_on() -> None:
    stop, inside = Stop(), threading.Semaphore(0)
    ended: list[int] = []

    def work(n: int) -> int:
        inside.release()
        try:
            while n:
                stop.checkpoint()
        finally:
            ended.append(n)
        return n

    with closing(map_parallel(work, [0, 1], stop=stop, window=2)) as results:
        assert next(results) == 0
        inside.acquire(timeout=10)
        inside.acquire(timeout=10)
    assert sorted(ended) == [0, 1]


def test_cancellation() -> None:
    asked = [False]

    def work(n: int) -> int:
        asked[0] = True
        return n

    with pytest.raises(CancelledError):
        run_parallel(work, range(1000), stop=Stop(lambda: asked[0]))


def test_waiting_work_runs_at_the_same_time_and_the_first_error_is_raised() -> None:
    together = threading.Barrier(3, timeout=10)
    wait_parallel(lambda _: together.wait(), range(3))
    done: list[int] = []

    def work(n: int) -> None:
        done.append(n)
        if n == 1:
            raise OSError("one")

    with pytest.raises(OSError, match="one"):
        wait_parallel(work, range(3))
    assert sorted(done) == [0, 1, 2]


def test_a_single_piece_is_done_by_the_caller() -> None:
    ran = run_parallel(lambda n: (n, threading.current_thread()), [7])
    assert ran == [(7, threading.current_thread())]
    others = run_parallel(lambda n: threading.current_thread(), [7, 8])
    assert threading.current_thread() not in others
    stop = Stop()
    with pytest.raises(ValueError, match="one"):
        run_parallel(lambda n: int("one"), [7], stop=stop)
    with pytest.raises(CancelledError):
        stop.checkpoint()


def test_work_that_is_over_in_a_moment_is_done_by_the_caller() -> None:
    stop = Stop()
    with closing(map_parallel(lambda n: (n, threading.current_thread()), range(9), stop=stop, alone=True)) as results:
        assert [next(results) for _ in range(3)] == [(n, threading.current_thread()) for n in range(3)]
        stop.set()
        with pytest.raises(CancelledError):
            next(results)
    assert run_parallel(lambda n: n * n, range(9), alone=True) == [n * n for n in range(9)]
