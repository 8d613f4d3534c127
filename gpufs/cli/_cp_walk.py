"""The directory walk of `gpufs cp`, by the rules of cp(1).

Directories, symbolic links and special files are created here; regular files are passed on to be copied. Below the
names given by the user nothing is looked up by path: each directory is open, and symbolic links are not followed. So
another user who renames files or replaces them by links cannot lead the copy out of its trees. With ``dereference``
links in the source are followed, those in the destination never.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Final, NamedTuple, TypeAlias

from gpufs import mounting
from gpufs.cli._cp_options import CpOptions
from gpufs.cli._output import Failure
from gpufs.client import Cancellation, Copier
from gpufs.copying.entries import Entry, find_targets, is_link, open_path, preserve
from gpufs.copying.space import data_bytes
from gpufs.exceptions import text_of
from gpufs.syscalls import path_of

_DIRECTORY: Final = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


# Records a failure: source, destination if that matters, errno, text.
Report: TypeAlias = Callable[[str, str | None, int, str], None]


class Folder:
    """A directory of a source and its copy, both open.

    ``destination_fd``: opened with O_PATH. ``status``: attributes of the source.
    """

    def __init__(
        self,
        source: Entry,
        destination: Entry,
        source_fd: int,
        destination_fd: int,
        status: os.stat_result,
        created: bool,
        parent: Folder | None,
    ) -> None:
        self.source = source
        self.destination = destination
        self.source_fd = source_fd
        self.destination_fd = destination_fd
        self.status = status
        self.created = created
        self.parent = parent
        self.users = 1  # pending copies, and the walk


class Item(NamedTuple):
    """A regular file to be copied. Walk.release() must be called with ``folder`` afterwards."""

    source: Entry
    destination: Entry
    size: int
    folder: Folder | None


@contextmanager
def targets(
    sources: Sequence[str], destination: str, *, follow: bool, directory: bool = False
) -> Iterator[list[tuple[str, Entry]]]:
    """Find the destination of each source, by the rules of cp(1). Failure if they allow none.

    A destination directory stays open until the context ends. ``follow``: write through a symbolic link.
    ``directory``: the destination must be a directory.
    """
    if not destination or not all(sources):
        raise Failure("cp: an empty name is given where a file belongs", 2)
    with ExitStack() as opened:
        try:
            named = opened.enter_context(find_targets(sources, destination, follow=follow, directory=directory))
        except OSError as error:
            raise Failure(f"cp: {destination}: {text_of(error)}") from None
        yield named


class Walk:
    """One walk over the sources. Calls ``found`` with each file to copy, which may wait.

    Thread-safe: release() only.
    """

    def __init__(
        self,
        cancel: Cancellation,
        options: CpOptions,
        *,
        found: Callable[[Item], None],
        warn: Callable[[str], None],
        report: Report,
    ) -> None:
        self.cancel = cancel
        self.options = options
        self.found = found
        self.warn = warn
        self.report = report
        self.skipped = 0  # existing files, with --no-clobber
        self._made: dict[str, str] = {}  # destination: its source
        self._links: list[str] = []  # copies of links whose targets exist
        self._lock = threading.Lock()  # guards the users of all folders

    def find(self, name: str, destination: Entry) -> None:
        """Walk one source and everything below it."""
        if self.cancel.cancelled:
            return
        source = Entry.of(name, follow=not self.options.recursive or self.options.dereference)
        try:
            status = source.status()
        except OSError as error:
            self._fail_source(source, error)
            return
        copied = stat.S_ISREG(status.st_mode) or stat.S_ISBLK(status.st_mode)  # the copier checks these
        if stat.S_ISDIR(status.st_mode) and not self.options.recursive:
            self.report(name, None, errno.EISDIR, "is a directory (-r copies it, -t copies into it)")
        elif not copied and not _on_a_mount(status.st_dev, destination):
            self.report(name, destination.path, errno.EXDEV, "neither of them is on a gpufs mount: use cp")
        elif not stat.S_ISDIR(status.st_mode):
            self._find_file(source, destination, status, None)
        elif _is_inside(destination.path, name):
            self.report(name, destination.path, errno.EINVAL, "a directory cannot be copied into itself")
        else:
            self._find_in_directory(source, destination)

    def skip(self) -> None:
        """Count a file that exists already, with --no-clobber."""
        self.skipped += 1

    def release(self, folder: Folder | None) -> None:
        """Drop a reference. The last one sets the directory's attributes: nothing more is written into it."""
        while folder is not None:
            with self._lock:
                folder.users -= 1
                if folder.users:
                    return
            try:
                if not self.cancel.cancelled:
                    self._finish(folder)
            except OSError as error:
                self._fail(folder.destination.path, None, error)
            os.close(folder.source_fd)
            os.close(folder.destination_fd)
            folder = folder.parent

    def _finish(self, folder: Folder) -> None:
        path, mode = path_of(folder.destination_fd), stat.S_IMODE(folder.status.st_mode)
        if self.options.preserve:
            preserve(path, folder.status)
        elif folder.created and mode & stat.S_IRWXU != stat.S_IRWXU:
            os.chmod(path, stat.S_IMODE(os.stat(path).st_mode) & (mode | ~stat.S_IRWXU))

    def _fail(self, source: str, destination: str | None, error: OSError) -> None:
        self.report(source, destination, error.errno or errno.EIO, text_of(error))

    def _fail_source(self, source: Entry, error: OSError) -> None:
        """Report a source whose attributes cannot be read."""
        if error.errno == errno.ENOENT and is_link(source):
            self.report(source.path, None, errno.ENOENT, "is a symbolic link to a file that does not exist")
        else:
            self._fail(source.path, None, error)

    def links_without_files(self) -> list[str]:
        """Return the copies of links that lead nowhere, or off the mount, although the originals lead to files.

        Call it when everything is copied.
        """
        if not self._links:
            return []
        mounts = mounting.by_device()
        broken = []
        for path in self._links:
            try:
                if os.lstat(path).st_dev in mounts and os.stat(path).st_dev not in mounts:
                    broken.append(path)
            except OSError:
                broken.append(path)
        return broken

    def _use(self, folder: Folder | None) -> None:
        if folder is not None:
            with self._lock:
                folder.users += 1

    def _find_file(self, source: Entry, destination: Entry, status: os.stat_result, folder: Folder | None) -> None:
        name = os.path.normpath(destination.path)
        if name in self._made:
            before = self._made[name]
            if os.path.normpath(before) == os.path.normpath(source.path):
                self.warn(f"{source.path}: is given more than once")
            else:
                text = "another source of this command has been copied there"
                self.report(source.path, destination.path, errno.EEXIST, text)
            return
        self._made[name] = source.path
        if self.options.no_clobber and _exists(destination, status):
            self.skip()
            return
        named = folder is None
        if stat.S_ISREG(status.st_mode) or (named and not stat.S_ISLNK(status.st_mode)):
            self._use(folder)
            self.found(Item(source, destination, status.st_size if stat.S_ISREG(status.st_mode) else 0, folder))
            return
        try:
            with destination.located() as located:
                if stat.S_ISLNK(status.st_mode):
                    target = os.readlink(source.name, dir_fd=source.directory)
                    create = partial(os.symlink, target, located.name, dir_fd=located.directory)
                    if _leads_to_file(source):
                        self._links.append(destination.path)
                else:  # a FIFO, socket or device node
                    kind = (status.st_mode & ~0o7000, status.st_rdev)
                    create = partial(os.mknod, located.name, *kind, dir_fd=located.directory)
                self._make(located, status, create)
        except OSError as error:
            self._fail(source.path, destination.path, error)

    def _find_in_directory(self, source: Entry, destination: Entry) -> None:
        """Create the directory and walk everything in it."""
        created: set[tuple[int, int]] = set()
        pending: list[tuple[Entry, Entry, Folder | None]] = [(source, destination, None)]
        while pending:
            source, destination, parent = pending.pop()
            try:
                if self.cancel.cancelled:
                    continue
                folder = self._open_folder(source, destination, parent, created)
                self._use(parent)
            except OSError as error:
                self._fail(str(error.filename or source.path), None, error)
                continue
            finally:
                self.release(parent)  # which `pending` has used
            try:
                pending += self._find_below(folder)
            except OSError as error:
                self._fail(source.path, None, error)
            finally:
                self.release(folder)

    def _find_below(self, folder: Folder) -> list[tuple[Entry, Entry, Folder | None]]:
        """Find the files of a directory; return the directories in it."""
        directories: list[tuple[Entry, Entry, Folder | None]] = []
        for name in sorted(os.listdir(folder.source_fd)):
            if self.cancel.cancelled:
                break
            source = folder.source.child(name, folder.source_fd)._replace(follow=self.options.dereference)
            destination = folder.destination.child(name, folder.destination_fd)
            try:
                status = source.status()
            except OSError as error:
                self._fail_source(source, error)
                continue
            if stat.S_ISDIR(status.st_mode):
                self._use(folder)
                directories.append((source, destination, folder))
            else:
                self._find_file(source, destination, status, folder)
        return directories

    def _open_folder(
        self, source: Entry, destination: Entry, parent: Folder | None, created: set[tuple[int, int]]
    ) -> Folder:
        """Open a directory of the source, and its copy, which is created if it does not exist."""
        try:
            flags = os.O_RDONLY | (_DIRECTORY & ~os.O_NOFOLLOW if source.follow else _DIRECTORY)
            fd = os.open(source.name, flags, dir_fd=source.directory)
        except OSError as error:
            raise OSError(error.errno, error.strerror, source.path) from None
        try:
            status = os.fstat(fd)
            if (status.st_dev, status.st_ino) in created:
                raise OSError(errno.EINVAL, "a directory cannot be copied into itself", source.path)
            above = parent
            while above is not None:
                if os.path.samestat(above.status, status):
                    text = "is a link to a directory that it lies in: such a loop cannot be copied by -L"
                    raise OSError(errno.ELOOP, text, source.path)
                above = above.parent
            plain = Entry(destination.path.rstrip("/") or "/", destination.name, destination.directory, follow=False)
            with plain.located() as located:
                copy, new = self._make_directory(located, stat.S_IMODE(status.st_mode))
        except BaseException:
            os.close(fd)
            raise
        if new:
            made = os.fstat(copy)
            created.add((made.st_dev, made.st_ino))
        return Folder(source, destination, fd, copy, status, new, parent)

    def _make_directory(self, entry: Entry, mode: int) -> tuple[int, bool]:
        """Return the directory, as an O_PATH descriptor, and whether it was created."""
        # The copy must be able to write there, whatever the final mode is.
        allowed = stat.S_IRWXU if self.options.preserve else 0o1777
        try:
            os.mkdir(entry.name, mode & allowed | stat.S_IRWXU, dir_fd=entry.directory)
            new = True
        except FileExistsError:
            new = False
        except OSError as error:
            raise OSError(error.errno, error.strerror, entry.path) from None
        try:
            fd = os.open(entry.name, os.O_PATH | _DIRECTORY, dir_fd=entry.directory)
        except NotADirectoryError:
            raise OSError(errno.ENOTDIR, "a file cannot be overwritten with a directory", entry.path) from None
        try:
            if new and os.listdir(path_of(fd)):
                raise OSError(errno.EBUSY, "another process has put a directory in its place", entry.path)
        except BaseException:
            os.close(fd)
            raise
        return fd, new

    def _make(self, destination: Entry, source: os.stat_result, create: Callable[[], None]) -> None:
        """Create a link or special file. As cp(1), replace an existing file unless it is the source itself."""
        entry = Entry(destination.path, destination.name, destination.directory, follow=False)
        try:
            create()
        except FileExistsError:
            if os.path.samestat(entry.status(), source):
                raise OSError(errno.EINVAL, "is the same file as the source") from None
            os.unlink(entry.name, dir_fd=entry.directory)
            create()
        if not self.options.preserve:
            return
        fd = open_path(entry)
        try:
            made = os.fstat(fd)
            if (stat.S_IFMT(made.st_mode), made.st_nlink) != (stat.S_IFMT(source.st_mode), 1):
                raise OSError(errno.EBUSY, "another process has put a file in its place")
            preserve(path_of(fd), source)
        finally:
            os.close(fd)


