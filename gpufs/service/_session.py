"""One client: its connection, its requests, and what it may take."""

import contextlib
import dataclasses
import errno
import functools
import logging
import math
import os
import socket
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeVar

import trio

from gpufs import protocol
from gpufs._version import __version__
from gpufs.daemon import threads
from gpufs.protocol import (
    LOAD,
    ClientMessage,
    Copy,
    Goodbye,
    Hello,
    ProtocolError,
    Result,
    ServerMessage,
    Welcome,
)
from gpufs.service import _checks
from gpufs.service._backend import Backend, State, Transfer, drop_set_id
from gpufs.service._holdings import Abandoned, Descriptor, Holdings
from gpufs.service._limits import Limits

log = logging.getLogger(__name__)

T = TypeVar("T")
# In the number of a client, which is a process otherwise.
_CONNECTION_BIT: Final = 1 << 63
_SERVER_BIT: Final = 1 << 62


@dataclass(slots=True)
class Counters:
    """What the service has done since it started; bytes, except where the name says otherwise."""

    connections: int = 0  # now
    running: int = 0  # copies now
    accepted: int = 0  # connections
    rejected: int = 0  # connections over a limit
    violations: int = 0  # connections ended because of what the client sent
    refused: int = 0  # copies that a rule forbids
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    loaded_bytes: int = 0
    stored_bytes: int = 0
    path_bytes: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Peer:
    """Who connected; for logs and limits alone, it grants nothing."""

    pid: int
    uid: int
    gid: int

    def __str__(self) -> str:
        return f"process {self.pid} of user {self.uid}"


@dataclass(slots=True)
class _Request:
    """A copy under way."""

    copy: Copy
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)  # around what precedes the transfer
    holdings: Holdings = field(default_factory=Holdings)
    began: float = field(default_factory=time.monotonic)
    ends: _checks.Ends | None = None  # set before the transfer
    # Guards the two below: a thread that was left behind must not start what has been cancelled.
    lock: threading.Lock = field(default_factory=threading.Lock)
    transfer: Transfer | None = None
    cancelled: bool = False

    def start(self, start: Callable[[], Transfer]) -> None:
        """Starts the transfer; Abandoned if the request has been cancelled."""
        with self.lock:
            if self.cancelled:
                raise Abandoned
            self.transfer = self.holdings.hold(start())

    def cancel(self) -> None:
        """From now on the transfer has been cancelled or is never started."""
        with self.lock:
            self.cancelled = True
            if self.transfer is not None:
                self.transfer.cancel()
        self.scope.cancel()

    def end(self) -> None:
        """Before the transfer is closed: a client may still cancel what it has not heard the result of."""
        with self.lock:
            self.transfer = None


