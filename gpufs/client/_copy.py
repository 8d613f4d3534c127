"""Copies between files, at least one of them on a mount.

Which way the bytes go:

- between the host and a mount: the mount's daemon moves them ("transfer"); where its socket cannot be reached, and for
  small files, they are read and written through the mount ("mount");
- inside one mount: the kernel hands the whole range to the mount in one request ("kernel").
"""

from __future__ import annotations

import errno
import os
import stat
import sys
import time
from _thread import allocate_lock

from gpufs.client import _ends, _find, _linux
from gpufs.client._connection import Cancellation, Connection, IdleError
from gpufs.client._find import MountPoint
from gpufs.client._outcome import CopyError, CopyProgress, CopyResult, text_of
from gpufs.client._protocol import LOAD, STORE, Progress

TYPE_CHECKING = False
if TYPE_CHECKING:
    import _socket
    from collections.abc import Callable
    from dataclasses import dataclass
    from types import TracebackType
    from typing import Final, Literal, Self

    from gpufs.client._handed import Handed

    Fastpath = Literal["auto", "off", "require"]
else:
    from gpufs.client._record import dataclass

# Up to here one read and one write are faster than asking the daemon.
_SMALL_BYTES: Final = 128 << 10
_STREAM_BYTES: Final = 4 << 20
_PROGRESS_SECONDS: Final = 0.1
# One copy_file_range at a time should take about this long, so that a cancellation and the progress have their turn.
_KERNEL_SECONDS: Final = 0.2
_KERNEL_FIRST_BYTES: Final = 64 << 20
_KERNEL_MOST_BYTES: Final = 16 << 30
_NOT_BY_KERNEL: Final = (errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
# What the daemon answers about files that it has no buffer for: control files, files of backing directories, ends of
# which the other is on some gpufs too. All can be read and written as files.
_NOT_BY_DAEMON: Final = (errno.EXDEV, errno.EDEADLK, errno.EINVAL)
# Failures of the destination alone.
_DESTINATIONS: Final = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EROFS)


@dataclass()
class _Moved:
    """What has been copied so far, and how."""

    total: int = 0
    done: int = 0
    method: str = "mount"
    paths: dict[str, int] | None = None
    refusals: tuple[str, ...] = ()
    synced: bool = False


