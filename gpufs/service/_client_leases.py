"""The leases of one client: files whose memory it has attached."""

import errno
import functools
import logging
from collections.abc import Awaitable, Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import trio

from gpufs import protocol
from gpufs.engine import Lease, SharedPiece
from gpufs.modes import READ_WRITE
from gpufs.protocol import Attach, Attached, Check, Detach, Done, Pieces, ProtocolError, Refresh, Sleep, Wake
from gpufs.service._channel import ClientChannel, path_behind
from gpufs.service._kept import Holder, Record
from gpufs.service._scope import Descriptor, RequestScope
from gpufs.service._served_mount import ServedMount, check_size
from gpufs.syscalls import close_all

LeaseRequest: TypeAlias = Attach | Refresh | Detach | Sleep | Wake
Permit: TypeAlias = Callable[[], tuple[int, bool]]  # the inode, and whether the client may write to it
Work: TypeAlias = Callable[[], Awaitable[protocol.FinalAnswer | None]]

_STILL: Final = "a private copy does not follow the file: attach it again"
_SLEEPLESS: Final = "a private copy cannot sleep: attach the file with mode r+, or mount with --trust-readers"


@dataclass(slots=True)
class _ClientLease:
    """A lease of a connection. ``turn``: of the request for it that is being served.

    ``lease``: None for one that sleeps, and for a private copy of the former daemon's.
    ``keeps``: whether it keeps the inode, so that the file outlives its names, and the daemon.
    ``outgoing``: pieces that are about to be sent, at most as many as one message takes.
    """

    holder: Holder
    scope: RequestScope
    lease: Lease | None = None
    keeps: bool = False
    turn: trio.Lock = field(default_factory=trio.Lock)
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


def _usable(client_lease: _ClientLease | None, private: str) -> _ClientLease:
    """Return the lease if there is one, on the file itself. ``private``: why a private copy is none for this."""
    if client_lease is not None and client_lease.holder.revoked:
        raise OSError(errno.ESTALE, "the lease was revoked: attach the file again")
    if client_lease is not None and client_lease.holder.private:
        raise OSError(errno.EOPNOTSUPP, private)
    if client_lease is None or not (client_lease.lease or client_lease.holder.asleep):
        raise _not_attached()
    return client_lease


def _not_attached() -> OSError:
    return OSError(errno.EBADF, "nothing is attached under this number")


