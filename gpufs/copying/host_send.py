"""The side of a copy between two machines that sends files."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial

from gpufs.copying import entries
from gpufs.copying.checksums import RunningChecksum, sha256_of
from gpufs.copying.entries import Entry, OpenFile, data_bytes
from gpufs.copying.host_memory import attached_in_place
from gpufs.copying.identity import settle
from gpufs.copying.job import CopyContext
from gpufs.copying.patterns import Selection
from gpufs.copying.walk import Fail, Step, Steps, walk_files
from gpufs.exceptions import text_of
from gpufs.hosts import messages
from gpufs.hosts.channel import ChannelError, HostChannel, HostProtocolError
from gpufs.hosts.messages import FileAttributes, HostRequest, plain, shown
from gpufs.hosts.outlet import Outlet


@dataclass(slots=True)
class Sent:
    """A file that not all machines have answered. ``waiting``: those of the chain whose FileResult has not come."""

    path: str
    size: int
    began: float
    waiting: set[int]
    checksum: str | None = None  # once it has been sent to its end


@dataclass(eq=False)
class Sender:
    """Sends files."""

    channel: HostChannel  # to the receiver
    context: CopyContext
    sources: Sequence[Entry]
    request: HostRequest
    report: Callable[[messages.Plan | messages.Report], None]  # called from two threads

    def __post_init__(self) -> None:
        self._mounts = self.context.mounts()
        self._number = 0
        self._refused = -1  # the last file that the receiver does not want
        self._pending: dict[int, Sent] = {}
        self._hops = 1 + len(self.request.forward)  # machines of the chain that are alive
        self._outlet = Outlet(self.channel, lambda text: self.report(messages.Notice(text)))

    def run(self) -> None:
        """Send everything, and report what becomes of it. Errors of the connection are raised."""
        self._outlet.run(self._write, self._take)
        for sent in self._pending.values():
            if not sent.waiting.isdisjoint(range(self._hops)):
                raise HostProtocolError(f"no result of {sent.path}")

    def _plan(self) -> messages.Plan:
        size = data = 0
        sizes: dict[int, tuple[int, int]] = {}
        for source in self.sources:
            for step in self._walk(source, lambda path, error: None):
                if step.kind == "file" and step.status is not None:
                    size += step.size
                    if need := data_bytes(step.status, step.size):
                        data += need
                        count, total = sizes.get(bits := (need - 1).bit_length(), (0, 0))
                        sizes[bits] = count + 1, total + need
        return messages.Plan(size, data, sizes)

    def _write(self) -> None:
        plan = self._plan()
        self.report(plan)
        self._outlet.send_plan(plan)
        for number, source in enumerate(self.sources):
            self._send_tree(number, source)
        self.channel.send(messages.FilesDone())

    def _send_tree(self, number: int, source: Entry) -> None:
        with closing(self._walk(source, self._fail)) as steps:
            for step in steps:
                try:
                    self._send(number, step)
                except OSError as error:
                    if isinstance(error, ChannelError):
                        raise
                    self._fail(step.path, error)

    def _fail(self, path: str, error: OSError) -> None:
        failed = messages.Failed.of(error, "", source=shown(path))
        self.report(failed)
        self.channel.send(failed)

    def _report_moved(self, path: str, count: int) -> None:
        self.report(messages.Moved(shown(path), count))

    def _walk(self, source: Entry, fail: Fail) -> Steps:
        request = self.request
        steps = walk_files(source, fail, recursive=request.recursive, dereference=request.dereference)
        return Selection(*request.patterns).of(steps)

    def _take(self, report: messages.Report) -> None:
        if report.hop >= self._hops or (isinstance(report, messages.Deleted) and not self.request.delete):
            raise HostProtocolError("no result")
        if isinstance(report, messages.FileResult):
            self._take_result(report)
        elif isinstance(report, messages.Lost):
            self._lose(report.hop)
        self.report(report)

    def _take_result(self, result: messages.FileResult) -> None:
        sent = self._pending.get(result.number)
        if sent is None or result.hop not in sent.waiting:
            raise HostProtocolError("the result of a file that was not sent")
        if result.skipped and not (self.request.no_clobber or self.request.update):
            raise HostProtocolError("a file was skipped")
        result.source, result.seconds = shown(sent.path), time.monotonic() - sent.began
        if not (result.error or result.skipped) and (result.size, result.checksum) != (sent.size, sent.checksum):
            sides = [f"{side.size} bytes {side.checksum or ''}".strip() for side in (result, sent)]
            result.error, result.text = errno.EIO, "the copy differs: {} there, {} were sent".format(*sides)
        sent.waiting.discard(result.hop)
        self._forget_if_answered(result.number, sent)

    def _lose(self, hop: int) -> None:
        self._hops = hop
        for number, sent in list(self._pending.items()):
            sent.waiting.intersection_update(range(hop))
            self._forget_if_answered(number, sent)

    def _forget_if_answered(self, number: int, sent: Sent) -> None:
        if not sent.waiting:
            del self._pending[number]
            self._refused = number  # if it has not been sent to its end, nobody wants the rest

    # ---- files ----

    def _send(self, source: int, step: Step) -> None:
        entry, status = step.source, step.status
        if step.kind == "leave":
            self.channel.send(messages.Leave())
            return
        assert isinstance(entry, Entry)
        assert status is not None
        name, path = os.fsencode(os.path.basename(entry.name)), shown(entry.path)
        found = messages.Found(source, name, path, FileAttributes.of(status), status.st_dev in self._mounts)
        if step.kind == "enter":
            self.channel.send(found)
        elif stat.S_ISLNK(status.st_mode):
            found.target = os.fsencode(os.readlink(entry.name, dir_fd=entry.directory))
            self.channel.send(found)
        else:
            with entries.open_source(entry) as opened:
                self._send_file(found, opened)

    def _send_file(self, found: messages.Found, opened: OpenFile) -> None:
        """Send a file. ``found``: what is known of it before it is opened."""
        number, self._number = self._number, self._number + 1
        status, size = opened.status, entries.size_of(opened)
        sent = self._pending[number] = Sent(opened.entry.path, size, time.monotonic(), set(range(self._hops)))
        found.attributes, found.on_mount = FileAttributes.of(status), status.st_dev in self._mounts
        found.number, found.size, found.data = number, size, data_bytes(status, size)
        if self.request.checksum:
            found.checksum = sha256_of(opened.fd, lambda: False)
        if self.request.update:
            settle(status)
            if self.context.is_written(status):  # now, and until a program ends that changes no times
                found.attributes.st_mtime_ns = time.time_ns()
        self.channel.send(found)
        holes = stat.S_ISREG(status.st_mode) and found.data < size
        end = self._send_content(number, opened, size, holes=holes)
        self._outlet.await_reads()
        sent.checksum = None if end.error else end.checksum
        self.channel.send(end)

    def _send_content(self, number: int, opened: OpenFile, size: int, *, holes: bool) -> messages.End:
        moved = partial(self._report_moved, opened.entry.path)
        checksum = RunningChecksum(verify=self.request.verify)
        done = 0
        data_end = 0 if holes else size
        # With --verify all bytes pass through this process.
        in_place = opened.status.st_dev in self._mounts and not holes and not self.request.verify
        self._outlet.begin()
        while self._refused != number:
            if in_place and self._outlet.should_write(done):
                in_place = False
                done = self._write_in_place(opened, size, done, moved)
            try:
                if done == size:
                    if not size and os.pread(opened.fd, 1, 0):
                        return messages.End(error=errno.EINVAL, text="has bytes, and its size says that it has none")
                    return messages.End(checksum.text)
                if done == data_end:
                    start, data_end = (min(end, size) for end in entries.next_data(opened.fd, done))
                    if start > done:
                        self.channel.send(messages.Hole(start - done))
                        checksum.skip(start - done)
                        done = start
                        continue
                buffer = self._outlet.buffer()
                count = os.preadv(opened.fd, [buffer[: data_end - done]], done)
            except ChannelError:
                raise
            except OSError as error:
                return messages.End(error=error.errno or errno.EIO, text=plain(text_of(error)))
            if not count:
                return messages.End(error=errno.EBUSY, text="became smaller during the copy")
            checksum.update(buffer[:count])
            self._outlet.send(count)
            done += count
            moved(done)
        return messages.End(error=errno.ECANCELED)

    def _write_in_place(self, opened: OpenFile, size: int, offset: int, moved: Callable[[int], None]) -> int:
        """Write a file's memory into that of the receiver's file, and return the offset that is reached."""
        with attached_in_place(opened.fd, size, "r") as region:
            if region is None:
                return offset
            return self._outlet.write(region, offset, moved)
