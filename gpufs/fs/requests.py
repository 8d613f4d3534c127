"""The parts that handlers of requests share: callers, changes, errors, replies that describe inodes, open files.

Replies have the layout of linux/fuse.h.
"""

import os
import stat
import time
from dataclasses import dataclass
from errno import EBADF
from struct import Struct
from typing import Final, NamedTuple

from gpufs.syscalls import os_error

ROOT_INODE: Final = 1

# A fuse_entry_out is the inode, how long the reply lasts, and a fuse_attr. It lasts for so many seconds: those of the
# name, those of the attributes, nanoseconds of both. The kernel may trust a name for a second, also one that does not
# exist.
_LASTS: Final = Struct("=8x2Q2I")
_ALL_LASTS: Final = _LASTS.pack(1, 1, 0, 0)
_NAME_LASTS: Final = _LASTS.pack(1, 0, 0, 0)
_ATTRIBUTES: Final = Struct("=6Q10I")
_ENTRY: Final = Struct("=Q32s88s")
_ENTRY_OF_TABLE: Final = Struct("=Q32sQ52xI24x")  # with an inode number and a type as the only attributes
_ATTRIBUTES_REPLY: Final = Struct("=QI4x88s")  # fuse_attr_out: seconds, nanoseconds, fuse_attr
_LISTED: Final = Struct("=128s2Q2I")  # an entry, its inode, the next entry's cookie, the name's length, its type
_PADDING: Final = tuple(b"\0" * (-length % 8) for length in range(8))
_SECOND: Final = 1_000_000_000


@dataclass(slots=True)
class Caller:
    """The process that made a request."""

    uid: int
    gid: int
    pid: int


@dataclass(slots=True)
class Changes:
    """The attributes that SETATTR sets. None: stays as it is. Times are in nanoseconds."""

    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    size: int | None = None
    atime: int | None = None
    mtime: int | None = None


class InodeReply(NamedTuple):
    """A reply about an inode. ``mode``: its type, with or without permission bits; ``message``: a fuse_entry_out."""

    ino: int
    mode: int
    message: bytes

    def attributes(self) -> bytes:
        """The same as a fuse_attr_out."""
        _, lasts, attributes = _ENTRY.unpack(self.message)
        _, seconds, _, nanoseconds = _LASTS.unpack(lasts)
        return _ATTRIBUTES_REPLY.pack(seconds, nanoseconds, attributes)


def entry_reply(ino: int, kind: int) -> InodeReply:
    """The reply for an inode of the engine's table, which fills in all attributes but the type."""
    return InodeReply(ino, kind, _ENTRY_OF_TABLE.pack(ino, _ALL_LASTS, ino, kind))


def host_reply(ino: int, status: os.stat_result, *, lasts: bool = True) -> InodeReply:
    """The reply for an inode of the host. ``lasts``: whether the kernel may trust the attributes."""
    atime, atime_ns = divmod(status.st_atime_ns, _SECOND)
    mtime, mtime_ns = divmod(status.st_mtime_ns, _SECOND)
    ctime, ctime_ns = divmod(status.st_ctime_ns, _SECOND)
    times = (*(seconds & 0xFFFFFFFFFFFFFFFF for seconds in (atime, mtime, ctime)), atime_ns, mtime_ns, ctime_ns)
    owner = (status.st_mode, status.st_nlink, status.st_uid, status.st_gid)
    device, block = status.st_rdev & 0xFFFFFFFF, status.st_blksize
    attributes = _ATTRIBUTES.pack(ino, status.st_size, status.st_blocks, *times, *owner, device, block, 0)
    return InodeReply(ino, status.st_mode, _ENTRY.pack(ino, _ALL_LASTS if lasts else _NAME_LASTS, attributes))


class Listing:
    """The entries of a directory that fit into one reply to READDIRPLUS."""

    def __init__(self, size: int) -> None:
        self._available = size
        self._parts: list[bytes] = []

    def add(self, name: bytes, entry: InodeReply, cookie: int) -> bool:
        """Adds an entry unless it no longer fits. ``cookie``: where a listing goes on that has read this entry."""
        kind = stat.S_IFMT(entry.mode) >> 12
        described = _LISTED.pack(entry.message, entry.ino, cookie, len(name), kind)
        message = described + name + _PADDING[len(name) % 8]
        if len(message) > self._available:
            return False
        self._available -= len(message)
        self._parts.append(message)
        return True

    def message(self) -> bytes:
        return b"".join(self._parts)


class Opened:
    """An open file or directory. Each kind overrides what it can do."""

    __slots__ = ()

    async def readdir(self, start: int, listing: Listing) -> None:
        """Lists the entries after a cookie."""
        raise os_error(EBADF)

    async def read(self, offset: int, size: int) -> bytes:
        """Bytes of a file that the engine does not read."""
        raise os_error(EBADF)

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
            raise os_error(EBADF)
        return opened

    def pop(self, handle: int) -> Opened | None:
        """Takes the open file out; None if the handle is the engine's own."""
        return self._opened.pop(handle, None)
