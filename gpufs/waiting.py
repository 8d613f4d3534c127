"""Threads for calls that may never return, and waits for threads.

Neither a copy that is cancelled nor the end of the program waits for such a call, and a signal ends each wait.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from queue import SimpleQueue
from typing import Any, Final, TypeVar

from gpufs.syscalls import os_error, start_thread

# Time for calls that are in progress when a copy is cancelled. A call whose server is silent keeps its thread longer.
END_SECONDS: Final = 1.0
# Each wait is as short as this: the main thread does not notice a signal that comes just before it begins to wait.
_POLL_SECONDS: Final = 0.1

T = TypeVar("T")


def start(call: Callable[..., T], *arguments: Any) -> Future[T]:
    """Call a function on a thread of its own. OSError EAGAIN if none can be started."""
    future: Future[T] = Future()
    start_thread(_run, future, call, arguments)
    return future


def result(future: Future[T], cancelled: Callable[[], bool], tick: Callable[[], None] | None = None) -> T:
    """Return what a call returns. Calls ``tick`` about ten times a second. OSError ECANCELED once ``cancelled``."""
    while not wait([future], _POLL_SECONDS).done:
        if cancelled():
            raise os_error(errno.ECANCELED)
        if tick is not None:
            tick()
    return future.result()


def results(futures: Sequence[Future[T]]) -> list[T]:
    """Return what calls return, in their order. The first one that fails raises."""
    pending = set(futures)
    while pending:
        done, pending = wait(pending, _POLL_SECONDS, FIRST_EXCEPTION)
        for future in done:
            future.result()
    return [future.result() for future in futures]


class Workers:
    """A few threads that run many calls, as concurrent.futures has them. They start when they are needed."""

    def __init__(self, count: int) -> None:
        self._unstarted = self._count = count
        self._lock = threading.Lock()  # guards _unstarted
        self._calls: SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None] = SimpleQueue()
        self._closed = False

    def submit(self, call: Callable[..., T], *arguments: Any) -> Future[T]:
        """Call a function on one of the threads. OSError EAGAIN if none can be started; a few are enough."""
        with self._lock:
            if self._unstarted:
                try:
                    start_thread(self._work)
                    self._unstarted -= 1
                except OSError:
                    if self._unstarted == self._count:
                        raise
        future: Future[T] = Future()
        self._calls.put((future, call, arguments))
        return future

    def close(self) -> None:
        """End the threads once their calls have returned."""
        self._closed = True
        self._calls.put(None)

    def _work(self) -> None:
        while not self._closed and (call := self._calls.get()) is not None:
            _run(*call)
        self._calls.put(None)  # for the next thread


def _run(future: Future[Any], call: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        value = call(*arguments)
    except BaseException as error:  # noqa: BLE001 - raised by result()
        future.set_exception(error)
    else:
        future.set_result(value)
