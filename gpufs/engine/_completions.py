"""Futures of transfers: one thread that waits for all of them, started with the first and ended when none is left."""

import os
import selectors
import sys
import threading
from collections.abc import Callable
from typing import Final

# How long the thread stays when there is nothing to wait for, in seconds.
_PATIENCE: Final = 1.0


class Completions:
    """Calls back when descriptors become readable. Its thread is a daemon and holds nothing but what it waits for."""

    def __init__(self) -> None:
        self._reset()
        # A forked child has no such thread, and its lock may have been held by another one that it has not.
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._lock = threading.Lock()  # guards all below
        self._waiting: list[tuple[int, Callable[[], None]]] = []  # not yet seen by the thread
        self._wake = -1  # an eventfd while the thread runs

    def watch(self, fd: int, done: Callable[[], None]) -> None:
        """Calls ``done`` once, on the watching thread, when ``fd`` is readable. A duplicate of ``fd`` is watched."""
        mine = os.dup(fd)
        with self._lock:
            self._waiting.append((mine, done))
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)
                return
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            try:
                threading.Thread(target=self._run, args=(self._wake,), name="gpufs-futures", daemon=True).start()
            except RuntimeError:
                os.close(self._wake)
                self._wake = -1
                self._waiting.remove((mine, done))
                os.close(mine)
                raise

    def _run(self, wake: int) -> None:
        with selectors.EpollSelector() as selector:
            selector.register(wake, selectors.EVENT_READ)
            while True:
                ready = selector.select(None if len(selector.get_map()) > 1 else _PATIENCE)
                with self._lock:
                    added, self._waiting = self._waiting, []
                    if not ready and not added and len(selector.get_map()) == 1:
                        self._wake = -1
                        os.close(wake)
                        return
                for fd, done in added:
                    selector.register(fd, selectors.EVENT_READ, done)
                for key, _ in ready:
                    if key.fd == wake:
                        os.eventfd_read(wake)
                        continue
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    try:
                        key.data()
                    except BaseException:  # noqa: BLE001 - a program's own callback; the other futures still wait
                        threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))


completions: Final = Completions()
