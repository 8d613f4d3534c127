"""Batches: operations that are submitted together and collected as they end."""

import errno
import functools
import itertools
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from gpufs.engine._arguments import instance, seconds, unsigned
from gpufs.engine._binding import Handle, check, failure
from gpufs.engine._engine import Engine
from gpufs.engine._in_use import close_or_leave
from gpufs.engine._native import ffi, lib
from gpufs.engine._operations import COLLECTED_AT_A_TIME, Operation, error_of
from gpufs.engine._transfer import TransferError, refusal_names

_ALL: Final = (1 << 64) - 1
_PART_SECONDS: Final = 0.05  # of waiting, between which the interpreter can handle signals


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
    return OperationResult(
        operation=operation,
        bytes=ended.bytes,
        error=error_of(ended) if ended.error else None,
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
        """Forget the operations that have ended. Returns whether none is left, or the batch is gone."""
        found = ffi.new("gpufs_completion[]", COLLECTED_AT_A_TIME)
        count = ffi.new("uint64_t *")
        while True:
            if lib.gpufs_queue_collect(handle, found, COLLECTED_AT_A_TIME, 0, 0, count).error:
                return True
            with self.lock:
                for index in range(count[0]):
                    self.under_way.pop(found[index].cookie, None)
                if count[0] < COLLECTED_AT_A_TIME:
                    return not self.under_way


class Batch(Handle):
    """Operations that are submitted together and collected as they end. Those without a stream run in parallel.

    ``capacity`` limits the operations that run or have not been collected. Closing cancels running operations and waits
    for them. It raises EngineError ETIMEDOUT if some have not ended within 10 s: they and their memory are freed when
    they end.
    """

    __slots__ = ("_cookies", "_ended", "_submitted", "engine")

    def __init__(self, engine: Engine, capacity: int = 0) -> None:
        instance("engine", Engine, engine)
        handle = ffi.new("gpufs_handle *")
        check(lib.gpufs_queue_open(engine._handle, unsigned("capacity", capacity), handle))
        self.engine = engine
        self._cookies = itertools.count(1)
        self._submitted = _Submitted()
        self._ended: list[OperationResult] = []  # collected, and not returned yet; guarded by that lock
        engine._users.add(self._submitted)
        close, event_fd = lib.gpufs_queue_close, lib.gpufs_queue_event_fd
        self._own(handle[0], functools.partial(close_or_leave, close, event_fd, self._submitted.over, self._submitted))

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
        """Return the results of operations that have ended, in the order in which they ended, each once.

        Waits until there are ``fewest``, or as many as are running, up to ``timeout`` seconds (None: without limit, 0:
        not at all). Returns at most ``most`` (None: all).
        """
        fewest = unsigned("fewest", fewest)
        most = _ALL if most is None else unsigned("most", most)
        left = seconds("timeout", timeout)
        fewest = min(fewest, most)
        while True:
            with self._submitted.lock:
                missing = fewest - len(self._ended)
                room = min(most - len(self._ended), len(self._submitted.under_way))
            # In parts, so that the interpreter can handle signals.
            part = min(left, _PART_SECONDS) if missing > 0 else 0.0
            count = self._collect(room, max(missing, 0), part) if room > 0 else 0
            left -= part
            with self._submitted.lock:
                enough = len(self._ended) >= fewest or left <= 0 or not self._submitted.under_way
                if enough or (not count and not self.under_way):
                    results, self._ended = self._ended[:most], self._ended[most:]
                    return results

    def _collect(self, room: int, fewest: int, seconds: float) -> int:
        """Take at most ``room`` results from the engine, and return how many there were."""
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
        """The number of operations that have not ended."""
        count = ffi.new("uint64_t[2]")
        check(lib.gpufs_queue_counts(self._handle, count, count + 1))
        return int(count[0])

    def cancel(self) -> None:
        """Ask all operations to stop. Their results are collected like those of others."""
        check(lib.gpufs_queue_cancel(self._handle, 0))
