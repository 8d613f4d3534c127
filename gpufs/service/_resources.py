"""Owns the descriptors and objects of a copy or a lease: each is closed exactly once and never while in use.

Using and closing them can block for as long as a file's server likes, so it happens on threads that the loop may have
abandoned. Such a thread must not find its descriptor's number closed, and reused, by others.
"""

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol, TypeVar

import trio

from gpufs.service._user import Closable, Place

T = TypeVar("T")
Held = TypeVar("Held", bound=Closable)


class Keeping(Protocol):
    """The keeper of descriptors for the next daemon."""

    def hold(self, descriptors: Mapping[int, int]) -> None: ...

    def drop(self, keys: Iterable[int]) -> None: ...


class Resources:
    """The resources of one copy or lease. One thread at a time uses them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # held by the thread that uses or closes it
        self._closers: list[Callable[[], None]] = []
        self._ending = False

    def hold(self, item: Held) -> Held:
        """Take over an object. Its close() runs at the end, in reverse order."""
        self._closers.append(item.close)
        return item

    def on_close(self, function: Callable[[], None]) -> None:
        """Call a function at the end, as for an object."""
        self._closers.append(function)

    def use(self, work: Callable[[], T]) -> T:
        """Runs work on a thread; nothing is closed during it. OSError ECANCELED if everything is closed."""
        try:
            with self._lock:
                if self._ending:
                    raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))
                return work()
        finally:
            if self._ending:
                self.close()

    @property
    def in_use(self) -> bool:
        """Whether a thread is using what is held."""
        return self._lock.locked()

    def end(self) -> None:
        """Nobody may use it any more. A thread that still does closes it when it is done."""
        self._ending = True

    def close(self) -> None:
        """Closes everything, on a thread and after end(); a thread that still uses it closes it instead."""
        while self._closers and self._lock.acquire(blocking=False):
            try:
                while self._closers:
                    with contextlib.suppress(OSError):  # the descriptor is closed all the same
                        self._closers.pop()()
            finally:
                self._lock.release()  # then looks again: another thread may have found it in use just before

    async def closed(self, start: Callable[[Callable[[], None]], None]) -> None:
        """Close everything by a job that ``start`` starts. Cancellation ends only the wait for that."""
        closed = trio.Event()
        token = trio.lowlevel.current_trio_token()

        def notify() -> None:
            with contextlib.suppress(trio.RunFinishedError):
                token.run_sync_soon(closed.set)

        self._closers.insert(0, notify)  # the last one
        self.end()
        start(self.close)
        await closed.wait()


class Descriptor:
    """An open descriptor that came with a message and is closed once."""

    __slots__ = ("_open", "_place", "fd")

    def __init__(self, fd: int, place: Place) -> None:
        self.fd = fd
        self._open = True
        self._place = place

    def close(self) -> None:
        """Close it; a second call does nothing."""
        if self._open:
            self._open = False
            try:
                os.close(self.fd)
            finally:
                self._place.leave()
