"""Finds the daemons of mounts, keeps the connections to them, and sends the requests that need no more than one."""

from __future__ import annotations

import errno
import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from gpufs import mounting, safe_path
from gpufs.mounting import MountEntry
from gpufs.syscalls import closed_after, identity, os_error

if TYPE_CHECKING:
    from gpufs.client._connection import Connection  # which the copy of a small file does not need

_SOCKET_FILE: Final = ".gpufs/socket"
# In a volume of `gpufs csi`: the directory of the socket, beside the bound control file.
_VOLUME_RUN: Final = "run"
_PATH_MAX: Final = 4096
MOST_BYTES: Final = 4 << 20  # of a control file; ten times what a mount of many devices reports
_SILENT_SECONDS: Final = 60.0
# What a connection fails with while a daemon takes over: that one answers the question for its socket's path, and may
# then need a moment until it listens there.
_NOT_LISTENING_YET: Final = (errno.ECONNREFUSED, errno.ECONNRESET, errno.ENOENT, errno.EPIPE)
_RECONNECT_PAUSES: Final = (0.02, 0.1, 0.5)
_ATTEMPTS: Final = 3

T = TypeVar("T")


def connect(st_dev: int, mounts: list[MountEntry], *, trusting: bool = False) -> Connection:
    """Connect to the daemon of a mount.

    ``trusting``: accept the daemon of any user, for a client that passes it only descriptors of its own mount. In a
    container with a user namespace root's daemon can look like another user's. The text of an OSError is the reason:
    the mount's root is not visible here, no service answers there, its socket is closed to others (EACCES), it has too
    many connections (EBUSY), or it is neither ours nor root's (EPERM).
    """
    from gpufs.client._connection import Connection

    for pause in _RECONNECT_PAUSES:
        path = _find_socket(st_dev, mounts)
        try:
            return Connection(path, trusting=trusting)
        except OSError as failure:
            if failure.errno not in _NOT_LISTENING_YET:
                raise
        time.sleep(pause)
    return Connection(_find_socket(st_dev, mounts), trusting=trusting)


def _find_socket(st_dev: int, mounts: list[MountEntry]) -> str:
    """The path of the socket that a mount names. OSError ENOENT if none of these places shows the mount's root.

    Instead of the root, the file that names the socket may be bound to any place, as in a volume of `gpufs csi`.
    """
    closed: OSError | None = None
    for entry in mounts:
        bound = entry.root == f"/{_SOCKET_FILE}"
        if not bound and entry.root != "/":
            continue
        file = entry.mountpoint if bound else os.path.join(entry.mountpoint, _SOCKET_FILE)
        try:
            path = repeat_if_it_dies(functools.partial(_socket_path, file, st_dev))
        except PermissionError as failure:  # a directory above it is closed to this user: another place may not be
            closed = failure
            continue
        if path is not None:
            beside = os.path.join(os.path.dirname(file), _VOLUME_RUN, os.path.basename(path))
            return beside if bound and os.path.lexists(beside) else path
    raise closed or OSError(errno.ENOENT, "the root of the mount is not visible here")


def _socket_path(file: str, st_dev: int) -> str | None:
    """The path that the mount's control file names, None if something else is mounted over it."""
    with closed_after(os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)) as fd:
        if os.fstat(fd).st_dev != st_dev:
            return None
        return os.read(fd, _PATH_MAX).decode(errors="surrogateescape").strip()


def control_file(entry: MountEntry, name: str) -> dict[str, Any]:
    """Read the JSON object in a control file of a mount. OSError EFBIG if it is larger than any of gpufs.

    This may never return. It is for processes that are there to ask (gpufs.cli._answers, or gpufs.status() for
    programs), and for the mount of a file that has just been read.
    """
    import json  # copies read none

    def read() -> bytes:
        content = b""
        with open(os.path.join(entry.mountpoint, ".gpufs", name), "rb", buffering=0) as file:
            while part := file.read(MOST_BYTES):
                content += part
                if len(content) > MOST_BYTES:
                    raise os_error(errno.EFBIG)
        return content

    return dict(json.loads(repeat_if_it_dies(read)))


# ---- requests that need one connection for a moment ----


def set_quota(directory: str, uid: int | None, limit: int) -> None:
    """Limit what is below a directory, or with ``uid`` a user on its device; the mountpoint stands for all devices.

    ``limit``: bytes, or NO_LIMIT (for users) or DEFAULT_LIMIT of gpufs.protocol. OSError with the daemon's reason if it
    refuses, NotOnMount outside of mounts.
    """
    _with_daemon(directory, os.O_DIRECTORY, lambda daemon, fd: daemon.set_quota(fd, uid, limit))


def revoke(path: str) -> None:
    """End all leases on a file of a mount, so that it can be made smaller and replaced.

    The programs keep their mappings: docs/contract.md says what these show. OSError with the daemon's reason if it
    refuses, NotOnMount outside of mounts.
    """
    _with_daemon(path, 0, lambda daemon, fd: daemon.revoke(fd))


