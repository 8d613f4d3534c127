"""A client's connection to the daemon of a mount: one request at a time, by one thread at a time."""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from collections.abc import Callable, Sequence
from typing import Final, Self

from gpufs import protocol
from gpufs._version import __version__
from gpufs.protocol import (
    ClientMessage,
    Copy,
    Done,
    Goodbye,
    Hello,
    ProtocolError,
    Register,
    Result,
    Revoke,
    ServerMessage,
    SetQuota,
    Unregister,
    Welcome,
)

_HELLO_SECONDS: Final = 15.0
# After a cancellation, and when an exception passes through: longer than the daemon waits for a copy that it has
# cancelled. It answers at once unless a file's server or a device hangs.
_CANCEL_SECONDS: Final = 8.0


class Cancellation:
    """Ends copies from another thread or from a signal handler: hand it to them, then call :meth:`cancel`."""

    __slots__ = ("_fd", "cancelled")

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.cancelled = False

    def cancel(self) -> None:
        """All copies that have this object end with CopyError ECANCELED, soon. A second call does nothing."""
        if not self.cancelled:
            self.cancelled = True
            os.eventfd_write(self._fd, 1)

    def fileno(self) -> int:
        """A descriptor that is readable once cancelled."""
        return self._fd

    def __del__(self) -> None:
        os.close(self._fd)


class Connection:
    """A connection to a daemon over a socket, which it owns. After an exception from :meth:`copy` it is unusable."""

    __slots__ = ("_lost", "_next", "_sock", "last")

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._next = 1
        self._lost = False  # whether the daemon or the socket has failed
        self.last: Result | None = None  # of the copy that was asked for last
        try:
            sock.settimeout(_HELLO_SECONDS)
            protocol.send(sock, Hello([protocol.VERSION], f"gpufs {__version__}"))
            if not isinstance(self._receive(), Welcome):
                raise ProtocolError("the daemon sent no welcome")
            sock.settimeout(None)
        except BaseException:
            sock.close()
            raise

    @property
    def ended(self) -> bool:
        """Whether the daemon has closed the connection, or this side has."""
        if self._lost or self._sock.fileno() < 0:
            return True
        poll = select.poll()
        poll.register(self._sock, 0)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Ends the connection; the daemon cancels what is in progress."""
        self._sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def copy(
        self,
        direction: str,
        host_fd: int,
        mount_fd: int,
        *,
        host_offset: int = 0,
        offset: int = 0,
        size: int | None = None,
        fastpath: str | None = None,
        sync: str = "none",
        interval: float = 0.0,
        progress: Callable[[protocol.Progress], None] | None = None,
        cancel: Cancellation | None = None,
    ) -> Result:
        """Has the daemon copy between two open files; both stay the caller's.

        Returns the daemon's result, which may be a failure. OSError when the daemon ends before it: its last words,
        or ECONNRESET. Any other exception (KeyboardInterrupt, one that ``progress`` raises) first cancels the copy and
        waits for its end, so that the destination no longer changes; ``last`` is the result then, or None.
        """
        request = Copy(self._next, direction, host_offset, offset, size, fastpath, sync, interval if progress else 0.0)
        self._next += 1
        self.last = None
        cancelled = False
        try:
            self._send(request, (host_fd, mount_fd))
            while True:
                if cancel is not None and not cancelled and self._wait(cancel):
                    cancelled = True
                    self._send(protocol.Cancel(request.id))
                    self._sock.settimeout(_CANCEL_SECONDS)
                message = self._receive()
                if isinstance(message, Result) and message.id == request.id:
                    self._sock.settimeout(None)
                    self.last = message
                    return message
                if isinstance(message, protocol.Progress) and message.id == request.id and progress is not None:
                    progress(message)
        except BaseException:
            if not self._lost:
                self._abandon(request.id)
            raise

    def request(self, message: Register | Unregister | SetQuota | Revoke, descriptors: Sequence[int] = ()) -> None:
        """Sends a message and waits until it is done. OSError if the daemon refuses, or ends before.

        The answer to a request that was interrupted is skipped by the next one.
        """
        self._send(message, descriptors)
        while True:
            answer = self._receive()
            if isinstance(answer, Done) and answer.id == message.id:
                break
        if answer.error:
            raise OSError(answer.error, answer.message)

    def _wait(self, cancel: Cancellation) -> bool:
        """Waits for a message or for the cancellation; True for the latter."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        poll.register(cancel, select.POLLIN)
        return any(fd == cancel.fileno() for fd, _ in poll.poll())

    def _abandon(self, number: int) -> None:
        """Cancels a copy and waits for its end, but not forever."""
        deadline = time.monotonic() + _CANCEL_SECONDS
        try:
            protocol.send(self._sock, protocol.Cancel(number))
            while (left := deadline - time.monotonic()) > 0:
                self._sock.settimeout(left)
                message = self._receive()
                if isinstance(message, Result) and message.id == number:
                    self.last = message
                    break
        except OSError:
            pass
        self._sock.close()

    def _send(self, message: ClientMessage, descriptors: Sequence[int] = ()) -> None:
        """Sends a message. If the daemon has ended the connection, _receive() reports why."""
        try:
            protocol.send(self._sock, message, descriptors)
        except (BrokenPipeError, ConnectionResetError):
            pass
        except OSError:
            self._lost = True
            raise

    def _receive(self) -> ServerMessage:
        message, descriptors = self._receive_all(protocol.MAX_DESCRIPTORS)
        protocol.close_all(descriptors)
        return message

    def _receive_all(self, most: int) -> tuple[ServerMessage, list[int]]:
        """The next message, and at most so many descriptors, which are the caller's."""
        try:
            return self._next_message(most)
        except OSError:
            self._lost = True
            raise

    def _next_message(self, most: int) -> tuple[ServerMessage, list[int]]:
        try:
            try:
                data, descriptors = protocol.receive(self._sock, most)
            except ConnectionResetError:
                # Comes once, before anything else, if the daemon closed without reading our last message.
                data, descriptors = protocol.receive(self._sock, most)
        except TimeoutError:
            raise OSError(errno.ETIMEDOUT, "the daemon of the mount does not answer") from None
        try:
            if not data:
                raise OSError(errno.ECONNRESET, "the daemon of the mount has ended")
            message = protocol.decode_server(data)
            if isinstance(message, Goodbye):
                raise OSError(message.error or errno.ECONNRESET, message.message)
        except OSError:
            protocol.close_all(descriptors)
            raise
        return message, descriptors
