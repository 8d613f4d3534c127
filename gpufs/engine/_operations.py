"""Reads and writes on streams: operations, which are submitted to queues, and batches, which collect their results."""

import functools
import itertools
import math
import numbers
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from errno import EAGAIN
from typing import TYPE_CHECKING, Any, Final

from gpufs.engine._arguments import instance, seconds, unsigned
from gpufs.engine._binding import HANDLE, NUMBER, EngineError, Handle, check, failure, result_of
from gpufs.engine._engine import Engine, refusal_names
from gpufs.engine._in_use import InUse, close_or_defer
from gpufs.engine._native import ffi, lib
from gpufs.engine._streams import Stream, StreamLike, native_handle, number_address
from gpufs.engine._transfer import TransferError, TransferRequest, error_of

if TYPE_CHECKING:
    import ctypes

    from gpufs.engine._arrays import MemoryBuffer
    from gpufs.engine._streams import Late

_ALL: Final = (1 << 64) - 1
_PART_SECONDS: Final = 0.05  # of waiting, between which the interpreter can handle signals
MOST_AT_ONCE: Final = 64  # results


@dataclass(slots=True)
class Operation(TransferRequest):
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
        ``direction`` is neither "load" nor "store", or ``fastpath`` or ``sync`` is another word than those of
        :class:`Transfer`.
    """

    _: KW_ONLY
    stream: "Stream | StreamLike | None" = None
    count: "Late | ctypes.c_int64 | MemoryBuffer | None" = None
    cookie: object = None

    def _fill(self, target: Any, cookie: int) -> object:
        """Fill in the C interface's structure. Returns what must live until the operation has ended."""
        keep: list[object] = [self.stream]

        def number(name: str, cell: str, value: Any) -> Any:
            """Return the number, or 0 where it is late."""
            if value is None or isinstance(value, numbers.Integral):
                return value
            address, kept = number_address(name, value, writable=False)
            keep.append(kept)
            setattr(target, cell, ffi.cast("uint64_t *", address))
            return 0

        size = number("size", "bytes_cell", self.size)
        file_offset = number("file_offset", "file_offset_cell", self.file_offset)
        buffer_offset = number("buffer_offset", "buffer_offset_cell", self.buffer_offset)
        keep.append(self._fill_transfer(target.transfer, size, file_offset, buffer_offset))
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


class OperationQueue(InUse):
    """Operations that were submitted and not collected, each with what its collector wants to know."""

    def __init__(self, engine: Engine, capacity: int, end: Callable[[Any, Any], Any]) -> None:
        """``end`` makes the result of what was submitted with an operation, and the C interface's completion."""
        super().__init__()
        self.handle = int(result_of(HANDLE, lib.gpufs_queue_open, engine._handle, unsigned("capacity", capacity)))
        self.lock = threading.Lock()  # guards all below
        self.under_way: dict[int, tuple[Any, object]] = {}
        self.ended: list[Any] = []  # results
        self._end = end
        self._cookies = itertools.count(1)
        engine._users.add(self)

    def in_use(self) -> object:
        with self.lock:
            return list(self.under_way.values())

    def submit(self, operations: Sequence[tuple[Operation, Any]]) -> list[int]:
        """Submit operations, each with something to end: all of them, or none. Returns their numbers."""
        count = len(operations)
        array, ids, bad = ffi.new("gpufs_operation[]", count), ffi.new("uint64_t[]", count), ffi.new("uint64_t *")
        kept = {}
        for index, (operation, wanted) in enumerate(operations):
            cookie = next(self._cookies)
            kept[cookie] = (wanted, operation._fill(array[index], cookie))
        with self.lock:
            self.under_way |= kept
        status = lib.gpufs_queue_submit(self.handle, array, count, ids, bad)
        if status.error:
            error = failure(status)
            with self.lock:
                for cookie in kept:
                    self.under_way.pop(cookie, None)
            if count > 1 and error.errno != EAGAIN:
                error.add_note(f"operation {bad[0]} of {count}")
            raise error
        return list(ids)

    def collect(self, fewest: int, seconds: float, most: int = MOST_AT_ONCE) -> int:
        """Add at most so many results to ``ended``: wait so long for ``fewest``. Returns how many operations ended."""
        completions = ffi.new("gpufs_completion[]", most)
        wanted = completions, most, fewest, math.ceil(seconds * 1000)
        count = int(result_of(NUMBER, lib.gpufs_queue_collect, self.handle, *wanted))
        with self.lock:
            for index in range(count):
                # An operation that was cancelled while it was refused was never submitted.
                kept = self.under_way.pop(completions[index].cookie, None)
                if kept is not None:
                    self.ended.append(self._end(kept[0], completions[index]))
        return count

    def wait(self, handle: int) -> bool:
        """Wait a second at most until all operations have ended, and return whether they have, or the queue is gone."""
        try:
            self.collect(MOST_AT_ONCE, 1)
        except EngineError:
            return True
        with self.lock:
            self.ended.clear()
            return not self.under_way