def park(files: Mapping[str, os.stat_result], wait: float) -> None:
    """Move files of a mount, by their paths, to the host's memory, all of them or none.

    Of more than MAX_FILES each so many go together. Those that have been removed by now do not count.

    Programs that use them are asked to sleep, and have ``wait`` seconds altogether. OSError with the daemon's reason if
    it refuses, NotOnMount outside of mounts.
    """
    end = time.monotonic() + wait
    _move(files, lambda daemon, inodes: daemon.park(inodes, max(round(end - time.monotonic(), 1), 0.0)))


def bring_back(files: Mapping[str, os.stat_result]) -> None:
    """Move files that are parked back to their devices. OSError as park()."""
    _move(files, lambda daemon, inodes: daemon.bring_back(inodes))


def _move(files: Mapping[str, os.stat_result], ask: Callable[[Connection, Sequence[int]], None]) -> None:
    from gpufs.client._connection import in_groups

    by_mount: dict[int, dict[int, str]] = {}  # paths by st_dev and inode
    for path, status in files.items():
        by_mount.setdefault(status.st_dev, {})[status.st_ino] = path
    for st_dev, paths in by_mount.items():
        mounts = mounting.places_of(st_dev, next(iter(paths.values())))

        def ask_once(inodes: Sequence[int], st_dev: int = st_dev, mounts: list[MountEntry] = mounts) -> None:
            with connect(st_dev, mounts, trusting=True) as daemon:
                ask(daemon, inodes)

        for inodes in in_groups(list(paths)):
            repeat_if_it_dies(functools.partial(ask_once, inodes))


def _with_daemon(path: str, flags: int, ask: Callable[[Connection, int], None]) -> None:
    with closed_after(safe_path.open_path(path, os.O_PATH | flags)) as fd:
        st_dev = identity(fd).st_dev
        mounts = mounting.places_of(st_dev, path)

        def ask_once() -> None:
            # The daemon gets the descriptor of its own file and nothing else.
            with connect(st_dev, mounts, trusting=True) as daemon:
                ask(daemon, fd)

        repeat_if_it_dies(ask_once)


def repeat_if_it_dies(ask: Callable[[], T]) -> T:
    """Ask a daemon for something, and ask again if it dies before it answers: another one may have taken over.

    ``ask`` may read files below ``.gpufs``, too: their descriptors end with the daemon (EBADF).
    """
    for _ in range(_ATTEMPTS - 1):
        try:
            return ask()
        except OSError as failure:
            if failure.errno not in (errno.ECONNRESET, errno.EBADF):
                raise
    return ask()


# ---- the connection that keeps leases and registrations ----

_shared: weakref.WeakValueDictionary[int, Connection] = weakref.WeakValueDictionary()  # by the mount's st_dev
# By the same: connecting asks the mount, which may not answer, and other mounts must not wait for it.
_shared_locks: dict[int, threading.Lock] = {}


def shared_connection(st_dev: int, mounts: list[MountEntry]) -> Connection:
    """The connection on which this process has its leases and registrations of a mount, as long as there are any.

    If it has ended, another one is made, for new leases and registrations.
    """
    with _shared_locks.setdefault(st_dev, threading.Lock()):
        connection = _shared.get(st_dev)
        if connection is None or connection.is_closed:
            connection = _shared[st_dev] = connect(st_dev, mounts, trusting=True)
        return connection


def _after_fork() -> None:
    _shared_locks.clear()
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
        while self._idle:
            _, connections = self._idle.popitem()
            for connection in connections:
                connection.close()

    def give_back(self, st_dev: int, connection: Connection) -> None:
        """Keep a connection for the next copy."""
        self._idle.setdefault(st_dev, []).append(connection)

    def take(self, st_dev: int, mounts: list[MountEntry]) -> Connection | None:
        """A connection to a mount's daemon; None if it cannot be reached now: the next copy tries again.

        After a daemon that did not answer, only copies after a minute do.
        """
        idle = self._idle.setdefault(st_dev, [])
        while idle:
            try:
                connection = idle.pop()
            except IndexError:  # another thread was faster
                break
            if not connection.is_closed:
                return connection
            connection.close()
        if time.monotonic() < self._silent_until.get(st_dev, 0.0) and not self._required:
            return None
        try:
            return connect(st_dev, mounts)
        except OSError as error:
            if error.errno == errno.ETIMEDOUT:
                self._silent_until[st_dev] = time.monotonic() + _SILENT_SECONDS
            if self._required:
                raise
            why = error.strerror or str(error)
        first = object()
        if self._noticed.setdefault(st_dev, first) is first and self._notice is not None:
            self._notice(
                f"{mounts[0].mountpoint}: its copy service cannot be reached ({why}): copying through the mount instead"
            )
        return None
