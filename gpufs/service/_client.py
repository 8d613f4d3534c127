"""One client: its connection, its messages, and how much it may use."""

import contextlib
import errno
import functools
import logging
import math
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import trio

from gpufs import protocol, threads
from gpufs._version import __version__
from gpufs.protocol import (
    Attach,
    ClientMessage,
    Copy,
    Detach,
    Goodbye,
    Hello,
    ProtocolError,
    Refresh,
    Register,
    ServerMessage,
    SetQuota,
    Unregister,
    Welcome,
)
from gpufs.service import _checks
from gpufs.service._copies import ClientCopies, Counters
from gpufs.service._holdings import Abandoned, Holdings
from gpufs.service._leases import ClientLeases, Holder, LeaseTable
from gpufs.service._limits import Limits
from gpufs.service._mount import ServedMount
from gpufs.service._peer import Peer, program_of
from gpufs.service._register import Registrations, Registry, answer_of

log = logging.getLogger(__name__)

T = TypeVar("T")
# Seconds between attempts to send descriptors while the kernel takes no more of them from this process.
_IN_FLIGHT_PAUSE: Final = 0.01


class ClientConnection:
    """Serves one connection until it ends. Owns its socket."""

    def __init__(
        self,
        sock: socket.socket,
        peer: Peer,
        number: int,
        mount: ServedMount,
        device: int,
        limits: Limits,
        counters: Counters,
        table: LeaseTable,
        registry: Registry,
    ) -> None:
        """``device``: the st_dev of the mount; ``number``: names the connection in logs."""
        sock.setblocking(False)
        self._registrations = Registrations(registry, peer.pid, peer.uid, program_of(peer.pid))
        self._sock = sock
        self._peer = peer
        self._mount = mount
        self._device = device
        self._limits = limits
        self._counters = counters
        self._threads = trio.CapacityLimiter(limits.threads)
        self._sending = trio.Lock()
        self._at_rest = 0.0  # since when there was neither a message nor a copy, by trio's clock
        self._greeted = False  # and has kept to the protocol since
        self._name = f"connection {number} ({peer})"
        self._holder = Holder(peer.pid, peer.uid, program_of(peer.pid))
        self._leases = ClientLeases(self, self._holder, mount, device, limits, table)
        self._copies = ClientCopies(
            self, peer, number, self._holder.program, mount, device, limits, counters, self._copy_ended
        )

    async def run(self) -> bool:
        """Returns when the connection has ended; the client's copies are cancelled and its leases end then.

        False if the client broke the protocol or did not say hello.
        """
        try:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                await self._serve()
        except ProtocolError as violation:
            self._counters.violations += 1
            self._greeted = False
            self.log(logging.INFO, "ended: %s", violation.strerror)
            self._say_goodbye(violation.errno or errno.EPROTO, str(violation.strerror))
        except trio.TooSlowError:
            self.log(logging.INFO, "ended: too slow")
            self._say_goodbye(errno.ETIMEDOUT, "too slow")
        except BaseException:
            # Cancelled comes alone, or as a group from the copies' nursery.
            if trio.current_effective_deadline() == -math.inf:
                self._say_goodbye(errno.ESHUTDOWN, "the mount is ending")
            raise
        finally:
            self._sock.close()
            await self._end_registrations()
            with trio.CancelScope(shield=True):
                await self._leases.close(self._limits.grace)
        return self._greeted

    def copies(self, uid: int) -> list[dict[str, Any]]:
        """The copies in progress that a user may see, for ``.gpufs/activity``."""
        return self._copies.as_list() if self._holder.visible_to(uid) else []

    def log(self, level: int, text: str, *arguments: object) -> None:
        log.log(level, "%s: " + text, self._name, *arguments, extra={"user": self._peer.uid})

    # ---- messages ----

    async def _serve(self) -> None:
        with trio.fail_after(self._limits.hello):
            message, descriptors = await self._receive()
            self._discard(descriptors)
            if message is None:
                return
            if not isinstance(message, Hello):
                raise ProtocolError("the first message is not hello")
            if protocol.VERSION not in message.versions:
                raise ProtocolError(f"only version {protocol.VERSION} is spoken here", errno.EPROTONOSUPPORT)
            self._greeted = True
            self.log(logging.DEBUG, "%r", message.program)
            await self.send(Welcome(protocol.VERSION, f"gpufs {__version__}", self._limits.requests))
        violation = None
        async with trio.open_nursery() as nursery:
            try:
                await self._read(nursery)
            except (ProtocolError, trio.TooSlowError, BrokenPipeError, ConnectionResetError) as error:
                violation = error  # raised outside the nursery, which would wrap it
            nursery.cancel_scope.cancel()
        if violation is not None:
            raise violation

    async def _read(self, nursery: trio.Nursery) -> None:
        window, count = trio.current_time(), 0
        while True:
            message, descriptors = await self._receive_within_limits()
            if message is None:
                self._discard(descriptors)
                return
            if isinstance(message, Copy | Attach | Refresh | Detach):
                try:
                    if isinstance(message, Copy):
                        self._copies.accept(message, descriptors, nursery)
                    else:
                        self._leases.accept(message, descriptors, nursery)
                except ProtocolError:
                    self._discard(descriptors)
                    raise
            elif isinstance(message, Register | Unregister | SetQuota):
                await self._change(message, descriptors)
            else:
                self._discard(descriptors)
                if isinstance(message, Hello):
                    raise ProtocolError("a second hello")
                self._copies.cancel(message.id)
            count += 1
            if count >= self._limits.messages_per_second:
                await trio.sleep_until(window + 1)
                window, count = trio.current_time(), 0

    @property
    def _busy(self) -> bool:
        """Whether the connection has a purpose without any message."""
        return bool(self._copies or self._leases or self._registrations)

    async def _receive_within_limits(self) -> tuple[ClientMessage | None, list[int]]:
        """As _receive(). TooSlowError after too long without a message, a copy, a lease or a registration."""
        self._at_rest = trio.current_time()
        while True:
            since = trio.current_time() if self._busy else self._at_rest
            with trio.move_on_at(since + self._limits.idle):
                return await self._receive()
            if not self._busy and trio.current_time() >= self._at_rest + self._limits.idle:
                raise trio.TooSlowError

    async def _receive(self) -> tuple[ClientMessage | None, list[int]]:
        """The next message and its descriptors, now the caller's; None at the end. No checkpoint after receiving."""
        await trio.lowlevel.checkpoint()
        while True:
            try:
                data, descriptors = protocol.receive(self._sock, discard=self._discard)
                break
            except BlockingIOError:
                await trio.lowlevel.wait_readable(self._sock)
        if not data:
            return None, descriptors
        try:
            return protocol.decode_client(data), descriptors
        except ProtocolError:
            self._discard(descriptors)
            raise

    async def send(self, message: ServerMessage, descriptors: Sequence[int] = ()) -> None:
        """Sends a message as soon as the client has taken earlier ones."""
        async with self._sending:  # one task at a time may wait for a descriptor
            while True:
                try:
                    protocol.send(self._sock, message, descriptors)
                    return
                except BlockingIOError:
                    await trio.lowlevel.wait_writable(self._sock)
                except OSError as error:
                    if error.errno != errno.ETOOMANYREFS:  # the client has not received earlier descriptors yet
                        raise
                    await trio.sleep(_IN_FLIGHT_PAUSE)

    def hang_up(self) -> None:
        """Ends the connection, because the client would wait forever for a message that cannot be sent."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def send_if_possible(self, message: ServerMessage) -> None:
        """For messages that may be dropped: a client that does not read gets no progress."""
        try:
            protocol.send(self._sock, message)
        except OSError:
            pass

    def _say_goodbye(self, error: int, text: str) -> None:
        self.send_if_possible(Goodbye(error, protocol.shorten(text)))

    def _discard(self, descriptors: list[int]) -> None:
        """Closes descriptors on a thread: closing calls the file's server, which may be this process."""
        if descriptors:
            threads.in_background(functools.partial(protocol.close_all, descriptors))

    # ---- registrations and limits ----

    async def _change(self, message: Register | Unregister | SetQuota, descriptors: list[int]) -> None:
        """Serves one message. Registrations end with the connection, also if the answer is not sent."""
        error, text = 0, ""
        try:
            try:
                if isinstance(message, Register):
                    await self._registrations.add(message, descriptors)
                elif isinstance(message, SetQuota):
                    ino = _checks.check_limitable(descriptors, self._peer.uid, self._device)
                    self._mount.set_limit(ino, message.uid, message.limit)
                    self.log(logging.INFO, "%s", message)
                else:
                    await self._registrations.remove(message.id)
            finally:
                self._discard(descriptors)
        except OSError as failure:
            error, text = answer_of(failure)
        answer: protocol.Registered | protocol.Unregistered | protocol.QuotaSet
        if isinstance(message, Register):
            answer = protocol.Registered(message.id, error, text)
        elif isinstance(message, SetQuota):
            answer = protocol.QuotaSet(message.id, error, text)
        else:
            answer = protocol.Unregistered(message.id, error, text)
        self._at_rest = trio.current_time()
        with trio.fail_after(self._limits.send):
            await self.send(answer)

    async def _end_registrations(self) -> None:
        ending = trio.current_effective_deadline() == -math.inf
        await self._registrations.close(self._limits.last_send if ending else self._limits.withdrawal)

    def _copy_ended(self) -> None:
        self._at_rest = trio.current_time()

    # ---- threads ----

    async def in_thread(self, work: Callable[[], T], holdings: Holdings) -> T:
        """Runs work that may block on one of the client's threads, with these holdings in use.

        Cancellation abandons the thread; it closes the holdings if it was the last to use them.
        """

        def guarded() -> T:
            with holdings.use():
                return work()

        try:
            return await threads.run(guarded, abandon_on_cancel=True, limiter=self._threads)
        except Abandoned:
            raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED)) from None
