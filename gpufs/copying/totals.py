"""The progress of copies: how often it is reported, and how far several copies are together."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Final

from gpufs.copying.types import CopyError, CopyProgress, Outcome

# The progress of a copy is reported about ten times a second.
PROGRESS_SECONDS: Final = 0.1


class Pace:
    """Lets only so many reports of one copy through."""

    def __init__(self) -> None:
        self._last = 0.0

    def is_due(self) -> bool:
        """Return whether to report now; it counts as reported then."""
        now = time.monotonic()
        if now - self._last < PROGRESS_SECONDS:
            return False
        self._last = now
        return True


class Totals:
    """Counts the bytes of files that are copied at the same time. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total = 0
        self._done = 0  # bytes of the files that have ended
        self._paths: Counter[str] = Counter()  # the same, by path
        self._running: dict[str, CopyProgress] = {}  # by source

    def add(self, size: int) -> None:
        """``size`` more bytes are to be copied."""
        with self._lock:
            self._total += size

    def report(self, source: str, progress: CopyProgress) -> None:
        """Take the progress of one copy. While it is verified, it stays at what it has moved."""
        if progress.phase == "copy":
            with self._lock:
                self._running[source] = progress

    def end(self, source: str, outcomes: Sequence[Outcome]) -> None:
        """Take what became of the copies of a file."""
        with self._lock:
            self._running.pop(source, None)
            for outcome in outcomes:
                if isinstance(outcome, CopyError):
                    self._done += outcome.bytes_done
                else:
                    self._done += outcome.bytes
                    self._paths.update(outcome.paths)

    def progress(self) -> CopyProgress:
        """Return the progress of all copies."""
        with self._lock:
            paths = self._paths.copy()
            for running in self._running.values():
                paths.update(running.paths)
            moved = self._done + sum(running.moved for running in self._running.values())
            return CopyProgress(moved, max(self._total, moved), dict(paths))