class Copier:
    """Copies files one after the other or from several threads, and keeps its connections to daemons for the next.

    ``fastpath``: "off" and "require" instead of what the mount is configured for. ``fsync``: files of the host are on
    their disk before a copy succeeds. ``verify``: both files are read again and compared by SHA-256, from the disk with
    ``fsync``. ``preserve``: mode, times and, as far as allowed, owner of the source. ``force``: a destination that
    cannot be opened is removed and made anew; ``remove_destination``: any that exists. ``notice``: called with one
    line, once for each mount, where a daemon cannot be reached and its mount serves as a plain file system.
    """

    def __init__(
        self,
        *,
        fastpath: Fastpath = "auto",
        fsync: bool = False,
        verify: bool = False,
        preserve: bool = False,
        force: bool = False,
        remove_destination: bool = False,
        notice: Callable[[str], None] | None = None,
    ) -> None:
        if fastpath not in ("auto", "off", "require"):
            raise ValueError(f"fastpath: {fastpath!r} is not one of auto, off, require")
        self._fastpath: Fastpath = fastpath
        self._fsync = fsync
        self._verify = verify
        self._preserve = preserve
        self._force = force
        self._remove_destination = remove_destination
        self._notice = notice
        self._process = os.getpid()
        self._lock = allocate_lock()  # guards all below
        self._idle: dict[int, list[Connection]] = {}  # by the mount's st_dev
        self._unreachable: dict[int, OSError] = {}
        self._mounts: dict[int, list[MountPoint]] | None = None

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
        self._lock = allocate_lock()
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

    def mount_of(self, device: int) -> list[MountPoint] | None:
        """Where the mount with this st_dev is mounted; None if it is no gpufs."""
        with self._lock:
            if self._mounts is None:
                self._mounts = _find.mounts_by_device()
            return self._mounts.get(device)

    def copy_file(
        self,
        source: str,
        destination: str,
        *,
        progress: Callable[[CopyProgress], None] | None = None,
        cancel: Cancellation | None = None,
    ) -> CopyResult:
        """Copies one file to a name; what is there is overwritten. CopyError when that fails.

        ``progress`` is called from this thread about ten times a second. A copy that was cancelled before it began has
        touched nothing.
        """
        began = time.monotonic()
        self._after_fork()
        if progress is not None and not callable(progress):
            raise TypeError(f"progress: {progress!r} cannot be called")
        if cancel is not None:
            if not isinstance(cancel, Cancellation):
                raise TypeError(f"cancel: {cancel!r} is no Cancellation")
            if cancel.cancelled:
                raise CopyError(errno.ECANCELED, "", source, destination)
        if not destination:
            raise CopyError(errno.ENOENT, "", destination)
        source_fd, before = _ends.open_source(source)
        with _Closing(source_fd, quiet=True):
            self._refuse_host_to_host(source, destination, before)
            destination_fd, created = _ends.open_destination(
                destination,
                before,
                store=self.mount_of(before.st_dev) is not None,
                force=self._force,
                remove=self._remove_destination,
            )
            with _Closing(destination_fd) as closing:
                moved = _Moved(total=_ends.size_of(source_fd, before))
                one = _One(source, destination, source_fd, destination_fd, moved, progress, cancel)
                after = os.fstat(destination_fd)
                try:
                    self._move(one, before, after)
                except OSError as error:
                    raise self._failure(one, error, cut=stat.S_ISREG(after.st_mode)) from None
                return self._end(one, closing, before, after, began=began, created=created)

    def take_over(
        self,
        handed: Handed,
        source: str,
        *,
        progress: Callable[[CopyProgress], None] | None = None,
        cancel: Cancellation | None = None,
    ) -> CopyResult:
        """Sees the copy to its end that was asked for before this program started; otherwise as :meth:`copy_file`.

        It owns what it is handed. A copy that has been cancelled meanwhile has moved what CopyError tells.
        """
        with _Closing(handed.source_fd, quiet=True), _Closing(handed.destination_fd) as closing:
            moved = _Moved(total=handed.size)
            one = _One(source, handed.destination, handed.source_fd, handed.destination_fd, moved, progress, cancel)
            try:
                before, after = os.fstat(one.source_fd), os.fstat(one.destination_fd)
                device = before.st_dev if handed.direction == STORE else after.st_dev
                self._by_daemon(one, handed.direction, device, self.mount_of(device) or [], handed.sock)
            except OSError as error:
                raise self._failure(one, error, cut=True) from None
            return self._end(one, closing, before, after, began=handed.began, created=handed.created)

    def _end(
        self,
        one: _One,
        closing: _Closing,
        source: os.stat_result,
        destination: os.stat_result,
        *,
        began: float,
        created: bool,
    ) -> CopyResult:
        """Does what is left once the bytes are there. ``closing``: the destination; ``source``: before the copy."""
        moved = one.moved
        try:
            digest = self._complete(one, source, destination, created=created)
            closing.close()
        except CopyError:
            raise
        except OSError as error:
            counts = {"bytes_done": moved.done, "bytes_total": moved.total}
            raise CopyError(error.errno or errno.EIO, text_of(error), one.destination, None, **counts) from None
        seconds = time.monotonic() - began
        return CopyResult(
            one.source, one.destination, moved.done, seconds, moved.method, moved.paths or {}, moved.refusals, digest
        )

    def _complete(self, one: _One, source: os.stat_result, destination: os.stat_result, *, created: bool) -> str | None:
        """What is left to do once the bytes are there; returns the checksum where one was asked for."""
        on_mount = self.mount_of(destination.st_dev) is not None
        if on_mount:
            _ends.settle_on_mount(one.destination_fd)
        if self._preserve:
            _ends.preserve(one.destination_fd, source)
        if self._fsync and not on_mount:
            _ends.make_durable(one.destination_fd, one.destination if created else None, synced=one.moved.synced)
        if not self._verify:
            return None
        from gpufs.client._verify import compare

        return compare(one)

    def _refuse_host_to_host(self, source: str, destination: str, status: os.stat_result) -> None:
        """Before the destination is touched."""
        if self.mount_of(status.st_dev) is not None:
            return
        try:
            if self._remove_destination:
                raise FileNotFoundError  # it will be: what is made anew lies where its directory is
            device = os.stat(destination).st_dev
        except FileNotFoundError:
            try:
                device = os.stat(os.path.dirname(destination) or ".").st_dev
            except OSError as error:
                raise CopyError(error.errno or errno.EIO, "", destination) from None
        except OSError as error:
            raise _ends.open_failure(error, destination) from None
        if self.mount_of(device) is None:
            raise CopyError(errno.EXDEV, "neither of them is on a gpufs mount: use cp", source, destination)

    def _move(self, one: _One, source: os.stat_result, destination: os.stat_result) -> None:
        source_mount, destination_mount = self.mount_of(source.st_dev), self.mount_of(destination.st_dev)
        if source_mount is not None and source.st_dev == destination.st_dev:
            one.by_kernel()
            return
        if source_mount is not None and destination_mount is not None:
            one.through_mount()
            return
        small = stat.S_ISREG(source.st_mode) and source.st_size <= _SMALL_BYTES and self._fastpath == "auto"
        if small and source.st_size > 0:
            one.through_mount()
            return
        if destination_mount is not None:
            self._by_daemon(one, LOAD, destination.st_dev, destination_mount)
        elif source_mount is not None:
            self._by_daemon(one, STORE, source.st_dev, source_mount)
        else:  # the destination's directory was another one when it was looked at
            raise OSError(errno.EXDEV, "neither of them is on a gpufs mount: use cp")

    def _by_daemon(
        self, one: _One, direction: str, device: int, mounts: list[MountPoint], asked: _socket.socket | None = None
    ) -> None:
        """``asked``: a socket on which this very copy has been asked for."""
        connection = self._connection(device, mounts, asked)
        if connection is None:
            one.through_mount()
            return
        reused = connection.used
        try:
            answered = one.by_daemon(connection, direction, self._fastpath, fsync=self._fsync)
        except IdleError:
            connection.close()
            if not reused:
                raise
            # The daemon ended it at the very moment when it was taken up again.
            self._by_daemon(one, direction, device, mounts)
            return
        except BaseException:
            connection.close()
            raise
        with self._lock:
            self._idle.setdefault(device, []).append(connection)
        if not answered:
            one.through_mount()

    def _connection(self, device: int, mounts: list[MountPoint], asked: _socket.socket | None) -> Connection | None:
        """A connection to a mount's daemon; None where there is none to be had and the mount serves without."""
        with self._lock:
            idle = self._idle.get(device, [])
            while idle:
                connection = idle.pop()
                if connection.usable():
                    return connection
                connection.close()
            failure = self._unreachable.get(device)
        if failure is None:
            try:
                return Connection(asked or _find.connect(device, mounts), asked=asked is not None)
            except OSError as error:
                failure = error
        if self._fastpath == "require" or not mounts:
            raise failure
        with self._lock:
            known = device in self._unreachable
            self._unreachable[device] = failure
        if not known and self._notice is not None:
            why = failure.strerror or str(failure)
            self._notice(
                f"{mounts[0].path}: its copy service cannot be reached ({why}): copying through the mount instead"
            )
        return None

    def _failure(self, one: _One, error: OSError, *, cut: bool) -> CopyError:
        """The error for the user. ``cut``: the destination is a regular file, and gets the size that was copied."""
        moved = one.moved
        if cut:
            try:
                if _linux.refresh(one.destination_fd) > moved.done:
                    os.ftruncate(one.destination_fd, moved.done)
            except OSError:
                pass  # its mount has died: there is nothing left to keep consistent
        code = error.errno or errno.EIO
        names = (one.destination, None) if code in _DESTINATIONS else (one.source, one.destination)
        return CopyError(
            code,
            text_of(error),
            *names,
            bytes_done=moved.done,
            bytes_total=moved.total,
            device_code=getattr(error, "device_code", 0),
        )


