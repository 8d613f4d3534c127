"""Registrations: memory of clients that is the contents of files, for as long as their connections last."""

from __future__ import annotations

import functools
import logging
import os
import stat
import time
from collections import Counter
from collections.abc import Callable
from errno import EBADF, EBUSY, EINVAL, EIO, EPERM, ETIMEDOUT, EXDEV
from typing import Any, Final, TypeVar

import trio

from gpufs import protocol, threads
from gpufs.protocol import Register
from gpufs.protocol.statx import identity, open_flags
from gpufs.service._leases import Holder
from gpufs.service._limits import Limits
from gpufs.service._mount import ServedMount
from gpufs.service._peer import path_of

log = logging.getLogger(__name__)

T = TypeVar("T")
_NAMES_AT_ONCE: Final = 200  # that are removed in one go, in about ten milliseconds
MODE: Final = "registered"  # in the list of leases
_FOREIGN_IPC: Final = (
    "an IPC handle does not prove whose memory it stands for, so the daemon takes it only from its own user and from "
    "root: use memory that can be exported as a descriptor, or a mount of your own"
)


class Registry:
    """The registrations of a mount, and how many each user has."""

    def __init__(self, mount: ServedMount, device: int, limits: Limits) -> None:
        """``device``: the st_dev of the mount."""
        self.mount = mount
        self.device = device
        self.limits = limits
        self._users: Counter[int] = Counter()
        self._all: set[Holder] = set()

    def as_list(self, uid: int) -> list[dict[str, Any]]:
        """Those that a user may see, as :meth:`LeaseTable.as_list` has leases. Any thread may call."""
        return [one.as_dict() for one in self._all.copy() if one.visible_to(uid)]

    def reserve(self, uid: int) -> None:
        """Counts one more. OSError EBUSY if the user has too many."""
        if self._users[uid] >= self.limits.registrations_per_user:
            raise OSError(EBUSY, f"a user may have {self.limits.registrations_per_user} registrations at a time")
        self._users[uid] += 1

    def release(self, uid: int) -> None:
        """Uncounts one."""
        self._users[uid] -= 1
        if not self._users[uid]:
            del self._users[uid]

    def add(self, registration: Holder) -> None:
        """Lists one."""
        self._all.add(registration)

    def remove(self, registration: Holder) -> None:
        """Lists it no longer."""
        self._all.discard(registration)


class Registrations:
    """Those of one connection. Only the trio thread calls it; one call at a time."""

    def __init__(self, registry: Registry, pid: int, uid: int, program: str) -> None:
        self._registry = registry
        self._pid = pid
        self._uid = uid
        self._program = program
        self._by_id: dict[int, Holder] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    async def add(self, message: Register, descriptors: list[int]) -> None:
        """Serves ``register``; the descriptors stay the caller's. OSError if a rule forbids it."""
        if message.id in self._by_id:
            raise OSError(EINVAL, "a registration with this id exists")
        wanted = 1 if message.kind == "ipc" else 2
        if len(descriptors) != wanted or (message.kind == "ipc") != bool(message.handle):
            raise OSError(EINVAL, f"registering memory of kind {message.kind} takes {wanted} descriptors")
        if message.kind == "ipc" and self._uid not in (0, os.geteuid()):
            raise OSError(EPERM, _FOREIGN_IPC)
        registry = self._registry
        ino = self._check_file(descriptors[0])
        registry.reserve(self._uid)
        try:
            registry.mount.names.hold(ino)
            try:
                memory = descriptors[1] if wanted == 2 else -1
                await _on_thread(functools.partial(registry.mount.register, ino, message, memory))
            except BaseException:
                registry.mount.names.forget(ino, 1)
                raise
        except BaseException:
            registry.release(self._uid)
            raise
        path = path_of(descriptors[0])
        registration = Holder(self._pid, self._uid, self._program, MODE, path=path, ino=ino, bytes=message.size)
        self._by_id[message.id] = registration
        registry.add(registration)

    def _check_file(self, fd: int) -> int:
        """The inode of the file to register, from what the kernel knows of its descriptor."""
        flags = open_flags(fd)
        if flags & os.O_PATH or flags & os.O_ACCMODE not in (os.O_WRONLY, os.O_RDWR):
            raise OSError(EBADF, "the file on the mount is not open for writing")
        found = identity(fd)
        if found.device != self._registry.device:
            raise OSError(EXDEV, "the file is not on this mount")
        if not stat.S_ISREG(found.mode):
            raise OSError(EINVAL, "the file on the mount is not a regular file")
        return found.ino

    async def remove(self, number: int) -> None:
        """Serves ``unregister``. OSError ETIMEDOUT if something still uses the memory: the client asks again then."""
        registration = self._by_id.get(number)
        if registration is None:
            raise OSError(EINVAL, "this connection has no registration with this id")
        failure = await self._withdraw([registration], self._registry.limits.withdrawal)
        if failure is None or failure.errno != ETIMEDOUT:
            del self._by_id[number]
            self._release([registration])
        if failure is not None:
            raise failure

    async def close(self, patience: float) -> None:
        """The connection has ended: withdraws all, in so many seconds together."""
        registrations = list(self._by_id.values())
        self._by_id.clear()
        if registrations:
            try:
                await self._withdraw(registrations, patience)
            finally:
                self._release(registrations)

    def _release(self, registrations: list[Holder]) -> None:
        registry = self._registry
        for one in registrations:
            registry.mount.names.forget(one.ino, 1)
            registry.remove(one)
            registry.release(one.uid)

    async def _withdraw(self, registrations: list[Holder], patience: float) -> OSError | None:
        """Removes the files' names and ends the use of the memory. The failure of that, if one fails."""
        names = []
        with trio.CancelScope(shield=True):
            for one in registrations:
                while removed := self._registry.mount.names.remove_names(one.ino, _NAMES_AT_ONCE):
                    names += removed
                    if len(removed) < _NAMES_AT_ONCE:
                        break
                    await trio.lowlevel.checkpoint()  # other requests' turn
        return await _on_thread(functools.partial(self._revoke, registrations, names, patience))

    def _revoke(self, registrations: list[Holder], names: list[tuple[int, bytes]], patience: float) -> OSError | None:
        mount = self._registry.mount
        deadline = time.monotonic() + patience
        failure: OSError | None = None
        try:
            # The kernel takes notifications in order: once it knows of the last file, it knows of the names as well.
            for parent, name in names:
                mount.invalidate_name(parent, name)
            for one in registrations:
                try:
                    mount.withdraw(one.ino, max(0.0, deadline - time.monotonic()))
                except OSError as error:
                    if error.errno != ETIMEDOUT:
                        raise
                    log.warning(
                        "inode %d: memory of process %d is in use after it was withdrawn",
                        one.ino,
                        one.pid,
                        extra={"user": one.uid},
                    )
                    failure = error
        except OSError as error:  # the mount has ended, and its memory with it
            failure = error
        return failure


async def _on_thread(work: Callable[[], T]) -> T:
    """Runs work to its end, also if the mount ends: what it takes must be released again."""
    scope = trio.CancelScope(shield=True)
    with scope:
        result = await threads.run(work)
    return result


def answer_of(error: OSError) -> tuple[int, str]:
    """The errno and the text of a failure, for a message."""
    return error.errno or EIO, protocol.shorten(error.strerror or str(error))
