"""Messages and bytes of files over two descriptors, each with its length before it."""

from __future__ import annotations

import errno
import fcntl
import os
import select
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Protocol

import msgspec

from gpufs.hosts.messages import Alive, Message, Refused, Report
from gpufs.syscalls import start_thread

BLOCK_BYTES: Final = 4 << 20  # of a file, in one frame
_MESSAGE_BYTES: Final = 8 << 20  # more than the names that one command can have
_PIPE_BYTES: Final = 1 << 20
_ALIVE_SECONDS: Final = 2.0
# The longest time for one message, or to take a block, while the other side shows that it is alive: it may read a file
# of a terabyte for its checksum.
_STALLED_SECONDS: Final = 3600.0
_HEADER: Final = struct.Struct(">?I")  # whether it is a message, and its length

_MESSAGES: Final = msgspec.msgpack.Decoder(Message)
_ENCODER: Final = msgspec.msgpack.Encoder()


class CancelSignal(Protocol):
    """The failure that ends all calls of a channel."""

    cancelled: bool

    def fileno(self) -> int:
        """A descriptor that is readable once cancelled."""


class ChannelError(OSError):
    """Nothing more can be sent or received."""


class ConnectionEnded(ChannelError):
    """The other side has ended, or has sent nothing for too long."""


class RefusedError(ChannelError):
    """The other side ends the copy; ``filename`` is there, or empty."""


class HostProtocolError(ChannelError):
    """The other side sent what the protocol does not allow."""

    def __init__(self, text: str) -> None:
        super().__init__(errno.EPROTO, f"the other side does not keep to the protocol: {text}")


class HostChannel:
    """The connection to the other side. The descriptors stay the caller's, and become non-blocking.

    Thread-safe: send() and stop(). One thread receives. ``silence``: seconds without a message after which the other
    side counts as dead. ``cancel``: once it is cancelled all calls raise ChannelError ECANCELED.
    """

    def __init__(self, incoming: int, outgoing: int, *, silence: float, cancel: CancelSignal | None = None) -> None:
        self._incoming = incoming
        self._outgoing = outgoing
        self._silence = silence
        self._cancel = cancel
        self._stopped = False
        self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._send_lock = threading.Lock()
        self._block = memoryview(bytearray(BLOCK_BYTES))
        self._closed = threading.Event()
        for fd in (incoming, outgoing):
            os.set_blocking(fd, False)
            with suppress(OSError):  # not a pipe, or the user's pipes have too much memory already
                fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._heart: threading.Thread | None = None

    def start_alive(self, end: Callable[[], None] = lambda: None) -> None:
        """Send signs of life from now on. ``end`` is called once the other side takes none."""
        self._heart = start_thread(self._beat, end)

    def close(self) -> None:
        """End the thread that sends signs of life."""
        self._closed.set()
        self.stop()
        if self._heart is not None:
            self._heart.join()
        os.close(self._stop)

    def stop(self) -> None:
        """Make all calls, also of other threads, raise ChannelError."""
        self._stopped = True
        os.eventfd_write(self._stop, 1)

    def send(self, message: Message | Report) -> None:
        self._send(True, _ENCODER.encode(message))

    def send_data(self, data: memoryview) -> None:
        """Send bytes of a file, at most BLOCK_BYTES."""
        self._send(False, data)

    def receive(self) -> Message | memoryview:
        """Return the next message, or bytes of a file, which are valid until the next call."""
        deadline = time.monotonic() + _STALLED_SECONDS

        def fill(space: memoryview) -> None:
            self._fill(space, self._silence, deadline)

        while True:
            header = bytearray(_HEADER.size)
            fill(memoryview(header))
            is_message, size = _HEADER.unpack(header)
            if not 0 < size <= (_MESSAGE_BYTES if is_message else BLOCK_BYTES):
                raise HostProtocolError(f"a frame of {size} bytes")
            if not is_message:
                fill(self._block[:size])
                return self._block[:size]
            content = bytearray(size)
            fill(memoryview(content))
            try:
                message: Message = _MESSAGES.decode(content)
            except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
                raise HostProtocolError(str(error)) from None
            if isinstance(message, Refused):
                raise RefusedError(message.error, message.text, os.fsdecode(message.path))
            if not isinstance(message, Alive):
                return message

    def read_line(self, most: int, seconds: float) -> bytes:
        """Return the next bytes up to a line feed, without it, or ``most`` bytes that have none."""
        line = bytearray()
        byte = bytearray(1)
        deadline = time.monotonic() + 2 * seconds
        while len(line) < most:
            try:
                self._fill(memoryview(byte), seconds, deadline)
            except ConnectionEnded:
                if not line:
                    raise
                break
            if byte == b"\n":
                break
            line += byte
        return bytes(line)

    def write_line(self, line: bytes) -> None:
        with self._send_lock:
            self._write([line + b"\n"])

    def check(self) -> None:
        """Raise ChannelError if nothing more can be sent."""
        if self._stopped or (self._cancel is not None and self._cancel.cancelled):
            raise ChannelError(errno.ECANCELED, os.strerror(errno.ECANCELED))

    # ---- bytes ----

    def _beat(self, end: Callable[[], None]) -> None:
        try:
            while not self._closed.wait(_ALIVE_SECONDS):
                self.send(Alive())
        except OSError:
            end()  # a thread that sends or receives sees it, too

    def _send(self, is_message: bool, content: bytes | memoryview) -> None:
        with self._send_lock:
            self._write([_HEADER.pack(is_message, len(content)), content])

    def _write(self, parts: list[bytes | memoryview]) -> None:
        views = [memoryview(part) for part in parts]
        while views:
            self.check()
            try:
                count = os.writev(self._outgoing, views)
            except BlockingIOError:
                if not self._await(self._outgoing, select.POLLOUT, _STALLED_SECONDS):
                    text = f"the connection ended: nothing was taken for {_STALLED_SECONDS:.0f} seconds"
                    raise ConnectionEnded(errno.ETIMEDOUT, text) from None
                continue
            except BrokenPipeError:
                raise ConnectionEnded(errno.ECONNRESET, "the connection ended") from None
            while views and count >= len(views[0]):
                count -= len(views.pop(0))
            if views:
                views[0] = views[0][count:]

    def _fill(self, space: memoryview, silence: float, deadline: float) -> None:
        while space:
            self.check()
            try:
                count = os.readv(self._incoming, [space])
            except BlockingIOError:
                left = deadline - time.monotonic()
                if left <= 0 or not self._await(self._incoming, select.POLLIN, min(silence, left)):
                    what = f"nothing came for {silence:.0f} seconds" if left > silence else "it makes no progress"
                    raise ConnectionEnded(errno.ETIMEDOUT, f"the connection ended: {what}") from None
                continue
            except ConnectionResetError:
                count = 0
            if not count:
                raise ConnectionEnded(errno.ECONNRESET, "the connection ended")
            space = space[count:]

    def _await(self, fd: int, event: int, seconds: float) -> bool:
        """Wait until a descriptor is ready, or nothing more can be sent. False if ``seconds`` have passed."""
        poll = select.poll()
        poll.register(fd, event)
        for other in (self._stop, self._cancel):
            if other is not None:
                poll.register(other, select.POLLIN)
        # If this process was stopped, time has passed although something has come.
        return bool(poll.poll(seconds * 1000) or poll.poll(0))
