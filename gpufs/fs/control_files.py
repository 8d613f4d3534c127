"""The files below ``.gpufs``: read-only, and made when they are opened."""

import functools
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from errno import EBUSY
from typing import Final, TypeAlias, TypeVar

import trio

from gpufs import threads
from gpufs.engine import Trace
from gpufs.fs.handles import Opened
from gpufs.fs.nodes import Node

# Bytes that one read of a stream returns at most: the kernel may find no memory for a larger message.
_STREAM_READ_BYTES: Final = 64 << 10
# Seconds for which an open waits for the end of another stream of which there can be only one. The kernel may report
# the last close of a descriptor after the next open.
_STREAM_SECONDS: Final = 2.0
_RETRY_SECONDS: Final = 0.02
# A text whose making took some time is given out again for so many times that time: programs that read it without a
# pause take no more than that part of the loop.
_REUSE: Final = 10

T = TypeVar("T")
# A text, what makes it on a thread, or a stream.
Content: TypeAlias = bytes | Callable[[], bytes] | Trace


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    """The result, and the seconds of this thread that it took."""
    began = time.thread_time()
    result = work()
    return result, time.thread_time() - began


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
    """A file whose content ``produce`` makes for the user that opens it. A trace grows without an end."""

    __slots__ = ("_making", "_produce", "_texts")

    def __init__(self, ino: int, produce: Callable[[int], Content]) -> None:
        super().__init__(ino, stat.S_IFREG, -1)
        self.fixed = True
        self._produce = produce
        self._making = trio.Lock()
        self._texts: dict[int, tuple[bytes, float]] = {}  # by user, and until when each may be given out

    async def open(self, uid: int) -> Opened:
        """The content for a user. EBUSY if there can be only one at a time and another one stays open."""
        deadline = trio.current_time() + _STREAM_SECONDS
        while True:
            try:
                return _OpenFile(await self._content(uid))
            except OSError as failure:
                if failure.errno != EBUSY or trio.current_time() >= deadline:
                    raise
            await trio.sleep(_RETRY_SECONDS)

    async def _content(self, uid: int) -> bytes | Trace:
        async with self._making:  # the next one finds what this one has made
            now = time.monotonic()
            self._texts = {user: found for user, found in self._texts.items() if found[1] > now}
            if uid in self._texts:
                return self._texts[uid][0]
            content, seconds = _timed(lambda: self._produce(uid))
            if isinstance(content, Trace):
                return content
            if isinstance(content, bytes):
                text = content
            else:
                text, more = await threads.run(functools.partial(_timed, content))
                seconds += more
            self._texts[uid] = (text, time.monotonic() + _REUSE * seconds)
            return text
