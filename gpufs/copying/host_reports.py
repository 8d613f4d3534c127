"""What the command, or a program, sees of a copy between machines, which report by messages."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

from gpufs.client._cancellation import Cancellation
from gpufs.copying.types import CopyError, CopyProgress, CopyResult, Outcome, Pace, Progress, TreeReport, error_class
from gpufs.hosts import messages


class HostNames(NamedTuple):
    """The machines of a copy, "" for this one. What is on another one is shown as HOST:PATH.

    ``peer``: the machine that this one is connected to. ``source`` has the sources, and ``ends`` have the copies.
    """

    peer: str
    source: str
    ends: Sequence[str]

    def of_source(self, report: messages.FileResult | messages.Failed | messages.Moved) -> str:
        return _named(self.source, report.source)

    def of_copy(self, report: messages.FileResult | messages.Failed | messages.Deleted) -> str:
        return _named(self.ends[report.hop], report.path)

    def outcome(self, report: messages.FileResult | messages.Failed) -> Outcome | None:
        """Return what became of a file, None if it was skipped."""
        source, end = self.of_source(report), self.of_copy(report)
        if report.error:
            text = report.text
            if self.source and report.error == errno.ENOENT and any(character in source for character in "*?["):
                text += " (patterns are not expanded there: name the files, or copy the directory by -r)"
            names = [name for name in (source, end) if name] or [self.peer]
            return error_class(report.error)(report.error, text, *names)
        if isinstance(report, messages.Failed) or report.skipped:
            return None
        digest = report.checksum or None
        return CopyResult(source, end, report.size, report.seconds, "node", report.paths, sha256=digest)


def _named(host: str, path: bytes) -> str:
    return f"{host}:{os.fsdecode(path)}" if host and path else os.fsdecode(path)


def _lost(report: messages.Lost) -> CopyError:
    return CopyError(report.error, report.text, os.fsdecode(report.path))


class Shown:
    """Passes the messages of a copy on to a report of copies. ``cancel``: the user has ended it."""

    def __init__(self, report: TreeReport, names: HostNames, cancel: Cancellation) -> None:
        self._report = report
        self._names = names
        self._cancel = cancel
        self._failed_hops: set[int] = set()

    def take(self, report: messages.Plan | messages.Report) -> None:
        shown, names = self._report, self._names
        match report:
            case messages.Plan():
                shown.planned(report.size)
            case messages.Moved():
                if (progress := shown.reporter(names.of_source(report))) is not None:
                    progress(CopyProgress(report.size, 0, {"pipe": report.size}))
            case messages.Notice():
                shown.noticed(f"{names.peer}: {report.text}")
            case messages.Deleted():
                shown.deleted(names.of_copy(report))
            case messages.Lost() if not self._cancel.cancelled:
                shown.failed(os.fsdecode(report.path), None, _lost(report))
            case messages.Failed():
                if report.path:  # else a source could not be read
                    self._failed_hops.add(report.hop)
                self._end(report)
            # A file is cancelled if its directory could not be created, which has been reported.
            case messages.FileResult() if report.error != errno.ECANCELED or report.hop not in self._failed_hops:
                self._end(report)

    def _end(self, report: messages.FileResult | messages.Failed) -> None:
        source, outcome = self._names.of_source(report), self._names.outcome(report)
        if isinstance(outcome, CopyResult):
            if report.hop:  # the plan is of the first machine
                self._report.planned(outcome.bytes)
            self._report.finished(source, [outcome.destination], [outcome])
            return
        self._report.finished(source, [], [])  # for the progress
        if outcome is None:
            self._report.skipped()
        else:
            self._report.failed(str(outcome.filename), outcome.filename2, outcome)


class Outcomes:
    """Takes what becomes of one file on each machine."""

    def __init__(self, count: int, progress: Progress, notice: Callable[[str], None] | None) -> None:
        self._progress = progress
        self._notice = notice
        self._size = 0
        self._pace = Pace()
        self.outcomes: list[Outcome | None] = [None] * count

    def take(self, names: HostNames, report: messages.Plan | messages.Report) -> None:
        match report:
            case messages.Plan():
                self._size = report.size
            case messages.Moved() if self._progress is not None and self._pace.is_due():
                count = len(self.outcomes)
                moved, total = report.size * count, max(report.size, self._size) * count
                self._progress(CopyProgress(moved, total, {"pipe": moved}))
            case messages.Notice() if self._notice is not None:
                self._notice(f"{names.peer}: {report.text}")
            case messages.FileResult() | messages.Failed():
                self.outcomes[report.hop] = names.outcome(report)
            case messages.Lost():
                self.lose(report.hop, _lost(report))

    def lose(self, hop: int, error: CopyError) -> None:
        """Take that a machine of a chain, and those after it, get nothing more."""
        for place in range(hop, len(self.outcomes)):
            self.outcomes[place] = self.outcomes[place] or error
