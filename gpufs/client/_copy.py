"""Copies between files, at least one of them on a mount.

How the bytes are copied:

- Between the host and a mount, the mount's daemon copies them ("transfer"). Small files are read and written through
  the mount ("mount"), and so are all files if the daemon's socket cannot be reached.
- Inside one mount, the kernel passes whole ranges to the mount ("kernel").
- Pipes are read and written here ("mount").
"""

from __future__ import annotations

import errno
import os
import stat
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final, Literal, Self

from gpufs.client import _ends, _find, _room
from gpufs.client._connection import Cancellation, Connection, IdleError
from gpufs.client._ends import Entry
from gpufs.client._outcome import CopyError, CopyProgress, CopyResult, text_of
from gpufs.mounting import MountEntry
from gpufs.protocol import LOAD, STORE, Progress, close_all, statx
from gpufs.units import bytes_text

Fastpath = Literal["auto", "off", "require"]

# Up to this size one read and one write are faster than a request to the daemon.
_SMALL_BYTES: Final = 128 << 10
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
# An unreachable daemon is tried again after this many seconds, plus this many times the duration of the failed try.
_RETRY_SECONDS: Final = 1.0
_RETRY_FACTOR: Final = 10.0
# How long copies wait for memory: a file that has just been removed or closed frees its memory a moment later.
_SPACE_SECONDS: Final = 3.0
_SPACE_RETRY_SECONDS: Final = 0.02
# The name of a pipe, in messages.
STREAM: Final = "-"
_NEITHER: Final = "neither of them is on a gpufs mount: use cp"


