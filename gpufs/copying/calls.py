"""The functions that programs call to copy files."""

from __future__ import annotations

import errno
import functools
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from gpufs import waiting
from gpufs._naming import named_in
from gpufs.client._cancellation import Cancellation
from gpufs.copying.copier import Copier
from gpufs.copying.entries import kind_of
from gpufs.copying.types import CopyError, CopyProgress, CopyResult, Fastpath, Outcome, Totals


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

    The other may be a URL: ``s3://BUCKET/KEY``, ``gs://`` and ``az://``, ``http://`` and ``https://`` (to load only),
    and ``hf://ORG/MODEL/FILE`` (to load only). URLs need obstore, those of the Hub also huggingface_hub. A file that is
    loaded gets its name when it is complete. Or it may be a file of another machine with gpufs, ``HOST:PATH``, which is
    copied over ssh.

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
    source = os.fsdecode(source)
    destination = _file_in(os.fsdecode(destination), source)
    with Copier(
        fastpath=fastpath, fsync=fsync, verify=verify, preserve=preserve, partial=partial, notice=warning_here()
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
        fastpath=fastpath, fsync=fsync, verify=verify, preserve=preserve, partial=partial, notice=warning_here()
    ) as copier:
        outcomes = copier.copy_names(source, names, progress=progress, cancel=cancel)
    return results_of(outcomes, f"copies of {source}")


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
    progress: Callable[[CopyProgress], None] | None = None,
    cancel: Cancellation | None = None,
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
    progress : callable, optional
        Called with a :class:`CopyProgress` of all files about ten times a second for each that is copied. It is called
        from several threads, one at a time.
    cancel : Cancellation, optional
        Ends all copies from another thread; so does KeyboardInterrupt.

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
    target = os.fspath(directory)
    if not os.path.isdir(target):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), target)
    paths = [os.fspath(source) for source in sources]
    ends = {_file_in(target, path): path for path in paths}
    if len(ends) < len(paths):
        raise ValueError("sources: two of them have one name, and would be one file in the directory")
    totals, lock = Totals(), threading.Lock()
    for path in paths:
        with suppress(OSError):  # its copy reports it; URLs have no size here
            totals.add(os.stat(path).st_size)

    def report(path: str, one: CopyProgress) -> None:
        assert progress is not None
        with lock:
            totals.report(path, one)
            progress(totals.progress())

    with (
        Copier(
            fastpath=fastpath, fsync=fsync, verify=verify, preserve=preserve, partial=partial, notice=warning_here()
        ) as copier,
        (cancel or Cancellation()).follower() as stop,
        ThreadPoolExecutor(jobs) as pool,
    ):

        def copy_one(end: str) -> Outcome:
            path = ends[end]
            try:
                shown = None if progress is None else functools.partial(report, path)
                outcome: Outcome = copier.copy_file(path, end, progress=shown, cancel=stop)
            except CopyError as error:
                outcome = error
            totals.end(path, [outcome])
            return outcome

        try:
            outcomes = waiting.results([pool.submit(copy_one, end) for end in ends])
        except BaseException:
            stop.cancel()
            raise
    return results_of(outcomes, f"copies to {target}")


def results_of(outcomes: Sequence[Outcome], what: str) -> list[CopyResult]:
    """The results, or an ExceptionGroup if a copy has failed."""
    errors = [outcome for outcome in outcomes if isinstance(outcome, CopyError)]
    if errors:
        raise ExceptionGroup(f"{len(errors)} of {len(outcomes)} {what} failed", errors)
    return [outcome for outcome in outcomes if isinstance(outcome, CopyResult)]


def _file_in(destination: str, source: str) -> str:
    """The file that a copy to a name creates: in a directory, one of the source's name."""
    kind = kind_of((source, destination))
    if kind == "url":
        from gpufs.copying import store_copy

        return store_copy.file_in(destination, source)
    if kind == "host":
        return destination  # the receiving machine finds out
    return os.path.join(destination, os.path.basename(source)) if os.path.isdir(destination) else destination


def warning_here() -> Callable[[str], None]:
    """A function that warns of the line which calls this function's caller. Copies call it from any thread."""
    frame = sys._getframe(2)
    file, line, names = frame.f_code.co_filename, frame.f_lineno, frame.f_globals

    def warn(text: str) -> None:
        registry = names.setdefault("__warningregistry__", {})
        warnings.warn_explicit(text, RuntimeWarning, file, line, names.get("__name__"), registry)

    return warn