def _exists(destination: Entry, source: os.stat_result) -> bool:
    follow = destination.follow and stat.S_ISREG(source.st_mode)
    try:
        os.stat(destination.name, dir_fd=destination.directory, follow_symlinks=follow)
    except OSError:
        return False  # creating it will show what is wrong
    return True


def _leads_to_file(link: Entry) -> bool:
    try:
        link._replace(follow=True).status()
    except OSError:
        return False
    return True


def _on_a_mount(device: int, destination: Entry) -> bool:
    mounts = mounting.by_device()
    if device in mounts:
        return True
    try:
        with Entry(destination.path.rstrip("/"), destination.name, destination.directory).located() as located:
            assert located.directory is not None
            return os.fstat(located.directory).st_dev in mounts
    except OSError:
        return True  # creating it will show what is wrong


def _is_inside(path: str, directory: str) -> bool:
    return f"{os.path.realpath(path)}/".startswith(os.path.realpath(directory).rstrip("/") + "/")


# ---- space ----


def check_space(copier: Copier, named: list[tuple[str, Entry]], cancel: Cancellation, options: CpOptions) -> None:
    """Raise OSError ENOSPC if the files do not fit, with the figures. ``named``: sources and their destinations.

    Errors of other kinds are left to the copies.
    """
    needed = 0
    for source, destination in {os.path.normpath(entry.path): (name, entry) for name, entry in named}.values():
        for path, status in _files(source, options):
            held = _held_bytes(destination.path + path)
            if held is None or not options.no_clobber:
                needed += data_bytes(status, status.st_size) - (held or 0)
    with suppress(FileNotFoundError, NotADirectoryError), named[0][1].located() as located:
        assert located.directory is not None
        copier.context.check_space(located.directory, needed, cancel)


