"""The few system calls that the standard library does not offer: statx with its flags and fstatfs.

None of them asks a file's server anything, except :func:`file_system_type` and a forced :func:`statx`.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
from dataclasses import dataclass
from typing import Final

AT_EMPTY_PATH: Final = 0x1000
AT_STATX_FORCE_SYNC: Final = 0x2000
AT_STATX_DONT_SYNC: Final = 0x4000
_STATX_TYPE_MODE_INO: Final = 0x1 | 0x2 | 0x100
_STATX_BASIC: Final = 0x7FF
_STATX_BYTES: Final = 256
_STATFS_BYTES: Final = 256  # more than any architecture's struct statfs

_libc: Final = ctypes.CDLL(None, use_errno=True)


def _last_error() -> OSError:
    error = ctypes.get_errno()
    return OSError(error, os.strerror(error))


@dataclass(frozen=True)
class Identity:
    """What a descriptor names: the device number of its file system, the inode's number, type and permission bits."""

    device: int
    ino: int
    mode: int


def _statx(fd: int, flags: int, mask: int) -> bytes:
    buffer = ctypes.create_string_buffer(_STATX_BYTES)
    if _libc.statx(fd, b"", AT_EMPTY_PATH | flags, mask, buffer):
        raise _last_error()
    return buffer.raw


def identity(fd: int) -> Identity:
    """What a descriptor names, from what the kernel knows already: never waits for the file system's server.

    OSError EBADF when it is not open.
    """
    data = _statx(fd, AT_STATX_DONT_SYNC, _STATX_TYPE_MODE_INO)
    (mode,) = struct.unpack_from("=H", data, 28)
    (ino,) = struct.unpack_from("=Q", data, 32)
    major, minor = struct.unpack_from("=II", data, 136)
    return Identity(os.makedev(major, minor), ino, mode)


def refresh(fd: int) -> int:
    """Makes the kernel ask for a file's attributes now, whatever it has cached; returns the size in bytes."""
    (size,) = struct.unpack_from("=Q", _statx(fd, AT_STATX_FORCE_SYNC, _STATX_BASIC), 40)
    return int(size)


def file_system_type(fd: int) -> int:
    """The magic number of a descriptor's file system (f_type of fstatfs(2)). May block as the file's server does."""
    buffer = ctypes.create_string_buffer(_STATFS_BYTES)
    if _libc.fstatfs(fd, buffer):
        raise _last_error()
    (magic,) = struct.unpack_from("@l", buffer.raw)
    return int(magic) & 0xFFFFFFFF


def open_flags(fd: int) -> int:
    """The flags that a descriptor was opened with: access mode, O_APPEND, O_PATH, ... OSError EBADF when not open."""
    return fcntl.fcntl(fd, fcntl.F_GETFL)
