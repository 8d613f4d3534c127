"""Saves directories of a mount: the names, attributes and contents of all that is below, with checksums.

The bytes pass through this process, which makes their checksums on the way: what it has read, what it has summed up and
what it writes are the same bytes, also if a program changes the file. By the daemon the files would have to be read a
second time for that.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any, Final

from gpufs import safe_path, syscalls
from gpufs.client._cancellation import Cancellation
from gpufs.copying import entries
from gpufs.copying.checksums import PART_BYTES, PartReader
from gpufs.copying.copier import FileCopier
from gpufs.copying.entries import Entry, OpenFile, data_bytes, open_path, read_xattrs, sync_directory
from gpufs.copying.identity import seconds_text
from gpufs.copying.loop import TreeCopy
from gpufs.copying.manifest import (
    SPECIAL_KINDS,
    TREE,
    Directory,
    File,
    HardLink,
    Header,
    Manifest,
    ManifestWriter,
    Record,
    Special,
    Symlink,
    encoded,
    is_save,
)
from gpufs.copying.tree import FileTree, TreeState
from gpufs.copying.types import CopyOptions, CopyResult, Outcome, Progress, Report, copy_error
from gpufs.copying.walk import End, Folder, Step, Steps, replay, walk_files
from gpufs.new_file import has_name, part_name
from gpufs.syscalls import closed_after, path_of, write_at
from gpufs.trees import remove_below, remove_tree

# From this size on files bypass the page cache.
_DIRECT_BYTES: Final = 1 << 20
_PAGE: Final = 4096
_RENAME_EXCHANGE: Final = 2
_LOCK_SECONDS: Final = 2.0  # for a process that has just been killed to end
_OPENED: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_REMEDY: Final = "stop what changes it, or leave it out by --exclude"
_NO_HARD_LINKS: Final = (errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV)
_KIND_NAMES: Final[dict[int, Any]] = {mode: name for name, mode in SPECIAL_KINDS.items()}


class Save(FileCopier):
    """One save. In the loop of copies it copies the files.

    ``directories``: those to save, and their names in the save, "" for the save itself. ``options``: which files are
    left out. OSError if it cannot have the name ``path``.
    """

    def __init__(
        self, header: Header, directories: Sequence[tuple[Entry, str]], path: str, options: CopyOptions, report: Report
    ) -> None:
        super().__init__(replace(options, preserve=True), None)  # so its directories are the user's alone
        self._directories = directories
        self.path = safe_path.real(path)
        for directory, _ in directories:
            if entries.is_inside(self.path, directory.path):
                raise OSError(errno.EINVAL, "is below what is saved: give a place elsewhere", self.path)
        self._report = report
        self._links: dict[tuple[int, int], str] = {}  # the first names of files that have several
        self._further: list[tuple[str, str]] = []  # the other names, and the first ones
        self.left_out: list[str] = []  # others' files that the caller may not read
        with ExitStack() as opened:
            opened.callback(super().close)
            self._new = _NewDirectory(self.path)
            opened.callback(self._new.close)
            os.mkdir(TREE, 0o700, dir_fd=self._new.fd)
            self.tree = os.open(TREE, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._new.fd)
            opened.callback(os.close, self.tree)
            self.manifest = ManifestWriter(self._new.fd, header)
            opened.callback(self.manifest.close)
            self._reader = PartReader()
            opened.callback(self._reader.close)
            self._opened = opened.pop_all()

    def close(self) -> None:
        """Close it, and remove it if it is not complete."""
        self._opened.close()

    # ---- what is saved ----

    def find(self, loop: TreeCopy) -> None:
        """Walk over all directories, and then save them if there is space."""
        found, needed = [], 0
        for directory, name in self._directories:
            steps = loop.listed(loop.selection.of(self._walk(directory)))
            found.append((steps, name))
            for step in steps:
                if step.kind == "file" and step.size and step.status is not None:
                    needed += data_bytes(step.status, step.size) // step.status.st_nlink
        try:
            self.context.check_space(self._new.fd, needed, loop.state.cancel)
        except OSError as error:
            self._report.failed("", os.path.dirname(self.path), error)
            return
        for steps, name in found:
            loop.add(replay(steps, self._fail), [_SavedTree(self, name, loop.state)])

    def _walk(self, directory: Entry) -> Steps:
        return walk_files(directory, self._fail, recursive=True, dereference=False)

    def _fail(self, path: str, error: OSError) -> None:
        """Report what cannot be found. What other users keep to themselves is left out."""
        with suppress(OSError):
            if error.errno == errno.EACCES and os.geteuid() not in (0, os.lstat(path).st_uid):
                self.left_out.append(path)
                return
        self.failed(path, error)

    def failed(self, path: str, error: OSError) -> None:
        """Report what cannot be saved."""
        self._report.failed(path, None, _explained(error))

    def first_name(self, status: os.stat_result, path: str) -> str | None:
        """Return the path of the first name of a file with several, None if this is it."""
        first = self._links.setdefault((status.st_dev, status.st_ino), path)
        if first == path:
            return None
        self._further.append((path, first))
        return first

    def shown(self, path: str) -> str:
        """Return the name of a saved file, for messages."""
        return os.path.join(self.path, TREE, path)

    # ---- the contents of files ----

    def copy_each(self, step: Step, ends: Sequence[End], progress: Progress, cancel: Cancellation) -> list[Outcome]:
        (end,) = ends
        assert isinstance(step.source, Entry)
        assert isinstance(end, Entry)
        try:
            with entries.open_source(step.source) as opened:
                return [self._save(opened, end, progress, cancel)]
        except OSError as error:
            names = (end.path, None) if error.errno in (errno.ENOSPC, errno.EDQUOT) else (step.path, end.path)
            return [copy_error(_explained(error), *names)]

    def _save(self, source: OpenFile, end: Entry, progress: Progress, cancel: Cancellation) -> CopyResult:
        began, status = time.monotonic(), _fresh_status(source.fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EBUSY, "is not a regular file any more")
        size = status.st_size
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with closed_after(os.open(end.name, flags, 0o600, dir_fd=end.directory)) as fd, ExitStack() as opened:
            direct = -1
            if size >= _DIRECT_BYTES:
                with suppress(OSError):  # not all file systems can
                    direct = os.open(path_of(fd), os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
                    opened.callback(os.close, direct)
            if size > PART_BYTES and not entries.has_holes(os.fstat(source.fd)):
                syscalls.allocate(fd, size)  # else each write that makes the file longer waits for the others

            def write(data: memoryview, offset: int) -> None:
                if direct >= 0 and not (len(data) | offset) % _PAGE:
                    try:
                        return write_at(direct, data, offset)
                    except OSError as error:
                        if error.errno != errno.EINVAL:  # else of a file system that needs other multiples
                            raise
                return write_at(fd, data, offset)

            sums, moved = self._reader.read(source.fd, size, progress, cancel, write)
            os.ftruncate(fd, size)  # a hole at its end was not written
            xattrs = read_xattrs(source.fd)
            if _changes(_fresh_status(source.fd)) != _changes(status):
                raise OSError(errno.EBUSY, f"was changed during the save: {_REMEDY}")
            os.utime(fd, ns=(status.st_atime_ns, status.st_mtime_ns))
        whole = sums[0] if size <= PART_BYTES else None
        parts = {} if whole else {str(start): text for start, text in sums.items()}
        named = _named(end.path.removeprefix(self.shown("")), status, xattrs)
        self.manifest.write(File(**named, size=size, sha256=whole, parts=parts))
        counts = {"mount": moved, "hole": size - moved}
        paths = {path: count for path, count in counts.items() if count}
        return CopyResult(source.entry.path, end.path, size, time.monotonic() - began, "mount", paths, (), whole)

    # ---- the end ----

    def seal(self) -> None:
        """Complete what it has, and write it to disk. It has not got its name yet."""
        for path, first in self._further:  # in the tree they are for people alone, where the file system can
            try:
                os.link(first, path, src_dir_fd=self.tree, dst_dir_fd=self.tree, follow_symlinks=False)
            except OSError as error:
                if error.errno not in _NO_HARD_LINKS:
                    raise
        self.manifest.finish()
        syscalls.syncfs(self._new.fd)

    def open(self) -> Manifest:
        """Open it for reading, after seal()."""
        return Manifest(path_of(self._new.fd), shown=self.path)

    def complete(self) -> None:
        """Give it its name, in place of an older save."""
        self._new.complete()

    def changed_since(self, began_ns: int) -> str | None:
        """Return the path of something that was changed after a time, None if nothing was."""
        for directory, _ in self._directories:
            for step in self._walk(directory):
                if step.kind != "leave" and step.status is not None and step.status.st_ctime_ns >= began_ns:
                    return step.path
        return None


class _SavedTree(FileTree):
    """The directory of a save that one of the saved directories becomes: ``name`` in the tree, "" for the tree."""

    def __init__(self, save: Save, name: str, state: TreeState) -> None:
        super().__init__(Entry(save.shown(name), name or ".", save.tree, follow=False), state)
        self._save = save
        self._name = name

    def file(self, step: Step) -> Entry | None:
        """Return the name of a file, None for a further name of one and for what the caller may not read."""
        assert step.status is not None
        assert isinstance(step.source, Entry)
        if not _may_read(step.source, step.status):
            self._save.left_out.append(step.path)
            return None
        path = os.path.join(self._name, step.below)
        if step.status.st_nlink > 1 and (first := self._save.first_name(step.status, path)) is not None:
            self._write(step.path, lambda: HardLink(path=encoded(path), to=encoded(first)))
            return None
        return self._entry(step)

    def special(self, step: Step) -> None:
        self._write(step.path, lambda: self._record(step))

    def _record(self, step: Step) -> Symlink | Special:
        assert step.folder is not None
        assert step.status is not None
        assert isinstance(step.source, Entry)
        status = step.status
        with closed_after(open_path(step.source)) as fd:
            named = _named(os.path.join(self._name, step.below), status, read_xattrs(path_of(fd)))
        if stat.S_ISLNK(status.st_mode):
            target = os.readlink(step.source.name, dir_fd=step.source.directory)
            os.symlink(target, step.name, dir_fd=self._directories[step.folder].fd)
            return Symlink(**named, target=encoded(target))
        kind = _KIND_NAMES[stat.S_IFMT(status.st_mode)]
        return Special(**named, kind=kind, major=os.major(status.st_rdev), minor=os.minor(status.st_rdev))

    def _end(self, folder: Folder) -> None:
        assert folder.status is not None
        os.close(self._directories.pop(folder).fd)
        path, status = os.path.join(self._name, folder.below).rstrip("/") or ".", folder.status
        self._write(folder.path, lambda: Directory(**_named(path, status, read_xattrs(folder.fd))))

    def _write(self, path: str, record: Callable[[], Record]) -> None:
        try:
            self._save.manifest.write(record())
        except OSError as error:
            self._save.failed(path, error)


def _may_read(source: Entry, status: os.stat_result) -> bool:
    if os.geteuid() in (0, status.st_uid):
        return True
    return os.access(source.name, os.R_OK, dir_fd=source.directory, effective_ids=True, follow_symlinks=False)


def _explained(error: OSError) -> OSError:
    """Return the error for a name that was found and has gone: a renamed file could be missing under both names."""
    if error.errno not in (errno.ENOENT, errno.ENOTDIR):
        return error
    return OSError(errno.EBUSY, f"was removed or renamed during the save: {_REMEDY}")


def _named(path: str, status: os.stat_result, xattrs: dict[str, bytes]) -> dict[str, Any]:
    return {
        "path": encoded(path),
        "mode": f"{stat.S_IMODE(status.st_mode):04o}",
        "uid": status.st_uid,
        "gid": status.st_gid,
        "atime": seconds_text(status.st_atime_ns),
        "mtime": seconds_text(status.st_mtime_ns),
        "xattrs": xattrs,
    }


def _fresh_status(fd: int) -> os.stat_result:
    syscalls.refresh(fd)
    return os.fstat(fd)


def _changes(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


# ---- the directory ----


class _NewDirectory:
    """A new directory of a save, as part_name() beside the one that it becomes.

    What a process that has died has left there is removed by the next one for the same name. OSError if it cannot have
    the name, which is absolute and without symbolic links: of what has the name only a save or an empty directory is
    replaced.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        above, self._name = os.path.split(path)
        self._part = part_name(self._name)
        with ExitStack() as opened:
            self._above = safe_path.open_path(above, os.O_PATH | os.O_DIRECTORY)
            opened.callback(os.close, self._above)
            try:
                self._old = self._find_old()
                self.fd = self._open()  # for reading
                opened.callback(os.close, self.fd)
                opened.callback(self._remove)
                if self._old is not None:
                    self._check_exchange()
            except OSError as error:
                raise OSError(error.errno, error.strerror, self._path) from None
            self._closing = opened.pop_all()

    def _find_old(self) -> os.stat_result | None:
        """Return the directory that it replaces, None if there is none, or an empty one."""
        try:
            fd = os.open(self._name or "/", _OPENED, dir_fd=self._above)
        except FileNotFoundError:
            return None
        with closed_after(fd):
            status = os.fstat(fd)
            if not self._name or status.st_dev != os.fstat(self._above).st_dev:
                raise OSError(errno.EBUSY, "a file system is mounted there: give the name of a directory in it")
            if not os.listdir(fd):
                return None
            if not is_save(fd):
                text = "exists and is not a save, nor empty: give another name, or a new one below it"
                raise OSError(errno.EEXIST, text)
            return status

    def _open(self) -> int:
        """Create the directory, or take over and empty that of a process that has died. Returns it, locked."""
        with suppress(FileExistsError):
            os.mkdir(self._part, 0o700, dir_fd=self._above)
        fd = os.open(self._part, _OPENED, dir_fd=self._above)
        try:
            if os.fstat(fd).st_uid != os.geteuid():
                raise OSError(errno.EEXIST, f"{self._part} beside it belongs to another user: remove it")
            deadline = time.monotonic() + _LOCK_SECONDS
            while not _is_locked(fd):
                if time.monotonic() > deadline:
                    raise OSError(errno.EBUSY, "another save to this name is in progress")
                time.sleep(0.02)
            if not has_name(fd, self._part, self._above):
                raise OSError(errno.EBUSY, "another save to this name has just ended")
            os.fchmod(fd, 0o700)
            remove_below(fd)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _check_exchange(self) -> None:
        """Raise OSError now rather than in the end if the file system cannot exchange two names."""
        for name in ("a", "b"):
            os.mkdir(name, dir_fd=self.fd)
        try:
            syscalls.renameat2(self.fd, b"a", self.fd, b"b", _RENAME_EXCHANGE)
        except OSError as error:
            text = "its file system cannot replace a directory in one step: give a name that does not exist"
            raise OSError(error.errno, text) from None
        for name in ("a", "b"):
            os.rmdir(name, dir_fd=self.fd)

    def complete(self) -> None:
        """Give it its name in one step, and remove what had the name. What it has is on its disk already."""
        part, name = os.fsencode(self._part), os.fsencode(self._name)
        if not has_name(self.fd, self._part, self._above):
            raise OSError(errno.EBUSY, f"another process has renamed {self._part} beside it", self._path)
        if self._old is None:
            os.rename(part, name, src_dir_fd=self._above, dst_dir_fd=self._above)
        else:
            syscalls.renameat2(self._above, part, self._above, name, _RENAME_EXCHANGE)
            replaced = os.stat(part, dir_fd=self._above, follow_symlinks=False)
            if not os.path.samestat(replaced, self._old):
                syscalls.renameat2(self._above, part, self._above, name, _RENAME_EXCHANGE)
                raise OSError(errno.EBUSY, "another process has put something else there", self._path)
        sync_directory(self._above)
        if self._old is not None:
            with suppress(OSError):  # the next save removes it
                remove_tree(self._above, self._part)

    def _remove(self) -> None:
        if has_name(self.fd, self._part, self._above):
            with suppress(OSError):  # the next save removes it
                remove_tree(self._above, self._part)

    def close(self) -> None:
        self._closing.close()


def _is_locked(fd: int) -> bool:
    """Return whether nobody else has a directory, which is then locked."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # not all file systems have locks
    return True
