"""The two files of a copy: opening them, and attributes and durability once the bytes are copied.

Any user with write access to a directory can replace a file there by a symbolic link at any moment. So each name is
resolved once, to a descriptor: the file that was checked is the one that is opened, changed and removed.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Final, Literal, NamedTuple, Protocol, Self

from gpufs import safe_path
from gpufs.copying.types import CopyError, NotOnMountCopyError, copy_error
from gpufs.exceptions import text_of
from gpufs.new_file import NewFile
from gpufs.syscalls import close_all, closed_after, path_of

NEITHER: Final = "neither of them is on a gpufs mount: use cp"
_ACCESS_LISTS: Final = ("system.posix_acl_access", "system.posix_acl_default")
_KEPT: Final = ("user.", "security.", "trusted.", *_ACCESS_LISTS)
# Of extended attributes. A file has 64 KiB of names at most, and each of these may have a value of 64 KiB.
_MOST_BYTES: Final = 8 << 20
_TRIES: Final = 4  # to open a destination that others create and remove at the same time


def kind_of(names: Iterable[str]) -> Literal["file", "url", "host"]:
    """Return what a copy with these names needs: a store for a URL among them, or another machine for HOST:PATH."""
    special = [name for name in names if ":" in name]
    if any("://" in name for name in special):
        from gpufs.stores.urls import is_url

        if any(map(is_url, special)):
            return "url"
    if special:
        from gpufs.hosts.names import is_host_name

        if any(map(is_host_name, special)):
            return "host"
    return "file"


class Entry(NamedTuple):
    """A name in an open directory, or a path where ``directory`` is None.

    ``path``: for messages. If it ends with a slash, only a directory may be created there. ``follow``: whether the name
    may be a symbolic link to the file that is meant. ``is_given``: by the user, not found below a directory.
    """

    path: str
    name: str
    directory: int | None = None
    follow: bool = True
    is_given: bool = True

    @classmethod
    def of(cls, path: str, *, follow: bool = True) -> Entry:
        """The entry of a path that a user has given."""
        return cls(path, path, None, follow)

    def child(self, name: str, directory: int) -> Entry:
        """An entry of the directory that this one is, open as ``directory``."""
        return Entry(os.path.join(self.path, name), name, directory, follow=False, is_given=False)

    def beside(self, name: str) -> Entry:
        """Another entry of the same directory."""
        return self._replace(path=os.path.join(os.path.dirname(self.path), name), name=name)

    def as_directory(self) -> Entry:
        """The same entry without the slash at its end, which a directory may have."""
        return self._replace(path=self.path.rstrip("/") or "/")

    def status(self) -> os.stat_result:
        """Its attributes, as stat(2) or lstat(2)."""
        return os.stat(self.name, dir_fd=self.directory, follow_symlinks=self.follow)

    @contextmanager
    def filled(self) -> Iterator[tuple[int, str]]:
        """The open directory that its copy takes space in, and its path: itself if it is one, else the one that has it.

        The two may be on different file systems: the name may be a mountpoint.
        """
        try:
            fd = os.open(self.name, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.directory)
        except OSError:
            with self.as_directory().located() as located:
                assert located.directory is not None
                yield located.directory, os.path.dirname(located.path) or "."
            return
        with closed_after(fd):
            yield fd, self.path

    def check_replaceable(self) -> os.stat_result | None:
        """Raise OSError for a directory, and for a given name as /dev/null, which a new file must not replace.

        Return the attributes of what the name has.
        """
        try:
            status = os.stat(self.name, dir_fd=self.directory, follow_symlinks=False)
        except FileNotFoundError:
            return None
        mode = status.st_mode
        if stat.S_ISDIR(mode):
            raise OSError(errno.EISDIR, "a directory cannot be overwritten with a file", self.path)
        if self.is_given and not stat.S_ISREG(mode) and not stat.S_ISLNK(mode):
            raise OSError(errno.EINVAL, "is a device, FIFO or socket, which a file does not replace", self.path)
        return status

    def is_directory(self) -> bool:
        """Whether it is a directory, or a link to one if it may be a link."""
        try:
            return stat.S_ISDIR(self.status().st_mode)
        except OSError:
            return False

    def check_file(self) -> None:
        """Raise OSError ENOTDIR for a name that only a directory can have."""
        if self.path.endswith("/"):
            raise OSError(errno.ENOTDIR, "is not a directory, as the slash at its end demands: create it first")

    @contextmanager
    def located(self) -> Iterator[Entry]:
        """The same entry with its directory open."""
        if self.directory is not None:
            yield self
            return
        folder = os.path.dirname(self.path) or "."
        with closed_after(safe_path.open_path(folder, os.O_PATH | os.O_DIRECTORY)) as fd:
            yield self._replace(name=os.path.basename(self.path) or ".", directory=fd)


class OpenFile(NamedTuple):
    """One end of a copy: its name, its descriptor, and its attributes when it was opened. ``with`` closes it."""

    entry: Entry
    fd: int
    status: os.stat_result

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        close_all((self.fd,))


def is_inside(path: str, directory: str) -> bool:
    """Whether a path is a directory or below it."""
    return f"{os.path.realpath(path)}/".startswith(os.path.realpath(directory).rstrip("/") + "/")


@contextmanager
def find_targets(
    sources: Sequence[str], destination: str, *, follow: bool, directory: bool, exact: bool = False
) -> Iterator[list[tuple[str, Entry]]]:
    """Find the destination of each source, by the rules of cp(1). OSError if they allow none.

    A destination directory stays open until the context ends. ``follow``: write through a symbolic link.
    ``directory``: the destination must be a directory. ``exact``: it is the copy itself, whatever it is.
    """
    opened = -1
    try:
        opened = -1 if exact else os.open(destination, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError) as error:
        if directory:
            raise OSError(
                error.errno, f"{text_of(error)}: several files need a directory that exists", destination
            ) from None
        if len(sources) > 1:
            text = f"is not a directory, and there are {len(sources)} sources for it"
            raise OSError(error.errno, text, destination) from None
    if opened < 0:
        yield [(sources[0], Entry.of(destination, follow=follow))]
        return
    named = []
    for source in sources:
        name = os.path.basename(source.rstrip("/")) or "."
        name = "." if name == ".." else name
        named.append((source, Entry(os.path.join(destination, name), name, opened, follow)))
    with closed_after(opened):
        yield named


def open_path(entry: Entry) -> int:
    """An O_PATH descriptor of the file: opening it has no effect on a FIFO or a device."""
    flags = os.O_PATH | os.O_CLOEXEC | (0 if entry.follow else os.O_NOFOLLOW)
    return os.open(entry.name, flags, dir_fd=entry.directory)


def _check_kind(path: str, status: os.stat_result) -> None:
    if stat.S_ISLNK(status.st_mode):
        raise CopyError(errno.ELOOP, "is a symbolic link, which is not followed here", path)
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISBLK(status.st_mode):
        raise CopyError(errno.EINVAL, "neither a regular file nor a block device: use cp", path)


def open_source(entry: Entry) -> OpenFile:
    """The source, open for reading. CopyError if it cannot be opened."""
    try:
        with closed_after(open_path(entry)) as named:
            kind = os.fstat(named)
            if stat.S_ISDIR(kind.st_mode):
                raise CopyError(errno.EISDIR, "is a directory", entry.path)
            _check_kind(entry.path, kind)
            fd = os.open(path_of(named), os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY)
        try:
            return OpenFile(entry, fd, os.fstat(fd))
        except BaseException:
            os.close(fd)
            raise
    except OSError as error:
        raise copy_error(error, entry.path) from None


def size_of(file: OpenFile) -> int:
    """Its size in bytes, also of a block device."""
    return os.lseek(file.fd, 0, os.SEEK_END) if stat.S_ISBLK(file.status.st_mode) else file.status.st_size


def open_destination(
    entry: Entry, source: OpenFile, *, mounts: Container[int], mode: int, readable: bool
) -> tuple[int, bool]:
    """The destination, open for writing and not yet emptied; True if it was created. ``entry`` has its directory open.

    Nothing is created or opened if no side is on one of the mounts. Where it may be, and for a copy out of a mount, it
    is open for reading too: the engine can then write through a mapping, which several threads can do at once.
    """

    def check_mount(device: int) -> None:
        if source.status.st_dev not in mounts and device not in mounts:
            raise NotOnMountCopyError(errno.EXDEV, NEITHER, source.entry.path, entry.path)

    access = os.O_RDWR if readable or source.status.st_dev in mounts else os.O_WRONLY
    try:
        for _ in range(_TRIES):
            try:
                named = open_path(entry)
            except FileNotFoundError:
                assert entry.directory is not None
                check_mount(os.fstat(entry.directory).st_dev)
                flags = access | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOCTTY
                try:
                    return os.open(entry.name, flags, mode, dir_fd=entry.directory), True
                except FileExistsError:
                    if is_link(entry):
                        raise CopyError(errno.EEXIST, "is a symbolic link to nowhere", entry.path) from None
                    continue  # another process has just created it
            try:
                status = os.fstat(named)
                check_mount(status.st_dev)
                if os.path.samestat(status, source.status):
                    raise CopyError(errno.EINVAL, "is the same file as the source", entry.path)
                if stat.S_ISDIR(status.st_mode):
                    raise CopyError(errno.EISDIR, "a directory cannot be overwritten with a file", entry.path)
                _check_kind(entry.path, status)
                flags = os.O_CLOEXEC | os.O_NOCTTY
                try:
                    return os.open(path_of(named), access | flags), False
                except PermissionError:
                    if access == os.O_WRONLY:
                        raise
                    return os.open(path_of(named), os.O_WRONLY | flags), False  # may be written but not read
            except FileNotFoundError:
                continue  # another process has just removed it
            finally:
                os.close(named)
    except OSError as error:
        raise copy_error(error, entry.path) from None
    raise CopyError(errno.EBUSY, "other processes create and remove it all the time", entry.path)


def open_new(
    entry: Entry, source: OpenFile, *, mounts: Container[int], mode: int, named_mode: int | None = None
) -> NewFile:
    """A new file that replaces the destination once it is complete. ``entry`` has its directory open.

    It has the attributes that the destination keeps. ``named_mode``: as of NewFile. CopyError if nothing can be copied
    there.
    """
    assert entry.directory is not None
    try:
        entry.check_file()
        if source.status.st_dev not in mounts and os.fstat(entry.directory).st_dev not in mounts:
            raise NotOnMountCopyError(errno.EXDEV, NEITHER, source.entry.path, entry.path)
        old = entry.check_replaceable()
        if old is not None and os.path.samestat(old, source.status):
            raise CopyError(errno.EINVAL, "is the same file as the source", entry.path)
        new = NewFile.create(entry.directory, mode, named_mode)
        try:
            if old is not None:
                new.keep_attributes_of(entry.name)
        except BaseException:
            new.close()
            raise
        return new
    except OSError as error:
        raise copy_error(error, entry.path) from None


def is_link(entry: Entry) -> bool:
    """Whether the name is a symbolic link."""
    try:
        return stat.S_ISLNK(entry._replace(follow=False).status().st_mode)
    except OSError:
        return False


def has_holes(status: os.stat_result) -> bool:
    """Whether a file takes up less than its size."""
    return stat.S_ISREG(status.st_mode) and status.st_blocks * 512 < status.st_size


def data_bytes(status: os.stat_result, size: int) -> int:
    """The least space that a copy of a file needs, in bytes. Holes need none."""
    return min(size, status.st_blocks * 512) if stat.S_ISREG(status.st_mode) else size


def next_data(fd: int, offset: int) -> tuple[int, int]:
    """Start and end of the next data at or after an offset; both are the file's end if there is no more data."""
    end = os.fstat(fd).st_size
    if offset >= end:
        return offset, offset
    try:
        start = os.lseek(fd, offset, os.SEEK_DATA)
        return start, os.lseek(fd, start, os.SEEK_HOLE)
    except OSError as error:
        if error.errno == errno.ENXIO:
            end = max(offset, os.fstat(fd).st_size)  # the file may have been cut off just now
            return end, end
        if error.errno == errno.EINVAL:  # the file system does not report holes
            return offset, end
        raise


