"""Memory that the C library keeps after many files have gone: given back to the system.

A file costs about a kilobyte of ordinary memory, in objects that end up beside others which live on, so that malloc
returns next to nothing of it by itself: a daemon that once had 60,000 files stayed three times as large. Asking it
costs milliseconds, and the pages are made anew when they are needed again; so it is asked once, when files have gone.
"""

import ctypes
from collections.abc import Callable
from typing import Final

# Files that must have gone: what fewer leave is not worth the pages that are made anew.
_ENOUGH: Final = 1000

_libc = ctypes.CDLL(None)


def release() -> None:
    """Gives back what malloc holds free, in all of its arenas, where the C library has a call for it. Any thread."""
    trim = getattr(_libc, "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


class Shrinking:
    """Knows from looks at ``gone``, files that are no more, when there is memory to give back. For one thread."""

    def __init__(self, gone: Callable[[], int]) -> None:
        self._gone = gone
        self._released = self._last = gone()

    def due(self) -> bool:
        """One look. True where at least a thousand files have gone since the last True, and not as many are going."""
        now = self._gone()
        going, self._last = now - self._last >= _ENOUGH, now
        if going or now - self._released < _ENOUGH:
            return False
        self._released = now
        return True
