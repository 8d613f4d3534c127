"""What a copy or a lease holds: descriptors and objects of the engine, each closed exactly once and never while in use.

Using and closing them can block for as long as a file's server likes, so it happens on threads that the loop may have
abandoned. Such a thread must not find its descriptor's number closed, and reused, by others.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol, TypeVar


class Closable(Protocol):
    """Something that must be closed once."""

    def close(self) -> None: ...


T = TypeVar("T", bound=Closable)


class Abandoned(Exception):
    """The copy is over; a thread that still works for it ends with this."""


class Holdings:
    """What one copy or lease holds. Any thread may call; use() and drop() may block while they close things."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all below; nothing is closed under it
        self._closers: list[Callable[[], None]] = []
        self._users = 0
        self._dropped = False
        self._then: Callable[[], None] | None = None

    def hold_descriptor(self, fd: int) -> "Descriptor":
        """Takes over an open descriptor."""
        return self.hold(Descriptor(fd))

    def hold(self, item: T) -> T:
        """Takes over an object. Its close() runs at the end, in reverse order."""
        with self._lock:
            self._closers.append(item.close)
        return item

    def release(self, item: Closable) -> None:
        """Forgets an object that has been closed. Nothing happens once everything has been dropped."""
        with self._lock, suppress(ValueError):
            self._closers.remove(item.close)

    @contextmanager
    def use(self) -> Iterator[None]:
        """Nothing is closed inside of this context. Abandoned if everything has been dropped."""
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
        """Whether a thread is using what is held."""
        with self._lock:
            return self._users > 0

    def drop(self, then: Callable[[], None]) -> None:
        """Closes everything, now or when the last use ends, and then calls ``then``, on any thread."""
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
                except OSError:
                    pass  # the descriptor is closed all the same; the result has reported what became of the data
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
