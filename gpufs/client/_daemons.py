"""Finds the daemons of mounts, and keeps the connections to them."""

from __future__ import annotations

import errno
import json
import os
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Final

from gpufs import mounting
from gpufs.client._connection import Connection
from gpufs.mounting import MountEntry

_SOCKET_FILE: Final = ".gpufs/socket"
_STATUS_FILE: Final = ".gpufs/status"
_NO_ROOT: Final = "the root of the mount is not visible here"
_CONNECT_SECONDS: Final = 15.0
_PATH_MAX: Final = 4096
_SILENT_SECONDS: Final = 60.0


def mounts_by_device() -> dict[int, list[MountEntry]]:
    """The places where gpufs is mounted by st_dev of their files. Asks no mount anything."""
    found: dict[int, list[MountEntry]] = {}
    for entry in mounting.listed():
        if entry.fstype == mounting.FILESYSTEM_TYPE:
            found.setdefault(entry.st_dev, []).append(entry)
    return found


def connect(device: int, mounts: list[MountEntry], *, trusting: bool = False) -> Connection:
    """Connect to the daemon of the mount with this st_dev.

    ``trusting``: accept the daemon of any user, for a client that passes it only descriptors of its own mount. In a
    container with a user namespace root's daemon can look like another user's.

    OSError, with the reason as its text: the mount's root is not visible here, no service answers there, its socket is
    closed to others (EACCES), it has too many connections (EBUSY), or it is neither ours nor root's (EPERM).
    """
    for entry in mounts:
        if entry.root != "/":
            continue
        path = _socket_path(entry, device)
        if path is not None:
            connection = Connection(_connected(path))
            try:
                if not trusting:
                    connection.check_peer()
            except BaseException:
                connection.close()
                raise
            return connection
    raise OSError(errno.ENOENT, _NO_ROOT)


def status_of(device: int) -> dict[str, Any]:
    """What the mount with this st_dev reports about itself. OSError ENOENT if its root is not visible here."""
    whole = next((entry for entry in mounts_by_device()[device] if entry.root == "/"), None)
    if whole is None:
        raise OSError(errno.ENOENT, _NO_ROOT)
    with open(os.path.join(whole.mountpoint, _STATUS_FILE)) as file:
        report: dict[str, Any] = json.load(file)
    return report


def _socket_path(entry: MountEntry, device: int) -> str | None:
    """The path that the mount names, None if something else is mounted over it."""
    fd = os.open(os.path.join(entry.mountpoint, _SOCKET_FILE), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if os.fstat(fd).st_dev != device:
            return None
        return os.read(fd, _PATH_MAX).decode(errors="surrogateescape").strip()
    finally:
        os.close(fd)


def _connected(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        # With Python's own timeout connect(2) would not wait in the queue but fail with EAGAIN.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(_CONNECT_SECONDS), 0))
        try:
            sock.connect(path)
        except BlockingIOError:
            raise OSError(errno.ETIMEDOUT, "the daemon does not answer") from None
        except OSError as error:
            raise OSError(error.errno or errno.EIO, f"{path}: {error.strerror or error}") from None
        return sock
    except BaseException:
        sock.close()
        raise


# ---- the connection that keeps leases and registrations ----

_shared: weakref.WeakValueDictionary[int, Connection] = weakref.WeakValueDictionary()  # by the mount's st_dev
_shared_lock = threading.Lock()


def shared_connection(device: int) -> Connection:
    """The connection on which this process has its leases and registrations of a mount, as long as there are any."""
    with _shared_lock:
        connection = _shared.get(device)
        if connection is None or connection.ended:
            connection = _shared[device] = connect(device, mounts_by_device()[device], trusting=True)
        return connection


def _after_fork() -> None:
    global _shared_lock
    _shared_lock = threading.Lock()
    _shared.clear()


os.register_at_fork(after_in_child=_after_fork)


# ---- the connections of copies ----


class IdleConnections:
    """Connections that copies borrow, one each. Any thread may call.

    ``required``: a daemon that cannot be reached is an error. Otherwise such a copy goes through the mount, and the
    first one for each mount calls ``notice`` with one line.
    """

    def __init__(self, *, required: bool, notice: Callable[[str], None] | None) -> None:
        self._required = required
        self._notice = notice
        # By the mount's st_dev. Without a lock: another thread could hold it when the process forks.
        self._idle: dict[int, list[Connection]] = {}
        self._noticed: dict[int, object] = {}
        self._silent_until: dict[int, float] = {}  # daemons that did not answer, which takes long to find out

    def close(self) -> None:
        """End the idle ones."""
        while self._idle:
            _, connections = self._idle.popitem()
            for connection in connections:
                connection.close()

    def give_back(self, device: int, connection: Connection) -> None:
        """Keep a connection for the next copy."""
        self._idle.setdefault(device, []).append(connection)

    def take(self, device: int, mounts: list[MountEntry]) -> Connection | None:
        """A connection to a mount's daemon; None if it cannot be reached now: the next copy tries again.

        After a daemon that did not answer, only copies after a minute do.
        """
        idle = self._idle.setdefault(device, [])
        while idle:
            try:
                connection = idle.pop()
            except IndexError:  # another thread was faster
                break
            if not connection.ended:
                return connection
            connection.close()
        if time.monotonic() < self._silent_until.get(device, 0.0) and not self._required:
            return None
        try:
            return connect(device, mounts)
        except OSError as error:
            if error.errno == errno.ETIMEDOUT:
                self._silent_until[device] = time.monotonic() + _SILENT_SECONDS
            if self._required:
                raise
            why = error.strerror or str(error)
        first = object()
        if self._noticed.setdefault(device, first) is first and self._notice is not None:
            self._notice(
                f"{mounts[0].mountpoint}: its copy service cannot be reached ({why}): copying through the mount instead"
            )
        return None
