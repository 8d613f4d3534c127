"""The functions that programs call to copy files and directories."""

from __future__ import annotations

import errno
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from gpufs._naming import named_in
from gpufs.client._cancellation import Cancellation
from gpufs.copying.copier import FileCopier
from gpufs.copying.loop import TreeCopy
from gpufs.copying.types import (
    MOST_FAILURES,
    CopyError,
    CopyOptions,
    CopyProgress,
    CopyResult,
    CountingReport,
    Fastpath,
    Outcome,
    Progress,
    copy_error,
)

_Path: TypeAlias = str | bytes | os.PathLike[str] | os.PathLike[bytes]


@named_in("gpufs")
def copy(
    source: _Path,
    destination: _Path,
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

    The other may be a URL: ``s3://BUCKET/KEY``, ``gs://`` and ``az://``, ``http://`` and ``https://`` (to load only),
    and ``hf://ORG/MODEL/FILE`` (to load only). URLs need obstore, those of the Hub also huggingface_hub. A file that is
    loaded gets its name when it is complete. Or it may be a file of another machine with gpufs, ``HOST:PATH``, which is
    copied over ssh.

    Several files or destinations at once: :func:`copy_files`, or this function from several threads.

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
        Called with a :class:`CopyProgress` from this thread, about ten times a second and at the end. An exception that
        it raises ends the copy.
    cancel : Cancellation, optional
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
    options = {"fsync": fsync, "verify": verify, "preserve": preserve, "partial": partial}
    with Copier(fastpath=fastpath, notice=_warning_here(), **options) as copier:
        return copier.copy_file(source, destination, progress=progress, cancel=cancel)


@named_in("gpufs")
def copy_files(
    sources: _Path | Iterable[_Path],
    destinations: _Path | Sequence[_Path],
    *,
    jobs: int = 4,
    fastpath: Fastpath = "auto",
    fsync: bool = False,
    verify: bool = False,
    preserve: bool = False,
    partial: bool = False,
    progress: Callable[[CopyProgress], None] | None = None,
    cancel: Cancellation | None = None,
) -> list[CopyResult]:
    """Copy files to a directory, or to each of several, for example of several GPUs; each file is read once.

    Of several GPUs the first one gets a file from the source, and the others from those that have it. Of several
    machines the first one passes the file on to the next one, while it still receives it. Symbolic links to files are
    followed, so this copies a snapshot from the cache of a hub.

    Parameters
    ----------
    sources : path, URL or HOST:PATH, or iterable of them
        The files.
    destinations : path, URL or HOST:PATH, or sequence of them
        Directories, which get files of the sources' names; existing ones are overwritten. For one source also the names
        of its copies.
    jobs : int
        How many files are copied at once.
    fastpath, fsync, verify, preserve, partial
        As for :func:`copy`.
    progress : callable, optional
        Called with a :class:`CopyProgress` of all copies from this thread, about ten times a second and at the end. Of
        several machines the first one counts. An exception that it raises ends the copies.
    cancel : Cancellation, optional
        Ends all copies from another thread; so does KeyboardInterrupt.

    Returns
    -------
    list of CopyResult
        Those of one file are in the order of ``destinations``, the files in the order in which they ended.

    Raises
    ------
    ExceptionGroup
        With a :class:`CopyError` for each copy that failed, and one for a source that cannot be read. The other copies
        are complete. With one for each destination that is too small, nothing is copied.
    CopyError
        ECANCELED: it was cancelled. Others: the names or options cannot be used.

    Examples
    --------
    >>> gpufs.copy_files(Path("Qwen3-8B").iterdir(), "/mnt/gpufs/gpu0/Qwen3-8B")  # doctest: +SKIP
    >>> gpufs.copy_files("model.safetensors", ["/mnt/gpufs/gpu0", "/mnt/gpufs/gpu1"])  # doctest: +SKIP
    """
    options = CopyOptions(fastpath=fastpath, fsync=fsync, verify=verify, preserve=preserve, partial=partial)
    names, ends = _names(sources), _names(destinations)
    with FileCopier(options, _warning_here()) as copier:
        return _copy(copier, names, ends, jobs, progress, cancel, in_directory=len(names) > 1)


@named_in("gpufs")
def copy_tree(
    source: _Path,
    destination: _Path,
    *,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    update: bool = False,
    inplace: bool = False,
    symlinks: bool = False,
    jobs: int = 4,
    fastpath: Fastpath = "auto",
    fsync: bool = False,
    verify: bool = False,
    preserve: bool = False,
    partial: bool = False,
    progress: Callable[[CopyProgress], None] | None = None,
    cancel: Cancellation | None = None,
) -> list[CopyResult]:
    """Copy a directory with all that is below it, as `gpufs cp -rT`.

    Either of the two is on a gpufs mount. The other may be a URL, for example ``hf://ORG/MODEL`` or
    ``s3://BUCKET/MODEL``, or a directory of another machine, ``HOST:PATH``. The destination is the copy itself, so a
    second call makes the same directory again. Files that only the destination has stay.

    Parameters
    ----------
    source : path or URL
        The directory to copy.
    destination : path or URL
        The directory that becomes its copy. It is created if it is missing; the one above it must exist.
    include, exclude : str or sequence of str
        Patterns of the files to copy, and of those to leave out, as the options of `gpufs cp`: ``*.safetensors`` is
        compared with names, a pattern with a slash with paths below the source.
    update : bool
        Files are left out whose copies have the same size and time, or the version that a store names. The others are
        replaced when their new versions are complete, as by `gpufs sync`.
    inplace : bool
        With ``update``, existing files are overwritten instead: for a device without space for two versions of one.
    symlinks : bool
        Symbolic links are copied as links, instead of the files that they lead to.
    jobs : int
        How many files are copied at once. Between machines it is one.
    fastpath, fsync, verify, preserve, partial
        As for :func:`copy`.
    progress : callable, optional
        Called with a :class:`CopyProgress` of all files from this thread, about ten times a second and at the end.
        ``total`` grows while files are found. An exception that it raises ends the copy.
    cancel : Cancellation, optional
        Ends the copy from another thread; so does KeyboardInterrupt.

    Returns
    -------
    list of CopyResult
        One for each file that was copied, in the order in which they ended.

    Raises
    ------
    ExceptionGroup
        With a :class:`CopyError` for each file that failed. The others are copied.
    CopyError
        ECANCELED: it was cancelled. EINVAL: the names or options cannot be used.

    Examples
    --------
    >>> results = gpufs.copy_tree("hf://Qwen/Qwen3-8B", "/mnt/gpufs/gpu0/qwen", include=["*.safetensors", "*.json"])
    """
    if inplace and not update:
        raise ValueError("inplace=True needs update=True: without it existing files are overwritten in any case")
    options = CopyOptions(
        fastpath=fastpath,
        fsync=fsync,
        verify=verify,
        preserve=preserve,
        partial=partial,
        recursive=True,
        dereference=not symlinks,
        exact=True,
        include=_patterns(include),
        exclude=_patterns(exclude),
        update=update,
        replace=update and not inplace,
    )
    with FileCopier(options, _warning_here()) as copier:
        return _copy(copier, _names(source), _names(destination), jobs, progress, cancel)


@named_in("gpufs.client")
class Copier(FileCopier):
    """Copies files one after the other or from several threads, and keeps its connections to daemons for the next.

    Parameters
    ----------
    fastpath, fsync, verify, preserve, partial
        As for :func:`gpufs.copy`.
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
        options = CopyOptions(fastpath=fastpath, fsync=fsync, verify=verify, preserve=preserve, partial=partial)
        super().__init__(options, notice)

    def copy_file(
        self, source: _Path, destination: _Path, *, progress: Progress = None, cancel: Cancellation | None = None
    ) -> CopyResult:
        """Copy one file as :func:`gpufs.copy` does."""
        names, ends = _names(source), _names(destination)
        try:
            results = _copy(self, names, ends, 1, progress, cancel, is_one=True)
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        if not results:
            raise CopyError(errno.EIO, "nothing was copied", names[0], ends[0])
        return results[0]


def _patterns(given: str | Sequence[str]) -> tuple[str, ...]:
    patterns = (given,) if isinstance(given, str) else tuple(given)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"{pattern!r} is not a pattern: a str is expected")
    return patterns


def _names(given: _Path | Iterable[_Path]) -> list[str]:
    if not isinstance(given, str | bytes | os.PathLike | Iterable):
        raise TypeError(f"{given!r} is not a path")
    names = [given] if isinstance(given, str | bytes | os.PathLike) else given
    return [os.fsdecode(name) for name in names]


def _copy(
    copier: FileCopier,
    sources: Sequence[str],
    ends: Sequence[str],
    jobs: int,
    progress: Progress,
    cancel: Cancellation | None,
    *,
    in_directory: bool = False,
    is_one: bool = False,
) -> list[CopyResult]:
    """Copy, and return the results. CopyError if nothing can be copied, ExceptionGroup with those of single copies."""
    if progress is not None and not callable(progress):
        raise TypeError(f"progress: {progress!r} cannot be called")
    if cancel is not None and not isinstance(cancel, Cancellation):
        raise TypeError(f"cancel: {cancel!r} is not a Cancellation")
    if not isinstance(jobs, int):
        raise TypeError(f"jobs: {jobs!r} is not a number")
    for name, value in (("jobs", jobs), ("sources", len(sources)), ("destinations", len(ends))):
        if value < 1:
            raise ValueError(f"{name}: {value} is less than 1")
    is_tree, named = copier.context.options.recursive, (sources[0], ends[0] if len(ends) == 1 else None)
    report = _Collected(copier, progress, sources[0], len(ends), is_one=len(sources) == 1 and not is_tree)
    failure: CopyError | None = None
    with (cancel or Cancellation()).follower() as stop:
        try:
            loop = TreeCopy(copier, stop, report)
            with loop.opened(sources, ends, in_directory=in_directory, is_one=is_one) as find:
                loop.run(find, jobs)
            report.tick()
        except OSError as error:  # also of progress()
            failure = copy_error(error, *named)
        if cancel is not None and cancel.cancelled:
            failure = CopyError(errno.ECANCELED, "", *named)
    outcomes = report.outcomes
    if len(sources) == 1:
        outcomes.sort(key=lambda ended: ended[0])
    errors = [outcome for _, outcome in outcomes if isinstance(outcome, CopyError)]
    if failure is not None:
        if len(errors) == 1 and not is_tree:  # the copy that was ended
            failure.bytes_done, failure.bytes_total, failure.left = (
                getattr(errors[0], name) for name in ("bytes_done", "bytes_total", "left")
            )
        raise failure
    if errors:
        more = f" and {report.failures - MOST_FAILURES} more" if report.failures > MOST_FAILURES else ""
        raise ExceptionGroup(f"{len(errors)} of {len(outcomes)} copies{more} failed", errors)
    return [outcome for _, outcome in outcomes if isinstance(outcome, CopyResult)]


class _Collected(CountingReport):
    """Collects the reports of a copy.

    ``machines``: of a chain. ``is_one``: progress() shows its verification, too, and nothing before its size is known.
    """

    def __init__(self, copier: FileCopier, progress: Progress, source: str, machines: int, *, is_one: bool) -> None:
        super().__init__()
        self.outcomes: list[tuple[int, Outcome]] = []  # with the machine of a chain
        self.failures = 0  # of which the first are among them
        self._notice = copier.context.notice
        self._show = progress
        self._source = source
        self._machines = machines
        self._is_one = is_one
        self._verified: CopyProgress | None = None

    def reporter(self, source: str) -> Progress:
        def report(progress: CopyProgress) -> None:
            self.progressed(source, progress)
            self._verified = progress if self._is_one and progress.phase == "verify" else None

        return None if self._show is None else report

    def finished(self, source: str, destinations: Sequence[str], outcomes: Sequence[Outcome], hop: int = 0) -> None:
        self._verified = None
        if hop == 0:  # the progress shows the first machine
            self.count(source, outcomes)
        for outcome in outcomes:
            self._take(outcome, hop)

    def failed(self, source: str, destination: str | None, error: OSError) -> None:
        names = (source, destination) if source else (destination or self._source, None)
        self._take(copy_error(error, *names))

    def _take(self, outcome: Outcome, hop: int = 0) -> None:
        if isinstance(outcome, CopyError):
            self.failures += 1
            if self.failures > MOST_FAILURES:
                return
        self.outcomes.append((hop, outcome))

    def noticed(self, text: str) -> None:
        if self._notice is not None:
            self._notice(text.removeprefix("warning: "))

    def tick(self) -> None:
        if self._show is not None:
            progress = self._verified or self.progress()
            if progress.total or not self._is_one:
                self._show(progress)

    def host_lost(self, hop: int, error: CopyError) -> None:
        for lost in range(hop, self._machines):
            self._take(error, lost)


def _warning_here() -> Callable[[str], None]:
    """A function that warns of the line which calls this function's caller. Copies call it from any thread."""
    frame = sys._getframe(2)
    file, line, names = frame.f_code.co_filename, frame.f_lineno, frame.f_globals

    def warn(text: str) -> None:
        registry = names.setdefault("__warningregistry__", {})
        warnings.warn_explicit(text, RuntimeWarning, file, line, names.get("__name__"), registry)

    return warn
