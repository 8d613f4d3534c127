"""System calls on the host's files: on threads, as the caller, and within each user's limits.

A server that hangs blocks only its user's calls on its files, and unmounting does not wait for it.
"""

import contextlib
import functools
import os
import weakref
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from errno import EBUSY, EMFILE
from typing import Any, Final, TypeVar

import trio

from gpufs import threads
from gpufs.fs.backing.inodes import BackingNode, Found, HostInodes, look_up
from gpufs.fs.requests import Caller
from gpufs.syscalls import os_error, set_thread_groups, setfsgid, setfsuid, trusted

T = TypeVar("T")

_THREADS: Final = 32  # for the calls of one user on one file system
# Calls that may be in progress or wait for a thread: of all users, and of one that is not root or the mount's owner.
# The connection serves more requests at a time, so calls on the host never use up its tasks.
_CALLS: Final = 8192
_CALLS_OF_A_USER: Final = 1024
# Seconds between two attempts to open a file on which another process has a lease, and until that is an error: the
# kernel breaks a lease after 45 seconds (/proc/sys/fs/lease-break-time).
_LEASE_RETRY_SECONDS: Final = 0.05
_LEASE_SECONDS: Final = 60.0


class HostCalls:
    """Runs calls that may block. Only the trio thread uses it."""

    def __init__(self, inodes: HostInodes) -> None:
        self._inodes = inodes
        # By user and st_dev, as long as calls use them, those in threads that hang among them.
        self._limiters: weakref.WeakValueDictionary[tuple[int, int], trio.CapacityLimiter]
        self._limiters = weakref.WeakValueDictionary()
        self._waiting: Counter[int] = Counter()  # calls in progress by user

    async def run(self, uid: int, node: BackingNode, work: Callable[[], T], *others: BackingNode) -> T:
        """Run work that calls the server of a node's file, with the daemon's rights. It may use ``others`` as well."""
        used = (node, *others)
        with self._counted(uid):
            limiter = self._limiter(uid, node)
            for each in used:
                each.users += 1
            try:
                for each in used:
                    await self._inodes.wake(each, functools.partial(self.look_up, uid))
                return await threads.run(work, abandon_on_cancel=True, limiter=limiter)
            finally:
                for each in used:
                    each.users -= 1

    def _limiter(self, uid: int, node: BackingNode) -> trio.CapacityLimiter:
        return self._limiters.setdefault((uid, node.device_number), trio.CapacityLimiter(_THREADS))

    async def look_up(self, uid: int, parent: BackingNode, name: bytes) -> Found:
        """Return what a name in a directory leads to."""
        return await self.run(uid, parent, lambda: look_up(parent.fd, name))

    async def run_as_caller(self, caller: Caller, node: BackingNode, work: Callable[[], T], *others: BackingNode) -> T:
        """Run work with the rights of the process that made the request."""
        uid, gid, pid = caller.uid, caller.gid, caller.pid

        def run() -> T:
            with acting_as(uid, gid, pid):
                return work()

        return await self.run(uid, node, run, *others)

    async def retry_past_leases(self, uid: int, flags: int, attempt: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Retry a non-blocking open until the file's lease is released; the kernel breaks it in the end.

        With O_NONBLOCK in ``flags`` the caller gets EAGAIN at once.
        """
        deadline = trio.current_time() + _LEASE_SECONDS
        while True:
            try:
                return await attempt()
            except BlockingIOError:
                if flags & os.O_NONBLOCK or trio.current_time() >= deadline:
                    raise
            with self._counted(uid):
                await trio.sleep(_LEASE_RETRY_SECONDS)

    def release(self, uid: int, node: BackingNode, work: Callable[[], None]) -> None:
        """Start work that releases something of a node and raises nothing. Do not wait for it.

        The kernel sends few RELEASE requests at a time, for all files together, so they must not wait.
        """
        threads.in_background(work, self._limiter(uid, node))

    @contextlib.contextmanager
    def _counted(self, uid: int) -> Iterator[None]:
        """Count a call that may wait for the host. EBUSY if there are too many."""
        most = _CALLS if trusted(uid) else _CALLS_OF_A_USER
        if self._waiting[uid] >= most or self._waiting.total() >= _CALLS:
            raise os_error(EBUSY)
        self._waiting[uid] += 1
        try:
            yield
        finally:
            self._waiting[uid] -= 1
            if not self._waiting[uid]:
                del self._waiting[uid]


# ---- acting as the caller: threads of root's daemon take over the caller's user and groups ----


def _groups_of(pid: int) -> list[int]:
    """Return the supplementary groups of a process. OSError if it has gone."""
    with open(f"/proc/{pid}/status", "rb") as file:
        groups = next((line for line in file if line.startswith(b"Groups:")), b"")
    return sorted({int(group) for group in groups.split()[1:]})


@contextlib.contextmanager
def acting_as(uid: int, gid: int, pid: int) -> Iterator[None]:
    """Give the calling thread a user's rights over files. Only root's daemon can do that; a user's acts as itself."""
    if os.geteuid() != 0 or uid == 0:
        yield
        return
    try:
        groups = _groups_of(pid) if pid else []
    except OSError as failure:
        if failure.errno == EMFILE:
            raise
        groups = []  # the caller has gone or is in another PID namespace: it gets only its group
    before = os.getgroups()
    set_thread_groups(groups)
    try:
        setfsgid(gid)
        setfsuid(uid)  # drops the capabilities over files too
        yield
    finally:
        setfsuid(0)
        setfsgid(os.getegid())
        set_thread_groups(before)


@contextlib.contextmanager
def with_daemons_rights() -> Iterator[None]:
    """Give the thread the daemon's own rights over files, inside of acting_as()."""
    if os.geteuid() != 0:
        yield
        return
    caller = setfsuid(0)
    try:
        yield
    finally:
        setfsuid(caller)
