"""Limits the time and memory for reading the header of one file: another user may have written it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Final, Self

from gpufs.formats import FormatError

SECONDS: Final = 10.0
BYTES: Final = 256 << 20
# What the clock is read for: so many steps, or a step that allocates so much.
_CHECKED_STEPS: Final = 32
_LARGE_STEP: Final = 1 << 20
# What JSON takes: an element with its place in a container, and a pair of an object beside that.
_ELEMENT_BYTES: Final = 64
_PAIR_BYTES: Final = 256


class BudgetExceeded(FormatError):
    """The header takes more time or memory than it may."""


class Budget:
    """The time and memory that one header may take. Time is that of this thread alone, not that of a slow disk."""

    def __init__(self) -> None:
        self._bytes = BYTES
        self._steps = 0
        self._end = time.thread_time() + SECONDS

    def take(self, count: int) -> None:
        """Take memory before it is allocated, and check the time now and then. FormatError if nothing is left."""
        self._bytes -= count
        if self._bytes < 0:
            raise BudgetExceeded(f"listing its tensors takes more than {BYTES >> 20} MiB of memory")
        self._steps += 1
        if (self._steps % _CHECKED_STEPS == 0 or count >= _LARGE_STEP) and time.thread_time() > self._end:
            raise BudgetExceeded(f"listing its tensors takes more than {SECONDS:g} s")

    def take_json(self, data: bytes) -> None:
        """Take what JSON needs: its text and its texts, and the elements. Each of these has one of the characters."""
        plain = data.isascii() and b"\\u" not in data
        self.take((2 if plain else 8) * len(data))
        self.take(_ELEMENT_BYTES * sum(map(data.count, (b",", b"[", b"{"))) + _PAIR_BYTES * data.count(b":"))


class BoundedFile(Budget):
    """A file whose header is read. What is read is taken from the budget."""

    def __init__(self, size: int, read: Callable[[int, int], bytes]) -> None:
        """``read``: returns bytes of the file, from an offset and their number."""
        super().__init__()
        self.size = size
        self._read = read

    @classmethod
    def of(cls, fd: int) -> Self:
        """Read an open file."""
        return cls(os.fstat(fd).st_size, lambda offset, count: os.pread(fd, count, offset))

    def read(self, offset: int, count: int) -> bytes:
        """Return ``count`` bytes from ``offset`` on. FormatError if the file does not have them all."""
        self.take(count)
        data = self._read(offset, count) if 0 <= offset <= self.size - count else b""
        if len(data) < count:
            raise FormatError(f"its header has bytes {offset} to {offset + count}, and the file {self.size}")
        return data

    def beginning(self, count: int) -> bytes:
        """Return the first ``count`` bytes, or all of a smaller file."""
        return self.read(0, min(count, self.size))
