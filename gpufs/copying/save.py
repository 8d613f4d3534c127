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
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from gpufs import safe_path, syscalls
from gpufs.client._cancellation import Cancellation
from gpufs.copying import entries
from gpufs.copying.attributes import read_xattrs
from gpufs.copying.copier import FileCopier
from gpufs.copying.entries import Entry, OpenFile, SourceAttributes, data_bytes, open_path
from gpufs.copying.loop import TreeCopy
from gpufs.copying.manifest import (
    KINDS,
    PATH_BYTES,
    TREE,
    VERSION,
    Directory,
    File,
    HardLink,
    Header,
    Limit,
    Manifest,
    ManifestWriter,
    Special,
    Symlink,
    text_of_name,
    time_text,
)
from gpufs.copying.new_directory import NewDirectory
from gpufs.copying.part_sums import PART_BYTES, MovedBytes, PartReader, Sums
from gpufs.copying.types import (
    CopyError,
    CopyOptions,
    CopyResult,
    Outcome,
    Progress,
    Report,
)
from gpufs.copying.walk import Folder, Step, Steps, replay, walk_files
from gpufs.exceptions import text_of
from gpufs.syscalls import closed_after, path_of

if TYPE_CHECKING:
    from gpufs.stores.files import StoreFile
    from gpufs.stores.urls import Url

# From this size on files bypass the page cache.
_DIRECT_BYTES: Final = 1 << 20
_PAGE: Final = 4096
_REMEDY: Final = "stop what changes it, or leave it out by --exclude"
_NO_HARD_LINKS: Final = (errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV)
_KIND_NAMES: Final[dict[int, Any]] = {mode: name for name, mode in KINDS.items()}


class Saved(NamedTuple):
    """The directories to save, and their names in the save ("" for the save itself).

    ``mount``: they are the devices of a whole mount. ``limits``: those of directories and users.
    """

    path: str
    directories: Sequence[tuple[Entry, str]]
    mount: bool
    limits: list[Limit]


