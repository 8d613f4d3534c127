"""Measures where the time of a load goes, for the server's log."""

from __future__ import annotations

import time


class Phases:
    """The phases of one load. Each begins where the one before it ends, the first when this object is made."""

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self._seconds: dict[str, float] = {}

    def end(self, name: str) -> None:
        """Note the end of a phase. Phases of one name add up."""
        now = time.perf_counter()
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._last
        self._last = now

    def __str__(self) -> str:
        """Return a text such as "0.21 seconds (attach 0.02, build the model 0.19)"."""
        parts = ", ".join(f"{name} {seconds:.3f}" for name, seconds in self._seconds.items())
        return f"{time.perf_counter() - self._start:.3f} seconds" + (f" ({parts})" if parts else "")
