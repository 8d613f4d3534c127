"""Creates what a copy needs beside the contents of files: directories, links, special files, and their attributes.

As in the sources, nothing is looked up by path below the names given by the user, and symbolic links are not followed.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from gpufs import mounting
from gpufs.client._cancellation import Cancellation
from gpufs.copying.entries import NEITHER, Entry, SourceAttributes, is_inside, open_path, preserve
from gpufs.copying.types import TreeOptions, TreeReport
from gpufs.copying.walk import Folder, Step
from gpufs.exceptions import NotOnMount
from gpufs.syscalls import closed_after, path_of

_INTO_ITSELF: Final = "a directory cannot be copied into itself"
_DIRECTORY: Final = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class CopiedDirectory:
    """A directory that is being filled, open with O_PATH.

    ``source``: the attributes of the directory that it is a copy of, if that has any; ``keeps``: it gets all of these,
    as with --preserve. ``follow``: a symbolic link to a directory is good enough.
    """

    def __init__(self, entry: Entry, source: SourceAttributes | None, *, keeps: bool, follow: bool = False) -> None:
        """Create it if it does not exist. OSError if that fails, with its path."""
        self.entry = entry
        self.created = False
        self._source = source
        self._keeps = keeps
        # The copy must be able to write there, whatever the final mode is.
        allowed = stat.S_IRWXU if keeps else 0o1777
        mode = 0o777 if source is None else stat.S_IMODE(source.st_mode) & allowed | stat.S_IRWXU
        try:
            with suppress(FileExistsError):
                os.mkdir(entry.name, mode, dir_fd=entry.directory)
                self.created = True
            flags = _DIRECTORY & ~os.O_NOFOLLOW if follow else _DIRECTORY
            self.fd = os.open(entry.name, flags, dir_fd=entry.directory)
        except NotADirectoryError:
            raise OSError(errno.ENOTDIR, "a file cannot be overwritten with a directory", entry.path) from None
        except OSError as error:
            raise OSError(error.errno, error.strerror, entry.path) from None
        try:
            strange = self.created and os.listdir(path_of(self.fd))
        except OSError as error:
            os.close(self.fd)
            raise OSError(error.errno, error.strerror, entry.path) from None
        if strange:
            os.close(self.fd)
            raise OSError(errno.EBUSY, "another process has put a directory in its place", entry.path)

    def child(self, name: str) -> Entry:
        return self.entry.child(name, self.fd)

    def complete(self) -> None:
        """Set its attributes: nothing more is written into it."""
        if self._source is None:
            return
        path, mode = path_of(self.fd), stat.S_IMODE(self._source.st_mode)
        if self._keeps:
            preserve(path, self._source)
        elif self.created and mode & stat.S_IRWXU != stat.S_IRWXU:
            os.chmod(path, stat.S_IMODE(os.stat(path).st_mode) & (mode | ~stat.S_IRWXU))

    def close(self) -> None:
        os.close(self.fd)


def make_special(entry: Entry, source: SourceAttributes, target: str | bytes | None, *, keeps: bool) -> None:
    """Create a symbolic link to ``target``, or a special file. As cp(1), replace a file unless it is the source itself.

    ``entry`` has its directory open.
    """
    entry = entry._replace(follow=False)
    try:
        _make(entry, source, target)
    except FileExistsError:
        if isinstance(source, os.stat_result) and os.path.samestat(entry.status(), source):
            raise OSError(errno.EINVAL, "is the same file as the source") from None
        os.unlink(entry.name, dir_fd=entry.directory)
        _make(entry, source, target)
    if not keeps:
        return
    with closed_after(open_path(entry)) as fd:
        made = os.fstat(fd)
        if (stat.S_IFMT(made.st_mode), made.st_nlink) != (stat.S_IFMT(source.st_mode), 1):
            raise OSError(errno.EBUSY, "another process has put a file in its place")
        preserve(path_of(fd), source)


def _make(entry: Entry, source: SourceAttributes, target: str | bytes | None) -> None:
    if target is not None:
        os.symlink(os.fsencode(target), os.fsencode(entry.name), dir_fd=entry.directory)
    else:
        assert isinstance(source, os.stat_result)
        os.mknod(entry.name, source.st_mode & ~0o7000, source.st_rdev, dir_fd=entry.directory)


def exists(entry: Entry, *, follow: bool) -> bool:
    """Return whether a name is taken. ``follow``: not by a link to nowhere."""
    try:
        entry._replace(follow=follow).status()
    except OSError:
        return False  # creating it will show what is wrong
    return True


def file_is_current(entry: Entry, size: int, modified_ns: int | None) -> bool:
    """Return whether a name has a file of a source's size that is not older."""
    try:
        status = entry.status()
    except OSError:
        return False  # creating it will show what is wrong
    same = stat.S_ISREG(status.st_mode) and status.st_size == size
    return same and modified_ns is not None and status.st_mtime_ns >= modified_ns


@dataclass(frozen=True)
class TreeState:
    """State that all copies of one command share."""

    options: TreeOptions
    cancel: Cancellation
    report: TreeReport
    # The sources of all that has been copied, by the names of the copies.
    made: dict[str, str] = field(default_factory=dict)
    links: list[str] = field(default_factory=list)  # the copies of links whose originals lead to files

    def links_without_files(self) -> list[str]:
        """Return the copies of links that lead nowhere, or off the mount, although the originals lead to files.

        Call it when everything is copied.
        """
        mounts = mounting.by_device() if self.links else {}
        broken = []
        for path in self.links:
            try:
                if os.lstat(path).st_dev in mounts and os.stat(path).st_dev not in mounts:
                    broken.append(path)
            except OSError:
                broken.append(path)
        return broken


