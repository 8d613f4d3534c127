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
from typing import TYPE_CHECKING, Any, Final

from gpufs.engine._arguments import instance
from gpufs.engine._binding import check, failure
from gpufs.engine._completions import completions, report_callback
from gpufs.engine._engine import Engine
from gpufs.engine._native import ffi, lib
from gpufs.engine._streams import Stream, StreamLike, native_handle, number_address
from gpufs.engine._transfer import (
    Direction,
    HostFile,
    Switch,
    Sync,
    Transfer,
    TransferError,
    check_words,
    fill_request,
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
    """A read or write to be submitted.

    Parameters
    ----------
    size, file_offset, buffer_offset
        In bytes. A size of None is as much as there is and fits. Late numbers are a :class:`Late`, a 64-bit ctypes
        integer or 8 bytes of memory, read when the stream reaches the operation. A late size must not grow after the
        submission.
    stream
        A :class:`Stream`, an object with ``__cuda_stream__`` or a handle. None: the operation starts at once, in no
        order with others.
    count
        Writable memory as for late numbers. Receives the bytes moved, or a negative errno, before the stream continues.
    cookie
        Is returned with the result. Traces show integers.

    Raises
    ------
    ValueError
        ``direction`` is neither "load" nor "store", or ``fastpath``, ``fallback`` or ``sync`` is another word than
        those of :class:`Transfer`.
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

    def __post_init__(self) -> None:
        check_words(self.direction, self.fastpath, self.fallback, self.sync)

    def _fill(self, target: Any, cookie: int) -> object:
        """Fill in the C interface's structure. Returns what must live until the operation has ended."""
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
    """Return the failure of an operation that has failed."""
    text = ffi.string(ended.message).decode(errors="replace")
    return TransferError(ended.error, text, ended.device_code, ended.bytes)


class OperationFuture(Future[int]):
    """The outcome of an operation: the bytes moved, or the TransferError that it raises.

    ``await`` it in trio or asyncio, or wait with :mod:`concurrent.futures`. If a task that awaits it in trio is
    cancelled, so is the operation, and the task continues once the memory is no longer in use, or after 10 s if a
    device is stalled; asyncio does not wait for that. What the operation needs lives until it is over.

    cancel() asks the operation to stop. If its stream has not reached it, it ends at once and moves nothing. Otherwise
    it ends when the device has finished its current work, which may be never if the device is stalled. result() raises
    TimeoutError after its timeout, and can be interrupted.
    """

    def __init__(self, queue: "_Queue", keep: object) -> None:
        super().__init__()
        self._queue = queue
        self._keep: object = keep
        self._id = 0

    def cancel(self) -> bool:
        """Ask the operation to stop. Returns False if it has ended already."""
        if self.done():
            return self.cancelled()
        status = lib.gpufs_queue_cancel(self._queue.handle, self._id) if self._id else None
        return status is None or status.error == 0 or self.cancelled()

    def add_done_callback(self, fn: Callable[[Future[int]], object]) -> None:
        """Call ``fn`` with the future once it is done, except while the interpreter exits and closes engines."""

        def call(future: Future[int]) -> None:
            if not completions.ending:
                fn(future)

        super().add_done_callback(call)

    def __await__(self) -> Generator[Any, Any, int]:
        # A program that awaits in trio has imported it.
        trio = sys.modules.get("trio")
        if trio is not None and trio.lowlevel.in_trio_task():
            return self._in_trio().__await__()
        import asyncio

        return asyncio.wrap_future(self).__await__()

    async def _in_trio(self) -> int:
        import trio

        token = trio.lowlevel.current_trio_token()
        over = trio.Event()

        def wake(_: object) -> None:
            try:
                token.run_sync_soon(over.set)
            except trio.RunFinishedError:
                pass

        self.add_done_callback(wake)
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
            # First: if the queue cannot be watched, nothing is submitted.
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
        """Set the results of all operations that have ended. Returns whether others are still running."""
        found = ffi.new("gpufs_completion[]", COLLECTED_AT_A_TIME)
        count = ffi.new("uint64_t *")
        while True:
            status = lib.gpufs_queue_collect(self.handle, found, COLLECTED_AT_A_TIME, 0, 0, count)
            if status.error:  # the engine was closed over them
                with self._lock:
                    lost, self._futures = list(self._futures.values()), {}
                    self._watched = False
                for one in lost:
                    self._finish(one, None)
                return False
            with self._lock:
                over = [self._futures.pop(found[index].cookie, None) for index in range(count[0])]
            for index, future in enumerate(over):
                if future is not None:  # otherwise it was cancelled while it was refused
                    self._finish(future, found[index])
            if count[0] < COLLECTED_AT_A_TIME:
                break
        with self._lock:
            self._watched = bool(self._futures)
            return self._watched

    @staticmethod
    def _finish(future: OperationFuture, ended: Any) -> None:
        try:
            future._over(ended)
        except BaseException:  # noqa: BLE001 - a program's own callback; the other futures still wait
            report_callback()


_queues: Final[weakref.WeakKeyDictionary[Engine, _Queue]] = weakref.WeakKeyDictionary()
_queues_lock: Final = threading.Lock()


def submit_operation(operation: Operation) -> OperationFuture:
    """Submit one operation. EngineError, TypeError or ValueError if it cannot be queued."""
    engine = operation.file.engine
    with _queues_lock:
        queue = _queues.get(engine)
        if queue is None:
            queue = _queues[engine] = _Queue(engine)
    return queue.submit(operation)


class BackingFile(HostFile):
    """A regular file or block device of the host, for transfers. It keeps its engine alive.

    The engine opens descriptors of its own with the access mode of ``fd``, never a wider one. This may block for as
    long as the file's server does.

    Raises
    ------
    EngineError
        EBADF for an O_PATH descriptor, EISDIR or EINVAL for another kind of file, EDEADLK for a file on a mount of
        gpufs.
    """

    __slots__ = ()

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
