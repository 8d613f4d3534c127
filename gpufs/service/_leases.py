"""The leases of a mount: files whose memory clients have attached, and how many a client may have."""

import contextlib
import dataclasses
import errno
import functools
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import trio

from gpufs import protocol, threads
from gpufs.protocol import READ_WRITE, Attach, Attached, Detach, Detached, Pieces, ProtocolError, Refresh
from gpufs.service import _checks
from gpufs.service._holdings import Descriptor, Holdings
from gpufs.service._limits import Limits
from gpufs.service._mount import MountLease, ServedMount
from gpufs.service._peer import Client, path_of
from gpufs.units import bytes_text

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class Holder:
    """One lease and the program that has it."""

    pid: int  # 0 for a process in a PID namespace that is not visible here
    uid: int
    program: str
    mode: str = ""
    path: str = ""  # the name when it was attached, as the program's mount namespace shows it
    ino: int = 0
    private: bool = False
    bytes: int = 0
    charged: int = 0  # bytes of device memory that a private copy takes
    since: float = field(default_factory=time.time)

    def visible_to(self, uid: int) -> bool:
        """Whether a user may know of it: root and the mount's owner of all, others of their own."""
        return uid in (0, os.geteuid(), self.uid)

    def as_dict(self) -> dict[str, Any]:
        """For ``.gpufs/leases``."""
        return {
            "path": self.path,
            "inode": self.ino,
            "pid": self.pid,
            "uid": self.uid,
            "program": self.program,
            "mode": self.mode,
            "private": self.private,
            "bytes": self.bytes,
            "since": self.since,
        }

    def __str__(self) -> str:
        return f"PID {self.pid} ({self.program or 'unknown program'}, user {self.uid})"


class LeaseTable:
    """All leases of a mount. Any thread may call."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._lock = threading.Lock()  # guards all below
        self._holders: set[Holder] = set()
        self._users: Counter[int] = Counter()

    def enter(self, holder: Holder) -> None:
        """Adds a lease. OSError EMFILE if its user has too many."""
        with self._lock:
            if self._users[holder.uid] >= self._limits.attachments_per_user:
                raise OSError(errno.EMFILE, f"user {holder.uid} has {self._users[holder.uid]} files attached already")
            self._users[holder.uid] += 1
            self._holders.add(holder)

    def leave(self, holder: Holder) -> None:
        """Removes a lease that has been entered."""
        with self._lock:
            self._holders.remove(holder)
            self._users[holder.uid] -= 1
            if not self._users[holder.uid]:
                del self._users[holder.uid]

    def charge(self, holder: Holder, size: int, total: int) -> None:
        """Counts a private copy of ``size`` bytes on a device of ``total``. OSError ENOSPC beyond a user's share."""
        with self._lock:
            used = sum(one.charged for one in self._holders if one.uid == holder.uid)
            most = total if holder.uid in (0, os.geteuid()) else int(total * self._limits.private_share)
            if used + size > most:
                raise OSError(
                    errno.ENOSPC,
                    f"private copies of user {holder.uid} may take {bytes_text(most)}: {bytes_text(used)} are in use, "
                    f"{bytes_text(size)} more are needed (files that the user may write need no copy)",
                )
            holder.private = True
            holder.charged = size

    def as_list(self, uid: int) -> list[dict[str, Any]]:
        """The leases that a user may see, oldest first: root and the mount's owner all, others their own."""
        with self._lock:
            seen = [one for one in self._holders if one.visible_to(uid)]
        return [one.as_dict() for one in sorted(seen, key=lambda one: one.since)]


@dataclass(slots=True)
class _Attachment:
    """A lease of a connection. ``busy``: a request for it is being served."""

    holder: Holder
    holdings: Holdings = field(default_factory=Holdings)
    lease: MountLease | None = None
    busy: bool = False


@dataclass(frozen=True, slots=True)
class _Closing:
    """Calls a function when holdings are dropped."""

    close: Callable[[], None]


