"""The peer: a file system that answers READ and WRITE in Python with pyfuse3, tuned as well as that can be.

    python -m bench.peer_pyfuse3 MOUNTPOINT BYTES_OF_A_FILE

Files lie in memory that is allocated and touched before they are used, so a write is one copy by an assignment to a
memoryview and a read returns a slice without a copy. direct_io avoids the page cache's detour through single pages;
time-outs of ten minutes keep LOOKUP and GETATTR out of the way; several tasks read requests ahead of each other.
"""

from __future__ import annotations

import errno
import gc
import mmap
import os
import stat
import sys
from collections.abc import Sequence

import pyfuse3
import trio
from pyfuse3 import (
    EntryAttributes,
    FileHandleT,
    FileInfo,
    FileNameT,
    FlagT,
    FUSEError,
    InodeT,
    ModeT,
    ReaddirToken,
    RequestContext,
    SetattrFields,
    StatvfsData,
)

TIMEOUT = 600.0


class File:
    """A regular file of at most `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self.memory = memoryview(mmap.mmap(-1, limit, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE))
        self.size = 0


class Peer(pyfuse3.Operations):
    """One directory of files."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit
        self._files: dict[int, File] = {}
        self._next = pyfuse3.ROOT_INODE + 1
        self._names: dict[bytes, int] = {}

    def _attributes(self, inode: int) -> EntryAttributes:
        entry = EntryAttributes()
        entry.st_ino = InodeT(inode)
        entry.attr_timeout = entry.entry_timeout = TIMEOUT
        entry.st_uid, entry.st_gid = os.getuid(), os.getgid()
        entry.st_blksize = 1 << 20
        if inode == pyfuse3.ROOT_INODE:
            entry.st_mode = ModeT(stat.S_IFDIR | 0o755)
            return entry
        try:
            file = self._files[inode]
        except KeyError:
            raise FUSEError(errno.ENOENT) from None
        entry.st_mode = ModeT(stat.S_IFREG | 0o644)
        entry.st_size = file.size
        entry.st_blocks = file.size // 512
        return entry

    async def lookup(self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext) -> EntryAttributes:
        if name not in self._names:
            raise FUSEError(errno.ENOENT)
        return self._attributes(self._names[name])

    async def getattr(self, inode: InodeT, ctx: RequestContext) -> EntryAttributes:
        return self._attributes(inode)

    async def setattr(
        self, inode: InodeT, attr: EntryAttributes, fields: SetattrFields, fh: FileHandleT | None, ctx: RequestContext
    ) -> EntryAttributes:
        if fields.update_size:
            if attr.st_size > self._limit:
                raise FUSEError(errno.ENOSPC)
            self._files[inode].size = attr.st_size
        return self._attributes(inode)

    async def create(
        self, parent_inode: InodeT, name: FileNameT, mode: ModeT, flags: FlagT, ctx: RequestContext
    ) -> tuple[FileInfo, EntryAttributes]:
        inode, self._next = self._next, self._next + 1
        self._files[inode], self._names[name] = File(self._limit), inode
        return FileInfo(fh=FileHandleT(inode), direct_io=True), self._attributes(inode)

    async def unlink(self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext) -> None:
        if name not in self._names:
            raise FUSEError(errno.ENOENT)
        del self._files[self._names.pop(name)]

    async def open(self, inode: InodeT, flags: FlagT, ctx: RequestContext) -> FileInfo:
        if flags & os.O_TRUNC:
            self._files[inode].size = 0
        return FileInfo(fh=FileHandleT(inode), direct_io=True)

    async def read(self, fh: FileHandleT, off: int, size: int) -> memoryview:  # type: ignore[override]
        file = self._files[fh]
        return file.memory[off : min(off + size, file.size)]

    async def write(self, fh: FileHandleT, off: int, buf: bytes) -> int:
        file, count = self._files[fh], len(buf)
        end = off + count
        if end > self._limit:
            raise FUSEError(errno.ENOSPC)
        file.memory[off:end] = buf
        if end > file.size:
            file.size = end
        return count

    async def opendir(self, inode: InodeT, ctx: RequestContext) -> FileHandleT:
        return FileHandleT(inode)

    async def readdir(self, fh: FileHandleT, start_id: int, token: ReaddirToken) -> None:
        for number, (name, inode) in list(enumerate(self._names.items(), 1))[start_id:]:
            if not pyfuse3.readdir_reply(token, FileNameT(name), self._attributes(inode), number):
                break

    async def statfs(self, ctx: RequestContext) -> StatvfsData:
        return StatvfsData()


def main(arguments: Sequence[str]) -> None:
    mountpoint, limit = arguments[0], int(arguments[1])
    options = set(pyfuse3.default_options) | {"fsname=bench-peer"}
    pyfuse3.init(Peer(limit), mountpoint, options)
    gc.freeze()
    gc.disable()
    try:
        trio.run(pyfuse3.main)
    finally:
        pyfuse3.close(unmount=False)


if __name__ == "__main__":
    main(sys.argv[1:])
