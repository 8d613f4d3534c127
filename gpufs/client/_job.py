"""One copy: the room for it, how the bytes get from an open file to another, and what a failure leaves.

- Between the host and a mount, the mount's daemon copies them ("transfer"). Small files are read and written through
  the mount ("mount"), and so are all files if the daemon's socket cannot be reached.
- Inside one mount, the kernel passes whole ranges to the mount ("kernel").
- Pipes are read and written here ("mount").
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from gpufs import syscalls
from gpufs.client import _ends, _room
from gpufs.client._copy_types import (
    Cancellation,
    CopyError,
    CopyProgress,
    CopyResult,
    NotOnMountCopyError,
    error_class,
)
from gpufs.client._daemons import IdleConnections
from gpufs.client._ends import Entry
from gpufs.exceptions import text_of
from gpufs.mounting import MountEntry
from gpufs.syscalls import close_all
from gpufs.units import bytes_text

if TYPE_CHECKING:
    from gpufs.protocol import Direction, Progress

Fastpath = Literal["auto", "off", "require"]
Mounts = dict[int, list[MountEntry]]  # by st_dev

# Up to this size one read and one write are faster than a request to the daemon.
_SMALL_BYTES: Final = 128 << 10
# How long copies wait for memory: a file that has just been removed or closed frees its memory a moment later.
_SPACE_SECONDS: Final = 3.0
_SPACE_RETRY_SECONDS: Final = 0.02
_NEITHER: Final = "neither of them is on a gpufs mount: use cp"
_STREAM_BYTES: Final = 4 << 20
_PROGRESS_SECONDS: Final = 0.1
# One copy_file_range at a time should take about this long, so that cancellation and progress come soon.
_KERNEL_SECONDS: Final = 0.2
_KERNEL_FIRST_BYTES: Final = 64 << 20
_KERNEL_GROWTH: Final = 16
_KERNEL_MOST_BYTES: Final = 16 << 30
_NOT_BY_KERNEL: Final = (errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
# The daemon's answers for files without a buffer: control files, files below backing/, and copies whose other end is on
# a gpufs as well. All of them can be read and written as files.
_NOT_BY_DAEMON: Final = (errno.EXDEV, errno.EDEADLK, errno.EINVAL)
# Failures of the destination alone.
_DESTINATIONS: Final = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EROFS)


class _DeviceError(OSError):
    """A failure that the daemon reported."""

    def __init__(self, error: int, message: str, device_code: int) -> None:
        super().__init__(error, message or os.strerror(error))
        self.device_code = device_code


@dataclass
class Settings:
    """How copies are made, and what they share; see Copier.

    ``patience``: for how long copies may still wait for memory, in all: if many files do not fit, only the first wait.
    """

    fastpath: Fastpath
    fsync: bool
    verify: bool
    preserve: bool
    partial: bool
    connections: IdleConnections
    patience: float = _SPACE_SECONDS

    def check_room(self, fd: int, needed: int, mounts: Mounts, cancel: Cancellation | None) -> None:
        """Raises OSError ENOSPC, with the figures, if ``needed`` bytes do not fit where an open file or directory is.

        Waits for the memory of files on a mount that have just been removed.
        """
        here = mounts.get(os.fstat(fd).st_dev, [])
        waited = False
        while text := _room.shortage(fd, needed, here):
            if self.patience <= 0 or not here or _room.exceeds_all(fd, needed):
                raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {text}")
            if cancel is not None and cancel.cancelled:
                raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))
            time.sleep(_SPACE_RETRY_SECONDS)
            self.patience -= _SPACE_RETRY_SECONDS
            waited = True
        if waited:
            self.patience = _SPACE_SECONDS


class CopyJob:
    """One copy: both ends open, and what has been moved. ``before``, ``after``: attributes of source and destination
    when they were opened. ``created``: the destination did not exist.
    """

    def __init__(
        self,
        settings: Settings,
        source: Entry,
        destination: Entry,
        source_fd: int,
        destination_fd: int,
        before: os.stat_result,
        after: os.stat_result,
        created: bool,
        mounts: Mounts,
        *,
        stream: bool = False,
    ) -> None:
        self.settings = settings
        self.source = source
        self.destination = destination
        self.source_fd = source_fd
        self.destination_fd = destination_fd
        self.before = before
        self.attributes = before  # to preserve
        self.after = after
        self.created = created
        self.mounts = mounts
        self.stream = stream  # the source is read from where it is to its end
        self.progress: Callable[[CopyProgress], None] | None = None
        self.cancel: Cancellation | None = None
        self.whole = False  # everything has been copied, and stays whatever fails
        self.total = 0 if stream else _ends.size_of(source_fd, before)
        self.done = 0
        self.method = "mount"
        self.paths: dict[str, int] = {}
        self.refusals: tuple[str, ...] = ()
        self.synced = False
        self._emptied = False
        self._keeps_size = False  # the destination is registered memory, whose size nobody can change
        self._began = time.monotonic()
        self._reported = 0.0

    @classmethod
    def open(
        cls,
        settings: Settings,
        source: Entry,
        destination: Entry,
        source_fd: int,
        before: os.stat_result,
        mounts: Mounts,
        *,
        stream: bool = False,
        readable: bool = False,
    ) -> CopyJob:
        """Opens the destination, which is not changed yet. ``readable``: for reading too, where that is allowed."""

        def check_device(device: int) -> None:
            if before.st_dev not in mounts and device not in mounts:
                raise NotOnMountCopyError(errno.EXDEV, _NEITHER, source.path, destination.path)

        # With its final mode only once it has its final owner.
        mode = 0o666 if stream else stat.S_IMODE(before.st_mode) & (0o700 if settings.preserve else 0o777)
        store = readable or before.st_dev in mounts
        fd, created = _ends.open_destination(destination, before, mode=mode, store=store, check_device=check_device)
        try:
            after = os.fstat(fd)
            return cls(settings, source, destination, source_fd, fd, before, after, created, mounts, stream=stream)
        except BaseException:
            os.close(fd)
            raise

    def run(self) -> CopyResult:
        """Copies, and closes the destination. A failure leaves it as ``partial`` says."""
        self._began = time.monotonic()
        try:
            self._check_room()
            self.empty()
            self._move()
            digest = self._complete()
            fd, self.destination_fd = self.destination_fd, -1
            os.close(fd)
        except OSError as error:
            left = self.clean_up(partial=self.settings.partial)
            if isinstance(error, CopyError):
                error.left, error.bytes_done = left, self.done
                raise
            raise self.failure(error, left) from None
        except BaseException:
            self.clean_up(partial=self.settings.partial)
            raise
        finally:
            if self.destination_fd >= 0:
                close_all((self.destination_fd,))
        return self.result(digest)

    def result(self, digest: str | None = None) -> CopyResult:
        """What a copy that has succeeded returns."""
        names = (self.source.path, self.destination.path)
        seconds = time.monotonic() - self._began
        return CopyResult(*names, self.done, seconds, self.method, self.paths, self.refusals, digest)

    def _check_room(self) -> None:
        if self.total <= _SMALL_BYTES or not stat.S_ISREG(self.after.st_mode):
            return
        needed = _room.data_bytes(self.before, self.total)
        try:
            self.settings.check_room(self.destination_fd, needed, self.mounts, self.cancel)
        except OSError as error:
            if error.errno != errno.ENOSPC or not self.settings.partial:  # which wants as much as fits
                raise

    def _move(self) -> None:
        source, destination = self.before.st_dev, self.after.st_dev
        if self.stream:
            self.from_stream()
            if self._keeps_size:
                self._check_fills()
        elif source in self.mounts and source == destination:
            self.by_kernel()
        elif source not in self.mounts and destination not in self.mounts:
            raise OSError(errno.EXDEV, _NEITHER)  # a directory was replaced after it was opened
        elif (source in self.mounts and destination in self.mounts) or self._is_small() or not self.by_daemon():
            self.through_mount()

    def _is_small(self) -> bool:
        size = self.before.st_size if stat.S_ISREG(self.before.st_mode) else 0
        return 0 < size <= _SMALL_BYTES and self.settings.fastpath == "auto"

    def _complete(self) -> str | None:
        """Finishes a copy whose bytes are in place; returns the checksum if one was asked for."""
        on_mount = self.after.st_dev in self.mounts
        if on_mount:
            _ends.settle_on_mount(self.destination_fd)
        if self.settings.preserve:
            self.whole = True  # without its attributes it still is a copy
            _ends.preserve(self.destination_fd, self.attributes)
            self.whole = False
        if self.settings.fsync and not on_mount:
            directory = self.destination.directory if self.created else None
            _ends.make_durable(self.destination_fd, directory, synced=self.synced)
        return self.verify() if self.settings.verify else None

    def read_from(self, copy: Entry, copy_fd: int) -> None:
        """Reads another copy of the source instead of the source itself."""
        self.source = copy
        self.source_fd = copy_fd
        self.before = os.fstat(copy_fd)
        self.total = self.before.st_size

    def empty(self) -> None:
        """Truncates the destination. Registered memory is overwritten as a whole instead."""
        if stat.S_ISREG(self.after.st_mode):
            try:
                os.ftruncate(self.destination_fd, 0)
            except PermissionError:
                if self.after.st_dev not in self.mounts:
                    raise
                self._keeps_size = True
                if not self.stream:
                    self._check_fills()
                return
        self._emptied = True

    def _check_fills(self) -> None:
        size, given = self.after.st_size, self.done if self.stream else self.total
        if given != size:
            text = f"registered memory keeps its size, {size} bytes, and the source has {given}"
            raise OSError(errno.EPERM, f"{text}: dd conv=notrunc writes a part")

    def clean_up(self, *, partial: bool) -> str:
        """After a failure: what becomes of the destination, also in words."""
        if self.whole or not stat.S_ISREG(self.after.st_mode):
            return f"{self._amount()} were copied" if self.done else ""
        if self.created and not (partial and self._emptied) and _ends.remove(self.destination, self.destination_fd):
            self.done = 0
            return ""
        if not self._emptied:
            return f"{self._amount()} were copied" if self.done else ""
        try:
            if syscalls.refresh(self.destination_fd) > self.done:
                os.ftruncate(self.destination_fd, self.done)
        except OSError:
            return ""  # its mount has died: there is nothing left to keep consistent
        if self.created:
            return f"{self._amount()} are kept"
        return f"the old content is gone, {self._amount()} were copied"

    def _amount(self) -> str:
        return f"{self.done} bytes" if self.stream else f"{self.done} of {self.total} bytes"

    def failure(self, error: OSError, left: str) -> CopyError:
        """The error for the user."""
        code = error.errno or errno.EIO
        text = text_of(error)
        if code == errno.ENOSPC and self._emptied and not self.stream:
            needed = _room.data_bytes(self.before, self.total)
            lack = _room.shortage(self.destination_fd, needed, self.mounts.get(self.after.st_dev, []))
            text = f"{text}: {lack}" if lack else text
        names = (self.destination.path, None) if code in _DESTINATIONS else (self.source.path, self.destination.path)
        of_disk = code in _DESTINATIONS and self.after.st_dev not in self.mounts
        return (CopyError if of_disk else error_class(code))(
            code,
            text,
            *names,
            bytes_done=self.done,
            bytes_total=self.total,
            device_code=getattr(error, "device_code", 0),
            left=left,
        )

    def verify(self) -> str:
        """The checksum that both files have. CopyError when they differ, or cannot be read."""
        from gpufs.client._verify import checksums

        # A block device continues behind the copy.
        end = self.done if stat.S_ISBLK(self.after.st_mode) else None
        found = checksums(
            self.source_fd,
            self.destination_fd,
            end,
            stopped=lambda: self.cancel is not None and self.cancel.cancelled,
            report=lambda offset: self.report(offset, "verify"),
        )
        for entry, outcome in zip((self.source, self.destination), found, strict=True):
            if isinstance(outcome, OSError):
                text = f"verifying: {outcome.strerror or outcome}"
                raise CopyError(outcome.errno or errno.EIO, text, entry.path, bytes_total=self.total)
        ours, theirs = found
        if ours != theirs:
            text = f"the copy differs: SHA-256 {ours} was copied, {theirs} was read back"
            raise CopyError(errno.EIO, text, self.source.path, self.destination.path, bytes_total=self.total)
        return str(ours)

    def by_daemon(self) -> bool:
        """False if nothing was moved: the daemon cannot be reached, or has no buffer for these files."""
        from gpufs.protocol import LOAD, STORE  # which the copy of a small file does not need

        device, host, mount = self.after.st_dev, self.source_fd, self.destination_fd
        direction: Direction = LOAD
        if device not in self.mounts:
            device, host, mount = self.before.st_dev, mount, host
            direction = STORE
        fastpath, fsync, connections = self.settings.fastpath, self.settings.fsync, self.settings.connections
        connection = connections.take(device, self.mounts[device])
        if connection is None:
            return False

        def report(progress: Progress) -> None:
            self.total = max(self.total, progress.total)
            if self.progress is not None:
                self.progress(CopyProgress(progress.moved, self.total, progress.paths))

        try:
            result = connection.copy(
                direction,
                host,
                mount,
                fastpath=None if fastpath == "auto" else fastpath,
                sync="full" if fsync and direction == STORE else "none",
                interval=_PROGRESS_SECONDS,
                progress=report if self.progress is not None else None,
                cancel=self.cancel,
            )
        except BaseException as error:
            if connection.last is not None:
                self.done = connection.last.done
            connection.close()
            # The daemon had no free descriptor to receive those of the request.
            if isinstance(error, OSError) and error.errno == errno.EMFILE and fastpath != "require":
                return False
            raise
        connections.give_back(device, connection)
        if result.error in _NOT_BY_DAEMON and not result.done and fastpath != "require":
            return False
        self.method = "transfer"
        self.done = result.done
        self.paths = result.paths
        self.refusals = tuple(result.refusals)
        self.synced = fsync
        if result.error:
            raise _DeviceError(result.error, result.message, result.device_code)
        return True

    def by_kernel(self) -> None:
        """Inside one mount."""
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
        """Reads and writes, from where the copy is up to the end of the source; its holes stay holes."""
        buffer = memoryview(bytearray(min(_STREAM_BYTES, max(self.total - self.done, 4096))))
        holes = not self._keeps_size and _ends.may_have_holes(self.source_fd, self.destination_fd)
        data_end = self.done
        while True:
            self.check_cancelled()
            if holes and self.done == data_end:
                start, data_end = _ends.next_data(self.source_fd, self.done)
                if start > self.done:
                    # Its size is as far as it was copied, also where nothing follows.
                    os.ftruncate(self.destination_fd, start)
                    self._count("hole", start - self.done)
                    continue
            room = buffer[: data_end - self.done] if holes else buffer
            count = os.preadv(self.source_fd, [room], self.done)
            if not count:
                return
            written = 0
            while written < count:
                step = os.pwrite(self.destination_fd, buffer[written:count], self.done)
                written += step
                self._count("mount", step)

    def from_stream(self) -> None:
        """Reads the source, whose size is not known, to its end."""
        from gpufs.client._pipes import read_full

        buffer = memoryview(bytearray(_STREAM_BYTES))
        while filled := read_full(self.source_fd, buffer):
            self.check_cancelled()
            written = 0
            while written < filled:
                try:
                    step = os.pwrite(self.destination_fd, buffer[written:filled], self.done)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    place = _room.place_of(self.destination_fd, self.mounts.get(self.after.st_dev, []))
                    text = f"{error.strerror}: the first {bytes_text(self.done)} have filled {place or 'it'}"
                    raise OSError(errno.ENOSPC, text) from None
                written += step
                self._count("mount", step)

    def to_stream(self) -> None:
        """Writes the source to a destination that has no offsets."""
        from gpufs.client._pipes import write_some

        buffer = memoryview(bytearray(_STREAM_BYTES))
        while count := os.preadv(self.source_fd, [buffer], self.done):
            self.check_cancelled()
            written = 0
            while written < count:
                step = write_some(self.destination_fd, buffer[written:count])
                written += step
                self._count("mount", step)

    def check_cancelled(self) -> None:
        if self.cancel is not None and self.cancel.cancelled:
            raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))

    def _count(self, path: str, count: int) -> None:
        self.done += count
        self.total = max(self.total, self.done)
        self.paths[path] = self.paths.get(path, 0) + count
        self.report(self.done)

    def report(self, moved: int, phase: str = "copy") -> None:
        """Reports progress, but not too often."""
        now = time.monotonic()
        if self.progress is not None and now - self._reported >= _PROGRESS_SECONDS:
            self._reported = now
            self.progress(CopyProgress(moved, self.total, dict(self.paths), phase))
