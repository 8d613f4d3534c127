"""The files below ``.gpufs``: read-only, and made when they are opened."""

import stat
from collections.abc import Callable
from dataclasses import dataclass
from errno import EBUSY
from typing import Final, Protocol

import trio

from gpufs.fs.handles import Opened
from gpufs.fs.nodes import Node

# Bytes that one read of a stream returns at most: the kernel may find no memory for a larger message.
_STREAM_READ_BYTES: Final = 64 << 10
# Seconds for which an open waits for the end of another stream of which there can be only one. The kernel may report
# the last close of a descriptor after the next open.
_STREAM_SECONDS: Final = 2.0
_RETRY_SECONDS: Final = 0.02


class ControlStream(Protocol):
    """What a program reads from an open StreamFile."""

    def read(self, size: int) -> bytes:
        """What there is now, at most ``size`` bytes; b"" if there is nothing yet."""

    def close(self) -> None:
        """The reader has gone."""


@dataclass(slots=True)
class _OpenContent(Opened):
    content: bytes

    async def read(self, offset: int, size: int) -> bytes:
        return self.content[offset : offset + size]


@dataclass(slots=True)
class _OpenStream(Opened):
    stream: ControlStream

    async def read(self, offset: int, size: int) -> bytes:
        return self.stream.read(min(size, _STREAM_READ_BYTES))

    async def release(self) -> None:
        self.stream.close()


class ControlFile(Node):
    """A file whose content ``produce`` makes at each open, for the user that opens it."""

    __slots__ = ("_produce",)

    def __init__(self, ino: int, produce: Callable[[int], bytes]) -> None:
        super().__init__(ino, stat.S_IFREG, -1)
        self.fixed = True
        self._produce = produce

    async def open(self, uid: int) -> Opened:
        """The content for a user."""
        return _OpenContent(self._produce(uid))


class StreamFile(Node):
    """A file without an end: each open starts what ``begin`` makes."""

    __slots__ = ("_begin",)

    def __init__(self, ino: int, begin: Callable[[], ControlStream]) -> None:
        super().__init__(ino, stat.S_IFREG, -1)
        self.fixed = True
        self._begin = begin

    async def open(self, uid: int) -> Opened:
        """A new stream. EBUSY if there can be only one and it stays open."""
        deadline = trio.current_time() + _STREAM_SECONDS
        while True:
            try:
                return _OpenStream(self._begin())
            except OSError as failure:
                if failure.errno != EBUSY or trio.current_time() >= deadline:
                    raise
            await trio.sleep(_RETRY_SECONDS)