class Save(FileCopier):
    """One save. In the loop of copies it copies the files.

    OSError if it cannot have the name of ``destination``. ``options``: which files are left out.
    """

    def __init__(
        self, saved: Saved, destination: str, options: CopyOptions, report: Report, cancel: Cancellation
    ) -> None:
        super().__init__(options, None)
        self._saved = saved
        self.path = safe_path.real(destination)
        self._check_place()
        self._new = NewDirectory(self.path, _check_is_save)
        self._report = report
        self._cancel = cancel
        self._reader = PartReader()
        self._links: dict[tuple[int, int], tuple[str, int]] = {}  # first names, and how many are to come
        self._further: list[tuple[str, str]] = []  # names of files that have been saved, and their first names
        self.left_out = ""  # the first of others' files that the caller may not read, and how many there are
        self.left_out_count = 0
        self._manifest: ManifestWriter | None = None
        self.tree = -1
        try:
            header = Header(
                version=VERSION,
                source=text_of_name(saved.path),
                saved=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                mount=saved.mount,
                limits=saved.limits,
            )
            self._manifest = ManifestWriter(self._new.fd, header)
            os.mkdir(TREE, 0o700, dir_fd=self._new.fd)
            self.tree = os.open(TREE, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._new.fd)
        except BaseException:
            self.close()
            raise

    def _check_place(self) -> None:
        """Raise OSError if the save would be below what is saved."""
        for directory, _ in self._saved.directories:
            if entries.is_inside(self.path, directory.path):
                raise OSError(errno.EINVAL, "is below what is saved: give a place elsewhere", self.path)

    def close(self) -> None:
        """Close it, and remove it if it is not complete."""
        self._reader.close()
        if self._manifest is not None:
            self._manifest.close()
        if self.tree >= 0:
            os.close(self.tree)
            self.tree = -1
        self._new.close()
        super().close()

    # ---- what is saved ----

    def find(self, loop: TreeCopy) -> None:
        """Walk over all directories, and then save them if there is space."""
        found, needed = [], 0
        for directory, name in self._saved.directories:
            steps = loop.listed(loop.selection.of(self._walk(directory, self._fail)))
            found.append((steps, name))
            for step in steps:
                if step.kind == "file" and step.size and step.status is not None:
                    needed += data_bytes(step.status, step.size) // step.status.st_nlink
        try:
            self.context.check_space(self._new.fd, needed, self._cancel)
        except OSError as error:
            self._report.failed("", os.path.dirname(self.path), error)
            return
        for steps, name in found:
            loop.add(replay(steps, self._fail), [_SavedTree(self, name)])

    def _walk(self, directory: Entry, fail: Callable[[str, OSError], None]) -> Steps:
        return walk_files(directory, fail, recursive=True, dereference=False)

    def _fail(self, path: str, error: OSError) -> None:
        """Report what cannot be found. What other users keep to themselves is left out."""
        with suppress(OSError):
            if error.errno == errno.EACCES and os.geteuid() not in (0, os.lstat(path).st_uid):
                self.leave_out(path)
                return
        self._report.failed(path, None, _explained(error))

    def leave_out(self, path: str) -> None:
        """Note another user's file that the caller may not read."""
        self.left_out = self.left_out or path
        self.left_out_count += 1

    def first_name(self, status: os.stat_result, path: str) -> str | None:
        """Return the path of the first name of a file with several, None if this is it."""
        key = (status.st_dev, status.st_ino)
        first, left = self._links.get(key, (None, status.st_nlink))
        if left > 1:
            self._links[key] = (first or path, left - 1)
        else:
            self._links.pop(key, None)  # the last one
        if first is not None:
            self._further.append((path, first))
        return first

    def shown(self, path: str) -> str:
        """Return the name of a saved file, for messages."""
        return os.path.join(self.path, TREE, path)

    def write(self, line: Directory | File | Symlink | Special | HardLink) -> None:
        assert self._manifest is not None
        self._manifest.write(line)

    def failed(self, path: str, error: OSError) -> None:
        """Report what cannot be saved, other than a file."""
        self._report.failed(path, None, _explained(error))

    # ---- the contents of files ----

    def copy_each(
        self,
        source: Entry | StoreFile,
        ends: Sequence[Entry | Url],
        *,
        progress: Progress,
        cancel: Cancellation,
    ) -> list[Outcome]:
        (end,) = ends
        assert isinstance(source, Entry)
        assert isinstance(end, Entry)
        try:
            with entries.open_source(source) as opened:
                return [self._save(opened, end, progress)]
        except OSError as error:
            error = _explained(error)
            if isinstance(error, CopyError):
                return [error]
            names = (end.path, None) if error.errno in (errno.ENOSPC, errno.EDQUOT) else (source.path, end.path)
            return [CopyError(error.errno or errno.EIO, text_of(error), *names)]

    def _save(self, source: OpenFile, end: Entry, progress: Progress) -> CopyResult:
        began, status = time.monotonic(), _fresh_status(source.fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EBUSY, "is not a regular file any more")
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with closed_after(os.open(end.name, flags, 0o600, dir_fd=end.directory)) as fd:
            moved = MovedBytes(status.st_size, progress)
            sums = self._move(source.fd, fd, status.st_size, moved)
            xattrs = read_xattrs(source.fd)
            if _changes(_fresh_status(source.fd)) != _changes(status):
                raise OSError(errno.EBUSY, f"was changed during the save: {_REMEDY}")
            os.utime(fd, ns=(status.st_atime_ns, status.st_mtime_ns))
        whole = sums[0] if status.st_size <= PART_BYTES else None
        parts = {} if whole else {str(start): text for start, text in sums.items()}
        named = _named(os.path.relpath(end.path, self.shown("")), status, xattrs)
        self.write(File(**named, size=status.st_size, sha256=whole, parts=parts))
        seconds = time.monotonic() - began
        counts = {"mount": moved.count, "hole": status.st_size - moved.count}
        paths = {path: count for path, count in counts.items() if count}
        return CopyResult(source.entry.path, end.path, status.st_size, seconds, "mount", paths, (), whole)

    def _move(self, source: int, fd: int, size: int, moved: MovedBytes) -> Sums:
        """Copy the bytes. Returns the sums."""
        if size >= _DIRECT_BYTES:
            with suppress(OSError):  # not all file systems can
                fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
        if size > PART_BYTES and not entries.has_holes(os.fstat(source)):
            syscalls.allocate(fd, size)  # else each write that makes the file longer waits for the others

        def take(buffer: memoryview, count: int, offset: int) -> None:
            _write(fd, buffer, count, offset)
            moved.add(count, path="mount")

        sums = self._reader.read(source, size, self._cancel, take)
        os.ftruncate(fd, size)  # a page at its end was written as a whole, and a hole there not at all
        return sums

    # ---- the end ----

    def seal(self) -> None:
        """Complete what it has, and write it to disk. It has not got its name yet."""
        assert self._manifest is not None
        for path, first in self._further:  # in the tree they are for people alone, where the file system can
            try:
                os.link(first, path, src_dir_fd=self.tree, dst_dir_fd=self.tree, follow_symlinks=False)
            except OSError as error:
                if error.errno not in _NO_HARD_LINKS:
                    raise
        self._manifest.finish()
        self._new.sync()

    def open(self) -> Manifest:
        """Open it for reading, after seal()."""
        return Manifest(path_of(self._new.fd), shown=self.path)

    def complete(self) -> None:
        """Give it its name, in place of an older save."""
        self._new.complete()

    def changed_since(self, began_ns: int) -> str | None:
        """Return the path of something that was changed after a time, None if nothing was."""
        for directory, _ in self._saved.directories:
            for step in self._walk(directory, self._fail):
                if step.kind != "leave" and step.status is not None and step.status.st_ctime_ns >= began_ns:
                    return step.path
        return None


