"""A client's connection to the daemon of a mount: its requests, and the loop that waits for their answers."""

from __future__ import annotations

import errno
import itertools
import os
import select
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final, Self, TypeAlias

from gpufs import protocol, syscalls
from gpufs._naming import named_in
from gpufs._version import __version__
from gpufs.modes import Mode
from gpufs.protocol import (
    Attach,
    Attached,
    ClientMessage,
    Copy,
    Detach,
    Direction,
    Done,
    Fastpath,
    Goodbye,
    Hello,
    Pieces,
    Progress,
    ProtocolError,
    Refresh,
    Register,
    Result,
    Revoke,
    ServerMessage,
    SetQuota,
    Sync,
    Unregister,
    Welcome,
)
from gpufs.syscalls import close_all

if TYPE_CHECKING:
    from gpufs.client._shared_memory import Share
    from gpufs.engine import SharedPiece

Memory: TypeAlias = "tuple[Attached, list[SharedPiece]]"
Change: TypeAlias = Register | Unregister | SetQuota | Revoke  # requests that `done` answers

_HELLO_SECONDS: Final = 15.0
# After a cancellation, and when an exception passes through: longer than the daemon waits for a copy that it has
# cancelled. It answers at once unless a file's server or a device hangs.
_CANCEL_SECONDS: Final = 8.0
# How long the end of an attachment waits until the daemon has ended the lease.
_DETACH_SECONDS: Final = 2.0
_RETRY_SECONDS: Final = 0.2

_connections: weakref.WeakSet[Connection] = weakref.WeakSet()


@named_in("gpufs.client")
class Cancellation:
    """Ends copies from another thread or from a signal handler: hand it to them, then call :meth:`cancel`."""

    __slots__ = ("_fd", "_followers", "cancelled")

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._followers: list[Cancellation] = []
        self.cancelled = False

    def cancel(self) -> None:
        """All copies that have this object end with CopyError ECANCELED, soon. A second call does nothing."""
        if not self.cancelled:
            self.cancelled = True
            os.eventfd_write(self._fd, 1)
            for follower in tuple(self._followers):
                follower.cancel()

    @contextmanager
    def follower(self) -> Iterator[Cancellation]:
        """Another one, which is cancelled with this one and can be cancelled alone."""
        follower = Cancellation()
        self._followers.append(follower)
        try:
            if self.cancelled:
                follower.cancel()
            yield follower
        finally:
            self._followers.remove(follower)

    def fileno(self) -> int:
        """A descriptor that is readable once cancelled."""
        return self._fd

    def __del__(self) -> None:
        os.close(self._fd)


class _Answer:
    """What the daemon owes for a request, as far as it has come."""

    __slots__ = ("complete", "failure", "message", "pieces", "progress", "wanted")

    def __init__(self, progress: Callable[[Progress], None] | None = None) -> None:
        self.message: ServerMessage | None = None
        self.pieces: list[SharedPiece] = []  # after Attached
        self.failure: OSError | None = None  # why a part of it was lost
        self.complete = False
        self.wanted = True  # whether the caller still waits; otherwise descriptors are closed
        self.progress = progress

    def drop(self) -> None:
        """The caller does not wait any more."""
        self.wanted = False
        close_all([piece.fd for piece in self.pieces])
        self.pieces = []


