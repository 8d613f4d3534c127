"""One client: its connection, its copies, and how much it may use. Its leases are in _leases.py."""

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import trio

from gpufs import protocol, threads
from gpufs._version import __version__
from gpufs.protocol import (
    LOAD,
    Attach,
    ClientMessage,
    Copy,
    Detach,
    Goodbye,
    Hello,
    ProtocolError,
    Refresh,
    Register,
    Result,
    ServerMessage,
    SetQuota,
    Unregister,
    Welcome,
)
from gpufs.service import _checks
from gpufs.service._holdings import Abandoned, Descriptor, Holdings
from gpufs.service._leases import ClientLeases, Holder, LeaseTable, path_of, program_of
from gpufs.service._limits import Limits
from gpufs.service._mount import MountTransfer, ServedMount, TransferState, drop_set_id
from gpufs.service._register import Registrations, Registry, answer_of

log = logging.getLogger(__name__)

T = TypeVar("T")
# Set in the number of a client that is not a process.
_CONNECTION_BIT: Final = 1 << 63
_SERVER_BIT: Final = 1 << 62
# Seconds between attempts to send descriptors while the kernel takes no more of them from this process.
_IN_FLIGHT_PAUSE: Final = 0.01


@dataclass(slots=True)
class Counters:
    """What the service has done since it started. Names with "bytes" count bytes."""

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
    """The process at the other end. Used for logs and limits; it grants nothing."""

    pid: int
    uid: int
    gid: int

    def __str__(self) -> str:
        return f"process {self.pid} of user {self.uid}"


@dataclass(slots=True)
class _CopyTask:
    """A copy in progress."""

    copy: Copy
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)  # around everything before the transfer
    holdings: Holdings = field(default_factory=Holdings)
    began: float = field(default_factory=time.monotonic)
    since: float = field(default_factory=time.time)
    paths: tuple[str, str] = ("", "")  # of the host's file and of the file on the mount, as this process sees them
    ends: _checks.Ends | None = None  # set before the transfer
    # Guards the two below: an abandoned thread must not start a cancelled transfer.
    lock: threading.Lock = field(default_factory=threading.Lock)
    transfer: MountTransfer | None = None
    cancelled: bool = False

    def start(self, start: Callable[[], MountTransfer]) -> None:
        """Starts the transfer; Abandoned if the copy has been cancelled."""
        with self.lock:
            if self.cancelled:
                raise Abandoned
            self.transfer = self.holdings.hold(start())

    def cancel(self) -> None:
        """Cancels the transfer, or keeps it from being started."""
        with self.lock:
            self.cancelled = True
            if self.transfer is not None:
                self.transfer.cancel()
        self.scope.cancel()

    def progress(self) -> TransferState:
        """How far it is."""
        with self.lock:
            return self.transfer.state() if self.transfer is not None else TransferState(ended=False)

    def end(self) -> None:
        """Comes before the transfer is closed: the client may still cancel it until it gets the result."""
        with self.lock:
            self.transfer = None


