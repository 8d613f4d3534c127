"""ClientRegistrations: memory of a client that is the contents of files, for as long as its connection lasts."""

import functools
import logging
import time
from errno import EINVAL, EPERM, ETIMEDOUT
from typing import Final

import trio

from gpufs import threads
from gpufs.protocol import Register
from gpufs.service import _checks
from gpufs.service._channel import Channel, path_of
from gpufs.service._holders import REGISTERED, Holder
from gpufs.service._resources import Descriptor
from gpufs.service._served_mount import ServedMount
from gpufs.service._user import trusted

_FOREIGN_IPC: Final = (
    "an IPC handle does not prove whose memory it stands for, so the daemon takes it only from its own user and from "
    "root: use memory that can be exported as a descriptor, or a mount of your own"
)


class ClientRegistrations:
    """Those of one connection. Only the trio thread calls it; one call at a time."""

    def __init__(self, channel: Channel, served: ServedMount) -> None:
        self._channel = channel
        self._served = served
        self._by_id: dict[int, Holder] = {}

    async def add(self, message: Register, descriptors: list[Descriptor]) -> None:
        """Serve ``register``; the descriptors stay the caller's. OSError if a rule forbids it."""
        if message.id in self._by_id:
            raise OSError(EINVAL, "a registration with this id exists")
        wanted = 1 if message.kind == "ipc" else 2
        if len(descriptors) != wanted or (message.kind == "ipc") != bool(message.handle):
            raise OSError(EINVAL, f"registering memory of kind {message.kind} takes {wanted} descriptors")
        peer, served = self._channel.peer, self._served
        if message.kind == "ipc" and not trusted(peer.uid):
            raise OSError(EPERM, _FOREIGN_IPC)
        ino = _checks.check_registrable(descriptors[0].fd, served.device)
        for memory in descriptors[1:]:
            _checks.check_shareable(memory.fd)
        holder = Holder(peer, REGISTERED, path_of(descriptors[0].fd), ino, bytes=message.size)
        served.holders.enter(holder)
        try:
            served.mount.inode_hold(ino)
            try:
                shared = descriptors[1].fd if wanted == 2 else -1
                async with self._channel.user.pieces() as taken:
                    await threads.run_to_the_end(
                        functools.partial(served.register, ino, message, shared, taken), self._channel.user.calls
                    )
            except BaseException:
                served.mount.inode_release(ino)
                raise
        except BaseException:
            served.holders.leave(holder)
            raise
        self._by_id[message.id] = holder

    async def remove(self, number: int) -> None:
        """Serve ``unregister``. OSError ETIMEDOUT if something still uses the memory: the client asks again then."""
        holder = self._by_id.get(number)
        if holder is None:
            raise OSError(EINVAL, "this connection has no registration with this id")
        failure = await self._withdraw([holder], self._served.limits.withdrawal, self._channel.user.calls)
        if failure is None or failure.errno != ETIMEDOUT:
            del self._by_id[number]
            self._release([holder])
        if failure is not None:
            raise failure

    async def close(self, patience: float) -> None:
        """The connection has ended: withdraws all, in so many seconds together."""
        holders = list(self._by_id.values())
        self._by_id.clear()
        if holders:
            try:
                await self._withdraw(holders, patience, self._channel.user.ends)
            finally:
                self._release(holders)

    def _release(self, holders: list[Holder]) -> None:
        for holder in holders:
            self._served.mount.inode_release(holder.ino)
            self._served.holders.leave(holder)

    async def _withdraw(self, holders: list[Holder], patience: float, limiter: trio.CapacityLimiter) -> OSError | None:
        """Remove the files' names and end the use of the memory. Return the failure of that, if there is one."""
        return await threads.run_to_the_end(functools.partial(self._revoke, holders, patience), limiter)

    def _revoke(self, holders: list[Holder], patience: float) -> OSError | None:
        mount = self._served.mount
        deadline = time.monotonic() + patience
        failure: OSError | None = None
        try:
            # The kernel takes notifications in order: once it knows of the last file, it knows of the names as well.
            for holder in holders:
                mount.remove_names(holder.ino)
            for holder in holders:
                try:
                    mount.inode_revoke(holder.ino, max(0.0, deadline - time.monotonic()))
                except OSError as error:
                    if error.errno != ETIMEDOUT:
                        raise
                    self._channel.log(logging.WARNING, "inode %d: in use after its memory was withdrawn", holder.ino)
                    failure = error
        except OSError as error:  # the mount has ended, and its memory with it
            failure = error
        return failure
