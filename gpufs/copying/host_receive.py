"""The side of a copy between two machines that receives files. Each gets its name when it is complete.

The other side is not trusted: it chooses content, attributes and names below the destination, and reaches nothing else.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass
from typing import Final, Literal

from gpufs.client._cancellation import Cancellation
from gpufs.copying import entries
from gpufs.copying.checksums import RunningChecksum, has_checksum, sha256_of
from gpufs.copying.deletion import delete_others
from gpufs.copying.entries import Entry
from gpufs.copying.host_memory import attached_in_place
from gpufs.copying.identity import Identity
from gpufs.copying.job import CopyContext
from gpufs.copying.patterns import Selection
from gpufs.copying.tree import CopiedDirectory, exists, find_copy, make_special, pass_on
from gpufs.copying.types import CopyError, CopyResult, NotOnMountCopyError, Report, error_class
from gpufs.exceptions import text_of
from gpufs.hosts import messages
from gpufs.hosts.channel import BLOCK_BYTES, ChannelError, ConnectionEnded, HostChannel, HostProtocolError
from gpufs.hosts.messages import HostRequest, plain, shown
from gpufs.hosts.next_host import NextHost
from gpufs.hosts.nixl import LEAST_BYTES, SLOTS, Nixl, is_installed
from gpufs.new_file import NewFile
from gpufs.syscalls import write_at

# Nobody has more: of the names that --delete compares, and of the path of a directory.
_MOST_NAME_BYTES: Final = 512 << 20
_MOST_PATH_BYTES: Final = 16 << 10
_STEP_BYTES: Final = 1 << 30  # of a hole, between two looks at whether the copy is cancelled
_NOT_ON_MOUNT: Final = "neither of them is on a gpufs mount: use scp or rsync"


@dataclass(eq=False)
class Receiver(Report):
    context: CopyContext
    channel: HostChannel  # to the sender
    bases: Sequence[Entry]  # the destinations of the sources, with their directories open
    request: HostRequest
    sink: Report
    cancel: Cancellation  # ends waits for memory
    _: KW_ONLY
    peer_has_nixl: bool
    next_host: NextHost | None = None  # gets what this side receives

    def __post_init__(self) -> None:
        self._mounts = self.context.mounts()
        self._folders: list[CopiedDirectory | None] = []  # None: could not be created
        self._nixl: Nixl | None = None
        self._failure = ""  # why there is none
        self._used: int | None = None  # the slot of the bytes that _next() has returned
        self._in_file = False  # bytes of a file are to come
        self._left = 0  # how many
        self._path: list[str] = []  # the names of those folders
        self._names: dict[str, Literal["file", "directory"]] = {}  # what the source has, for request.delete
        self._name_bytes = 0  # of those
        self._incomplete = False  # not all of it is there
        self._planned = False  # the plan has come
        self._offered = False  # and an offer
        self._came: set[int] = set()  # the sources of which something has come
        self._made: set[str] = set()  # the files that this command has created from its sources

    def run(self) -> None:
        """Receive everything. Errors of the connection are raised, others are reported."""
        try:
            while True:
                message = self.channel.receive()
                if self.next_host is not None and isinstance(message, messages.OfSender):
                    self.next_host.pass_on(message)
                match message:
                    case messages.Plan():
                        self._check_space(message)
                        self._prepare(message)
                    case messages.Offer():
                        self._measure(message)
                    case memoryview() if self._offered:
                        pass  # measures the pipe
                    case messages.Measure():
                        self.channel.send(messages.Measured())
                    case messages.Chosen():
                        self._choose(message)
                    case messages.Enter():
                        self._enter(message)
                    case messages.Leave():
                        self._leave()
                    case messages.Link():
                        self._link(message)
                    case messages.File():
                        self._receive(message)
                    case messages.Failed():
                        path, text = os.fsdecode(message.path), message.text
                        if message.error == errno.ENOENT and any(character in path for character in "*?["):
                            text += " (patterns are not expanded there: name the files, or copy the directory by -r)"
                        self.sink.file_ended(path, error_class(message.error)(message.error, text, path))
                        self._incomplete = True
                    case messages.FilesDone():
                        if len(self._came) < len(self.bases) and not self._incomplete:
                            raise HostProtocolError("nothing has come of a source")
                        self._delete_others()
                        if self.next_host is not None:
                            self.next_host.finish()
                        self.channel.send(messages.Finished())
                        return
                    case _:
                        raise HostProtocolError("no file")
        finally:
            for folder in self._folders:
                if folder is not None:
                    folder.close()
            self._close_nixl()

    def _fail(self, source: str, destination: str, error: OSError) -> None:
        """Report what could not be created, other than a file."""
        number, text = error.errno or errno.EIO, text_of(error)
        self.sink.file_ended(source, CopyError(number, text, source, destination))
        self.channel.send(messages.Failed(number, plain(text), shown(destination)))

    def _check_space(self, plan: messages.Plan) -> None:
        if self._planned:
            raise HostProtocolError("a second plan")
        self._planned = True
        self.sink.planned(plan.size)
        if not (self.request.no_clobber or self.request.update):  # else nobody knows what is skipped
            with self.bases[0].filled() as (directory, place):
                try:
                    # Each file is checked again, when its size is known.
                    held = self.context.granules_of(directory).held_by(plan.sizes)
                    self.context.check_space(directory, max(plan.data, held), self.cancel, largest=0)
                except OSError as error:
                    raise OSError(error.errno, error.strerror, place) from None

    def _entry(self, source: int, name: bytes) -> Entry | None:
        """Return the destination of a name in the current directory, None if that could not be created."""
        if not self._folders:
            if source >= len(self.bases):
                raise HostProtocolError(f"source {source}")
            self._came.add(source)
            return self.bases[source]._replace(follow=False)
        if name in (b"", b".", b"..") or b"/" in name or b"\0" in name:
            raise HostProtocolError(f"the name {name!r}")
        folder = self._folders[-1]
        return None if folder is None else folder.child(os.fsdecode(name))

    def _check_mount(self, entry: Entry, on_mount: bool) -> None:
        """Raise OSError if no side is on a mount."""
        if on_mount:
            return
        with entry.filled() as (directory, _):
            if os.fstat(directory).st_dev not in self._mounts:
                raise NotOnMountCopyError(errno.EXDEV, _NOT_ON_MOUNT, entry.path)

    # ---- NIXL or the pipe ----

    def _prepare(self, plan: messages.Plan) -> None:
        """Open NIXL, as the sender does at the same time."""
        if plan.size >= LEAST_BYTES and self.peer_has_nixl and is_installed():
            try:
                self._nixl = Nixl()
            except ConnectionEnded as error:
                self._failure = error.strerror or str(error)

    def _measure(self, offer: messages.Offer) -> None:
        if self._offered:
            raise HostProtocolError("a second offer")
        self._offered = True
        rate = 0.0
        try:
            if self._nixl is not None:
                self._nixl.connect(offer)
                rate = self._nixl.measure(self.channel.check)
        except ConnectionEnded as error:  # of NIXL alone
            self._failure = error.strerror or str(error)
        # A file that is written in place cannot be passed on.
        self.channel.send(messages.Measured(rate, plain(self._failure), in_place=self.next_host is None))

    def _choose(self, chosen: messages.Chosen) -> None:
        if not chosen.nixl:
            self._close_nixl()
            self.sink.noticed(chosen.text)
        elif self._nixl is None:
            raise HostProtocolError("NIXL without an offer")

    def _close_nixl(self) -> None:
        if self._nixl is not None:
            self._nixl.close()
            self._nixl = None

    # ---- directories and links ----

    def _enter(self, message: messages.Enter) -> None:
        if not self.request.recursive or sum(map(len, self._path)) > _MOST_PATH_BYTES:
            raise HostProtocolError("a directory")
        entry = self._entry(message.source, message.name)
        self._name(message.name, "directory")
        folder = None
        try:
            if entry is not None and not self._folders:
                self._check_mount(entry, message.on_mount)
            if entry is not None:
                replace = self.request.update and not entry.is_given
                folder = CopiedDirectory(entry, message.attributes, keeps=self.request.preserve, replace=replace)
        except OSError as error:
            assert entry is not None
            self._fail(os.fsdecode(message.path), entry.path, error)
        self._folders.append(folder)
        self._path.append(os.fsdecode(message.name))

    def _leave(self) -> None:
        if not self._folders:
            raise HostProtocolError("the end of no directory")
        folder = self._folders.pop()
        self._path.pop()
        if folder is None:
            return
        try:
            folder.complete()
        except OSError as error:
            self._fail("", folder.entry.path, error)
        finally:
            folder.close()

    def _link(self, message: messages.Link) -> None:
        if not self.request.recursive or self.request.dereference:
            raise HostProtocolError("a link")
        entry = self._entry(message.source, message.name)
        self._name(message.name, "file")
        if entry is None or self._is_skipped(entry):
            return
        try:
            entry.check_file()
            self._make_way(entry)
            make_special(
                entry, message.attributes, message.target, keeps=self.request.preserve, update=self.request.update
            )
        except OSError as error:
            self._fail(os.fsdecode(message.path), entry.path, error)

    # ---- what the source does not have ----

    def _name(self, name: bytes, kind: Literal["file", "directory"]) -> None:
        if self.request.delete:
            below = "/".join([*self._path[1:], os.fsdecode(name)] if self._path else [])
            self._names[below] = kind
            self._name_bytes += len(below)
            if self._name_bytes > _MOST_NAME_BYTES:
                raise HostProtocolError("more names than can be compared")

    def _delete_others(self) -> None:
        if not self.request.delete or self._names.get("") != "directory":
            return
        if self._incomplete:
            text = "nothing is deleted, for not all of the source can be read"
            self.sink.noticed(text)
            self.channel.send(messages.Notice(text))
            return
        delete_others(self.bases[0], self._names, Selection(*self.request.patterns), self.cancel, self)

    def _make_way(self, entry: Entry) -> None:
        """Remove a directory that has the name of a file, with --delete. It comes before the other removals."""
        if self.request.delete and self._path and entry._replace(follow=False).is_directory():
            below = "/".join([*self._path[1:], os.path.basename(entry.name)])
            delete_others(
                self.bases[0], {"": "directory"}, Selection(*self.request.patterns), self.cancel, self, below=below
            )

    def deleted(self, path: str) -> None:
        """Report what has been removed."""
        self.channel.send(messages.Deleted(shown(path)))
        self.sink.deleted(path)

    def failed(self, source: str, destination: str | None, error: OSError) -> None:
        """Report what could not be removed."""
        self._fail("", source, error)

    def _is_skipped(self, entry: Entry) -> bool:
        return self.request.no_clobber and exists(entry, follow=False)

    def _is_current(self, entry: Entry, file: messages.File) -> bool:
        """Return whether the copy exists already. It then has the attributes that it should have."""
        if not self.request.update:
            return False
        try:
            if file.checksum:
                copy = entry.status()
                if copy.st_size != file.size or not has_checksum(entry, file.checksum, self.cancel):
                    return False
            elif (found := find_copy(entry, Identity(file.size, file.attributes.st_mtime_ns), self.context)) is None:
                return False
            else:
                copy = found
            if self.request.preserve:
                pass_on(entry, copy, file.attributes)
        except OSError:
            return False  # creating it will show what is wrong
        return True

    # ---- files ----

    def _receive(self, file: messages.File) -> None:
        """Receive one file, and answer what became of it."""
        source = os.fsdecode(file.path)
        entry = self._entry(file.source, file.name)
        self._name(file.name, "file")
        self._in_file, self._left = True, file.size
        if entry is None:  # the directory is reported already
            self.channel.send(messages.FileResult(file.number, b"", errno.ECANCELED))
        elif self._is_skipped(entry) or self._is_current(entry, file):
            self.channel.send(messages.FileResult(file.number, shown(entry.path), skipped=True))
            self.sink.file_ended(source, None)
        else:
            path = shown(entry.path)
            try:
                stored = self._store(file, source, entry)
            except OSError as error:
                if isinstance(error, ChannelError) or self.cancel.cancelled:
                    raise
                number, text = error.errno or errno.EIO, text_of(error)
                self.channel.send(messages.FileResult(file.number, path, number, plain(text)))
                self.sink.file_ended(source, error_class(number)(number, text, source, entry.path))
            else:
                sha256 = stored.sha256 or ""
                self.channel.send(
                    messages.FileResult(file.number, path, 0, "", False, stored.bytes, stored.paths, sha256)
                )
                self.sink.file_ended(source, stored)
        while self._in_file:  # of a file that is not stored
            if isinstance(self._next(), messages.InPlace):
                self.channel.send(messages.Window())

    def _next(self) -> memoryview | messages.Hole | messages.InPlace | messages.End | messages.Abandon:
        """Return what comes next of the current file."""
        if self._used is not None:
            self.channel.send(messages.Free(self._used))
            self._used = None
        message = self.channel.receive()
        if isinstance(message, messages.Slot):
            message = self._take_slot(message)
        if isinstance(message, (messages.End, messages.Abandon)):
            self._in_file = False
        elif isinstance(message, (memoryview, messages.Hole)):
            self._left -= len(message) if isinstance(message, memoryview) else message.size
            if self._left < 0:
                raise HostProtocolError("more bytes than the file has")
        elif not isinstance(message, messages.InPlace):
            raise HostProtocolError("no bytes of a file")
        if self.next_host is not None and not isinstance(message, messages.InPlace):
            self.next_host.pass_on(message)
        return message

    def _take_slot(self, slot: messages.Slot) -> memoryview:
        """Return the bytes in a slot, which are there until _next()."""
        if self._nixl is None or slot.number >= SLOTS or not 0 < slot.size <= BLOCK_BYTES:
            raise HostProtocolError("an unknown slot")
        self._nixl.read(slot.number, slot.size, self.channel.check)
        self._used = slot.number
        return self._nixl.slot(slot.number)[: slot.size]

    def _store(self, file: messages.File, source: str, entry: Entry) -> CopyResult:
        """Receive the bytes of a file, and give it its name."""
        began = time.monotonic()
        new = self._create(file, entry)
        try:
            checksum = RunningChecksum(verify=self.request.verify)
            done = holes = in_place = 0
            while not isinstance(message := self._next(), (messages.End, messages.Abandon)):
                if isinstance(message, messages.InPlace):
                    written = self._receive_in_place(new.fd, file.size, source, done) - done
                    in_place += written
                    done += written
                elif isinstance(message, messages.Hole):
                    for start in range(0, message.size, _STEP_BYTES) if self.request.verify else ():
                        self.channel.check()
                        checksum.skip(min(message.size - start, _STEP_BYTES))
                    holes += message.size
                    done += message.size
                else:
                    checksum.update(message)
                    write_at(new.fd, message, done)
                    done += len(message)
                self.sink.moved(source, done)
            if isinstance(message, messages.Abandon):
                raise OSError(message.error, message.text)
            if done < file.size:
                raise OSError(errno.EIO, f"{file.size} bytes were promised, and {done} have come")
            if message.checksum != checksum.text:
                text = f"the bytes have changed on the way: {message.checksum} was sent, {checksum.text} has come"
                raise OSError(errno.EIO, text)
            self._complete(new, entry, file, done, checksum.text)
        finally:
            new.close()
        moved_by = "pipe" if self._nixl is None else "nixl"
        counts = {moved_by: done - holes - in_place, "direct": in_place, "hole": holes}
        paths = {path: count for path, count in counts.items() if count}
        sha256 = checksum.text or None
        return CopyResult(source, entry.path, done, time.monotonic() - began, "node", paths, sha256=sha256)

    def _receive_in_place(self, fd: int, size: int, source: str, offset: int) -> int:
        """Let the sender write into the memory of the new file. Returns the offset that is reached."""
        if self._nixl is None or self.next_host is not None:
            raise HostProtocolError("NIXL without an offer")
        with attached_in_place(fd, size, "r+") as region, ExitStack() as registered:
            try:
                if region is not None:
                    registered.enter_context(self._nixl.registered(region))
            except ConnectionEnded:  # of NIXL alone
                region = None
            if region is None:
                self.channel.send(messages.Window())
                return offset
            self.channel.send(self._nixl.window(region))
            with self._nixl.written_to():
                while (
                    isinstance(message := self.channel.receive(), messages.Written) and offset <= message.offset <= size
                ):
                    self.sink.moved(source, message.offset)
                    if message.last:
                        self._left -= message.offset - offset
                        return message.offset
        raise HostProtocolError("not what was written")

    def _create(self, file: messages.File, entry: Entry) -> NewFile:
        """Create the file, with its memory, but without its name."""
        entry.check_file()
        if entry.path in self._made:
            raise OSError(errno.EEXIST, "another source of this command is copied there")
        self._check_mount(entry, file.on_mount)
        mode = file.attributes.permissions & (0o700 if self.request.preserve else 0o777)
        self._make_way(entry)
        entry.check_replaceable()
        assert entry.directory is not None
        new = NewFile.create(entry.directory, mode)
        try:
            new.keep_attributes_of(entry.name)
            self.context.check_space(new.fd, file.data, self.cancel)
            if file.data and file.data >= file.size:
                os.posix_fallocate(new.fd, 0, file.size)  # the memory is certain before the first byte arrives
        except BaseException:
            new.close()
            raise
        self._made.add(entry.path)
        return new

    def _complete(self, new: NewFile, entry: Entry, file: messages.File, size: int, checksum: str) -> None:
        os.ftruncate(new.fd, size)
        if self.request.preserve:
            entries.preserve(new.fd, file.attributes)
        elif self.request.update:
            entries.set_times(new.fd, file.attributes)
        durable = self.request.fsync and os.fstat(new.fd).st_dev not in self._mounts
        if durable:
            os.fsync(new.fd)
        if self.request.verify:
            os.posix_fadvise(new.fd, 0, 0, os.POSIX_FADV_DONTNEED)
            back = sha256_of(new.fd, lambda: self.cancel.cancelled)
            if back != checksum:
                raise OSError(errno.EIO, f"the copy differs: SHA-256 {checksum} was copied, {back} was read back")
        new.complete(entry.name)
        if durable:
            assert entry.directory is not None
            entries.sync_directory(entry.directory)
