"""What `gpufs sleep`, `wake`, `pin` and `unpin` share: files below paths, and a line about them."""

import os
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from gpufs import mounting, safe_path
from gpufs.cli._files import Found, files_of, held_bytes, parked_bytes
from gpufs.cli._output import Failure, bytes_text
from gpufs.syscalls import closed_after, path_of


@dataclass(frozen=True, slots=True)
class File:
    """A regular file of a mount. ``parked``: as parked_bytes() returned."""

    path: str
    status: os.stat_result
    parked: int | None

    @property
    def held(self) -> int:
        """The memory of the file, wherever it is."""
        return held_bytes(self.status)


def files_below(paths: Sequence[str]) -> list[File]:
    """Return each file at or below the paths once. Failure if one cannot be moved at all: nothing has changed then."""
    found: dict[tuple[int, int], File] = {}
    for path in paths:
        for each in _files(path):
            try:
                if not stat.S_ISREG(each.status.st_mode):
                    raise Failure(f"{each.path}: is not a regular file; no file has changed")
                inode = each.status.st_dev, each.status.st_ino
                found[inode] = File(each.path, each.status, parked_bytes(each.place, follow=False))
            except FileNotFoundError:  # removed by now
                pass
            except OSError as error:
                raise Failure(f"{each.path}: {error.strerror}; no file has changed") from None
    return list(found.values())


def report(done: str, changed: Iterable[int], unchanged: Counter[str]) -> None:
    """Print what has become of files. ``changed``: the bytes of each that is; ``unchanged``: why others are not."""
    sizes = list(changed)
    rest = ", ".join(f"{number} {why}" for why, number in unchanged.items())
    line = f"{done} {len(sizes)} {'file' if len(sizes) == 1 else 'files'}, {bytes_text(sum(sizes))}"
    print(f"{line}; unchanged: {rest}" if rest else line)


def failed(paths: Sequence[str], files: Sequence[File], error: OSError) -> Failure:
    """Return the failure of a command that changes all files or none."""
    where = error.filename or (paths[0] if len(paths) == 1 else "")
    count = f"{len(files)} files stay as they are" if len(files) != 1 else "it stays as it is"
    return Failure(f"{f'{where}: ' if where else ''}{error.strerror}; {count}")


def change_each(paths: Sequence[str], done: str, change: Callable[[str], str], undo: Callable[[str], object]) -> None:
    """Change something about each file, or undo all. ``change`` returns why there is nothing to do, or ""."""
    files = files_below(paths)
    changed: list[File] = []
    unchanged: Counter[str] = Counter()
    try:
        for file in files:
            with opened(file) as place:
                if why := change(place):
                    unchanged[why] += 1
                else:
                    changed.append(file)
    except OSError as error:
        for file in changed:
            with suppress(OSError), opened(file) as place:
                undo(place)
        raise failed(paths, files, error) from None
    report(done, (file.held for file in changed), unchanged)


@contextmanager
def opened(file: File) -> Iterator[str]:
    """Yield a path that leads to the file whatever others do to its directories. OSError with the file's own path."""
    try:
        with closed_after(safe_path.open_path(file.path, os.O_PATH)) as fd:
            yield path_of(fd)
    except OSError as error:
        raise OSError(error.errno, error.strerror, file.path) from None


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
