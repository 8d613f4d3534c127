"""The copies of one client, from their checks to their results."""

import errno
import functools
import logging
import math
import os
import stat
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

import trio
from msgspec.structs import replace

from gpufs import protocol
from gpufs.engine import BackingFile, Transfer
from gpufs.protocol import Copy, ProtocolError, Result
from gpufs.service import _checks
from gpufs.service._channel import ClientChannel, path_behind
from gpufs.service._scope import Descriptor, RequestScope
from gpufs.service._served_mount import SPACE_SECONDS, ServedMount
from gpufs.syscalls import FileIdentity, os_error

Permit: TypeAlias = Callable[[], tuple[FileIdentity, FileIdentity]]

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
class _CopyTask:
    copy: Copy
    scope: RequestScope
    preparing: trio.CancelScope = field(default_factory=trio.CancelScope)  # around everything before the transfer
    began: float = field(default_factory=time.monotonic)
    since: float = field(default_factory=time.time)
    paths: tuple[str, str] = ("", "")  # of the host's file and of the file on the mount, as this process sees them
    ino: int = 0  # of the file on the mount, set before the transfer
    host_size: int | None = None  # of the host's file when a store began; None for a device
    # Guards the two below: an abandoned thread must not start a cancelled transfer.
    lock: threading.Lock = field(default_factory=threading.Lock)
    transfer: Transfer | None = None
    cancelled: bool = False

    def start(self, start: Callable[[], Transfer]) -> None:
        """Start the transfer. OSError ECANCELED if the copy has been cancelled."""
        with self.lock:
            if self.cancelled:
                raise os_error(errno.ECANCELED)
            self.transfer = self.scope.hold(start())

    def cancel(self) -> None:
        """Cancel the transfer, or keep it from being started."""
        with self.lock:
            self.cancelled = True
            if self.transfer is not None:
                self.transfer.cancel()
        self.preparing.cancel()

    def progress(self) -> tuple[int, int]:
        """The bytes to move, and those that have been moved."""
        with self.lock:
            if self.transfer is None:
                return 0, 0
            now = self.transfer.progress()
            return now.total, now.moved

    def end(self) -> None:
        """Comes before the transfer is closed: the client may still cancel it until it gets the result."""
        with self.lock:
            self.transfer = None

    def result(self, failure: OSError | None = None, **changes: Any) -> Result:
        """The message about a copy that has moved nothing, or as ``changes`` says."""
        error = failure.errno or errno.EIO if failure else 0
        text = failure.strerror or os.strerror(error) if failure else ""
        code = getattr(failure, "device_code", 0)
        seconds = time.monotonic() - self.began
        result = Result(self.copy.id, error, protocol.shorten(text), device_code=code, seconds=seconds)
        return replace(result, **changes)


def _paths(transfer: Transfer) -> dict[str, int]:
    now = transfer.progress()
    paths = {"fastpath": now.fastpath_bytes, "fallback": now.fallback_bytes, "hole": now.hole_bytes}
    return {path: count for path, count in paths.items() if count}


def _drop_set_id(fd: int) -> None:
    """Clear the set-id bits of the host's file behind a descriptor, as a plain user's write does.

    Set-gid without group execution once meant mandatory locking and stays.
    """
    mode = stat.S_IMODE(os.fstat(fd).st_mode)
    cleared = mode & ~stat.S_ISUID & ~(stat.S_ISGID if mode & stat.S_IXGRP else 0)
    if cleared != mode:
        os.fchmod(fd, cleared)


