"""Calls back when work of the engine has ended, on one thread that runs while something is watched."""

import atexit
import os
import select
import sys
import threading
from collections.abc import Callable
from typing import Final

_PATIENCE: Final = 1.0  # seconds that the thread stays when nothing is watched


def report_callback() -> None:
    """Report an exception of a program's callback, which must not keep others from being called."""
    threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))


class Completions:
    """Calls back when descriptors become readable, on a daemon thread."""

    def __init__(self) -> None:
        self.ending = False  # the interpreter exits: the engine may be closed at any moment
        self._registered = False
        self._reset()
        # A forked child does not have the thread, and the lock may be held by another thread that it does not have.
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._calling = threading.Lock()  # held while a callback runs
        self._lock = threading.Lock()  # guards all below
        self._watched: dict[int, Callable[[], bool]] = {}
        self._epoll: select.epoll | None = None  # while the thread runs

    def watch(self, fd: int, done: Callable[[], bool]) -> int:
        """Call ``done`` when ``fd`` is readable, and again as long as it returns True.

        Returns
        -------
        int
            The duplicate of ``fd`` that is watched. It is closed when ``done`` has returned False.

        Raises
        ------
        OSError, RuntimeError
            There is no descriptor or thread for it. ``done`` is not called then.
        """
        mine = os.dup(fd)
        try:
            with self._lock:
                epoll = self._epoll or self._start()
                epoll.register(mine, select.EPOLLIN)
                self._watched[mine] = done
        except BaseException:
            os.close(mine)
            raise
        return mine

    def _end(self) -> None:
        """When the interpreter exits, before the engines are closed: no callback is called from now on."""
        self.ending = True
        if self._calling.acquire(timeout=_PATIENCE):
            self._calling.release()

    def _start(self) -> select.epoll:
        if not self._registered:
            # The function that was registered last is called first: before the one that closes the engines.
            atexit.register(self._end)
            self._registered = True
        epoll = select.epoll()
        threading.Thread(target=self._run, args=(epoll,), name="gpufs-futures", daemon=True).start()
        self._epoll = epoll
        return epoll

    def _run(self, epoll: select.epoll) -> None:
        with epoll:
            while True:
                with self._lock:
                    idle = not self._watched
                ready = epoll.poll(_PATIENCE if idle else None)
                with self._lock:
                    if not self._watched:
                        self._epoll = None
                        return
                for fd, _ in ready:
                    self._call(epoll, fd)

    def _call(self, epoll: select.epoll, fd: int) -> None:
        again = False
        try:
            with self._calling:
                again = self._watched[fd]()
        except BaseException:  # noqa: BLE001 - a program's own callback
            report_callback()
        if not again:
            with self._lock:
                del self._watched[fd]
            epoll.unregister(fd)
            os.close(fd)


completions: Final = Completions()
