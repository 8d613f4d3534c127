"""The walk over what is copied: the directories, files and links of a source, which a store or this machine has.

Below the names given by the user nothing is looked up by path: each directory is open, and symbolic links are followed
only on request. So another user who renames files or replaces them by links cannot lead the copy out of its trees.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

from gpufs.copying.entries import Entry, is_link

if TYPE_CHECKING:
    from gpufs.stores.files import StoreFile
    from gpufs.stores.urls import Url

HINT: Final = "-r or gpufs.copy_tree() copies it"  # of a directory
_users_lock: Final = threading.Lock()

# Takes what cannot be found: its path, and why.
Fail: TypeAlias = Callable[[str, OSError], None]
Steps: TypeAlias = "Generator[Step, None, None]"
# What is to become the copy of a file.
End: TypeAlias = "Entry | Url"


class Folder:
    """A directory of a source, open unless a store has it, until the walk and all copies of its files have ended.

    Thread-safe: use() and release().
    """

    def __init__(self, path: str, name: str, parent: Folder | None, entry: Entry | None = None) -> None:
        """``entry``: of this machine, None if a store has it. OSError if it cannot be opened."""
        self.path = path  # for messages
        self._entry = entry
        self.fd = -1  # -1, and None: a store has it
        self.status: os.stat_result | None = None
        self.xattrs: Mapping[str, bytes] | None = None  # as of Step
        if entry is not None:
            self.fd, self.status = _open_directory(entry)
        # Below the source; "" for the source itself.
        self.below: str = "" if parent is None else os.path.join(parent.below, name)
        self.parent = parent
        self.wanted = True  # the walk goes on below it; its taker may say that it does not
        self.ended: list[Callable[[], None]] = []  # called once nothing more is copied from it
        self._users = 1  # the walk
        if parent is not None:
            parent.use()

    def reopen(self) -> None:
        """Open it again for another walk, when all uses have ended. OSError if that fails."""
        if self._entry is not None and self.status is not None:
            entry = self._entry if self.parent is None else self._entry._replace(directory=self.parent.fd)
            self.fd, status = _open_directory(entry)
            if not os.path.samestat(status, self.status):
                os.close(self.fd)
                raise OSError(errno.EBUSY, "another process has put a directory in its place")
        self._users = 1
        if self.parent is not None:
            self.parent.use()

    def use(self) -> None:
        """Keep it open until release()."""
        with _users_lock:
            self._users += 1

    def release(self) -> None:
        """End a use. The last one ends that of the directory above, too."""
        folder: Folder | None = self
        while folder is not None:
            with _users_lock:
                folder._users -= 1
                if folder._users:
                    return
            for end in folder.ended:
                end()
            if folder.fd >= 0:
                os.close(folder.fd)
                folder.fd = -1
            folder = folder.parent


class Step(NamedTuple):
    """A step of a walk: it enters a directory, leaves it, or finds anything else."""

    kind: Literal["enter", "leave", "file"]
    source: Entry | StoreFile | None  # None: a directory of a store, or one that the walk leaves
    name: str  # in its directory
    path: str  # for messages
    status: os.stat_result | None  # None: a store has it
    size: int
    # A directory itself. For others the one that has it, None for a name that the user has given.
    folder: Folder | None
    xattrs: Mapping[str, bytes] | None = None  # extended attributes that a copy gets, None for those of any new file

    @property
    def parent(self) -> Folder | None:
        """The directory that has it, None for a name that the user has given."""
        return self.folder if self.kind == "file" or self.folder is None else self.folder.parent

    @property
    def below(self) -> str:
        """The path of a file below the source; "" for the source itself."""
        return "" if self.folder is None else os.path.join(self.folder.below, self.name)

    @property
    def modified_ns(self) -> int | None:
        """When a file was changed, in nanoseconds since 1970; None if a store does not know."""
        if self.status is not None:
            return self.status.st_mtime_ns
        return None if self.source is None or isinstance(self.source, Entry) else self.source.modified_ns

    @property
    def has_content(self) -> bool:
        """Whether it is copied as a regular file: also what is not one, if the user has named it."""
        if self.status is None or stat.S_ISREG(self.status.st_mode):
            return True
        return self.folder is None and not stat.S_ISLNK(self.status.st_mode)


def walk_files(source: Entry, fail: Fail, *, recursive: bool, dereference: bool, hint: str = HINT) -> Steps:
    """Yield a source, and what is below it: of each directory the files by name, and then the directories in it.

    ``dereference``: follow links below it. ``hint``: what to do with a directory without ``recursive``.
    """
    status = _status(source, fail)
    # The entries still to come: of the source, and of each directory that is open.
    found = iter([] if status is None else [(source, status)])
    above: list[tuple[Folder, Iterator[tuple[Entry, os.stat_result]]]] = []
    try:
        while True:
            for entry, status in above[-1][1] if above else found:
                parent = above[-1][0] if above else None
                if not stat.S_ISDIR(status.st_mode):
                    size = status.st_size if stat.S_ISREG(status.st_mode) else 0
                    yield Step("file", entry, entry.name, entry.path, status, size, parent)
                elif not recursive:
                    fail(entry.path, OSError(errno.EISDIR, f"is a directory ({hint})"))
                elif (folder := _open(entry, status, parent, fail)) is not None:
                    above.append((folder, _below(folder, fail, dereference=dereference)))
                    yield Step("enter", entry, entry.name, entry.path, folder.status, 0, folder)
                    break
            else:
                if not above:
                    return
                folder, _ = above.pop()
                folder.release()
                yield Step("leave", None, "", folder.path, folder.status, 0, folder)
    finally:
        for folder, _ in reversed(above):
            folder.release()


def _status(entry: Entry, fail: Fail) -> os.stat_result | None:
    try:
        return entry.status()
    except OSError as error:
        if error.errno == errno.ENOENT and is_link(entry):
            error = OSError(errno.ENOENT, "is a symbolic link to a file that does not exist")
        fail(entry.path, error)
        return None


def _open_directory(entry: Entry) -> tuple[int, os.stat_result]:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (0 if entry.follow else os.O_NOFOLLOW)
    fd = os.open(entry.name, flags, dir_fd=entry.directory)
    return fd, os.fstat(fd)


def _open(entry: Entry, status: os.stat_result, parent: Folder | None, fail: Fail) -> Folder | None:
    try:
        above = parent if entry.follow else None  # else nothing leads upwards
        while above is not None:
            if above.status is not None and os.path.samestat(above.status, status):
                text = "is a link to a directory that it lies in: such a loop can be copied as a link only"
                raise OSError(errno.ELOOP, text)
            above = above.parent
        return Folder(entry.path, entry.name, parent, entry)
    except OSError as error:
        fail(entry.path, error)
        return None


def _below(folder: Folder, fail: Fail, *, dereference: bool) -> Iterator[tuple[Entry, os.stat_result]]:
    directories = []
    try:
        names = sorted(os.listdir(folder.fd)) if folder.wanted else []
    except OSError as error:
        fail(folder.path, error)
        return
    above = os.path.join(folder.path, "")
    for name in names:
        entry = Entry(above + name, name, folder.fd, dereference, False)
        status = _status(entry, fail)
        if status is not None and stat.S_ISDIR(status.st_mode):
            directories.append((entry, status))
        elif status is not None:
            yield entry, status
    yield from directories


def replay(steps: Iterable[Step], fail: Fail) -> Steps:
    """Yield the steps of a walk that has ended. Their directories are open again."""
    above: list[Folder] = []
    try:
        for step in steps:
            folder, parent = step.folder, step.parent
            if parent is not None and not parent.wanted:
                if folder is not None and step.kind == "enter":
                    folder.wanted = False
                continue
            if step.kind == "enter" and folder is not None:
                try:
                    folder.reopen()
                except OSError as error:
                    fail(step.path, error)
                    folder.wanted = False
                    continue
                above.append(folder)
            elif step.kind == "leave":
                if not above or above[-1] is not folder:
                    continue  # it could not be opened
                above.pop().release()
            elif isinstance(step.source, Entry) and folder is not None:
                step = step._replace(source=step.source._replace(directory=folder.fd))
            yield step
    finally:
        for folder in reversed(above):
            folder.release()


def walk_store(path: str | None, files: Sequence[StoreFile]) -> Steps:
    """Yield the files below a directory of a store, in the order of their paths, and the directories that have them.

    ``path``: of the directory, for messages; None for files that the user has named.
    """
    if path is None:
        for file in files:
            yield Step("file", file, file.path, file.url.shown, None, file.size, None)
        return
    above: list[Folder] = []
    names: list[str] = []  # of those below the first
    try:
        for file in files:
            *directories, name = file.path.split("/")
            while names != directories[: len(names)]:
                names.pop()
                yield _leave(above)
            while len(above) <= len(directories):
                if above:
                    names.append(directories[len(names)])
                parent = above[-1] if above else None
                folder = Folder("/".join([path, *names]), names[-1] if names else "", parent)
                folder.wanted = not above or above[-1].wanted
                above.append(folder)
                if folder.wanted:
                    yield Step("enter", None, names[-1] if names else "", folder.path, None, 0, folder)
            if above[-1].wanted:
                yield Step("file", file, name, file.url.shown, None, file.size, above[-1])
        while above:
            yield _leave(above)
    finally:
        for folder in reversed(above):
            folder.release()


def _leave(above: list[Folder]) -> Step:
    folder = above.pop()
    folder.release()
    return Step("leave", None, "", folder.path, None, 0, folder)
