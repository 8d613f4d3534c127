"""Traces of what the engine's threads do. docs/internals/trace-records.md describes the records."""

import os
from types import TracebackType
from typing import Self

from gpufs.engine._arguments import unsigned
from gpufs.engine._binding import check
from gpufs.engine._native import ffi, lib


class Trace:
    """Records the whole process from its creation to close(), or the end of ``with``.

    Raises
    ------
    EngineError
        EBUSY if a trace is being recorded already.
    """

    __slots__ = ("_open", "_owner")

    def __init__(self) -> None:
        check(lib.gpufs_trace_start())
        self._open = True
        self._owner = os.getpid()

    def read(self, size: int) -> bytes:
        """Take records out, those of each thread in order.

        Parameters
        ----------
        size
            The most bytes to return.

        Returns
        -------
        bytes
            The next part of the stream, a multiple of 64 bytes. Empty if there are no records now.
        """
        if not self._open:
            return b""
        room = ffi.new("char[]", unsigned("size", size))
        count = ffi.new("uint64_t *")
        check(lib.gpufs_trace_read(room, size, count))
        data: bytes = ffi.buffer(room, count[0])[:]
        return data

    def close(self) -> None:
        """End the recording and drop what has not been read. Does nothing if it has ended, and in a forked child."""
        if self._open and self._owner == os.getpid():
            self._open = False
            check(lib.gpufs_trace_stop())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
