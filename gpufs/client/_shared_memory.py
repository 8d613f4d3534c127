"""Finds how memory of this process can be passed to another: the file in memory behind an address of the host.

A mapping names its file in /proc/self/maps. The descriptor comes from those that this process has open, from the file's
path, or from /proc/self/map_files, which needs a privilege.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from gpufs.protocol import ShareKind
from gpufs.syscalls import path_of

_LINE: Final = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) ([0-9a-f]+) ([0-9a-f]+):([0-9a-f]+) (\d+)\s*(.*)")
_REMEDY: Final = (
    "call share_memory_() of a torch tensor first; allocate other arrays in "
    "multiprocessing.shared_memory.SharedMemory, or in mmap.mmap() of os.memfd_create()"
)


@dataclass
class MemoryShare:
    """Memory as it is passed on: it begins ``offset`` bytes into what the descriptor or the handle stands for.

    ``fd`` is this object's, -1 for none. For "descriptor" it is a socket with the pieces of the memory.
    """

    kind: ShareKind
    fd: int
    offset: int
    writable: bool = True
    pci_address: str = ""
    handle: bytes = b""

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


@dataclass(frozen=True)
class _MappedRange:
    start: int
    end: int
    shared: bool
    writable: bool
    offset: int
    file: tuple[int, int]  # st_dev, st_ino
    path: str


def share_host_memory(address: int, size: int, *, writable: bool) -> MemoryShare:
    """The file behind a range of this process's memory, open for what ``writable`` asks for.

    OSError EINVAL if it is not shared memory, with what to do about it.
    """
    run = [mapping for mapping in _mappings() if mapping.end > address and mapping.start < address + size]
    if not run or run[0].start > address:
        raise OSError(errno.EFAULT, f"no memory is mapped at address {address:#x}")
    first = run[0]
    if not first.shared or not first.file[1]:
        raise OSError(errno.EINVAL, f"the memory is private to this process, so no other can show it: {_REMEDY}")
    # Mappings side by side may show one part of a file: the kernel splits a mapping whose attributes change.
    together = all(
        (after.start, after.file, after.offset) == (before.end, before.file, before.offset + before.end - before.start)
        for before, after in pairwise(run)
    )
    if not together or run[-1].end < address + size:
        raise OSError(errno.EINVAL, f"the memory is not one part of one file in memory: {_REMEDY}")
    fd = _open(first, writable=writable)
    if fd is None:
        raise OSError(
            errno.EINVAL,
            f"this process has no descriptor of the memory's file ({first.path or 'without a name'}) that is open for "
            f"{'reading and writing' if writable else 'reading'}: {_REMEDY}",
        )
    return MemoryShare("file", fd, first.offset + address - first.start, writable)


def _mappings() -> list[_MappedRange]:
    mappings = []
    with open("/proc/self/maps", errors="surrogateescape") as lines:
        for line in lines:
            match = _LINE.match(line)
            if match is None:
                continue
            start, end, mode, offset, major, minor, ino, path = match.groups()
            file = (os.makedev(int(major, 16), int(minor, 16)), int(ino))
            mappings.append(
                _MappedRange(int(start, 16), int(end, 16), mode[3] == "s", "w" in mode, int(offset, 16), file, path)
            )
    return mappings


def _open(mapping: _MappedRange, *, writable: bool) -> int | None:
    """A new descriptor of the mapping's file, None if it cannot be opened."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            if os.readlink(path_of(fd)) != mapping.path or not _fits(fd, mapping, writable=writable):
                continue
            return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
        except OSError:
            continue  # the descriptor of the listing itself, which is closed by now
    access = os.O_RDWR if writable else os.O_RDONLY
    for path in (mapping.path, f"/proc/self/map_files/{mapping.start:x}-{mapping.end:x}"):
        if not path.startswith("/"):
            continue
        try:
            fd = os.open(path, access | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK)
        except OSError:
            continue
        if _fits(fd, mapping, writable=writable):
            return fd
        os.close(fd)
    return None


def _fits(fd: int, mapping: _MappedRange, *, writable: bool) -> bool:
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    access = flags & os.O_ACCMODE
    if flags & os.O_PATH or not (access == os.O_RDWR or (access == os.O_RDONLY and not writable)):
        return False
    status = os.fstat(fd)
    return (status.st_dev, status.st_ino) == mapping.file
