"""Batches: operations that are submitted together and collected as they end."""

import functools
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from gpufs.engine._arguments import instance, seconds, unsigned
from gpufs.engine._binding import Handle, check
from gpufs.engine._engine import Engine, refusal_names
from gpufs.engine._in_use import close_or_leave
from gpufs.engine._native import ffi, lib
from gpufs.engine._transfer import MOST_AT_ONCE, Operation, OperationQueue, TransferError, error_of

_ALL: Final = (1 << 64) - 1
_PART_SECONDS: Final = 0.05  # of waiting, between which the interpreter can handle signals


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
        self._own(queue.handle, functools.partial(close_or_leave, queue.wait, queue))

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
                room = min(most - len(queue.ended), MOST_AT_ONCE)
            left = deadline - time.monotonic()
            # In parts, so that the interpreter can handle signals.
            part = min(max(left, 0.0), _PART_SECONDS) if missing > 0 else 0.0
            count = queue.collect(max(missing, 0), part, room) if room > 0 else 0
            with queue.lock:
                enough = len(queue.ended) >= fewest or left <= 0 or not queue.under_way
                if (enough and count < MOST_AT_ONCE) or (not count and not self.under_way):
                    results, queue.ended = queue.ended[:most], queue.ended[most:]
                    return results

    @property
    def under_way(self) -> int:
        """The number of operations that have not ended."""
        count = ffi.new("uint64_t *")
        check(lib.gpufs_queue_under_way(self._handle, count))
        return int(count[0])

    def cancel(self) -> None:
        """Ask all operations to stop. Their results are collected like those of others."""
        check(lib.gpufs_queue_cancel(self._handle, 0))
