"""What the command, or a program, sees of a copy between machines, which report by messages."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import NamedTuple

from gpufs.copying.types import CopyError, CopyProgress, CopyResult, Outcome, Report, error_class
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


class Shown:
    """Passes the messages of a copy on to its report."""

    def __init__(self, report: Report, names: HostNames) -> None:
        self._report = report
        self._names = names
        self._failed_hops: set[int] = set()

    def take(self, message: messages.Plan | messages.Report) -> None:
        report, names = self._report, self._names
        match message:
            case messages.Plan():
                report.planned(message.size)
            case messages.Moved():
                if (show := report.reporter(names.of_source(message))) is not None:
                    show(CopyProgress(message.size, 0, {"pipe": message.size}))
            case messages.Notice():
                report.noticed(f"{names.peer}: {message.text}")
            case messages.Deleted():
                report.deleted(names.of_copy(message))
            case messages.Lost():
                report.host_lost(message.hop, CopyError(message.error, message.text, os.fsdecode(message.path)))
            case messages.Failed():
                if message.path:  # else a source could not be read
                    self._failed_hops.add(message.hop)
                self._finish(message)
            # A file is cancelled if its directory could not be created, which has been reported.
            case messages.FileResult() if message.error != errno.ECANCELED or message.hop not in self._failed_hops:
                self._finish(message)

    def _finish(self, message: messages.FileResult | messages.Failed) -> None:
        source, end = self._names.of_source(message), self._names.of_copy(message)
        if (outcome := self._names.outcome(message)) is None:
            self._report.finished(source, [], [], message.hop)
            self._report.skipped()
        else:
            self._report.finished(source or end, [end if source else ""], [outcome], message.hop)
