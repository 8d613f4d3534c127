"""Transfers between files of the host and device memory."""

import errno
import functools
import math
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from gpufs.engine._arguments import choice, instance, seconds, signed, text, unsigned
from gpufs.engine._arrays import device_range
from gpufs.engine._binding import EngineError, Handle, check
from gpufs.engine._buffer import Buffer
from gpufs.engine._engine import Engine
from gpufs.engine._in_use import Used, close_or_leave
from gpufs.engine._native import ffi, lib

if TYPE_CHECKING:
    from gpufs.engine._buffer import Memory

Switch = Literal["auto", "on", "off", "require"]
Direction = Literal["load", "store"]
Sync = Literal["none", "data", "full"]

_SWITCHES: Final[dict[str, int]] = {
    "auto": lib.GPUFS_AUTO,
    "on": lib.GPUFS_ON,
    "off": lib.GPUFS_OFF,
    "require": lib.GPUFS_REQUIRE,
}
_DIRECTIONS: Final[dict[str, int]] = {"load": lib.GPUFS_LOAD, "store": lib.GPUFS_STORE}
_SYNCS: Final[dict[str, int]] = {
    "none": lib.GPUFS_SYNC_NONE,
    "data": lib.GPUFS_SYNC_DATA,
    "full": lib.GPUFS_SYNC_FULL,
}
_TO_THE_END: Final = (1 << 64) - 1
_PART_SECONDS: Final = 0.05  # of waiting, between which the interpreter can look at signals


def io_configure(
    engine: Engine,
    *,
    chunk_bytes: int = 0,
    pinned_bytes: int = 0,
    workers: int = 0,
    slots: int = 0,
    fastpath: Switch = "auto",
    fallback: Switch = "auto",
    direct: Switch = "auto",
    file_systems: str = "",
) -> None:
    """Sets the options of an engine's transfers, before its first transfer, mount or statistics.

    Parameters
    ----------
    chunk_bytes, pinned_bytes
        Sizes in bytes of a chunk and of all pinned memory; 0 is the default.
    workers, slots
        Threads of a client, and pinned buffers of a thread; 0 is the default.
    fastpath, fallback, direct
        Which ways a copy may take.
    file_systems
        Types of file systems that the fastpath may use in addition to ext4, xfs and block devices, as
        /proc/self/mountinfo names them, separated by commas; "any" allows all.

    Raises
    ------
    EngineError
        EBUSY once the engine has used its transfers, EINVAL for a value that is out of range.
    """
    instance("engine", Engine, engine)
    types = ffi.new("char[]", text("file_systems", file_systems))
    options = {
        "chunk_bytes": unsigned("chunk_bytes", chunk_bytes),
        "pinned_bytes": unsigned("pinned_bytes", pinned_bytes),
        "workers": signed("workers", workers),
        "slots": signed("slots", slots),
        "fastpath": choice("fastpath", _SWITCHES, fastpath),
        "fallback": choice("fallback", _SWITCHES, fallback),
        "direct": choice("direct", _SWITCHES, direct),
        "file_systems": types,
    }
    check(lib.gpufs_io_configure(engine._handle, ffi.new("gpufs_io_options *", options)))


def fastpath_probe(driver: str) -> list[str]:
    """The reasons why a driver ("host", "cuda", "hip") has no fastpath for any file; empty if it has one.

    Loads the vendor's libraries if they are installed.
    """
    refusals = ffi.new("uint32_t *")
    check(lib.gpufs_fastpath_probe(ffi.new("char[]", text("driver", driver)), refusals))
    return refusal_names(int(refusals[0]))


def refusal_names(mask: int) -> list[str]:
    """The names of the bits of a refusal mask: why the fastpath did not take a request."""
    mask = unsigned("mask", mask)
    bits = [bit for bit in range(mask.bit_length()) if mask >> bit & 1]
    return [ffi.string(lib.gpufs_refusal_name(bit)).decode() or f"bit {bit}" for bit in bits]


@dataclass(frozen=True, slots=True)
class BackingInfo:
    """What the engine knows about a file of the host."""

    file_system: str  # "ext4"; "" if its mount is not visible to this process
    block_device: bool
    readable: bool
    writable: bool
    direct: bool  # it could also be opened with O_DIRECT
    offset_align: int  # of O_DIRECT, bytes
    memory_align: int
    fastpath_refusals: tuple[str, ...]  # why the fastpath does not take the file


class TransferError(EngineError):
    """A transfer failed. ``transferred``: the bytes that are in place, from its start without a gap."""

    def __init__(self, error: int, message: str, device_code: int = 0, transferred: int = 0) -> None:
        super().__init__(error, message, device_code)
        self.transferred = transferred

    def __reduce__(self) -> tuple[type["TransferError"], tuple[Any, ...]]:
        return type(self), (self.errno or 0, str(self.strerror), self.device_code, self.transferred)


