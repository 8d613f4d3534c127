"""Reports to programs that know nothing of gpufs how they loaded: a table, or a warning if most was copied."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from typing import Any

from gpufs.modes import REPORT_VARIABLE
from gpufs.torch._report import LoadReport, loading

_POLL_SECONDS = 1.0
_REMEDIES = {  # and what to say about the files
    "dtype": ("have", 'convert the checkpoint, or load it with dtype="auto"'),
    "device": ("are on", "copy the files to that device's directory of the mount"),
}


class _Program:
    """A program that opens files in place. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None  # prints the table
        self._snapshot: LoadReport | None = None  # of a table that is not printed yet
        self._process = 0

    def opened(self, file: Any) -> None:
        """Note that the program has opened a file."""
        with self._lock:
            loading.open_files.add(file)
            if REPORT_VARIABLE not in os.environ:
                return
            if self._process != os.getpid():  # also in a forked child, which has no threads of its parent
                self._process = os.getpid()
                self._thread = None
                atexit.register(self._print_at_exit)
            if self._thread is None:
                self._thread = threading.Thread(target=self._print_when_over, name="gpufs report", daemon=True)
                self._thread.start()

    def closed(self, file: Any) -> None:
        """Note that it has closed the file. With the last one it has loaded all, as far as libraries show it."""
        with self._lock:
            loading.open_files.discard(file)
            if loading.open_files:
                return
            report = loading.report()
            self._snapshot = report
        if report is not None and REPORT_VARIABLE not in os.environ:
            _warn(report)

    def _print_when_over(self) -> None:
        while (left := loading.seconds_left()) > 0:
            time.sleep(min(left, _POLL_SECONDS))  # a file that is closed makes it shorter
        with self._lock:
            self._thread = self._snapshot = None
            _print(loading.report())

    def _print_at_exit(self) -> None:
        """Print a table that is still due. What has been freed since the loading ended counts as it was then."""
        with self._lock:
            if self._thread is not None and self._process == os.getpid():
                self._thread = None
                _print(self._snapshot or loading.report())


def _print(report: LoadReport | None) -> None:
    if report is not None and sys.stderr is not None:
        print(f"gpufs: process {os.getpid()} has loaded\n{report}", file=sys.stderr, flush=True)


def _warn(report: LoadReport) -> None:
    """Warn once for each loading in which a dtype or a device has had most bytes copied."""
    copied = report.copied
    total = report.in_place.nbytes + sum(amount.nbytes for amount in copied.values())
    for reason, (verb, remedy) in _REMEDIES.items():
        share = copied[reason].nbytes / total if reason in copied else 0
        if share > 1 / 2 and not loading.warned:
            loading.warned = True
            asked, found = next(c.changes[reason] for c in loading.counts() if reason in c.changes)
            what = f"{asked} was asked for and the files {verb} {found}"
            logging.getLogger("gpufs").warning(
                "%.0f %% of the weights are copied, because %s: %s", 100 * share, what, remedy
            )


program = _Program()
