"""A client's connection to the daemon of a mount: where it is made and lost, its requests, and the wait for answers."""

from __future__ import annotations

import errno
import itertools
import os
import select
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final, NoReturn, TypeAlias

from gpufs import protocol, syscalls
from gpufs._version import __version__
from gpufs.client._cancellation import Cancellation
from gpufs.exceptions import with_user_names
from gpufs.modes import Mode
from gpufs.syscalls import Closing, close_all

if TYPE_CHECKING:
    from gpufs.client._shared_memory import MemoryShare
    from gpufs.engine import SharedPiece

Memory: TypeAlias = "tuple[protocol.Attached, list[SharedPiece]]"

_CONNECT_SECONDS: Final = 15  # to connect, and then for the daemon's welcome
# After a cancellation, and when an exception passes through: longer than the daemon waits for a copy that it has
# cancelled. It answers at once unless a file's server or a device hangs.
_CANCEL_SECONDS: Final = 8.0
# How long the end of an attachment waits until the daemon has ended the lease.
_DETACH_SECONDS: Final = 2.0
_RETRY_SECONDS: Final = 0.2
# The main thread does not notice a signal that comes just before it begins to wait.
_LONGEST_WAIT: Final = 1.0
_GREETING: Final = 0  # the number of hello, which has none in its message
_NO_ANSWER: Final = "the daemon of the mount does not answer"

_connections: weakref.WeakSet[Connection] = weakref.WeakSet()


def in_groups(numbers: Sequence[int]) -> Iterator[Sequence[int]]:
    """Split numbers of files into as many as one request takes."""
    for start in range(0, len(numbers), protocol.MAX_FILES):
        yield numbers[start : start + protocol.MAX_FILES]


class _Pending:
    """A request in progress: the kind of message that answers it, and as much of the answer as has come.

    ``request``: what another daemon that takes over gets again; None where that is impossible.
    """

    def __init__(
        self,
        kind: type[protocol.ServerMessage],
        progress: Callable[[protocol.Progress], None] | None = None,
        request: protocol.Request | None = None,
    ) -> None:
        self.kind = kind
        self.request = request
        self.message: protocol.ServerMessage | None = None
        self.pieces: list[SharedPiece] = []  # after Attached
        self.failure: OSError | None = None  # why a part of the answer was lost
        self.abandoned = False  # no caller waits for it
        self.progress = progress

    @property
    def complete(self) -> bool:
        if self.failure is not None:
            return True
        if isinstance(self.message, protocol.Attached):
            return len(self.pieces) >= self.message.pieces
        return self.message is not None

    def abandon(self) -> None:
        """Close the descriptors that have come; those that still come are closed as they do."""
        self.abandoned = True
        close_all([piece.fd for piece in self.pieces])

    def add_pieces(self, message: protocol.Pieces, descriptors: list[int]) -> None:
        """Take over pieces of memory. ProtocolError if they are not as the daemon has to send them."""
        from gpufs.engine import SharedPiece

        if not len(message.offsets) == len(message.sizes) == len(descriptors) > 0:
            close_all(descriptors)
            raise protocol.ProtocolError("the daemon sent pieces without their descriptors")
        if not isinstance(self.message, protocol.Attached):  # the rest of the answer to a request that is over
            close_all(descriptors)
            return
        if self.abandoned:
            close_all(descriptors)
        self.pieces += map(SharedPiece, message.offsets, message.sizes, descriptors)


