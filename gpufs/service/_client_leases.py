"""The leases of one client: files whose memory it has attached."""

import errno
import functools
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import trio

from gpufs import protocol
from gpufs.engine import Lease, SharedPiece
from gpufs.modes import READ_WRITE
from gpufs.protocol import Attach, Attached, Detach, Done, Pieces, ProtocolError, Refresh, Sleep, Wake
from gpufs.service import _checks
from gpufs.service._channel import ClientChannel, path_behind
from gpufs.service._kept import KeptLease, Record, kept_path
from gpufs.service._scope import Descriptor, RequestScope
from gpufs.service._served_mount import Holder, ServedMount
from gpufs.syscalls import close_all, trusted

LeaseRequest: TypeAlias = Attach | Refresh | Detach | Sleep | Wake


@dataclass(slots=True)
class _ClientLease:
    """A lease of a connection. ``device``: its index; ``busy``: a request for it is being served.

    ``lease``: None for one that sleeps, which keeps its file by a reference instead.
    ``outgoing``: pieces that are about to be sent, at most as many as one message takes.
    """

    holder: Holder
    scope: RequestScope
    lease: Lease | None = None
    device: int = 0
    read_only: bool = False
    busy: bool = False
    outgoing: list[SharedPiece] = field(default_factory=list)

    def take_outgoing(self) -> list[SharedPiece]:
        pieces, self.outgoing = self.outgoing, []
        return pieces

    def close_lease(self) -> None:
        """Give up the engine's lease, if there is one."""
        lease, self.lease = self.lease, None
        if lease is not None:
            lease.close()


def _close_pieces(pieces: list[SharedPiece]) -> None:
    close_all([piece.fd for piece in pieces])


def _end_of(pieces: list[SharedPiece]) -> int:
    return pieces[-1].offset + pieces[-1].bytes


async def _refuse(failure: OSError) -> None:
    raise failure


def _usable(client_lease: _ClientLease | None) -> _ClientLease:
    """The lease, if its memory can be asked for."""
    if client_lease is not None and client_lease.holder.revoked:
        raise OSError(errno.ESTALE, "the lease was revoked: attach the file again")
    if client_lease is None or not (client_lease.lease or client_lease.holder.asleep or client_lease.holder.private):
        raise OSError(errno.EBADF, "nothing is attached under this number")
    return client_lease