class _SavedTree:
    """The directory of a save that one of the saved directories becomes: ``name`` in the tree, "" for the tree."""

    def __init__(self, save: Save, name: str) -> None:
        self._save = save
        self._name = name
        self._directories: dict[Folder | None, int] = {None: save.tree}  # those that are open

    def enter(self, step: Step) -> bool:
        """Create a directory. Return whether it can be filled."""
        folder = step.folder
        assert folder is not None
        assert folder.status is not None
        path = os.path.join(self._name, folder.below) if folder.below else self._name
        try:
            _check_path(path)
            fd = self._make(folder, step.name)
            self._directories[folder] = fd
            folder.ended.append(partial(self._end, folder))
            record = Directory(**_named(path or ".", folder.status, read_xattrs(folder.fd)))
            folder.ended.append(partial(self._write, step.path, record))
        except OSError as error:
            self._save.failed(step.path, error)
            return False
        return True

    def _make(self, folder: Folder, name: str) -> int:
        above = self._directories[folder.parent]
        if folder.parent is None:
            name = self._name or "."
        if name != ".":
            os.mkdir(name, 0o700, dir_fd=above)
        return os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)

    def file(self, step: Step) -> Entry | None:
        """Return the name of a file, None for a further name of one and for what the caller may not read."""
        assert step.status is not None
        assert isinstance(step.source, Entry)
        path = os.path.join(self._name, step.below)
        try:
            _check_path(path)
            if not self._may_read(step.source, step.status):
                self._save.leave_out(step.path)
                return None
            if step.status.st_nlink > 1 and (first := self._save.first_name(step.status, path)) is not None:
                self._save.write(HardLink(path=text_of_name(path), to=text_of_name(first)))
                return None
        except OSError as error:
            self._save.failed(step.path, error)
            return None
        return Entry(self._save.shown(path), step.name, self._directories[step.folder], follow=False)

    def _may_read(self, source: Entry, status: os.stat_result) -> bool:
        if os.geteuid() in (0, status.st_uid):
            return True
        return os.access(source.name, os.R_OK, dir_fd=source.directory, effective_ids=True, follow_symlinks=False)

    def special(self, step: Step) -> None:
        """Save a symbolic link, a FIFO, socket or device node."""
        assert step.status is not None
        assert isinstance(step.source, Entry)
        path, status = os.path.join(self._name, step.below), step.status
        try:
            _check_path(path)
            with closed_after(open_path(step.source)) as fd:
                named = _named(path, status, read_xattrs(path_of(fd)))
            if stat.S_ISLNK(status.st_mode):
                target = os.readlink(step.source.name, dir_fd=step.source.directory)
                os.symlink(target, step.name, dir_fd=self._directories[step.folder])
                self._save.write(Symlink(**named, target=text_of_name(target)))
            else:
                kind = _KIND_NAMES[stat.S_IFMT(status.st_mode)]
                major, minor = os.major(status.st_rdev), os.minor(status.st_rdev)
                self._save.write(Special(**named, kind=kind, major=major, minor=minor))
        except OSError as error:
            self._save.failed(step.path, error)

    def _write(self, path: str, record: Directory) -> None:
        try:
            self._save.write(record)
        except OSError as error:
            self._save.failed(path, error)

    def _end(self, folder: Folder) -> None:
        os.close(self._directories.pop(folder))


def _explained(error: OSError) -> OSError:
    """Return the error for a name that was found and has gone: a renamed file could be missing under both names."""
    if error.errno not in (errno.ENOENT, errno.ENOTDIR):
        return error
    return OSError(errno.EBUSY, f"was removed or renamed during the save: {_REMEDY}")


def _named(path: str, status: SourceAttributes, xattrs: dict[str, bytes]) -> dict[str, Any]:
    """Return the attributes of a line of the manifest."""
    return {
        "path": text_of_name(path),
        "mode": f"{stat.S_IMODE(status.st_mode):04o}",
        "uid": status.st_uid,
        "gid": status.st_gid,
        "atime": time_text(status.st_atime_ns),
        "mtime": time_text(status.st_mtime_ns),
        "xattrs": xattrs,
    }


def _check_path(path: str) -> None:
    if len(os.fsencode(path)) > PATH_BYTES:
        text = f"its path below the save would be longer than {PATH_BYTES} bytes: leave it out by --exclude"
        raise OSError(errno.ENAMETOOLONG, text)


def _fresh_status(fd: int) -> os.stat_result:
    syscalls.refresh(fd)
    return os.fstat(fd)


def _changes(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _check_is_save(directory: int) -> None:
    """Raise OSError for a directory that is not a save."""
    try:
        Manifest(path_of(directory)).close()
    except OSError:
        text = "exists and is not a save, nor empty: give another name, or a new one below it"
        raise OSError(errno.EEXIST, text) from None


def _write(fd: int, buffer: memoryview, count: int, offset: int) -> None:
    """Write bytes of a buffer of whole pages, past the page cache if the file is open so."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    end = count
    if flags & os.O_DIRECT:
        end = -(-count // _PAGE) * _PAGE
        buffer[count:end] = bytes(end - count)
    done = 0
    while done < end:
        try:
            done += os.pwrite(fd, buffer[done:end], offset + done)
        except OSError as error:
            if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
                raise
            flags &= ~os.O_DIRECT  # a file system, or a hole, that needs other multiples
            fcntl.fcntl(fd, fcntl.F_SETFL, flags)
            end = count
