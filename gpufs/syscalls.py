"""System calls that the standard library does not offer, and the start of a thread. Failures are OSErrors.

What asks a file's server, and so may block as long as that likes, says so.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final, NamedTuple, Self

if TYPE_CHECKING:
    import socket

_AT_EMPTY_PATH: Final = 0x1000
_AT_STATX_FORCE_SYNC: Final = 0x2000
_AT_STATX_DONT_SYNC: Final = 0x4000
_STATX_TYPE_MODE_INO: Final = 0x1 | 0x2 | 0x100
_STATX_BASIC: Final = 0x7FF
_STATX_BYTES: Final = 256
_STATFS_BYTES: Final = 256  # more than any architecture's struct statfs
_RESOLVE_NO_LINKS: Final = 0x04 | 0x02  # RESOLVE_NO_SYMLINKS, _NO_MAGICLINKS
_RESOLVE_BENEATH: Final = 0x08
_RESOLVE_NO_XDEV: Final = 0x01
_OPEN_TREE_CLONE: Final = 1
_MOUNT_ATTR: Final = 0x1 | 0x2 | 0x4  # MOUNT_ATTR_RDONLY, _NOSUID, _NODEV
_MOVE_MOUNT_EMPTY_PATHS: Final = 0x04 | 0x40  # of both descriptors
# The same on all architectures.
_SYS_OPEN_TREE: Final = 428
_SYS_MOVE_MOUNT: Final = 429
_SYS_OPENAT2: Final = 437
_SYS_MOUNT_SETATTR: Final = 442
_SYS_SETGROUPS: Final = {"x86_64": 116, "aarch64": 159}.get(os.uname().machine, -1)
_PEER: Final = struct.Struct("3i")
_PUNCH_HOLE_KEEP_SIZE: Final = 0x2 | 0x1
_NO_ID: Final = 0xFFFFFFFF  # not a user, nor a group

_libc: Final = ctypes.CDLL(None, use_errno=True)


def os_error(code: int) -> OSError:
    """Return the exception for an errno."""
    return OSError(code, os.strerror(code))


def start_thread(call: Callable[..., object], *arguments: object) -> threading.Thread:
    """Call a function on a thread that the program's end does not wait for. OSError EAGAIN if none can be started."""
    thread = threading.Thread(target=call, args=arguments, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        raise OSError(errno.EAGAIN, "no thread can be started (ulimit -u)") from None
    return thread


def _check(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise os_error(code)
    return result


# ---- descriptors ----


class FileIdentity(NamedTuple):
    """The file of a descriptor: the device number of its file system, the inode's number, type and permission bits."""

    st_dev: int
    ino: int
    mode: int


def _statx(fd: int, flags: int, mask: int) -> bytes:
    buffer = ctypes.create_string_buffer(_STATX_BYTES)
    _check(_libc.statx(fd, b"", _AT_EMPTY_PATH | flags, mask, buffer))
    return buffer.raw


def identity(fd: int) -> FileIdentity:
    """Return what a descriptor names, from what the kernel knows already: never waits for the file system's server.

    OSError EBADF when it is not open.
    """
    data = _statx(fd, _AT_STATX_DONT_SYNC, _STATX_TYPE_MODE_INO)
    (mode,) = struct.unpack_from("=H", data, 28)
    (ino,) = struct.unpack_from("=Q", data, 32)
    major, minor = struct.unpack_from("=II", data, 136)
    return FileIdentity(os.makedev(major, minor), ino, mode)


def refresh(fd: int) -> int:
    """Make the kernel ask for a file's attributes now, whatever is cached; may block. Return the size in bytes."""
    (size,) = struct.unpack_from("=Q", _statx(fd, _AT_STATX_FORCE_SYNC, _STATX_BASIC), 40)
    return int(size)


def file_system_type(fd: int) -> int:
    """Return the magic number of a descriptor's file system (f_type of fstatfs(2)); may block with its server."""
    buffer = ctypes.create_string_buffer(_STATFS_BYTES)
    _check(_libc.fstatfs(fd, buffer))
    (magic,) = struct.unpack_from("@l", buffer.raw)
    return int(magic) & 0xFFFFFFFF


def open_flags(fd: int) -> int:
    """Return the flags of a descriptor: access mode, O_APPEND, O_PATH, ... OSError EBADF when it is not open."""
    return fcntl.fcntl(fd, fcntl.F_GETFL)


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Return the process and the user at the other end of a Unix socket. PID 0 if it is not visible here."""
    import socket  # which the caller has loaded

    pid, uid, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid, uid


# ---- names: may block as their file systems' servers do ----


def open_beneath(directory: int, path: bytes, flags: int, mode: int = 0, *, cross_mounts: bool = True) -> int:
    """Open a name below a directory by openat2(2): never through a symbolic link, and never out of the directory.

    Without ``cross_mounts`` also not into what is mounted below it: OSError EXDEV.
    """
    resolve = _RESOLVE_BENEATH | _RESOLVE_NO_LINKS | (0 if cross_mounts else _RESOLVE_NO_XDEV)
    return _openat2(directory, path, flags, mode, resolve)


def open_directory(directory: int, name: bytes) -> int:
    """Open a directory of another one, also "..", with O_PATH, and never through a symbolic link.

    What an automounter has there is mounted, unlike by openat(2) with O_PATH.
    """
    return _openat2(directory, name + b"/.", os.O_PATH | os.O_DIRECTORY, 0, _RESOLVE_NO_LINKS)


def _openat2(directory: int, path: bytes, flags: int, mode: int, resolve: int) -> int:
    how = struct.pack("=QQQ", flags | os.O_CLOEXEC, mode, resolve)
    return _check(_libc.syscall(_SYS_OPENAT2, directory, path, how, len(how)))


def renameat2(old: int, old_name: bytes, new: int, new_name: bytes, flags: int) -> None:
    """Rename with flags (RENAME_NOREPLACE, ...)."""
    _check(_libc.renameat2(old, old_name, new, new_name, flags))


def allocate(fd: int, size: int) -> None:
    """Allocate the blocks of a file up to a size, where its file system can; otherwise only set the size."""
    if _libc.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size)):
        code = ctypes.get_errno()
        if code not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise os_error(code)
        os.ftruncate(fd, size)


def punch(fd: int, offset: int, size: int) -> None:
    """Release the memory of a part of a file in memory. It reads as zeros then."""
    _check(_libc.fallocate(fd, _PUNCH_HOLE_KEEP_SIZE, ctypes.c_int64(offset), ctypes.c_int64(size)))


def write_at(fd: int, data: memoryview, offset: int) -> None:
    """Write all bytes at an offset, by as many pwrite(2) as that takes."""
    while data:
        count = os.pwrite(fd, data, offset)
        data, offset = data[count:], offset + count


def syncfs(fd: int) -> None:
    """Write everything of the file system of an open file to its disk."""
    _check(_libc.syncfs(fd))


def mount(source: bytes, target: bytes, kind: bytes, flags: int, options: bytes) -> None:
    _check(_libc.mount(source, target, kind, ctypes.c_ulong(flags), options))


def bind_read_only(source: int, target: int) -> None:
    """Show an open directory or file at another one, without set-user-id programs and devices.

    It is read-only from the first moment that anybody can see it.
    """
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC | _AT_EMPTY_PATH
    with closed_after(_check(_libc.syscall(_SYS_OPEN_TREE, source, b"", flags))) as tree:
        attributes = struct.pack("=QQQQ", _MOUNT_ATTR, 0, 0, 0)
        _check(_libc.syscall(_SYS_MOUNT_SETATTR, tree, b"", _AT_EMPTY_PATH, attributes, len(attributes)))
        _check(_libc.syscall(_SYS_MOVE_MOUNT, tree, b"", target, b"", _MOVE_MOUNT_EMPTY_PATHS))


def umount2(target: bytes, flags: int) -> None:
    _check(_libc.umount2(target, flags))


def path_of(fd: int) -> str:
    """A path that means what a descriptor of this process means, of whatever kind it is."""
    return f"/proc/self/fd/{fd}"


@contextmanager
def closed_after(fd: int) -> Iterator[int]:
    """Yield a descriptor, and close it at the end."""
    try:
        yield fd
    finally:
        os.close(fd)


def close_all(descriptors: Iterable[int]) -> None:
    """Closes descriptors, whatever close(2) returns. May block as their file systems do."""
    for fd in descriptors:
        with suppress(OSError):
            os.close(fd)


class Closing:
    """Something that closes at the end of ``with``."""

    __slots__ = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close it."""
        raise NotImplementedError


# ---- the calling thread, and this process ----


def trusted(uid: int) -> bool:
    """Return whether a user is root or this process's own, in a daemon the mount's owner."""
    return uid in (0, os.geteuid())


def set_thread_groups(groups: Sequence[int]) -> None:
    """Set the groups of the calling thread; the C library's function would set those of the whole process.

    OSError ENOSYS on a machine whose number of this call is not known.
    """
    if _SYS_SETGROUPS < 0:
        raise os_error(errno.ENOSYS)
    array = (ctypes.c_uint32 * len(groups))(*groups)
    _check(_libc.syscall(_SYS_SETGROUPS, len(groups), array))


def setfsuid(uid: int) -> int:
    """Set the user whose rights over files the calling thread has. Return the one before. OSError EPERM if refused."""
    return _set_id(_libc.setfsuid, uid)


def setfsgid(gid: int) -> None:
    """Set the group whose rights over files the calling thread has. OSError EPERM if refused."""
    _set_id(_libc.setfsgid, gid)


def _set_id(call: Callable[[ctypes.c_uint32], int], number: int) -> int:
    # The calls report no failure, and return the number before. No number is the last one, so it only asks.
    before = call(ctypes.c_uint32(number)) & _NO_ID
    if call(ctypes.c_uint32(_NO_ID)) & _NO_ID != number:
        raise os_error(errno.EPERM)
    return before


def resident_bytes() -> int:
    """Return how much memory this process has."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def trim_heap() -> None:
    """Return the heap's free memory to the system; malloc keeps most of it."""
    _libc.malloc_trim(0)
