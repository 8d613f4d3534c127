"""The connection to one client: its messages, its threads, and the process at the other end."""

import contextlib
import errno
import logging
import os
import socket
from collections.abc import Sequence
from typing import Final, NamedTuple, cast

import trio

from gpufs import protocol, syscalls
from gpufs.protocol import ClientMessage, Goodbye, ProtocolError, ServerMessage
from gpufs.service._scope import RequestScope
from gpufs.service._user import Both, Limits, User

log = logging.getLogger(__name__)

# Seconds between attempts to send descriptors while the kernel takes no more of them from this process.
_IN_FLIGHT_PAUSE: Final = 0.01
_COMMAND_BYTES: Final = 15  # of a process's name, as the kernel keeps it


class ClientProcess(NamedTuple):
    """The process at the other end, for logs and limits; it grants nothing. ``pid``: 0 if it is not visible here."""

    pid: int
    uid: int
    program: str

    def __str__(self) -> str:
        return f"PID {self.pid} ({self.program or 'unknown program'}, user {self.uid})"


def process_of(sock: socket.socket) -> ClientProcess:
    """The process at the other end of a socket."""
    pid, uid = syscalls.peer_of(sock)
    try:
        with open(f"/proc/{pid}/comm", "rb") as file:
            return ClientProcess(pid, uid, file.read(_COMMAND_BYTES + 1).decode(errors="replace").strip())
    except OSError:
        return ClientProcess(pid, uid, "")


def path_behind(fd: int) -> str:
    """The path of an open file as this process sees it, "" if it cannot be found."""
    try:
        return os.readlink(syscalls.path_of(fd))
    except OSError:
        return ""


class ClientChannel:
    """A connection. ``number`` names it in logs."""

    def __init__(self, sock: socket.socket, peer: ClientProcess, number: int, limits: Limits, user: User) -> None:
        sock.setblocking(False)
        self.peer = peer
        self.number = number
        self.user = user
        self._sock = sock
        self._limits = limits
        both = Both(trio.CapacityLimiter(limits.threads), user.threads)
        self._threads = cast(trio.CapacityLimiter, both)
        self._sending = trio.Lock()
        self._next: RequestScope | None = None  # of the next message

    def log(self, level: int, text: str, *arguments: object) -> None:
        log.log(level, "connection %d, %s: " + text, self.number, self.peer, *arguments, extra={"user": self.peer.uid})

    async def wait_for_message(self) -> None:
        """Wait until the socket is readable, and this user may have one more message whose descriptors are open."""
        await trio.lowlevel.checkpoint()
        await trio.lowlevel.wait_readable(self._sock)
        if self._next is None:
            scope = self.new_scope()
            await scope.take_place()
            self._next = scope

    def new_scope(self) -> RequestScope:
        """Return the scope of a request on this connection."""
        return RequestScope(self.user, self._threads)

    def receive(self) -> tuple[ClientMessage | None, RequestScope] | None:
        """The next message, None at the end, and its scope, now the caller's. After wait_for_message().

        None if there is no message after all.
        """
        scope = self._next
        assert scope is not None

        def discard(numbers: list[int]) -> None:
            scope.take(numbers)
            scope.discard()

        try:
            data, numbers = protocol.receive(self._sock, discard=discard)
        except BlockingIOError:
            return None
        scope.take(numbers)
        self.leave_place()
        if not data:
            return None, scope
        try:
            return protocol.decode_client(data), scope
        except ProtocolError:
            scope.discard()
            raise

    def leave_place(self) -> None:
        """No message is being received: free its place in the user's share."""
        if self._next is not None:
            self._next.leave_place()
            self._next = None

    async def answer(self, message: ServerMessage, descriptors: Sequence[int] = (), seconds: float = 0) -> None:
        """Send a message. A client that does not take it would wait forever for it: its connection ends.

        ``seconds``: how long it may take, by default as the limits say.
        """
        try:
            with trio.fail_after(seconds or self._limits.send):
                await self._send(message, descriptors)
        except (OSError, trio.TooSlowError):
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)

    async def _send(self, message: ServerMessage, descriptors: Sequence[int]) -> None:
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

    def send_if_possible(self, message: ServerMessage) -> None:
        """Send a message that may be dropped: a client that does not read gets no progress."""
        with contextlib.suppress(OSError):
            protocol.send(self._sock, message)

    def say_goodbye(self, error: int, text: str) -> None:
        """The last message, and why."""
        self.send_if_possible(Goodbye(error, protocol.shorten(text)))
