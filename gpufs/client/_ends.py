"""The two files of a copy: how they are opened, and what is left to do with them once the bytes are there."""

from __future__ import annotations

import errno
import os
import stat

from gpufs.client import _linux
from gpufs.client._outcome import CopyError, text_of


def open_failure(error: OSError, path: str) -> CopyError:
    return CopyError(error.errno or errno.EIO, text_of(error), path)


def open_source(path: str) -> tuple[int, os.stat_result]:
    try:
        kind = os.stat(path).st_mode  # opening a FIFO would wait for its writer
        if stat.S_ISDIR(kind):
            raise CopyError(errno.EISDIR, "is a directory", path)
        if not stat.S_ISREG(kind) and not stat.S_ISBLK(kind):
            raise CopyError(errno.EINVAL, "neither a regular file nor a block device: use cp", path)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY)
    except CopyError:
        raise
    except OSError as error:
        raise open_failure(error, path) from None
    return fd, os.fstat(fd)


def size_of(fd: int, status: os.stat_result) -> int:
    return os.lseek(fd, 0, os.SEEK_END) if stat.S_ISBLK(status.st_mode) else status.st_size


def open_destination(path: str, source: os.stat_result, *, store: bool, force: bool, remove: bool) -> tuple[int, bool]:
    """Open for writing and empty; True if it was not there before.

    Where it may be, and for a store, open for reading too: the engine can then write through a mapping, which several
    threads can do at once. ``force``: a file that cannot be opened is removed; ``remove``: any that is there.
    """
    access = os.O_RDWR if store else os.O_WRONLY
    try:
        if remove:
            _remove_destination(path, source)
        for _ in range(4):
            try:
                there = os.stat(path)
            except FileNotFoundError:
                flags = access | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOCTTY
                try:
                    return os.open(path, flags, stat.S_IMODE(source.st_mode) & 0o777), True
                except FileExistsError:
                    if os.path.islink(path):
                        raise CopyError(errno.EEXIST, "is a symbolic link to nowhere", path) from None
                    continue  # somebody else has just made it
            _check_destination(path, there, source)
            try:
                return os.open(path, access | os.O_TRUNC | os.O_CLOEXEC | os.O_NOCTTY), False
            except FileNotFoundError:
                continue  # somebody else has just removed it
            except OSError as error:
                if isinstance(error, PermissionError) and access != os.O_WRONLY:
                    access = os.O_WRONLY  # he may write but not read
                    continue
                if not force or not stat.S_ISREG(there.st_mode) or not _removed(path):
                    raise
                force = False
    except CopyError:
        raise
    except OSError as error:
        raise open_failure(error, path) from None
    raise CopyError(errno.EBUSY, "comes and goes while it is opened", path)


def _removed(path: str) -> bool:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError:
        return False  # why it could not be opened says more
    return True


def _remove_destination(path: str, source: os.stat_result) -> None:
    """The file or link itself, as cp --remove-destination; a device is not for us to remove."""
    try:
        there = os.lstat(path)
        if not stat.S_ISLNK(there.st_mode):
            _check_destination(path, there, source)
        if not stat.S_ISBLK(there.st_mode):
            os.unlink(path)
    except FileNotFoundError:
        pass


def _check_destination(path: str, there: os.stat_result, source: os.stat_result) -> None:
    if os.path.samestat(there, source):
        raise CopyError(errno.EINVAL, "is the same file as the source", path)
    if stat.S_ISDIR(there.st_mode):
        raise CopyError(errno.EISDIR, "a directory cannot be overwritten with a file", path)
    if not stat.S_ISREG(there.st_mode) and not stat.S_ISBLK(there.st_mode):
        raise CopyError(errno.EINVAL, "neither a regular file nor a block device: use cp", path)


def may_have_holes(source: int, destination: int) -> bool:
    """Whether a copy may leave something out: the source takes up less than its size, the destination can have holes.

    The destination is empty where the copy has not been yet.
    """
    status = os.fstat(source)
    regular = stat.S_ISREG(status.st_mode) and stat.S_ISREG(os.fstat(destination).st_mode)
    return regular and status.st_blocks * 512 < status.st_size


def next_data(fd: int, offset: int) -> tuple[int, int]:
    """The data at or after a place: its start and its end, both the file's end where none is left."""
    end = os.fstat(fd).st_size
    if offset >= end:
        return offset, offset
    try:
        start = os.lseek(fd, offset, os.SEEK_DATA)
        return start, os.lseek(fd, start, os.SEEK_HOLE)
    except OSError as error:
        if error.errno == errno.ENXIO:
            end = max(offset, os.fstat(fd).st_size)  # it may have been cut off just now
            return end, end
        if error.errno == errno.EINVAL:  # its file system does not tell
            return offset, end
        raise


def settle_on_mount(fd: int) -> None:
    """After a change that the kernel did not make: what it has cached of the file goes, before success is reported."""
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    _linux.refresh(fd)


def preserve(target: int | str, source: os.stat_result, *, link: bool = False) -> None:
    """Owner as far as allowed, mode and times, as cp -p. ``link``: the target is a symbolic link, which has no mode."""
    follow = not link  # which only names have a choice of
    mode = stat.S_IMODE(source.st_mode)
    try:
        os.chown(target, source.st_uid, source.st_gid, follow_symlinks=follow)
    except PermissionError:
        try:
            os.chown(target, -1, source.st_gid, follow_symlinks=follow)
        except PermissionError:
            mode &= ~stat.S_ISGID
        mode &= ~stat.S_ISUID
    if not link:
        os.chmod(target, mode)
    os.utime(target, ns=(source.st_atime_ns, source.st_mtime_ns), follow_symlinks=follow)


def make_durable(fd: int, created: str | None, *, synced: bool) -> None:
    if not synced:
        os.fsync(fd)
    if created is not None:
        directory = os.open(os.path.dirname(created) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
