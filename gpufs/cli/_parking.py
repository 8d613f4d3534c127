"""What `gpufs sleep`, `wake`, `pin` and `unpin` share: files below paths, and a line about them."""

import os
import stat
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from errno import EINVAL
from typing import Final

from gpufs import mounting, safe_path
from gpufs.cli._files import Found, files_of, parked_bytes
from gpufs.cli._output import Failure, bytes_text, complain
from gpufs.syscalls import closed_after, path_of

_NAMED: Final = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


def each_file(paths: Sequence[str], action: Callable[[str, os.stat_result, int | None], int | str], done: str) -> None:
    """Call ``action`` with each regular file at or below the paths, its status, and what parked_bytes() returns.

    The action returns the bytes that it has changed something about, or why it has not. Failure at the end if one has
    failed.
    """
    count = size = failed = 0
    unchanged: Counter[str] = Counter()
    for path in paths:
        for found in _files(path):
            try:
                with closed_after(os.open(found.name, _NAMED, dir_fd=found.directory)) as fd:
                    if not stat.S_ISREG(os.fstat(fd).st_mode):
                        raise OSError(EINVAL, "is not a regular file")
                    result = action(path_of(fd), found.status, parked_bytes(path_of(fd)))
            except OSError as error:
                complain(f"{found.path}: {error.strerror}")
                failed += 1
            else:
                if isinstance(result, str):
                    unchanged[result] += 1
                else:
                    count += 1
                    size += result
    rest = ", ".join(f"{number} {why}" for why, number in unchanged.items())
    line = f"{done} {count} {'file' if count == 1 else 'files'}, {bytes_text(size)}"
    print(f"{line}; unchanged: {rest}" if rest else line)
    if failed:
        raise Failure(f"{failed} of {count + failed + unchanged.total()} files stay as they are")


def _files(path: str) -> Iterator[Found]:
    try:
        with safe_path.located(path) as place:
            status = os.stat(place.name, dir_fd=place.directory, follow_symlinks=False)
            if status.st_dev not in mounting.by_device():
                raise Failure(f"{path}: is not on a gpufs mount (gpufs status lists those)")
            if not stat.S_ISDIR(status.st_mode):
                yield Found(path, status, place.directory, place.name)
                return
            real = place.path
    except OSError as error:
        raise Failure(f"{path}: {error.strerror}") from None
    for found in files_of(real, recursive=True):
        if found.status.st_blocks:
            yield found
