"""The copies of one client, from their checks to their results."""

import contextlib
import dataclasses
import errno
import functools
import logging
import math
import os
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Literal, cast

import trio

from gpufs import protocol, threads
from gpufs.engine import Transfer
from gpufs.protocol import LOAD, Copy, ProtocolError, Result
from gpufs.service import _checks
from gpufs.service._holdings import Abandoned, Descriptor, Holdings
from gpufs.service._limits import Limits
from gpufs.service._mount import ServedMount, drop_set_id
from gpufs.service._peer import Client, Peer, path_of

# Set in the number of a client that is not a process.
_CONNECTION_BIT: Final = 1 << 63
_SERVER_BIT: Final = 1 << 62
# The engine's words for the client's. The engine's "auto" means what the mount is configured for.
_FASTPATH: Final[dict[str | None, Literal["auto", "on", "off", "require"]]] = {
    None: "auto",
    "auto": "on",
    "off": "off",
    "require": "require",
}


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
class _State:
    """How far a copy is, in bytes. ``done``: from the start without a gap; ``error``: errno, once it has ended."""

    total: int = 0
    moved: int = 0
    done: int = 0
    paths: dict[str, int] = field(default_factory=dict)
    refusals: tuple[str, ...] = ()
    error: int = 0
    device_code: int = 0
    message: str = ""
    ended: bool = True

    @classmethod
    def of(cls, transfer: Transfer) -> "_State":
        now = transfer.progress()
        failure = transfer.failure() if now.error else None
        paths = {"fastpath": now.fastpath_bytes, "fallback": now.fallback_bytes, "hole": now.hole_bytes}
        return cls(
            now.total,
            now.moved,
            now.prefix,
            {path: count for path, count in paths.items() if count},
            now.refusals,
            now.error,
            now.device_code,
            str(failure.strerror) if failure else "",
            now.state == "done",
        )


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
    transfer: Transfer | None = None
    cancelled: bool = False

    def start(self, start: Callable[[], Transfer]) -> None:
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

    def progress(self) -> _State:
        """How far it is."""
        with self.lock:
            return _State(ended=False) if self.transfer is None else _State.of(self.transfer)

    def end(self) -> None:
        """Comes before the transfer is closed: the client may still cancel it until it gets the result."""
        with self.lock:
            self.transfer = None


class ClientCopies:
    """Serves the copies of one connection."""

    def __init__(
        self,
        client: Client,
        peer: Peer,
        number: int,
        program: str,
        mount: ServedMount,
        device: int,
        limits: Limits,
        counters: Counters,
        ended: Callable[[], None],
    ) -> None:
        """``number``: of the connection; ``device``: the st_dev of the mount; ``ended``: called after each copy."""
        self._client = client
        self._peer = peer
        self._program = program
        # Whose share of the engine's threads it uses. A process in another PID namespace has no number here.
        self._share = peer.pid if peer.pid > 0 else _CONNECTION_BIT | number
        self._mount = mount
        self._device = device
        self._limits = limits
        self._counters = counters
        self._ended = ended
        self._tasks: dict[int, _CopyTask] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def as_list(self) -> list[dict[str, Any]]:
        """The copies in progress, for ``.gpufs/activity``."""
        return [self._shown(task) for task in self._tasks.values()]

    def _shown(self, task: _CopyTask) -> dict[str, Any]:
        state = task.progress()
        source, destination = task.paths if task.copy.direction == LOAD else reversed(task.paths)
        return {
            "direction": task.copy.direction,
            "source": source,
            "destination": destination,
            "pid": self._peer.pid,
            "uid": self._peer.uid,
            "program": self._program,
            "total": state.total,
            "moved": state.moved,
            "since": task.since,
        }

    def cancel(self, number: int) -> None:
        """Cancels a copy, if it has not ended."""
        if number in self._tasks:
            self._tasks[number].cancel()

    def accept(self, copy: Copy, descriptors: list[int], nursery: trio.Nursery) -> None:
        """Begins a copy, and takes its descriptors over. ProtocolError if there cannot be such a copy.

        The descriptors stay the caller's after a ProtocolError.
        """
        if len(descriptors) != protocol.MAX_DESCRIPTORS:
            raise ProtocolError(f"a copy message with {len(descriptors)} descriptors")
        if copy.id in self._tasks:
            raise ProtocolError("a copy message whose id is in use")
        if len(self._tasks) >= self._limits.requests:
            raise ProtocolError("too many requests at once")
        task = _CopyTask(copy)
        self._tasks[copy.id] = task
        host, mount = map(task.holdings.hold_descriptor, descriptors)
        nursery.start_soon(self._serve_copy, task, host, mount)

    async def _serve_copy(self, task: _CopyTask, host: Descriptor, mount: Descriptor) -> None:
        """Serves one copy from its checks to its result, whatever happens."""
        self._counters.running += 1
        state = _State(error=errno.ECANCELED)
        refused = False
        try:
            try:
                with task.scope, trio.fail_after(self._limits.prepare):
                    await self._client.in_thread(functools.partial(self._prepare, task, host, mount), task.holdings)
            except OSError as error:
                refused = True
                state = _State(
                    error=error.errno or errno.EIO,
                    device_code=getattr(error, "device_code", 0),
                    message=error.strerror or str(error),
                )
            except trio.TooSlowError:
                refused = True
                state = _State(error=errno.ETIMEDOUT, message="the host's file does not answer")
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
                    self._ended()
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
        client = self._share
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
            lambda: Transfer(
                cast(Any, copy.direction),
                file,
                buffer,
                file_offset=copy.host_offset,
                buffer_offset=copy.offset,
                size=copy.size,
                fastpath=_FASTPATH[copy.fastpath],
                sync=cast(Any, copy.sync),
                sparse=True,
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
                state = _State.of(transfer)
                self._client.send_if_possible(protocol.Progress(copy.id, state.total, state.moved, state.paths))

    async def _finish(self, task: _CopyTask, host: Descriptor, deadline: float) -> _State:
        """After the transfer has ended or was cancelled: fixes the file's length and times, and the kernel's caches."""
        transfer, ends, copy = task.transfer, task.ends, task.copy
        assert transfer is not None
        assert ends is not None
        with trio.move_on_at(deadline):
            await trio.lowlevel.wait_readable(transfer.event_fd)
        state = _State.of(transfer)
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
                await self._client.in_thread(settle, task.holdings)
        except OSError as error:
            if not state.error:
                return dataclasses.replace(state, error=error.errno or errno.EIO, message=error.strerror or "")
        except trio.TooSlowError:
            self._client.log(logging.INFO, "a file does not answer after its copy")
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

    async def _send_result(self, task: _CopyTask, state: _State, patience: float) -> None:
        text = state.message or (os.strerror(state.error) if state.error else "")
        result = Result(
            task.copy.id,
            state.error,
            state.device_code,
            protocol.shorten(text),
            state.done,
            state.paths,
            list(state.refusals),
            time.monotonic() - task.began,
        )
        try:
            with trio.move_on_after(patience) as scope:
                await self._client.send(result)
            sent = not scope.cancelled_caught
        except OSError:
            sent = False  # the client has gone
        if not sent:
            self._client.hang_up()

    def _account(self, task: _CopyTask, state: _State, refused: bool) -> None:
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
        self._client.log(
            logging.INFO,
            "%s of %d bytes in %.3f s: %s",
            copy.direction,
            state.done,
            time.monotonic() - task.began,
            f"{errno.errorcode.get(state.error, state.error)} {state.message}" if state.error else "done",
        )