class _DeviceError(OSError):
    """A failure that the daemon reported."""

    def __init__(self, error: int, message: str, device_code: int) -> None:
        super().__init__(error, message or os.strerror(error))
        self.device_code = device_code


class _Closing:
    """A descriptor that is closed in any case; close() tells of a failure, and so does the end unless ``quiet``."""

    def __init__(self, fd: int, *, quiet: bool = False) -> None:
        self._fd = fd
        self._quiet = quiet

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except OSError:
            if error is None and not self._quiet:
                raise


class _One:
    """One copy under way: both ends open, and what has been moved."""

    def __init__(
        self,
        source: str,
        destination: str,
        source_fd: int,
        destination_fd: int,
        moved: _Moved,
        progress: Callable[[CopyProgress], None] | None,
        cancel: Cancellation | None,
    ) -> None:
        self.source = source
        self.destination = destination
        self.source_fd = source_fd
        self.destination_fd = destination_fd
        self.moved = moved
        self.cancel = cancel
        self._progress = progress
        self._told = 0.0

    def by_daemon(self, connection: Connection, direction: str, fastpath: Fastpath, *, fsync: bool) -> bool:
        """False when the daemon has no buffer for these files and nothing was moved."""
        host, mount = self.source_fd, self.destination_fd
        if direction == STORE:
            host, mount = mount, host

        def tell(progress: Progress) -> None:
            self.moved.total = max(self.moved.total, progress.total)
            if self._progress is not None:
                self._progress(CopyProgress(progress.moved, self.moved.total, progress.paths))

        result = connection.copy(
            direction,
            host,
            mount,
            fastpath=None if fastpath == "auto" else fastpath,
            sync="full" if fsync and direction == STORE else "none",
            interval=_PROGRESS_SECONDS,
            progress=tell if self._progress is not None else None,
            cancel=self.cancel,
        )
        if result.error in _NOT_BY_DAEMON and not result.done and fastpath != "require":
            return False
        self.moved.method = "transfer"
        self.moved.done = result.done
        self.moved.paths = result.paths
        self.moved.refusals = tuple(result.refusals)
        self.moved.synced = fsync
        if result.error:
            raise _DeviceError(result.error, result.message, result.device_code)
        return True

    def by_kernel(self) -> None:
        """Inside one mount."""
        self.moved.method = "kernel"
        step = _KERNEL_FIRST_BYTES
        while True:
            self._check_cancelled()
            began = time.monotonic()
            try:
                count = os.copy_file_range(self.source_fd, self.destination_fd, step, self.moved.done, self.moved.done)
            except OSError as error:
                if error.errno not in _NOT_BY_KERNEL:
                    raise
                count = 0
            if not count:
                break
            self._count("kernel", count)
            seconds = max(time.monotonic() - began, 1e-6)
            step = int(min(max(count * min(_KERNEL_SECONDS / seconds, 4), 1 << 20), _KERNEL_MOST_BYTES))
        # The rest, where the kernel or the mount could not: at the end that is nothing, and reading tells.
        self.through_mount()

    def through_mount(self) -> None:
        """Reads and writes, from where the copy is up to the end of the source; its holes stay holes."""
        buffer = memoryview(bytearray(min(_STREAM_BYTES, max(self.moved.total - self.moved.done, 4096))))
        holes = _ends.may_have_holes(self.source_fd, self.destination_fd)
        data_end = self.moved.done
        while True:
            self._check_cancelled()
            if holes and self.moved.done == data_end:
                start, data_end = _ends.next_data(self.source_fd, self.moved.done)
                if start > self.moved.done:
                    # Its size is as far as it was copied, also where nothing follows.
                    os.ftruncate(self.destination_fd, start)
                    self._count("hole", start - self.moved.done)
                    continue
            room = buffer[: data_end - self.moved.done] if holes else buffer
            count = os.preadv(self.source_fd, [room], self.moved.done)
            if not count:
                return
            written = 0
            while written < count:
                step = os.pwrite(self.destination_fd, buffer[written:count], self.moved.done)
                written += step
                self._count("mount", step)

    def _check_cancelled(self) -> None:
        if self.cancel is not None and self.cancel.cancelled:
            raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))

    def _count(self, path: str, count: int) -> None:
        self.moved.done += count
        self.moved.total = max(self.moved.total, self.moved.done)
        self.moved.paths = self.moved.paths or {}
        self.moved.paths[path] = self.moved.paths.get(path, 0) + count
        self.tell(self.moved.done)

    def tell(self, moved: int, phase: str = "copy") -> None:
        """Reports progress, unless that was done a moment ago."""
        now = time.monotonic()
        if self._progress is not None and now - self._told >= _PROGRESS_SECONDS:
            self._told = now
            self._progress(CopyProgress(moved, self.moved.total, dict(self.moved.paths or {}), phase))


