"""`gpufs sync --delete`: removes from the copy of a directory what its source does not have."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from typing import Literal, TypeAlias

from gpufs import mounting
from gpufs.client._cancellation import Cancellation
from gpufs.copying.entries import Entry, is_inside
from gpufs.copying.patterns import Selection
from gpufs.copying.types import Report
from gpufs.copying.walk import Fail, Step, Steps, walk_files
from gpufs.new_file import part_name

# The kinds of a source's files and directories, by their paths below it.
Names: TypeAlias = Mapping[str, Literal["file", "directory"]]


def add_name(names: dict[str, Literal["file", "directory"]], step: Step) -> None:
    """Add what a step of a walk over a source has found."""
    if step.kind == "enter" and step.folder is not None:
        names[step.folder.below] = "directory"
    elif step.kind == "file":
        names[step.below] = "file"


def check_apart(source: str, copy: str) -> None:
    """Raise OSError EINVAL for two directories of which one has the other: removing from one would change both."""
    if is_inside(source, copy) or is_inside(copy, source):
        text = "one of the two directories is in the other, so nothing is deleted or copied"
        raise OSError(errno.EINVAL, text, copy)


def delete_others(
    base: Entry,
    names: Names,
    selection: Selection,
    cancel: Cancellation,
    report: Report,
    *,
    dry_run: bool = False,
    below: str = "",
    keeps_times: bool = False,
) -> None:
    """Remove all below a directory that is not among the names of its source, or is there of another kind.

    What --include and --exclude leave out of the copy stays, and so do the directories that have it, and what
    --partial goes on with. OSError EINVAL for the root of a mount, whose directories are devices and disks. ``below``:
    only this directory, and what it has. ``keeps_times``: directories that stay have their times already.
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
    parts = {os.path.join(os.path.dirname(name), part_name(os.path.basename(name))) for name in names}
    with closing(selection.of(steps)) as steps:
        for step in steps:
            if cancel.cancelled:
                return
            path = step.below if step.kind == "file" or step.folder is None else step.folder.below
            if (below and not f"{path}/".startswith(f"{below}/")) or path in parts:
                continue
            try:
                if _delete_unless_named(step, names, gone, dry_run=dry_run, keeps_times=keeps_times):
                    gone.add(step.path)
                    report.deleted(os.path.join(step.path, "") if step.kind == "leave" else step.path)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):  # else the directory has what was left out
                    report.failed(step.path, None, error)


def _walk(base: Entry, fail: Fail) -> Steps:
    """Walk over a directory. Root gets to it without other users' links."""
    with base.located() as located:
        yield from walk_files(located, fail, recursive=True, dereference=False)


def _delete_unless_named(step: Step, names: Names, gone: set[str], *, dry_run: bool, keeps_times: bool) -> bool:
    """Remove what a walk has found, unless the source has it. Return whether it is gone, or would be."""
    folder = step.folder
    if step.kind == "file" and folder is not None and names.get(step.below) != "file":
        assert isinstance(step.source, Entry)
        assert folder.status is not None
        if not dry_run:
            with writable(folder.fd, folder.status, keeps_times):
                os.unlink(step.source.name, dir_fd=folder.fd)
        return True
    if step.kind != "leave" or folder is None or folder.parent is None or names.get(folder.below) == "directory":
        return False
    if dry_run:
        return all(os.path.join(folder.path, name) in gone for name in os.listdir(folder.path))
    assert folder.parent.status is not None
    with writable(folder.parent.fd, folder.parent.status, keeps_times):
        os.rmdir(os.path.basename(folder.below), dir_fd=folder.parent.fd)
    return True


@contextmanager
def writable(target: int | str, status: os.stat_result, keeps_times: bool) -> Iterator[None]:
    """Let the owner of a directory change it, whatever its mode is. ``target``: as of preserve()."""
    mode = stat.S_IMODE(status.st_mode)
    closed = mode & stat.S_IRWXU != stat.S_IRWXU and status.st_uid == os.geteuid() != 0
    if closed:
        os.chmod(target, mode | stat.S_IRWXU)
    try:
        yield
    finally:
        if closed:
            os.chmod(target, mode)
        if keeps_times:
            with suppress(OSError):  # another user's
                os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