class Copier:
    """Copies files one after the other or from several threads, and keeps its connections to daemons for the next.

    ``fastpath``: "off" and "require" override the mount's configuration. ``fsync``: writes host files to disk before a
    copy succeeds. ``verify``: reads both files again, with ``fsync`` from disk, and compares their SHA-256.
    ``preserve``: keeps mode, times and, if allowed, owner of the source. ``partial``: a copy that does not fit is begun
    all the same, and a failed or cancelled copy keeps a new destination, with the bytes copied so far, instead of
    removing it. ``notice``: called with one line, once for each mount whose daemon cannot be reached.
    """

    def __init__(
        self,
        *,
        fastpath: Fastpath = "auto",
        fsync: bool = False,
        verify: bool = False,
        preserve: bool = False,
        partial: bool = False,
        notice: Callable[[str], None] | None = None,
    ) -> None:
        if fastpath not in ("auto", "off", "require"):
            raise ValueError(f"fastpath: {fastpath!r} is not one of auto, off, require")
        self._fastpath: Fastpath = fastpath
        self._fsync = fsync
        self._verify = verify
        self._preserve = preserve
        self._partial = partial
        self._notice = notice
        self._process = os.getpid()
        self._patience = _SPACE_SECONDS  # in all: if many files do not fit, only the first ones wait
        self._lock = threading.Lock()  # guards all below
        self._idle: dict[int, list[Connection]] = {}  # by the mount's st_dev
        self._unreachable: dict[int, tuple[float, OSError]] = {}  # until when, and why
        self._noticed: set[int] = set()

    def close(self) -> None:
        """Ends the connections."""
        self._after_fork()
        with self._lock:
            idle, self._idle = self._idle, {}
        for connections in idle.values():
            for connection in connections:
                connection.close()

    def _after_fork(self) -> None:
        """In a forked child: the connections are the parent's, and its threads may have held the lock."""
        if self._process == os.getpid():
            return
        self._process = os.getpid()
        self._lock = threading.Lock()
        for connections in self._idle.values():
            for connection in connections:
                connection.close()
        self._idle = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def copy_file(
        self,
        source: str,
        destination: str,
        *,
        progress: Callable[[CopyProgress], None] | None = None,
        cancel: Cancellation | None = None,
    ) -> CopyResult:
        """Copies one file to a name and overwrites an existing file. Raises CopyError.

        ``progress`` is called from this thread about ten times a second; an exception that it raises ends the copy. A
        copy that is cancelled before it starts changes nothing.
        """
        return self.copy_entry(Entry.of(source), Entry.of(destination), progress=progress, cancel=cancel)

    def copy_entry(
        self,
        source: Entry,
        destination: Entry,
        *,
        progress: Callable[[CopyProgress], None] | None = None,
        cancel: Cancellation | None = None,
    ) -> CopyResult:
        """As :meth:`copy_file`, for names in directories that are open."""
        began = time.monotonic()
        self._after_fork()
        if progress is not None and not callable(progress):
            raise TypeError(f"progress: {progress!r} cannot be called")
        if cancel is not None:
            if not isinstance(cancel, Cancellation):
                raise TypeError(f"cancel: {cancel!r} is not a Cancellation")
            if cancel.cancelled:
                raise CopyError(errno.ECANCELED, "", source.path, destination.path)
        if not destination.path:
            raise CopyError(errno.ENOENT, "", destination.path)
        mounts = _find.mounts_by_device()
        source_fd, before = _ends.open_source(source)
        try:
            with destination.located() as located:
                job = self._open(source, located, source_fd, before, mounts)
                job.progress, job.cancel = progress, cancel
                return self._run(job, began)
        except CopyError:
            raise
        except OSError as error:  # of the destination's directory
            raise _ends.open_failure(error, destination.path) from None
        finally:
            close_all((source_fd,))

    def copy_to_each(
        self,
        source: Entry,
        destinations: Sequence[Entry],
        *,
        progress: Callable[[CopyProgress], None] | None = None,
        cancel: Cancellation | None = None,
    ) -> list[CopyResult | CopyError]:
        """Copies one file to several names; the outcomes are in the order of ``destinations``.

        The source is read once for each mount: its first copy there is the source of the others. A destination that
        fails does not end the other copies. ``progress`` counts the bytes of all copies, and is called from several
        threads, one at a time.
        """
        from gpufs.client._fan_out import FanOut

        self._after_fork()
        return FanOut(self, source, destinations, progress, cancel).run()

    def copy_from_stream(
        self,
        source_fd: int,
        destination: Entry,
        *,
        progress: Callable[[CopyProgress], None] | None = None,
        cancel: Cancellation | None = None,
    ) -> CopyResult:
        """Copies what a pipe, or another open file, returns up to its end. Its descriptor stays the caller's.

        The calling thread reads, so an OSError that a signal handler raises ends the copy.
        """
        began = time.monotonic()
        try:
            mounts = _find.mounts_by_device()
            with destination.located() as located:
                job = self._open(Entry.of(STREAM), located, source_fd, os.fstat(source_fd), mounts, stream=True)
                job.progress, job.cancel = progress, cancel
                return self._run(job, began)
        except CopyError:
            raise
        except OSError as error:  # of the destination's directory
            raise _ends.open_failure(error, destination.path) from None

    def copy_to_stream(
        self,
        source: Entry,
        destination_fd: int,
        *,
        progress: Callable[[CopyProgress], None] | None = None,
        cancel: Cancellation | None = None,
    ) -> CopyResult:
        """Copies a file into a pipe, or another open file, whose descriptor stays the caller's."""
        began = time.monotonic()
        source_fd, before = _ends.open_source(source)
        try:
            mounts = _find.mounts_by_device()
            if before.st_dev not in mounts:
                raise CopyError(errno.EXDEV, "is not on a gpufs mount: use cat", source.path)
            job = _CopyJob(
                source, Entry.of(STREAM), source_fd, destination_fd, before, os.fstat(destination_fd), False, mounts
            )
            job.progress, job.cancel = progress, cancel
            if stat.S_ISREG(before.st_mode) and os.path.samestat(before, job.after):
                raise CopyError(errno.EINVAL, "is the same file as the output", source.path)
            try:
                job.to_stream()
            except OSError as error:
                raise job.failure(error, job.clean_up(partial=True)) from None
            seconds = time.monotonic() - began
            return CopyResult(source.path, STREAM, job.done, seconds, job.method, job.paths)
        finally:
            close_all((source_fd,))

    def _open(
        self,
        source: Entry,
        destination: Entry,
        source_fd: int,
        before: os.stat_result,
        mounts: _Mounts,
        *,
        stream: bool = False,
        readable: bool = False,
    ) -> _CopyJob:
        """Opens the destination, which is not changed yet. ``readable``: for reading too, where that is allowed."""

        def check_device(device: int) -> None:
            if before.st_dev not in mounts and device not in mounts:
                raise CopyError(errno.EXDEV, _NEITHER, source.path, destination.path)

        # With its final mode only once it has its final owner.
        mode = 0o666 if stream else stat.S_IMODE(before.st_mode) & (0o700 if self._preserve else 0o777)
        store = readable or before.st_dev in mounts
        fd, created = _ends.open_destination(destination, before, mode=mode, store=store, check_device=check_device)
        try:
            return _CopyJob(source, destination, source_fd, fd, before, os.fstat(fd), created, mounts, stream=stream)
        except BaseException:
            os.close(fd)
            raise

    def _run(self, job: _CopyJob, began: float) -> CopyResult:
        """Copies, and closes the destination. A failure leaves it as ``partial`` says."""
        try:
            self._check_room_of(job)
            job.empty()
            self._move(job)
            digest = self._complete(job)
            fd, job.destination_fd = job.destination_fd, -1
            os.close(fd)
        except OSError as error:
            left = job.clean_up(partial=self._partial)
            if isinstance(error, CopyError):
                error.left, error.bytes_done = left, job.done
                raise
            raise job.failure(error, left) from None
        except BaseException:
            job.clean_up(partial=self._partial)
            raise
        finally:
            if job.destination_fd >= 0:
                close_all((job.destination_fd,))
        seconds = time.monotonic() - began
        names = (job.source.path, job.destination.path)
        return CopyResult(*names, job.done, seconds, job.method, job.paths, job.refusals, digest)

    def check_room(
        self, fd: int, needed: int, *, mounts: _Mounts | None = None, cancel: Cancellation | None = None
    ) -> None:
        """Raises OSError ENOSPC, with the figures, if ``needed`` bytes do not fit where an open file or directory is.

        Waits for the memory of files on a mount that have just been removed.
        """
        mounts_by_device = _find.mounts_by_device() if mounts is None else mounts
        here = mounts_by_device.get(os.fstat(fd).st_dev, [])
        waited = False
        while text := _room.shortage(fd, needed, here):
            if self._patience <= 0 or not here:
                raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {text}")
            if cancel is not None and cancel.cancelled:
                raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))
            time.sleep(_SPACE_RETRY_SECONDS)
            self._patience -= _SPACE_RETRY_SECONDS
            waited = True
        if waited:
            self._patience = _SPACE_SECONDS

    def _check_room_of(self, job: _CopyJob) -> None:
        if job.total <= _SMALL_BYTES or not stat.S_ISREG(job.after.st_mode):
            return
        needed = _room.data_bytes(job.before, job.total)
        try:
            self.check_room(job.destination_fd, needed, mounts=job.mounts, cancel=job.cancel)
        except OSError as error:
            if error.errno != errno.ENOSPC or not self._partial:  # which wants as much as fits
                raise

    def _move(self, job: _CopyJob) -> None:
        source, destination = job.before.st_dev, job.after.st_dev
        if job.stream:
            job.from_stream()
            return
        if source in job.mounts and destination in job.mounts:
            if source == destination:
                job.by_kernel()
            else:
                job.through_mount()
            return
        small = stat.S_ISREG(job.before.st_mode) and 0 < job.before.st_size <= _SMALL_BYTES
        if small and self._fastpath == "auto":
            job.through_mount()
        elif destination in job.mounts:
            self._by_daemon(job, LOAD, destination)
        elif source in job.mounts:
            self._by_daemon(job, STORE, source)
        else:  # a directory was replaced after it was opened
            raise OSError(errno.EXDEV, _NEITHER)

    def _complete(self, job: _CopyJob) -> str | None:
        """Finishes a copy whose bytes are in place; returns the checksum if one was asked for."""
        on_mount = job.after.st_dev in job.mounts
        if on_mount:
            _ends.settle_on_mount(job.destination_fd)
        if self._preserve:
            job.whole = True  # without its attributes it still is a copy
            _ends.preserve(job.destination_fd, job.attributes)
            job.whole = False
        if self._fsync and not on_mount:
            directory = job.destination.directory if job.created else None
            _ends.make_durable(job.destination_fd, directory, synced=job.synced)
        return job.verify() if self._verify else None

    def _by_daemon(self, job: _CopyJob, direction: str, device: int) -> None:
        connection = self._connection(device, job.mounts[device])
        if connection is None:
            job.through_mount()
            return
        reused = connection.used
        try:
            answered = job.by_daemon(connection, direction, self._fastpath, fsync=self._fsync)
        except IdleError:
            connection.close()
            if not reused:
                raise
            # The daemon ended it at the moment when it was used again.
            self._by_daemon(job, direction, device)
            return
        except BaseException:
            connection.close()
            raise
        with self._lock:
            self._idle.setdefault(device, []).append(connection)
        if not answered:
            job.through_mount()

    def _connection(self, device: int, mounts: list[MountEntry]) -> Connection | None:
        """A connection to a mount's daemon; None if there is none and the mount is used without it."""
        with self._lock:
            idle = self._idle.get(device, [])
            while idle:
                connection = idle.pop()
                if connection.usable():
                    return connection
                connection.close()
            until, failure = self._unreachable.get(device, (0.0, None))
        began = time.monotonic()
        if failure is None or began >= until or self._fastpath == "require":
            try:
                return Connection(_find.connect(device, mounts))
            except OSError as error:
                failure = error
            if self._fastpath == "require":
                raise failure
            now = time.monotonic()
            with self._lock:
                self._unreachable[device] = (now + _RETRY_SECONDS + _RETRY_FACTOR * (now - began), failure)
        with self._lock:
            known = device in self._noticed
            self._noticed.add(device)
        if not known and self._notice is not None:
            why = failure.strerror or str(failure)
            self._notice(
                f"{mounts[0].mountpoint}: its copy service cannot be reached ({why}): copying through the mount instead"
            )
        return None


