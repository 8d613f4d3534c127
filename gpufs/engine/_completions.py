"""Futures of transfers: one thread that waits for all of them, started with the first and ended when none is left."""

import atexit
import os
import selectors
import sys
import threading
from collections.abc import Callable
from typing import Final

# How long the thread stays when there is nothing to wait for, and until it tries again what found no memory: seconds.
_PATIENCE: Final = 1.0
_PAUSE: Final = 0.05

_Waiting = list[tuple[int, Callable[[], bool]]]  # descriptors, and whom to call


def report_callback() -> None:
    """Tells of an exception of a program's own callback, which must not keep others from theirs."""
    threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))


class Completions:
    """Calls back when descriptors become readable. Its thread is a daemon and holds nothing but what it waits for."""

    def __init__(self) -> None:
        self.ending = False  # the interpreter exits: the engine may be closed at any moment
        self._registered = False
        self._reset()
        # A forked child has no such thread, and its lock may have been held by another one that it has not.
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._telling = threading.Lock()  # held while a future is told and calls its callbacks
        self._lock = threading.Lock()  # guards all below
        self._waiting: _Waiting = []  # not yet seen by the thread
        self._wake = -1  # an eventfd while the thread runs

    def watch(self, fd: int, done: Callable[[], bool]) -> int:
        """Calls ``done`` on the watching thread when ``fd`` is readable, and again, for as long as it returns True.

        What is watched is a duplicate of ``fd``, the result, which is open until ``done`` has returned False. OSError
        or RuntimeError without a descriptor or a thread for it; ``done`` is not called then.
        """
        mine = os.dup(fd)
        with self._lock:
            self._waiting.append((mine, done))
            try:
                if self._wake >= 0:
                    os.eventfd_write(self._wake, 1)
                else:
                    self._start()
            except (OSError, RuntimeError, MemoryError):
                self._waiting.remove((mine, done))
                os.close(mine)
                raise
        return mine

    def _end(self) -> None:
        """When the interpreter exits, before everything of the engine is closed: no callback is called from now on."""
        self.ending = True
        if self._telling.acquire(timeout=_PATIENCE):
            self._telling.release()

    def _start(self) -> None:
        """Starts the thread; all that it needs is made here, where a failure can be told."""
        if not self._registered:
            # The last to be registered is called first, and what closes the engine has been: somebody uses it.
            atexit.register(self._end)
            self._registered = True
        wake = os.eventfd(1, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # at once: somebody waits already
        try:
            selector = selectors.EpollSelector()
            try:
                selector.register(wake, selectors.EVENT_READ)
                thread = threading.Thread(target=self._run, args=(wake, selector), name="gpufs-futures", daemon=True)
                self._wake = wake
                thread.start()
            except (OSError, RuntimeError, MemoryError):
                selector.close()
                raise
        except (OSError, RuntimeError, MemoryError):
            self._wake = -1
            os.close(wake)
            raise

    def _run(self, wake: int, selector: selectors.BaseSelector) -> None:
        late: _Waiting | None = []
        with selector:
            while late is not None:
                late = self._turn(wake, selector, late)

    def _turn(self, wake: int, selector: selectors.BaseSelector, late: _Waiting) -> _Waiting | None:
        """Waits for what is watched, and tells; the thread keeps nothing of it afterwards.

        ``late``, and what it returns: those that the kernel had no memory to watch. None: there is nothing to do.
        """
        idle = len(selector.get_map()) == 1
        ready = selector.select(_PAUSE if late else _PATIENCE if idle else None)
        with self._lock:
            added, self._waiting = late + self._waiting, []
            if idle and not ready and not added:
                self._wake = -1
                os.close(wake)
                return None
        late = []
        for fd, done in added:
            try:
                selector.register(fd, selectors.EVENT_READ, done)
            except (OSError, MemoryError):
                late.append((fd, done))
        for key, _ in ready:
            if key.fd == wake:
                os.eventfd_read(wake)
                continue
            again = False
            try:
                with self._telling:
                    again = key.data()
            except BaseException:  # noqa: BLE001 - a program's own callback
                report_callback()
            if not again:
                selector.unregister(key.fd)
                os.close(key.fd)
        return late


completions: Final = Completions()