# ---- batches ----


@dataclass(frozen=True, slots=True)
class OperationResult:
    """How an operation ended.

    Attributes
    ----------
    operation
        The operation.
    bytes
        Bytes moved from the start without a gap, also after a failure.
    error
        What went wrong, also after progress; errno ECANCELED if it was cancelled. None if nothing did.
    fastpath_bytes, fallback_bytes
        Bytes by path.
    hole_bytes
        Bytes that neither path moved: holes that stayed holes.
    refusals
        Why the fastpath did not take all of it.
    id
        The operation's number, as in traces.
    """

    operation: Operation
    bytes: int
    error: TransferError | None
    fastpath_bytes: int
    fallback_bytes: int
    hole_bytes: int
    refusals: tuple[str, ...]
    id: int

    @property
    def cookie(self) -> object:
        """The operation's."""
        return self.operation.cookie


def _result(operation: Operation, ended: Any) -> OperationResult:
    outcome = ended.outcome
    return OperationResult(
        operation=operation,
        bytes=outcome.prefix,
        error=error_of(outcome),
        fastpath_bytes=outcome.fastpath_bytes,
        fallback_bytes=outcome.fallback_bytes,
        hole_bytes=outcome.hole_bytes,
        refusals=tuple(refusal_names(outcome.refusals)),
        id=ended.id,
    )


class Batch(Handle):
    """Operations that are submitted together and collected as they end. Those without a stream run in parallel.

    Closing cancels running operations and waits for them. It raises EngineError ETIMEDOUT if some have not ended within
    10 s: they and their memory are freed when they end.

    Parameters
    ----------
    engine
        The engine of the operations.
    capacity
        The most operations that run or have not been collected; 0 for the engine's limit.
    """

    __slots__ = ("_queue", "engine")

    def __init__(self, engine: Engine, capacity: int = 0) -> None:
        instance("engine", Engine, engine)
        queue = OperationQueue(engine, capacity, _result)
        self.engine = engine
        self._queue = queue
        self._own(queue.handle, functools.partial(close_or_defer, queue.wait, queue))

    def submit(self, operations: Iterable[Operation]) -> None:
        """Submit all of them, or none.

        Raises
        ------
        EngineError
            EAGAIN if there is no space for all; other errors name the operation that cannot be submitted.
        TypeError, ValueError
            Memory or a number cannot be used.
        """
        wanted = list(operations)
        for operation in wanted:
            instance("operations", Operation, operation)
        if not wanted:
            return
        self._queue.submit([(operation, operation) for operation in wanted])

    def wait(self, fewest: int = 1, most: int | None = None, timeout: float | None = None) -> list[OperationResult]:
        """Return the results of operations that have ended, in the order in which they ended, each once.

        Waits until there are ``fewest``, or as many as are running, up to ``timeout`` seconds (None: without limit, 0:
        not at all). Returns at most ``most`` (None: all).
        """
        fewest = unsigned("fewest", fewest)
        most = _ALL if most is None else unsigned("most", most)
        fewest = min(fewest, most)
        deadline = time.monotonic() + seconds("timeout", timeout)
        queue = self._queue
        while True:
            with queue.lock:
                missing = fewest - len(queue.ended) if queue.under_way else 0
                space = min(most - len(queue.ended), MOST_AT_ONCE)
            left = deadline - time.monotonic()
            # In parts, so that the interpreter can handle signals.
            part = min(max(left, 0.0), _PART_SECONDS) if missing > 0 else 0.0
            count = queue.collect(max(missing, 0), part, space) if space > 0 else 0
            with queue.lock:
                enough = len(queue.ended) >= fewest or left <= 0 or not queue.under_way
                if (enough and count < MOST_AT_ONCE) or (not count and not self.under_way):
                    results, queue.ended = queue.ended[:most], queue.ended[most:]
                    return results

    @property
    def under_way(self) -> int:
        """The number of operations that have not ended."""
        return int(result_of(NUMBER, lib.gpufs_queue_under_way, self._handle))

    def cancel(self) -> None:
        """Ask all operations to stop. Their results are collected like those of others."""
        check(lib.gpufs_queue_cancel(self._handle, 0))