class Session:
    """Serves one connection until it ends. Owns its socket."""

    def __init__(
        self,
        sock: socket.socket,
        peer: Peer,
        number: int,
        backend: Backend,
        device: int,
        limits: Limits,
        counters: Counters,
    ) -> None:
        """``device``: the st_dev of the mount; ``number``: names the connection in logs."""
        sock.setblocking(False)
        self._sock = sock
        self._peer = peer
        # A process of another PID namespace has no number here.
        self._client = peer.pid if peer.pid > 0 else _CONNECTION_BIT | number
        self._backend = backend
        self._device = device
        self._limits = limits
        self._counters = counters
        self._threads = trio.CapacityLimiter(limits.threads)
        self._sending = trio.Lock()
        self._requests: dict[int, _Request] = {}
        self._at_rest = 0.0  # since when there is neither a message nor a request, by trio's clock
        self._greeted = False  # and a good client since
        self._name = f"connection {number} ({peer})"

    async def run(self) -> bool:
        """Returns when the client has gone or was sent away; what it had asked for is cancelled then.

        False for a bad one: it did not keep to the protocol, or did not say hello.
        """
        try:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                await self._serve()
        except ProtocolError as violation:
            self._counters.violations += 1
            self._greeted = False
            self._log(logging.INFO, "ended: %s", violation.strerror)
            self._say_goodbye(violation.errno or errno.EPROTO, str(violation.strerror))
        except trio.TooSlowError:
            self._log(logging.INFO, "ended: too slow")
            self._say_goodbye(errno.ETIMEDOUT, "too slow")
        except BaseException:
            # Cancelled comes alone, or as a group from the copies' nursery.
            if trio.current_effective_deadline() == -math.inf:
                self._say_goodbye(errno.ESHUTDOWN, "the mount is ending")
            raise
        finally:
            self._sock.close()
        return self._greeted

    def _log(self, level: int, text: str, *arguments: object) -> None:
        log.log(level, "%s: " + text, self._name, *arguments, extra={"user": self._peer.uid})

    # ---- messages ----

    async def _serve(self) -> None:
        with trio.fail_after(self._limits.hello):
            message, descriptors = await self._receive()
            self._discard(descriptors)
            if message is None:
                return
            if not isinstance(message, Hello):
                raise ProtocolError("the first message is not hello")
            if protocol.VERSION not in message.versions:
                raise ProtocolError(f"only version {protocol.VERSION} is spoken here", errno.EPROTONOSUPPORT)
            self._greeted = True
            self._log(logging.DEBUG, "%r", message.program)
            await self._send(Welcome(protocol.VERSION, f"gpufs {__version__}", self._limits.requests))
        violation = None
        async with trio.open_nursery() as nursery:
            try:
                await self._read(nursery)
            except (ProtocolError, trio.TooSlowError, BrokenPipeError, ConnectionResetError) as error:
                violation = error  # raised outside of the nursery, which would wrap it
            nursery.cancel_scope.cancel()
        if violation is not None:
            raise violation

    async def _read(self, nursery: trio.Nursery) -> None:
        window, count = trio.current_time(), 0
        while True:
            message, descriptors = await self._receive_within_limits()
            if message is None:
                self._discard(descriptors)
                return
            if isinstance(message, Copy):
                await self._accept(message, descriptors, nursery)
            else:
                self._discard(descriptors)
                if isinstance(message, Hello):
                    raise ProtocolError("a second hello")
                if message.id in self._requests:
                    self._requests[message.id].cancel()
            count += 1
            if count >= self._limits.messages_per_second:
                await trio.sleep_until(window + 1)
                window, count = trio.current_time(), 0

    async def _receive_within_limits(self) -> tuple[ClientMessage | None, list[int]]:
        """As _receive(). TooSlowError after too long without a message and without a request under way."""
        self._at_rest = trio.current_time()
        while True:
            since = trio.current_time() if self._requests else self._at_rest
            with trio.move_on_at(since + self._limits.idle):
                return await self._receive()
            if not self._requests and trio.current_time() >= self._at_rest + self._limits.idle:
                raise trio.TooSlowError

    async def _receive(self) -> tuple[ClientMessage | None, list[int]]:
        """The next message with its descriptors, now the caller's; None at the end. No checkpoint after they came."""
        await trio.lowlevel.checkpoint()
        while True:
            try:
                data, descriptors = protocol.receive(self._sock)
                break
            except BlockingIOError:
                await trio.lowlevel.wait_readable(self._sock)
        if not data:
            return None, descriptors
        try:
            return protocol.decode_client(data), descriptors
        except ProtocolError:
            self._discard(descriptors)
            raise

    async def _send(self, message: ServerMessage) -> None:
        async with self._sending:  # one task at a time may wait for a descriptor
            while True:
                try:
                    protocol.send(self._sock, message)
                    return
                except BlockingIOError:
                    await trio.lowlevel.wait_writable(self._sock)

    def _send_if_possible(self, message: ServerMessage) -> None:
        """For what may be left out: a client that does not read gets no progress."""
        try:
            protocol.send(self._sock, message)
        except OSError:
            pass

    def _say_goodbye(self, error: int, text: str) -> None:
        self._send_if_possible(Goodbye(error, protocol.shorten(text)))

    def _discard(self, descriptors: list[int]) -> None:
        """Closes descriptors on a thread of their own: a close asks the file's server, which may be this process."""
        if descriptors:
            threads.in_background(functools.partial(protocol.close_all, descriptors))

    # ---- requests ----

    async def _accept(self, copy: Copy, descriptors: list[int], nursery: trio.Nursery) -> None:
        problem = None
        if len(descriptors) != protocol.MAX_DESCRIPTORS:
            problem = ProtocolError(f"a copy message with {len(descriptors)} descriptors")
        elif copy.id in self._requests:
            problem = ProtocolError("a copy message whose id is under way")
        elif len(self._requests) >= self._limits.requests:
            problem = ProtocolError("too many requests at once")
        if problem is not None:
            self._discard(descriptors)
            raise problem
        request = _Request(copy)
        self._requests[copy.id] = request
        host, mount = map(request.holdings.hold_descriptor, descriptors)
        nursery.start_soon(self._serve_copy, request, host, mount)

    async def _serve_copy(self, request: _Request, host: Descriptor, mount: Descriptor) -> None:
        """One copy from its checks to its result, whatever happens."""
        self._counters.running += 1
        state = State(error=errno.ECANCELED)
        refused = False
        try:
            try:
                with request.scope, trio.fail_after(self._limits.prepare):
                    await self._in_thread(functools.partial(self._prepare, request, host, mount), request)
            except OSError as error:
                refused = True
                state = State(
                    error=error.errno or errno.EIO,
                    device_code=getattr(error, "device_code", 0),
                    message=error.strerror or str(error),
                )
            except trio.TooSlowError:
                refused = True
                state = State(error=errno.ETIMEDOUT, message="the host's file does not answer")
                request.cancel()
            if request.transfer is not None:
                await self._watch(request)
        finally:
            # From here on to the end whatever is cancelled: the files are left consistent and everything is given back.
            request.cancel()
            patience = self._limits.send
            if trio.current_effective_deadline() == -math.inf:  # the mount is ending
                patience = min(patience, self._limits.last_send)
            with trio.CancelScope(shield=True):
                deadline = trio.current_time() + self._limits.grace  # of all of it: each step may find a server hung
                try:
                    if request.transfer is not None:
                        state = await self._finish(request, host, deadline)
                finally:
                    request.end()
                    await self._give_back(request, deadline)
                    self._account(request, state, refused)
                    del self._requests[request.copy.id]
                    self._counters.running -= 1
                    self._at_rest = trio.current_time()
                await self._send_result(request, state, patience)

    def _prepare(self, request: _Request, host: Descriptor, mount: Descriptor) -> None:
        """On a thread: checks the descriptors and starts the transfer. OSError when a rule forbids it."""
        copy = request.copy
        _checks.check_modes(copy.direction, host.fd, mount.fd)
        on_host, on_mount = _checks.identify(host.fd, mount.fd, self._device)
        buffer = request.holdings.hold(self._backend.open_buffer(on_mount.ino))
        # The buffer is held now. The client's own descriptor keeps the inode; ours would keep the mount busy.
        mount.close()
        # The engine shares its threads evenly between clients. When a server dies, every copy from and to it hangs,
        # whoever asked for it: all of them are one client, with one share.
        client = self._client
        if _checks.check_file_system(host.fd):
            client = _SERVER_BIT | on_host.device
        size = None
        found = os.fstat(host.fd)
        if copy.direction == LOAD:
            self._backend.written(on_mount.ino)
            wanted = found.st_size - copy.host_offset
            self._backend.await_space(buffer, wanted if copy.size is None else min(wanted, copy.size))
        else:
            drop_set_id(host.fd)
            size = found.st_size if stat.S_ISREG(found.st_mode) else None
        file = request.holdings.hold(self._backend.open_host(host.fd))
        request.ends = _checks.Ends(on_mount.ino, size)
        request.start(
            lambda: self._backend.start(
                copy.direction,
                file,
                buffer,
                host_offset=copy.host_offset,
                offset=copy.offset,
                size=copy.size,
                fastpath=copy.fastpath,
                sync=copy.sync,
                client=client,
            )
        )

    async def _watch(self, request: _Request) -> None:
        """Waits for the end of the transfer and tells of its progress."""
        transfer, copy = request.transfer, request.copy
        assert transfer is not None
        interval = max(copy.progress, self._limits.progress) if copy.progress else math.inf
        ended = False
        while not ended:
            with trio.move_on_after(interval):
                await trio.lowlevel.wait_readable(transfer.event_fd)
                ended = True
            if copy.progress:
                state = transfer.state()
                self._send_if_possible(protocol.Progress(copy.id, state.total, state.moved, state.paths))

    async def _finish(self, request: _Request, host: Descriptor, deadline: float) -> State:
        """After the transfer, which has ended or was cancelled: the file's length, times and what the kernel knows."""
        transfer, ends, copy = request.transfer, request.ends, request.copy
        assert transfer is not None
        assert ends is not None
        with trio.move_on_at(deadline):
            await trio.lowlevel.wait_readable(transfer.event_fd)
        state = transfer.state()
        if not state.ended:
            return dataclasses.replace(
                state, error=errno.ETIMEDOUT, message="cancelled, but the device does not answer"
            )

        def settle() -> None:
            if copy.direction == LOAD:
                self._backend.written(ends.ino)
                return
            drop_set_id(host.fd)
            if state.error and ends.size is not None:
                wanted = max(ends.size, copy.host_offset + state.done)
                if os.fstat(host.fd).st_size > wanted:
                    os.ftruncate(host.fd, wanted)

        try:
            with trio.fail_at(deadline):
                await self._in_thread(settle, request)
        except OSError as error:
            if not state.error:
                return dataclasses.replace(state, error=error.errno or errno.EIO, message=error.strerror or "")
        except trio.TooSlowError:
            self._log(logging.INFO, "a file does not answer after its copy")
        return state

    async def _give_back(self, request: _Request, deadline: float) -> None:
        """Closes what the request held, and waits for that a little: a client may unmount the file's disk next.

        Less where a thread that was left behind still works with it: its file's server may hang.
        """
        closed = trio.Event()
        token = trio.lowlevel.current_trio_token()

        def tell() -> None:
            with contextlib.suppress(trio.RunFinishedError):
                token.run_sync_soon(closed.set)

        if request.holdings.in_use:
            deadline = min(deadline, trio.current_time() + self._limits.abandoned)
        threads.in_background(functools.partial(request.holdings.drop, tell))
        with trio.move_on_at(deadline):
            await closed.wait()

    async def _send_result(self, request: _Request, state: State, patience: float) -> None:
        text = state.message or (os.strerror(state.error) if state.error else "")
        result = Result(
            request.copy.id,
            state.error,
            state.device_code,
            protocol.shorten(text),
            state.done,
            state.paths,
            state.refusals,
            time.monotonic() - request.began,
        )
        try:
            with trio.move_on_after(patience) as scope:
                await self._send(result)
            sent = not scope.cancelled_caught
        except OSError:
            sent = False  # the client has gone, or the system has no memory for the message
        if not sent:
            # A client would otherwise wait for a result that never comes.
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)

    def _account(self, request: _Request, state: State, refused: bool) -> None:
        copy, counters = request.copy, self._counters
        if refused:
            counters.refused += 1
        elif state.error == errno.ECANCELED:
            counters.cancelled += 1
        elif state.error:
            counters.failed += 1
        else:
            counters.completed += 1
        if copy.direction == LOAD:
            counters.loaded_bytes += state.done
        else:
            counters.stored_bytes += state.done
        counters.path_bytes.update(state.paths)
        counters.refusals.update(state.refusals)
        self._log(
            logging.INFO,
            "%s of %d bytes in %.3f s: %s",
            copy.direction,
            state.done,
            time.monotonic() - request.began,
            f"{errno.errorcode.get(state.error, state.error)} {state.message}" if state.error else "done",
        )

    # ---- threads ----

    async def _in_thread(self, work: Callable[[], T], request: _Request) -> T:
        """Runs work that may block on one of the client's threads, with the request's holdings in use.

        When cancelled the thread is left behind; it gives the holdings back if it was the last to use them.
        """

        def guarded() -> T:
            with request.holdings.use():
                return work()

        try:
            return await threads.run(guarded, abandon_on_cancel=True, limiter=self._threads)
        except Abandoned:
            raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED)) from None
        except MemoryError:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)) from None
