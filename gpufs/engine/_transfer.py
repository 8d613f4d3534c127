"""Files of the host, and transfers between them and device memory."""

import functools
import math
import os
import time
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from gpufs.engine._arguments import choice, instance, seconds, signed, unsigned
from gpufs.engine._arrays import device_range
from gpufs.engine._binding import EngineError, Handle, check
from gpufs.engine._buffer import Buffer
from gpufs.engine._engine import SWITCHES, Engine, Switch, refusal_names
from gpufs.engine._in_use import InUse, close_or_leave
from gpufs.engine._native import ffi, lib

if TYPE_CHECKING:
    from gpufs.engine._buffer import Memory
    from gpufs.engine._futures import OperationFuture
    from gpufs.engine._streams import Number, Stream, StreamLike

Direction = Literal["load", "store"]
Sync = Literal["none", "data", "full"]

_DIRECTIONS: Final[dict[str, int]] = {"load": lib.GPUFS_LOAD, "store": lib.GPUFS_STORE}
_SYNCS: Final[dict[str, int]] = {
    "none": lib.GPUFS_SYNC_NONE,
    "data": lib.GPUFS_SYNC_DATA,
    "full": lib.GPUFS_SYNC_FULL,
}
_STATES: Final[tuple[Literal["queued", "running", "done"], ...]] = ("queued", "running", "done")  # as GPUFS_TRANSFER_
_TO_THE_END: Final = (1 << 64) - 1
_PART_SECONDS: Final = 0.05  # of waiting, between which the interpreter can handle signals


class TransferError(EngineError):
    """A transfer failed.

    Attributes
    ----------
    transferred
        The bytes that are in place, from its start without a gap.
    """

    def __init__(self, error: int, message: str, device_code: int = 0, transferred: int = 0) -> None:
        super().__init__(error, message, device_code)
        self.transferred = transferred

    def __reduce__(self) -> tuple[type["TransferError"], tuple[Any, ...]]:
        return type(self), (self.errno or 0, str(self.strerror), self.device_code, self.transferred)


@dataclass(frozen=True, slots=True)
class TransferProgress:
    """How far a transfer is, in bytes.

    Attributes
    ----------
    state
        "queued", "running" or "done".
    error, device_code
        Once done: 0 or an errno, also after progress, and the vendor's own code.
    sync_failed
        Whether the error is that of the sync: nothing is known to be durable then.
    total
        Bytes to move, as far as is known.
    moved
        Bytes moved anywhere in the range.
    prefix
        Bytes moved from the start without a gap; once done, what counts.
    fastpath_bytes, fallback_bytes
        Bytes by path.
    hole_bytes
        Bytes of holes that stayed holes, which neither path moved.
    refusals
        Why the fastpath did not take all of it.
    """

    state: Literal["queued", "running", "done"]
    error: int
    device_code: int
    sync_failed: bool
    total: int
    moved: int
    prefix: int
    fastpath_bytes: int
    fallback_bytes: int
    hole_bytes: int
    refusals: tuple[str, ...]


def error_of(ended: Any) -> TransferError | None:
    """Return the failure of what has ended, from the C interface's progress."""
    if not ended.error:
        return None
    text = ffi.string(ended.message).decode(errors="replace")
    return TransferError(ended.error, text, ended.device_code, ended.prefix)