class ClientLeases:
    def __init__(self, channel: ClientChannel, served: ServedMount, record: Record) -> None:
        self._channel = channel
        self._served = served
        self._record = record
        self._leases: dict[int, _ClientLease] = {}
        self._working = 0  # requests being served

    def adopt(self, kept: KeptLease, lease: Lease | None) -> None:
        """Go on with a lease of the former daemon. None for a private copy, which the client has for itself."""
        wanted = kept.mode, kept.path, kept.ino, kept.private, kept.bytes, kept.placement
        holder = Holder(self._channel.peer, *wanted, since=kept.since)
        scope = holder.scope = self._channel.new_scope()
        client_lease = _ClientLease(holder, scope, device=kept.device, read_only=kept.read_only)
        self._enter(kept.id, client_lease)
        if lease is not None:
            self._hold(client_lease, lease)
        elif kept.asleep:
            holder.asleep = True
            self._watch(client_lease)
        self._leases[kept.id] = client_lease

    def _enter(self, number: int, client_lease: _ClientLease) -> None:
        """Show a lease among the mount's holders until it ends."""
        holder, scope = client_lease.holder, client_lease.scope
        self._served.holders.enter(holder)
        scope.on_close(functools.partial(self._served.holders.leave, holder))
        scope.on_close(functools.partial(self._record.remove, KeptLease, number))

    def _hold(self, client_lease: _ClientLease, lease: Lease) -> None:
        client_lease.lease = lease
        client_lease.holder.bytes = lease.bytes
        client_lease.holder.placement = lease.placement
        self._watch(client_lease)

    def _watch(self, client_lease: _ClientLease) -> None:
        """Have the scope of a lease end what it has by then."""
        holder, scope = client_lease.holder, client_lease.scope
        scope.on_close(functools.partial(self._served.park_sleeping, holder))
        scope.on_close(lambda: self._end_sleep(holder))
        scope.on_close(client_lease.close_lease)
        if holder.mode == READ_WRITE:
            # The kernel does not see what the program writes: the times change at both ends of the lease.
            scope.on_close(functools.partial(self._served.mount.inode_written, holder.ino))
        scope.on_close(lambda: _close_pieces(client_lease.take_outgoing()))

    def _end_sleep(self, holder: Holder) -> None:
        """Give up the reference that keeps the file of a lease that sleeps."""
        if holder.asleep:
            holder.asleep = False
            self._served.mount.inode_release(holder.ino)

    async def end(self, number: int) -> None:
        """End a lease, if there is one with this number."""
        await self._end(number, self._leases.get(number))

    def accept(self, message: LeaseRequest, scope: RequestScope, nursery: trio.Nursery) -> None:
        """Begin to serve a request, and take its scope over. ProtocolError if there cannot be such a request.

        The scope stays the caller's after a ProtocolError.
        """
        limits = self._served.limits
        client_lease = self._leases.get(message.id)
        if len(scope.descriptors) != (1 if isinstance(message, Attach) else 0):
            raise ProtocolError(f"a message {type(message).__name__} with {len(scope.descriptors)} descriptors")
        if self._working >= limits.requests:
            raise ProtocolError("too many requests at once")
        if isinstance(message, Attach):
            if client_lease is not None:
                raise ProtocolError("an attach message whose id is in use")
            if len(self._leases) >= limits.attachments:
                raise ProtocolError("too many attachments on one connection")
            try:
                ino, may_write = _checks.check_attachable(scope.descriptors[0].fd, message.mode, self._served.st_dev)
            except OSError as failure:
                scope.discard()
                work = functools.partial(_refuse, failure)
            else:  # the file is ours, so closing it does not hang
                holder = Holder(self._channel.peer, message.mode, ino=ino, scope=scope)
                client_lease = self._leases[message.id] = _ClientLease(holder, scope, read_only=not may_write)
                work = functools.partial(self._attach, message, client_lease, *scope.descriptors)
        elif not isinstance(message, Detach) and client_lease is not None and client_lease.busy:
            # The client may have given up the answer to its last request, of which the end has not been sent.
            work = functools.partial(_refuse, OSError(errno.EBUSY, "the last request for it is still being answered"))
            client_lease = None
        elif isinstance(message, Refresh):
            work = functools.partial(self._refresh, message, client_lease)
        elif isinstance(message, Sleep):
            work = functools.partial(self._sleep, message, client_lease)
        elif isinstance(message, Wake):
            work = functools.partial(self._wake, message, client_lease)
        else:
            work = functools.partial(self._detach, message, client_lease)
        self._working += 1
        if client_lease is not None:
            client_lease.busy = True
        nursery.start_soon(self._serve, work, message, client_lease)

    async def _serve(
        self, work: Callable[[], Awaitable[None]], message: LeaseRequest, client_lease: _ClientLease | None
    ) -> None:
        try:
            async with self._channel.user.turns:
                try:
                    await work()
                except OSError as failure:
                    if isinstance(message, Attach):
                        await self._end(message.id, client_lease)
                    error = failure.errno or errno.EIO
                    text = failure.strerror or os.strerror(error)
                    request, code = type(message).__name__.lower(), errno.errorcode.get(error, error)
                    self._channel.log(logging.INFO, "%s refused: %s %s", request, code, text)
                    await self._channel.answer(message.answer(message.id, error, protocol.shorten(text)))
        finally:
            # Work ends with the last message of its answer, and without a checkpoint after it.
            self._working -= 1
            self._record.end(message)
            if client_lease is not None:
                client_lease.busy = False

    async def close(self, seconds: float) -> None:
        """End all leases, one after the other on one thread; wait at most ``seconds``."""
        leases = list(self._leases.values())
        self._leases.clear()
        if not leases:
            return
        last = leases.pop()
        for client_lease in leases:
            client_lease.scope.end()

        def start(close_last: Callable[[], None]) -> None:
            def close() -> None:
                for client_lease in leases:
                    client_lease.scope.close()
                close_last()

            self._channel.user.start(self._channel.user.ends, close)

        with trio.move_on_after(seconds):
            await last.scope.closed(start)

    async def revoke(self, descriptors: Sequence[Descriptor]) -> None:
        """End all leases on a file, of any connection. OSError EPERM unless the client's user owns it."""
        served, peer, user = self._served, self._channel.peer, self._channel.user
        ino = _checks.check_revocable(descriptors, served.st_dev)
        if not trusted(peer.uid) and served.mount.inode_get(ino).uid != peer.uid:
            raise OSError(errno.EPERM, "only the file's owner, root and the user who mounted may end its leases")
        for holder, scope in served.holders.leases_on(ino):
            holder.revoked = True
            self._channel.log(logging.INFO, "revoked the lease of %s on %s", holder.peer, holder.path)
            await scope.closed(functools.partial(user.start, user.calls))

    async def _attach(self, message: Attach, client_lease: _ClientLease, descriptor: Descriptor) -> None:
        def prepare() -> Lease:
            return self._prepare(message, client_lease, descriptor)

        lease = await client_lease.scope.in_thread(prepare)
        holder = client_lease.holder
        copied = "a private copy of " if holder.private else ""
        self._channel.log(
            logging.INFO, "attached %s%d bytes of %s (%s)", copied, holder.bytes, holder.path, holder.mode
        )
        await self._answer(message.id, client_lease, lease, 0)

    def _prepare(self, message: Attach, client_lease: _ClientLease, descriptor: Descriptor) -> Lease:
        """Opens the lease, on a thread. OSError if a limit forbids it, or memory is missing."""
        holder, served = client_lease.holder, self._served
        ino = holder.ino
        holder.path = path_behind(descriptor.fd)
        self._enter(message.id, client_lease)
        with served.open_buffer(ino) as buffer:
            # Now the buffer keeps the memory. The descriptor would only keep the mount busy.
            descriptor.close()
            info = buffer.info
            client_lease.device = info.device
            holder.private = client_lease.read_only and served.gets_copy(buffer, message.mode)
            writable = message.mode == READ_WRITE
            placement = message.placement
            if not holder.private:
                asleep = [each.placement for each, _ in served.holders.leases_on(ino) if each.asleep]
                if asleep:
                    placement = asleep[0]  # where they have to wake
                elif client_lease.read_only and info.placement != 0:
                    placement = None  # readers move a file once: each move makes all other users wait
            lease = served.lease(buffer, holder, writable=writable, placement=placement)
            self._hold(client_lease, lease)
        if writable:
            served.mount.inode_written(ino)
        self._keep(message.id, client_lease)
        return lease

    def _keep(self, number: int, client_lease: _ClientLease) -> None:
        """Note the lease, as it is now, for the next daemon."""
        holder = client_lease.holder
        self._record.add(
            KeptLease(
                number,
                holder.ino,
                holder.mode,
                kept_path(holder.path),
                holder.private,
                client_lease.read_only,
                client_lease.device,
                holder.bytes,
                holder.since,
                holder.asleep,
                holder.placement,
            )
        )

    async def _refresh(self, message: Refresh, client_lease: _ClientLease | None) -> None:
        client_lease = _usable(client_lease)
        if client_lease.holder.private:
            raise OSError(errno.EOPNOTSUPP, "a private copy does not follow the file: attach it again")
        if client_lease.holder.asleep:
            raise OSError(errno.EAGAIN, "the attachment sleeps: wake it first")
        lease = client_lease.lease
        assert lease is not None

        def refresh() -> None:
            lease.refresh()
            client_lease.holder.bytes = lease.bytes
            self._keep(message.id, client_lease)

        await client_lease.scope.in_thread(refresh)
        await self._answer(message.id, client_lease, lease, message.start)

    async def _sleep(self, message: Sleep, client_lease: _ClientLease | None) -> None:
        client_lease = _usable(client_lease)
        holder, served = client_lease.holder, self._served
        if holder.private:
            text = "a private copy cannot sleep: attach the file with mode r+, or mount with --trust-readers"
            raise OSError(errno.EOPNOTSUPP, text)

        def sleep() -> None:
            if holder.asleep:
                return
            try:
                served.mount.inode_hold(holder.ino)
            except OSError as error:
                if error.errno != errno.ENOENT:
                    raise
                raise OSError(
                    errno.ENOENT, "the file has no name any more, and only files with one can sleep"
                ) from None
            holder.asleep = True
            client_lease.close_lease()
            try:
                if holder.mode == READ_WRITE:
                    served.mount.inode_written(holder.ino)
                served.park(holder.ino)
            except OSError as error:
                if error.errno != errno.EBUSY:  # the last one of its users parks it
                    self._reopen(client_lease)
                    raise
            self._keep(message.id, client_lease)

        await client_lease.scope.in_thread(sleep)
        await self._channel.answer(Done(message.id))

    async def _wake(self, message: Wake, client_lease: _ClientLease | None) -> None:
        client_lease = _usable(client_lease)

        def wake() -> Lease:
            if client_lease.holder.asleep:
                self._reopen(client_lease)
                self._keep(message.id, client_lease)
            assert client_lease.lease is not None
            return client_lease.lease

        await self._answer(message.id, client_lease, await client_lease.scope.in_thread(wake), 0)

    def _reopen(self, client_lease: _ClientLease) -> None:
        """Open the lease of the engine again for one that sleeps. OSError if the file's memory is not to be had."""
        holder, mount = client_lease.holder, self._served.mount
        writable = holder.mode == READ_WRITE
        lease = self._served.lease_again(holder, writable=writable)
        left, place = lease.bytes, lease.placement
        if left < holder.bytes:
            lease.close()
            text = f"the file has {left} bytes now, and had {holder.bytes} when its attachment went to sleep"
            raise OSError(errno.ESTALE, text)
        if holder.placement not in (None, place):
            lease.close()
            text = f"its first byte lies at {place} of its memory now, and lay at {holder.placement}"
            raise OSError(errno.EBUSY, f"{text}: others use it, or the device is full; wake it again later")
        client_lease.lease = lease
        if writable:
            mount.inode_written(holder.ino)  # before the reference ends, which may be the last one
        self._end_sleep(holder)

    async def _detach(self, message: Detach, client_lease: _ClientLease | None) -> None:
        await self._end(message.id, client_lease)
        await self._channel.answer(Done(message.id))

    async def _end(self, number: int, client_lease: _ClientLease | None) -> None:
        """End a lease and wait until its memory is released. Another one may have its number by now, and stays."""
        if client_lease is not None and self._leases.get(number) is client_lease:
            del self._leases[number]
            user = self._channel.user
            await client_lease.scope.closed(functools.partial(user.start, user.calls))

    async def _answer(self, number: int, client_lease: _ClientLease, lease: Lease, start: int) -> None:
        """Send the memory from ``start`` on. Only so many of its descriptors are open at a time as a message takes."""
        devices = self._served.mount.engine.devices

        def take(first: int) -> None:
            client_lease.outgoing = lease.pieces(first, protocol.MAX_PIECES)

        def begin() -> int:
            client_lease.holder.bytes = lease.bytes
            count, first = 0, start
            while len(pieces := lease.pieces(first, protocol.MAX_PIECES)) == protocol.MAX_PIECES:
                count += len(pieces)
                first = _end_of(pieces)
                _close_pieces(pieces)
            if count == 0:
                client_lease.outgoing = pieces
            else:
                _close_pieces(pieces)
            return count + len(pieces)

        left = await client_lease.scope.in_thread(begin)
        attached = Attached(
            number,
            driver=self._served.mount.engine.driver,
            pci_address=devices[client_lease.device].info.pci_address,
            device=client_lease.device,
            size=client_lease.holder.bytes,
            private=client_lease.holder.private,
            placement=lease.placement,
            pieces=left,
        )
        await self._channel.answer(attached)
        while left > 0:
            if not client_lease.outgoing:
                await client_lease.scope.in_thread(functools.partial(take, start))
            pieces = client_lease.take_outgoing()
            try:
                left -= len(pieces)
                start = _end_of(pieces)
                message = Pieces(number, [piece.offset for piece in pieces], [piece.bytes for piece in pieces])
                await self._channel.answer(message, [piece.fd for piece in pieces])
            finally:
                _close_pieces(pieces)
