"""The function that programs call to copy directories."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

from gpufs._naming import named_in
from gpufs.client._cancellation import Cancellation
from gpufs.copying.calls import results_of, warning_here
from gpufs.copying.copier import Copier
from gpufs.copying.entries import find_targets, kind_of
from gpufs.copying.loop import TreeCopy
from gpufs.copying.types import (
    MOST_FAILURES,
    CopyError,
    CopyOptions,
    CopyProgress,
    CopyResult,
    Fastpath,
    Outcome,
    Totals,
    TreeOptions,
    check_options,
    copy_error,
)


@named_in("gpufs")
def copy_tree(
    source: str | bytes | os.PathLike[str] | os.PathLike[bytes],
    destination: str | bytes | os.PathLike[str] | os.PathLike[bytes],
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
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
    include, exclude : sequence of str
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
    source, destination = os.fsdecode(source), os.fsdecode(destination)
    options = CopyOptions(fastpath, fsync, verify, preserve, partial, update, update and not inplace)
    selection = TreeOptions(
        recursive=True,
        dereference=not symlinks,
        preserve=preserve,
        partial=partial,
        exact=True,
        include=tuple(include),
        exclude=tuple(exclude),
        update=update,
        replace=options.replace,
    )
    if jobs < 1:
        raise ValueError(f"jobs: {jobs} is less than 1")
    report = _Report(source, warning_here(), progress)
    with (
        Copier(**options._asdict(), notice=report.warned) as copier,
        (cancel or Cancellation()).follower() as stop,
        ExitStack() as opened,
    ):
        loop = TreeCopy(copier, selection, stop, report)
        try:
            if kind_of((source, destination)) == "host":
                _copy_between_hosts(loop, copier, (source, destination), selection, report, stop)
            else:
                loop.run(_finder(loop, source, destination, options, opened), jobs)
        except OSError as error:
            if not stop.cancelled:
                raise copy_error(error, source, destination) from None
        if stop.cancelled:
            raise CopyError(errno.ECANCELED, "", source, destination)
        report.tick()
    more = f" and {report.failures - MOST_FAILURES} more" if report.failures > MOST_FAILURES else ""
    return results_of(report.outcomes, f"copies of {source}{more}")


def _finder(
    loop: TreeCopy, source: str, destination: str, options: CopyOptions, opened: ExitStack
) -> Callable[[], None]:
    """Return what finds the files. OSError for names and options that cannot be used."""
    if not source or not destination:
        raise OSError(errno.ENOENT, "an empty name is given where a directory belongs")
    if kind_of((source, destination)) == "file":
        named = opened.enter_context(find_targets([source], destination, follow=False, directory=False, exact=True))
        return partial(loop.find_files, [named])
    from gpufs.copying import store_copy

    check_options(options, "a URL")
    urls, target = store_copy.plan([source], [destination])
    if target is not None:
        return partial(loop.find_uploads, [source], target, into=False)
    if urls[0].is_pattern:
        raise OSError(errno.EINVAL, "a pattern may name several directories: use include=", urls[0].shown)
    named = opened.enter_context(find_targets([urls[0].name], destination, follow=False, directory=False, exact=True))
    return partial(loop.find_urls, urls, [[entry for _, entry in named]])


def _copy_between_hosts(
    loop: TreeCopy, copier: Copier, names: tuple[str, str], selection: TreeOptions, report: _Report, stop: Cancellation
) -> None:
    """Copy from or to another machine by ssh. OSError for what ends the copy."""
    from gpufs.copying import host_copy

    options = copier.context.options
    check_options(options, "HOST:PATH")
    request = host_copy.new_request(options, selection)
    with host_copy.Route(names[:1], names[1:]).connected(stop, report.noticed) as copy:
        loop.run_one(partial(copy, copier.context, request, report))


class _Report:
    """Collects the reports of the loop, from any thread."""

    def __init__(
        self, source: str, warn: Callable[[str], None], progress: Callable[[CopyProgress], None] | None
    ) -> None:
        self.warned = warn
        self.outcomes: list[Outcome] = []
        self.failures = 0  # of which the first are among them
        self._source = source
        self._progress = progress
        self._totals = Totals()
        self.planned = self._totals.add

    def reporter(self, source: str) -> Callable[[CopyProgress], None] | None:
        return None if self._progress is None else partial(self._totals.report, source)

    def finished(self, source: str, destinations: Sequence[str], outcomes: Sequence[Outcome]) -> None:
        self._totals.end(source, outcomes)
        for outcome in outcomes:
            if isinstance(outcome, CopyError):
                self._fail(outcome)
            else:
                self.outcomes.append(outcome)

    def failed(self, source: str, destination: str | None, error: OSError) -> None:
        self._fail(copy_error(error, source or self._source, destination))

    def _fail(self, error: CopyError) -> None:
        self.failures += 1
        if self.failures <= MOST_FAILURES:
            self.outcomes.append(error)

    def skipped(self) -> None:
        """Nothing is to be reported."""

    def noticed(self, text: str) -> None:
        self.warned(text)

    def deleted(self, path: str) -> None:
        """Nothing is deleted here."""

    def tick(self) -> None:
        if self._progress is not None:
            self._progress(self._totals.progress())
