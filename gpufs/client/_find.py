"""Finds the socket of the daemon that serves a mount, and connects to it."""

from __future__ import annotations

import errno
import os
import socket
import struct
from typing import Final

from gpufs import mounting
from gpufs.mounting import MountEntry

SOCKET_FILE: Final = ".gpufs/socket"
_CONNECT_SECONDS: Final = 15.0
_PATH_MAX: Final = 4096


def mounts_by_device() -> dict[int, list[MountEntry]]:
    """The places where gpufs is mounted by st_dev of their files. Asks no mount anything."""
    found: dict[int, list[MountEntry]] = {}
    for entry in mounting.listed():
        if entry.fstype == mounting.FILESYSTEM_TYPE:
            found.setdefault(entry.st_dev, []).append(entry)
    return found


def connect(device: int, mounts: list[MountEntry], *, trusting: bool = False) -> socket.socket:
    """A connection to the daemon of the mount with this st_dev.

    ``trusting``: accept the daemon of any user, for a client that passes it only descriptors of its own mount. In a
    container with a user namespace root's daemon can look like another user's.

    OSError, with the reason as its text: the mount's root is not visible here, there is no such service, its socket is
    closed to others (EACCES), or it is neither ours nor root's (EPERM).
    """
    for entry in mounts:
        if entry.root != "/":
            continue
        path = _socket_path(entry, device)
        if path is not None:
            return _connect(path, trusting=trusting)
    raise OSError(errno.ENOENT, "the root of the mount is not visible here")


def _socket_path(entry: MountEntry, device: int) -> str | None:
    """The path that the mount names, None if something else is mounted over it."""
    fd = os.open(os.path.join(entry.mountpoint, SOCKET_FILE), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if os.fstat(fd).st_dev != device:
            return None
        return os.read(fd, _PATH_MAX).decode(errors="surrogateescape").strip()
    finally:
        os.close(fd)


def check_peer(sock: socket.socket) -> None:
    """OSError EPERM if the daemon is neither ours nor root's: it could keep our descriptors and use them later."""
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    if uid not in (0, os.geteuid()):
        raise OSError(errno.EPERM, f"it belongs to user {uid}, which is not trusted with our descriptors")


def _connect(path: str, *, trusting: bool) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        # With Python's own timeout connect(2) would not wait in the queue but fail with EAGAIN.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(_CONNECT_SECONDS), 0))
        try:
            sock.connect(path)
            sock.settimeout(_CONNECT_SECONDS)
        except BlockingIOError:
            raise OSError(errno.ETIMEDOUT, "the daemon does not answer") from None
        except OSError as error:
            raise OSError(error.errno or errno.EIO, f"{path}: {error.strerror or error}") from None
        if not trusting:
            check_peer(sock)
        return sock
    except BaseException:
        sock.close()
        raise
