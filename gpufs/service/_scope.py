"""The scope of a request: owns what it takes and what is opened for it. Each is closed once, and never while in use.

Using and closing descriptors can block for as long as a file's server likes, so it happens on threads that the loop may
have abandoned. Such a thread must not find its descriptor's number closed, and reused, by others.
"""

import contextlib
import errno
import functools
import os
import threading
from collections.abc import Callable
from typing import Protocol, TypeVar

import trio

from gpufs import threads
from gpufs.service._user import User
from gpufs.syscalls import os_error

T = TypeVar("T")


class Closable(Protocol):
    """Something that must be closed once."""

    def close(self) -> None: ...


Held = TypeVar("Held", bound=Closable)


class Descriptor:
    """An open descriptor that came with a message and is closed once."""

    __slots__ = ("_on_close", "fd")

    def __init__(self, fd: int, on_close: Callable[[], None]) -> None:
        self.fd = fd
        self._on_close: Callable[[], None] | None = on_close  # None once it is closed

    def close(self) -> None:
        """Close it; a second call does nothing."""
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            try:
                os.close(self.fd)
            finally:
                on_close()


class RequestScope:
    """The resources that one message of a client has taken, until its copy, lease or answer ends.

    The number of a user's messages whose descriptors are open here is limited: closing the last descriptor of a
    message frees its place. One thread at a time uses what is held.
    """

    def __init__(self, user: User, may_hang: trio.CapacityLimiter) -> None:
        """``may_hang``: limits the threads of the connection that files of the client may block."""
        self.descriptors: list[Descriptor] = []  # that came with the message, in order
        self._user = user
        self._may_hang = may_hang
        self._token = trio.lowlevel.current_trio_token()
        self._place_lock = threading.Lock()
        self._in_place = 0  # open descriptors, and the message until it is received
        self._lock = threading.Lock()  # held by the thread that uses or closes it
        self._closers: list[Callable[[], None]] = []
        self._ending = False

    async def take_place(self) -> None:
        """Wait until this user may have one more message whose descriptors are open."""
        await self._user.places.acquire()
        self._in_place = 1

    async def take_turn(self, turn: trio.Semaphore) -> None:
        """Wait for a turn, which ends after what is taken from now on has been closed."""
        await turn.acquire()
        self.on_close(functools.partial(self._run_soon, turn.release))

    def _run_soon(self, function: Callable[[], object]) -> None:
        """Have the loop call a function. Any thread may call."""
        with contextlib.suppress(trio.RunFinishedError):
            self._token.run_sync_soon(function)

    def take(self, numbers: list[int]) -> None:
        """Take over the descriptors that came with the message."""
        with self._place_lock:
            self._in_place += len(numbers)
        self.descriptors = [self.hold(Descriptor(number, self.leave_place)) for number in numbers]

    def leave_place(self) -> None:
        """A descriptor is closed, or the message is received. Any thread may call."""
        with self._place_lock:
            self._in_place -= 1
            if self._in_place:
                return
        self._run_soon(self._user.places.release)

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
                    raise os_error(errno.ECANCELED)
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
        self._closers.insert(0, functools.partial(self._run_soon, closed.set))  # the last one
        self.end()
        start(self.close)
        await closed.wait()

    async def in_thread(self, work: Callable[[], T], *, may_hang: bool = False) -> T:
        """Run work that may block on one of the user's threads, with what is held in use.

        ``may_hang``: as a file of the client's may. Cancellation abandons the thread. OSError ECANCELED if everything
        is closed by then.
        """
        limiter = self._may_hang if may_hang else self._user.calls
        return await threads.run(functools.partial(self.use, work), abandon_on_cancel=True, limiter=limiter)

    def discard(self) -> None:
        """Close everything on one of the user's threads: that calls a file's server, which may be this process."""
        self.end()
        if self._closers:
            self._user.start(self._user.closers, self.close)
