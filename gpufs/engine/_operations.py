"""Asynchronous operations: reads and writes on streams and in batches, with numbers that may be bound late."""

import ctypes
import errno
import functools
import itertools
import numbers
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, runtime_checkable

from gpufs.engine._arguments import choice, instance, seconds, signed, unsigned, view_of
from gpufs.engine._binding import Handle, check, failure
from gpufs.engine._completions import completions, report_callback
from gpufs.engine._engine import Engine
from gpufs.engine._futures import EngineFuture
from gpufs.engine._in_use import close_or_leave
from gpufs.engine._native import ffi, lib
from gpufs.engine._transfer import BackingFile, Direction, Switch, Sync, TransferError, fill_request, refusal_names

if TYPE_CHECKING:
    import ctypes
    from typing import TypeAlias

    from gpufs.engine._arrays import MemoryBuffer
    from gpufs.engine._buffer import Memory

    # A number, or the place from which it is read when the stream comes to the operation.
    Number: TypeAlias = "int | Late | ctypes.c_int64 | ctypes.c_uint64 | MemoryBuffer"

Fixed = Literal["buffer_offset", "file_offset", "size"]

_FIXED: Final[dict[str, int]] = {
    "buffer_offset": lib.GPUFS_STREAM_FIXED_BUFFER_OFFSET,
    "file_offset": lib.GPUFS_STREAM_FIXED_FILE_OFFSET,
    "size": lib.GPUFS_STREAM_FIXED_SIZE,
}
_NUMBER_BYTES: Final = 8
# What memory may be said to consist of that has a number in it: such numbers, or bytes.
_INTEGERS: Final = frozenset("qQlLnNBbc")
_COLLECTED_AT_A_TIME: Final = 256
_LONGEST_PATIENCE: Final = (1 << 31) - 1  # milliseconds
_ALL: Final = (1 << 64) - 1
# Waiting of the main thread, which signals come to: in parts of so many seconds, or in naps of this share of what it
# has taken so far.
_PART_SECONDS: Final = 0.05
_NAP: Final = 1 / 16


@runtime_checkable
class SupportsCudaStream(Protocol):
    """A stream of another library: ``__cuda_stream__()`` gives the protocol's version and the runtime's handle."""

    def __cuda_stream__(self) -> tuple[int, int]: ...


StreamLike = SupportsCudaStream | int


def configure_operations(
    engine: Engine,
    *,
    operations: int = 0,
    stream_depth: int = 0,
    patience: float | None = None,
    stream_waits: Literal["auto", "off"] = "auto",
) -> None:
    """Sets how an engine's operations run; 0 is the engine's choice. Before its first stream, batch or operation.

    ``operations``: under way at most (65536). ``stream_depth``: outstanding on one stream at most (256).
    ``patience``: seconds that a submission waits for a stream that is full before it is EAGAIN (10). ``stream_waits``
    "off": calls of the host hold streams, as where a device cannot wait for a value. EngineError EBUSY afterwards,
    EINVAL for what is out of range.
    """
    instance("engine", Engine, engine)
    options = {
        "operations": unsigned("operations", operations),
        "stream_depth": unsigned("stream_depth", stream_depth),
        "patience_ms": -1 if patience is None else int(min(seconds("patience", patience) * 1000, _LONGEST_PATIENCE)),
        "stream_waits": choice("stream_waits", {"auto": lib.GPUFS_AUTO, "off": lib.GPUFS_OFF}, stream_waits),
    }
    check(lib.gpufs_async_configure(engine._handle, ffi.new("gpufs_async_options *", options)))


@dataclass(frozen=True, slots=True)
class Late:
    """A 64-bit number in memory that an operation reads when its stream comes to it.

    ``address`` is where it is for the CPU; ``keep`` is kept alive until the operation is over.
    """

    address: int
    keep: object = None


