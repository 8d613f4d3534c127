"""What `gpufs sleep`, `wake`, `pin` and `unpin` share: files below paths, and a line about them."""

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from gpufs import mounting
from gpufs.cli._files import files_of
from gpufs.cli._output import Failure, bytes_text, complain

PINNED: Final = "user.gpufs-pinned"  # an extended attribute: a full device does not park the file

_BLOCK: Final = 512  # unit of st_blocks


def each_file(paths: Sequence[str], action: Callable[[str], None], done: str) -> None:
    """Call ``action`` with each regular file at or below the paths. Failure at the end if one has failed."""
    count = size = failed = 0
    for path in paths:
        for file, status in _files(path):
            try:
                action(file)
            except OSError as error:
                complain(f"{file}: {error.strerror}")
                failed += 1
            else:
                count += 1
                size += status.st_blocks * _BLOCK
    print(f"{done} {count} {'file' if count == 1 else 'files'}, {bytes_text(size)}")
    if failed:
        raise Failure(f"{failed} of {count + failed} files stay as they are")


def _files(path: str) -> Iterator[tuple[str, os.stat_result]]:
    try:
        status = os.stat(path)
    except OSError as error:
        raise Failure(f"{path}: {error.strerror}") from None
    if status.st_dev not in mounting.by_device():
        raise Failure(f"{path}: is not on a gpufs mount (gpufs status lists those)")
    if not stat.S_ISDIR(status.st_mode):
        yield path, status
        return
    for file, found in files_of(os.path.realpath(path), recursive=True):
        if found.st_blocks:
            yield file, found
