"""Creates what a copy needs beside the contents of files: directories, links, special files, and their attributes.

As in the sources, nothing is looked up by path below the names given by the user, and symbolic links are not followed.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from gpufs import mounting
from gpufs.client._cancellation import Cancellation
from gpufs.copying.entries import NEITHER, Entry, SourceAttributes, is_inside, open_path, preserve, set_times
from gpufs.copying.identity import Identity
from gpufs.copying.job import CopyContext
from gpufs.copying.types import CopyOptions, Report
from gpufs.copying.walk import Folder, Step
from gpufs.exceptions import NotOnMount
from gpufs.syscalls import closed_after, path_of

_INTO_ITSELF: Final = "a directory cannot be copied into itself"
_FOUND: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
_DIRECTORY: Final = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class CopiedDirectory:
    """A directory that is being filled, open with O_PATH.

    ``source``: the attributes of the directory that it is a copy of, if that has any; ``keeps``: it gets all of these,
    as with --preserve. ``follow``: a symbolic link to a directory is good enough. ``replace``: it takes the place of
    anything else, and this may write into it, whatever its mode is.
    """

    def __init__(
        self,
        entry: Entry,
        source: SourceAttributes | None,
        *,
        keeps: bool,
        xattrs: Mapping[str, bytes] | None = None,
        follow: bool = False,
        replace: bool = False,
    ) -> None:
        """Create it if it does not exist. OSError if that fails, with its path."""
        self.entry = entry
        self.created = False
        self._source = source
        self._xattrs = xattrs
        self.keeps = keeps
        # The copy must be able to write there, whatever the final mode is.
        allowed = stat.S_IRWXU if keeps else 0o1777
        mode = 0o777 if source is None else stat.S_IMODE(source.st_mode) & allowed | stat.S_IRWXU
        self._mode: int | None = None  # that it had, if it has another one now
        flags = _DIRECTORY & ~os.O_NOFOLLOW if follow else _DIRECTORY
        try:
            self.created = _make_directory(entry, mode)
            try:
                self.fd = os.open(entry.name, flags, dir_fd=entry.directory)
            except NotADirectoryError:
                if not replace:
                    raise
                os.unlink(entry.name, dir_fd=entry.directory)
                self.created = _make_directory(entry, mode)
                self.fd = os.open(entry.name, flags, dir_fd=entry.directory)
        except NotADirectoryError:
            raise OSError(errno.ENOTDIR, "a file cannot be overwritten with a directory", entry.path) from None
        except OSError as error:
            raise OSError(error.errno, error.strerror, entry.path) from None
        try:
            if self.created and os.listdir(path_of(self.fd)):
                raise OSError(errno.EBUSY, "another process has put a directory in its place")
            if replace and not self.created:
                self._make_writable()
        except OSError as error:
            os.close(self.fd)
            raise OSError(error.errno, error.strerror, entry.path) from None

    def _make_writable(self) -> None:
        status = os.fstat(self.fd)
        if status.st_uid == os.geteuid() != 0 and status.st_mode & stat.S_IRWXU != stat.S_IRWXU:
            self._mode = stat.S_IMODE(status.st_mode)
            os.chmod(path_of(self.fd), self._mode | stat.S_IRWXU)

    def complete(self) -> None:
        """Set its attributes: nothing more is written into it."""
        if self._mode is not None and not self.keeps:
            os.chmod(path_of(self.fd), self._mode)
        if self._source is None:
            return
        path, mode = path_of(self.fd), stat.S_IMODE(self._source.st_mode)
        if self.keeps:
            preserve(path, self._source, self._xattrs)
        elif self.created and mode & stat.S_IRWXU != stat.S_IRWXU:
            os.chmod(path, stat.S_IMODE(os.stat(path).st_mode) & (mode | ~stat.S_IRWXU))


def adopt(entry: Entry, copy: os.stat_result, step: Step, state: TreeState) -> None:
    """Give a file whose content was compared what makes it a copy without that. ``copy``: its attributes before."""
    with suppress(OSError), closed_after(os.open(entry.name, _FOUND, dir_fd=entry.directory)) as fd:
        now = os.fstat(fd)
        if not os.path.samestat(now, copy) or (now.st_size, now.st_mtime_ns) != (copy.st_size, copy.st_mtime_ns):
            return
        if step.status is None:
            state.identity(step).note(fd)
        elif state.options.preserve:
            preserve(fd, step.status)
        else:
            set_times(fd, step.status)


def _make_directory(entry: Entry, mode: int) -> bool:
    """Return whether it did not exist."""
    try:
        os.mkdir(entry.name, mode, dir_fd=entry.directory)
    except FileExistsError:
        return False
    return True


def make_special(
    entry: Entry,
    source: SourceAttributes,
    target: str | bytes | None,
    *,
    keeps: bool,
    xattrs: Mapping[str, bytes] | None = None,
    update: bool = False,
) -> None:
    """Create a symbolic link to ``target``, or a special file. As cp(1), replace a file unless it is the source itself.

    ``entry`` has its directory open. ``update``: what is there already stays.
    """
    entry = entry._replace(follow=False)
    try:
        _make(entry, source, target)
    except FileExistsError:
        if update and _is_made(entry, source, target):
            if keeps:
                pass_on(entry, entry.status(), source)
            return
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
        preserve(path_of(fd), source, xattrs)


def _is_made(entry: Entry, source: SourceAttributes, target: str | bytes | None) -> bool:
    status = entry.status()
    if stat.S_IFMT(status.st_mode) != stat.S_IFMT(source.st_mode):
        return False
    if target is not None:
        return os.fsencode(os.readlink(entry.name, dir_fd=entry.directory)) == os.fsencode(target)
    return isinstance(source, os.stat_result) and status.st_rdev == source.st_rdev


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


def find_copy(entry: Entry, identity: Identity, context: CopyContext) -> os.stat_result | None:
    """Return the attributes of the file that a name has if it is a copy, None if it must be copied."""
    try:
        status = entry.status()
    except OSError:
        return None  # creating it will show what is wrong
    return status if identity.is_of(entry, status) and not context.is_written(status) else None


def has_attributes(copy: os.stat_result, source: SourceAttributes) -> bool:
    """Return whether a copy has the mode and time of its source, and the owner as far as this user may set that."""
    owned = (copy.st_uid, copy.st_gid) == (source.st_uid, source.st_gid) or (
        os.geteuid() != 0 and (copy.st_gid == source.st_gid or source.st_gid not in os.getgroups())
    )
    return owned and (copy.st_mode, copy.st_mtime_ns) == (source.st_mode, source.st_mtime_ns)


def pass_on(entry: Entry, copy: os.stat_result, source: SourceAttributes) -> None:
    """Give a file or link that is a copy already the mode, owner and time of its source, if they differ."""
    if has_attributes(copy, source):
        return
    with closed_after(open_path(entry._replace(follow=False))) as fd:
        if os.path.samestat(os.fstat(fd), copy):
            preserve(path_of(fd), source)


@dataclass(frozen=True)
class TreeState:
    """State that all copies of one command share."""

    context: CopyContext
    cancel: Cancellation
    report: Report
    links: list[str] = field(default_factory=list)  # the copies of links whose originals lead to files

    @property
    def options(self) -> CopyOptions:
        return self.context.options

    def identity(self, step: Step) -> Identity:
        """Return what the copies of a file are compared by."""
        if step.status is None:
            assert step.source is not None
            assert not isinstance(step.source, Entry)
            return Identity.of_stored(step.source)
        identity = Identity.of(step.status, step.size)
        return identity._replace(modified_ns=None) if self.context.is_written(step.status) else identity

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
    """The copy of one source on this machine, whose name is ``base``. ``follow``: that may be a link to a directory."""

    def __init__(self, base: Entry, state: TreeState, *, follow: bool = False) -> None:
        self.base = base
        self._state = state
        self._follow = follow
        self._directories: dict[Folder, CopiedDirectory] = {}  # those that are open

    def check_name(self, path: str, step: Step) -> None:
        """Take a name that may exist, and that a copy will have, before anything is changed."""

    def enter(self, step: Step) -> bool:
        """Create the copy of a directory. Return whether it can be filled."""
        folder, entry = step.folder, self._entry(step)
        if entry is None or folder is None:
            return False
        try:
            if folder.parent is None:
                self._check_named(step)
            if self._state.options.dry_run:
                return True
            with entry.as_directory()._replace(follow=False).located() as located:
                options, follow = self._state.options, self._follow and folder.parent is None
                replace = options.replace and folder.parent is not None
                directory = CopiedDirectory(
                    located, folder.status, keeps=options.preserve, xattrs=folder.xattrs, follow=follow, replace=replace
                )
        except OSError as error:
            source, end = (str(error.filename), None) if error.filename else (step.path, entry.path)
            self._state.report.failed(source, end, error)
            return False
        self._directories[folder] = directory
        folder.ended.append(partial(self._end, folder))
        return True

    def file(self, step: Step) -> Entry | None:
        """Return the name of the copy of a file, None if it is not copied."""
        entry = self._entry(step)
        if entry is None:
            return None
        try:
            if step.parent is None:
                self._check_named(step)
        except OSError as error:
            self._state.report.failed(step.path, entry.path, error)
            return None
        options, status = self._state.options, step.status
        regular = status is None or stat.S_ISREG(status.st_mode)
        if options.no_clobber and exists(entry, follow=entry.follow and regular):
            self._state.report.skipped()
            return None
        # With --checksum they are compared later, by several threads.
        if not options.update or options.checksum or not step.has_content or self._is_in_new(step):
            return entry
        copy = find_copy(entry, self._state.identity(step), self._state.context)
        if copy is None:
            return entry
        self._state.report.skipped()
        if options.preserve and status is not None and not options.dry_run:
            try:
                pass_on(entry, copy, status)
            except OSError as error:
                self._state.report.failed(step.path, entry.path, error)
        return None

    def special(self, step: Step) -> None:
        """Create the copy of a symbolic link, a FIFO, socket or device node."""
        entry, options = self.file(step), self._state.options
        if entry is None or options.dry_run:
            return
        assert step.status is not None
        try:
            with entry.located() as located:
                target = self._target(step, entry) if stat.S_ISLNK(step.status.st_mode) else None
                how = {"keeps": options.preserve, "update": options.update}
                make_special(located, step.status, target, xattrs=step.xattrs, **how)
        except OSError as error:
            self._state.report.failed(step.path, entry.path, error)

    def _target(self, step: Step, entry: Entry) -> str | bytes:
        assert isinstance(step.source, Entry)
        if exists(step.source, follow=True):
            self._state.links.append(entry.path)
        return os.readlink(step.source.name, dir_fd=step.source.directory)

    def _entry(self, step: Step) -> Entry | None:
        """Return the name of the copy, None if the directory for it could not be created."""
        if step.parent is None:
            return self.base
        if self._state.options.dry_run:  # the directory of the copy may not exist
            below = step.below if step.kind == "file" else step.folder.below if step.folder else ""
            return Entry.of(os.path.join(self.base.path, below), follow=False)
        directory = self._directories.get(step.parent)
        return None if directory is None else directory.entry.child(step.name, directory.fd)

    def _is_in_new(self, step: Step) -> bool:
        directory = self._directories.get(step.parent) if step.parent is not None else None
        return directory is not None and directory.created

    def _check_named(self, step: Step) -> None:
        """Raise OSError if what the user has named cannot be copied."""
        status = step.status
        if status is None:
            if step.kind == "file":
                self.base.check_file()
            return
        if step.kind == "file" and self._state.options.replace:
            self.base.check_replaceable()
        checked_later = stat.S_ISREG(status.st_mode) or stat.S_ISBLK(status.st_mode)  # by the copier
        if not checked_later and not _on_a_mount(status.st_dev, self.base):
            raise NotOnMount(errno.EXDEV, NEITHER)
        if step.kind == "enter" and is_inside(self.base.path, step.path):
            raise OSError(errno.EINVAL, _INTO_ITSELF)

    def _end(self, folder: Folder) -> None:
        directory = self._directories.pop(folder)
        try:
            if not self._state.cancel.cancelled:
                directory.complete()
        except OSError as error:
            self._state.report.failed(directory.entry.path, None, error)
        finally:
            os.close(directory.fd)


def _on_a_mount(device: int, destination: Entry) -> bool:
    mounts = mounting.by_device()
    if device in mounts:
        return True
    try:
        with destination.filled() as (directory, _):
            return os.fstat(directory).st_dev in mounts
    except OSError:
        return True  # creating it will show what is wrong
