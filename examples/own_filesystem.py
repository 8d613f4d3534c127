"""A file system of one's own over gpufs.engine: pyfuse3 answers the kernel, and each file is a buffer of a device.

Usage: python examples/own_filesystem.py DIRECTORY [DRIVER]     DRIVER: host (default), cuda or hip

The files are in DIRECTORY until it is unmounted (fusermount3 -u DIRECTORY) or Ctrl-C is pressed. `scripts/setup bench`
installs pyfuse3. It has one directory, and none of the links, extended attributes and shared mappings that a mount of
gpufs has.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyfuse3
import trio
from pyfuse3 import ROOT_INODE, EntryAttributes, FileInfo, FUSEError, RequestContext, StatvfsData

from gpufs.engine import Buffer, Engine

MIB = 1 << 20
TIMEOUT = 600.0  # seconds for which the kernel may keep names and attributes: only its own requests change them


@contextlib.contextmanager
def failures() -> Iterator[None]:
    """Replies to the kernel with the engine's errors, for example with ENOSPC if the device is full."""
    try:
        yield
    except OSError as error:
        raise FUSEError(error.errno or errno.EIO) from error


class File:
    """A file: its name, its attributes, and a buffer of the device for its bytes."""

    def __init__(self, engine: Engine, name: bytes, entry: EntryAttributes) -> None:
        self.name: bytes | None = name
        self.entry = entry
        self.references = 0  # how often the kernel was given the inode and has not forgotten it
        self.buffer = Buffer(engine)

    def attributes(self) -> EntryAttributes:
        info = self.buffer.info
        self.entry.st_size, self.entry.st_blocks = info.size, info.held_bytes // 512
        return self.entry

    async def read(self, offset: int, size: int) -> bytes | memoryview:
        # A thread waits for the device, so other requests are answered at the same time.
        return await trio.to_thread.run_sync(self.buffer.read_bytes, offset, size)

    async def write(self, offset: int, data: bytes) -> int:
        return await trio.to_thread.run_sync(self.buffer.write, offset, data)

    def resize(self, size: int) -> None:
        self.buffer.resize(size)

    def close(self) -> None:
        self.buffer.close()