@dataclass(frozen=True, slots=True)
class TransferProgress:
    """How far a transfer is, in bytes."""

    state: Literal["queued", "running", "done"]
    error: int  # once done: 0 or an errno, also after progress
    device_code: int
    sync_failed: bool  # the error is that of the sync: nothing is known to be durable
    total: int  # bytes to move, as far as is known
    moved: int  # anywhere in the range
    prefix: int  # from the start without a gap; once done, what counts
    fastpath_bytes: int
    fallback_bytes: int
    hole_bytes: int  # holes that stayed holes, moved by neither path
    refusals: tuple[str, ...]  # why the fastpath did not take all of it


_STATES: Final[dict[int, Literal["queued", "running", "done"]]] = {
    lib.GPUFS_TRANSFER_QUEUED: "queued",
    lib.GPUFS_TRANSFER_RUNNING: "running",
    lib.GPUFS_TRANSFER_DONE: "done",
}


class HostFile(Handle):
    """A file of the host that is open for transfers, without its reads and writes: see BackingFile."""

    __slots__ = ("engine",)

    def __init__(self, engine: Engine, fd: int) -> None:
        handle = ffi.new("gpufs_handle *")
        instance("engine", Engine, engine)
        check(lib.gpufs_backing_open(engine._handle, signed("fd", fd), handle))
        self.engine = engine
        self._own(handle[0], lib.gpufs_backing_close)

    @classmethod
    def open(
        cls,
        engine: Engine,
        path: str | bytes | os.PathLike[str] | os.PathLike[bytes],
        mode: Literal["r", "r+", "w"] = "r",
    ) -> Self:
        """Opens a file by its path: "r" for reading, "r+" for both, "w" for both, created or emptied.

        Raises OSError like os.open(), and EngineError like the constructor.
        """
        modes = {"r": os.O_RDONLY, "r+": os.O_RDWR, "w": os.O_RDWR | os.O_CREAT | os.O_TRUNC}
        flags = choice("mode", modes, mode)
        fd = os.open(path, flags | os.O_CLOEXEC, 0o666)
        try:
            return cls(engine, fd)
        finally:
            os.close(fd)

    @property
    def info(self) -> BackingInfo:
        """What is known about the file."""
        info = ffi.new("gpufs_backing_info *")
        check(lib.gpufs_backing_info_get(self._handle, info))
        return BackingInfo(
            file_system=ffi.string(info.file_system).decode(errors="replace"),
            block_device=bool(info.block_device),
            readable=bool(info.readable),
            writable=bool(info.writable),
            direct=bool(info.direct),
            offset_align=info.offset_align,
            memory_align=info.memory_align,
            fastpath_refusals=tuple(refusal_names(info.fastpath_refusals)),
        )


def check_words(direction: str, fastpath: str, fallback: str, sync: str) -> None:
    """ValueError for an argument that is not one of its words."""
    choice("direction", _DIRECTIONS, direction)
    choice("fastpath", _SWITCHES, fastpath)
    choice("fallback", _SWITCHES, fallback)
    choice("sync", _SYNCS, sync)


def fill_request(
    request: Any,
    direction: Direction,
    backing: HostFile,
    memory: "Memory",
    *,
    file_offset: int,
    buffer_offset: int,
    size: int | None,
    fastpath: Switch,
    fallback: Switch,
    sync: Sync,
    sparse: bool,
    share: int,
    client: int,
) -> object:
    """Fills in the C interface's request. Returns what must be kept alive while the transfer runs."""
    if not isinstance(backing, HostFile):
        raise TypeError(f"backing: {type(backing).__name__} is not BackingFile")
    request.backing = backing._handle
    keep: object = None
    if isinstance(memory, Buffer):
        request.buffer = memory._handle
    else:
        found, keep = device_range(backing.engine, memory, writable=direction == "load")
        request.device = signed("device", found.device)
        request.address = unsigned("address", found.address)
        request.address_bytes = unsigned("bytes", found.bytes)
    request.file_offset = unsigned("file_offset", file_offset)
    request.buffer_offset = unsigned("buffer_offset", buffer_offset)
    request.bytes = _TO_THE_END if size is None else unsigned("size", size)
    request.direction = choice("direction", _DIRECTIONS, direction)
    request.sync = choice("sync", _SYNCS, sync)
    request.sparse = bool(sparse)
    request.fastpath = choice("fastpath", _SWITCHES, fastpath)
    request.fallback = choice("fallback", _SWITCHES, fallback)
    request.share = signed("share", share)
    request.client = unsigned("client", client)
    return keep


