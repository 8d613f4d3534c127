"""Copies between files, at least one of them on a mount: what programs call."""

from __future__ import annotations

import errno
import os
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Self

from gpufs._naming import named_in
from gpufs.client import _ends
from gpufs.client._copy_job import CopyJob, Mounts, Settings
from gpufs.client._copy_types import (
    STREAM,
    Cancellation,
    CopyError,
    CopyOptions,
    CopyProgress,
    CopyResult,
    Fastpath,
    NotOnMountCopyError,
)
from gpufs.client._daemons import IdleConnections
from gpufs.client._ends import Entry, OpenFile
from gpufs.client._space import SpaceCheck
from gpufs.mounting import MountTable
from gpufs.syscalls import close_all

if TYPE_CHECKING:
    from gpufs.client._remote_copy import RemoteCopies
    from gpufs.remote.stores import RemoteFile
    from gpufs.remote.urls import Url


@named_in("gpufs.client")
class Copier:
    """Copies files one after the other or from several threads, and keeps its connections to daemons for the next.

    Parameters
    ----------
    fastpath : {"auto", "off", "require"}
        "off" and "require" override the mount's configuration.
    fsync : bool
        Host files are on their disk before a copy succeeds.
    verify : bool
        Both files are read again, with ``fsync`` from disk, and their SHA-256 compared.
    preserve : bool
        Mode, times and, if allowed, owner of the source are kept.
    partial : bool
        A copy that does not fit is begun all the same, and a failed or cancelled copy keeps a new destination, with the
        bytes copied so far, instead of removing it.
    notice : callable, optional
        Called with one line, once for each mount whose daemon cannot be reached.

    Examples
    --------
    >>> with gpufs.client.Copier(verify=True) as copier:  # doctest: +SKIP
    ...     copier.copy_file("weights", "/mnt/gpufs/gpu0/weights")
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
        options = CopyOptions(fastpath, fsync, verify, preserve, partial)
        options.check()
        self._mounts = MountTable()
        self._settings = Settings(
            options, IdleConnections(required=fastpath == "require", notice=notice), notice, SpaceCheck()
        )
        self._remote: RemoteCopies | None = None
        self._remote_lock = threading.Lock()  # guards the creation of the above

    def close(self) -> None:
        """End the connections."""
        if self._remote is not None:
            self._remote.close()
        self._settings.connections.close()
        self._mounts.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def copy_file(
        self,
        source: str,
        destination: str,
        *,
        progress: Callable[[CopyProgress], None] | None = None,
        cancel: Cancellation | None = None,
    ) -> CopyResult:
        """Copy one file to a name and overwrite an existing file. Raises CopyError.

        ``progress`` is called from this thread about ten times a second; an exception that it raises ends the copy. A
        copy that is cancelled before it starts changes nothing. One of the two may be a URL or HOST:PATH.
        """
        _check_callbacks(progress, cancel)
        if "://" in source or "://" in destination:
            from gpufs.client import _remote_copy

            return _remote_copy.copy_file(self, source, destination, progress, cancel)
        if _is_on_node(source) or _is_on_node(destination):
            from gpufs.client import _node_copy

            (outcome,) = _node_copy.copy_to_each(self, source, [destination], progress, cancel)
            if isinstance(outcome, CopyError):
                raise outcome
            return outcome
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
        _check_callbacks(progress, cancel)
        if cancel is not None and cancel.cancelled:
            raise CopyError(errno.ECANCELED, "", source.path, destination.path)
        if not destination.path:
            raise CopyError(errno.ENOENT, "", destination.path)
        opened = _ends.open_source(source)
        try:
            return self._copy(opened, destination, progress, cancel)
        finally:
            close_all((opened.fd,))

    def copy_to_each(
        self,
        source: Entry,
        destinations: Sequence[Entry],
        *,
        progress: Callable[[CopyProgress], None] | None = None,
        cancel: Cancellation | None = None,
    ) -> list[CopyResult | CopyError]:
        """Copy one file to several names; the outcomes are in the order of ``destinations``.

        The source is read once for each mount: its first copy there is the source of the others. A destination that
        fails does not end the other copies. ``progress`` counts the bytes of all copies, and is called from several
        threads, one at a time.
        """
        from gpufs.client._fan_out import FanOut

        return FanOut(self._settings, self._mounts.by_device(), source, destinations, progress, cancel).run()

    def download(
        self,
        file: RemoteFile,
        destinations: Sequence[Entry],
        *,
        progress: Callable[[CopyProgress], None] | None = None,
        cancel: Cancellation | None = None,
    ) -> list[CopyResult | CopyError]:
        """Copy a file of a store to several names; the outcomes are in the order of ``destinations``.

        Each byte is requested once. A destination that fails does not end the other copies.
        """
        mounts = self._mounts.by_device()
        return self._remote_copies().download(mounts, file, destinations, progress, cancel or Cancellation())

    def upload(
        self,
        source: Entry,
        url: Url,
        *,
        progress: Callable[[CopyProgress], None] | None = None,
        cancel: Cancellation | None = None,
    ) -> CopyResult:
        """Copy a file to an object store. Raises CopyError."""
        return self._remote_copies().upload(self._mounts.by_device(), source, url, progress, cancel or Cancellation())

    def _remote_copies(self) -> RemoteCopies:
        from gpufs.client._remote_copy import RemoteCopies

        with self._remote_lock:
            if self._remote is None:
                self._remote = RemoteCopies(self._settings)
            return self._remote

    @property
    def settings(self) -> Settings:
        """What all copies have in common."""
        return self._settings

    def mounts(self) -> Mounts:
        """Return the mounts of this machine, by the st_dev of their files."""
        return self._mounts.by_device()

    def copy_from_stream(
        self,
        source_fd: int,
        destination: Entry,
        *,
        progress: Callable[[CopyProgress], None] | None = None,
        cancel: Cancellation | None = None,
    ) -> CopyResult:
        """Copy what a pipe, or another open file, returns up to its end. Its descriptor stays the caller's.

        The calling thread reads, so an OSError that a signal handler raises ends the copy.
        """
        source = OpenFile(Entry.of(STREAM), source_fd, os.fstat(source_fd))
        return self._copy(source, destination, progress, cancel, stream=True)

    def _copy(
        self,
        source: OpenFile,
        destination: Entry,
        progress: Callable[[CopyProgress], None] | None,
        cancel: Cancellation | None,
        *,
        stream: bool = False,
    ) -> CopyResult:
        mounts = self._mounts.by_device()
        try:
            with destination.located() as located:
                job = CopyJob.open(
                    self._settings, mounts, source, located, stream=stream, progress=progress, cancel=cancel
                )
                return job.run()
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
        """Copy a file into a pipe, or another open file, whose descriptor stays the caller's."""
        opened = _ends.open_source(source)
        try:
            mounts = self._mounts.by_device()
            if opened.status.st_dev not in mounts:
                raise NotOnMountCopyError(errno.EXDEV, "is not on a gpufs mount: use cat", source.path)
            output = OpenFile(Entry.of(STREAM), destination_fd, os.fstat(destination_fd))
            if stat.S_ISREG(opened.status.st_mode) and os.path.samestat(opened.status, output.status):
                raise CopyError(errno.EINVAL, "is the same file as the output", source.path)
            return CopyJob(self._settings, mounts, opened, output, progress=progress, cancel=cancel).run_to_stream()
        finally:
            close_all((opened.fd,))

    def check_space(self, fd: int, needed: int, *, cancel: Cancellation | None = None) -> None:
        """Raise OSError ENOSPC, with the figures, if ``needed`` bytes do not fit where an open file or directory is.

        Waits for the memory of files on a mount that have just been removed.
        """
        mounts = self._mounts.by_device().get(os.fstat(fd).st_dev, [])
        self._settings.space.check(fd, needed, mounts, cancel)


