"""Files of the host, and asynchronous reads and writes of them, perhaps on streams with numbers that are bound late."""

import errno
import itertools
import numbers
import os
import sys
import threading
import weakref
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from gpufs.engine._arguments import choice, instance, signed
from gpufs.engine._binding import Handle, check, failure
from gpufs.engine._completions import completions, report_callback
from gpufs.engine._engine import Engine
from gpufs.engine._native import ffi, lib
from gpufs.engine._streams import Stream, StreamLike, native_handle, number_address
from gpufs.engine._transfer import (
    BackingInfo,
    Direction,
    Switch,
    Sync,
    Transfer,
    TransferError,
    fill_request,
    refusal_names,
)

if TYPE_CHECKING:
    import ctypes

    from gpufs.engine._arrays import MemoryBuffer
    from gpufs.engine._buffer import Memory
    from gpufs.engine._streams import Late, Number

COLLECTED_AT_A_TIME: Final = 256
# How long a task that was cancelled waits until its memory is no longer in use: seconds.
_PATIENCE: Final = 10.0


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
    file: "BackingFile"
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
        instance("file", BackingFile, self.file)
        keep: list[object] = [self.file, self.memory, self.stream]

        def number(name: str, cell: str, value: Any) -> Any:
            """The number, or 0 where it is late."""
            if value is None or isinstance(value, numbers.Integral):
                return value
            address, kept = number_address(name, value, writable=False)
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
            address, kept = number_address("count", self.count, writable=True)
            keep.append(kept)
            target.count = ffi.cast("int64_t *", address)
        target.cookie = cookie
        if isinstance(self.cookie, int) and 0 <= self.cookie < 1 << 64:
            target.trace_cookie = self.cookie
        return keep


def error_of(ended: Any) -> TransferError:
    """The failure of an operation that has ended with one."""
    text = ffi.string(ended.message).decode(errors="replace")
    return TransferError(ended.error, text, ended.device_code, ended.bytes)


class OperationFuture(Future[int]):
    """The outcome of an operation: the bytes moved, or the TransferError that it raises.

    ``await`` it in trio or asyncio, or wait with :mod:`concurrent.futures`. If a task that awaits it in trio is
    cancelled, so is the operation, and the task continues once the memory is no longer in use, or after 10 s if a
    device is stalled; asyncio does not wait for that. What the operation needs lives until it is over.

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

    def add_done_callback(self, fn: Callable[[Future[int]], object]) -> None:
        """Has ``fn`` called with the future once it is done; not while the interpreter exits, which closes engines."""

        def call(future: Future[int]) -> None:
            if not completions.ending:
                fn(future)

        super().add_done_callback(call)

    def __await__(self) -> Generator[Any, Any, int]:
        # Who awaits in trio has imported it.
        trio = sys.modules.get("trio")
        if trio is not None and trio.lowlevel.in_trio_task():
            return self._in_trio().__await__()
        import asyncio

        return asyncio.wrap_future(self).__await__()

    async def _in_trio(self) -> int:
        import trio

        token = trio.lowlevel.current_trio_token()
        over = trio.Event()

        def tell(_: object) -> None:
            try:
                token.run_sync_soon(over.set)
            except trio.RunFinishedError:
                pass

        self.add_done_callback(tell)
        try:
            await over.wait()
        except (trio.Cancelled, KeyboardInterrupt) as stopped:
            self.cancel()
            with trio.CancelScope(deadline=trio.current_time() + _PATIENCE, shield=True):
                await over.wait()  # until the memory is free
            if isinstance(stopped, KeyboardInterrupt) or not self.done() or self.cancelled():
                raise
        return self.result()

    def _over(self, ended: Any) -> None:
        self._keep = None
        if ended is None or ended.error == errno.ECANCELED:
            super().cancel()
            self.set_running_or_notify_cancel()
        elif ended.error:
            self.set_exception(error_of(ended))
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
        found = ffi.new("gpufs_completion[]", COLLECTED_AT_A_TIME)
        count = ffi.new("uint64_t *")
        while True:
            status = lib.gpufs_queue_collect(self.handle, found, COLLECTED_AT_A_TIME, 0, 0, count)
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
            if count[0] < COLLECTED_AT_A_TIME:
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


class BackingFile(Handle):
    """A regular file or block device of the host, for transfers. It keeps its engine alive.

    The engine opens descriptors of its own with the access mode of ``fd``, never a wider one. This may block for as
    long as the file's server does.

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

    def read(
        self, memory: "Memory", size: int | None = None, file_offset: int = 0, buffer_offset: int = 0, **options: Any
    ) -> int:
        """Reads from the file into device memory and waits for the end.

        An exception that arrives during the wait (KeyboardInterrupt) cancels the read.

        Parameters
        ----------
        memory
            A Buffer (which grows), a DeviceRange, or a contiguous array on a device of the engine, with
            ``__cuda_array_interface__`` or DLPack (host engines: the buffer protocol or DLPack).
        size
            In bytes; None for all that the file has and the memory can take.
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
        with Transfer(
            "load", self, memory, file_offset=file_offset, buffer_offset=buffer_offset, size=size, **options
        ) as transfer:
            return transfer.finish()

    def write(
        self, memory: "Memory", size: int | None = None, file_offset: int = 0, buffer_offset: int = 0, **options: Any
    ) -> int:
        """Writes device memory to the file and waits; returns the bytes written. Otherwise like :meth:`read`.

        The bytes are durable only with ``sync="data"`` or ``sync="full"``.
        """
        with Transfer(
            "store", self, memory, file_offset=file_offset, buffer_offset=buffer_offset, size=size, **options
        ) as transfer:
            return transfer.finish()

    def read_async(
        self,
        memory: "Memory",
        size: "Number | None" = None,
        file_offset: "Number" = 0,
        buffer_offset: "Number" = 0,
        *,
        stream: Stream | StreamLike | None = None,
        **options: Any,
    ) -> OperationFuture:
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
        return submit_operation(
            Operation("load", self, memory, size, file_offset, buffer_offset, stream=stream, **options)
        )

    def write_async(
        self,
        memory: "Memory",
        size: "Number | None" = None,
        file_offset: "Number" = 0,
        buffer_offset: "Number" = 0,
        *,
        stream: Stream | StreamLike | None = None,
        **options: Any,
    ) -> OperationFuture:
        """Queues a write of device memory to the file on a stream. Otherwise like :meth:`read_async`."""
        return submit_operation(
            Operation("store", self, memory, size, file_offset, buffer_offset, stream=stream, **options)
        )

    def read_future(
        self, memory: "Memory", size: int | None = None, file_offset: int = 0, buffer_offset: int = 0, **options: Any
    ) -> OperationFuture:
        """Like :meth:`read`, without waiting: the future has the count as its result, or raises TransferError."""
        return self.read_async(memory, size, file_offset, buffer_offset, **options)

    def write_future(
        self, memory: "Memory", size: int | None = None, file_offset: int = 0, buffer_offset: int = 0, **options: Any
    ) -> OperationFuture:
        """Like :meth:`write`, without waiting: the future has the count as its result, or raises TransferError."""
        return self.write_async(memory, size, file_offset, buffer_offset, **options)
