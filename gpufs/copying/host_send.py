"""The side of a copy between two machines that sends files."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import KW_ONLY, dataclass

from gpufs.copying import entries
from gpufs.copying.checksums import RunningChecksum, sha256_of
from gpufs.copying.entries import Entry, OpenFile, data_bytes
from gpufs.copying.host_memory import attached_in_place
from gpufs.copying.identity import settle
from gpufs.copying.job import CopyContext
from gpufs.copying.patterns import Selection
from gpufs.copying.types import Report
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
    """Sends files. run() and read_results() need a thread each."""

    channel: HostChannel  # to the receiver
    context: CopyContext
    sources: Sequence[Entry]
    request: HostRequest
    fail: Fail  # takes what cannot be sent, of which the receiver hears, too
    moved: Callable[[str, int], None]  # called with a path, and how many bytes of it have been sent
    notice: Callable[[str], None]  # called with a line that says why NIXL does not move the bytes
    _: KW_ONLY
    peer_has_nixl: bool

    def __post_init__(self) -> None:
        self._mounts = self.context.mounts()
        self._number = 0
        self._refused = -1  # the last file that the receiver does not want
        self._pending: dict[int, Sent] = {}
        self._hops = 1 + len(self.request.forward)  # machines of the chain that are alive
        self._outlet = Outlet(self.channel, self.notice, peer_has_nixl=self.peer_has_nixl)

    def plan(self) -> messages.Plan:
        """Add up what is to be sent."""
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

    def run(self, plan: messages.Plan) -> None:
        """Send everything. Errors of the connection are raised, others go to ``fail``."""
        self.channel.send(plan)
        try:
            self._outlet.choose(plan.size)
            for number, source in enumerate(self.sources):
                self._send_tree(number, source)
        finally:
            self._outlet.close()
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
        self.fail(path, error)
        self.channel.send(messages.Failed(error.errno or errno.EIO, plain(text_of(error)), shown(path)))

    def _walk(self, source: Entry, fail: Fail) -> Steps:
        request = self.request
        steps = walk_files(source, fail, recursive=request.recursive, dereference=request.dereference)
        return Selection(*request.patterns).of(steps)

    def read_results(
        self,
        take: Callable[[Sent, messages.FileResult], None],
        fail: Callable[[messages.Failed], None],
        lose: Callable[[messages.Lost], None],
        sink: Report,
    ) -> None:
        """Receive what becomes of the files, until the receiver has finished."""
        try:
            while not isinstance(message := self.channel.receive(), messages.Finished):
                match message:
                    case messages.FileResult():
                        take(self._answered(message), message)
                    case messages.Failed() if message.hop < self._hops:
                        fail(message)
                    case messages.Lost() if 0 < message.hop < self._hops:
                        self._lose(message.hop)
                        lose(message)
                    case messages.Notice():
                        sink.noticed(message.text)
                    case messages.Deleted() if self.request.delete:
                        sink.deleted(os.fsdecode(message.path))
                    case messages.Free() | messages.Measured() | messages.Window():
                        self._outlet.take(message)
                    case _:
                        raise HostProtocolError("no result")
            for sent in self._pending.values():
                if not sent.waiting.isdisjoint(range(self._hops)):
                    raise HostProtocolError(f"no result of {sent.path}")
        finally:
            self._outlet.end()

    def _answered(self, result: messages.FileResult) -> Sent:
        sent = self._pending.get(result.number)
        if sent is None or result.hop not in sent.waiting:
            raise HostProtocolError("the result of a file that was not sent")
        if result.skipped and not (self.request.no_clobber or self.request.update):
            raise HostProtocolError("a file was skipped")
        if not (result.error or result.skipped) and (result.size, result.checksum) != (sent.size, sent.checksum):
            sides = [f"{side.size} bytes {side.checksum or ''}".strip() for side in (result, sent)]
            result.error, result.text = errno.EIO, "the copy differs: {} there, {} were sent".format(*sides)
        sent.waiting.discard(result.hop)
        self._forget_if_answered(result.number, sent)
        return sent

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
        if step.kind == "enter":
            self.channel.send(
                messages.Enter(source, name, path, status.st_dev in self._mounts, FileAttributes.of(status))
            )
        elif stat.S_ISLNK(status.st_mode):
            target = os.fsencode(os.readlink(entry.name, dir_fd=entry.directory))
            self.channel.send(messages.Link(source, name, path, target, FileAttributes.of(status)))
        else:
            with entries.open_source(entry) as opened:
                self._send_file(source, name, opened)

    def _send_file(self, source: int, name: bytes, opened: OpenFile) -> None:
        number, self._number = self._number, self._number + 1
        path, status = opened.entry.path, opened.status
        size = entries.size_of(opened)
        sent = self._pending[number] = Sent(path, size, time.monotonic(), set(range(self._hops)))
        data, on_mount = data_bytes(status, size), status.st_dev in self._mounts
        named = shown(path)
        checksum = sha256_of(opened.fd, lambda: False) if self.request.checksum else ""
        attributes = FileAttributes.of(status)
        if self.request.update:
            settle(status)
            if self.context.is_written(status):  # now, and until a program ends that changes no times
                attributes.st_mtime_ns = time.time_ns()
        self.channel.send(messages.File(number, source, name, named, size, data, on_mount, attributes, checksum))
        holes = stat.S_ISREG(status.st_mode) and data < size
        end = self._send_content(number, opened, size, holes=holes)
        self._outlet.await_reads()
        sent.checksum = end.checksum if isinstance(end, messages.End) else None
        self.channel.send(end)

    def _send_content(
        self, number: int, opened: OpenFile, size: int, *, holes: bool
    ) -> messages.End | messages.Abandon:
        """Send the bytes of a file, and return what follows them."""
        checksum = RunningChecksum(verify=self.request.verify)
        done = 0
        data_end = 0 if holes else size
        # With --verify all bytes pass through this process.
        in_place = opened.status.st_dev in self._mounts and not holes and not self.request.verify
        self._outlet.begin()
        while self._refused != number:
            if in_place and self._outlet.should_write(done):
                in_place = False
                done = self._write_in_place(opened, size, done)
            try:
                if done == size:
                    if not size and os.pread(opened.fd, 1, 0):
                        return messages.Abandon(errno.EINVAL, "has bytes, and its size says that it has none")
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
                return messages.Abandon(error.errno or errno.EIO, plain(text_of(error)))
            if not count:
                return messages.Abandon(errno.EBUSY, "became smaller during the copy")
            checksum.update(buffer[:count])
            self._outlet.send(count)
            done += count
            self.moved(opened.entry.path, done)
        return messages.Abandon(errno.ECANCELED, "")

    def _write_in_place(self, opened: OpenFile, size: int, offset: int) -> int:
        """Write a file's memory into that of the receiver's file, and return the offset that is reached."""
        with attached_in_place(opened.fd, size, "r") as region:
            if region is None:
                return offset
            return self._outlet.write(region, offset, lambda reached: self.moved(opened.entry.path, reached))
