"""What `gpufs sleep`, `wake`, `pin` and `unpin` share: files below paths, and a line about them."""

import os
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from gpufs import mounting
from gpufs.cli._files import files_of, held_bytes, parked_bytes
from gpufs.cli._output import Failure, bytes_text


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
        for name, status in _files(path):
            try:
                if not stat.S_ISREG(status.st_mode):
                    raise Failure(f"{name}: is not a regular file; no file has changed")
                found[status.st_dev, status.st_ino] = File(name, status, parked_bytes(name))
            except FileNotFoundError:  # removed by now
                pass
            except OSError as error:
                raise Failure(f"{name}: {error.strerror}; no file has changed") from None
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
            if why := change(file.path):
                unchanged[why] += 1
            else:
                changed.append(file)
    except OSError as error:
        for file in changed:
            with suppress(OSError):
                undo(file.path)
        raise failed(paths, files, error) from None
    report(done, (file.held for file in changed), unchanged)


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