class Cells(Handle):
    """64-bit signed integers in pinned memory, zero at first, which kernels can read and write, too.

    ``cells[n]`` reads and sets one, :meth:`late` names it to an operation. EngineError ENOMEM when no more memory can
    be pinned. They must not be closed before the operations and kernels that use them are over. The memory of closed
    cells is kept for the next ones of their size until the engine is closed.
    """

    __slots__ = ("_count", "_memory", "device_address", "engine")

    def __init__(self, engine: Engine, count: int = 1, device: int = 0) -> None:
        instance("engine", Engine, engine)
        handle = ffi.new("gpufs_handle *")
        memory = ffi.new("void **")
        address = ffi.new("uint64_t *")
        size = unsigned("count", unsigned("count", count) * _NUMBER_BYTES)
        check(lib.gpufs_pinned_create(engine._handle, signed("device", device), size, handle, memory, address))
        self.engine = engine
        self.device_address = int(address[0])
        self._count = count
        self._memory = ffi.cast("int64_t *", memory[0])
        self._own(handle[0], lib.gpufs_pinned_close)

    def __len__(self) -> int:
        return self._count

    def _at(self, index: int) -> int:
        if self.closed:
            raise ValueError("the cells are closed")
        index = signed("index", index)
        if not -self._count <= index < self._count:
            raise IndexError("no such cell")
        return index % self._count

    def __getitem__(self, index: int) -> int:
        return int(self._memory[self._at(index)])

    def __setitem__(self, index: int, value: int) -> None:
        try:
            self._memory[self._at(index)] = value
        except OverflowError:
            raise ValueError(f"value: {value!r} is no signed integer of 64 bits") from None

    def late(self, index: int = 0) -> Late:
        """Names a cell to an operation, as a number or as the place of its count."""
        address = int(ffi.cast("uintptr_t", self._memory)) + self._at(index) * _NUMBER_BYTES
        return Late(address, self)


class Stream(Handle):
    """A stream on which operations are queued: the engine's own, or one that the program has.

    ``stream``: None makes one, on ``device`` (0 if not given); otherwise an object with ``__cuda_stream__`` or the
    runtime's handle (CUstream, hipStream_t), which must live until its operations are over. Whose it is the runtime
    tells, unless ``device`` does; a default stream is that of the device current on this thread.

    ``fixed``: numbers that are read when an operation is submitted, though they are given late. ``aligned``: all sizes
    and offsets are multiples of 4096, EINVAL otherwise.

    Closing lets queued operations go on; an engine's own stream ends once all that is queued on it is done.
    """

    __slots__ = ("engine",)

    def __init__(
        self,
        engine: Engine,
        stream: StreamLike | None = None,
        *,
        device: int | None = None,
        fixed: Iterable[Fixed] = (),
        aligned: bool = False,
    ) -> None:
        instance("engine", Engine, engine)
        flags = lib.GPUFS_STREAM_ALIGNED if aligned else 0
        for name in fixed:
            flags |= choice("fixed", _FIXED, name)
        handle = ffi.new("gpufs_handle *")
        if stream is None:
            check(lib.gpufs_stream_create(engine._handle, signed("device", device or 0), flags, handle))
        else:
            where = -1 if device is None else signed("device", device)
            check(lib.gpufs_stream_register(engine._handle, where, native_handle(stream), flags, handle))
        self.engine = engine
        self._own(handle[0], lib.gpufs_stream_close)

    def _info(self) -> Any:
        info = ffi.new("gpufs_stream_info *")
        check(lib.gpufs_stream_info_get(self._handle, info))
        return info

    @property
    def handle(self) -> int:
        """What the vendor's runtime calls the stream."""
        return int(self._info().native)

    @property
    def device(self) -> int:
        """The index of its device."""
        return int(self._info().device)

    @property
    def outstanding(self) -> int:
        """Operations that the stream has not left behind it."""
        return int(self._info().outstanding)

    @property
    def waits_for_values(self) -> bool:
        """Whether the device itself waits for an operation's end; otherwise a call of the host does."""
        return bool(self._info().waits_for_values)

    def __cuda_stream__(self) -> tuple[int, int]:
        """The protocol's version and the handle, for other libraries."""
        return 0, self.handle

    def call(self, function: Callable[[], object]) -> None:
        """Calls ``function()`` when the stream comes to it; what is queued behind waits until it has returned.

        It runs on a thread of the driver's, which streams may share: it should be short, and must neither call the
        vendor's runtime nor wait for operations. What it raises goes to :func:`sys.unraisablehook`.
        """
        if not callable(function):
            raise TypeError(f"{function!r} cannot be called")
        number = next(_numbers)
        _functions[number] = function
        status = lib.gpufs_stream_call(self._handle, _native_call, ffi.cast("void *", number))
        if status.error:
            del _functions[number]
            raise failure(status)

    def synchronize(self) -> None:
        """Waits until all that is queued now is done, the program's own work too.

        KeyboardInterrupt comes as soon as nothing but the program's own work is waited for.
        """
        if threading.current_thread() is threading.main_thread():
            began = time.monotonic()
            while self.outstanding:
                time.sleep(min(max((time.monotonic() - began) * _NAP, 20e-6), _PART_SECONDS))
        check(lib.gpufs_stream_synchronize(self._handle))


