"""The progress bar of `gpufs cp`: loaded where one is drawn."""

from __future__ import annotations

import threading
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from gpufs.client._outcome import size_text


class Bar:
    """A progress bar on standard error, drawn by the main thread alone."""

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._lock = threading.Lock()  # guards the terminal

    def __enter__(self) -> Bar:
        self._progress = Progress(
            TextColumn("{task.fields[name]}", markup=False),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TextColumn("{task.fields[rate]}", markup=False),
            TextColumn("{task.fields[paths]}", markup=False),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            auto_refresh=False,
            transient=False,
        )
        self._task = self._progress.add_task("", total=None, name="", paths="", rate="")
        self._began = time.monotonic()
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            with self._lock:
                self._progress.stop()
                self._progress = None

    def show(self, moved: int, total: int, paths: dict[str, int], name: str) -> None:
        """Draws it."""
        if self._progress is None:
            return
        served = sum(paths.values())
        text = " ".join(f"{path} {100 * count // served}%" for path, count in paths.items()) if served else ""
        shown = name if len(name) <= 32 else name[:29] + "..."
        rate = f"{size_text(moved / max(time.monotonic() - self._began, 1e-9))}/s" if moved else ""
        with self._lock:
            self._progress.update(
                self._task,
                completed=moved,
                total=max(total, moved) or None,
                name=shown,
                paths=text,
                rate=rate,
                refresh=True,
            )

    def print(self, line: str, stream: Any) -> None:
        """A line above the bar."""
        if self._progress is None or not stream.isatty():
            print(line, file=stream, flush=True)
            return
        with self._lock:
            self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)
