"""The progress line of `gpufs cp`."""

import shutil
import sys
import threading
import time
from typing import Any

from gpufs.cli._output import printable
from gpufs.units import bytes_text, rate_text


class ProgressLine:
    """A progress line on standard error. Lines are printed above it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._began = time.monotonic()

    def show(self, moved: int, total: int, name: str) -> None:
        """Draws the line again."""
        rate = rate_text(moved / max(time.monotonic() - self._began, 1e-9))
        line = f"{bytes_text(moved)} of {bytes_text(total)}  {rate}  {printable(name)}"
        self._write(f"\r\x1b[K{line[: shutil.get_terminal_size().columns - 1]}")

    def print(self, line: str, stream: Any) -> None:
        """Prints a line above the progress."""
        self._write("\r\x1b[K")
        with self._lock:
            print(line, file=stream, flush=True)

    def end(self) -> None:
        """Leaves the line as it is and starts the next one."""
        self._write("\n")

    def _write(self, text: str) -> None:
        try:
            with self._lock:
                print(text, end="", file=sys.stderr, flush=True)
        except OSError:
            pass  # nobody watches