class ClientLeases:
    def __init__(self, channel: ClientChannel, served: ServedMount, record: Record) -> None:
        self._channel = channel
        self._served = served
        self._record = record
        self._leases: dict[int, _ClientLease] = {}
        self._working = 0  # requests being served

    def adopt(self, holder: Holder, lease: Lease | None) -> None:
        """Go on with a lease of the former daemon, whose inode is kept. A private copy the client has for itself."""
        holder.scope = self._channel.new_scope()
        client_lease = _ClientLease(holder, holder.scope, keeps=not holder.private)
        if holder.asleep:
            with suppress(OSError):
                holder.may_move = self._served.may_move(holder)
        self._enter(client_lease, adopted=True)
        if client_lease.keeps:
            self._served.holders.use(holder)
        if lease is not None:
            self._hold(client_lease, lease)
        elif holder.asleep:
            self._watch(client_lease)
        self._leases[holder.id] = client_lease

    def _enter(self, client_lease: _ClientLease, *, adopted: bool = False) -> None:
        """Show a lease among the mount's holders until it ends."""
        self._served.holders.enter(client_lease.holder, adopted=adopted)
        client_lease.scope.on_close(functools.partial(self._leave, client_lease))
        client_lease.scope.on_close(functools.partial(self._record.remove, client_lease.holder))

    def _leave(self, client_lease: _ClientLease) -> None:
        """A lease has ended: its file is parked if all others on it sleep."""
        ino = client_lease.holder.ino
        self._served.holders.leave(client_lease.holder)
        if client_lease.keeps:
            with suppress(OSError):  # the file stays where it is
                self._served.park_if_left(ino)
            self._served.mount.inode_release(ino)

    def _hold(self, client_lease: _ClientLease, lease: Lease) -> None:
        client_lease.lease = lease
        client_lease.holder.bytes = lease.bytes
        client_lease.holder.placement = lease.placement
        self._watch(client_lease)

    def _watch(self, client_lease: _ClientLease) -> None:
        """Have the scope of a lease end what it has by then."""
        holder, scope = client_lease.holder, client_lease.scope
        scope.on_close(client_lease.close_lease)
        if holder.mode == READ_WRITE:
            # The kernel does not see what the program writes: the times change at both ends of the lease.
            scope.on_close(functools.partial(self._served.mount.inode_written, holder.ino))
        scope.on_close(lambda: _close_pieces(client_lease.take_outgoing()))

    def accept(self, message: LeaseRequest, scope: RequestScope, permit: Permit) -> Work:
        """Return what serves a request, whose scope it uses. ProtocolError if there cannot be such a request."""
        limits = self._served.limits
        client_lease = self._leases.get(message.id if isinstance(message, Attach) else message.lease)
        work: Work
        if self._working >= limits.requests:
            raise ProtocolError("too many requests at once")
        if isinstance(message, Attach):
            if client_lease is not None:
                raise ProtocolError("an attach message whose id is in use")
            if len(self._leases) >= limits.attachments:
                raise ProtocolError("too many attachments on one connection")
            own = self._channel.new_scope()
            client_lease = _ClientLease(Holder(self._channel.peer, message.mode, message.id, scope=own), own)
            self._leases[message.id] = client_lease
            work = functools.partial(self._attach, message, client_lease, scope, permit)
        elif isinstance(message, Refresh):
            work = functools.partial(self._refresh, message, client_lease)
        elif isinstance(message, Sleep):
            work = functools.partial(self._sleep, message, client_lease)
        elif isinstance(message, Wake):
            work = functools.partial(self._wake, message, client_lease)
        else:
            work = functools.partial(self._detach, message, client_lease)
        self._working += 1
        return functools.partial(self._serve, work, message, client_lease)

    async def _serve(
        self, work: Work, message: LeaseRequest, client_lease: _ClientLease | None
    ) -> protocol.FinalAnswer | None:
        turn = client_lease.turn if client_lease is not None and not isinstance(message, Detach) else nullcontext()
        try:
            async with turn:
                return await work()
        except OSError:
            if isinstance(message, Attach):
                await self._end(message.id, client_lease)
            raise
        finally:
            self._working -= 1

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

    async def revoke(self, ino: int) -> None:
        """End all leases on a file, of any connection."""
        user = self._channel.user
        for holder in self._served.holders.leases_on([ino]):
            holder.revoked = True
            self._channel.log(logging.INFO, "revoked the lease of %s on %s", holder.peer, holder.path)
            if holder.scope is not None:
                await holder.scope.closed(functools.partial(user.start, user.calls))

    async def check(self, message: Check, scope: RequestScope) -> None:
        """Serve Check. OSError as one of the leases would get it."""
        holders = [_usable(self._leases.get(number), _SLEEPLESS).holder for number in dict.fromkeys(message.leases)]
        await scope.in_thread(functools.partial(self._served.check_move, holders, message.what))

    async def _attach(self, message: Attach, client_lease: _ClientLease, scope: RequestScope, permit: Permit) -> None:
        holder = client_lease.holder
        holder.ino, may_write = permit()
        holder.read_only = not may_write

        def prepare() -> Lease:
            scope.end()  # this thread closes the descriptor, too
            return client_lease.scope.use(lambda: self._prepare(message, client_lease, scope.descriptors[0]))

        lease = await scope.in_thread(prepare)
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
        self._enter(client_lease)
        with served.open_buffer(ino) as buffer:
            info = buffer.info
            holder.device = info.device
            holder.private = holder.read_only and served.gets_copy(buffer, message.mode)
            if not holder.private:
                served.mount.inode_hold(ino)
                client_lease.keeps = True
                served.holders.use(holder)
            # Now the file is kept. The descriptor would only keep the mount busy.
            descriptor.close()
            writable = message.mode == READ_WRITE
            placement = message.placement
            if not holder.private:
                asleep = [each.placement for each in served.holders.leases_on([ino]) if each.asleep]
                if asleep:
                    placement = asleep[0]  # where they have to wake
                elif holder.read_only and info.placement != 0:
                    placement = None  # readers move a file once: each move makes all other users wait
            lease = served.lease(buffer, holder, writable=writable, placement=placement)
            self._hold(client_lease, lease)
        if writable:
            served.mount.inode_written(ino)
        self._record.add(holder)
        return lease

    async def _refresh(self, message: Refresh, client_lease: _ClientLease | None) -> None:
        client_lease = _usable(client_lease, _STILL)
        if client_lease.holder.asleep:
            raise OSError(errno.EAGAIN, "the attachment sleeps: wake it first")

        def refresh() -> Lease:
            if (lease := client_lease.lease) is None:
                raise _not_attached()
            lease.refresh()
            client_lease.holder.bytes = lease.bytes
            self._record.add(client_lease.holder)
            return lease

        lease = await client_lease.scope.in_thread(refresh)
        await self._answer(message.id, client_lease, lease, message.start)

    async def _sleep(self, message: Sleep, client_lease: _ClientLease | None) -> Done:
        client_lease = _usable(client_lease, _SLEEPLESS)
        holder, served = client_lease.holder, self._served

        def sleep() -> None:
            served.holders.set_asleep(holder, asleep=True, may_move=served.may_move(holder))
            # First of all: the next daemon opens the leases that are awake, and brings their files back for that. It
            # gets this request again, and parks the file then.
            self._record.add(holder)
            if client_lease.lease is not None and holder.mode == READ_WRITE:
                served.mount.inode_written(holder.ino)
            client_lease.close_lease()
            try:
                served.park_if_left(holder.ino)
            except OSError as error:
                if error.errno != errno.EBUSY:  # the last one of its users parks it
                    self._reopen(client_lease)
                    self._record.add(holder)
                    raise

        await client_lease.scope.in_thread(sleep)
        return Done(message.id)

    async def _wake(self, message: Wake, client_lease: _ClientLease | None) -> None:
        client_lease = _usable(client_lease, _SLEEPLESS)

        def wake() -> Lease:
            if client_lease.holder.asleep:
                self._reopen(client_lease)
                self._record.add(client_lease.holder)
            if client_lease.lease is None:
                raise _not_attached()
            return client_lease.lease

        await self._answer(message.id, client_lease, await client_lease.scope.in_thread(wake), 0)

    def _reopen(self, client_lease: _ClientLease) -> None:
        """Open the lease of the engine again for one that sleeps. OSError if the file's memory is not to be had."""
        holder = client_lease.holder
        writable = holder.mode == READ_WRITE
        lease = self._served.lease_again(holder, writable=writable)
        try:
            check_size(lease.bytes, holder.bytes)
            if holder.placement not in (None, place := lease.placement):
                text = f"its first byte lies at {place} of its memory now, and lay at {holder.placement}"
                raise OSError(errno.EBUSY, f"{text}: others use it, or the device is full; wake it again later")
        except OSError:
            lease.close()
            raise
        client_lease.lease = lease
        self._served.holders.set_asleep(holder, asleep=False)
        if writable:
            self._served.mount.inode_written(holder.ino)

    async def _detach(self, message: Detach, client_lease: _ClientLease | None) -> Done:
        await self._end(message.lease, client_lease)
        return Done(message.id)

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
            pci_address=devices[client_lease.holder.device].info.pci_address,
            device=client_lease.holder.device,
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