class FileTree:
    """The copy of one source on this machine, whose name is ``base``.

    ``created`` has the directories that are created for this source. ``follow``: ``base`` may be a link to a directory.
    """

    def __init__(self, base: Entry, state: TreeState, created: set[tuple[int, int]], *, follow: bool = False) -> None:
        self._base = base
        self._state = state
        self._created = created
        self._follow = follow
        self._directories: dict[Folder, CopiedDirectory] = {}  # those that are open

    def enter(self, step: Step) -> bool:
        """Create the copy of a directory. Return whether it can be filled."""
        folder, entry = step.folder, self._entry(step)
        if entry is None or folder is None:
            return False
        try:
            if folder.parent is None:
                self._check_named(step)
            if folder.status is not None and _identity(folder.status) in self._created:
                raise OSError(errno.EINVAL, _INTO_ITSELF, step.path)
            if self._state.options.dry_run:
                return True
            with entry.as_directory()._replace(follow=False).located() as located:
                keeps, follow = self._state.options.preserve, self._follow and folder.parent is None
                directory = CopiedDirectory(located, folder.status, keeps=keeps, follow=follow)
        except OSError as error:
            source, end = (str(error.filename), None) if error.filename else (step.path, entry.path)
            self._state.report.failed(source, end, error)
            return False
        if directory.created:
            self._created.add(_identity(os.fstat(directory.fd)))
        self._directories[folder] = directory
        folder.ended.append(partial(self._end, folder))
        return True

    def file(self, step: Step) -> Entry | None:
        """Return the name of the copy of a file, None if it is not copied."""
        entry = self._entry(step)
        if entry is None or not self._is_new(step, entry):
            return None
        regular = step.status is None or stat.S_ISREG(step.status.st_mode)
        options = self._state.options
        if (options.no_clobber and exists(entry, follow=entry.follow and regular)) or (
            options.update
            and not options.checksum  # compared later, by several threads
            and step.has_content
            and file_is_current(entry, step.size, step.modified_ns)
        ):
            self._state.report.skipped()
            return None
        return entry

    def special(self, step: Step) -> None:
        """Create the copy of a symbolic link, a FIFO, socket or device node."""
        entry = self.file(step)
        if entry is None or self._state.options.dry_run:
            return
        assert step.status is not None
        assert isinstance(step.source, Entry)
        try:
            with entry.located() as located:
                target = None
                if stat.S_ISLNK(step.status.st_mode):
                    target = os.readlink(step.source.name, dir_fd=step.source.directory)
                    if exists(step.source, follow=True):
                        self._state.links.append(entry.path)
                make_special(located, step.status, target, keeps=self._state.options.preserve)
        except OSError as error:
            self._state.report.failed(step.path, entry.path, error)

    def _entry(self, step: Step) -> Entry | None:
        """Return the name of the copy, None if the directory for it could not be created."""
        if step.parent is None:
            return self._base
        if self._state.options.dry_run:  # the directory of the copy may not exist
            below = step.below if step.kind == "file" else step.folder.below if step.folder else ""
            return Entry.of(os.path.join(self._base.path, below), follow=False)
        directory = self._directories.get(step.parent)
        return None if directory is None else directory.child(step.name)

    def _is_new(self, step: Step, entry: Entry) -> bool:
        """Return whether the copy is allowed, and the first of its name in this command."""
        report, name = self._state.report, os.path.normpath(entry.path)
        try:
            if step.parent is None:
                self._check_named(step)
            before = self._state.made.get(name)
            if before is None:
                self._state.made[name] = step.path
            elif os.path.normpath(before) == os.path.normpath(step.path):
                report.warned(f"{step.path}: is given more than once")
            else:
                raise OSError(errno.EEXIST, "another source of this command has been copied there")
        except OSError as error:
            report.failed(step.path, entry.path, error)
            return False
        return before is None

    def _check_named(self, step: Step) -> None:
        """Raise OSError if what the user has named cannot be copied."""
        status = step.status
        if status is None:
            if step.kind == "file":
                self._base.check_file()
            return
        checked_later = stat.S_ISREG(status.st_mode) or stat.S_ISBLK(status.st_mode)  # by the copier
        if not checked_later and not _on_a_mount(status.st_dev, self._base):
            raise NotOnMount(errno.EXDEV, NEITHER)
        if step.kind == "enter" and is_inside(self._base.path, step.path):
            raise OSError(errno.EINVAL, _INTO_ITSELF)

    def _end(self, folder: Folder) -> None:
        """Set the attributes of a directory, into which nothing more is written."""
        directory = self._directories.pop(folder)
        try:
            if not self._state.cancel.cancelled:
                directory.complete()
        except OSError as error:
            self._state.report.failed(directory.entry.path, None, error)
        finally:
            directory.close()


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _on_a_mount(device: int, destination: Entry) -> bool:
    mounts = mounting.by_device()
    if device in mounts:
        return True
    try:
        with destination.filled() as (directory, _):
            return os.fstat(directory).st_dev in mounts
    except OSError:
        return True  # creating it will show what is wrong
