"""Traces of what the engine's threads do: recorded natively, handed out as bytes that docs/traces.md describes."""

from types import TracebackType
from typing import Self

from gpufs.engine._arguments import unsigned
from gpufs.engine._binding import check
from gpufs.engine._native import ffi, lib

_LEAST = 16 << 10  # bytes, room for the longest record with its text


class Trace:
    """A trace of the whole process, from here to close() or the end of ``with``.

    EngineError EBUSY where somebody traces already.
    """

    __slots__ = ("_open",)

    def __init__(self) -> None:
        check(lib.gpufs_trace_start())
        self._open = True

    def read(self, size: int) -> bytes:
        """Records that have not been read yet, whole ones, at most ``size`` bytes; b"" where there are none now.

        Less than 16 KiB is too little: nothing is read then.
        """
        if unsigned("size", size) < _LEAST or not self._open:
            return b""
        room = ffi.new("char[]", size)
        count = ffi.new("uint64_t *")
        check(lib.gpufs_trace_read(room, size, count))
        data: bytes = ffi.buffer(room, count[0])[:]
        return data

    def close(self) -> None:
        """Ends it; what was not read is dropped. A second call does nothing."""
        if self._open:
            self._open = False
            check(lib.gpufs_trace_stop())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