class _DeviceError(OSError):
    """A failure that the daemon reported."""

    def __init__(self, error: int, message: str, device_code: int) -> None:
        super().__init__(error, message or os.strerror(error))
        self.device_code = device_code


_Mounts = dict[int, list[MountEntry]]  # by st_dev


class _CopyJob:
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
        mounts: _Mounts,
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


def copy(
    source: str | bytes | os.PathLike[str] | os.PathLike[bytes],
    destination: str | bytes | os.PathLike[str] | os.PathLike[bytes],
    *,
    fastpath: Fastpath = "auto",
    fsync: bool = False,
    verify: bool = False,
    preserve: bool = False,
    partial: bool = False,
    progress: Callable[[CopyProgress], None] | None = None,
    cancel: Cancellation | None = None,
) -> CopyResult:
    """Copies a file into device memory, out of it, or between devices; one of the two must be on a gpufs mount.

    An existing destination is overwritten; a directory gets a file of the source's name. ``fastpath``: "auto" (as the
    mount is configured), "off" or "require". ``fsync``: a file of the host is on its disk afterwards. ``verify``: both
    are read again and compared. ``preserve``: mode, times and, where allowed, owner. ``partial``: a copy that fails
    keeps a new destination, with the bytes that were copied, instead of removing it. ``progress`` is called from this
    thread about ten times a second. ``cancel``: ends the copy from another thread; so does KeyboardInterrupt.

    CopyError, an OSError, reports any failure, with the bytes that the destination holds. Several files at once: a
    :class:`gpufs.client.Copier`, or this function, from several threads.
    """
    source = os.fsdecode(source)
    destination = _file_in(os.fsdecode(destination), source)
    with Copier(
        fastpath=fastpath, fsync=fsync, verify=verify, preserve=preserve, partial=partial, notice=_warn
    ) as copier:
        return copier.copy_file(source, destination, progress=progress, cancel=cancel)