# Python functions that streams are to call, by the number that stands for each.
_functions: Final[dict[int, Callable[[], object]]] = {}
_numbers: Final = itertools.count(1)


def _call_from_stream(number: int) -> None:
    _functions.pop(number)()  # what it raises ctypes gives to the hook


_called: Final = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_call_from_stream)
_native_call: Final = ffi.cast("void (*)(void *)", ctypes.cast(_called, ctypes.c_void_p).value or 0)


def native_handle(stream: StreamLike) -> int:
    """What the vendor's runtime calls a stream. TypeError for what is none."""
    if isinstance(stream, SupportsCudaStream):
        return unsigned("stream", stream.__cuda_stream__()[1])
    if isinstance(stream, int) and not isinstance(stream, bool):
        return unsigned("stream", stream)
    raise TypeError(f"{type(stream).__name__} is neither a stream nor a stream's handle")


def _place(name: str, number: Any, *, writable: bool) -> tuple[int, object]:
    """The address of a 64-bit number, and what keeps it there. TypeError or ValueError for what is none."""
    if isinstance(number, Late):
        address = unsigned("address", number.address)
        if address == 0:
            raise ValueError("address: there is no number at 0")
        return address, number.keep
    if isinstance(number, (ctypes.c_int64, ctypes.c_uint64)):
        return ctypes.addressof(number), number
    try:
        form = memoryview(number).format
    except TypeError:
        raise TypeError(f"{name}: {number!r} is neither a whole number nor 8 bytes of memory with one") from None
    # Others than integers of this machine would be read as one all the same: 8.0 as 4620693217682128896.
    if form.lstrip("@=<" if sys.byteorder == "little" else "@=>!") not in _INTEGERS:
        raise TypeError(f"{name}: {number!r} has no whole number of 64 bits in it")
    view = view_of(number, writable=writable)
    if len(view) != _NUMBER_BYTES:
        raise ValueError(f"{name}: a late number has 64 bits")
    return int(ffi.cast("uintptr_t", view)), view


