"""`gpufs sync --delete`: removes from the copy of a directory what its source does not have."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping
from contextlib import closing
from typing import Literal, Protocol, TypeAlias

from gpufs import mounting
from gpufs.client._cancellation import Cancellation
from gpufs.copying.entries import Entry, is_inside
from gpufs.copying.types import TreeOptions
from gpufs.copying.walk import Fail, Step, Steps, selected, walk_files

# The kinds of a source's files and directories, by their paths below it.
Names: TypeAlias = Mapping[str, Literal["file", "directory"]]


class DeletionReport(Protocol):
    """Receives the report of each removal."""

    def deleted(self, path: str) -> None:
        """Take what has been removed."""

    def failed(self, source: str, destination: str | None, error: OSError) -> None:
        """Take what could not be removed, or looked at."""


def names_of(steps: Steps) -> dict[str, Literal["file", "directory"]]:
    """Return what a walk over a source finds."""
    names: dict[str, Literal["file", "directory"]] = {}
    with closing(steps):
        for step in steps:
            if step.kind == "enter" and step.folder is not None:
                names[step.folder.below] = "directory"
            elif step.kind == "file":
                names[step.below] = "file"
    return names


def check_apart(source: str, copy: str) -> None:
    """Raise OSError EINVAL for two directories of which one has the other: removing from one would change both."""
    if is_inside(source, copy) or is_inside(copy, source):
        text = "one of the two directories is in the other, so nothing is deleted or copied"
        raise OSError(errno.EINVAL, text, copy)


def delete_others(
    base: Entry, names: Names, options: TreeOptions, cancel: Cancellation, report: DeletionReport
) -> None:
    """Remove all below a directory that is not among the names of its source, or is there of another kind.

    What --include and --exclude leave out of the copy stays, and so do the directories that have it. OSError EINVAL for
    the root of a mount, whose directories are devices and disks.
    """
    base = base.as_directory()._replace(follow=False)
    try:
        if not stat.S_ISDIR(base.status().st_mode):
            return
    except OSError:
        return  # there is none yet
    if mounting.is_root(base.path):
        raise OSError(errno.EINVAL, "nothing is deleted in the root of a mount: name a directory in it", base.path)
    gone: set[str] = set()  # their paths
    steps = _walk(base, lambda path, error: report.failed(path, None, error))
    with closing(selected(steps, options.include, options.exclude)) as steps:
        for step in steps:
            if cancel.cancelled:
                return
            try:
                if _delete_unless_named(step, names, gone, dry_run=options.dry_run):
                    gone.add(step.path)
                    report.deleted(os.path.join(step.path, "") if step.kind == "leave" else step.path)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):  # else the directory has what was left out
                    report.failed(step.path, None, error)


def _walk(base: Entry, fail: Fail) -> Steps:
    """Walk over a directory. Root gets to it without other users' links."""
    with base.located() as located:
        yield from walk_files(located, fail, recursive=True, dereference=False)


def _delete_unless_named(step: Step, names: Names, gone: set[str], *, dry_run: bool) -> bool:
    """Remove what a walk has found, unless the source has it. Return whether it is gone, or would be."""
    folder = step.folder
    if step.kind == "file" and folder is not None and names.get(step.below) != "file":
        assert isinstance(step.source, Entry)
        if not dry_run:
            os.unlink(step.source.name, dir_fd=step.source.directory)
        return True
    if step.kind != "leave" or folder is None or folder.parent is None or names.get(folder.below) == "directory":
        return False
    if dry_run:
        return all(os.path.join(folder.path, name) in gone for name in os.listdir(folder.path))
    os.rmdir(os.path.basename(folder.below), dir_fd=folder.parent.fd)
    return True
