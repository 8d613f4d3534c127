"""Restores what `gpufs save` has saved, and checks saves.

Neither the manifest nor the tree of a save is trusted: every path is checked and found below an open directory without
following symbolic links, and only a save of root's or the caller's own may give owners, devices and rights.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Final

from gpufs import mounting, safe_path
from gpufs.client._cancellation import Cancellation
from gpufs.client._daemons import set_quota
from gpufs.copying import entries
from gpufs.copying.checksums import PartReader, different_part
from gpufs.copying.copier import FileCopier
from gpufs.copying.deletion import writable
from gpufs.copying.entries import Entry, OpenFile, may_set
from gpufs.copying.job import CopyJob
from gpufs.copying.loop import Source, TreeCopy
from gpufs.copying.manifest import TREE, Directory, File, HardLink, Manifest, Named, Record, Special, Symlink, decoded
from gpufs.copying.tree import FileTree, TreeState
from gpufs.copying.types import CopyError, CopyOptions, CopyResult, Outcome, Progress, Report, copy_error
from gpufs.copying.walk import End, Fail, Folder, Step, Steps, walk_files
from gpufs.drivers import DEVICE_DIRECTORIES
from gpufs.new_file import NewFile
from gpufs.syscalls import closed_after, open_beneath, path_of

_DIRECTORY: Final = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW


class Restore(FileCopier):
    """Restores a save, or a directory of it (``part``, "" for all). In the loop of copies it copies the files.

    ``manifest`` stays the caller's. ``destination``: on a mount; created if it does not exist. None: the files are only
    compared with their checksums. ``overwrite``: existing files are replaced. ``verify``: each file is read again
    and compared with its checksum before it gets its name.
    """

    def __init__(
        self,
        manifest: Manifest,
        part: str,
        report: Report,
        destination: str | None = None,
        *,
        overwrite: bool = False,
        verify: bool = True,
    ) -> None:
        super().__init__(CopyOptions(recursive=True, preserve=True, replace=True, exact=True), report.noticed)
        self.manifest = manifest
        self.overwrite = overwrite
        self.in_the_way: list[str] = []
        self.not_kept = 0  # names whose attributes are not all restored, device nodes and limits
        self._part = part
        self._report = report
        self._verify = verify
        self._destination = "" if destination is None else safe_path.real(destination)
        self._is_root = destination is not None and mounting.is_root(self._destination)
        self._has_begun = False  # something may have been created
        self._tree = os.path.join(manifest.path, TREE)
        if part and not isinstance(manifest.records.get(part), Directory):
            raise OSError(errno.ENOENT, "is not a directory of the save", self._shown(part))
        self._top = open_beneath(manifest.tree, os.fsencode(part or "."), _DIRECTORY)
        self._reader = PartReader()

    def close(self) -> None:
        """Close it."""
        super().close()
        self._reader.close()
        os.close(self._top)

    def find(self, loop: TreeCopy) -> None:
        """Check the whole save, then create what it has, and queue its files."""
        if not self._destination:
            loop.add(self._walk(self._part, loop.fail), [self])
            return
        with Entry.of(self._destination, follow=False).filled() as (directory, _):
            if os.fstat(directory).st_dev not in self.context.mounts():
                raise OSError(errno.EXDEV, "is not on a gpufs mount: use cp", self._destination)
        links = [self.end(path) for path, _ in self._links()]
        planned = []
        for name in self._directories():
            tree = _RestoredTree(self, name, loop.state, is_device=self._is_root)
            planned.append(loop.planned([Source(self._walk(name, loop.fail), [tree])], replaces=True))
        if found := self.in_the_way + ([] if self.overwrite else list(filter(os.path.lexists, links))):
            more = f", and so are {len(found) - 1} more" if len(found) > 1 else ""
            text = f"is in the way{more}" + ("" if self.overwrite else " (--overwrite replaces files)")
            loop.fail(found[0], OSError(errno.EEXIST, text))
        self._has_begun = all(planned) and not loop.is_incomplete and not loop.state.cancel.cancelled
        for (source,) in planned if self._has_begun else []:
            loop.add(source.steps, source.trees)

    # ---- names ----

    def _shown(self, path: str) -> str:
        """Return the name of a path in the save, for messages and steps; "" or . for its tree."""
        return self._tree if path in ("", ".") else os.path.join(self._tree, path)

    def record(self, shown: str) -> Record | None:
        """Return what the manifest has of the path of a step."""
        return self.manifest.records.get(shown[len(self._tree) + 1 :] or ".")

    def _below(self, directory: str) -> Iterator[tuple[str, Record]]:
        """Yield what the manifest has of a directory, and below it; "" for all."""
        for path, record in self.manifest.records.items():
            if not directory or f"{path}/".startswith(f"{directory}/"):
                yield path, record

    def end(self, path: str) -> str:
        """Return what a path in the save becomes."""
        return os.path.normpath(os.path.join(self._destination, path[len(self._part) :].lstrip("/")))

    def _directories(self) -> list[str]:
        """Return what is restored by itself: the devices of a mount, or the source."""
        if not self._is_root:
            return [self._part]
        if not self.manifest.header.mount or self._part:
            text = f"the root of a mount takes no files: give a directory of a device, as {self._destination}/gpu0"
            raise OSError(errno.ENODEV, text, self._destination)
        for path, record in self.manifest.records.items():
            name = path.partition("/")[0]
            if not self._has_device(name) and not (path == name and isinstance(record, Directory)):
                how = "mount with --host-memory, or " if name.startswith("host") else ""
                place = self._shown(name)
                text = f"the mount has no such device: {how}restore {place} into a directory of another one"
                raise OSError(errno.ENODEV, text, self.end(name))
        return sorted(filter(self._has_device, {path.partition("/")[0] for path in self.manifest.records}))

    def _has_device(self, name: str) -> bool:
        return name.startswith(DEVICE_DIRECTORIES) and Entry.of(self.end(name), follow=False).is_directory()

    # ---- the walk ----

    def _walk(self, directory: str, fail: Fail) -> Steps:
        """Yield what the manifest has of a directory of the save and below it, with the attributes from there.

        What only the tree has is left out.
        """
        top = Entry(self._shown(directory), "." if directory == self._part else directory, self._top, follow=False)
        missing = {path for path, record in self._below(directory) if not isinstance(record, HardLink)}
        others: dict[str, list[str]] = defaultdict(list)  # links and special files, by their directories
        for path in missing:
            if isinstance(self.manifest.records[path], Symlink | Special):
                others[self._shown(os.path.dirname(path))].append(path)
        with closing(walk_files(top, fail, recursive=True, dereference=False)) as steps:
            for step in steps:
                folder, record = step.folder, self.record(step.path)
                if step.kind == "file" and isinstance(record, File) and step.status is not None:
                    missing.discard(step.path[len(self._tree) + 1 :])
                    try:
                        _check_file(step.status, record)
                    except OSError as error:
                        fail(step.path, error)
                        continue
                    yield self._with_attributes(step, record)
                elif step.kind == "leave" and folder is not None and folder.wanted:
                    yield step
                elif step.kind == "enter" and folder is not None:
                    folder.wanted = isinstance(record, Directory) or step.path == top.path
                    if isinstance(record, Directory):
                        missing.discard(step.path[len(self._tree) + 1 :] or ".")
                        step = self._with_attributes(step, record)
                        folder.status, folder.xattrs = step.status, step.xattrs
                    if folder.wanted:
                        yield step
                        missing.difference_update(others[step.path])
                        yield from self._others(others[step.path], folder)
        if missing:
            more = f", and so are {len(missing) - 1} more" if len(missing) > 1 else ""
            fail(self._shown(min(missing)), OSError(errno.ENOENT, f"is missing in the save{more}"))

    def _others(self, paths: Iterable[str], folder: Folder) -> Iterator[Step]:
        """Yield links and special files, which the tree need not have."""
        for path in paths:
            record, name = self.manifest.records[path], os.path.basename(path)
            assert isinstance(record, Symlink | Special)
            is_device = isinstance(record, Special) and record.kind in ("char", "block")
            if is_device and not (self.manifest.trusted and os.geteuid() == 0):
                self.not_kept += 1
                continue
            entry = Entry(self._shown(path), name, folder.fd, follow=False)
            yield self._with_attributes(Step("file", entry, name, entry.path, None, 0, folder), record)

    def _with_attributes(self, step: Step, record: Named) -> Step:
        """Return a step with the attributes that are restored, and count it if these are not all."""
        user, trusted = os.geteuid(), self.manifest.trusted
        status = record.status(step.status, trusted=trusted)
        xattrs = {name: value for name, value in record.xattrs.items() if may_set(name, trusted=trusted)}
        owner = status.st_uid, status.st_gid
        is_allowed = user == 0 or (owner[0] == user and owner[1] in (os.getegid(), *os.getgroups()))
        self.not_kept += not is_allowed or owner != (record.uid, record.gid) or len(xattrs) < len(record.xattrs)
        return step._replace(status=status, xattrs=xattrs)

    # ---- files: those that are only checked are copied to themselves ----

    def enter(self, step: Step) -> bool:
        return True

    def file(self, step: Step) -> Entry | None:
        return step.source if isinstance(step.source, Entry) else None

    def special(self, step: Step) -> None:
        pass

    def copy_each(self, step: Step, ends: Sequence[End], progress: Progress, cancel: Cancellation) -> list[Outcome]:
        (end,) = ends
        record = self.record(step.path)
        assert isinstance(step.source, Entry)
        assert isinstance(end, Entry)
        assert isinstance(record, File)
        try:
            with entries.open_source(step.source) as file:
                _check_file(file.status, record)
                if self._destination:
                    return [self._load(step, record, file, end, progress, cancel)]
                began = time.monotonic()
                # The file that this machine has written is read from disk.
                os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
                self._check(file.fd, record, step.path, progress, cancel, "copy")
            names, seconds = (step.path, step.path), time.monotonic() - began
            return [CopyResult(*names, record.size, seconds, "verify", {}, (), record.sha256)]
        except OSError as error:
            return [copy_error(error, step.path, end.path if self._destination else None)]

    def _load(
        self, step: Step, record: File, file: OpenFile, end: Entry, progress: Progress, cancel: Cancellation
    ) -> CopyResult:
        def complete(new: NewFile) -> None:
            assert step.status is not None
            if os.fstat(new.fd).st_size != record.size:
                raise CopyError(errno.EIO, "was changed while it was restored", step.path)
            if self._verify:
                self._check(new.fd, record, step.path, progress, cancel, "verify")
            if step.xattrs:
                os.fchmod(new.fd, 0o600)  # that of the tree may be read-only
            entries.preserve(new.fd, step.status, step.xattrs)
            try:
                new.complete(end.name, replace=self.overwrite)
            except FileExistsError:
                raise CopyError(errno.EEXIST, "is in the way", step.path, end.path) from None

        job = CopyJob.open(self.context, file, end, complete=complete, progress=progress, cancel=cancel)
        return job.run()._replace(sha256=record.sha256 if self._verify else None)

    def _check(self, fd: int, record: File, shown: str, progress: Progress, cancel: Cancellation, phase: str) -> None:
        """Compare a file with the checksums of the manifest. CopyError EIO if it differs."""
        found, _ = self._reader.read(fd, record.size, progress, cancel, phase=phase)
        if (different := different_part(found, record.sums(), record.size)) is not None:
            start, end = different
            text = f"is damaged: bytes {start} to {end} do not have the checksum of the manifest"
            raise CopyError(errno.EIO, text, shown)

    # ---- what needs all files ----

    def finish(self) -> None:
        """Create further names of files, and set the limits."""
        if not self._has_begun:
            return
        for path, first in self._links():
            try:
                self._link(path, first)
            except OSError as error:
                self._report.failed(self.end(path), None, error)
        limits = self.manifest.header.limits if self._is_root else []
        if not self.manifest.trusted:
            self.not_kept, limits = self.not_kept + len(limits), []
        for limit in limits:
            path = decoded(limit.path)
            if path != "." and not self._has_device(path.partition("/")[0]):
                continue
            try:
                with self._open_below(path) as directory:
                    set_quota(path_of(directory), limit.uid, limit.limit_bytes)
            except OSError as error:
                self.not_kept += 1
                if error.errno not in (errno.EPERM, errno.EACCES, errno.EBUSY):
                    self._report.failed(self.end(path), None, error)

    def _links(self) -> Iterator[tuple[str, str]]:
        """Yield the paths of further names of files, and of the first ones. OSError unless these are restored, too."""
        for path, record in self._below(self._part):
            if isinstance(record, HardLink):
                first = decoded(record.to)
                is_restored = not self._part or first.startswith(f"{self._part}/")
                if not is_restored or not isinstance(self.manifest.records.get(first), File):
                    text = f"is another name of {first}, no file of what is restored: restore a directory with both"
                    raise OSError(errno.EXDEV, text, self._shown(path))
                yield path, first

    def _link(self, path: str, first: str) -> None:
        paths = (os.path.relpath(each, self._part or ".") for each in (first, path))
        (above, old), (below, name) = map(os.path.split, paths)
        with self._open_below(above) as source, self._open_below(below) as directory:
            with writable(path_of(directory), os.fstat(directory), keeps_times=True):
                if self.overwrite:
                    with suppress(FileNotFoundError):
                        os.unlink(name, dir_fd=directory)
                os.link(old, name, src_dir_fd=source, dst_dir_fd=directory, follow_symlinks=False)

    @contextmanager
    def _open_below(self, path: str) -> Iterator[int]:
        with (
            closed_after(safe_path.open_path(self._destination, _DIRECTORY)) as base,
            closed_after(open_beneath(base, os.fsencode(path) or b".", _DIRECTORY)) as fd,
        ):
            yield fd


def _check_file(status: os.stat_result, record: File) -> None:
    """Raise OSError unless a file of the tree can be what the manifest says."""
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "is not a regular file, as the manifest says")
    if status.st_size != record.size:
        raise OSError(errno.EIO, f"is damaged: it has {status.st_size} bytes instead of {record.size}")


class _RestoredTree(FileTree):
    """What a directory of the save becomes. ``path``: in the save. ``is_device``: it is that of a device."""

    def __init__(self, restore: Restore, path: str, state: TreeState, *, is_device: bool) -> None:
        super().__init__(Entry.of(restore.end(path), follow=False), state)
        self._restore = restore
        self._gets_attributes = is_device and restore.manifest.trusted  # although it exists

    def check_name(self, path: str, step: Step) -> None:
        with suppress(FileNotFoundError, NotADirectoryError):
            is_directory = stat.S_ISDIR(os.lstat(path).st_mode)
            is_free = is_directory if step.kind == "enter" else self._restore.overwrite and not is_directory
            if not is_free:
                self._restore.in_the_way.append(path)

    def enter(self, step: Step) -> bool:
        """Create a directory. If the one that the user has named exists, it keeps its attributes."""
        folder = step.folder
        if folder is None or not super().enter(step):
            return False
        directory = self._directories[folder]
        if not directory.created:
            wants = self._gets_attributes or folder.parent is not None
            directory.keeps = wants and os.geteuid() in (0, os.fstat(directory.fd).st_uid)
        directory.keeps &= self._restore.record(step.path) is not None
        return True

    def _target(self, step: Step, entry: Entry) -> str:
        record = self._restore.record(step.path)
        assert isinstance(record, Symlink)
        return decoded(record.target)
