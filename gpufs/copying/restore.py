"""Restores what `gpufs save` has saved, and checks saves.

Neither the manifest nor the tree of a save is trusted: every path is checked and found below an open directory without
following symbolic links, and only a save of root's or the caller's own may give owners, devices and rights.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Final

from gpufs import safe_path
from gpufs.client._cancellation import Cancellation
from gpufs.client._daemons import set_quota
from gpufs.copying import entries
from gpufs.copying.attributes import write_xattrs
from gpufs.copying.entries import Entry, OpenFile, data_bytes, open_path
from gpufs.copying.job import CopyContext, CopyJob
from gpufs.copying.loop import CopyThreads
from gpufs.copying.manifest import (
    KINDS,
    TREE,
    Directory,
    File,
    HardLink,
    Manifest,
    Named,
    Record,
    Special,
    Symlink,
    name_of_text,
)
from gpufs.copying.part_sums import MovedBytes, PartReader
from gpufs.copying.types import CopyError, CopyResult, Outcome, Progress, Report, copy_error
from gpufs.drivers import DEVICE_DIRECTORIES
from gpufs.new_file import NewFile
from gpufs.syscalls import close_all, closed_after, open_beneath, path_of

_DIRECTORY: Final = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW
_SET_ID: Final = stat.S_ISUID | stat.S_ISGID
# The names in the way, or missing files, that a message lists.
_MOST_NAMES: Final = 3


@dataclass(eq=False)
class SavedFiles:
    """The files of a save, or of a part of one, and their checksums."""

    manifest: Manifest  # stays the caller's
    part: str  # a directory in the save; "" for all
    report: Report
    cancel: Cancellation

    def __post_init__(self) -> None:
        self._reader = PartReader()

    def close(self) -> None:
        self._reader.close()

    def records(self) -> Iterator[tuple[str, Record]]:
        """Yield the records with their paths below the part; "" is the part itself."""
        for record in self.manifest.records():
            path = name_of_text(record.path)
            if path == ".":
                path = ""
            if not self.part:
                yield path, record
            elif f"{path}/".startswith(f"{self.part}/"):
                yield path[len(self.part) + 1 :], record

    def find_checks(self, workers: CopyThreads) -> None:
        try:
            for _, record in self.records():
                if isinstance(record, File):
                    self.report.planned(record.size)
                    workers.put(partial(self._check, record))
        except OSError as error:
            self.report.failed(str(error.filename or self.manifest.path), None, error)

    def _check(self, record: File) -> None:
        began, shown = time.monotonic(), self.shown(record)
        outcome: Outcome
        try:
            with self.opened(record) as file:
                # The file that this machine has written is read from disk.
                os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
                self.check(file.fd, record, shown, self.report.reporter(shown), phase="copy")
            seconds = time.monotonic() - began
            outcome = CopyResult(shown, shown, record.size, seconds, "verify", {}, (), record.sha256)
        except OSError as error:
            outcome = copy_error(error, shown)
        self.report.finished(shown, [shown], [outcome])

    def shown(self, record: Record) -> str:
        """Return the name of a file in the save, for messages."""
        return os.path.join(self.manifest.path, TREE, name_of_text(record.path))

    @contextmanager
    def opened(self, record: File) -> Iterator[OpenFile]:
        """Open a file of the tree. OSError if it is missing, or has another size."""
        shown = self.shown(record)
        parent, name = os.path.split(name_of_text(record.path))
        with closed_after(_open_below(self.manifest.tree, parent)) as directory:
            file = entries.open_source(Entry(shown, name, directory, follow=False))
        with file:
            if not stat.S_ISREG(file.status.st_mode):
                raise CopyError(errno.EINVAL, "is not a regular file, as the manifest says", shown)
            if file.status.st_size != record.size:
                text = f"is damaged: it has {file.status.st_size} bytes instead of {record.size}"
                raise CopyError(errno.EIO, text, shown)
            yield file

    def check(
        self,
        fd: int,
        record: File,
        shown: str,
        progress: Progress,
        phase: str = "verify",
    ) -> None:
        """Compare a file with the checksums of the manifest. CopyError EIO if it differs."""
        moved = MovedBytes(record.size, progress, phase)
        different = self._reader.differing_part(
            fd, record.size, record.sums(), self.cancel, lambda buffer, count, offset: moved.add(count)
        )
        if different is not None:
            start, end = different
            text = f"is damaged: bytes {start} to {end} do not have the checksum of the manifest"
            raise CopyError(errno.EIO, text, shown)


@dataclass(eq=False)
class Restore(SavedFiles):
    """Restores a save below a directory."""

    destination: str  # on a mount; created if it does not exist
    _: KW_ONLY
    overwrite: bool  # existing files are replaced
    verify: bool  # each file is read again and compared with the checksum before it gets its name
    context: CopyContext

    def __post_init__(self) -> None:
        super().__post_init__()
        self.has_begun = False  # something may have been created
        self._created = False  # the destination, by this
        self._made: set[int] = set()  # the inodes of directories that this has created
        self._base = self._above = -1
        self.not_kept: Counter[str] = Counter()  # what could not be restored, by kind
        self._lock = threading.Lock()  # guards it
        try:
            with safe_path.located(self.destination) as place:
                self._above, self._name = os.dup(place.directory), place.name
                with suppress(FileExistsError):
                    os.mkdir(place.name, 0o700, dir_fd=place.directory)
                    self._created = True
                self._base = place.open(os.O_PATH | os.O_DIRECTORY)
            self._device = os.fstat(self._base).st_dev
            if self._device not in self.context.mounts():
                raise OSError(errno.EXDEV, "is not on a gpufs mount: use cp", self.destination)
            real = os.readlink(path_of(self._base))
            places = self.context.mounts()[self._device]
            self._is_root = any(entry.mountpoint == real and entry.root == "/" for entry in places)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close it. A destination that this has created goes again if nothing was restored."""
        super().close()
        if self._created and not self.has_begun:
            with suppress(OSError):
                os.rmdir(self._name, dir_fd=self._above)
        close_all(fd for fd in (self._base, self._above) if fd >= 0)
        self._base = self._above = -1

    # ---- before anything is changed ----

    def find(self, workers: CopyThreads) -> None:
        """Check the whole save, then create what it has, and queue its files."""
        try:
            if not self._can_be_restored():
                return
            self.has_begun = True
            for path, record in self.records():
                if self.cancel.cancelled:
                    return
                if self._is_missing(path):
                    continue
                if isinstance(record, File):
                    self.report.planned(record.size)
                    workers.put(partial(self._restore_file, path, record))
                else:
                    self._create(path, record)
        except OSError as error:
            self.report.failed(str(error.filename or self.manifest.path), None, error)

    def _can_be_restored(self) -> bool:
        """Return whether nothing is missing, nothing in the way, and space for all; report if not."""
        found, in_the_way, sizes = 0, 0, defaultdict[str, list[int]](list)
        for path, record in self.records():
            if self.cancel.cancelled:
                return False
            found += 1
            first = path.partition("/")[0]
            if self._is_missing(path) and isinstance(record, Directory):
                continue  # the save has no files for this device, unless one comes
            if self._is_root and not self._is_device(first):
                raise OSError(errno.ENODEV, self._remedy(first), os.path.join(self.destination, first))
            if isinstance(record, HardLink):
                self._check_link(path, record)
            if isinstance(record, File):
                with self.opened(record) as file:
                    sizes[first if self._is_root else ""].append(data_bytes(file.status, record.size))
            if self._is_in_the_way(path, is_directory=isinstance(record, Directory)):
                in_the_way += 1
                if in_the_way <= _MOST_NAMES:
                    text = "is in the way" + ("" if self.overwrite else " (--overwrite replaces files)")
                    self.report.failed(self._end(path), None, OSError(errno.EEXIST, text))
        if in_the_way > _MOST_NAMES:
            text = f"{in_the_way - _MOST_NAMES} more names are in the way"
            self.report.failed(self.destination, None, OSError(errno.EEXIST, text))
        if not found:
            raise OSError(
                errno.ENOENT, "is not a directory of the save", os.path.join(self.manifest.path, TREE, self.part)
            )
        return not in_the_way and self._fits(sizes)

    def _remedy(self, first: str) -> str:
        if self._is_whole_mount():
            place = os.path.join(self.manifest.path, TREE, first)
            how = "mount with --host-memory, or " if first.startswith("host") else ""
            return f"the mount has no such device: {how}restore {place} into a directory of another one"
        return f"the root of a mount takes no files: give a directory of a device, as {self.destination}/gpu0"

    def _is_missing(self, path: str) -> bool:
        """Return whether this is the directory of a device that the mount does not have."""
        return self._is_whole_mount() and self._is_root and "/" not in path and not self._is_device(path)

    def _is_whole_mount(self) -> bool:
        return self.manifest.header.mount and not self.part

    def _is_device(self, name: str) -> bool:
        try:
            status = os.stat(name or ".", dir_fd=self._base, follow_symlinks=False)
        except OSError:
            return False
        return not name or (name.startswith(DEVICE_DIRECTORIES) and stat.S_ISDIR(status.st_mode))

    def _check_link(self, path: str, record: HardLink) -> None:
        """Raise OSError unless the first name is a file that is restored, too."""
        first = name_of_text(record.to)
        if self.part and not first.startswith(f"{self.part}/"):
            text = f"is another name of {first}, which is outside of this part: restore a directory that has both"
            raise OSError(errno.EXDEV, text, self.shown(record))
        with closed_after(_open_below(self.manifest.tree, os.path.dirname(first))) as directory:
            status = os.stat(os.path.basename(first), dir_fd=directory, follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, f"is said to be another name of {first}, which is not a file", path)

    def _is_in_the_way(self, path: str, *, is_directory: bool) -> bool:
        try:
            with self._parent(path, create=False) as (directory, name):
                status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            return False
        except NotADirectoryError:
            return True
        if is_directory:
            return not stat.S_ISDIR(status.st_mode)
        return stat.S_ISDIR(status.st_mode) or not self.overwrite

    def _fits(self, sizes: dict[str, list[int]]) -> bool:
        """Return whether files of these sizes have space in each directory of a device, and report if not."""
        for first, of_files in sizes.items():
            directory = _open_below(self._base, first)
            try:
                needed = list(map(self.context.granules_of(directory).held, of_files))
                self.context.check_space(directory, sum(needed), self.cancel, largest=max(needed))
            except OSError as error:
                self.report.failed("", self._end(first), error)
                return False
            finally:
                os.close(directory)
        return True

    # ---- names ----

    def _end(self, path: str) -> str:
        return os.path.join(self.destination, path) if path else self.destination

    @contextmanager
    def _parent(self, path: str, *, create: bool = True) -> Iterator[tuple[int, str]]:
        """Open the directory that has a name below the destination; yields it and the name."""
        above, name = os.path.split(path)
        with closed_after(_open_below(self._base, above, create=self._made.add if create else None)) as fd:
            yield fd, name or "."

    def _create(self, path: str, record: Record) -> None:
        """Create a directory, a symbolic link or a special file."""
        try:
            if isinstance(record, Directory):
                os.close(_open_below(self._base, path, create=self._made.add))
            elif isinstance(record, Symlink | Special):
                self._make_special(path, record)
        except OSError as error:
            self.report.failed(self.shown(record), self._end(path), error)

    def _make_special(self, path: str, record: Symlink | Special) -> None:
        if isinstance(record, Special) and record.kind in ("char", "block") and not self._may_make_devices():
            self._count("device nodes")
            return
        with self._parent(path) as (directory, name):
            if self.overwrite:
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=directory)
            if isinstance(record, Symlink):
                kind = stat.S_IFLNK
                os.symlink(name_of_text(record.target), name, dir_fd=directory)
            else:
                kind = KINDS[record.kind]
                os.mknod(name, kind | 0o600, os.makedev(record.major, record.minor), dir_fd=directory)
            with closed_after(open_path(Entry(self._end(path), name, directory, follow=False))) as fd:
                status = os.fstat(fd)
                if (stat.S_IFMT(status.st_mode), status.st_nlink) != (kind, 1):
                    raise OSError(errno.EBUSY, "another process has put a file in its place")
                self._set_attributes(path_of(fd), record, kind)

    def _may_make_devices(self) -> bool:
        return self.manifest.trusted and os.geteuid() == 0

    # ---- files ----

    def _restore_file(self, path: str, record: File) -> None:
        source, end = self.shown(record), self._end(path)
        outcome: Outcome
        try:
            outcome = self._load(path, record)
        except OSError as error:
            outcome = copy_error(error, source, end)
        except Exception as error:  # noqa: BLE001 - the other files are still restored
            outcome = CopyError(errno.EIO, f"{type(error).__name__}: {error}", source, end)
        self.report.finished(source, [end], [outcome])

    def _load(self, path: str, record: File) -> CopyResult:
        source, end = self.shown(record), self._end(path)
        progress = self.report.reporter(source)
        with self.opened(record) as file, self._parent(path) as (directory, name):
            new = NewFile.create(directory, 0o600)

            def complete() -> None:
                if os.fstat(new.fd).st_size != record.size:
                    raise CopyError(errno.EIO, "was changed while it was restored", source)
                if self.verify:
                    self.check(new.fd, record, source, progress)
                self._set_attributes(new.fd, record, stat.S_IFREG)
                try:
                    new.complete(name, replace=self.overwrite)
                except FileExistsError:
                    raise CopyError(errno.EEXIST, "is in the way", source, end) from None

            target = OpenFile(Entry(end, name, directory, follow=False), new.fd, os.fstat(new.fd))
            result = CopyJob(
                self.context, file, target, new=new, complete=complete, progress=progress, cancel=self.cancel
            ).run()
        return result._replace(sha256=record.sha256 if self.verify else None)

    # ---- attributes, and what needs all files ----

    def _set_attributes(self, target: int | str, record: Named, kind: int) -> None:
        trusted, given = self.manifest.trusted, record.attributes()
        if not trusted:
            given = given._replace(st_uid=os.geteuid(), st_gid=os.getegid(), st_mode=given.st_mode & ~_SET_ID)
        entries.preserve(target, given._replace(st_mode=kind | given.st_mode))
        if not write_xattrs(target, record.xattrs, trusted=trusted):
            self._count("extended attributes")
        status = os.stat(target)
        if (status.st_uid, status.st_gid) != (record.uid, record.gid):
            self._count("owners")

    def _count(self, kind: str) -> None:
        with self._lock:
            self.not_kept[kind] += 1

    def finish(self) -> None:
        """Create further names of files, set the attributes of directories, and the limits."""
        for path, record in self.records():
            if isinstance(record, HardLink):
                try:
                    self._link(path, name_of_text(record.to)[len(self.part) + 1 if self.part else 0 :])
                except OSError as error:
                    self.report.failed(self._end(path), None, error)
        for path, record in self.records():
            if isinstance(record, Directory) and not self._is_missing(path):
                self._finish_directory(path, record)
        for limit in self.manifest.header.limits if self.manifest.trusted and not self.part else []:
            self._set_limit(name_of_text(limit.path), limit.uid, limit.limit_bytes)

    def _set_limit(self, path: str, uid: int | None, size: int) -> None:
        if uid is not None and not self._is_root:
            return  # users have limits on devices alone
        if path != "." and self._is_missing(path):
            return
        try:
            with closed_after(_open_below(self._base, "" if path == "." else path)) as directory:
                set_quota(path_of(directory), uid, size)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EACCES, errno.EBUSY):
                self.report.failed(self._end(path), None, error)
            else:
                self._count("limits")

    def _link(self, path: str, first: str) -> None:
        with self._parent(first, create=False) as (above, old), self._parent(path) as (directory, name):
            if self.overwrite:
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=directory)
            os.link(old, name, src_dir_fd=above, dst_dir_fd=directory, follow_symlinks=False)

    def _finish_directory(self, path: str, record: Directory) -> None:
        """Set the attributes of a directory, unless it existed before and the user has not asked for that."""
        is_device = self._is_root and "/" not in path and self.manifest.trusted
        try:
            with closed_after(_open_below(self._base, path)) as fd:
                created = os.fstat(fd).st_ino in self._made if path else self._created
                if created or (path and self.overwrite) or is_device:
                    self._set_attributes(path_of(fd), record, stat.S_IFDIR)
        except PermissionError:
            self._count("owners")  # a directory of another user's, which was there before
        except OSError as error:
            self.report.failed(self._end(path), None, error)


def _open_below(directory: int, path: str, *, create: Callable[[int], None] | None = None) -> int:
    """Open a directory below another one with O_PATH, never through a symbolic link; "" is the other one itself.

    ``create``: create it, and those above it, if they do not exist, and take their inodes.
    """
    raw = os.fsencode(path) or b"."
    try:
        return open_beneath(directory, raw, _DIRECTORY)
    except FileNotFoundError:
        if create is None:
            raise
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ENOTDIR, "a symbolic link is in the way of a directory") from None
        raise
    fd = open_beneath(directory, b".", _DIRECTORY)
    for name in path.split("/"):
        try:
            created = False
            with suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=fd)
                created = True
            below = open_beneath(fd, os.fsencode(name), _DIRECTORY)
        finally:
            os.close(fd)
        fd = below
        if created:
            create(os.fstat(fd).st_ino)
    return fd
