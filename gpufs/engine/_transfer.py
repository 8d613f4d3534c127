"""Transfers between files of the host and device memory."""

import functools
import math
import time
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from gpufs.engine._arguments import choice, instance, seconds, signed, unsigned
from gpufs.engine._arrays import device_range
from gpufs.engine._binding import HANDLE, SMALL_NUMBER, EngineError, Handle, check, result_of
from gpufs.engine._buffer import Buffer
from gpufs.engine._engine import SWITCHES, Engine, Switch, refusal_names
from gpufs.engine._in_use import InUse, close_or_defer
from gpufs.engine._native import ffi, lib

if TYPE_CHECKING:
    from gpufs.engine._buffer import Memory
    from gpufs.engine._streams import Number

Direction = Literal["load", "store"]
Sync = Literal["none", "data", "full"]

_DIRECTIONS: Final[dict[str, int]] = {"load": lib.GPUFS_LOAD, "store": lib.GPUFS_STORE}
_SYNCS: Final[dict[str, int]] = {
    "none": lib.GPUFS_SYNC_NONE,
    "data": lib.GPUFS_SYNC_DATA,
    "full": lib.GPUFS_SYNC_FULL,
}
_STATES: Final[tuple[Literal["queued", "running", "done"], ...]] = ("queued", "running", "done")  # as GPUFS_TRANSFER_
_PROGRESS: Final = ffi.typeof("gpufs_transfer_progress *")
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


class HostFile(Handle):
    """A file of the host, as transfers need it; a :class:`BackingFile` is one."""

    __slots__ = ("engine",)

    engine: Engine


@dataclass(slots=True)
class TransferRequest:
    """The bytes to move, and how to move them."""

    direction: Direction
    file: "HostFile"
    memory: "Memory"
    size: "Number | None" = None
    file_offset: "Number" = 0
    buffer_offset: "Number" = 0
    _: KW_ONLY
    fastpath: Switch = "auto"
    sync: Sync = "none"
    sparse: bool = False
    share: int = 0
    client: int = 0

    def __post_init__(self) -> None:
        choice("direction", _DIRECTIONS, self.direction)
        choice("fastpath", SWITCHES, self.fastpath)
        choice("sync", _SYNCS, self.sync)

    def _fill_transfer(self, request: Any, size: Any, file_offset: Any, buffer_offset: Any) -> object:
        """Fill in the C interface's request. Returns what must live until the work is over."""
        instance("file", HostFile, self.file)
        keep: object = None
        request.backing = self.file._handle
        if isinstance(self.memory, Buffer):
            request.buffer = self.memory._handle
        else:
            memory, keep = device_range(self.file.engine, self.memory, writable=self.direction == "load")
            request.device = signed("device", memory.device)
            request.address = unsigned("address", memory.address)
            request.address_bytes = unsigned("bytes", memory.bytes)
        request.file_offset = unsigned("file_offset", file_offset)
        request.buffer_offset = unsigned("buffer_offset", buffer_offset)
        request.bytes = _TO_THE_END if size is None else unsigned("size", size)
        request.direction = _DIRECTIONS[self.direction]
        request.sync = _SYNCS[self.sync]
        request.sparse = bool(self.sparse)
        request.fastpath = SWITCHES[self.fastpath]
        request.share = signed("share", self.share)
        request.client = unsigned("client", self.client)
        return self.file, self.memory, keep


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
    fastpath
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
        file: HostFile,
        memory: "Memory",
        size: int | None = None,
        file_offset: int = 0,
        buffer_offset: int = 0,
        **options: Any,
    ) -> None:
        wanted = TransferRequest(direction, file, memory, size, file_offset, buffer_offset, **options)
        request = ffi.new("gpufs_transfer_request *")
        used = InUse(wanted._fill_transfer(request, size, file_offset, buffer_offset))
        handle = result_of(HANDLE, lib.gpufs_transfer_start, file.engine._handle, request)
        file.engine._users.add(used)
        self._own(handle, functools.partial(close_or_defer, _over_within_a_second, used))

    @property
    def event_fd(self) -> int:
        """A descriptor that is readable once the transfer is done; valid until the transfer is closed."""
        return int(result_of("int *", lib.gpufs_transfer_event_fd, self._handle))

    def _now(self) -> Any:
        return result_of(_PROGRESS, lib.gpufs_transfer_progress_get, self._handle)

    def progress(self) -> TransferProgress:
        """Return the transfer's progress."""
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
        """Return what went wrong, once it is done."""
        return error_of(self._now())

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is done, up to ``timeout`` seconds (None: without limit). Return whether it is done."""
        left = seconds("timeout", timeout)
        deadline = time.monotonic() + left
        while True:
            part = math.ceil(min(left, _PART_SECONDS) * 1000)
            done = bool(result_of(SMALL_NUMBER, lib.gpufs_transfer_wait, self._handle, part))
            left = deadline - time.monotonic()
            if done or left <= 0:
                return done

    def cancel(self) -> None:
        """Stop it at its next chunk; never blocks."""
        check(lib.gpufs_transfer_cancel(self._handle))

    def finish(self) -> int:
        """Wait until it is done and return the bytes moved. Raise TransferError if it failed, also after progress.

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