class Transfer(Handle):
    """A copy between a file and device memory, queued by the constructor. It keeps both alive.

    Device memory that is not a buffer must stay valid, and no queued work of the program may use it, until the transfer
    is done; arrays are kept alive. The outcome is in progress() and result().

    Closing cancels a running transfer and waits for its end. It raises EngineError ETIMEDOUT if it has not ended
    within 10 s: then the transfer and its memory are freed when it ends.

    Parameters
    ----------
    size
        In bytes; None: up to the end of the source.
    fastpath, fallback
        "auto" is what the engine was configured with.
    sync
        What a store makes durable before it is done.
    sparse
        Holes of the source become holes of the destination if it can have them, otherwise zeros that take memory.
    share
        Threads at most; 0: the client's share.
    client
        Whose transfer it is: clients share the threads evenly.

    Raises
    ------
    EngineError
        It cannot be queued.
    TypeError, ValueError
        The memory cannot be used.
    """

    __slots__ = ("_keep", "backing", "memory")

    def __init__(
        self,
        direction: Direction,
        backing: HostFile,
        memory: "Memory",
        *,
        file_offset: int = 0,
        buffer_offset: int = 0,
        size: int | None = None,
        fastpath: Switch = "auto",
        fallback: Switch = "auto",
        sync: Sync = "none",
        sparse: bool = False,
        share: int = 0,
        client: int = 0,
    ) -> None:
        request = ffi.new("gpufs_transfer_request *")
        self._keep = fill_request(
            request,
            direction,
            backing,
            memory,
            file_offset=file_offset,
            buffer_offset=buffer_offset,
            size=size,
            fastpath=fastpath,
            fallback=fallback,
            sync=sync,
            sparse=sparse,
            share=share,
            client=client,
        )
        handle = ffi.new("gpufs_handle *")
        check(lib.gpufs_transfer_start(backing.engine._handle, request, handle))
        self.backing = backing
        self.memory = memory
        used = Used(backing, memory, self._keep)
        backing.engine._users.add(used)
        close, event_fd = lib.gpufs_transfer_close, lib.gpufs_transfer_event_fd
        self._own(handle[0], functools.partial(close_or_leave, close, event_fd, lambda _: True, used))

    @property
    def event_fd(self) -> int:
        """A descriptor that is readable once the transfer is done; valid until the transfer is closed."""
        fd = ffi.new("int *")
        check(lib.gpufs_transfer_event_fd(self._handle, fd))
        return int(fd[0])

    def progress(self) -> TransferProgress:
        """The transfer's progress."""
        p = ffi.new("gpufs_transfer_progress *")
        check(lib.gpufs_transfer_progress_get(self._handle, p))
        return TransferProgress(
            state=_STATES[p.state],
            error=p.error,
            device_code=p.device_code,
            sync_failed=bool(p.sync_failed),
            total=p.total,
            moved=p.moved,
            prefix=p.prefix,
            fastpath_bytes=p.fastpath_bytes,
            fallback_bytes=p.fallback_bytes,
            hole_bytes=p.hole_bytes,
            refusals=tuple(refusal_names(p.refusals)),
        )

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until it is done, up to ``timeout`` seconds (None: without limit). Returns whether it is done."""
        done = ffi.new("int32_t *")
        left = seconds("timeout", timeout)
        deadline = time.monotonic() + left
        while True:
            check(lib.gpufs_transfer_wait(self._handle, math.ceil(min(left, _PART_SECONDS) * 1000), done))
            left = deadline - time.monotonic()
            if done[0] or left <= 0:
                return bool(done[0])

    def result(self) -> None:
        """Raises the failure of the transfer, if it failed. EngineError EINPROGRESS while it runs."""
        check(lib.gpufs_transfer_result(self._handle))

    def failure(self) -> EngineError | None:
        """The failure that result() would raise."""
        try:
            self.result()
        except EngineError as error:
            return error
        return None

    def cancel(self) -> None:
        """Stops it at its next chunk; never blocks."""
        check(lib.gpufs_transfer_cancel(self._handle))

    def finish(self) -> int:
        """Waits until it is done and returns the bytes moved. Raises TransferError if it failed, also after progress.

        An exception that arrives during the wait (KeyboardInterrupt) cancels the transfer, and is raised once it ended.
        """
        try:
            self.wait()
        except BaseException:
            self.cancel()
            self.wait()
            raise
        return self.outcome()

    def outcome(self) -> int:
        """The bytes moved by a finished transfer. TransferError if it failed, EngineError EINPROGRESS while it runs."""
        failure = self.failure()
        if failure is None:
            return self.progress().prefix
        if failure.errno == errno.EINPROGRESS:
            raise failure
        raise TransferError(
            failure.errno or errno.EIO, str(failure.strerror), failure.device_code, self.progress().prefix
        )
