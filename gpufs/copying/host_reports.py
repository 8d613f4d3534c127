"""What the command, or a program, sees of a copy between machines, which report by messages."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

from gpufs.copying.types import CopyError, CopyProgress, CopyResult, Report, error_class
from gpufs.hosts import messages


class HostReports:
    """Passes the messages of a copy on to its report. What is on another machine is shown as HOST:PATH.

    ``peer``: the machine that this one is connected to. ``source`` has the sources, and ``ends`` have the copies; "" is
    this machine.
    """

    def __init__(self, report: Report, peer: str, source: str, ends: Sequence[str]) -> None:
        self._report = report
        self._peer = peer
        self._source = source
        self._ends = ends
        self._failed_hops: set[int] = set()

    def take(self, message: messages.Plan | messages.Report) -> None:
        report = self._report
        match message:
            case messages.Plan():
                report.planned(message.size)
            case messages.Moved():
                if (show := report.reporter(_named(self._source, message.source))) is not None:
                    show(CopyProgress(message.size, 0, {"pipe": message.size}))
            case messages.Notice():
                report.noticed(f"{self._peer}: {message.text}")
            case messages.Deleted():
                report.deleted(_named(self._ends[message.hop], message.path))
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
        source, end = _named(self._source, message.source), _named(self._ends[message.hop], message.path)
        if message.error:
            text = message.text
            if self._source and message.error == errno.ENOENT and any(character in source for character in "*?["):
                text += " (patterns are not expanded there: name the files, or copy the directory)"
            names = [name for name in (source, end) if name] or [self._peer]
            error = error_class(message.error)(message.error, text, *names)
            self._report.finished(source or end, [end if source else ""], [error], message.hop)
        elif isinstance(message, messages.Failed) or message.skipped:
            self._report.finished(source, [], [], message.hop)
            self._report.skipped()
        else:
            size, digest = message.size, message.checksum or None
            result = CopyResult(source, end, size, message.seconds, "node", message.paths, sha256=digest)
            self._report.finished(source, [end], [result], message.hop)


def _named(host: str, path: bytes) -> str:
    return f"{host}:{os.fsdecode(path)}" if host and path else os.fsdecode(path)
