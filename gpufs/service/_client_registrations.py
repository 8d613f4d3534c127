"""ClientRegistrations: memory of a client that is the contents of files, for as long as its connection lasts."""

import functools
import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from errno import EINVAL, ETIMEDOUT

import trio

from gpufs import threads
from gpufs.protocol import Register
from gpufs.service._channel import ClientChannel, path_behind
from gpufs.service._kept import REGISTERED, Holder, Record
from gpufs.service._scope import RequestScope
from gpufs.service._served_mount import ServedMount
from gpufs.syscalls import close_all


class ClientRegistrations:
    """The registrations of one connection. Only the trio thread calls it; one call at a time."""

    def __init__(self, channel: ClientChannel, served: ServedMount, record: Record) -> None:
        self._channel = channel
        self._served = served
        self._record = record
        self._by_id: dict[int, Holder] = {}

    def adopt(self, holder: Holder) -> None:
        """Go on with a registration of the former daemon."""
        self._served.holders.enter(holder, adopted=True)
        self._by_id[holder.id] = holder

    async def add(self, message: Register, scope: RequestScope, permit: Callable[[], int]) -> None:
        """Serve ``register``; the scope stays the caller's. OSError if a rule forbids it."""
        if message.id in self._by_id:
            raise OSError(EINVAL, "a registration with this id exists")
        ino = permit()
        descriptors, served = scope.descriptors, self._served
        path = path_behind(descriptors[0].fd)
        holder = Holder(self._channel.peer, REGISTERED, message.id, path, ino, bytes=message.size)
        served.holders.enter(holder)
        with ExitStack() as undo:
            undo.callback(served.holders.leave, holder)
            served.mount.inode_hold(ino)
            undo.pop_all()
            undo.callback(self._release, [holder])
            shared = descriptors[1].fd if len(descriptors) == 2 else -1
            taken: list[int] = []  # pieces of the memory
            if message.kind == "descriptor":
                await scope.take_turn(self._channel.user.pieces)
                scope.on_close(functools.partial(close_all, taken))
            await threads.run_to_the_end(
                functools.partial(self._register, holder, message, shared, taken), self._channel.user.calls
            )
            undo.pop_all()
        self._by_id[message.id] = holder

    def _register(self, holder: Holder, message: Register, shared: int, taken: list[int]) -> None:
        holder.number = self._served.register(holder, message, shared, taken)
        self._record.add(holder)

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

    async def close(self, seconds: float) -> None:
        """The connection has ended: withdraws all, in so many seconds together."""
        holders = list(self._by_id.values())
        self._by_id.clear()
        if holders:
            try:
                await self._withdraw(holders, seconds, self._channel.user.ends)
            finally:
                self._release(holders)

    def _release(self, holders: list[Holder]) -> None:
        for holder in holders:
            self._record.remove(holder)
            if holder.number is not None:  # dropping the memory may wait for the keeper
                drop = functools.partial(self._served.registrations.drop, holder.number)
                self._channel.user.start(self._channel.user.ends, drop)
            self._served.mount.inode_release(holder.ino)
            self._served.holders.leave(holder)

    async def _withdraw(self, holders: list[Holder], seconds: float, limiter: trio.CapacityLimiter) -> OSError | None:
        """Remove the files' names and end the use of the memory. Return the failure of that, if there is one."""
        return await threads.run_to_the_end(functools.partial(self._revoke, holders, seconds), limiter)

    def _revoke(self, holders: list[Holder], seconds: float) -> OSError | None:
        mount = self._served.mount
        deadline = time.monotonic() + seconds
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
