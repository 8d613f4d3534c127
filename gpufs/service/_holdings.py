"""What a copy or a lease holds: descriptors and objects of the engine, each closed exactly once and never while in use.

Using and closing them can block for as long as a file's server likes, so it happens on threads that the loop may have
abandoned. Such a thread must not find its descriptor's number closed, and reused, by others.
"""

import contextlib
import errno
import os
import threading
from collections.abc import Callable
from typing import Protocol, TypeVar

import trio

from gpufs import threads


class Closable(Protocol):
    """Something that must be closed once."""

    def close(self) -> None: ...


T = TypeVar("T")
Held = TypeVar("Held", bound=Closable)


class Holdings:
    """What one copy or lease holds. One thread at a time uses it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # held by the thread that uses or closes it
        self._closers: list[Callable[[], None]] = []
        self._closed = False

    def hold(self, item: Held) -> Held:
        """Takes over an object. Its close() runs at the end, in reverse order."""
        self._closers.append(item.close)
        return item

    def on_close(self, function: Callable[[], None]) -> None:
        """Calls a function at the end, as for an object."""
        self._closers.append(function)

    def use(self, work: Callable[[], T]) -> T:
        """On a thread: runs work, during which nothing is closed. OSError ECANCELED if everything is closed."""
        with self._lock:
            if self._closed:
                raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))
            return work()

    @property
    def in_use(self) -> bool:
        """Whether a thread is using what is held."""
        return self._lock.locked()

    async def close(self) -> None:
        """Closes everything on a thread once no other one uses it. Cancellation ends only the wait for that."""
        closed = trio.Event()
        token = trio.lowlevel.current_trio_token()

        def work() -> None:
            with self._lock:
                self._closed = True
                while self._closers:
                    with contextlib.suppress(OSError):  # the descriptor is closed all the same
                        self._closers.pop()()
            with contextlib.suppress(trio.RunFinishedError):
                token.run_sync_soon(closed.set)

        threads.in_background(work)
        await closed.wait()


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
