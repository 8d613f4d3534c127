"""The engine's inode table in memory: what the namespace is tested with where no mount is needed."""

import errno
import os
import stat
from dataclasses import replace

from gpufs.engine import (
    SET_ATIME,
    SET_ATIME_NOW,
    SET_CTIME,
    SET_CTIME_NOW,
    SET_GID,
    SET_MODE,
    SET_MTIME,
    SET_MTIME_NOW,
    SET_NLINK,
    SET_SIZE,
    SET_UID,
    Attributes,
)

_FIRST_HANDLE = 1 << 62
_FIELDS = {
    SET_MODE: ("mode",),
    SET_UID: ("uid",),
    SET_GID: ("gid",),
    SET_SIZE: ("size",),
    SET_ATIME: ("atime", "atime_ns"),
    SET_MTIME: ("mtime", "mtime_ns"),
    SET_CTIME: ("ctime", "ctime_ns"),
    SET_NLINK: ("nlink",),
}
_NOW = {SET_ATIME_NOW: "atime", SET_MTIME_NOW: "mtime", SET_CTIME_NOW: "ctime"}


def _failure(code: int) -> OSError:
    return OSError(code, os.strerror(code))


class FakeTable:
    """An InodeTable whose clock goes on by one second at each change, and that can be told to fail.

    ``fail_next``: errno of the next inode_add or file_open. ``inodes``: what is in the table. ``open_files``: handle to
    inode.
    """

    def __init__(self) -> None:
        self.inodes: dict[int, Attributes] = {}
        self.open_files: dict[int, int] = {}
        self.clock = 4_000_000_000
        self.fail_next = 0

    def _may_fail(self) -> None:
        code, self.fail_next = self.fail_next, 0
        if code:
            raise _failure(code)

    def _known(self, ino: int) -> Attributes:
        if ino not in self.inodes:
            raise _failure(errno.ENOENT)
        return self.inodes[ino]

    def inode_add(self, attributes: Attributes, parent: int = 0, umask: int = 0) -> None:
        self._may_fail()
        if attributes.ino in self.inodes:
            raise _failure(errno.EEXIST)
        if parent:
            self._known(parent)
            attributes = replace(attributes, mode=attributes.mode & ~umask)
        is_buffer = stat.S_ISREG(attributes.mode) and attributes.device >= 0
        self.inodes[attributes.ino] = replace(attributes, size=0 if is_buffer else attributes.size)

    def inode_remove(self, ino: int) -> None:
        self._known(ino)
        del self.inodes[ino]

    def inode_get(self, ino: int) -> Attributes:
        return replace(self._known(ino))

    def inode_set(self, ino: int, set: int, attributes: Attributes) -> Attributes:  # noqa: A002 - the engine's name
        inode = self._known(ino)
        self.clock += 1
        for bit, names in _FIELDS.items():
            if set & bit:
                for name in names:
                    setattr(inode, name, getattr(attributes, name))
        for bit, name in _NOW.items():
            if set & bit:
                setattr(inode, name, self.clock)
                setattr(inode, f"{name}_ns", 0)
        if set & SET_SIZE:
            inode.blocks = -(-inode.size // 512)
        return replace(inode)

    def inode_read(self, ino: int) -> None:
        self.inode_set(ino, SET_ATIME_NOW, Attributes())

    def file_open(self, ino: int, flags: int) -> int:
        self._may_fail()
        self._known(ino)
        handle = _FIRST_HANDLE + len(self.open_files)
        self.open_files[handle] = ino
        return handle

    def invalidate_entry(self, parent: int, name: bytes) -> None:
        pass

    def file_release(self, fh: int) -> None:
        if fh not in self.open_files:
            raise _failure(errno.EBADF)
        del self.open_files[fh]