def copy_to_each(
    source: str | bytes | os.PathLike[str] | os.PathLike[bytes],
    destinations: Sequence[str | bytes | os.PathLike[str] | os.PathLike[bytes]],
    *,
    fastpath: Fastpath = "auto",
    fsync: bool = False,
    verify: bool = False,
    preserve: bool = False,
    partial: bool = False,
    progress: Callable[[CopyProgress], None] | None = None,
    cancel: Cancellation | None = None,
) -> list[CopyResult]:
    """Copies one file to several GPUs and reads it once.

    The first copy on a mount is read from the source. The others are copied from it, between the GPUs.

    Parameters
    ----------
    source : path
        The file to copy.
    destinations : sequence of paths
        Names of files, or directories, which get a file of the source's name.
    fastpath, fsync, verify, preserve, partial, cancel
        As for :func:`copy`.
    progress : callable, optional
        Called with a :class:`CopyProgress` about ten times a second. It counts the bytes of all copies. It is called
        from several threads, one at a time.

    Returns
    -------
    list of CopyResult
        One for each destination, in their order.

    Raises
    ------
    ExceptionGroup
        With a :class:`CopyError` for each destination that failed. The other copies are complete.
    ValueError
        There are no destinations.

    Examples
    --------
    >>> gpufs.copy_to_each("model.safetensors", ["/mnt/gpufs/gpu0", "/mnt/gpufs/gpu1"])  # doctest: +SKIP
    """
    source = os.fsdecode(source)
    names = [_file_in(os.fsdecode(destination), source) for destination in destinations]
    if not names:
        raise ValueError("destinations: there are none")
    with Copier(
        fastpath=fastpath, fsync=fsync, verify=verify, preserve=preserve, partial=partial, notice=_warn
    ) as copier:
        outcomes = copier.copy_to_each(
            Entry.of(source), [Entry.of(name) for name in names], progress=progress, cancel=cancel
        )
    errors = [outcome for outcome in outcomes if isinstance(outcome, CopyError)]
    if errors:
        raise ExceptionGroup(f"{len(errors)} of {len(names)} copies of {source} failed", errors)
    return [outcome for outcome in outcomes if isinstance(outcome, CopyResult)]


def _file_in(destination: str, source: str) -> str:
    """The file that a copy to a name creates: in a directory, one of the source's name."""
    return os.path.join(destination, os.path.basename(source)) if os.path.isdir(destination) else destination


def _warn(text: str) -> None:
    import warnings

    warnings.warn(text, RuntimeWarning, stacklevel=sys.maxsize)