class _Outgoing:
    """Descriptors that are about to be sent. They are closed once."""

    def __init__(self, pieces: list[Any]) -> None:
        self.pieces = pieces

    def close(self) -> None:
        pieces, self.pieces = self.pieces, []
        protocol.close_all([piece.fd for piece in pieces])


class ClientLeases:
    """Serves the leases of one connection."""

    def __init__(
        self, client: Client, peer: Holder, mount: ServedMount, device: int, limits: Limits, table: LeaseTable
    ) -> None:
        """``peer``: the program at the other end; ``device``: the st_dev of the mount."""
        self._client = client
        self._peer = peer
        self._mount = mount
        self._device = device
        self._limits = limits
        self._table = table
        self._attachments: dict[int, _Attachment] = {}
        self._working = 0  # requests being served

    def __len__(self) -> int:
        return len(self._attachments)

    def accept(self, message: Attach | Refresh | Detach, descriptors: list[int], nursery: trio.Nursery) -> None:
        """Begins to serve a request, and takes its descriptors over. ProtocolError if there cannot be such a request.

        The descriptors stay the caller's after a ProtocolError.
        """
        attachment = self._attachments.get(message.id)
        if len(descriptors) != isinstance(message, Attach):
            raise ProtocolError(f"a message of type {message.TYPE} with {len(descriptors)} descriptors")
        # An interrupted client may end what it has just asked for.
        if attachment is not None and attachment.busy and not isinstance(message, Detach):
            raise ProtocolError("a request for an attachment whose last request has not been answered")
        if self._working >= self._limits.requests:
            raise ProtocolError("too many requests at once")
        if isinstance(message, Attach):
            if attachment is not None:
                raise ProtocolError("an attach message whose id is in use")
            if len(self._attachments) >= self._limits.attachments:
                raise ProtocolError("too many attachments on one connection")
            holder = dataclasses.replace(self._peer, mode=message.mode, since=time.time())
            attachment = self._attachments[message.id] = _Attachment(holder)
            descriptor = attachment.holdings.hold_descriptor(descriptors[0])
            work = functools.partial(self._attach, message, attachment, descriptor)
        elif isinstance(message, Refresh):
            work = functools.partial(self._refresh, message, attachment)
        else:
            work = functools.partial(self._detach, message, attachment)
        self._working += 1
        if attachment is not None:
            attachment.busy = True
        nursery.start_soon(self._serve, work, attachment)

    async def _serve(self, work: Callable[[], Awaitable[None]], attachment: _Attachment | None) -> None:
        try:
            await work()
        finally:
            # Work ends with the last message of its answer, and without a checkpoint after it.
            self._working -= 1
            if attachment is not None:
                attachment.busy = False

    async def close(self, seconds: float) -> None:
        """Ends all leases, and waits so long for that."""
        with trio.move_on_after(seconds):
            async with trio.open_nursery() as nursery:
                for number, attachment in list(self._attachments.items()):
                    nursery.start_soon(self._end, number, attachment)

    async def _attach(self, message: Attach, attachment: _Attachment, descriptor: Descriptor) -> None:
        def prepare() -> MountLease:
            return self._prepare(message, attachment, descriptor)

        try:
            attachment.lease = await self._client.in_thread(prepare, attachment.holdings)
        except OSError as failure:
            await self._end(message.id, attachment)
            await self._refuse(message.id, failure)
            return
        holder = attachment.holder
        copied = "a private copy of " if holder.private else ""
        self._client.log(logging.INFO, "attached %s%d bytes of %s (%s)", copied, holder.bytes, holder.path, holder.mode)
        await self._answer(message.id, attachment, attachment.lease, 0)

    def _prepare(self, message: Attach, attachment: _Attachment, descriptor: Descriptor) -> MountLease:
        """On a thread: checks the descriptor and opens the lease. OSError if a rule forbids it."""
        holder, holdings = attachment.holder, attachment.holdings
        ino, may_write = _checks.check_attachable(descriptor.fd, message.mode, self._device)
        holder.ino = ino
        holder.path = path_of(descriptor.fd)
        self._table.enter(holder)
        holdings.hold(_Closing(functools.partial(self._table.leave, holder)))
        buffer = self._mount.open_buffer(ino)
        try:
            # Now the buffer keeps the memory. The descriptor would only keep the mount busy.
            descriptor.close()
            private = not may_write and self._mount.gets_copy(buffer)
            if private:
                self._table.charge(holder, *self._mount.cost_of_copy(buffer))
            writable = message.mode == READ_WRITE
            lease = holdings.hold(self._mount.lease(buffer, writable=writable, private=private, label=str(holder)))
        finally:
            buffer.close()
        if writable:
            # The kernel does not see what the program writes: the times change at both ends of the lease.
            self._mount.written(ino)
            holdings.hold(_Closing(functools.partial(self._mount.written, ino)))
        holder.bytes = lease.bytes
        return lease

    async def _refresh(self, message: Refresh, attachment: _Attachment | None) -> None:
        if attachment is None or attachment.lease is None:
            await self._refuse(message.id, OSError(errno.EBADF, "nothing is attached under this number"))
            return
        lease = attachment.lease

        def refresh() -> int:
            lease.refresh()
            return lease.bytes

        try:
            attachment.holder.bytes = await self._client.in_thread(refresh, attachment.holdings)
        except OSError as failure:
            await self._refuse(message.id, failure)
            return
        await self._answer(message.id, attachment, lease, message.start)

    async def _detach(self, message: Detach, attachment: _Attachment | None) -> None:
        await self._end(message.id, attachment)
        await self._send(Detached(message.id))

    async def _end(self, number: int, attachment: _Attachment | None) -> None:
        """Ends a lease and waits until its memory is released. Another one may have its number by now, and stays."""
        if attachment is None or self._attachments.get(number) is not attachment:
            return
        del self._attachments[number]
        released = trio.Event()
        token = trio.lowlevel.current_trio_token()

        def report() -> None:
            with contextlib.suppress(trio.RunFinishedError):
                token.run_sync_soon(released.set)

        threads.in_background(functools.partial(attachment.holdings.drop, report))
        await released.wait()

    # ---- answers ----

    async def _answer(self, number: int, attachment: _Attachment, lease: MountLease, start: int) -> None:
        """Sends the memory from ``start`` on."""

        def take() -> tuple[_Outgoing, int]:
            size = lease.bytes
            return attachment.holdings.hold(_Outgoing(lease.pieces(start))), size

        try:
            outgoing, size = await self._client.in_thread(take, attachment.holdings)
        except OSError as failure:
            await self._refuse(number, failure)
            return
        try:
            pieces = outgoing.pieces
            attached = Attached(
                number,
                driver=lease.driver,
                pci_address=lease.pci_address,
                device=lease.device,
                size=size,
                private=lease.private,
                pieces=len(pieces),
            )
            await self._send(attached)
            for first in range(0, len(pieces), protocol.MAX_PIECES):
                some = pieces[first : first + protocol.MAX_PIECES]
                message = Pieces(number, [one.offset for one in some], [one.bytes for one in some])
                await self._send(message, [one.fd for one in some])
        finally:
            outgoing.close()
            attachment.holdings.release(outgoing)

    async def _refuse(self, number: int, failure: OSError) -> None:
        error = failure.errno or errno.EIO
        text = failure.strerror or os.strerror(error)
        self._client.log(logging.INFO, "attach refused: %s %s", errno.errorcode.get(error, error), text)
        await self._send(Attached(number, error, protocol.shorten(text)))

    async def _send(self, message: protocol.ServerMessage, descriptors: list[int] | None = None) -> None:
        """Ends the connection if the client does not take the message: it would wait forever for an answer."""
        try:
            with trio.fail_after(self._limits.send):
                await self._client.send(message, descriptors or [])
        except (OSError, trio.TooSlowError):
            self._client.hang_up()
