"""The files below ``.gpufs``: read-only, and made when they are opened."""

import functools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from errno import EBUSY
from typing import Final, TypeAlias, TypeVar

import trio

from gpufs import threads
from gpufs.engine import Trace
from gpufs.fs.handles import Opened

# Bytes that one read of a stream returns at most: the kernel may find no memory for a larger message.
_STREAM_READ_BYTES: Final = 64 << 10
# Seconds for which an open waits for the end of another stream of which there can be only one. The kernel may report
# the last close of a descriptor after the next open.
_STREAM_SECONDS: Final = 2.0
_RETRY_SECONDS: Final = 0.02
# A user's next text is made so many times later as making the last one took: reading without a pause takes no more than
# that part of the loop.
_PAUSE: Final = 10

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


@dataclass(slots=True)
class _Reader:
    """A user that reads a control file. ``began``: when the last text was begun; ``next``: when one may be made."""

    making: trio.Lock = field(default_factory=trio.Lock)
    text: bytes = b""
    began: float = 0.0
    next: float = 0.0


class ControlFile:
    """A file whose content ``produce`` makes for the user that opens it. A trace grows without an end."""

    def __init__(self, produce: Callable[[int], Content]) -> None:
        self._produce = produce
        self._privileged = (0, os.geteuid())
        self._readers: dict[int, _Reader] = {}  # by user

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
        if uid in self._privileged:
            return (await self._make(uid))[0]
        came = trio.current_time()
        now = {user: one for user, one in self._readers.items() if one.next > came or one.making.locked()}
        reader = now.setdefault(uid, _Reader())
        self._readers = now
        async with reader.making:
            if reader.began >= came:  # another call of the same user has made it in the meantime
                return reader.text
            await trio.sleep_until(reader.next)
            began = trio.current_time()
            content, seconds = await self._make(uid)
            reader.next = trio.current_time() + _PAUSE * seconds
            if isinstance(content, bytes):
                reader.text, reader.began = content, began
            return content

    async def _make(self, uid: int) -> tuple[bytes | Trace, float]:
        """The content now, and how many seconds making it took."""
        content, seconds = _timed(lambda: self._produce(uid))
        if isinstance(content, bytes | Trace):
            return content, seconds
        text, more = await threads.run(functools.partial(_timed, content))
        return text, seconds + more
