"""One copy from beginning to end: its space, how its bytes move from file to file, and what a failure leaves."""

from __future__ import annotations

import errno
import os
import select
import stat
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Set
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from gpufs import syscalls
from gpufs.client._cancellation import Cancellation
from gpufs.client._daemons import IdleConnections, control_file
from gpufs.client._space import Granules, exceeds_all, free_with_parking, granules_of, shortage
from gpufs.copying import entries
from gpufs.copying.entries import Entry, OpenFile, data_bytes
from gpufs.copying.identity import Identity, forget, settle
from gpufs.copying.types import (
    PROGRESS_SECONDS,
    CopyError,
    CopyOptions,
    CopyProgress,
    CopyResult,
    Pace,
    Progress,
    error_class,
)
from gpufs.exceptions import text_of, with_user_names
from gpufs.modes import READ_WRITE
from gpufs.mounting import MountEntry, MountTable, place_of, root_of
from gpufs.new_file import NewFile, remove_name
from gpufs.syscalls import close_all, os_error, path_of
from gpufs.units import bytes_text

if TYPE_CHECKING:
    from gpufs import protocol

Mounts = dict[int, list[MountEntry]]  # by st_dev

_WRITING: Final = (READ_WRITE, "registered")  # modes of leases

# Up to this size one read and one write are faster than a request to the daemon.
SMALL_BYTES: Final = 128 << 10
# How long copies wait for memory: a file that has just been removed or closed frees its memory a moment later.
_WAIT_SECONDS: Final = 3.0
_RETRY_SECONDS: Final = 0.02
# Failures of the destination alone.
_OF_DESTINATION: Final = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EROFS)
_STREAM_BYTES: Final = 4 << 20
# One copy_file_range at a time should take about this long, so that cancellation and progress come soon.
_KERNEL_SECONDS: Final = 0.2
_KERNEL_FIRST_BYTES: Final = 64 << 20
_KERNEL_GROWTH: Final = 16
_KERNEL_MOST_BYTES: Final = 16 << 30
_NOT_BY_KERNEL: Final = (errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
# The daemon's answers for files without a buffer: control files, files below backing/, and copies whose other end is on
# a gpufs as well. All of them can be read and written as files.
_NOT_BY_DAEMON: Final = (errno.EXDEV, errno.EDEADLK, errno.EINVAL)


class CopyContext:
    """How the copies of a Copier are made, and what they share. Thread-safe."""

    def __init__(self, options: CopyOptions, notice: Callable[[str], None] | None) -> None:
        """``notice``: called with lines for the user."""
        self.options = options
        self.notice = notice
        self.connections = IdleConnections(required=options.fastpath == "require", notice=notice)
        self._mounts = MountTable()
        self._attached: dict[int, dict[int, set[str]]] = {}  # modes by st_dev and inode
        # Of waiting for memory, for all copies together: if many do not fit, only the first wait.
        self._seconds_left = _WAIT_SECONDS

    def mounts(self) -> Mounts:
        """Return the mounts of this machine, by the st_dev of their files."""
        return self._mounts.by_device()

    def check_space(self, fd: int, needed: int, cancel: Cancellation | None, *, largest: int | None = None) -> None:
        """Raise OSError ENOSPC, with the figures, if ``needed`` bytes do not fit where an open file or directory is.

        Waits for the memory of files on a mount that have just been removed. ``largest``: of several files, the bytes
        of the largest one: a full device may park the others.
        """
        mounts = self.mounts().get(os.fstat(fd).st_dev, [])
        waited = False
        while text := shortage(fd, needed, mounts):
            if largest is not None and not shortage(fd, largest, mounts) and needed <= free_with_parking(fd, mounts):
                return
            if self._seconds_left <= 0 or not mounts or exceeds_all(fd, needed):
                raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {text}")
            if cancel is not None and cancel.cancelled:
                raise os_error(errno.ECANCELED)
            time.sleep(_RETRY_SECONDS)
            self._seconds_left -= _RETRY_SECONDS
            waited = True
        if waited:
            self._seconds_left = _WAIT_SECONDS

    def has_space(self, fd: int, needed: int) -> bool:
        """Return whether ``needed`` bytes fit where an open file or directory is, now."""
        return not shortage(fd, needed, self.mounts().get(os.fstat(fd).st_dev, []))

    def granules_of(self, fd: int) -> Granules:
        """Return how files in an open directory take memory."""
        return granules_of(fd, self.mounts().get(os.fstat(fd).st_dev, []))

    def is_written(self, status: os.stat_result) -> bool:
        """Return whether a program writes to a file in its memory, which changes no time before the program ends.

        As far as this user sees the programs of others, and as of the first question.
        """
        return not self._modes(status).isdisjoint(_WRITING)

    def is_held(self, status: os.stat_result) -> bool:
        """Return whether a file's memory stays when another file takes its name."""
        return status.st_nlink > 1 or bool(self._modes(status))

    def _modes(self, status: os.stat_result) -> Set[str]:
        """Return the modes in which programs have a file of a mount attached."""
        attached = self._attached.get(status.st_dev)
        if attached is None:
            attached = defaultdict(set)
            for lease in self.leases(status.st_dev):
                attached[lease["inode"]].add(lease["mode"])
            self._attached[status.st_dev] = attached
        return attached.get(status.st_ino, frozenset())

    def leases(self, st_dev: int) -> list[dict[str, Any]]:
        """Return the leases and registrations of a mount, none where they cannot be seen."""
        root = root_of(self.mounts().get(st_dev, []))
        try:
            return [] if root is None else list(control_file(root, "leases")["leases"])
        except OSError:
            return []

    def close(self) -> None:
        self.connections.close()
        self._mounts.close()


class CopyJob:
    """One copy, of which both ends are open.

    ``created``: the destination did not exist. ``stream``: the source is read from where it is to its end. ``new``: the
    destination, which gets its name at the end, by ``complete`` or without attributes. ``identity``: what the copy
    notes, of a source that a store has.
    """

    def __init__(
        self,
        context: CopyContext,
        source: OpenFile,
        destination: OpenFile,
        *,
        created: bool = False,
        stream: bool = False,
        new: NewFile | None = None,
        complete: Callable[[NewFile], None] | None = None,
        identity: Identity | None = None,
        progress: Progress = None,
        cancel: Cancellation | None = None,
    ) -> None:
        self.source = source
        self.destination = destination
        self.attributes = source.status  # to preserve
        self.fd = destination.fd  # -1 once it is closed
        self._context = context
        self._mounts = context.mounts()
        self._created = created
        self._stream = stream
        self._new = new
        self._give_name = complete
        self._identity = identity
        total = 0 if stream else entries.size_of(source)
        self._data = DataCopy(source.fd, destination.fd, total, progress, cancel)
        self._whole = False  # everything has been copied, and stays whatever fails
        self._emptied = False
        self._began = time.monotonic()

    @classmethod
    def open(
        cls,
        context: CopyContext,
        source: OpenFile,
        destination: Entry,
        *,
        stream: bool = False,
        readable: bool = False,
        complete: Callable[[NewFile], None] | None = None,
        identity: Identity | None = None,
        progress: Progress = None,
        cancel: Cancellation | None = None,
    ) -> CopyJob:
        """Open the destination, which is not changed yet. ``readable``: for reading too, where that is allowed."""
        mode = 0o666 if stream else stat.S_IMODE(source.status.st_mode) & 0o777
        # With its final mode only once it has its final owner, unless it has no name until then.
        named_mode = mode & 0o700 if context.options.preserve else mode
        new, mounts, created = None, context.mounts(), True
        if context.options.replace or identity is not None:
            new = entries.open_new(destination, source, mounts=mounts, mode=mode, named_mode=named_mode)
            fd = new.fd
        else:
            fd, created = entries.open_destination(
                destination, source, mounts=mounts, mode=named_mode, readable=readable
            )
        try:
            end = OpenFile(destination, fd, os.fstat(fd))
            how: dict[str, Any] = {"identity": identity, "complete": complete, "progress": progress, "cancel": cancel}
            return cls(context, source, end, created=created, stream=stream, new=new, **how)
        except BaseException:
            os.close(fd) if new is None else new.close()
            raise

    def run(self) -> CopyResult:
        """Copy, and close the destination. A failure leaves it as ``partial`` says."""
        self._began = time.monotonic()
        try:
            self._check_space()
            self._empty()
            self._move()
            digest = self._complete()
            if self._new is None:
                fd, self.fd = self.fd, -1
                os.close(fd)
        except OSError as error:
            left = self.clean_up(partial=self._context.options.partial)
            if isinstance(error, CopyError):
                error.left, error.bytes_done = left, self._data.done
                raise
            raise self._failure(error, left) from None
        except BaseException:
            self.clean_up(partial=self._context.options.partial)
            raise
        finally:
            self.close()
        return self._result(digest)

    def run_to_stream(self) -> CopyResult:
        """Copy to a destination without offsets, which stays open."""
        try:
            self._data.to_stream()
        except OSError as error:
            raise self._failure(error, self.clean_up(partial=True)) from None
        return self._result(None)

    def close(self) -> None:
        """Close the destination. A second call does nothing."""
        if self._new is not None:
            self._new.close()
        elif self.fd >= 0:
            close_all((self.fd,))
        self.fd = -1

    def read_from(self, copy: OpenFile) -> None:
        """Read another copy of the source instead of the source itself."""
        self.source = copy
        self._data.source_fd = copy.fd
        self._data.total = copy.status.st_size

    def _result(self, digest: str | None) -> CopyResult:
        data = self._data
        names = (self.source.entry.path, self.destination.entry.path)
        seconds = time.monotonic() - self._began
        return CopyResult(*names, data.done, seconds, data.method, data.paths, data.refusals, digest)

    def _on_mount(self) -> list[MountEntry]:
        """The mounts that the destination is on, none for a file of the host."""
        return self._mounts.get(self.destination.status.st_dev, [])

    def _is_regular(self) -> bool:
        return stat.S_ISREG(self.destination.status.st_mode)

    # ---- the steps of a copy ----

    def _check_space(self) -> None:
        if self._data.total <= SMALL_BYTES or not self._is_regular():
            return
        needed = data_bytes(self.source.status, self._data.total)
        try:
            self._context.check_space(self.fd, needed, self._data.cancel)
        except OSError as error:
            if error.errno != errno.ENOSPC or not self._context.options.partial:  # --partial copies as much as fits
                raise

    def _empty(self) -> None:
        """Truncate the destination. Registered memory is overwritten as a whole instead."""
        if self._is_regular() and not (self._created and not self.destination.status.st_size):
            try:
                os.ftruncate(self.fd, 0)
            except PermissionError:
                if not self._on_mount():
                    raise
                self._data.keeps_size = True
                if not self._stream:
                    self._check_fills()
                return
        self._emptied = True
        if not self._created:
            forget(self.fd)

    def _check_fills(self) -> None:
        size, given = self.destination.status.st_size, self._data.done if self._stream else self._data.total
        if given != size:
            text = f"registered memory keeps its size, {size} bytes, and the source has {given}"
            raise OSError(errno.EPERM, f"{text}: dd conv=notrunc writes a part")

    def _move(self) -> None:
        if self._context.options.update:
            settle(self.attributes)
        source, destination = self.source.status.st_dev, self.destination.status.st_dev
        if self._stream:
            self._read_stream()
        elif source in self._mounts and source == destination:
            self._data.by_kernel()
        elif source not in self._mounts and destination not in self._mounts:
            raise OSError(errno.EXDEV, entries.NEITHER)  # a directory was replaced after it was opened
        elif (source in self._mounts and destination in self._mounts) or self._is_small():
            self._data.through_mount()
        else:
            load = destination in self._mounts
            device = destination if load else source
            connections, options = self._context.connections, self._context.options
            if not self._data.by_daemon(connections, device, self._mounts[device], load=load, options=options):
                self._data.through_mount()

    def _is_small(self) -> bool:
        status = self.source.status
        size = status.st_size if stat.S_ISREG(status.st_mode) else 0
        return 0 < size <= SMALL_BYTES and self._context.options.fastpath == "auto"

    def _read_stream(self) -> None:
        try:
            self._data.from_stream()
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            place = place_of(self.fd, self._on_mount())
            text = f"{error.strerror}: the first {bytes_text(self._data.done)} have filled {place or 'it'}"
            raise OSError(errno.ENOSPC, text) from None
        if self._data.keeps_size:
            self._check_fills()

    def _complete(self) -> str | None:
        """Finish a copy whose bytes are in place; returns the checksum if one was asked for."""
        options, fd = self._context.options, self.fd
        if self._on_mount() and self._data.method == "transfer":
            # The kernel has cached the file, which the daemon has changed.
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            syscalls.refresh(fd)
        if options.preserve:
            self._whole = True  # without its attributes it still is a copy
            entries.preserve(fd, self.attributes)
            self._whole = False
        elif options.update and self._identity is None and self._is_regular():
            entries.set_times(fd, self.attributes)
        if self._identity is not None:
            self._identity.note(fd)
        durable = options.fsync and not self._on_mount()
        if durable and not self._data.synced:
            os.fsync(fd)
        digest = self._verify() if options.verify else None
        if self._new is not None and self._give_name is not None:
            self._give_name(self._new)
        elif self._new is not None:
            self._new.complete(self.destination.entry.name)
        if durable and self._created:
            assert self.destination.entry.directory is not None
            entries.sync_directory(self.destination.entry.directory)
        return digest

    def _verify(self) -> str:
        """The checksum that both files have. CopyError when they differ, or cannot be read."""
        # A block device continues behind the copy.
        end = self._data.done if stat.S_ISBLK(self.destination.status.st_mode) else None
        outcomes = self._data.checksums(end)
        total = self._data.total
        for file, outcome in zip((self.source, self.destination), outcomes, strict=True):
            if isinstance(outcome, OSError):
                text = f"verifying: {outcome.strerror or outcome}"
                raise CopyError(outcome.errno or errno.EIO, text, file.entry.path, bytes_total=total)
        copied, read_back = outcomes
        if copied != read_back:
            text = f"the copy differs: SHA-256 {copied} was copied, {read_back} was read back"
            names = (self.source.entry.path, self.destination.entry.path)
            raise CopyError(errno.EIO, text, *names, bytes_total=total)
        return str(copied)

    # ---- failures ----

    def clean_up(self, *, partial: bool) -> str:
        """After a failure: what becomes of the destination, also in words."""
        data = self._data
        copied = f"{self._amount()} were copied" if data.done else ""
        if self._new is not None:
            data.done = 0
            return ""
        if self._whole or not self._is_regular():
            return copied
        entry, keeps = self.destination.entry, partial and self._emptied
        if self._created and not keeps and remove_name(self.fd, entry.name, entry.directory):
            data.done = 0
            return ""
        if not self._emptied:
            return copied
        try:
            if syscalls.refresh(self.fd) > data.done:
                os.ftruncate(self.fd, data.done)
        except OSError:
            return ""  # the mount has died: there is nothing left to keep consistent
        if self._created:
            return f"{self._amount()} are kept"
        return f"the old content is gone, {self._amount()} were copied"

    def _amount(self) -> str:
        return f"{self._data.done} bytes" if self._stream else f"{self._data.done} of {self._data.total} bytes"

    def _failure(self, error: OSError, left: str) -> CopyError:
        code = error.errno or errno.EIO
        text = text_of(error)
        if code == errno.ENOSPC and self._emptied and not self._stream:
            needed = data_bytes(self.source.status, self._data.total)
            lack = shortage(self.fd, needed, self._on_mount())
            text = f"{text}: {lack}" if lack else text
        if code == errno.EBUSY and self._on_mount() and not self._emptied:
            holders = self._holders()
            text = f"{text}: {holders} it attached (gpufs sync replaces the file, gpufs replace gives it a new version)"
        source, destination = self.source.entry.path, self.destination.entry.path
        of_disk = code in _OF_DESTINATION and not self._on_mount()
        return (CopyError if of_disk else error_class(code))(
            code,
            text,
            *((destination, None) if code in _OF_DESTINATION else (source, destination)),
            bytes_done=self._data.done,
            bytes_total=self._data.total,
            device_code=getattr(error, "device_code", 0),
            left=left,
        )

    def _holders(self) -> str:
        """The programs that have the destination attached, as far as this user sees them, in words."""
        status = self.destination.status
        found = {
            f"{lease['program'] or 'a program'} ({lease['pid']})"
            for lease in self._context.leases(status.st_dev)
            if lease["inode"] == status.st_ino
        }
        return f"{', '.join(sorted(found)) or 'a program'} {'have' if len(found) > 1 else 'has'}"


# ---- the bytes ----


class DeviceError(OSError):
    """A failure that the daemon reported."""

    def __init__(self, error: int, message: str, device_code: int) -> None:
        super().__init__(error, with_user_names(message) or os.strerror(error))
        self.device_code = device_code


class DataCopy:
    """How the bytes of one copy move between two open files, which stay the caller's, and what has been moved.

    - The mount's daemon copies between the host and a mount ("transfer").
    - The kernel passes whole ranges inside one mount ("kernel").
    - This process reads and writes small files and pipes, and everything that the daemon does not copy ("mount").
    """

    def __init__(
        self,
        source_fd: int,
        destination_fd: int,
        total: int,
        progress: Progress,
        cancel: Cancellation | None,
    ) -> None:
        self.source_fd = source_fd
        self.destination_fd = destination_fd
        self.total = total  # bytes to copy: 0 for a stream
        self.done = 0  # bytes that have been copied from the start without a gap
        self.method = "mount"  # and the next two: as of CopyResult
        self.paths: dict[str, int] = {}
        self.refusals: tuple[str, ...] = ()
        self.synced = False  # the destination is on its disk already
        # Whether the destination is registered memory, whose size nobody can change: holes are written as zeros.
        self.keeps_size = False
        self.cancel = cancel
        self._progress = progress
        self._pace = Pace()

    def by_daemon(
        self, connections: IdleConnections, st_dev: int, mounts: list[MountEntry], *, load: bool, options: CopyOptions
    ) -> bool:
        """Have the daemon of a mount copy. False if nothing was moved: it cannot be reached, or it has no buffer.

        ``load``: the destination is on the mount.
        """
        connection = connections.take(st_dev, mounts)
        if connection is None:
            return False
        fds = (self.source_fd, self.destination_fd) if load else (self.destination_fd, self.source_fd)

        def report(progress: protocol.Progress) -> None:
            self.total = max(self.total, progress.total)
            if self._progress is not None:
                self._progress(CopyProgress(progress.moved, self.total, progress.paths))

        try:
            result = connection.copy(
                "load" if load else "store",
                *fds,
                fastpath=None if options.fastpath == "auto" else options.fastpath,
                sync="full" if options.fsync and not load else "none",
                interval=PROGRESS_SECONDS,
                progress=report if self._progress is not None else None,
                cancel=self.cancel,
            )
        except BaseException as error:
            if connection.last is not None:
                self.done = connection.last.done
            connection.close()
            # The daemon had no free descriptor to receive those of the request.
            if isinstance(error, OSError) and error.errno == errno.EMFILE and options.fastpath != "require":
                return False
            raise
        connections.give_back(st_dev, connection)
        if result.error in _NOT_BY_DAEMON and not result.done and options.fastpath != "require":
            return False
        self.method = "transfer"
        self.done = result.done
        self.paths = result.paths
        self.refusals = tuple(result.refusals)
        self.synced = options.fsync
        if result.error:
            raise DeviceError(result.error, result.message, result.device_code)
        return True

    def by_kernel(self) -> None:
        self.method = "kernel"
        step = _KERNEL_FIRST_BYTES
        while True:
            self.check_cancelled()
            began = time.monotonic()
            try:
                count = os.copy_file_range(self.source_fd, self.destination_fd, step, self.done, self.done)
            except OSError as error:
                if error.errno not in _NOT_BY_KERNEL:
                    raise
                count = 0
            if not count:
                break
            self._count("kernel", count)
            seconds = max(time.monotonic() - began, 1e-6)
            step = int(min(max(count * min(_KERNEL_SECONDS / seconds, _KERNEL_GROWTH), 1 << 20), _KERNEL_MOST_BYTES))
        # Copies what the kernel or the mount could not; at the end of the file that is nothing.
        self.through_mount()

    def through_mount(self) -> None:
        """Read and write, from where the copy is up to the end of the source; its holes stay holes."""
        buffer = memoryview(bytearray(min(_STREAM_BYTES, max(self.total - self.done, 4096))))
        holes = (
            not self.keeps_size
            and entries.has_holes(os.fstat(self.source_fd))
            and stat.S_ISREG(os.fstat(self.destination_fd).st_mode)  # empty where the copy has not been yet
        )
        data_end = self.done
        while True:
            self.check_cancelled()
            if holes and self.done == data_end:
                start, data_end = entries.next_data(self.source_fd, self.done)
                if start > self.done:
                    # The destination ends where the copy has got to, also where nothing follows.
                    os.ftruncate(self.destination_fd, start)
                    self._count("hole", start - self.done)
                    continue
            space = buffer[: data_end - self.done] if holes else buffer
            count = os.preadv(self.source_fd, [space], self.done)
            if not count:
                return
            self._write(buffer[:count])

    def from_stream(self) -> None:
        """Read the source, a pipe or another stream, to its end."""
        buffer = memoryview(bytearray(_STREAM_BYTES))
        while filled := _read_full(self.source_fd, buffer):
            self.check_cancelled()
            self._write(buffer[:filled])

    def _write(self, data: memoryview) -> None:
        while data:
            count = os.pwrite(self.destination_fd, data, self.done)
            self._count("mount", count)
            data = data[count:]

    def to_stream(self) -> None:
        """Write the source to a destination that has no offsets."""
        buffer = memoryview(bytearray(_STREAM_BYTES))
        while count := os.preadv(self.source_fd, [buffer], self.done):
            self.check_cancelled()
            data = buffer[:count]
            while data:
                step = _write_some(self.destination_fd, data)
                self._count("mount", step)
                data = data[step:]

    def checksums(self, end: int | None) -> list[str | OSError]:
        """The SHA-256 of both files, or the errors of reading them. ``end``: where the destination's content ends."""
        from gpufs import waiting  # these take longer to import than a small file to copy
        from gpufs.copying.checksums import sha256_of

        # Opened again through the descriptor: this is the file that was written, whatever its name refers to now.
        back = os.open(path_of(self.destination_fd), os.O_RDONLY | os.O_CLOEXEC)
        ended = threading.Event()

        def cancelled() -> bool:
            return ended.is_set() or (self.cancel is not None and self.cancel.cancelled)

        def read_back() -> str:
            try:
                return sha256_of(back, cancelled, end=end)
            finally:
                os.close(back)  # by this thread: an exception of the other one cannot close it during a read

        try:
            for fd in (self.destination_fd, back):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            reading = waiting.start(read_back)
        except BaseException:
            os.close(back)
            raise
        found: list[str | OSError] = []
        try:
            read = partial(sha256_of, self.source_fd, cancelled, lambda offset: self._report(offset, "verify"))
            for result in (read, reading.result):
                try:
                    found.append(result())
                except OSError as error:
                    found.append(error)
        finally:
            ended.set()
        return found

    def check_cancelled(self) -> None:
        """OSError ECANCELED once the copy is cancelled."""
        if self.cancel is not None and self.cancel.cancelled:
            raise os_error(errno.ECANCELED)

    def _count(self, path: str, count: int) -> None:
        self.done += count
        self.total = max(self.total, self.done)
        self.paths[path] = self.paths.get(path, 0) + count
        self._report(self.done)

    def _report(self, moved: int, phase: str = "copy") -> None:
        if self._progress is not None and self._pace.is_due():
            self._progress(CopyProgress(moved, self.total, dict(self.paths), phase))


def _read_full(fd: int, buffer: memoryview) -> int:
    """Fill a buffer from a pipe or another stream. Returns fewer bytes only at the stream's end."""
    filled = 0
    while filled < len(buffer):
        try:
            count = os.readv(fd, [buffer[filled:]])
        except BlockingIOError:  # the stream's other users have made it non-blocking
            _await(fd, select.POLLIN)
            continue
        if not count:
            break
        filled += count
    return filled


def _write_some(fd: int, data: memoryview) -> int:
    """Write to a pipe or another stream. Returns how many bytes it took, at least one."""
    while True:
        try:
            return os.write(fd, data)
        except BlockingIOError:
            _await(fd, select.POLLOUT)


def _await(fd: int, event: int) -> None:
    poll = select.poll()
    poll.register(fd, event)
    while not poll.poll(1000):  # in short waits: see gpufs/waiting.py
        pass