def copy(
    source: str | bytes | os.PathLike[str] | os.PathLike[bytes],
    destination: str | bytes | os.PathLike[str] | os.PathLike[bytes],
    *,
    fastpath: Fastpath = "auto",
    fsync: bool = False,
    verify: bool = False,
    preserve: bool = False,
    progress: Callable[[CopyProgress], None] | None = None,
    cancel: Cancellation | None = None,
) -> CopyResult:
    """Copies a file into device memory, out of it, or between devices; one of the two must be on a gpufs mount.

    An existing destination is overwritten; a directory gets a file of the source's name. ``fastpath``: "auto" (as the
    mount is configured), "off" or "require". ``fsync``: a file of the host is on its disk afterwards. ``verify``: both
    are read again and compared. ``preserve``: mode, times and, where allowed, owner. ``progress`` is called from this
    thread about ten times a second. ``cancel``: ends the copy from another thread; so does KeyboardInterrupt.

    CopyError, an OSError, tells of any failure, with the bytes that the destination holds. Several files at once: a
    :class:`gpufs.client.Copier`, or this function, from several threads.
    """
    source, destination = os.fsdecode(source), os.fsdecode(destination)
    if os.path.isdir(destination):
        destination = os.path.join(destination, os.path.basename(source))
    with Copier(fastpath=fastpath, fsync=fsync, verify=verify, preserve=preserve, notice=_warn) as copier:
        return copier.copy_file(source, destination, progress=progress, cancel=cancel)


def _warn(text: str) -> None:
    import warnings

    warnings.warn(text, RuntimeWarning, stacklevel=sys.maxsize)
