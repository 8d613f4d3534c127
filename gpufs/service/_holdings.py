"""What a request holds: descriptors and objects of the engine, given back exactly once, never while in use.

Closing and everything done with them can block for as long as a file's server likes, so it happens on threads that the
loop may have stopped waiting for. Such a thread must not see its descriptor's number closed, and reused, by others.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from gpufs.service._backend import Closable

T = TypeVar("T", bound=Closable)


class Abandoned(Exception):
    """The request is over; the thread that still worked for it ends with this."""


class Holdings:
    """The things of one request. Any thread may call; use() and drop() may block on the closing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all below; nothing is closed under it
        self._closers: list[Callable[[], None]] = []
        self._users = 0
        self._dropped = False
        self._then: Callable[[], None] | None = None

    def hold_descriptor(self, fd: int) -> "Descriptor":
        """Takes over an open descriptor."""
        descriptor = Descriptor(fd)
        return self.hold(descriptor)

    def hold(self, item: T) -> T:
        """Takes over an object; its close() runs at the end, the youngest object's first."""
        with self._lock:
            self._closers.append(item.close)
        return item

    @contextmanager
    def use(self) -> Iterator[None]:
        """While this runs nothing is given back. Abandoned if all has been dropped before."""
        with self._lock:
            if self._dropped:
                raise Abandoned
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
            self._close_if_over()

    @property
    def in_use(self) -> bool:
        """Whether a thread works with what is held at this moment."""
        with self._lock:
            return self._users > 0

    def drop(self, then: Callable[[], None]) -> None:
        """Gives everything back, now or when the last user has gone; calls ``then`` after that, on whatever thread."""
        with self._lock:
            self._dropped = True
            self._then = then
        self._close_if_over()

    def _close_if_over(self) -> None:
        with self._lock:
            if not self._dropped or self._users:
                return
            closers, self._closers = self._closers, []
            then, self._then = self._then, None
        try:
            for close in reversed(closers):
                try:
                    close()
                except (OSError, MemoryError):
                    pass  # a descriptor is gone whatever close says; the data's fate was the result's to tell
        finally:
            if then is not None:
                then()


class Descriptor:
    """An open descriptor that is closed once."""

    __slots__ = ("_open", "fd")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._open = True

    def close(self) -> None:
        """Closes it; a second call does nothing."""
        if self._open:
            self._open = False
            os.close(self.fd)