@dataclass(slots=True)
class Operation:
    """A read or write to be submitted; ``cookie`` is the program's own and comes back with the result.

    An integer cookie is also shown in traces.

    ``size``, ``file_offset`` and ``buffer_offset`` are integers (bytes; a size of None is as much as there is and
    fits), or late: a :class:`Late`, a 64-bit ctypes integer or 8 bytes of memory, read when the stream comes to the
    operation. A late size counts as it is now, too: by then it may have shrunk, not grown. ``count``: 8 bytes
    (as those, writable) into which the count goes before the stream goes on, or a negative errno.

    ``stream``: a :class:`Stream`, an object with ``__cuda_stream__`` or a handle; None: at once, in no order.
    """

    direction: Direction
    file: BackingFile
    memory: "Memory"
    size: "Number | None" = None
    file_offset: "Number" = 0
    buffer_offset: "Number" = 0
    stream: "Stream | StreamLike | None" = None
    count: "Late | ctypes.c_int64 | MemoryBuffer | None" = None
    cookie: object = None
    fastpath: Switch = "auto"
    fallback: Switch = "auto"
    sync: Sync = "none"
    sparse: bool = False
    share: int = 0
    client: int = 0

    def _fill(self, target: Any, cookie: int) -> object:
        """Writes the C interface's form, and gives what must live until the operation is over."""
        keep: list[object] = [self.file, self.memory, self.stream]

        def number(name: str, cell: str, value: Any) -> Any:
            """The number, or 0 where it is late."""
            if value is None or isinstance(value, numbers.Integral):
                return value
            address, kept = _place(name, value, writable=False)
            keep.append(kept)
            setattr(target, cell, ffi.cast("uint64_t *", address))
            return 0

        size = number("size", "bytes_cell", self.size)
        file_offset = number("file_offset", "file_offset_cell", self.file_offset)
        buffer_offset = number("buffer_offset", "buffer_offset_cell", self.buffer_offset)
        keep.append(
            fill_request(
                target.transfer,
                self.direction,
                self.file,
                self.memory,
                file_offset=file_offset,
                buffer_offset=buffer_offset,
                size=size,
                fastpath=self.fastpath,
                fallback=self.fallback,
                sync=self.sync,
                sparse=self.sparse,
                share=self.share,
                client=self.client,
            )
        )
        if isinstance(self.stream, Stream):
            target.stream = self.stream._handle
        elif self.stream is not None:
            target.implied = 1
            target.native_device = -1
            target.native_stream = native_handle(self.stream)
        if self.count is not None:
            address, kept = _place("count", self.count, writable=True)
            keep.append(kept)
            target.count = ffi.cast("int64_t *", address)
        target.cookie = cookie
        if isinstance(self.cookie, int) and 0 <= self.cookie < 1 << 64:
            target.trace_cookie = self.cookie
        return keep


@dataclass(frozen=True, slots=True)
class OperationResult:
    """How an operation ended. ``error``: what went wrong, also after progress; errno ECANCELED if it was cancelled."""

    operation: Operation
    bytes: int  # from the start without a gap, also after a failure
    error: TransferError | None
    fastpath_bytes: int
    fallback_bytes: int
    hole_bytes: int  # moved by neither: holes that stayed holes
    refusals: tuple[str, ...]  # why the fastpath did not take all of it
    id: int  # the operation's number, as in traces

    @property
    def cookie(self) -> object:
        """The operation's."""
        return self.operation.cookie


def _result(operation: Operation, ended: Any) -> OperationResult:
    error = None
    if ended.error:
        text = ffi.string(ended.message).decode(errors="replace")
        error = TransferError(ended.error, text, ended.device_code, ended.bytes)
    return OperationResult(
        operation=operation,
        bytes=ended.bytes,
        error=error,
        fastpath_bytes=ended.fastpath_bytes,
        fallback_bytes=ended.fallback_bytes,
        hole_bytes=ended.hole_bytes,
        refusals=tuple(refusal_names(ended.refusals)),
        id=ended.id,
    )


