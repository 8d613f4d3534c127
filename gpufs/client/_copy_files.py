"""gpufs.copy_files(): many files into one directory, several at once."""

from __future__ import annotations

import os
from collections.abc import Iterable
from errno import ENOTDIR
from typing import Any

from gpufs._naming import named_in
from gpufs.client._copy import Copier, warning_here
from gpufs.client._copy_types import Cancellation, CopyError, CopyResult


@named_in("gpufs")
def copy_files(
    sources: Iterable[str | os.PathLike[str]],
    directory: str | os.PathLike[str],
    *,
    jobs: int = 4,
    **options: Any,
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
    **options
        ``fastpath``, ``fsync``, ``verify``, ``preserve`` and ``partial``, as for :func:`gpufs.copy`.

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
        raise NotADirectoryError(ENOTDIR, os.strerror(ENOTDIR), target)
    paths = [os.fspath(source) for source in sources]
    ends = {os.path.join(target, os.path.basename(path)): path for path in paths}
    if len(ends) < len(paths):
        raise ValueError("sources: two of them have one name, and would be one file in the directory")
    cancel = Cancellation()
    with Copier(notice=warning_here(), **options) as copier, ThreadPoolExecutor(jobs) as pool:

        def copy(end: str) -> CopyResult | CopyError:
            try:
                return copier.copy_file(ends[end], end, cancel=cancel)
            except CopyError as error:
                return error

        try:
            outcomes = list(pool.map(copy, ends))
        except BaseException:
            cancel.cancel()
            raise
    errors = [outcome for outcome in outcomes if isinstance(outcome, CopyError)]
    if errors:
        raise ExceptionGroup(f"{len(errors)} of {len(ends)} copies to {target} failed", errors)
    return [outcome for outcome in outcomes if isinstance(outcome, CopyResult)]