class FileSystem(pyfuse3.Operations):
    """One directory of files. All requests are answered in one thread of trio, so names need no lock."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine
        self._inodes: dict[bytes, int] = {}  # by name
        self._files: dict[int, File] = {}  # by inode
        self._next = ROOT_INODE + 1
        self._root = self._new_entry(ROOT_INODE, stat.S_IFDIR | 0o755, os.getuid(), os.getgid())

    def new_file(self, name: bytes, entry: EntryAttributes) -> File:
        return File(self.engine, name, entry)

    def _new_entry(self, inode: int, mode: int, uid: int, gid: int) -> EntryAttributes:
        entry = EntryAttributes()
        entry.st_ino, entry.st_mode, entry.st_uid, entry.st_gid = inode, mode, uid, gid
        entry.st_atime_ns = entry.st_mtime_ns = entry.st_ctime_ns = time.time_ns()
        entry.attr_timeout = entry.entry_timeout = TIMEOUT
        entry.st_blksize = MIB
        return entry

    def _inode(self, name: bytes) -> int:
        if name not in self._inodes:
            raise FUSEError(errno.ENOENT)
        return self._inodes[name]

    def _remove_unused(self, inode: int) -> None:
        """An unlinked file keeps its memory as long as the kernel refers to it: programs have it open."""
        file = self._files[inode]
        if file.name is None and file.references == 0:
            del self._files[inode]
            file.close()

    async def lookup(self, parent: int, name: bytes, ctx: RequestContext) -> EntryAttributes:
        file = self._files[self._inode(name)]
        file.references += 1
        return file.attributes()

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        for inode, count in inode_list:
            if inode != ROOT_INODE:
                self._files[inode].references -= count
                self._remove_unused(inode)

    async def getattr(self, inode: int, ctx: RequestContext) -> EntryAttributes:
        return self._root if inode == ROOT_INODE else self._files[inode].attributes()

    async def setattr(
        self, inode: int, attr: EntryAttributes, fields: pyfuse3.SetattrFields, fh: int | None, ctx: RequestContext
    ) -> EntryAttributes:
        if fields.update_size:
            with failures():
                self._files[inode].resize(attr.st_size)
        entry = await self.getattr(inode, ctx)
        for field in ("mode", "uid", "gid", "atime", "mtime", "ctime"):
            if getattr(fields, f"update_{field}"):
                attribute = f"st_{field}_ns" if field.endswith("time") else f"st_{field}"
                setattr(entry, attribute, getattr(attr, attribute))
        return entry

    async def create(
        self, parent: int, name: bytes, mode: int, flags: int, ctx: RequestContext
    ) -> tuple[FileInfo, EntryAttributes]:
        inode, self._next = self._next, self._next + 1
        with failures():
            file = self.new_file(name, self._new_entry(inode, mode & ~ctx.umask, ctx.uid, ctx.gid))
        self._files[inode], self._inodes[name] = file, inode
        file.references = 1
        return FileInfo(fh=inode, direct_io=True), file.attributes()

    async def open(self, inode: int, flags: int, ctx: RequestContext) -> FileInfo:
        if flags & os.O_TRUNC:
            with failures():
                self._files[inode].resize(0)
        return FileInfo(fh=inode, direct_io=True)  # past the page cache, which would hold the bytes once more

    async def read(self, fh: int, off: int, size: int) -> bytes | memoryview:
        with failures():
            return await self._files[fh].read(off, size)

    async def write(self, fh: int, off: int, buf: bytes) -> int:
        file = self._files[fh]
        with failures():
            count = await file.write(off, buf)
        file.entry.st_mtime_ns = file.entry.st_ctime_ns = time.time_ns()
        return count

    async def unlink(self, parent: int, name: bytes, ctx: RequestContext) -> None:
        inode = self._inode(name)
        del self._inodes[name]
        self._files[inode].name = None
        self._remove_unused(inode)

    async def rename(
        self, old_parent: int, old: bytes, new_parent: int, new: bytes, flags: int, ctx: RequestContext
    ) -> None:
        if flags:
            raise FUSEError(errno.EINVAL)
        if new in self._inodes:
            await self.unlink(new_parent, new, ctx)
        inode = self._inodes[new] = self._inodes.pop(old)
        self._files[inode].name = new

    async def opendir(self, inode: int, ctx: RequestContext) -> int:
        return inode

    async def readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        for inode, name in sorted((inode, name) for name, inode in self._inodes.items() if inode > start_id):
            file = self._files[inode]
            if not pyfuse3.readdir_reply(token, name, file.attributes(), inode):
                break
            file.references += 1

    async def statfs(self, ctx: RequestContext) -> StatvfsData:
        memory, numbers = self.engine.devices[0].memory(), StatvfsData()
        numbers.f_bsize = numbers.f_frsize = MIB
        numbers.f_blocks = memory.total_bytes // MIB
        numbers.f_bfree = numbers.f_bavail = memory.free_bytes // MIB
        numbers.f_namemax = 255
        return numbers


def serve(files: FileSystem, directory: str, name: str) -> None:
    """Answers requests until the directory is unmounted or Ctrl-C is pressed."""
    pyfuse3.init(files, directory, set(pyfuse3.default_options) | {f"fsname={name}"})
    try:
        trio.run(pyfuse3.main)
    except* KeyboardInterrupt:
        pass
    finally:
        pyfuse3.close()


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3) or not Path(sys.argv[1]).is_dir():
        sys.exit(__doc__)
    driver = sys.argv[2] if len(sys.argv) == 3 else "host"
    with Engine(driver, devices=1, memory_bytes=256 * MIB if driver == "host" else 0) as device:
        serve(FileSystem(device), sys.argv[1], "own_filesystem")
