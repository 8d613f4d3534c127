"""Whether all that `gpufs cp` is about to copy fits, before anything is created."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress

from gpufs.client import Cancellation, Copier
from gpufs.client._ends import Entry
from gpufs.client._space import data_bytes


def check(
    copier: Copier,
    named: list[tuple[str, Entry]],
    cancel: Cancellation,
    *,
    recursive: bool,
    dereference: bool,
    keep_existing: bool,
) -> None:
    """Raises OSError ENOSPC if the files do not fit, with the figures. ``named``: sources and their destinations.

    Errors of other kinds are left to the copies.
    """
    needed = 0
    for source, destination in {os.path.normpath(entry.path): (name, entry) for name, entry in named}.values():
        for path, status in _files(source, recursive=recursive, dereference=dereference):
            there = _held_bytes(destination.path + path)
            if there is None or not keep_existing:
                needed += data_bytes(status, status.st_size) - (there or 0)
    with suppress(FileNotFoundError, NotADirectoryError), named[0][1].located() as located:
        assert located.directory is not None
        copier.check_space(located.directory, needed, cancel=cancel)


def _files(source: str, *, recursive: bool, dereference: bool) -> Iterator[tuple[str, os.stat_result]]:
    """The regular files of a source: attributes, and the path below it that begins with "/", or "" for itself."""
    above: dict[str, frozenset[tuple[int, int]]] = {}  # the directories above each directory, with dereference
    try:
        status = Entry.of(source, follow=not recursive or dereference).status()
        if stat.S_ISREG(status.st_mode):
            yield "", status
        elif recursive:
            for folder, directories, names, fd in os.fwalk(source, follow_symlinks=dereference):
                if dereference:
                    status = os.fstat(fd)
                    here = (status.st_dev, status.st_ino)
                    passed = above.pop(folder, frozenset())
                    if here in passed:
                        directories.clear()
                        continue  # a loop of links, which the copy reports
                    above.update((os.path.join(folder, name), passed | {here}) for name in directories)
                for name in names:
                    try:
                        status = os.stat(name, dir_fd=fd, follow_symlinks=dereference)
                    except OSError:
                        continue  # which the copy reports
                    if stat.S_ISREG(status.st_mode):
                        yield f"{folder.removeprefix(source)}/{name}", status
    except (OSError, RecursionError):
        return


def _held_bytes(path: str) -> int | None:
    """The bytes that overwriting a file frees; None if nothing has the name."""
    try:
        status = os.stat(path, follow_symlinks=False)
    except OSError:
        return None
    return status.st_blocks * 512 if stat.S_ISREG(status.st_mode) else 0
