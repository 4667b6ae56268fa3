"""Work spread over the cores, with cancellation, and no exception lost.

One pool of threads per process does it, as large as the number of usable cores; its threads
keep their compression contexts between calls. Arguments are made on the calling thread,
one at a time as room appears, so memory stays bounded and whatever is tied to that
thread stays on it. A function that runs in the pool must not spread work itself.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing
from itertools import islice
from typing import TypeVar

from kvstore.errors import fail

__all__ = [
    "Stop", "map_parallel", "run_parallel", "start_waiting", "wait_for", "wait_parallel", "worker_count",
]  # fmt: skip

T = TypeVar("T")
R = TypeVar("R")

_lock = threading.Lock()
_pools: dict[tuple[int, str], ThreadPoolExecutor] = {}
_WAITERS = 8


def worker_count() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Stop:
    """Tells work to end early: because the caller asked, or because another piece failed."""

    def __init__(self, cancelled: Callable[[], bool] | None = None) -> None:
        """Ask ``cancelled``, where given, at every checkpoint; it is called from several threads."""
        self._cancelled = cancelled
        self._event = threading.Event()

    def set(self) -> None:
        """End all work at its next checkpoint."""
        self._event.set()

    def checkpoint(self) -> None:
        """Raise CancelledError (CANCELLED) if the work is to end."""
        if self._event.is_set() or (self._cancelled is not None and self._cancelled()):
            self._event.set()
            raise fail("CANCELLED", "the operation was stopped")


def run_parallel(
    function: Callable[[T], R], items: Iterable[T], *, stop: Stop | None = None, window: int | None = None,
    alone: bool = False,
) -> list[R]:  # fmt: skip
    """The results of ``function`` over ``items``, in order. Raises as :func:`map_parallel`."""
    with closing(map_parallel(function, items, stop=stop, window=window, alone=alone)) as results:
        return list(results)


def map_parallel(
    function: Callable[[T], R],
    items: Iterable[T],
    *,
    stop: Stop | None = None,
    window: int | None = None,
    ordered: bool = True,
    alone: bool = False,
) -> Generator[R, None, None]:
    """Yield the results of ``function`` over ``items``; close the iterator to end early.

    A single item is worked on by the caller itself: handing it over would only take time.
    However it ends, no piece of the work is still running when control is back at the caller.

    Args:
        stop: Set as soon as one piece fails; the function looks at it between its steps.
        window: Pieces begun and not yet yielded at any time; a few more than there are workers by default.
        ordered: Yield in the order of the items, else as they are done.
        alone: Let the caller do everything: for work of less than a millisecond or two.

    Raises:
        BaseException: what a piece raised first. Errors of others that had already begun are notes on it.
    """
    stop = stop or Stop()
    window = window or worker_count() + 2
    source = iter(items)
    pending: deque[Future[R]] = deque()
    try:
        for item in source if alone else ():
            stop.checkpoint()
            yield function(item)
        ahead = deque(islice(source, 2))
        if len(ahead) == 1:
            stop.checkpoint()
            yield function(ahead.popleft())
        while ahead:
            stop.checkpoint()
            if len(pending) >= window:
                yield _take(pending, ordered=ordered)
            pending.append(_submit(stop, function, ahead.popleft()))
            ahead.extend(islice(source, 0 if ahead else 1))
        while pending:
            yield _take(pending, ordered=ordered)
    except BaseException as error:
        stop.set()
        _drain(pending, error)
        raise


def wait_parallel(function: Callable[[T], object], items: Iterable[T]) -> None:
    """Call ``function`` for every item, many at a time: for work that waits for a device, not for a core.

    Flushes that wait together are one commit to a journalling file system. Raises the first error when all are done.
    """
    todo = list(items)
    if len(todo) < 2:
        for item in todo:
            function(item)
        return
    wait_for([start_waiting(function, item) for item in todo])


def start_waiting(function: Callable[[T], object], item: T) -> Future[object]:
    """Begin a piece of such work; give what comes back to :func:`wait_for`."""
    return _pool("waiting", _WAITERS).submit(function, item)


def wait_for(futures: Collection[Future[object]]) -> None:
    """Wait until all are done, then raise the first error."""
    wait(futures)
    for future in futures:
        future.result()


def _submit(stop: Stop, function: Callable[[T], R], item: T) -> Future[R]:
    def work() -> R:
        stop.checkpoint()
        return function(item)

    return _pool("working", worker_count()).submit(work)


def _take(pending: deque[Future[R]], *, ordered: bool) -> R:
    """The next result; a failure anywhere surfaces at once, not when its turn comes."""
    while True:
        done = [future for future in pending if future.done()]
        failed = next((future for future in done if future.exception() is not None), None)
        chosen = failed or (done[0] if done and not ordered else pending[0] if pending[0].done() else None)
        if chosen is not None:
            pending.remove(chosen)
            return chosen.result()
        wait([future for future in pending if not future.done()], return_when=FIRST_COMPLETED)


def _drain(pending: deque[Future[R]], error: BaseException) -> None:
    """Cancel what has not begun and wait for the rest."""
    for future in pending:
        future.cancel()
    for future in pending:
        if future.cancelled():
            continue
        other = future.exception()
        if other is not None and getattr(other, "code", None) != "CANCELLED":
            error.add_note(f"also failed: {type(other).__name__}: {other}")


def _pool(purpose: str, size: int) -> ThreadPoolExecutor:
    """This process's pool for a purpose; a forked child has no threads and makes its own."""
    with _lock:
        if _pools and next(iter(_pools))[0] != os.getpid():
            _pools.clear()
        key = os.getpid(), purpose
        if key not in _pools:
            _pools[key] = ThreadPoolExecutor(size, thread_name_prefix=f"kvstore-{purpose}")
        return _pools[key]


if hasattr(os, "register_at_fork"):
    # A child must not inherit the lock in a held state.
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
