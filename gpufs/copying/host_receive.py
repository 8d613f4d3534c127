"""The side of a copy between two machines that receives files. Each gets its name when it is complete.

The other side is not trusted: it chooses content, attributes and names below the destination, and reaches nothing else.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import KW_ONLY, dataclass
from typing import Final, Literal

from gpufs.client._cancellation import Cancellation
from gpufs.copying import entries
from gpufs.copying.checksums import RunningChecksum, sha256_of
from gpufs.copying.deletion import delete_others
from gpufs.copying.entries import Entry
from gpufs.copying.host_memory import attached_in_place
from gpufs.copying.job import CopyContext
from gpufs.copying.patterns import Selection
from gpufs.copying.tree import FileTree, TreeState, adopt
from gpufs.copying.types import NotOnMountCopyError, Report
from gpufs.copying.walk import Folder, Step
from gpufs.exceptions import text_of
from gpufs.hosts import messages
from gpufs.hosts.channel import BLOCK_BYTES, ChannelError, ConnectionEnded, HostChannel, HostProtocolError
from gpufs.hosts.messages import FileResult, HostRequest, plain, shown
from gpufs.hosts.next_host import NextHost
from gpufs.hosts.nixl import MISSING, SLOTS, Nixl, is_installed
from gpufs.new_file import NewFile
from gpufs.syscalls import write_at

# Nobody has more: of the names that --delete compares, and of the path of a directory.
_MOST_NAME_BYTES: Final = 512 << 20
_MOST_PATH_BYTES: Final = 16 << 10
_STEP_BYTES: Final = 1 << 30  # of a hole, between two looks at whether the copy is cancelled
_NOT_ON_MOUNT: Final = "neither of them is on a gpufs mount: use scp or rsync"


class _ReceivedTree(FileTree):
    """The copy of one source. The messages take the place of what a walk finds."""

    def __init__(self, base: Entry, receiver: Receiver) -> None:
        super().__init__(base, receiver.state)
        self._receiver = receiver

    def file(self, step: Step) -> Entry | None:
        entry = super().file(step)
        if entry is not None:
            self._receiver.make_way(step, entry)
        return entry

    def _target(self, step: Step, entry: Entry) -> bytes:
        return self._receiver.found.target

    def _check_named(self, step: Step) -> None:
        self._receiver.check_mount(self.base)
        if step.kind == "file":
            self.base.check_file()


@dataclass(eq=False)
class Receiver(Report):
    context: CopyContext
    channel: HostChannel  # to the sender
    bases: Sequence[Entry]  # the destinations of the sources, with their directories open
    request: HostRequest
    report: Callable[[messages.Plan | messages.Report], None]  # of this machine; the sender hears of it, too
    cancel: Cancellation  # ends waits for memory
    _: KW_ONLY
    next_host: NextHost | None = None  # gets what this side receives

    def __post_init__(self) -> None:
        request = self.request
        self.found: messages.Found  # what has come last
        include, exclude = request.patterns
        self._selection = Selection(include, exclude)
        # Once this is cancelled, directories that are not complete get no attributes.
        self._filling = Cancellation()
        self.state = TreeState(self.context, self._filling, self)
        self._trees = [_ReceivedTree(base._replace(follow=False), self) for base in self.bases]
        self._folders: list[Folder] = []  # the current directory, and those above it
        self._mounts = self.context.mounts()
        self._nixl: Nixl | None = None
        self._failure = MISSING  # why there is none
        self._used: int | None = None  # the slot of the bytes that _next() has returned
        self._in_file = False  # bytes of a file are to come
        self._left = 0  # how many
        self._answer: FileResult | None = None  # why the current file is not copied
        self._names: dict[str, Literal["file", "directory"]] = {}  # what the source has, for request.delete
        self._name_bytes = 0  # of those
        self._incomplete = False  # not all of it is there
        self._planned = False  # the plan has come
        self._offered = False  # and an offer
        self._came: set[int] = set()  # the sources of which something has come
        self._made: set[str] = set()  # the files that have been stored

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
                    case messages.Found():
                        self._take(message)
                    case messages.Leave() if self._folders:
                        self._folders.pop().release()
                    case messages.Failed():
                        self.report(messages.Failed(message.error, message.text, source=message.source))
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
            if self._folders:
                self._filling.cancel()
            for folder in reversed(self._folders):
                folder.release()
            self._close_nixl()

    def _tell(self, report: messages.Report) -> None:
        self.report(report)
        self.channel.send(report)

    def _check_space(self, plan: messages.Plan) -> None:
        if self._planned:
            raise HostProtocolError("a second plan")
        self._planned = True
        self.report(plan)
        if not (self.request.no_clobber or self.request.update):  # else nobody knows what is skipped
            with self.bases[0].filled() as (directory, place):
                try:
                    # Each file is checked again, when its size is known.
                    held = self.context.granules_of(directory).held_by(plan.sizes)
                    self.context.check_space(directory, max(plan.data, held), self.cancel, largest=0)
                except OSError as error:
                    raise OSError(error.errno, error.strerror, place) from None

    # ---- what has been found there ----

    def _take(self, found: messages.Found) -> None:
        self.found = found
        name, path = os.fsdecode(found.name), os.fsdecode(found.path)
        parent = self._folders[-1] if self._folders else None
        if parent is None and found.source < len(self._trees):
            self._came.add(found.source)
            self._tree = self._trees[found.source]
        elif parent is None:
            raise HostProtocolError(f"source {found.source}")
        elif name in ("", ".", "..") or "/" in name or "\0" in name:
            raise HostProtocolError(f"the name {found.name!r}")
        if (found.is_directory or found.is_link) and not self.request.recursive:
            raise HostProtocolError("what was not asked for")
        status = found.status
        if found.is_directory:
            folder = Folder(path, name, parent)
            folder.status = status
            if len(folder.below) > _MOST_PATH_BYTES:
                raise HostProtocolError("a directory that is too deep")
            self._note(folder.below, "directory")
            self._folders.append(folder)
            self._tree.enter(Step("enter", None, name, path, status, 0, folder))
            return
        step = Step("file", None, name, path, status, found.size, parent)
        self._note(step.below, "file")
        if found.is_link:
            self._tree.special(step)
        else:
            self._receive(step)

    def check_mount(self, entry: Entry) -> None:
        """Raise OSError if no side of the current file is on a mount."""
        if self.found.on_mount:
            return
        with entry.filled() as (directory, _):
            if os.fstat(directory).st_dev not in self._mounts:
                raise NotOnMountCopyError(errno.EXDEV, _NOT_ON_MOUNT, entry.path)

    # ---- reports of the tree and of removals ----

    def failed(self, source: str, destination: str | None, error: OSError) -> None:
        """Report what could not be created or removed. Of a file it is the answer."""
        if self._in_file:
            path = shown(destination or "")
            self._answer = FileResult(self.found.number, path, error.errno or errno.EIO, plain(text_of(error)))
            return
        end, of_source = (source, "") if destination is None else (destination, source)
        with suppress(ChannelError):  # the caller closes a directory first
            self._tell(messages.Failed.of(error, end, source=shown(of_source)))

    def skipped(self) -> None:
        """Take that a copy exists already."""
        if self._in_file:
            self._answer = FileResult(self.found.number, b"", skipped=True)

    def noticed(self, text: str) -> None:
        self._tell(messages.Notice(plain(text)))

    def deleted(self, path: str) -> None:
        """Report what has been removed."""
        self._tell(messages.Deleted(shown(path)))

    # ---- NIXL or the pipe ----

    def _prepare(self, plan: messages.Plan) -> None:
        """Open NIXL, as the sender does at the same time."""
        if plan.nixl and is_installed():
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
            self.report(messages.Notice(chosen.text))
        elif self._nixl is None:
            raise HostProtocolError("NIXL without an offer")

    def _close_nixl(self) -> None:
        if self._nixl is not None:
            self._nixl.close()
            self._nixl = None

    # ---- what the source does not have ----

    def _note(self, below: str, kind: Literal["file", "directory"]) -> None:
        if self.request.delete:
            self._names[below] = kind
            self._name_bytes += len(below)
            if self._name_bytes > _MOST_NAME_BYTES:
                raise HostProtocolError("more names than can be compared")

    def _delete_others(self) -> None:
        if not self.request.delete or self._names.get("") != "directory":
            return
        if self._incomplete:
            self._tell(messages.Notice("nothing is deleted, for not all of the source can be read"))
        else:
            base, keeps_times = self.bases[0], self.request.preserve
            delete_others(base, self._names, self._selection, self.cancel, self, keeps_times=keeps_times)

    def make_way(self, step: Step, entry: Entry) -> None:
        """Remove a directory that has the name of a file, with --delete. It comes before the other removals."""
        if self.request.delete and step.parent is not None and entry.is_directory():
            base, selection = self.bases[0], self._selection
            delete_others(base, {"": "directory"}, selection, self.cancel, self, below=step.below)

    # ---- files ----

    def _receive(self, step: Step) -> None:
        found = self.found
        self._in_file, self._left, self._answer = True, found.size, None
        entry = self._tree.file(step)
        if entry is None:
            # Without an answer the directory is reported already.
            result = self._answer or FileResult(found.number, b"", errno.ECANCELED)
        elif self.request.checksum and self._has_content(step, entry):
            result = FileResult(found.number, shown(entry.path), skipped=True)
        else:
            result = self._stored(step, entry)
        result.source = found.path
        self._tell(result)
        while self._in_file:  # of a file that is not stored
            if isinstance(self._next(), messages.InPlace):
                self.channel.send(messages.Window())

    def _has_content(self, step: Step, entry: Entry) -> bool:
        """Return whether the copy exists already, by its checksum. It then gets what makes it one without that."""
        try:
            copy = entry.status()
            if copy.st_size != step.size or not stat.S_ISREG(copy.st_mode):
                return False
            with entries.open_source(entry) as opened:
                if sha256_of(opened.fd, lambda: self.cancel.cancelled) != self.found.checksum:
                    return False
        except OSError:
            return False  # creating it will show what is wrong
        adopt(entry, copy, step, self.state)
        return True

    def _stored(self, step: Step, entry: Entry) -> FileResult:
        began, path = time.monotonic(), shown(entry.path)
        try:
            result = self._store(step, entry)
        except OSError as error:
            if isinstance(error, ChannelError) or self.cancel.cancelled:
                raise
            return FileResult(self.found.number, path, error.errno or errno.EIO, plain(text_of(error)))
        result.seconds = time.monotonic() - began
        return result

    def _next(self) -> memoryview | messages.Hole | messages.InPlace | messages.End:
        if self._used is not None:
            self.channel.send(messages.Free(self._used))
            self._used = None
        message = self.channel.receive()
        if isinstance(message, messages.Slot):
            message = self._take_slot(message)
        if isinstance(message, messages.End):
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

    def _store(self, step: Step, entry: Entry) -> FileResult:
        file = self.found
        new = self._create(file, entry)
        try:
            checksum = RunningChecksum(verify=self.request.verify)
            done = holes = in_place = 0
            while not isinstance(message := self._next(), messages.End):
                if isinstance(message, messages.InPlace):
                    written = self._receive_in_place(new.fd, file, done) - done
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
                self.report(messages.Moved(file.path, done))
            if message.error:
                raise OSError(message.error, message.text)
            if done < file.size:
                raise OSError(errno.EIO, f"{file.size} bytes were promised, and {done} have come")
            if message.checksum != checksum.text:
                text = f"the bytes have changed on the way: {message.checksum} was sent, {checksum.text} has come"
                raise OSError(errno.EIO, text)
            self._complete(new, entry, step, done, checksum.text)
        finally:
            new.close()
        moved_by = "pipe" if self._nixl is None else "nixl"
        counts = {moved_by: done - holes - in_place, "direct": in_place, "hole": holes}
        paths = {path: count for path, count in counts.items() if count}
        return FileResult(file.number, shown(entry.path), size=done, paths=paths, checksum=checksum.text)

    def _receive_in_place(self, fd: int, file: messages.Found, offset: int) -> int:
        """Let the sender write into the memory of the new file. Returns the offset that is reached."""
        if self._nixl is None or self.next_host is not None:
            raise HostProtocolError("NIXL without an offer")
        size = file.size
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
                    self.report(messages.Moved(file.path, message.offset))
                    if message.last:
                        self._left -= message.offset - offset
                        return message.offset
        raise HostProtocolError("not what was written")

    def _create(self, file: messages.Found, entry: Entry) -> NewFile:
        if entry.path in self._made:
            raise OSError(errno.EEXIST, "another source of this command has been copied there")
        self.check_mount(entry)
        mode = stat.S_IMODE(file.attributes.st_mode) & (0o700 if self.request.preserve else 0o777)
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
        return new

    def _complete(self, new: NewFile, entry: Entry, step: Step, size: int, checksum: str) -> None:
        self._made.add(entry.path)
        os.ftruncate(new.fd, size)
        assert step.status is not None
        if self.request.preserve:
            entries.preserve(new.fd, step.status)
        elif self.request.update:
            entries.set_times(new.fd, step.status)
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