@dataclass(slots=True)
class Request:
    """What is to be moved, and how."""

    direction: Direction
    file: "BackingFile"
    memory: "Memory"
    size: "Number | None" = None
    file_offset: "Number" = 0
    buffer_offset: "Number" = 0
    _: KW_ONLY
    fastpath: Switch = "auto"
    fallback: Switch = "auto"
    sync: Sync = "none"
    sparse: bool = False
    share: int = 0
    client: int = 0

    def __post_init__(self) -> None:
        choice("direction", _DIRECTIONS, self.direction)
        choice("fastpath", SWITCHES, self.fastpath)
        choice("fallback", SWITCHES, self.fallback)
        choice("sync", _SYNCS, self.sync)

    def _fill_transfer(self, request: Any, size: Any, file_offset: Any, buffer_offset: Any) -> object:
        """Fill in the C interface's request. Returns what must live until the work is over."""
        instance("file", BackingFile, self.file)
        keep: object = None
        request.backing = self.file._handle
        if isinstance(self.memory, Buffer):
            request.buffer = self.memory._handle
        else:
            found, keep = device_range(self.file.engine, self.memory, writable=self.direction == "load")
            request.device = signed("device", found.device)
            request.address = unsigned("address", found.address)
            request.address_bytes = unsigned("bytes", found.bytes)
        request.file_offset = unsigned("file_offset", file_offset)
        request.buffer_offset = unsigned("buffer_offset", buffer_offset)
        request.bytes = _TO_THE_END if size is None else unsigned("size", size)
        request.direction = _DIRECTIONS[self.direction]
        request.sync = _SYNCS[self.sync]
        request.sparse = bool(self.sparse)
        request.fastpath = SWITCHES[self.fastpath]
        request.fallback = SWITCHES[self.fallback]
        request.share = signed("share", self.share)
        request.client = unsigned("client", self.client)
        return self.file, self.memory, keep


@dataclass(frozen=True, slots=True)
class BackingInfo:
    """What the engine knows about a file of the host.

    Attributes
    ----------
    file_system
        Its type, for example "ext4"; "" if its mount is not visible to this process.
    block_device, readable, writable
        What it is, and what its descriptor allows.
    direct
        Whether it could also be opened with O_DIRECT.
    offset_align, memory_align
        What O_DIRECT asks of offsets and of memory, in bytes.
    fastpath_refusals
        Why the fastpath does not take the file.
    """

    file_system: str
    block_device: bool
    readable: bool
    writable: bool
    direct: bool
    offset_align: int
    memory_align: int
    fastpath_refusals: tuple[str, ...]


class BackingFile(Handle):
    """A regular file or block device of the host, for transfers. It keeps its engine alive.

    The engine opens descriptors of its own with the access mode of ``fd``, never a wider one. This may block for as
    long as the file's server does.

    Parameters
    ----------
    engine
        The engine of the transfers.
    fd
        A descriptor of the file, which stays the caller's.

    Raises
    ------
    EngineError
        EBADF for an O_PATH descriptor, EISDIR or EINVAL for another kind of file, EDEADLK for a file on a mount of
        gpufs.
    """

    __slots__ = ("engine",)

    def __init__(self, engine: Engine, fd: int) -> None:
        handle = ffi.new("gpufs_handle *")
        instance("engine", Engine, engine)
        check(lib.gpufs_backing_open(engine._handle, signed("fd", fd), handle))
        self.engine = engine
        self._own(handle[0])

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
            ffi.string(info.file_system).decode(errors="replace"),
            bool(info.block_device),
            bool(info.readable),
            bool(info.writable),
            bool(info.direct),
            info.offset_align,
            info.memory_align,
            tuple(refusal_names(info.fastpath_refusals)),
        )

    def read(
        self, memory: "Memory", size: int | None = None, file_offset: int = 0, buffer_offset: int = 0, **options: Any
    ) -> int:
        """Reads from the file into device memory and waits for the end.

        An exception that arrives during the wait (KeyboardInterrupt) cancels the read.

        Parameters
        ----------
        memory
            A buffer, or device memory of the program: a :class:`DeviceRange` or an array.
        size
            In bytes; None: as much as there is and fits.
        file_offset, buffer_offset
            In bytes.
        options
            Those of :class:`Transfer`.

        Returns
        -------
        int
            The bytes read: fewer than ``size`` at the end of the file.

        Raises
        ------
        TransferError
            The read failed, also after progress.
        EngineError, TypeError, ValueError
            The read could not be queued.
        """
        with Transfer("load", self, memory, size, file_offset, buffer_offset, **options) as transfer:
            return transfer.finish()

    def write(
        self, memory: "Memory", size: int | None = None, file_offset: int = 0, buffer_offset: int = 0, **options: Any
    ) -> int:
        """Writes device memory to the file and waits; returns the bytes written. Otherwise like :meth:`read`.

        The bytes are durable only with ``sync="data"`` or ``sync="full"``.
        """
        with Transfer("store", self, memory, size, file_offset, buffer_offset, **options) as transfer:
            return transfer.finish()

    def read_async(
        self,
        memory: "Memory",
        size: "Number | None" = None,
        file_offset: "Number" = 0,
        buffer_offset: "Number" = 0,
        *,
        stream: "Stream | StreamLike | None" = None,
        **options: Any,
    ) -> "OperationFuture":
        """Queues a read on a stream: it starts when the stream reaches it, and the stream waits for its end.

        Numbers may be late, ``options`` are those of :class:`Operation`. Without a stream the read starts at once.

        Raises
        ------
        EngineError
            EAGAIN if too many operations are under way, EINVAL if memory and stream are on different devices, EBUSY for
            a stream that is being captured into a graph.
        TypeError, ValueError
            An argument cannot be used.
        """
        return self._start("load", memory, size, file_offset, buffer_offset, stream=stream, **options)

    def write_async(
        self,
        memory: "Memory",
        size: "Number | None" = None,
        file_offset: "Number" = 0,
        buffer_offset: "Number" = 0,
        *,
        stream: "Stream | StreamLike | None" = None,
        **options: Any,
    ) -> "OperationFuture":
        """Queues a write of device memory to the file on a stream. Otherwise like :meth:`read_async`."""
        return self._start("store", memory, size, file_offset, buffer_offset, stream=stream, **options)

    def _start(self, direction: Direction, *what: Any, **options: Any) -> "OperationFuture":
        from gpufs.engine._futures import start  # which rests on this module
        from gpufs.engine._operations import Operation

        return start(Operation(direction, self, *what, **options))


