"""What the command, or a program, sees of a copy between machines, which report by messages."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from typing import Protocol

from gpufs.copying.types import CopyError, CopyProgress, CopyResult, Outcome, Pace, Progress, error_class
from gpufs.hosts import messages


class Sink(Protocol):
    """Receives the reports of a copy, from any thread."""

    def planned(self, size: int) -> None:
        """``size`` bytes are to be copied."""

    def moved(self, source: str, count: int) -> None:
        """``count`` bytes of a source have been copied."""

    def noticed(self, text: str) -> None:
        """A line for the user."""

    def deleted(self, path: str) -> None:
        """Report names that have been removed, since the source does not have them."""

    def file_ended(self, source: str, outcome: Outcome | None, hop: int = 0) -> None:
        """Report the result of a source; None if it was skipped. ``hop``: the machine of a chain."""

    def host_lost(self, hop: int, error: CopyError) -> None:
        """The machine ``hop`` of a chain has failed, and those after it get nothing more."""


class Shown:
    """Passes reports on with the names of their machines. What is there is HOST:PATH.

    ``peer``: the machine that this one is connected to. ``source``: the machine that has the sources, "" for this one.
    ``ends``: those of the copies.
    """

    def __init__(self, sink: Sink, peer: str, source: str, ends: Sequence[str]) -> None:
        self._sink = sink
        self._peer = peer
        self._source = source
        self._ends = ends
        self._failed_hops: set[int] = set()

    def take(self, report: messages.Plan | messages.Report) -> None:
        sink = self._sink
        match report:
            case messages.Plan():
                sink.planned(report.size)
            case messages.Moved():
                sink.moved(_named(self._source, report.source), report.size)
            case messages.Notice():
                sink.noticed(f"{self._peer}: {report.text}")
            case messages.Deleted():
                sink.deleted(_named(self._ends[report.hop], report.path))
            case messages.Lost():
                sink.host_lost(report.hop, CopyError(report.error, report.text, os.fsdecode(report.path)))
            case messages.Failed():
                if report.path:  # else a source could not be read
                    self._failed_hops.add(report.hop)
                self._end_file(report, None)
            # A file is cancelled if its directory could not be created, which has been reported.
            case messages.FileResult() if report.error != errno.ECANCELED or report.hop not in self._failed_hops:
                source, end = _named(self._source, report.source), _named(self._ends[report.hop], report.path)
                digest = report.checksum or None
                result = CopyResult(source, end, report.size, report.seconds, "node", report.paths, sha256=digest)
                self._end_file(report, None if report.skipped else result)

    def _end_file(self, report: messages.FileResult | messages.Failed, outcome: Outcome | None) -> None:
        source = _named(self._source, report.source) if report.source else ""
        if report.error:
            text = report.text
            if self._source and report.error == errno.ENOENT and any(character in source for character in "*?["):
                text += " (patterns are not expanded there: name the files, or copy the directory by -r)"
            names = [source] if source else []
            names += [_named(self._ends[report.hop], report.path)] if report.path else []
            outcome = error_class(report.error)(report.error, text, *(names or [self._peer]))
        self._sink.file_ended(source, outcome, report.hop)


def _named(host: str, path: bytes) -> str:
    return f"{host}:{os.fsdecode(path)}" if host else os.fsdecode(path)


class Outcomes:
    """Takes what becomes of one file on each machine."""

    def __init__(self, count: int, progress: Progress, notice: Callable[[str], None] | None) -> None:
        self._progress = progress
        self._notice = notice
        self._size = 0
        self._pace = Pace()
        self.outcomes: list[Outcome | None] = [None] * count

    def planned(self, size: int) -> None:
        self._size = size

    def moved(self, source: str, count: int) -> None:
        if self._progress is not None and self._pace.is_due():
            machines = len(self.outcomes)
            moved, total = count * machines, max(count, self._size) * machines
            self._progress(CopyProgress(moved, total, {"pipe": moved}))

    def noticed(self, text: str) -> None:
        if self._notice is not None:
            self._notice(text)

    def deleted(self, path: str) -> None:
        pass  # one file is copied

    def file_ended(self, source: str, outcome: Outcome | None, hop: int = 0) -> None:
        self.outcomes[hop] = outcome

    def host_lost(self, hop: int, error: CopyError) -> None:
        for place in range(hop, len(self.outcomes)):
            self.outcomes[place] = self.outcomes[place] or error
