"""The side of a copy between two machines that sends files: it reads them and finds what is in directories.

Below the names that are given nothing is looked up by path, and symbolic links are followed only with ``dereference``.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import time
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from typing import Final, Literal, NamedTuple

from gpufs.client import _ends
from gpufs.client._copy_job import Mounts
from gpufs.client._ends import Entry, OpenFile
from gpufs.client._space import data_bytes
from gpufs.exceptions import text_of
from gpufs.nodes.channel import BLOCK_BYTES, Channel, ChannelError, ProtocolError
from gpufs.nodes.messages import (
    Abandon,
    Attributes,
    Done,
    End,
    Enter,
    Failed,
    File,
    Finished,
    Hole,
    Leave,
    Link,
    Plan,
    Request,
    Result,
    plain,
)
from gpufs.syscalls import close_all

_ZEROS: Final = bytes(1 << 20)


class Checksum:
    """The checksum of a file that is sent: SHA-256 of all bytes, or CRC-32 of the bytes outside holes."""

    def __init__(self, *, verify: bool) -> None:
        self._sha256 = hashlib.sha256() if verify else None
        self._crc32 = 0

    def update(self, data: memoryview) -> None:
        """Add bytes."""
        if self._sha256 is not None:
            self._sha256.update(data)
        else:
            self._crc32 = zlib.crc32(data, self._crc32)

    def skip(self, count: int) -> None:
        """Add a hole."""
        while self._sha256 is not None and count:
            step = min(count, len(_ZEROS))
            self._sha256.update(_ZEROS[:step])
            count -= step

    @property
    def text(self) -> str:
        """The checksum."""
        return f"{self._crc32:08x}" if self._sha256 is None else self._sha256.hexdigest()


class Step(NamedTuple):
    """What a walk finds: a directory and later its end, or anything else."""

    kind: Literal["enter", "leave", "file"]
    entry: Entry
    status: os.stat_result


class _Folder(NamedTuple):
    entry: Entry
    status: os.stat_result
    fd: int
    names: Iterator[str]


def walk(source: Entry, request: Request, fail: Callable[[str, OSError], None]) -> Generator[Step, None, None]:
    """Yield a source, and what is below it in the order of names. Its directories are open until it goes on.

    ``fail``: is called with what cannot be found.
    """
    folders: list[_Folder] = []
    try:
        step = _status(source, fail)
        if step is not None and stat.S_ISDIR(step.status.st_mode) and not request.recursive:
            fail(source.path, OSError(errno.EISDIR, "is a directory (-r copies it)"))
            return
        while step is not None or folders:
            if step is not None:
                if not stat.S_ISDIR(step.status.st_mode):
                    yield step
                elif folder := _open(step, folders, fail):
                    folders.append(folder)
                    yield step
            if not folders:
                return
            entry, status, fd, names = folders[-1]
            step = None
            if name := next(names, ""):
                step = _status(entry.child(name, fd)._replace(follow=request.dereference), fail)
            else:
                folders.pop()
                os.close(fd)
                yield Step("leave", entry, status)
    finally:
        close_all([folder.fd for folder in folders])


def _status(entry: Entry, fail: Callable[[str, OSError], None]) -> Step | None:
    try:
        status = entry.status()
    except OSError as error:
        fail(entry.path, error)
        return None
    return Step("enter" if stat.S_ISDIR(status.st_mode) else "file", entry, status)


def _open(step: Step, above: Sequence[_Folder], fail: Callable[[str, OSError], None]) -> _Folder | None:
    entry = step.entry
    try:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (0 if entry.follow else os.O_NOFOLLOW)
        fd = os.open(entry.name, flags, dir_fd=entry.directory)
        try:
            status = os.fstat(fd)
            if any(os.path.samestat(folder.status, status) for folder in above):
                text = "is a link to a directory that it lies in: such a loop cannot be copied by -L"
                raise OSError(errno.ELOOP, text)
            return _Folder(entry, status, fd, iter(sorted(os.listdir(fd))))
        except BaseException:
            os.close(fd)
            raise
    except OSError as error:
        fail(entry.path, error)
        return None


class Sent(NamedTuple):
    """A file whose Result has not come."""

    path: str
    size: int
    began: float


class Sender:
    """Sends files. run() and read_results() need a thread each.

    Parameters
    ----------
    channel : Channel
        To the receiver.
    mounts : dict
        The mounts of this machine.
    sources : sequence of Entry
        What is sent.
    request : Request
        The options.
    fail : callable
        Called with the path and error of what cannot be sent.
    moved : callable
        Called with a path, and how many bytes of it have been sent.
    """

    def __init__(
        self,
        channel: Channel,
        mounts: Mounts,
        sources: Sequence[Entry],
        request: Request,
        fail: Callable[[str, OSError], None],
        moved: Callable[[str, int], None],
    ) -> None:
        self._channel = channel
        self._mounts = mounts
        self._sources = sources
        self._request = request
        self._fail = fail
        self._moved = moved
        self._number = 0
        self._refused = -1  # the last file that the receiver does not want
        self._pending: dict[int, Sent] = {}
        self._buffer = memoryview(bytearray(BLOCK_BYTES))

    def plan(self) -> Plan:
        """Add up what is to be sent."""
        size = data = 0
        for source in self._sources:
            for step in walk(source, self._request, lambda path, error: None):
                if stat.S_ISREG(step.status.st_mode):
                    size += step.status.st_size
                    data += data_bytes(step.status, step.status.st_size)
        return Plan(size, data)

    def run(self, plan: Plan) -> None:
        """Send everything. Errors of the connection are raised, others go to ``fail``."""
        self._channel.send(plan)
        for number, source in enumerate(self._sources):
            with closing(walk(source, self._request, self._fail)) as steps:
                for step in steps:
                    try:
                        self._send(number, step)
                    except OSError as error:
                        if isinstance(error, ChannelError):
                            raise
                        self._fail(step.entry.path, error)
        self._channel.send(Done())

    def read_results(self, take: Callable[[Sent, Result], None], fail: Callable[[Failed], None]) -> None:
        """Receive what becomes of the files, until the receiver has finished."""
        while True:
            message = self._channel.receive()
            match message:
                case Result():
                    sent = self._pending.pop(message.number, None)
                    if sent is None:
                        raise ProtocolError("the result of a file that was not sent")
                    if message.error or message.skipped:
                        self._refused = message.number
                    take(sent, message)
                case Failed():
                    fail(message)
                case Finished():
                    return
                case _:
                    raise ProtocolError("no result")

    def _send(self, source: int, step: Step) -> None:
        entry, status = step.entry, step.status
        name, path = os.fsencode(os.path.basename(entry.name)), os.fsencode(entry.path)
        if step.kind == "leave":
            self._channel.send(Leave())
        elif step.kind == "enter":
            self._channel.send(Enter(source, name, path, status.st_dev in self._mounts, Attributes.of(status)))
        elif stat.S_ISLNK(status.st_mode):
            target = os.fsencode(os.readlink(entry.name, dir_fd=entry.directory))
            self._channel.send(Link(source, name, path, target, Attributes.of(status)))
        else:
            opened = _ends.open_source(entry)
            try:
                self._send_file(source, name, opened)
            finally:
                close_all((opened.fd,))

    def _send_file(self, source: int, name: bytes, opened: OpenFile) -> None:
        number, self._number = self._number, self._number + 1
        path, status = opened.entry.path, opened.status
        size = _ends.size_of(opened)
        self._pending[number] = Sent(path, size, time.monotonic())
        data, on_mount = data_bytes(status, size), status.st_dev in self._mounts
        named = os.fsencode(path)
        self._channel.send(File(number, source, name, named, size, data, on_mount, Attributes.of(status)))
        holes = stat.S_ISREG(status.st_mode) and data < size
        checksum = Checksum(verify=self._request.verify)
        done = data_end = 0
        while self._refused != number:
            try:
                if holes and done == data_end:
                    start, data_end = _ends.next_data(opened.fd, done)
                    if start > done:
                        self._channel.send(Hole(start - done))
                        checksum.skip(start - done)
                        done = start
                        continue
                space = self._buffer[: data_end - done] if holes else self._buffer
                count = os.preadv(opened.fd, [space], done)
            except ChannelError:
                raise
            except OSError as error:
                self._channel.send(Abandon(error.errno or errno.EIO, plain(text_of(error))))
                return
            if not count:
                self._channel.send(End(checksum.text))
                return
            checksum.update(self._buffer[:count])
            self._channel.send_data(self._buffer[:count])
            done += count
            self._moved(path, done)
        self._channel.send(Abandon(errno.ECANCELED, ""))