class Connection(Closing):
    """A connection to a daemon, with the copies, leases and registrations that this process has through it.

    Any thread may call. One request at a time is sent and waited for, and answers are matched by number: an answer that
    comes after its caller has stopped waiting is dropped, and its descriptors are closed. So neither a timeout nor an
    interrupted call ends the connection. Only the end of the socket does, or a message that breaks the protocol.

    A connection is made once, in :meth:`_connect`, and lost once, in :meth:`_lose`. The leases and registrations on it
    end with it. gpufs.client._daemons makes another connection for the next request.
    """

    def __init__(self, path: str, *, trusting: bool = False) -> None:
        """Connect to the daemon whose socket is at ``path``; see gpufs.client._daemons.connect()."""
        self.driver = ""  # of the mount
        self.last: protocol.Result | None = None  # of the copy that was asked for last
        self.is_lost = False  # whether it has ended, for any reason
        self._lock = threading.Lock()  # held from a request to the end of its answer; guards the next three
        self._numbers = itertools.count(_GREETING + 1)  # of requests, which increase
        self._pending: dict[int, _Pending] = {}  # by the request's number
        self._silent = False  # whether the daemon has not answered in time, and nothing has come since
        # The most pending ones. The daemon takes twice as many: after an interruption it has one that is ended, too.
        self._slots = 1
        self._detached: deque[int] = deque()  # leases to end as soon as the lock and the daemon are free
        self._retrying = False  # whether a thread does that
        self._asked: Callable[[Sequence[int], protocol.Move], str] | None = None  # see listen()
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            self._connect(path, trusting)
        except BaseException:
            self._sock.close()
            raise
        weakref.finalize(self, self._sock.close).atexit = False
        _connections.add(self)

    def _connect(self, path: str, trusting: bool) -> None:
        # With Python's own timeout connect(2) would not wait in the queue but fail with EAGAIN.
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _CONNECT_SECONDS, 0))
        try:
            self._sock.connect(path)
        except BlockingIOError:
            raise OSError(errno.ETIMEDOUT, _NO_ANSWER) from None
        except OSError as error:
            raise OSError(error.errno or errno.EIO, f"{path}: {error.strerror or error}") from None
        if not trusting:
            self.check_peer()
        greeting = self._pending[_GREETING] = _Pending(protocol.Welcome)
        self._send(protocol.Hello([protocol.VERSION], f"gpufs {__version__}"))
        self._wait(greeting, seconds=_CONNECT_SECONDS)
        assert isinstance(greeting.message, protocol.Welcome)
        self.driver = greeting.message.driver
        self._slots = max(greeting.message.requests // 2, 1)

    def _lose(self) -> None:
        self.is_lost = True

    @property
    def is_closed(self) -> bool:
        """Whether the daemon has closed the connection, or this side has."""
        if self.is_lost or self._sock.fileno() < 0:
            return True
        poll = select.poll()
        poll.register(self._sock, 0)
        return bool(poll.poll(0))

    def check_peer(self) -> None:
        """OSError EPERM if the daemon is neither ours nor root's: it could keep our descriptors and use them later."""
        _, uid = syscalls.peer_of(self._sock)
        if not syscalls.trusted(uid):
            text = f"it belongs to user {uid}, which is not trusted with our descriptors"
            raise OSError(errno.EPERM, with_user_names(text))

    def close(self) -> None:
        """End the connection; the daemon cancels and releases what is on it."""
        self._lose()
        self._sock.close()

    def forget(self) -> None:
        """In a forked child: the connection and what is on it are the parent's."""
        self.close()
        self._pending.clear()
        self._lock = threading.Lock()  # a thread of the parent's may hold the old one

    # ---- requests ----

    def copy(
        self,
        direction: protocol.Direction,
        host_fd: int,
        mount_fd: int,
        *,
        host_offset: int = 0,
        offset: int = 0,
        size: int | None = None,
        fastpath: protocol.Fastpath | None = None,
        sync: protocol.Sync = "none",
        interval: float = 0.0,
        progress: Callable[[protocol.Progress], None] | None = None,
        cancel: Cancellation | None = None,
    ) -> protocol.Result:
        """Have the daemon copy between two open files; both stay the caller's.

        Returns the daemon's result, which may be a failure. OSError when the daemon ends before it: its last words,
        or ECONNRESET. Any other exception (KeyboardInterrupt, one that ``progress`` raises) first cancels the copy and
        waits for its end, so that the destination no longer changes; ``last`` is the result then, or None. After an
        exception the connection is closed.
        """
        interval = interval if progress else 0.0
        self.last = None
        with self._exclusive():
            request = protocol.Copy(next(self._numbers), direction, host_offset, offset, size, fastpath, sync, interval)
            pending = None
            seconds = _CANCEL_SECONDS  # how long the end of the copy may take after an exception
            try:
                pending = self._start(request, (host_fd, mount_fd), progress)
                if not self._wait(pending, cancel=cancel):
                    self._send(protocol.Cancel(request.id))
                    seconds = 0.0
                    self._wait(pending, seconds=_CANCEL_SECONDS)
            except BaseException:
                try:
                    if pending is not None and not self.is_lost:
                        pending.progress = None
                        with suppress(OSError):
                            self._send(protocol.Cancel(request.id))
                            self._wait(pending, seconds=seconds)
                finally:
                    self.close()
                raise
            finally:
                if pending is not None and isinstance(pending.message, protocol.Result):
                    self.last = pending.message
        assert self.last is not None
        return self.last

    def attach(self, fd: int, mode: Mode, placement: int | None) -> Memory:
        """Ask for the memory of an open file, which stays the caller's. OSError if the daemon refuses.

        ECONNRESET if the daemon has died: another one may serve the connection by now.
        """
        with self._exclusive():
            request = protocol.Attach(next(self._numbers), mode, placement)
            try:
                answer = self._ask_for_memory(request, (fd,))
            except BaseException:
                self._detached.append(request.id)  # the file may be attached all the same
                raise
            if answer[0].error == errno.ECONNRESET:
                self._detached.append(request.id)
        _check(answer[0])
        return answer

    def refresh(self, number: int, start: int) -> Memory:
        """Ask for the memory from ``start`` on. OSError as attach()."""
        with self._exclusive():
            answer = self._ask_for_memory(protocol.Refresh(next(self._numbers), number, start))
        _check(answer[0])
        return answer

    def detach(self, number: int) -> None:
        """End a lease, and wait for that at most two seconds.

        The garbage collector may call this at any point of any thread, also one that has the lock.
        """
        self._detached.append(number)
        self._end_leases()

    def register(self, share: MemoryShare, size: int, file: int) -> int:
        """Have a file show memory. Returns the registration's number. OSError if the daemon refuses."""
        self.check_peer()
        fields = (share.kind, share.offset, size, share.writable, share.pci_address, share.handle)
        with self._exclusive():
            request = protocol.Register(next(self._numbers), *fields)
            try:
                done = self._ask(request, [file] if share.fd < 0 else [file, share.fd])
                if done.error == errno.ECONNRESET:  # the daemon that has died may have registered it
                    self._ask(protocol.Unregister(next(self._numbers), request.id), ())
            except BaseException:  # the daemon may have registered it
                if not self.is_lost:
                    self._send(protocol.Unregister(next(self._numbers), request.id))
                raise
        _check(done)
        return request.id

    def unregister(self, number: int) -> None:
        """End a registration. OSError ETIMEDOUT if the daemon still uses the memory."""
        self._change(protocol.Unregister, number)

    def set_quota(self, directory: int, uid: int | None, limit: int) -> None:
        """Set the limit of a directory or a user; see :class:`gpufs.protocol.SetQuota`. OSError if refused."""
        self._change(protocol.SetQuota, uid, limit, descriptors=(directory,))

    def sleep(self, number: int) -> None:
        """Put a lease to sleep, whose memory is unmapped. OSError if the daemon refuses: it is awake then."""
        self._change(protocol.Sleep, number)

    def wake(self, number: int) -> Memory:
        """Wake a lease and ask for its memory. OSError if the daemon refuses: it sleeps on."""
        with self._exclusive():
            answer = self._ask_for_memory(protocol.Wake(next(self._numbers), number))
        _check(answer[0])
        return answer

    def check(self, leases: Sequence[int], what: protocol.Move) -> None:
        """Ask whether these leases can all sleep, or wake, now. OSError as one of them would get it."""
        for some in in_groups(leases):
            self._change(protocol.Check, list(some), what)

    def park(self, inodes: Sequence[int], wait: float) -> None:
        """Move files to the host's memory; programs that use them have so many seconds to sleep. OSError if refused."""
        self._change(protocol.Park, list(inodes), wait)

    def bring_back(self, inodes: Sequence[int]) -> None:
        """Move files back to their devices. OSError if the daemon refuses."""
        self._change(protocol.BringBack, list(inodes))

    def listen(self, asked: Callable[[Sequence[int], protocol.Move], str]) -> NoReturn:
        """Call ``asked`` with inodes and what they should do, for each question about this process's files.

        It returns why the program cannot do it, or "". OSError at the end of the connection, on which nothing else can
        be done.
        """
        self._asked = asked
        with self._lock:
            done = self._ask(protocol.Listen(next(self._numbers)), ())
            _check(done)
            while True:
                self._receive()

    def revoke(self, file: int) -> None:
        """End all leases on a file. OSError if the daemon refuses."""
        self._change(protocol.Revoke, descriptors=(file,))

    def _change(self, kind: Callable[..., protocol.Request], *fields: object, descriptors: Sequence[int] = ()) -> None:
        with self._exclusive():
            done = self._ask(kind(next(self._numbers), *fields), descriptors)
        _check(done)

    def _ask(self, request: protocol.Request, descriptors: Sequence[int]) -> protocol.Done:
        pending = self._start(request, descriptors)
        self._wait(pending)
        assert isinstance(pending.message, protocol.Done)
        return pending.message

    def _ask_for_memory(
        self, request: protocol.Attach | protocol.Refresh | protocol.Wake, descriptors: Sequence[int] = ()
    ) -> Memory:
        pending = self._start(request, descriptors)
        try:
            self._wait(pending)
            if pending.failure is not None:
                raise pending.failure
        except BaseException:
            pending.abandon()
            raise
        assert isinstance(pending.message, protocol.Attached)
        if pending.message.error:
            pending.abandon()  # a daemon that died may have sent some
        return pending.message, pending.pieces

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
        while self._detached and not self.is_lost and self._lock.acquire(blocking=False):
            failed = False
            try:
                self._send_detaches()
            except OSError:  # not in time, or the connection is lost
                failed = True
            finally:
                self._lock.release()
            if failed and self._detached and not self.is_lost:
                self._retry()
                return

    def _send_detaches(self) -> None:
        deadline = time.monotonic() + (0.0 if self._silent else _DETACH_SECONDS)
        sent: list[_Pending] = []
        while self._detached or not all(pending.complete for pending in sent):
            while self._detached and len(self._pending) < self._slots:
                sent.append(self._start(protocol.Detach(next(self._numbers), self._detached[0])))
                self._detached.popleft()
            self._receive(deadline)

    def _retry(self) -> None:
        if not self._retrying:
            self._retrying = True
            try:
                threading.Thread(target=self._end_later, name="gpufs-detach", daemon=True).start()
            except RuntimeError:
                self._retrying = False  # no thread can be started: the next request ends the leases

    def _end_later(self) -> None:
        while self._detached and not self.is_lost:
            time.sleep(_RETRY_SECONDS)
            self._end_leases()
        self._retrying = False
        self._end_leases()  # another thread may have left leases to this one just now

    # ---- messages ----

    def _start(
        self,
        request: protocol.Request,
        descriptors: Sequence[int] = (),
        progress: Callable[[protocol.Progress], None] | None = None,
    ) -> _Pending:
        """Send a request. _wait() waits for its answer."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        # Abandoned requests keep their slots until they are answered. And another daemon may have taken over by now.
        while len(self._pending) >= self._slots or poll.poll(0):
            self._receive()
        again = None if descriptors else request
        pending = self._pending[request.id] = _Pending(request.answer, progress, again)
        try:
            self._send(request, descriptors)
        except BaseException:
            self._pending.pop(request.id, None)
            raise
        return pending

    def _wait(self, pending: _Pending, *, seconds: float | None = None, cancel: Cancellation | None = None) -> bool:
        """Receive messages until a request is answered. False if cancelled before; OSError ETIMEDOUT after ``seconds``.

        Every request waits here.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        while not pending.complete:
            if not self._receive(deadline, cancel):
                return False
        return True

    def _receive(self, deadline: float | None = None, cancel: Cancellation | None = None) -> bool:
        """Wait for one message and give it to the request that it answers. False if cancelled before."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        if cancel is not None:
            poll.register(cancel, select.POLLIN)
        ready: list[tuple[int, int]] = []
        while not ready:
            left = _LONGEST_WAIT if deadline is None else max(deadline - time.monotonic(), 0)
            ready = poll.poll(min(left, _LONGEST_WAIT) * 1000)
            if not ready and left <= 0:
                self._silent = True
                raise OSError(errno.ETIMEDOUT, _NO_ANSWER)
        if cancel is not None and any(fd == cancel.fileno() for fd, _ in ready):
            return False
        try:
            received = self._next_message()
        except OSError:
            self._lose()
            raise
        self._silent = False
        if received is not None:
            self._deliver(*received)
        return True

    def _next_message(self) -> tuple[protocol.ServerMessage, list[int]] | None:
        """Receive a message; its descriptors are the caller's. None for one whose descriptors found no free number.

        OSError at the end of the connection.
        """
        try:
            try:
                data, descriptors = protocol.receive(self._sock, protocol.MAX_PIECES)
            except ConnectionResetError:
                # Comes once, before anything else, if the daemon closed without reading our last message.
                data, descriptors = protocol.receive(self._sock, protocol.MAX_PIECES)
        except protocol.ProtocolError as error:
            if error.errno != errno.EMFILE:
                raise
            for pending in self._pending.values():
                if pending.kind is protocol.Attached:
                    pending.failure = error
            self._forget_complete()
            return None
        try:
            if not data:
                raise OSError(errno.ECONNRESET, "the daemon of the mount has ended")
            message = protocol.decode_server(data)
            if isinstance(message, protocol.Goodbye):
                raise OSError(message.error or errno.ECONNRESET, message.message)
        except OSError:
            close_all(descriptors)
            raise
        return message, descriptors

    def _deliver(self, message: protocol.ServerMessage, descriptors: list[int]) -> None:
        """Add a message to the answer that it belongs to. Its descriptors are closed if no caller waits for them."""
        if isinstance(message, protocol.Asked):
            close_all(descriptors)
            if self._asked is not None:
                declined = self._asked(message.inodes, message.what)
                if declined:
                    self._send(protocol.Declined(message.question, protocol.shorten(declined)))
            return
        if isinstance(message, protocol.Replaced):
            self._send_again()
            return
        pending = self._pending.get(message.id if isinstance(message, protocol.Answer) else _GREETING)
        if pending is not None and isinstance(message, protocol.Pieces):
            try:
                pending.add_pieces(message, descriptors)
            except protocol.ProtocolError:
                self._lose()
                raise
        else:
            close_all(descriptors)
            if pending is None:
                return
            if isinstance(message, protocol.Progress) and pending.progress is not None:
                pending.progress(message)
            elif isinstance(message, pending.kind):
                pending.message = message
        self._forget_complete()

    def _send_again(self) -> None:
        """Another daemon serves the connection: send again what has no answer. What had descriptors has failed."""
        for number, pending in self._pending.items():
            pieces, pending.pieces, pending.message = pending.pieces, [], None
            if not pending.abandoned:
                close_all([piece.fd for piece in pieces])
            if pending.request is not None:
                self._send(pending.request)
            elif issubclass(pending.kind, protocol.FinalAnswer):
                pending.message = pending.kind(number, errno.ECONNRESET, "the daemon of the mount has ended")
        self._forget_complete()

    def _forget_complete(self) -> None:
        for number in [number for number, pending in self._pending.items() if pending.complete]:
            del self._pending[number]

    def _send(self, message: protocol.ClientMessage, descriptors: Sequence[int] = ()) -> None:
        """Send a message. If the daemon has ended the connection, _next_message() reports why."""
        with suppress(BrokenPipeError, ConnectionResetError):
            protocol.send(self._sock, message, descriptors)


def _check(answer: protocol.Attached | protocol.Done) -> None:
    if answer.error:
        raise OSError(answer.error, with_user_names(answer.message))


def _after_fork() -> None:
    for connection in list(_connections):
        connection.forget()


os.register_at_fork(after_in_child=_after_fork)
