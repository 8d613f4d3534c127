"""Whether a copy is the same as its source, without reading them: the one answer for everything that copies.

If a store names the content of the source (an ETag, a SHA-256), the copy has that version in an extended attribute,
with the size and time that it had then, so any later change of the copy shows. Otherwise size and time of modification
must be equal, as for rsync. All other files differ.
"""

from __future__ import annotations

import os
import stat
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

from gpufs.copying.entries import Entry
from gpufs.syscalls import path_of

if TYPE_CHECKING:
    from gpufs.stores.files import StoreFile

ATTRIBUTE: Final = "user.gpufs-source"
# Of files that were changed so lately, a time in whole seconds may have stayed the same (RFC 9110, 8.8.2.2).
_SETTLED_NS: Final = 60 * 10**9
# The clock of files may be behind ours by a tick of the kernel.
TICK_NS: Final = 20_000_000


class Identity(NamedTuple):
    """What a copy is compared by. ``modified_ns`` None: not by its time; without a version, too, it always differs."""

    size: int
    modified_ns: int | None
    version: str = ""

    @classmethod
    def of(cls, status: os.stat_result, size: int | None = None) -> Identity:
        return cls(status.st_size if size is None else size, status.st_mtime_ns)

    @classmethod
    def of_stored(cls, file: StoreFile) -> Identity:
        """That of a file of a store: only what changes with each change of the content is a version."""
        checksum, where = file.checksum, file.url.shown
        if checksum is not None and checksum.kind in ("sha256", "git"):
            return cls(file.size, None, f"{checksum.kind}:{checksum.value}")  # wherever it came from
        if file.etag and not file.etag.startswith("W/"):
            etag = file.etag.strip('"')
            return cls(file.size, None, f"{where} {etag}")
        if file.modified_ns is not None and file.modified_ns < time.time_ns() - _SETTLED_NS:
            return cls(file.size, None, f"{where} {file.modified_ns}")
        return cls(file.size, None)

    def is_of(self, entry: Entry, status: os.stat_result) -> bool:
        """Return whether a file that has this name and these attributes is a copy."""
        if not stat.S_ISREG(status.st_mode) or status.st_size != self.size:
            return False
        if not self.version:
            return status.st_mtime_ns == self.modified_ns
        path = entry.name if entry.directory is None else f"{path_of(entry.directory)}/{entry.name}"
        try:
            noted = os.getxattr(path, ATTRIBUTE, follow_symlinks=entry.follow)
        except OSError:
            return False
        return noted == self._noted(status)

    def note(self, fd: int) -> None:
        """Note the version of an open copy, which is complete."""
        if not self.version:
            return
        with suppress(OSError):  # of file systems without attributes: the next copy is made again
            os.utime(fd)  # now, and not when the kernel writes what it has cached
            os.setxattr(fd, ATTRIBUTE, self._noted(os.fstat(fd)))

    def _noted(self, status: os.stat_result) -> bytes:
        return os.fsencode(f"{status.st_size} {status.st_mtime_ns} {self.version}")


def seconds_text(ns: int) -> str:
    """Return a time in nanoseconds since 1970 in seconds, as objects of stores and manifests note it."""
    return f"{ns // 10**9}.{ns % 10**9:09}"


def forget(fd: int) -> None:
    """Remove what an open file has noted: it gets other content."""
    with suppress(OSError):
        os.removexattr(fd, ATTRIBUTE)


def settle(status: os.stat_result) -> None:
    """Wait until a change of a file, after this, gives it a later time than it has."""
    age = time.time_ns() - status.st_mtime_ns
    if 0 <= age < TICK_NS:
        time.sleep((TICK_NS - age) / 10**9)
