"""System calls that the os module does not offer, as functions that raise OSError."""

from __future__ import annotations

import ctypes
import itertools
import os
from errno import ENXIO

FALLOC_KEEP_SIZE = 1
FALLOC_PUNCH_HOLE = 2
FALLOC_COLLAPSE_RANGE = 8
FALLOC_INSERT_RANGE = 32
FALLOC_ZERO_RANGE = 16
MS_SYNC = 4
AT_FDCWD = -100
AT_SYMLINK_FOLLOW = 0x400

_libc = ctypes.CDLL(None, use_errno=True)


class _Dirent(ctypes.Structure):
    _fields_ = (
        ("ino", ctypes.c_uint64),
        ("off", ctypes.c_int64),
        ("reclen", ctypes.c_ushort),
        ("type", ctypes.c_ubyte),
        ("name", ctypes.c_char * 256),
    )


_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_libc.opendir.restype = ctypes.c_void_p
_libc.opendir.argtypes = (ctypes.c_char_p,)
_libc.readdir.restype = ctypes.POINTER(_Dirent)
_libc.readdir.argtypes = (ctypes.c_void_p,)
_libc.telldir.restype = ctypes.c_long
_libc.telldir.argtypes = (ctypes.c_void_p,)
_libc.seekdir.argtypes = (ctypes.c_void_p, ctypes.c_long)
_libc.seekdir.restype = None
_libc.rewinddir.argtypes = (ctypes.c_void_p,)
_libc.rewinddir.restype = None
_libc.closedir.argtypes = (ctypes.c_void_p,)
_libc.msync.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.pwrite.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64)
_libc.pwrite.restype = ctypes.c_ssize_t
_libc.pread.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64)
_libc.pread.restype = ctypes.c_ssize_t


def kernel_version() -> tuple[int, int]:
    """Major and minor number of the running kernel."""
    major, minor = os.uname().release.split(".")[:2]
    return int(major), int("".join(itertools.takewhile(str.isdigit, minor)))


def _checked(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    _checked(_libc.fallocate(fd, mode, offset, length))


def link_descriptor(fd: int, target: str | bytes | os.PathLike[str]) -> None:
    """A name for the file behind a descriptor. os.link() never follows symbolic links, even if asked to."""
    _checked(_libc.linkat(AT_FDCWD, b"/proc/self/fd/%d" % fd, AT_FDCWD, os.fsencode(target), AT_SYMLINK_FOLLOW))


def find_data(fd: int, at: int) -> int | None:
    """SEEK_DATA from `at`; None where no data follows."""
    try:
        return os.lseek(fd, at, os.SEEK_DATA)
    except OSError as error:
        if error.errno == ENXIO:
            return None
        raise


def msync(address: int, length: int, flags: int) -> None:
    _checked(_libc.msync(address, length, flags))


class DirectoryStream:
    """opendir(3) and its relatives; names are bytes."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._stream = _libc.opendir(os.fsencode(path))
        if not self._stream:
            _checked(-1)

    def read(self) -> bytes | None:
        ctypes.set_errno(0)
        entry = _libc.readdir(self._stream)
        if not entry:
            if ctypes.get_errno():
                _checked(-1)
            return None
        return bytes(entry.contents.name)

    def tell(self) -> int:
        return int(_libc.telldir(self._stream))

    def seek(self, position: int) -> None:
        _libc.seekdir(self._stream, position)

    def rewind(self) -> None:
        _libc.rewinddir(self._stream)

    def close(self) -> None:
        _libc.closedir(self._stream)

    def __enter__(self) -> DirectoryStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Statx(ctypes.Structure):
    _fields_ = (
        ("mask", ctypes.c_uint32),
        ("fixed", ctypes.c_char * 60),
        ("atime", ctypes.c_int64 * 2),
        ("birth_seconds", ctypes.c_int64),
        ("birth_nanoseconds", ctypes.c_uint32),
        ("rest", ctypes.c_char * 164),
    )


def birth_time(path: str | os.PathLike[str]) -> int:
    """statx(2) of what a path names, links not followed: nanoseconds. AssertionError where it is not told."""
    found, birth = _Statx(), 0x800
    _checked(_libc.statx(AT_FDCWD, os.fsencode(path), 0x100, birth, ctypes.byref(found)))
    assert found.mask & birth, "no time of birth"
    return int(found.birth_seconds) * 10**9 + int(found.birth_nanoseconds)
