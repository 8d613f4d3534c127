"""Limits the time and memory for reading the header of one file: another user may have written it."""

from __future__ import annotations

import time
from typing import Final

from gpufs.formats import FormatError

# A file of 100,000 tensors takes about half of either in the slowest format, torch.save().
SECONDS: Final = 10.0
BYTES: Final = 256 << 20
# A tensor is kept as this, besides its name.
TENSOR_BYTES: Final = 1 << 10
_CHECKED_STEPS: Final = 256


# A number, a text or a container of JSON takes at least this, with its place in a container.
_ELEMENT_BYTES: Final = 64


def check_json(text: str) -> None:
    """Raise FormatError if JSON would take more memory than a header may. Each element has one of these characters."""
    elements = sum(map(text.count, ",[{"))
    if elements * _ELEMENT_BYTES > BYTES:
        raise FormatError(
            f"its header has {elements} elements of JSON: they need more than {BYTES >> 20} MiB of memory"
        )


class Budget:
    """The time and memory that one header may take. Time is that of this thread alone, not that of a slow disk."""

    def __init__(self) -> None:
        self._bytes = BYTES
        self._steps = 0
        self._end = time.thread_time() + SECONDS

    def take(self, count: int) -> None:
        """Take memory, and check the time now and then. FormatError if nothing is left."""
        self._bytes -= count
        if self._bytes < 0:
            raise FormatError(f"its header needs more than {BYTES >> 20} MiB of memory")
        self._steps += 1
        if self._steps % _CHECKED_STEPS == 0 and time.thread_time() > self._end:
            raise FormatError(f"its header takes more than {SECONDS:g} s to read")