@named_in("gpufs")
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
    """Copy a file into device memory, out of it, or between devices; one of the two must be on a gpufs mount.

    The other may be a URL: ``s3://BUCKET/KEY``, ``gs://`` and ``az://`` (`pip install 'gpufs[cloud]'`), ``http://`` and
    ``https://`` (to load only), and ``hf://ORG/MODEL/FILE`` (to load only; `pip install 'gpufs[cloud,hub]'`). A file
    that is loaded gets its name when it is complete. Or it may be a file of another machine with gpufs, ``HOST:PATH``,
    which is copied over ssh.

    Several files at once: :func:`copy_files`, or this function from several threads.

    Parameters
    ----------
    source : path, URL or HOST:PATH
        The file to copy.
    destination : path, URL or HOST:PATH
        A file, which is overwritten if it exists, or a directory, which gets a file of the source's name. A URL that
        ends with a slash is a directory.
    fastpath : {"auto", "off", "require"}
        Whether the vendor's library copies directly between storage and device: as the mount is configured, never, or
        only so.
    fsync : bool
        A file of the host is on its disk afterwards.
    verify : bool
        Both files are read again and compared. A copy from or to a URL is compared with the store's checksum, if it has
        one.
    preserve : bool
        Mode, times and, where allowed, owner are copied, too. Not with URLs.
    partial : bool
        A copy that fails keeps a new destination, with the bytes that were copied, instead of removing it. A copy from
        a URL goes on where an earlier one ended.
    progress : callable, optional
        Called with a :class:`CopyProgress` from this thread, about ten times a second.
    cancel : gpufs.client.Cancellation, optional
        Ends the copy from another thread; so does KeyboardInterrupt.

    Returns
    -------
    CopyResult
        What was copied, and how.

    Raises
    ------
    CopyError
        Any failure; an OSError with the bytes that the destination holds.

    Examples
    --------
    >>> gpufs.copy("model.safetensors", "/mnt/gpufs/gpu0").bytes  # doctest: +SKIP
    8589934592
    """
    source = os.fsdecode(source)
    destination = _file_in(os.fsdecode(destination), source)
    with Copier(
        fastpath=fastpath, fsync=fsync, verify=verify, preserve=preserve, partial=partial, notice=_warning_here()
    ) as copier:
        return copier.copy_file(source, destination, progress=progress, cancel=cancel)


