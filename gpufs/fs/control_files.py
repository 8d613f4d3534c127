"""The files below ``.gpufs``: read-only, and made when they are opened."""

import stat
from collections.abc import Callable
from dataclasses import dataclass
from errno import EBUSY
from typing import Final

import trio

from gpufs.engine import Trace
from gpufs.fs.handles import Opened
from gpufs.fs.nodes import Node

# Bytes that one read of a stream returns at most: the kernel may find no memory for a larger message.
_STREAM_READ_BYTES: Final = 64 << 10
# Seconds for which an open waits for the end of another stream of which there can be only one. The kernel may report
# the last close of a descriptor after the next open.
_STREAM_SECONDS: Final = 2.0
_RETRY_SECONDS: Final = 0.02


@dataclass(slots=True)
class _OpenFile(Opened):
    content: bytes | Trace

    async def read(self, offset: int, size: int) -> bytes:
        if isinstance(self.content, Trace):
            return self.content.read(min(size, _STREAM_READ_BYTES))
        return self.content[offset : offset + size]

    async def release(self) -> None:
        if isinstance(self.content, Trace):
            self.content.close()


class ControlFile(Node):
    """A file whose content ``produce`` makes at each open, for the user that opens it. A trace grows without an end."""

    __slots__ = ("_produce",)

    def __init__(self, ino: int, produce: Callable[[int], bytes | Trace]) -> None:
        super().__init__(ino, stat.S_IFREG, -1)
        self.fixed = True
        self._produce = produce

    async def open(self, uid: int) -> Opened:
        """The content for a user. EBUSY if there can be only one at a time and another one stays open."""
        deadline = trio.current_time() + _STREAM_SECONDS
        while True:
            try:
                return _OpenFile(self._produce(uid))
            except OSError as failure:
                if failure.errno != EBUSY or trio.current_time() >= deadline:
                    raise
            await trio.sleep(_RETRY_SECONDS)
