"""How the bytes of a copy get from one open file to another.

- The mount's daemon copies between the host and a mount ("transfer").
- The kernel passes whole ranges inside one mount ("kernel").
- This process reads and writes small files and pipes, and everything that the daemon does not copy ("mount").
"""

from __future__ import annotations

import errno
import os
import select
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from gpufs.client._cancellation import Cancellation
from gpufs.client._daemons import IdleConnections
from gpufs.copying import entries
from gpufs.copying.types import PROGRESS_SECONDS, CopyOptions, CopyProgress, Pace, Progress
from gpufs.exceptions import with_user_names
from gpufs.mounting import MountEntry
from gpufs.syscalls import os_error, path_of

if TYPE_CHECKING:
    from gpufs import protocol

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


class DeviceError(OSError):
    """A failure that the daemon reported."""

    def __init__(self, error: int, message: str, device_code: int) -> None:
        super().__init__(error, with_user_names(message) or os.strerror(error))
        self.device_code = device_code


class DataCopy:
    """The bytes of one copy: two open files, which stay the caller's, and what has been moved."""

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
        """Copy inside one mount."""
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
        holes = not self.keeps_size and entries.may_have_holes(self.source_fd, self.destination_fd)
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

    def checksums(self, end: int | None) -> tuple[str | OSError, str | OSError]:
        """The SHA-256 of both files, or the errors of reading them. ``end``: where the destination's content ends."""
        # Opened again through the descriptor: this is the file that was written, whatever its name refers to now.
        back = os.open(path_of(self.destination_fd), os.O_RDONLY | os.O_CLOEXEC)
        ended = threading.Event()
        of_destination: list[str | OSError] = []

        def cancelled() -> bool:
            return self.cancel is not None and self.cancel.cancelled

        def read_back() -> None:
            try:
                of_destination.append(_checksum(back, lambda: ended.is_set() or cancelled(), lambda offset: None, end))
            finally:
                os.close(back)

        reader = threading.Thread(target=read_back, daemon=True)
        try:
            for fd in (self.destination_fd, back):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            reader.start()
        except BaseException:
            os.close(back)
            raise
        try:
            # The thread closes its own descriptor, so an exception here cannot close it during a read.
            of_source = _checksum(self.source_fd, cancelled, lambda offset: self._report(offset, "verify"), None)
            reader.join()
        finally:
            ended.set()
        return of_source, of_destination[0]

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
        """Report progress, but not too often."""
        if self._progress is not None and self._pace.is_due():
            self._progress(CopyProgress(moved, self.total, dict(self.paths), phase))


def _checksum(fd: int, cancelled: Callable[[], bool], report: Callable[[int], None], end: int | None) -> str | OSError:
    from gpufs.copying.checksums import sha256_of  # hashlib takes longer to import than a small file to copy

    try:
        return sha256_of(fd, cancelled, report, end)
    except OSError as error:
        return error


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