class SourceAttributes(Protocol):
    """The attributes of a file that a copy can keep; os.stat_result has them."""

    @property
    def st_mode(self) -> int: ...
    @property
    def st_uid(self) -> int: ...
    @property
    def st_gid(self) -> int: ...
    @property
    def st_atime_ns(self) -> int: ...
    @property
    def st_mtime_ns(self) -> int: ...


def preserve(target: int | str, source: SourceAttributes, xattrs: Mapping[str, bytes] | None = None) -> None:
    """Set owner (if allowed), mode and times, as cp -p, and ``xattrs`` unless that is None.

    ``target``: a descriptor, or path_of() an O_PATH one.
    """
    mode, now = stat.S_IMODE(source.st_mode), os.stat(target)
    owned = (now.st_uid, now.st_gid) == (source.st_uid, source.st_gid)
    if not owned:  # else a request to the mount's daemon for nothing
        try:
            os.chown(target, source.st_uid, source.st_gid)
        except PermissionError:
            try:
                os.chown(target, -1, source.st_gid)
            except PermissionError:
                mode &= ~stat.S_ISGID
            mode &= ~stat.S_ISUID
    if xattrs is not None:  # before the mode, which may take the right to set them
        write_xattrs(target, xattrs)
        owned = False
    if not stat.S_ISLNK(source.st_mode) and not (owned and stat.S_IMODE(now.st_mode) == mode):  # links have none
        os.chmod(target, mode)
    os.utime(target, ns=(source.st_atime_ns, source.st_mtime_ns))