@named_in("gpufs")
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
    """Copy one file to several GPUs, or to several machines, and read it once.

    The first copy on a mount is read from the source. The others are copied from it, between the GPUs. Of several
    machines the first one gets the file and passes it on to the next one, while it still receives it.

    Parameters
    ----------
    source : path, URL or HOST:PATH
        The file to copy.
    destinations : sequence of paths, or of HOST:PATH
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
        fastpath=fastpath, fsync=fsync, verify=verify, preserve=preserve, partial=partial, notice=_warning_here()
    ) as copier:
        entries = [Entry.of(name) for name in names]
        if "://" in source:
            from gpufs.client import _remote_copy

            outcomes = _remote_copy.copy_to_each(copier, source, entries, progress, cancel)
        elif any(map(_is_on_node, (source, *names))):
            from gpufs.client import _node_copy

            outcomes = _node_copy.copy_to_each(copier, source, names, progress, cancel)
        else:
            outcomes = copier.copy_to_each(Entry.of(source), entries, progress=progress, cancel=cancel)
    return _results(outcomes, f"copies of {source}")


@named_in("gpufs")
def copy_files(
    sources: Iterable[str | os.PathLike[str]],
    directory: str | os.PathLike[str],
    *,
    jobs: int = 4,
    fastpath: Fastpath = "auto",
    fsync: bool = False,
    verify: bool = False,
    preserve: bool = False,
    partial: bool = False,
) -> list[CopyResult]:
    """Copy files into a directory, several at once.

    Either the files or the directory are on a gpufs mount. Symbolic links to files are followed, so this copies a
    snapshot from the cache of a hub.

    Parameters
    ----------
    sources : iterable of paths
        The files. Each gets a file of its name in the directory, which overwrites an existing one.
    directory : path
        A directory that exists.
    jobs : int
        How many files are copied at once.
    fastpath, fsync, verify, preserve, partial
        As for :func:`copy`.

    Returns
    -------
    list of CopyResult
        One for each source, in their order.

    Raises
    ------
    ExceptionGroup
        With a :class:`CopyError` for each file that failed. The other copies are complete.
    NotADirectoryError
        ``directory`` is not one.
    ValueError
        Two sources have one name.

    Examples
    --------
    >>> gpufs.copy_files(Path("Qwen3-8B").iterdir(), "/mnt/gpufs/gpu0/Qwen3-8B")  # doctest: +SKIP
    """
    from concurrent.futures import ThreadPoolExecutor

    target = os.fspath(directory)
    if not os.path.isdir(target):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), target)
    paths = [os.fspath(source) for source in sources]
    ends = {_file_in(target, path): path for path in paths}
    if len(ends) < len(paths):
        raise ValueError("sources: two of them have one name, and would be one file in the directory")
    cancel = Cancellation()
    with (
        Copier(
            fastpath=fastpath, fsync=fsync, verify=verify, preserve=preserve, partial=partial, notice=_warning_here()
        ) as copier,
        ThreadPoolExecutor(jobs) as pool,
    ):

        def copy_one(end: str) -> CopyResult | CopyError:
            try:
                return copier.copy_file(ends[end], end, cancel=cancel)
            except CopyError as error:
                return error

        try:
            outcomes = list(pool.map(copy_one, ends))
        except BaseException:
            cancel.cancel()
            raise
    return _results(outcomes, f"copies to {target}")


def _results(outcomes: Sequence[CopyResult | CopyError], what: str) -> list[CopyResult]:
    """The results, or an ExceptionGroup if a copy has failed."""
    errors = [outcome for outcome in outcomes if isinstance(outcome, CopyError)]
    if errors:
        raise ExceptionGroup(f"{len(errors)} of {len(outcomes)} {what} failed", errors)
    return [outcome for outcome in outcomes if isinstance(outcome, CopyResult)]


def _file_in(destination: str, source: str) -> str:
    """The file that a copy to a name creates: in a directory, one of the source's name."""
    if "://" in source or "://" in destination:
        from gpufs.client import _remote_copy

        return _remote_copy.file_in(destination, source)
    if _is_on_node(source) or _is_on_node(destination):
        return destination  # the receiving machine finds out
    return os.path.join(destination, os.path.basename(source)) if os.path.isdir(destination) else destination


def _is_on_node(name: str) -> bool:
    """Whether a name is HOST:PATH."""
    if ":" not in name:
        return False
    from gpufs.nodes.names import is_node_name

    return is_node_name(name)


def _check_callbacks(progress: object, cancel: object) -> None:
    if progress is not None and not callable(progress):
        raise TypeError(f"progress: {progress!r} cannot be called")
    if cancel is not None and not isinstance(cancel, Cancellation):
        raise TypeError(f"cancel: {cancel!r} is not a Cancellation")


def _warning_here() -> Callable[[str], None]:
    """A function that warns of the line which calls this function's caller. Copies call it from any thread."""
    frame = sys._getframe(2)
    file, line, names = frame.f_code.co_filename, frame.f_lineno, frame.f_globals

    def warn(text: str) -> None:
        import warnings

        registry = names.setdefault("__warningregistry__", {})
        warnings.warn_explicit(text, RuntimeWarning, file, line, names.get("__name__"), registry)

    return warn
