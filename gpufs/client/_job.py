"""One copy: how the bytes get from an open file to another.

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
from typing import Final, Literal

from gpufs.client import _ends, _room
from gpufs.client._connection import Cancellation, Connection
from gpufs.client._ends import Entry
from gpufs.client._outcome import CopyError, CopyProgress, text_of
from gpufs.mounting import MountEntry
from gpufs.protocol import STORE, Progress, statx
from gpufs.units import bytes_text

Fastpath = Literal["auto", "off", "require"]
Mounts = dict[int, list[MountEntry]]  # by st_dev

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


class CopyJob:
    """One copy: both ends open, and what has been moved. ``before``, ``after``: attributes of source and destination
    when they were opened. ``created``: the destination did not exist.
    """

    def __init__(
        self,
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
        self._reported = 0.0

    def read_from(self, copy: Entry, copy_fd: int) -> None:
        """Reads another copy of the source instead of the source itself."""
        self.source = copy
        self.source_fd = copy_fd
        self.before = os.fstat(copy_fd)
        self.total = self.before.st_size

    def empty(self) -> None:
        """Truncates the destination."""
        if stat.S_ISREG(self.after.st_mode):
            os.ftruncate(self.destination_fd, 0)
        self._emptied = True

    def clean_up(self, *, partial: bool) -> str:
        """After a failure: what becomes of the destination, also in words."""
        if self.whole or not stat.S_ISREG(self.after.st_mode):
            return f"{self._amount()} were copied" if self.done else ""
        if self.created and not (partial and self._emptied) and _ends.remove(self.destination, self.destination_fd):
            self.done = 0
            return ""
        if not self._emptied:
            return ""
        try:
            if statx.refresh(self.destination_fd) > self.done:
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
        return CopyError(
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

    def by_daemon(self, connection: Connection, direction: str, fastpath: Fastpath, *, fsync: bool) -> bool:
        """False when the daemon has no buffer for these files and nothing was moved."""
        host, mount = self.source_fd, self.destination_fd
        if direction == STORE:
            host, mount = mount, host

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
        except BaseException:
            if connection.last is not None:
                self.done = connection.last.done
            raise
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
        holes = _ends.may_have_holes(self.source_fd, self.destination_fd)
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