class ClientCopies:
    def __init__(self, channel: ClientChannel, served: ServedMount) -> None:
        self._channel = channel
        self._served = served
        # The share of the engine's threads that the copy uses. A process in another PID namespace has no number here.
        self._share = channel.peer.pid if channel.peer.pid > 0 else _CONNECTION_BIT | channel.number
        self._tasks: dict[int, _CopyTask] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def as_list(self) -> list[dict[str, Any]]:
        """The copies in progress, for ``.gpufs/activity``."""
        return [self._shown(task) for task in self._tasks.values()]

    def _shown(self, task: _CopyTask) -> dict[str, Any]:
        total, moved = task.progress()
        source, destination = task.paths if task.copy.direction == "load" else reversed(task.paths)
        return {
            "direction": task.copy.direction,
            "source": source,
            "destination": destination,
            "pid": self._channel.peer.pid,
            "uid": self._channel.peer.uid,
            "program": self._channel.peer.program,
            "total": total,
            "moved": moved,
            "since": task.since,
        }

    def cancel(self, number: int) -> None:
        """Cancel a copy, if it has not ended."""
        if number in self._tasks:
            self._tasks[number].cancel()

    def accept(self, copy: Copy, scope: RequestScope, permit: Permit) -> Callable[[], Awaitable[None]]:
        """Return what serves a copy, whose scope it ends. ProtocolError if there cannot be such a copy."""
        if copy.id in self._tasks:
            raise ProtocolError("a copy message whose id is in use")
        if len(self._tasks) >= self._served.limits.requests:
            raise ProtocolError("too many requests at once")
        task = self._tasks[copy.id] = _CopyTask(copy, scope)
        return functools.partial(self._serve_copy, task, permit, *scope.descriptors)

    async def _serve_copy(self, task: _CopyTask, permit: Permit, host: Descriptor, mount: Descriptor) -> None:
        limits, user = self._served.limits, self._channel.user
        result = task.result(os_error(errno.ECANCELED))
        try:
            try:
                with task.preparing, trio.fail_after(limits.prepare):
                    work = functools.partial(self._prepare, task, permit, host, mount)
                    await task.scope.in_thread(work, may_hang=True)
            except OSError as error:
                result = task.result(error)
            except trio.TooSlowError:
                result = task.result(OSError(errno.ETIMEDOUT, "the host's file does not answer"))
                task.cancel()
            if task.transfer is not None:
                await self._watch(task)
        finally:
            # Cancellation does not stop what follows: the files must be consistent and everything be closed.
            task.cancel()
            timeout = limits.send
            if trio.current_effective_deadline() == -math.inf:  # the mount is ending
                timeout = min(timeout, limits.last_send)
            with trio.CancelScope(shield=True):
                deadline = trio.current_time() + limits.grace  # for all steps together: a server may hang in each
                try:
                    if task.transfer is not None:
                        result = await self._finish(task, host, deadline)
                finally:
                    task.end()
                    # Waits a little: the client may unmount the file's disk next. Less if an abandoned thread still
                    # uses it: the file's server may hang.
                    if task.scope.in_use:
                        deadline = min(deadline, trio.current_time() + limits.abandoned)
                    with trio.move_on_at(deadline):
                        await task.scope.closed(functools.partial(user.start, user.closers))
                    del self._tasks[task.copy.id]
                    self._channel.log(
                        logging.INFO,
                        "%s of %d bytes in %.3f s: %s",
                        task.copy.direction,
                        result.done,
                        result.seconds,
                        f"{errno.errorcode.get(result.error, result.error)} {result.message}"
                        if result.error
                        else "done",
                    )
                await self._channel.answer(result, seconds=timeout)

    def _prepare(self, task: _CopyTask, permit: Permit, host: Descriptor, mount: Descriptor) -> None:
        """Checks the descriptors and starts the transfer, on a thread. OSError if a rule forbids it."""
        copy, served = task.copy, self._served
        on_host, on_mount = permit()
        buffer = task.scope.hold(served.open_buffer(on_mount.ino))
        task.paths = (path_behind(host.fd), path_behind(mount.fd))
        # Now the buffer keeps the memory. Our descriptor would only keep the mount busy.
        mount.close()
        # The engine shares its threads evenly between clients. If a server hangs, all copies from and to it hang. So
        # all of them count as one client, with one share.
        client = self._share
        if _checks.check_file_system(host.fd):
            client = _SERVER_BIT | on_host.st_dev
        status = os.fstat(host.fd)
        if copy.direction == "load":
            served.mount.inode_written(on_mount.ino)
            wanted = status.st_size - copy.host_offset
            wanted = max(0, wanted if copy.size is None else min(wanted, copy.size))
            buffer.await_memory(wanted, SPACE_SECONDS)
        else:
            _drop_set_id(host.fd)
            task.host_size = status.st_size if stat.S_ISREG(status.st_mode) else None
        file = task.scope.hold(BackingFile(served.mount.engine, host.fd))
        task.ino = on_mount.ino
        task.start(
            lambda: Transfer(
                copy.direction,
                file,
                buffer,
                file_offset=copy.host_offset,
                buffer_offset=copy.offset,
                size=copy.size,
                fastpath=_FASTPATH[copy.fastpath],
                sync=copy.sync,
                sparse=True,
                client=client,
            )
        )

    async def _watch(self, task: _CopyTask) -> None:
        transfer, copy = task.transfer, task.copy
        assert transfer is not None
        interval = max(copy.progress, self._served.limits.progress) if copy.progress else math.inf
        ended = False
        while not ended:
            with trio.move_on_after(interval):
                await trio.lowlevel.wait_readable(transfer.event_fd)
                ended = True
            if copy.progress:
                self._channel.send_if_possible(protocol.Progress(copy.id, *task.progress(), _paths(transfer)))

    async def _finish(self, task: _CopyTask, host: Descriptor, deadline: float) -> Result:
        """After the transfer has ended or was cancelled: fixes the file's length and times, and the kernel's caches."""
        transfer, copy = task.transfer, task.copy
        assert transfer is not None
        with trio.move_on_at(deadline):
            await trio.lowlevel.wait_readable(transfer.event_fd)
        now = transfer.progress()
        moved = {"done": now.prefix, "paths": _paths(transfer), "refusals": list(now.refusals)}
        if now.state != "done":
            return task.result(OSError(errno.ETIMEDOUT, "cancelled, but the device does not answer"), **moved)
        failure: OSError | None = transfer.failure()

        def settle() -> None:
            if copy.direction == "load":
                self._served.mount.inode_written(task.ino)
                return
            _drop_set_id(host.fd)
            if failure and task.host_size is not None:
                wanted = max(task.host_size, copy.host_offset + now.prefix)
                if os.fstat(host.fd).st_size > wanted:
                    os.ftruncate(host.fd, wanted)

        try:
            with trio.fail_at(deadline):
                await task.scope.in_thread(settle, may_hang=True)
        except OSError as error:
            return task.result(failure or error, **moved)
        except trio.TooSlowError:
            self._channel.log(logging.INFO, "a file does not answer after its copy")
        return task.result(failure, **moved)
