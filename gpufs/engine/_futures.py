"""The futures of operations, whose results a thread sets."""

import atexit
import functools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import suppress
from errno import ECANCELED
from typing import Any, Final

from gpufs.engine._binding import EngineError
from gpufs.engine._engine import Engine
from gpufs.engine._native import lib
from gpufs.engine._operations import Operation, OperationQueue
from gpufs.engine._transfer import error_of

_THREAD_STAYS: Final = 1.0  # seconds, when there is nothing to collect
_EXIT_SECONDS: Final = 1.0  # seconds that the exit waits for a callback
# How long a task that was cancelled waits until its memory is no longer in use: seconds.
_MEMORY_SECONDS: Final = 10.0


class OperationFuture(Future[int]):
    """The outcome of an operation: the bytes moved, or the TransferError that it raises.

    ``await`` it in trio or asyncio, or wait with :mod:`concurrent.futures`. If a task that awaits it in trio is
    cancelled, so is the operation, and the task continues once the memory is no longer in use, or after 10 s if a
    device is stalled; asyncio does not wait for that. What the operation needs lives until it is over.

    cancel() asks the operation to stop. If its stream has not reached it, it ends at once and moves nothing. Otherwise
    it ends when the device has finished its current work, which may be never if the device is stalled. result() raises
    TimeoutError after its timeout, and can be interrupted.

    Parameters
    ----------
    queue
        The handle of what the operation is in: programs get futures from :meth:`BackingFile.read_async`.
    """

    def __init__(self, queue: int) -> None:
        super().__init__()
        self._queue = queue  # its handle
        self._id = 0  # of the operation, once it is submitted

    def cancel(self) -> bool:
        """Ask the operation to stop. Returns False if it has ended already."""
        if self.done():
            return self.cancelled()
        error = lib.gpufs_queue_cancel(self._queue, self._id).error if self._id else 0
        return error == 0 or self.cancelled()

    def add_done_callback(self, fn: Callable[[Future[int]], object]) -> None:
        """Call ``fn`` with the future once it is done, except while the interpreter exits and closes engines."""

        def call(future: Future[int]) -> None:
            if not _ending.is_set():
                fn(future)

        super().add_done_callback(call)

    def __await__(self) -> Generator[Any, Any, int]:
        # A program that awaits in trio has imported it.
        trio = sys.modules.get("trio")
        if trio is not None and trio.lowlevel.in_trio_task():
            return self._in_trio().__await__()
        import asyncio

        return asyncio.wrap_future(self).__await__()

    async def _in_trio(self) -> int:
        import trio

        token = trio.lowlevel.current_trio_token()
        over = trio.Event()

        def wake(_: object) -> None:
            with suppress(trio.RunFinishedError):
                token.run_sync_soon(over.set)

        self.add_done_callback(wake)
        try:
            await over.wait()
        except (trio.Cancelled, KeyboardInterrupt) as stopped:
            self.cancel()
            with trio.CancelScope(deadline=trio.current_time() + _MEMORY_SECONDS, shield=True):
                await over.wait()  # until the memory is free
            if isinstance(stopped, KeyboardInterrupt) or not self.done() or self.cancelled():
                raise
        return self.result()

    def _over(self, outcome: int | Exception | None) -> None:
        """Set the outcome with which the operation has ended; None: it was cancelled."""
        try:
            if outcome is None:
                super().cancel()
                self.set_running_or_notify_cancel()
            elif isinstance(outcome, Exception):
                self.set_exception(outcome)
            else:
                self.set_result(outcome)
        except BaseException:  # noqa: BLE001 - a program's own callback; the other futures still wait
            threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))


_ending: Final = threading.Event()  # the interpreter exits: the engine may be closed at any moment
_calling: Final = [threading.Lock()]  # held while callbacks run


def set_outcomes(over: list[tuple[OperationFuture, int | Exception | None]]) -> None:
    """Set the results of futures, which calls their callbacks."""
    with _calling[0]:
        for future, outcome in over:
            future._over(outcome)


@functools.cache
def watch_the_exit() -> None:
    """Keep callbacks from being called while the interpreter exits. Once there is an engine."""
    # The function that was registered last is called first: before the one that closes the engines.
    atexit.register(_end)


def _end() -> None:
    _ending.set()
    if _calling[0].acquire(timeout=_EXIT_SECONDS):
        _calling[0].release()


def _forked() -> None:
    _calling[0] = threading.Lock()  # another thread, which the child does not have, may hold it


os.register_at_fork(after_in_child=_forked)


# ---- the thread that sets results ----


class _Futures(OperationQueue):
    """All operations of an engine that have futures. The queue is closed with the engine.

    A thread sets the results. It runs while there are futures, and a second longer.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine, 0, self._outcome)
        self._changed = threading.Condition(self.lock)  # guards all below, too
        self._starting = 0  # futures whose operation is not under way yet
        self._running = False

    @staticmethod
    def _outcome(future: OperationFuture, ended: Any) -> tuple[OperationFuture, int | Exception | None]:
        if ended.outcome.error == ECANCELED:
            return future, None
        return future, error_of(ended.outcome) or int(ended.outcome.prefix)

    def start(self, operation: Operation) -> OperationFuture:
        future = OperationFuture(self.handle)
        with self._changed:
            if not self._running:  # without a thread nothing is submitted
                watch_the_exit()
                threading.Thread(target=self._run, name="gpufs-futures", daemon=True).start()
                self._running = True
            self._starting += 1
        try:
            (future._id,) = self.submit([(operation, future)])
        finally:
            with self._changed:
                self._starting -= 1
                self._changed.notify()
        return future

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self.under_way and not self._changed.wait_for(lambda: self.under_way, _THREAD_STAYS):
                    if self._starting:
                        continue
                    self._running = False
                    return
            try:
                none = not self.collect(1, _THREAD_STAYS)
            except EngineError:  # the engine was closed over them
                with self.lock:
                    lost, self.under_way = list(self.under_way.values()), {}
                set_outcomes([(future, None) for future, _ in lost])
                continue
            if none:
                time.sleep(0.001)  # the only one is not in the engine's queue yet
            with self.lock:
                over, self.ended = self.ended, []
            set_outcomes(over)
            over.clear()


_futures: Final[weakref.WeakKeyDictionary[Engine, _Futures]] = weakref.WeakKeyDictionary()
_futures_lock: Final = threading.Lock()


def start(operation: Operation) -> OperationFuture:
    """Submit an operation, and return its future."""
    engine = operation.file.engine
    with _futures_lock:
        futures = _futures.get(engine)
        if futures is None:
            futures = _futures[engine] = _Futures(engine)
    return futures.start(operation)
