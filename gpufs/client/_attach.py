"""Attaching: the memory behind a file is mapped into this process, without a copy."""

from __future__ import annotations

import errno
import os
import stat
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Final

from gpufs import protocol
from gpufs.client import _ends, _find
from gpufs.client._array import DeviceArray
from gpufs.client._connection import Connection
from gpufs.client._outcome import text_of
from gpufs.protocol import READ, READ_WRITE, Attach, Detach, Detached, Pieces, ProtocolError, Refresh

if TYPE_CHECKING:
    import socket

    from gpufs.engine import Mapping, SharedPiece

    _Answer = tuple[protocol.Attached, list[SharedPiece]]

_GRANULE: Final = 2 << 20
# Addresses that are reserved so that a file can grow while it is attached.
_RESERVE_FACTOR: Final = 4
_LEAST_RESERVE: Final = 1 << 30
# How long the end of an attachment waits until the daemon has ended the lease.
_DETACH_SECONDS: Final = 2.0
# The kernel's answers if a file may be read but not written.
_READ_ONLY: Final = (errno.EACCES, errno.EPERM, errno.EROFS)
_DEAD_DAEMON: Final = (errno.ECONNRESET, errno.EPIPE, errno.ENOTCONN, errno.ECONNABORTED)


class _LeaseConnection(Connection):
    """A connection whose life is that of the leases on it. Any thread may call."""

    __slots__ = ("__weakref__", "_ended", "_lock")

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self._lock = threading.Lock()  # held from a request to the end of its answer
        self._ended: deque[int] = deque()  # leases to end as soon as the lock is free
        weakref.finalize(self, sock.close).atexit = False

    def forget(self) -> None:
        """In a forked child: the connection and its leases are the parent's."""
        self._sock.close()
        self._lost = True
        self._lock = threading.Lock()

    def attach(self, fd: int, mode: str) -> _Answer:
        """Asks for the memory of an open file, which stays the caller's. OSError if the daemon refuses."""
        with self._lock:
            number = self._next
            self._next += 1
            try:
                answer = self._ask(Attach(number, mode), (fd,))
            except BaseException:
                self._ended.append(number)  # it may be attached all the same
                raise
        self._end_leases()
        return _accepted(*answer)

    def refresh(self, number: int, start: int) -> _Answer:
        """Asks for the memory from ``start`` on. OSError if the daemon refuses."""
        with self._lock:
            answer = self._ask(Refresh(number, start))
        self._end_leases()
        return _accepted(*answer)

    @property
    def alive(self) -> bool:
        """False once the daemon has ended it."""
        if self._lost or not self._lock.acquire(blocking=False):
            return not self._lost
        try:
            return self.usable()
        finally:
            self._lock.release()
            self._end_leases()

    def detach(self, number: int) -> None:
        """Ends a lease. The garbage collector may call this at any point of any thread, also one that has the lock."""
        self._ended.append(number)
        self._end_leases()

    def _end_leases(self) -> None:
        # A thread that finds the lock taken leaves its lease to the one that has it, which looks here afterwards.
        while self._ended and not self._lost and self._lock.acquire(blocking=False):
            try:
                while self._ended:
                    self._end_lease(self._ended.popleft())
            except OSError:
                pass  # the daemon has gone, and all leases with it
            finally:
                self._lock.release()

    def _end_lease(self, number: int) -> None:
        self._send(Detach(number))
        self._sock.settimeout(_DETACH_SECONDS)
        try:
            while True:
                message = self._receive()
                if isinstance(message, Detached) and message.id == number:
                    return
        finally:
            if self._sock.fileno() >= 0:
                self._sock.settimeout(None)

    def _ask(self, request: Attach | Refresh, descriptors: tuple[int, ...] = ()) -> _Answer:
        """Sends a request and receives the memory. Answers to requests that were abandoned are dropped."""
        from gpufs.engine import SharedPiece

        number = request.id
        self._send(request, descriptors)
        attached: protocol.Attached | None = None
        pieces: list[SharedPiece] = []
        try:
            while attached is None or len(pieces) < attached.pieces:
                message, fds = self._receive_all(protocol.MAX_PIECES)
                if isinstance(message, Pieces) and message.id == number and attached is not None:
                    if not len(message.offsets) == len(message.sizes) == len(fds) > 0:
                        protocol.close_all(fds)
                        raise ProtocolError("the daemon sent pieces without their descriptors")
                    pieces += map(SharedPiece, message.offsets, message.sizes, fds)
                    continue
                protocol.close_all(fds)
                if isinstance(message, protocol.Attached) and message.id == number:
                    attached = message
        except BaseException:
            protocol.close_all([piece.fd for piece in pieces])
            raise
        return attached, pieces


