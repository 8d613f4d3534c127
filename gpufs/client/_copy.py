"""Copies between files, at least one of them on a mount: opening both ends, the room, and what a failure leaves."""

from __future__ import annotations

import errno
import os
import stat
import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final, Self

from gpufs.client import _ends, _find, _room
from gpufs.client._connection import Cancellation, IdleError
from gpufs.client._connections import Connections
from gpufs.client._ends import Entry
from gpufs.client._job import CopyJob, Fastpath, Mounts
from gpufs.client._outcome import CopyError, CopyProgress, CopyResult
from gpufs.protocol import LOAD, STORE, close_all

# Up to this size one read and one write are faster than a request to the daemon.
_SMALL_BYTES: Final = 128 << 10
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
        self._patience = _SPACE_SECONDS  # in all: if many files do not fit, only the first ones wait
        self._connections = Connections(required=fastpath == "require", notice=notice)

    def close(self) -> None:
        """Ends the connections."""
        self._connections.close()

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
        self._connections.after_fork()
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

        self._connections.after_fork()
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
            job = CopyJob(
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
        mounts: Mounts,
        *,
        stream: bool = False,
        readable: bool = False,
    ) -> CopyJob:
        """Opens the destination, which is not changed yet. ``readable``: for reading too, where that is allowed."""

        def check_device(device: int) -> None:
            if before.st_dev not in mounts and device not in mounts:
                raise CopyError(errno.EXDEV, _NEITHER, source.path, destination.path)

        # With its final mode only once it has its final owner.
        mode = 0o666 if stream else stat.S_IMODE(before.st_mode) & (0o700 if self._preserve else 0o777)
        store = readable or before.st_dev in mounts
        fd, created = _ends.open_destination(destination, before, mode=mode, store=store, check_device=check_device)
        try:
            return CopyJob(source, destination, source_fd, fd, before, os.fstat(fd), created, mounts, stream=stream)
        except BaseException:
            os.close(fd)
            raise

    def _run(self, job: CopyJob, began: float) -> CopyResult:
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
        self, fd: int, needed: int, *, mounts: Mounts | None = None, cancel: Cancellation | None = None
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

    def _check_room_of(self, job: CopyJob) -> None:
        if job.total <= _SMALL_BYTES or not stat.S_ISREG(job.after.st_mode):
            return
        needed = _room.data_bytes(job.before, job.total)
        try:
            self.check_room(job.destination_fd, needed, mounts=job.mounts, cancel=job.cancel)
        except OSError as error:
            if error.errno != errno.ENOSPC or not self._partial:  # which wants as much as fits
                raise

    def _move(self, job: CopyJob) -> None:
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

    def _complete(self, job: CopyJob) -> str | None:
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

    def _by_daemon(self, job: CopyJob, direction: str, device: int) -> None:
        connection = self._connections.take(device, job.mounts[device])
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
        self._connections.give_back(device, connection)
        if not answered:
            job.through_mount()


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