class Transfer(Handle):
    """A copy between a file and device memory, queued by the constructor. It keeps both alive.

    Device memory that is not a buffer must stay valid, and no queued work of the program may use it, until the transfer
    is done; arrays are kept alive.

    Closing cancels a running transfer and waits for its end. It raises EngineError ETIMEDOUT if it has not ended
    within 10 s: then the transfer and its memory are freed when it ends.

    Parameters
    ----------
    direction
        "load": from the file to the device. "store": from the device to the file.
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

    __slots__ = ()

    def __init__(
        self,
        direction: Direction,
        file: BackingFile,
        memory: "Memory",
        size: int | None = None,
        file_offset: int = 0,
        buffer_offset: int = 0,
        **options: Any,
    ) -> None:
        wanted = Request(direction, file, memory, size, file_offset, buffer_offset, **options)
        request = ffi.new("gpufs_transfer_request *")
        used = InUse(wanted._fill_transfer(request, size, file_offset, buffer_offset))
        handle = ffi.new("gpufs_handle *")
        check(lib.gpufs_transfer_start(file.engine._handle, request, handle))
        file.engine._users.add(used)
        self._own(handle[0], functools.partial(close_or_leave, _over_within_a_second, used))

    @property
    def event_fd(self) -> int:
        """A descriptor that is readable once the transfer is done; valid until the transfer is closed."""
        fd = ffi.new("int *")
        check(lib.gpufs_transfer_event_fd(self._handle, fd))
        return int(fd[0])

    def _now(self) -> Any:
        now = ffi.new("gpufs_transfer_progress *")
        check(lib.gpufs_transfer_progress_get(self._handle, now))
        return now

    def progress(self) -> TransferProgress:
        """The transfer's progress."""
        now = self._now()
        return TransferProgress(
            state=_STATES[now.state],
            error=now.error,
            device_code=now.device_code,
            sync_failed=bool(now.sync_failed),
            total=now.total,
            moved=now.moved,
            prefix=now.prefix,
            fastpath_bytes=now.fastpath_bytes,
            fallback_bytes=now.fallback_bytes,
            hole_bytes=now.hole_bytes,
            refusals=tuple(refusal_names(now.refusals)),
        )

    def failure(self) -> TransferError | None:
        """What went wrong, once it is done."""
        return error_of(self._now())

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
        ended = self._now()
        error = error_of(ended)
        if error is not None:
            raise error
        return int(ended.prefix)


def _over_within_a_second(handle: int) -> bool:
    done = ffi.new("int32_t *")
    return bool(lib.gpufs_transfer_wait(handle, 1000, done).error or done[0])