class ClientConnection:
    """Serves one connection until it ends. Owns its socket."""

    def __init__(
        self,
        sock: socket.socket,
        peer: Peer,
        number: int,
        mount: ServedMount,
        device: int,
        limits: Limits,
        counters: Counters,
        table: LeaseTable,
        registry: Registry,
    ) -> None:
        """``device``: the st_dev of the mount; ``number``: names the connection in logs."""
        sock.setblocking(False)
        self._registrations = Registrations(registry, peer.pid, peer.uid, program_of(peer.pid))
        self._sock = sock
        self._peer = peer
        # A process in another PID namespace has no number here.
        self._client = peer.pid if peer.pid > 0 else _CONNECTION_BIT | number
        self._mount = mount
        self._device = device
        self._limits = limits
        self._counters = counters
        self._threads = trio.CapacityLimiter(limits.threads)
        self._sending = trio.Lock()
        self._tasks: dict[int, _CopyTask] = {}
        self._at_rest = 0.0  # since when there was neither a message nor a copy, by trio's clock
        self._greeted = False  # and has kept to the protocol since
        self._name = f"connection {number} ({peer})"
        self._holder = Holder(peer.pid, peer.uid, program_of(peer.pid))
        self._leases = ClientLeases(self, self._holder, mount, device, limits, table)

    async def run(self) -> bool:
        """Returns when the connection has ended; the client's copies are cancelled and its leases end then.

        False if the client broke the protocol or did not say hello.
        """
        try:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                await self._serve()
        except ProtocolError as violation:
            self._counters.violations += 1
            self._greeted = False
            self.log(logging.INFO, "ended: %s", violation.strerror)
            self._say_goodbye(violation.errno or errno.EPROTO, str(violation.strerror))
        except trio.TooSlowError:
            self.log(logging.INFO, "ended: too slow")
            self._say_goodbye(errno.ETIMEDOUT, "too slow")
        except BaseException:
            # Cancelled comes alone, or as a group from the copies' nursery.
            if trio.current_effective_deadline() == -math.inf:
                self._say_goodbye(errno.ESHUTDOWN, "the mount is ending")
            raise
        finally:
            self._sock.close()
            await self._end_registrations()
            with trio.CancelScope(shield=True):
                await self._leases.close(self._limits.grace)
        return self._greeted

    def copies(self, uid: int) -> list[dict[str, Any]]:
        """The copies in progress that a user may see, for ``.gpufs/activity``."""
        return [self._shown(task) for task in self._tasks.values()] if self._holder.visible_to(uid) else []

    def _shown(self, task: _CopyTask) -> dict[str, Any]:
        state = task.progress()
        source, destination = task.paths if task.copy.direction == LOAD else reversed(task.paths)
        return {
            "direction": task.copy.direction,
            "source": source,
            "destination": destination,
            "pid": self._peer.pid,
            "uid": self._peer.uid,
            "program": self._holder.program,
            "total": state.total,
            "moved": state.moved,
            "since": task.since,
        }

    def log(self, level: int, text: str, *arguments: object) -> None:
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
            self.log(logging.DEBUG, "%r", message.program)
            await self.send(Welcome(protocol.VERSION, f"gpufs {__version__}", self._limits.requests))
        violation = None
        async with trio.open_nursery() as nursery:
            try:
                await self._read(nursery)
            except (ProtocolError, trio.TooSlowError, BrokenPipeError, ConnectionResetError) as error:
                violation = error  # raised outside the nursery, which would wrap it
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
            elif isinstance(message, Attach | Refresh | Detach):
                try:
                    self._leases.accept(message, descriptors, nursery)
                except ProtocolError:
                    self._discard(descriptors)
                    raise
            elif isinstance(message, Register | Unregister | SetQuota):
                await self._change(message, descriptors)
            else:
                self._discard(descriptors)
                if isinstance(message, Hello):
                    raise ProtocolError("a second hello")
                if message.id in self._tasks:
                    self._tasks[message.id].cancel()
            count += 1
            if count >= self._limits.messages_per_second:
                await trio.sleep_until(window + 1)
                window, count = trio.current_time(), 0

    @property
    def _busy(self) -> bool:
        """Whether the connection has a purpose without any message."""
        return bool(self._tasks or self._leases or self._registrations)

    async def _receive_within_limits(self) -> tuple[ClientMessage | None, list[int]]:
        """As _receive(). TooSlowError after too long without a message, a copy, a lease or a registration."""
        self._at_rest = trio.current_time()
        while True:
            since = trio.current_time() if self._busy else self._at_rest
            with trio.move_on_at(since + self._limits.idle):
                return await self._receive()
            if not self._busy and trio.current_time() >= self._at_rest + self._limits.idle:
                raise trio.TooSlowError

    async def _receive(self) -> tuple[ClientMessage | None, list[int]]:
        """The next message and its descriptors, now the caller's; None at the end. No checkpoint after receiving."""
        await trio.lowlevel.checkpoint()
        while True:
            try:
                data, descriptors = protocol.receive(self._sock, discard=self._discard)
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

    async def send(self, message: ServerMessage, descriptors: Sequence[int] = ()) -> None:
        """Sends a message as soon as the client has taken earlier ones."""
        async with self._sending:  # one task at a time may wait for a descriptor
            while True:
                try:
                    protocol.send(self._sock, message, descriptors)
                    return
                except BlockingIOError:
                    await trio.lowlevel.wait_writable(self._sock)
                except OSError as error:
                    if error.errno != errno.ETOOMANYREFS:  # the client has not received earlier descriptors yet
                        raise
                    await trio.sleep(_IN_FLIGHT_PAUSE)

    def hang_up(self) -> None:
        """Ends the connection, because the client would wait forever for a message that cannot be sent."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def _send_if_possible(self, message: ServerMessage) -> None:
        """For messages that may be dropped: a client that does not read gets no progress."""
        try:
            protocol.send(self._sock, message)
        except OSError:
            pass

    def _say_goodbye(self, error: int, text: str) -> None:
        self._send_if_possible(Goodbye(error, protocol.shorten(text)))

    def _discard(self, descriptors: list[int]) -> None:
        """Closes descriptors on a thread: closing calls the file's server, which may be this process."""
        if descriptors:
            threads.in_background(functools.partial(protocol.close_all, descriptors))

    # ---- registrations and limits ----

    async def _change(self, message: Register | Unregister | SetQuota, descriptors: list[int]) -> None:
        """Serves one message. Registrations end with the connection, also if the answer is not sent."""
        error, text = 0, ""
        try:
            try:
                if isinstance(message, Register):
                    await self._registrations.add(message, descriptors)
                elif isinstance(message, SetQuota):
                    ino = _checks.check_limitable(descriptors, self._peer.uid, self._device)
                    self._mount.set_limit(ino, message.uid, message.limit)
                    self.log(logging.INFO, "%s", message)
                else:
                    await self._registrations.remove(message.id)
            finally:
                self._discard(descriptors)
        except OSError as failure:
            error, text = answer_of(failure)
        answer: protocol.Registered | protocol.Unregistered | protocol.QuotaSet
        if isinstance(message, Register):
            answer = protocol.Registered(message.id, error, text)
        elif isinstance(message, SetQuota):
            answer = protocol.QuotaSet(message.id, error, text)
        else:
            answer = protocol.Unregistered(message.id, error, text)
        self._at_rest = trio.current_time()
        with trio.fail_after(self._limits.send):
            await self.send(answer)

    async def _end_registrations(self) -> None:
        ending = trio.current_effective_deadline() == -math.inf
        await self._registrations.close(self._limits.last_send if ending else self._limits.withdrawal)

    # ---- copies ----

    async def _accept(self, copy: Copy, descriptors: list[int], nursery: trio.Nursery) -> None:
        problem = None
        if len(descriptors) != protocol.MAX_DESCRIPTORS:
            problem = ProtocolError(f"a copy message with {len(descriptors)} descriptors")
        elif copy.id in self._tasks:
            problem = ProtocolError("a copy message whose id is in use")
        elif len(self._tasks) >= self._limits.requests:
            problem = ProtocolError("too many requests at once")
        if problem is not None:
            self._discard(descriptors)
            raise problem
        task = _CopyTask(copy)
        self._tasks[copy.id] = task
        host, mount = map(task.holdings.hold_descriptor, descriptors)
        nursery.start_soon(self._serve_copy, task, host, mount)

    async def _serve_copy(self, task: _CopyTask, host: Descriptor, mount: Descriptor) -> None:
        """Serves one copy from its checks to its result, whatever happens."""
        self._counters.running += 1
        state = TransferState(error=errno.ECANCELED)
        refused = False
        try:
            try:
                with task.scope, trio.fail_after(self._limits.prepare):
                    await self.in_thread(functools.partial(self._prepare, task, host, mount), task.holdings)
            except OSError as error:
                refused = True
                state = TransferState(
                    error=error.errno or errno.EIO,
                    device_code=getattr(error, "device_code", 0),
                    message=error.strerror or str(error),
                )
            except trio.TooSlowError:
                refused = True
                state = TransferState(error=errno.ETIMEDOUT, message="the host's file does not answer")
                task.cancel()
            if task.transfer is not None:
                await self._watch(task)
        finally:
            # Cancellation does not stop what follows: the files must be consistent and everything be closed.
            task.cancel()
            patience = self._limits.send
            if trio.current_effective_deadline() == -math.inf:  # the mount is ending
                patience = min(patience, self._limits.last_send)
            with trio.CancelScope(shield=True):
                deadline = trio.current_time() + self._limits.grace  # for all steps together: a server may hang in each
                try:
                    if task.transfer is not None:
                        state = await self._finish(task, host, deadline)
                finally:
                    task.end()
                    await self._close_holdings(task, deadline)
                    self._account(task, state, refused)
                    del self._tasks[task.copy.id]
                    self._counters.running -= 1
                    self._at_rest = trio.current_time()
                await self._send_result(task, state, patience)

    def _prepare(self, task: _CopyTask, host: Descriptor, mount: Descriptor) -> None:
        """On a thread: checks the descriptors and starts the transfer. OSError if a rule forbids it."""
        copy = task.copy
        _checks.check_modes(copy.direction, host.fd, mount.fd)
        on_host, on_mount = _checks.identify(host.fd, mount.fd, self._device)
        buffer = task.holdings.hold(self._mount.open_buffer(on_mount.ino))
        task.paths = (path_of(host.fd), path_of(mount.fd))
        # Now the buffer keeps the memory. Our descriptor would only keep the mount busy.
        mount.close()
        # The engine shares its threads evenly between clients. If a server hangs, all copies from and to it hang. So
        # all of them count as one client, with one share.
        client = self._client
        if _checks.check_file_system(host.fd):
            client = _SERVER_BIT | on_host.device
        size = None
        found = os.fstat(host.fd)
        if copy.direction == LOAD:
            self._mount.written(on_mount.ino)
            wanted = found.st_size - copy.host_offset
            self._mount.await_space(buffer, wanted if copy.size is None else min(wanted, copy.size))
        else:
            drop_set_id(host.fd)
            size = found.st_size if stat.S_ISREG(found.st_mode) else None
        file = task.holdings.hold(self._mount.open_host(host.fd))
        task.ends = _checks.Ends(on_mount.ino, size)
        task.start(
            lambda: self._mount.start(
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

    async def _watch(self, task: _CopyTask) -> None:
        """Waits for the end of the transfer and reports its progress."""
        transfer, copy = task.transfer, task.copy
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

    async def _finish(self, task: _CopyTask, host: Descriptor, deadline: float) -> TransferState:
        """After the transfer has ended or was cancelled: fixes the file's length and times, and the kernel's caches."""
        transfer, ends, copy = task.transfer, task.ends, task.copy
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
                self._mount.written(ends.ino)
                return
            drop_set_id(host.fd)
            if state.error and ends.size is not None:
                wanted = max(ends.size, copy.host_offset + state.done)
                if os.fstat(host.fd).st_size > wanted:
                    os.ftruncate(host.fd, wanted)

        try:
            with trio.fail_at(deadline):
                await self.in_thread(settle, task.holdings)
        except OSError as error:
            if not state.error:
                return dataclasses.replace(state, error=error.errno or errno.EIO, message=error.strerror or "")
        except trio.TooSlowError:
            self.log(logging.INFO, "a file does not answer after its copy")
        return state

    async def _close_holdings(self, task: _CopyTask, deadline: float) -> None:
        """Closes what the copy held, and waits a little for that: the client may unmount the file's disk next.

        It waits less if an abandoned thread still uses it: the file's server may hang.
        """
        closed = trio.Event()
        token = trio.lowlevel.current_trio_token()

        def report() -> None:
            with contextlib.suppress(trio.RunFinishedError):
                token.run_sync_soon(closed.set)

        if task.holdings.in_use:
            deadline = min(deadline, trio.current_time() + self._limits.abandoned)
        threads.in_background(functools.partial(task.holdings.drop, report))
        with trio.move_on_at(deadline):
            await closed.wait()

    async def _send_result(self, task: _CopyTask, state: TransferState, patience: float) -> None:
        text = state.message or (os.strerror(state.error) if state.error else "")
        result = Result(
            task.copy.id,
            state.error,
            state.device_code,
            protocol.shorten(text),
            state.done,
            state.paths,
            state.refusals,
            time.monotonic() - task.began,
        )
        try:
            with trio.move_on_after(patience) as scope:
                await self.send(result)
            sent = not scope.cancelled_caught
        except OSError:
            sent = False  # the client has gone
        if not sent:
            self.hang_up()

    def _account(self, task: _CopyTask, state: TransferState, refused: bool) -> None:
        copy, counters = task.copy, self._counters
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
        self.log(
            logging.INFO,
            "%s of %d bytes in %.3f s: %s",
            copy.direction,
            state.done,
            time.monotonic() - task.began,
            f"{errno.errorcode.get(state.error, state.error)} {state.message}" if state.error else "done",
        )

    # ---- threads ----

    async def in_thread(self, work: Callable[[], T], holdings: Holdings) -> T:
        """Runs work that may block on one of the client's threads, with these holdings in use.

        Cancellation abandons the thread; it closes the holdings if it was the last to use them.
        """

        def guarded() -> T:
            with holdings.use():
                return work()

        try:
            return await threads.run(guarded, abandon_on_cancel=True, limiter=self._threads)
        except Abandoned:
            raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED)) from None
