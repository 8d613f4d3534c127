"""Passes the reports of a copy between machines on: to the user, to a program, or to another machine."""

from __future__ import annotations

import errno

from gpufs.copying.types import CopyError, CopyResult, Outcome, Pace, Report, error_class
from gpufs.exceptions import text_of
from gpufs.hosts.channel import HostChannel
from gpufs.hosts.messages import Deleted, FileResult, Lost, Moved, Notice, Plan, plain, shown


class OfHost(Report):
    """Passes on what a side here reports, with the host in lines for the user.

    ``has_source``: the host also has the files, and their names are HOST:PATH; otherwise it has the copies.
    """

    def __init__(self, report: Report, host: str, *, has_source: bool) -> None:
        self._report = report
        self._host = host
        self._has_source = has_source

    def planned(self, size: int) -> None:
        self._report.planned(size)

    def moved(self, source: str, count: int) -> None:
        self._report.moved(self._named(source), count)

    def noticed(self, text: str) -> None:
        self._report.noticed(f"{self._host}: {text}")

    def deleted(self, path: str) -> None:
        self._report.deleted(path if self._has_source else f"{self._host}:{path}")

    def file_ended(self, source: str, outcome: Outcome | None, hop: int = 0) -> None:
        shown = self._named(source)
        if isinstance(outcome, CopyResult):
            outcome = outcome._replace(source=shown)
        elif outcome is not None:
            outcome.filename = shown if source else outcome.filename2
            outcome.filename2 = outcome.filename2 if source else None
        self._report.file_ended(shown, outcome, hop)

    def _named(self, source: str) -> str:
        return f"{self._host}:{source}" if self._has_source else source


class Reports(Report):
    """Reports to the machine that has asked this one to upload."""

    def __init__(self, channel: HostChannel) -> None:
        self._channel = channel
        self._pace = Pace()

    def planned(self, size: int) -> None:
        self._channel.send(Plan(size, size))

    def moved(self, source: str, count: int) -> None:
        if self._pace.is_due():
            self._channel.send(Moved(shown(source), count))

    def noticed(self, text: str) -> None:
        self._channel.send(Notice(plain(text)))

    def deleted(self, path: str) -> None:
        self._channel.send(Deleted(shown(path)))

    def file_ended(self, source: str, outcome: Outcome | None, hop: int = 0) -> None:
        message = FileResult(0, b"", skipped=outcome is None, hop=hop, source=shown(source))
        if isinstance(outcome, CopyError):
            destination = outcome.filename2 if source else outcome.filename
            message.path = shown(str(destination or ""))
            message.error, message.text = outcome.errno or errno.EIO, plain(text_of(outcome))
        elif outcome is not None:
            message.path = shown(outcome.destination)
            message.size, message.seconds, message.paths = outcome.bytes, outcome.seconds, outcome.paths
            message.checksum = outcome.sha256 or ""
        self._channel.send(message)

    def host_lost(self, hop: int, error: CopyError) -> None:
        number, text = error.errno or errno.EIO, plain(text_of(error))
        self._channel.send(Lost(hop, number, text, shown(str(error.filename))))


def outcome_of(result: FileResult, source: str, destination: str | None, seconds: float) -> Outcome | None:
    """Return what became of a file on another machine; None if it was skipped."""
    if result.error:
        return error_class(result.error)(result.error, result.text, source, destination)
    if result.skipped:
        return None
    digest = result.checksum or None
    return CopyResult(source, destination or "", result.size, seconds, "node", result.paths, sha256=digest)
