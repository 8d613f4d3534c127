"""From a file on a mount to the socket of the mount's daemon."""

from __future__ import annotations

import errno
import os
import socket
import struct
from dataclasses import dataclass
from typing import Final

FILE_SYSTEM: Final = "fuse.gpufs"
SOCKET_FILE: Final = ".gpufs/socket"
_CONNECT_SECONDS: Final = 15.0
_PATH_MAX: Final = 4096


@dataclass(frozen=True)
class MountPoint:
    """One place where a gpufs is mounted. ``device``: as st_dev of its files. ``root``: the directory shown there."""

    device: int
    root: str
    path: str


def _unescape(text: str) -> str:
    first, *rest = text.split("\\")  # a space is \040
    return first + "".join(chr(int(part[:3], 8)) + part[3:] for part in rest)


def mount_points() -> list[MountPoint]:
    """Where gpufs is mounted, as this process sees it; asks no mount anything."""
    found = []
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape", newline="\n") as file:
        for line in file:
            before, _, after = line.rstrip("\n").partition(" - ")
            words = before.split(" ")
            if after.split(" ")[0] != FILE_SYSTEM:
                continue
            major, minor = map(int, words[2].split(":"))
            found.append(
                MountPoint(
                    os.makedev(major, minor),
                    _unescape(words[3]),
                    _unescape(words[4]),
                )
            )
    return found


def mounts_by_device() -> dict[int, list[MountPoint]]:
    """The mounts by st_dev of their files."""
    found: dict[int, list[MountPoint]] = {}
    for entry in mount_points():
        found.setdefault(entry.device, []).append(entry)
    return found


def connect(device: int, mounts: list[MountPoint]) -> socket.socket:
    """A connection to the daemon of the mount with this st_dev.

    OSError, with a text that says why, where it cannot be had: the mount's root is not visible here, there is no such
    service, its socket may not be used by others (EACCES), or it is neither ours nor root's (EPERM).
    """
    for entry in mounts:
        if entry.root != "/":
            continue
        path = _socket_path(entry, device)
        if path is not None:
            return _connect(path)
    raise OSError(errno.ENOENT, "the root of the mount is not visible here")


def _socket_path(entry: MountPoint, device: int) -> str | None:
    """What the mount says, None where something else has been mounted over it."""
    fd = os.open(os.path.join(entry.path, SOCKET_FILE), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if os.fstat(fd).st_dev != device:
            return None
        return os.read(fd, _PATH_MAX).decode(errors="surrogateescape").strip()
    finally:
        os.close(fd)


def _trusted(uid: int) -> bool:
    """Whether a daemon of this user may have our descriptors: it could keep one, and write to our file at any time."""
    return uid in (0, os.geteuid())


def _connect(path: str) -> socket.socket:
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
        peer = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
        if not _trusted(peer[1]):
            raise OSError(errno.EPERM, f"it is user {peer[1]}'s, who must not have our descriptors")
        return sock
    except BaseException:
        sock.close()
        raise