def _accepted(answer: protocol.Attached, pieces: list[SharedPiece]) -> _Answer:
    if answer.error:
        raise OSError(answer.error, answer.message)
    return answer, pieces


class Attachment:
    """The memory of one file, mapped into this process, and its lease. Both end when nothing refers to this object."""

    def __init__(
        self, path: str, mode: str, connection: _LeaseConnection, mapping: Mapping, answer: protocol.Attached
    ) -> None:
        self.path = path
        self.mode = mode
        self.driver = answer.driver
        self.private = answer.private
        self.size = answer.size
        self.mapping = mapping
        self._connection = connection
        self._number = answer.id
        self._lock = threading.Lock()  # one refresh at a time
        # Not at the exit: threads that use the memory may still run then, and the process's end releases everything.
        weakref.finalize(self, _end, os.getpid(), mapping, connection, answer.id).atexit = False

    def refresh(self) -> None:
        """Maps what the file has grown by. OSError as DeviceArray.refresh()."""
        with self._lock:
            try:
                answer, pieces = self._connection.refresh(self._number, self.mapping.bytes)
            except OSError as error:
                raise _failure(error, self.path) from None
            _add(self.mapping, pieces, answer.size, self.path)
            self.size = answer.size


def _end(process: int, mapping: Mapping, connection: _LeaseConnection, number: int) -> None:
    if os.getpid() == process:  # else this is a forked child, whose copies of the parent's objects end nothing
        mapping.close()
        connection.detach(number)


def _failure(error: OSError, path: str) -> OSError:
    if error.errno in _DEAD_DAEMON:
        error = OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
    return OSError(error.errno or errno.EIO, text_of(error), path)


def _add(mapping: Mapping, pieces: list[SharedPiece], size: int, path: str) -> None:
    """Maps pieces, whose descriptors the mapping takes over. They complete the memory of a file of ``size`` bytes."""
    try:
        if pieces:
            mapping.add(pieces)
    except OSError as error:
        if error.errno == errno.EFBIG:
            text = "the file has outgrown the addresses that are reserved for it: attach it again"
            raise OSError(errno.EFBIG, text, path) from None
        raise _failure(error, path) from None
    # The daemon may be another user's. Beyond the mapping this process has other memory.
    if size > mapping.bytes:
        text = f"the daemon gave {mapping.bytes} bytes of memory for a file of {size} bytes"
        raise OSError(errno.EPROTO, text, path)


_connections: weakref.WeakValueDictionary[int, _LeaseConnection] = (
    weakref.WeakValueDictionary()
)  # by the mount's st_dev
_connections_lock = threading.Lock()


def _after_fork() -> None:
    global _connections_lock
    _connections_lock = threading.Lock()
    for connection in list(_connections.values()):
        connection.forget()
    _connections.clear()


os.register_at_fork(after_in_child=_after_fork)


def _connect(device: int) -> _LeaseConnection:
    """The connection of this process to the daemon of a mount."""
    with _connections_lock:
        connection = _connections.get(device)
        if connection is None or not connection.alive:
            connection = _LeaseConnection(_find.connect(device, _find.mounts_by_device()[device], trusting=True))
            _connections[device] = connection
        return connection