def set_times(fd: int, source: SourceAttributes) -> None:
    """Set the times of an open file to those of its source. Only its owner may: others' copies are made again."""
    with suppress(PermissionError):
        os.utime(fd, ns=(source.st_atime_ns, source.st_mtime_ns))


def sync_directory(directory: int) -> None:
    """Write the names in a directory to disk."""
    with closed_after(os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)) as readable:
        os.fsync(readable)


# ---- extended attributes and access lists ----


def read_xattrs(target: int | str) -> dict[str, bytes]:
    """Return those that the caller may see. ``target``: a descriptor, or path_of() an O_PATH one.

    OSError E2BIG for more than 8 MiB.
    """
    try:
        names = os.listxattr(target)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS):
            return {}
        raise
    values, total = {}, 0
    for name in names:
        if not name.startswith(_KEPT):
            continue
        try:
            values[name] = os.getxattr(target, name)
        except OSError as error:
            if error.errno not in (errno.ENODATA, errno.EPERM, errno.EACCES, errno.EOPNOTSUPP):
                raise
            continue
        total += len(name) + len(values[name])
        if total > _MOST_BYTES:
            raise OSError(errno.E2BIG, f"has more than {_MOST_BYTES >> 20} MiB of extended attributes")
    return values


def may_set(name: str, *, trusted: bool) -> bool:
    """Return whether this user may set one. ``trusted``: also if it gives rights to programs."""
    return name.startswith(_KEPT if trusted and os.geteuid() == 0 else ("user.", *_ACCESS_LISTS))


def write_xattrs(target: int | str, xattrs: Mapping[str, bytes]) -> None:
    """Set these, and remove access lists that the file has inherited. ``target``: as of read_xattrs()."""
    inherited: list[str] = []
    with suppress(OSError):
        inherited = [name for name in os.listxattr(target) if name in _ACCESS_LISTS and name not in xattrs]
    for name in inherited:
        os.removexattr(target, name)
    for name, value in xattrs.items():
        os.setxattr(target, name, value)
