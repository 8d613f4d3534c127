"""What the file handles lead to that Python answers for: listings, control files, and files below ``backing/``."""

import time
from errno import EBADF

from gpufs.fs.errors import error
from gpufs.fs.replies import Listing


class Opened:
    """An open file or directory. Each kind overrides what it can do."""

    __slots__ = ()

    async def readdir(self, start: int, listing: Listing) -> None:
        """Lists the entries after a cookie."""
        raise error(EBADF)

    async def read(self, offset: int, size: int) -> bytes:
        """Bytes of a file that the engine does not read."""
        raise error(EBADF)

    async def sync(self, *, data_only: bool) -> None:
        """fsync(2) of a directory."""

    async def release(self) -> None:
        """The last descriptor is closed."""


class Handles:
    """The open files by handle. The engine's handles have one of the bits 60 to 62 set, those made here none of them.

    They count from the present time: the kernel may still use handles of a daemon that has died.
    """

    def __init__(self) -> None:
        self._opened: dict[int, Opened] = {}
        self._next = time.monotonic_ns() % (1 << 60)

    def add(self, opened: Opened, handle: int = 0) -> int:
        """Gives an open file a handle: the engine's if there is one, otherwise the next number."""
        if not handle:
            handle = self._next
            self._next += 1
        self._opened[handle] = opened
        return handle

    def get(self, handle: int | None) -> Opened | None:
        """The open file; None if the handle is the engine's own."""
        return None if handle is None else self._opened.get(handle)

    def existing(self, handle: int) -> Opened:
        """The open file. EBADF if the handle is the engine's own."""
        opened = self._opened.get(handle)
        if opened is None:
            raise error(EBADF)
        return opened

    def pop(self, handle: int) -> Opened | None:
        """Takes the open file out; None if the handle is the engine's own."""
        return self._opened.pop(handle, None)
