"""How far several copies are together."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

from gpufs.copying.types import CopyError, CopyProgress, Outcome


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
