"""This process's link to the daemon of a mount, which keeps its leases and registrations there."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Final, TypeAlias

from gpufs import protocol
from gpufs.client import _find
from gpufs.client._connection import Connection
from gpufs.protocol import Attach, Attached, Detach, Done, Pieces, ProtocolError, Refresh, Register, Unregister

if TYPE_CHECKING:
    import socket

    from gpufs.client._shared_memory import Share
    from gpufs.engine import SharedPiece

Answer: TypeAlias = "tuple[Attached, list[SharedPiece]]"

# How long the end of an attachment waits until the daemon has ended the lease.
_DETACH_SECONDS: Final = 2.0


class Link(Connection):
    """A connection whose life is that of the leases and registrations on it. Any thread may call."""

    __slots__ = ("__weakref__", "_ended", "_lock", "driver", "numbers")

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self.driver = ""  # of the mount, once somebody has asked for it
        self.numbers = itertools.count(1)  # of leases and registrations
        self._lock = threading.Lock()  # held from a request to the end of its answer
        self._ended: deque[int] = deque()  # leases to end as soon as the lock is free
        weakref.finalize(self, sock.close).atexit = False

    def forget(self) -> None:
        """In a forked child: the connection and what is on it are the parent's."""
        self._sock.close()
        self._lost = True
        self._lock = threading.Lock()

    def attach(self, fd: int, mode: str) -> Answer:
        """Asks for the memory of an open file, which stays the caller's. OSError if the daemon refuses."""
        number = next(self.numbers)
        with self._lock:
            try:
                answer = self._ask(Attach(number, mode), (fd,))
            except BaseException:
                self._ended.append(number)  # it may be attached all the same
                raise
        self._end_leases()
        return _accepted(*answer)

    def refresh(self, number: int, start: int) -> Answer:
        """Asks for the memory from ``start`` on. OSError if the daemon refuses."""
        with self._lock:
            answer = self._ask(Refresh(number, start))
        self._end_leases()
        return _accepted(*answer)

    def register(self, number: int, share: Share, size: int, file: int) -> None:
        """Has a file show memory. OSError if the daemon refuses."""
        _find.check_peer(self._sock)
        request = Register(
            number, share.kind, share.offset, size, share.writable, share.whole, share.pci_address, share.handle
        )
        with self._lock:
            try:
                self.request(request, [file] if share.fd < 0 else [file, share.fd])
            except BaseException as failure:
                if not isinstance(failure, OSError):  # interrupted: the daemon may have registered it
                    self._send(Unregister(number))
                raise
        self._end_leases()

    def unregister(self, number: int) -> None:
        """Ends a registration. OSError ETIMEDOUT if the daemon still uses the memory, others if the link has ended."""
        with self._lock:
            self.request(Unregister(number))
        self._end_leases()

    def detach(self, number: int) -> None:
        """Ends a lease. The garbage collector may call this at any point of any thread, also one that has the lock."""
        self._ended.append(number)
        self._end_leases()

    def _end_leases(self) -> None:
        # A thread that finds the lock taken leaves its lease to the one that has it, which checks the queue afterwards.
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
                if isinstance(message, Done) and message.id == number:
                    return
        finally:
            if self._sock.fileno() >= 0:
                self._sock.settimeout(None)

    def _ask(self, request: Attach | Refresh, descriptors: tuple[int, ...] = ()) -> Answer:
        """Sends a request and receives the memory. Answers to requests that were abandoned are dropped."""
        from gpufs.engine import SharedPiece

        number = request.id
        self._send(request, descriptors)
        attached: Attached | None = None
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
                if isinstance(message, Attached) and message.id == number:
                    attached = message
        except BaseException:
            protocol.close_all([piece.fd for piece in pieces])
            raise
        return attached, pieces


def _accepted(answer: Attached, pieces: list[SharedPiece]) -> Answer:
    if answer.error:
        raise OSError(answer.error, answer.message)
    return answer, pieces


_links: weakref.WeakValueDictionary[int, Link] = weakref.WeakValueDictionary()  # by the mount's st_dev
_links_lock = threading.Lock()


def _after_fork() -> None:
    global _links_lock
    _links_lock = threading.Lock()
    for link in list(_links.values()):
        link.forget()
    _links.clear()


os.register_at_fork(after_in_child=_after_fork)


def link_to(device: int) -> Link:
    """The link of this process to the daemon of a mount."""
    with _links_lock:
        link = _links.get(device)
        if link is None or link.ended:
            link = Link(_find.connect(device, _find.mounts_by_device()[device], trusting=True))
            _links[device] = link
        return link