def _open_file(path: str, mode: str) -> int:
    """Opens the file with as many rights as there are. OSError if it is not a regular file on a gpufs mount."""
    named = os.open(path, os.O_PATH | os.O_CLOEXEC)  # opening a FIFO or a device in another way has effects
    try:
        status = os.fstat(named)
        if status.st_dev not in _find.mounts_by_device():
            raise OSError(errno.EXDEV, "not on a gpufs mount: only files there can be attached")
        if stat.S_ISDIR(status.st_mode):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        try:
            return os.open(_ends.path_of(named), os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            if mode == READ_WRITE or error.errno not in _READ_ONLY:
                raise
        return os.open(_ends.path_of(named), os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(named)


def attach(path: str | os.PathLike[str], mode: str = READ, *, reserve: int | None = None) -> DeviceArray:
    """Map the memory behind a file of a gpufs mount into this process, without a copy.

    The file must exist, and this program needs the permissions that open(2) would ask for. While it is attached the
    file can grow but not shrink: truncating it, punching holes into it and opening it with O_TRUNC fail with EBUSY.
    Removing and replacing its name are possible. The end of the program ends everything, also by SIGKILL.

    Parameters
    ----------
    path
        The file. With content: holes have no memory.
    mode
        "r" maps the memory read-only. A program that may not write to the file gets a private copy in GPU memory,
        unless the mount has the knob ``trust_readers``: a GPU's driver cannot forbid writing. The same holds for a
        small file (less than a granule, 2 MiB). "r+" maps it for reading and writing and allocates the file's holes.
    reserve
        Bytes of addresses to reserve for the file's growth, seen after `DeviceArray.refresh`. None: four times the
        size, and at least 1 GiB.

    Returns
    -------
    DeviceArray
        The file's bytes, as an array of uint8.

    Raises
    ------
    OSError
        As of open(2); EXDEV if the file is not on a gpufs mount, EINVAL if it has no device memory (a file below
        ``backing`` or ``.gpufs``), ENODATA for holes with mode "r", ENOSPC if there is no memory for holes or a copy,
        ENOTCONN if the mount's daemon has died.
    ValueError
        ``mode`` is neither "r" nor "r+", or ``reserve`` is less than the file's size.

    Examples
    --------
    >>> weights = gpufs.attach("/mnt/gpufs/gpu0/weights")  # doctest: +SKIP
    >>> tensor = torch.from_dlpack(weights.view("bfloat16", (4096, -1)))  # doctest: +SKIP
    """
    if mode not in (READ, READ_WRITE):
        raise ValueError(f"mode: {mode!r} is neither 'r' nor 'r+'")
    name = os.fsdecode(path)
    try:
        fd = _open_file(name, mode)
    except OSError as error:
        raise _failure(error, name) from None
    try:
        connection = _connect(os.fstat(fd).st_dev)
        answer, pieces = connection.attach(fd, mode)
    except OSError as error:
        raise _failure(error, name) from None
    finally:
        os.close(fd)
    return DeviceArray.of(_map(name, mode, connection, answer, pieces, reserve))


def _map(
    path: str,
    mode: str,
    connection: _LeaseConnection,
    answer: protocol.Attached,
    pieces: list[SharedPiece],
    reserve: int | None,
) -> Attachment:
    """Maps what the daemon has answered. A failure ends the lease."""
    from gpufs.engine import Mapping

    try:
        try:
            if reserve is not None and reserve < answer.size:
                raise ValueError(f"reserve: {reserve} is less than the {answer.size} bytes of {path}")
            wanted = max(_RESERVE_FACTOR * answer.size, _LEAST_RESERVE) if reserve is None else reserve
            wanted = max(-(-wanted // _GRANULE), 1) * _GRANULE
            try:
                mapping = Mapping(answer.driver, answer.pci_address, writable=mode == READ_WRITE, reserve=wanted)
            except OSError as error:
                raise _failure(error, path) from None
        except BaseException:
            protocol.close_all([piece.fd for piece in pieces])
            raise
        try:
            _add(mapping, pieces, answer.size, path)
            return Attachment(path, mode, connection, mapping, answer)
        except BaseException:
            mapping.close()
            raise
    except BaseException:
        connection.detach(answer.id)
        raise