class _Submitted:
    """The operations of a batch that were submitted and not collected."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # guards all below
        self.under_way: dict[int, tuple[Operation, object]] = {}

    def in_use(self) -> object:
        with self.lock:
            return list(self.under_way.values())

    def over(self, handle: int) -> bool:
        """Lets go of what is over; whether that is all, or nothing can be known any more."""
        found = ffi.new("gpufs_completion[]", _COLLECTED_AT_A_TIME)
        count = ffi.new("uint64_t *")
        while True:
            if lib.gpufs_queue_collect(handle, found, _COLLECTED_AT_A_TIME, 0, 0, count).error:
                return True
            with self.lock:
                for index in range(count[0]):
                    self.under_way.pop(found[index].cookie, None)
                if count[0] < _COLLECTED_AT_A_TIME:
                    return not self.under_way


class Batch(Handle):
    """Operations that are submitted together and collected as they end; all that have no stream run side by side.

    ``capacity``: under way or not collected, at most. Closing cancels what is under way, and waits for it. EngineError
    ETIMEDOUT if some has not ended within 10 s: it, and its memory, is freed once it has.
    """

    __slots__ = ("_cookies", "_ended", "_submitted", "engine")

    def __init__(self, engine: Engine, capacity: int = 0) -> None:
        instance("engine", Engine, engine)
        handle = ffi.new("gpufs_handle *")
        check(lib.gpufs_queue_open(engine._handle, unsigned("capacity", capacity), handle))
        self.engine = engine
        self._cookies = itertools.count(1)
        self._submitted = _Submitted()
        self._ended: list[OperationResult] = []  # collected, and given to nobody yet; guarded by the lock of those
        engine._users.add(self._submitted)
        close, event_fd = lib.gpufs_queue_close, lib.gpufs_queue_event_fd
        self._own(handle[0], functools.partial(close_or_leave, close, event_fd, self._submitted.over, self._submitted))

    def submit(self, operations: Iterable[Operation]) -> None:
        """Submits all of them, or none.

        EngineError names what cannot be, EAGAIN when there is no room for all; TypeError or ValueError for memory and
        numbers that cannot take part.
        """
        wanted = list(operations)
        for operation in wanted:
            instance("operations", Operation, operation)
        if not wanted:
            return
        array = ffi.new("gpufs_operation[]", len(wanted))
        cookies = [next(self._cookies) for _ in wanted]
        kept = {
            cookie: (operation, operation._fill(array[index], cookie))
            for index, (cookie, operation) in enumerate(zip(cookies, wanted, strict=True))
        }
        with self._submitted.lock:
            self._submitted.under_way |= kept
        bad = ffi.new("uint64_t *")
        status = lib.gpufs_queue_submit(self._handle, array, len(wanted), ffi.NULL, bad)
        if status.error:
            error = failure(status)
            with self._submitted.lock:
                for cookie in cookies:
                    self._submitted.under_way.pop(cookie, None)
            if len(wanted) > 1 and error.errno != errno.EAGAIN:
                error.add_note(f"operation {bad[0]} of {len(wanted)}")
            raise error

    def wait(self, fewest: int = 1, most: int | None = None, timeout: float | None = None) -> list[OperationResult]:
        """The results of operations that are over, in the order in which they ended, each once.

        Waits until there are ``fewest``, or as many as are under way, up to ``timeout`` seconds (None: for ever, 0: not
        at all); gives at most ``most`` (None: all there are).
        """
        fewest = unsigned("fewest", fewest)
        most = _ALL if most is None else unsigned("most", most)
        left = seconds("timeout", timeout)
        fewest = min(fewest, most)
        while True:
            with self._submitted.lock:
                missing = fewest - len(self._ended)
                room = min(most - len(self._ended), len(self._submitted.under_way))
            # In parts, so that the interpreter can look at signals.
            part = min(left, _PART_SECONDS) if missing > 0 else 0.0
            count = self._collect(room, max(missing, 0), part) if room > 0 else 0
            left -= part
            with self._submitted.lock:
                enough = len(self._ended) >= fewest or left <= 0 or not self._submitted.under_way
                if enough or (not count and not self.under_way):
                    results, self._ended = self._ended[:most], self._ended[most:]
                    return results

    def _collect(self, room: int, fewest: int, seconds: float) -> int:
        """Takes what is over from the engine, at most ``room``; how many that were."""
        found = ffi.new("gpufs_completion[]", room)
        count = ffi.new("uint64_t *")
        check(lib.gpufs_queue_collect(self._handle, found, room, fewest, int(seconds * 1000), count))
        with self._submitted.lock:
            for index in range(count[0]):
                # One that was cancelled while it was refused was never submitted.
                kept = self._submitted.under_way.pop(found[index].cookie, None)
                if kept is not None:
                    self._ended.append(_result(kept[0], found[index]))
        return int(count[0])

    @property
    def under_way(self) -> int:
        """Operations that are not over."""
        count = ffi.new("uint64_t[2]")
        check(lib.gpufs_queue_counts(self._handle, count, count + 1))
        return int(count[0])

    def cancel(self) -> None:
        """Asks all operations to stop; their results come as those of others do."""
        check(lib.gpufs_queue_cancel(self._handle, 0))


class OperationFuture(EngineFuture):
    """The outcome of an operation.

    cancel() asks the operation to stop: one that its stream has not come to is over at once and moves nothing. One that
    moves bytes is over once the device has done what it was given, which may be never if that is stalled; result()
    is TimeoutError after its timeout, and can be interrupted.
    """

    def __init__(self, queue: "_Queue", keep: object) -> None:
        super().__init__()
        self._queue = queue
        self._keep: object = keep
        self._id = 0

    def cancel(self) -> bool:
        """Asks the operation to stop. False if it is over already."""
        if self.done():
            return self.cancelled()
        status = lib.gpufs_queue_cancel(self._queue.handle, self._id) if self._id else None
        return status is None or status.error == 0 or self.cancelled()

    def _over(self, ended: Any) -> None:
        self._keep = None
        if ended is None or ended.error == errno.ECANCELED:
            super().cancel()
            self.set_running_or_notify_cancel()
        elif ended.error:
            text = ffi.string(ended.message).decode(errors="replace")
            self.set_exception(TransferError(ended.error, text, ended.device_code, ended.bytes))
        else:
            self.set_result(int(ended.bytes))


class _Queue:
    """All operations of an engine that have futures."""

    def __init__(self, engine: Engine) -> None:
        handle = ffi.new("gpufs_handle *")
        check(lib.gpufs_queue_open(engine._handle, 0, handle))
        self.handle = int(handle[0])  # closed with the engine
        self._cookies = itertools.count(1)
        self._lock = threading.Lock()  # guards all below
        self._futures: dict[int, OperationFuture] = {}
        self._watched = False
        self._watched_fd = -1  # an eventfd that is open while it is watched
        engine._users.add(self)

    def in_use(self) -> object:
        with self._lock:
            return [future._keep for future in self._futures.values()]

    def submit(self, operation: Operation) -> OperationFuture:
        cookie = next(self._cookies)
        given = ffi.new("gpufs_operation *")
        future = OperationFuture(self, operation._fill(given, cookie))
        number = ffi.new("uint64_t *")
        with self._lock:
            # First: nothing is submitted that nobody would tell of.
            if not self._watched:
                fd = ffi.new("int *")
                check(lib.gpufs_queue_event_fd(self.handle, fd))
                self._watched_fd = completions.watch(fd[0], self._collect)
                self._watched = True
            self._futures[cookie] = future
        status = lib.gpufs_queue_submit(self.handle, given, 1, number, ffi.NULL)
        if status.error:
            error = failure(status)
            with self._lock:
                self._futures.pop(cookie, None)
                if self._watched and not self._futures:
                    os.eventfd_write(self._watched_fd, 1)  # nothing else would end the watching
            raise error
        future._id = int(number[0])
        return future

    def _collect(self) -> bool:
        """Tells all futures that are over; one wake-up serves many. Whether there are more to be told."""
        found = ffi.new("gpufs_completion[]", _COLLECTED_AT_A_TIME)
        count = ffi.new("uint64_t *")
        while True:
            status = lib.gpufs_queue_collect(self.handle, found, _COLLECTED_AT_A_TIME, 0, 0, count)
            if status.error:  # the engine was closed over them
                with self._lock:
                    lost, self._futures = list(self._futures.values()), {}
                    self._watched = False
                for one in lost:
                    self._tell(one, None)
                return False
            with self._lock:
                over = [self._futures.pop(found[index].cookie, None) for index in range(count[0])]
            for index, future in enumerate(over):
                if future is not None:  # otherwise it was cancelled while it was refused
                    self._tell(future, found[index])
            if count[0] < _COLLECTED_AT_A_TIME:
                break
        with self._lock:
            self._watched = bool(self._futures)
            return self._watched

    @staticmethod
    def _tell(future: OperationFuture, ended: Any) -> None:
        try:
            future._over(ended)
        except BaseException:  # noqa: BLE001 - a program's own callback; the other futures still wait
            report_callback()


_queues: Final[weakref.WeakKeyDictionary[Engine, _Queue]] = weakref.WeakKeyDictionary()
_queues_lock: Final = threading.Lock()


def submit_operation(operation: Operation) -> OperationFuture:
    """Submits one operation. EngineError, TypeError or ValueError when it cannot be queued."""
    engine = operation.file.engine
    with _queues_lock:
        queue = _queues.get(engine)
        if queue is None:
            queue = _queues[engine] = _Queue(engine)
    return queue.submit(operation)