class Connection:
    """A connection to a daemon, with the copies, leases and registrations that this process has through it.

    Any thread may call. One request is in progress at a time, and answers are matched by number: an answer that comes
    after its caller has stopped waiting is dropped, and its descriptors are closed. So neither a timeout nor an
    interrupted call ends the connection. Only the end of the socket does, or a message that breaks the protocol.
    """

    __slots__ = (
        "__weakref__",
        "_detached",
        "_lock",
        "_most",
        "_numbers",
        "_owed",
        "_retrying",
        "_silent",
        "_sock",
        "driver",
        "last",
        "lost",
    )

    def __init__(self, sock: socket.socket) -> None:
        """Takes over a connected socket, and greets the daemon. OSError if the daemon does not answer, or refuses."""
        self.last: Result | None = None  # of the copy that was asked for last
        self.lost = False  # whether the daemon or the socket has failed
        self._sock = sock
        self._numbers = itertools.count(1)  # of copies, leases and registrations
        self._lock = threading.Lock()  # held from a request to the end of its answer; guards _owed and _silent
        self._owed: dict[tuple[type, int], _Answer] = {}  # by the kind of the answer and the number
        self._silent = False  # whether the daemon has not answered in time, and nothing has come since
        self._detached: deque[int] = deque()  # leases to end as soon as the lock and the daemon are free
        self._retrying = False  # whether a thread does that
        try:
            sock.settimeout(_HELLO_SECONDS)
            self._send(Hello([protocol.VERSION], f"gpufs {__version__}"))
            welcome, descriptors = self._next_message()
            close_all(descriptors)
            if not isinstance(welcome, Welcome):
                raise ProtocolError("the daemon sent no welcome")
            self._most = max(welcome.requests, 2)
            self.driver = welcome.driver
            sock.settimeout(None)
        except BaseException:
            sock.close()
            raise
        weakref.finalize(self, sock.close).atexit = False
        _connections.add(self)

    @property
    def ended(self) -> bool:
        """Whether the daemon has closed the connection, or this side has."""
        if self.lost or self._sock.fileno() < 0:
            return True
        poll = select.poll()
        poll.register(self._sock, 0)
        return bool(poll.poll(0))

    def check_peer(self) -> None:
        """OSError EPERM if the daemon is neither ours nor root's: it could keep our descriptors and use them later."""
        _, uid = syscalls.peer_of(self._sock)
        if uid not in (0, os.geteuid()):
            raise OSError(errno.EPERM, f"it belongs to user {uid}, which is not trusted with our descriptors")

    def close(self) -> None:
        """End the connection; the daemon cancels and releases what is on it."""
        self._sock.close()

    def forget(self) -> None:
        """In a forked child: the connection and what is on it are the parent's."""
        self._sock.close()
        self.lost = True
        self._owed.clear()
        self._lock = threading.Lock()  # a thread of the parent's may hold the old one

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- requests ----

    def copy(
        self,
        direction: Direction,
        host_fd: int,
        mount_fd: int,
        *,
        host_offset: int = 0,
        offset: int = 0,
        size: int | None = None,
        fastpath: Fastpath | None = None,
        sync: Sync = "none",
        interval: float = 0.0,
        progress: Callable[[Progress], None] | None = None,
        cancel: Cancellation | None = None,
    ) -> Result:
        """Have the daemon copy between two open files; both stay the caller's.

        Returns the daemon's result, which may be a failure. OSError when the daemon ends before it: its last words,
        or ECONNRESET. Any other exception (KeyboardInterrupt, one that ``progress`` raises) first cancels the copy and
        waits for its end, so that the destination no longer changes; ``last`` is the result then, or None. After an
        exception the connection is closed.
        """
        number = next(self._numbers)
        interval = interval if progress else 0.0
        request = Copy(number, direction, host_offset, offset, size, fastpath, sync, interval)
        self.last = None
        with self._exclusive():
            answer = None
            seconds = _CANCEL_SECONDS  # that the end of the copy may take after an exception
            try:
                answer = self._ask(Result, request, (host_fd, mount_fd), progress)
                if not self._wait(answer, cancel=cancel):
                    self._send(protocol.Cancel(number))
                    seconds = 0.0
                    self._wait(answer, seconds=_CANCEL_SECONDS)
            except BaseException:
                try:
                    if answer is not None and not self.lost:
                        answer.progress = None
                        with suppress(OSError):
                            self._send(protocol.Cancel(number))
                            self._wait(answer, seconds=seconds)
                finally:
                    self.close()
                raise
            finally:
                if answer is not None and isinstance(answer.message, Result):
                    self.last = answer.message
        assert self.last is not None
        return self.last

    def attach(self, fd: int, mode: Mode) -> Memory:
        """Ask for the memory of an open file, which stays the caller's. OSError if the daemon refuses."""
        number = next(self._numbers)
        with self._exclusive():
            try:
                answer = self._memory(Attach(number, mode), (fd,))
            except BaseException:
                self._detached.append(number)  # it may be attached all the same
                raise
        _check(answer[0])
        return answer

    def refresh(self, number: int, start: int) -> Memory:
        """Ask for the memory from ``start`` on. OSError if the daemon refuses."""
        with self._exclusive():
            answer = self._memory(Refresh(number, start))
        _check(answer[0])
        return answer

    def detach(self, number: int) -> None:
        """End a lease, and wait for that at most two seconds.

        The garbage collector may call this at any point of any thread, also one that has the lock.
        """
        self._detached.append(number)
        self._end_leases()

    def register(self, share: Share, size: int, file: int) -> int:
        """Have a file show memory. Returns the registration's number. OSError if the daemon refuses."""
        self.check_peer()
        number = next(self._numbers)
        fields = (share.kind, share.offset, size, share.writable, share.pci_address, share.handle)
        with self._exclusive():
            try:
                done = self._done(Register(number, *fields), [file] if share.fd < 0 else [file, share.fd])
            except BaseException:  # the daemon may have registered it
                if not self.lost:
                    self._send(Unregister(number))
                raise
        _check(done)
        return number

    def unregister(self, number: int) -> None:
        """End a registration. OSError ETIMEDOUT if the daemon still uses the memory."""
        self.request(Unregister(number))

    def request(self, message: Change, descriptors: Sequence[int] = ()) -> None:
        """Send a message and wait until it is done. OSError if the daemon refuses, or ends before."""
        with self._exclusive():
            done = self._done(message, descriptors)
        _check(done)

    # ---- leases that end ----

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """No other request is in progress. At the end, the leases end that were detached in between."""
        try:
            with self._lock:
                yield
        finally:
            self._end_leases()

    def _end_leases(self) -> None:
        """End the leases in the queue, unless another thread has the lock: that thread does it afterwards.

        Waits for the daemon. A daemon that does not answer in time is not waited for again until it sends something,
        and a thread ends the leases for which it has no slot.
        """
        while self._detached and not self.lost and self._lock.acquire(blocking=False):
            failed = False
            try:
                self._send_detaches()
            except OSError:  # not in time, or the connection is lost
                failed = True
            finally:
                self._lock.release()
            if failed and self._detached and not self.lost:
                self._retry()
                return

    def _send_detaches(self) -> None:
        deadline = time.monotonic() + (0.0 if self._silent else _DETACH_SECONDS)
        sent: list[_Answer] = []
        while self._detached or not all(answer.complete for answer in sent):
            # Half of the slots stay free for other requests. The daemon ends a connection that has too many.
            while self._detached and len(self._owed) < self._most // 2:
                sent.append(self._ask(Done, Detach(self._detached[0])))
                self._detached.popleft()
            self._read(deadline)

    def _retry(self) -> None:
        if not self._retrying:
            self._retrying = True
            try:
                threading.Thread(target=self._end_later, name="gpufs-detach", daemon=True).start()
            except RuntimeError:
                self._retrying = False  # no thread can be started: the next request ends the leases

    def _end_later(self) -> None:
        while self._detached and not self.lost:
            time.sleep(_RETRY_SECONDS)
            self._end_leases()
        self._retrying = False
        self._end_leases()  # those that another thread has left to this one just now

    # ---- answers ----

    def _done(self, message: Change, descriptors: Sequence[int]) -> Done:
        answer = self._ask(Done, message, descriptors)
        self._wait(answer)
        assert isinstance(answer.message, Done)
        return answer.message

    def _memory(self, request: Attach | Refresh, descriptors: Sequence[int] = ()) -> Memory:
        while (Attached, request.id) in self._owed:  # of a refresh that was interrupted
            self._read()
        answer = self._ask(Attached, request, descriptors)
        try:
            self._wait(answer)
            if answer.failure is not None:
                raise answer.failure
        except BaseException:
            answer.drop()
            raise
        assert isinstance(answer.message, Attached)
        return answer.message, answer.pieces

    def _ask(
        self,
        kind: type[Result | Attached | Done],
        request: Copy | Attach | Refresh | Detach | Change,
        descriptors: Sequence[int] = (),
        progress: Callable[[Progress], None] | None = None,
    ) -> _Answer:
        """Send a request; returns its answer, for which _wait() waits."""
        while len(self._owed) >= self._most:  # answers for which no caller waits
            self._read()
        answer = self._owed[kind, request.id] = _Answer(progress)
        try:
            self._send(request, descriptors)
        except BaseException:
            self._owed.pop((kind, request.id), None)
            raise
        return answer

    def _wait(self, answer: _Answer, *, seconds: float | None = None, cancel: Cancellation | None = None) -> bool:
        """Receive messages until an answer is complete. False if cancelled before; OSError ETIMEDOUT after ``seconds``.

        Every request waits here.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        while not answer.complete:
            if not self._read(deadline, cancel):
                return False
        return True

    def _read(self, deadline: float | None = None, cancel: Cancellation | None = None) -> bool:
        """Wait for one message and put it where it belongs. False if cancelled before."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        if cancel is not None:
            poll.register(cancel, select.POLLIN)
        left = None if deadline is None else max(deadline - time.monotonic(), 0) * 1000
        ready = poll.poll(left)
        if not ready:
            self._silent = True
            raise OSError(errno.ETIMEDOUT, "the daemon of the mount does not answer")
        if cancel is not None and any(fd == cancel.fileno() for fd, _ in ready):
            return False
        try:
            message, descriptors = self._next_message()
        except OSError as error:
            if self.lost or error.errno != errno.EMFILE:
                self.lost = True
                raise
            self._lose_memory(error)
            return True
        self._silent = False
        self._deliver(message, descriptors)
        return True

    def _deliver(self, message: ServerMessage, descriptors: list[int]) -> None:
        """Add a message to the answer that it belongs to. Its descriptors are closed if no caller waits for them."""
        if isinstance(message, Pieces):
            self._add_pieces(message, descriptors)
            return
        close_all(descriptors)
        if isinstance(message, Progress):
            copying = self._owed.get((Result, message.id))
            if copying is not None and copying.progress is not None:
                copying.progress(message)
        elif isinstance(message, Result | Attached | Done):
            key = (type(message), message.id)
            answer = self._owed.get(key)
            if isinstance(message, Done):
                self._owed.pop((Attached, message.id), None)  # the lease is over
            if answer is None:
                return
            answer.message = message
            if not isinstance(message, Attached) or not message.pieces:
                answer.complete = True
                del self._owed[key]

    def _add_pieces(self, message: Pieces, descriptors: list[int]) -> None:
        from gpufs.engine import SharedPiece

        if not len(message.offsets) == len(message.sizes) == len(descriptors) > 0:
            close_all(descriptors)
            self.lost = True
            raise ProtocolError("the daemon sent pieces without their descriptors")
        answer = self._owed.get((Attached, message.id))
        if answer is None or not isinstance(answer.message, Attached):
            close_all(descriptors)
            return
        answer.pieces += map(SharedPiece, message.offsets, message.sizes, descriptors)
        if len(answer.pieces) >= answer.message.pieces:
            answer.complete = True
            del self._owed[Attached, message.id]
        if not answer.wanted:
            answer.drop()

    def _lose_memory(self, failure: OSError) -> None:
        """This process had no free descriptors for a message with memory: the requests for memory fail."""
        for key, answer in list(self._owed.items()):
            if key[0] is Attached:
                answer.failure = failure
                answer.complete = True
                del self._owed[key]

    def _send(self, message: ClientMessage, descriptors: Sequence[int] = ()) -> None:
        """Send a message. If the daemon has ended the connection, _next_message() reports why."""
        with suppress(BrokenPipeError, ConnectionResetError):
            protocol.send(self._sock, message, descriptors)

    def _next_message(self) -> tuple[ServerMessage, list[int]]:
        """Receive a message; its descriptors are the caller's. OSError at the end of the connection."""
        try:
            try:
                data, descriptors = protocol.receive(self._sock, protocol.MAX_PIECES)
            except ConnectionResetError:
                # Comes once, before anything else, if the daemon closed without reading our last message.
                data, descriptors = protocol.receive(self._sock, protocol.MAX_PIECES)
        except TimeoutError:
            raise OSError(errno.ETIMEDOUT, "the daemon of the mount does not answer") from None
        try:
            if not data:
                raise OSError(errno.ECONNRESET, "the daemon of the mount has ended")
            message = protocol.decode_server(data)
            if isinstance(message, Goodbye):
                self.lost = True
                raise OSError(message.error or errno.ECONNRESET, message.message)
        except OSError:
            close_all(descriptors)
            raise
        return message, descriptors


def _check(answer: Attached | Done) -> None:
    """OSError if the daemon has refused."""
    if answer.error:
        raise OSError(answer.error, answer.message)


def _after_fork() -> None:
    for connection in list(_connections):
        connection.forget()


os.register_at_fork(after_in_child=_after_fork)
