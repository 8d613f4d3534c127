"""Passes the reports of a copy between machines on: to the user, to a program, or to another machine."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Protocol

from gpufs.copying.types import CopyError, CopyProgress, CopyResult, Outcome, Pace, Progress, error_class
from gpufs.exceptions import text_of
from gpufs.hosts.channel import HostChannel
from gpufs.hosts.messages import Deleted, FileResult, Lost, Moved, Notice, Plan, plain, shown


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


class Silent:
    """Reports nothing: the other side has the results."""

    def planned(self, *_: object, **__: object) -> None:
        pass

    moved = noticed = deleted = file_ended = host_lost = planned


class Noted:
    """Passes on what a sender here reports, with the host in lines for the user."""

    def __init__(self, sink: Sink, host: str) -> None:
        self._sink = sink
        self._host = host
        self.planned, self.moved = sink.planned, sink.moved
        self.file_ended, self.host_lost = sink.file_ended, sink.host_lost

    def noticed(self, text: str) -> None:
        self._sink.noticed(f"{self._host}: {text}")

    def deleted(self, path: str) -> None:
        self._sink.deleted(f"{self._host}:{path}")


class Shown:
    """Passes on what a receiver here, or a machine that uploads for this one, reports: with sources named HOST:PATH."""

    def __init__(self, sink: Sink, host: str) -> None:
        self._sink = sink
        self._host = host
        self.planned, self.host_lost, self.deleted = sink.planned, sink.host_lost, sink.deleted

    def moved(self, source: str, count: int) -> None:
        self._sink.moved(f"{self._host}:{source}", count)

    def noticed(self, text: str) -> None:
        self._sink.noticed(f"{self._host}: {text}")

    def file_ended(self, source: str, outcome: Outcome | None, hop: int = 0) -> None:
        shown = f"{self._host}:{source}"
        if isinstance(outcome, CopyResult):
            outcome = outcome._replace(source=shown)
        elif outcome is not None:
            outcome.filename = shown if source else outcome.filename2
            outcome.filename2 = outcome.filename2 if source else None
        self._sink.file_ended(shown, outcome, hop)


class Reports:
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


def show(message: FileResult, sink: Sink) -> None:
    """Report what another machine has sent by Reports."""
    source, destination = os.fsdecode(message.source), os.fsdecode(message.path)
    sink.file_ended(source, outcome_of(message, source, destination or None, message.seconds), message.hop)


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
