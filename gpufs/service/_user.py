"""Limits what clients use, and what the connections of one user take together: threads, descriptors, time of the loop.

A user whose file server hangs, or who sends without an end, waits for a share of their own. Everybody else's is free.
"""

import functools
import resource
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import trio

from gpufs import threads
from gpufs.syscalls import trusted

_PRIVILEGED_SHARES: Final = 4  # of root and the mount's owner, where another user has one
_DESCRIPTORS_OF_A_MESSAGE: Final = 4  # of this process, at most: the two that came with it, and the engine's own
_DESCRIPTORS_OF_A_REGISTRATION: Final = 3  # of host memory, with those that are kept for the next daemon
_SHARE_OF_DESCRIPTORS: Final = 8  # a user may take one of so many parts


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of what clients may use. Times are in seconds.

    Root and the mount's owner have four times ``turns``, ``threads_per_user`` and ``closers_per_user`` of a user, and
    neither ``connections`` nor ``private_share`` binds them.
    """

    connections: int = 1024  # of all users together except root and the mount's owner
    connections_per_user: int = 256  # a program that has files attached keeps one
    requests: int = 16  # copies in progress on one connection, and as many requests about leases
    attachments: int = 4096  # of one connection
    # A user may have half of what the others have left of all users' together, except root and the mount's owner. Each
    # takes a page of host memory, for the next daemon.
    attachments_per_user: int = 16384
    attachments_together: int = 65536
    private_share: float = 0.5  # of a device's memory, for private copies of one user except root and the mount's owner
    threads: int = 4  # how many one connection may block on its files
    threads_per_user: int = 16
    closers_per_user: int = 4  # threads that close what came with a user's messages
    ends_per_user: int = 2  # threads that end the leases and registrations of a user's closed connections
    turns: int = 4  # requests of a user that the loop works on at a time, and threads for them
    messages: int = 512  # of a user, whose descriptors are open here
    hello: float = 15.0  # until the first message
    prepare: float = 30.0  # for a file's server to answer before a copy starts
    send: float = 10.0  # for a client to receive a result
    progress: float = 0.02  # the least time between two progress messages
    last_send: float = 1.0  # for a client to receive a result when the mount is ending
    abandoned: float = 1.0  # for a thread that still works for a copy that was cancelled before it started
    registrations: int = 2048  # of a user
    withdrawal: float = 5.0  # for what uses memory that a client withdraws
    grace: float = 5.0  # for a cancelled copy to end and its files to be closed

    def registrations_per_user(self) -> int:
        """``registrations``, or fewer where this process may have few descriptors."""
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        share = most // (_SHARE_OF_DESCRIPTORS * _DESCRIPTORS_OF_A_REGISTRATION)
        return max(min(self.registrations, share), 256)

    def messages_per_user(self) -> int:
        """``messages``, or fewer where this process may have few descriptors."""
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return max(min(self.messages, most // (_SHARE_OF_DESCRIPTORS * _DESCRIPTORS_OF_A_MESSAGE)), self.requests)


class Both:
    """Two limits at once, as a limiter of trio's threads."""

    def __init__(self, first: trio.CapacityLimiter, second: trio.CapacityLimiter) -> None:
        self._first = first
        self._second = second

    async def acquire_on_behalf_of(self, borrower: object) -> None:
        await self._first.acquire_on_behalf_of(borrower)
        try:
            await self._second.acquire_on_behalf_of(borrower)
        except BaseException:
            self._first.release_on_behalf_of(borrower)
            raise

    def release_on_behalf_of(self, borrower: object) -> None:
        self._second.release_on_behalf_of(borrower)
        self._first.release_on_behalf_of(borrower)


class User:
    """The share of one user. Only the trio thread uses it; it lives as long as something of its share is in use."""

    def __init__(self, uid: int, limits: Limits) -> None:
        shares = _PRIVILEGED_SHARES if trusted(uid) else 1
        # Requests that the loop works on at a time; the others wait, so that they do not delay other users.
        self.turns = trio.CapacityLimiter(limits.turns * shares)
        # Requests to park files that wait for programs of the user, which need turns of the above to go to sleep.
        self.waits = trio.CapacityLimiter(limits.turns * shares)
        self.threads = trio.CapacityLimiter(limits.threads_per_user * shares)  # that files of copies may block
        self.calls = trio.CapacityLimiter(limits.turns * shares)  # threads for the mount's own files and memory
        # Threads that end leases and registrations of closed connections, which must not wait for the other kinds.
        self.ends = trio.CapacityLimiter(limits.ends_per_user)
        self.closers = trio.CapacityLimiter(limits.closers_per_user * shares)  # threads for what came with messages
        self.places = trio.Semaphore(limits.messages_per_user())  # messages whose descriptors are open here
        self.pieces = trio.Semaphore(1)  # registrations whose pieces of memory are open here: so few are

    def start(self, limiter: trio.CapacityLimiter, work: Callable[[], None]) -> None:
        """Run work that raises nothing on a thread of one of the kinds above. Nobody waits for it."""
        threads.in_background(functools.partial(self._run, work), limiter)

    def _run(self, work: Callable[[], None]) -> None:
        work()  # in a method, so that a thread that hangs keeps this share in use


class Users:
    """The shares that are in use, by user. Only the trio thread uses it."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._users: weakref.WeakValueDictionary[int, User] = weakref.WeakValueDictionary()

    def of(self, uid: int) -> User:
        user = self._users.get(uid)
        if user is None:
            user = self._users[uid] = User(uid, self._limits)
        return user