def _files(source: str, options: CpOptions) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the regular files of a source: attributes, and the path below it that begins with "/", or "" for itself."""
    above: dict[str, frozenset[tuple[int, int]]] = {}  # the directories above each directory, with dereference
    try:
        status = Entry.of(source, follow=not options.recursive or options.dereference).status()
        if stat.S_ISREG(status.st_mode):
            yield "", status
        elif options.recursive:
            for folder, directories, names, fd in os.fwalk(source, follow_symlinks=options.dereference):
                if options.dereference:
                    status = os.fstat(fd)
                    here = (status.st_dev, status.st_ino)
                    passed = above.pop(folder, frozenset())
                    if here in passed:
                        directories.clear()
                        continue  # a loop of links, which the copy reports
                    above.update((os.path.join(folder, name), passed | {here}) for name in directories)
                for name in names:
                    try:
                        status = os.stat(name, dir_fd=fd, follow_symlinks=options.dereference)
                    except OSError:
                        continue  # which the copy reports
                    if stat.S_ISREG(status.st_mode):
                        yield f"{folder.removeprefix(source)}/{name}", status
    except (OSError, RecursionError):
        return


def _held_bytes(path: str) -> int | None:
    """Return the bytes that overwriting a file frees; None if nothing has the name."""
    try:
        status = os.stat(path, follow_symlinks=False)
    except OSError:
        return None
    return status.st_blocks * 512 if stat.S_ISREG(status.st_mode) else 0
