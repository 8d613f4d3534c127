"""A file that gets its name when it is complete, or never."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from contextlib import suppress
from typing import Final, NamedTuple, Self

from gpufs.syscalls import closed_after, path_of

PREFIX: Final = ".gpufs-part-"
_PART: Final = ".gpufs-part"
_NAME_BYTES: Final = 255  # of a name, at most
_HASH_DIGITS: Final = 16
PINNED: Final = "user.gpufs-pinned"  # an extended attribute: a full device does not park the file

_PERMISSIONS: Final = 0o777
_ACCESS_LIST: Final = "system.posix_acl_access"
_NO_TMPFILE: Final = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOSYS)


def temporary_name() -> str:
    """Return a name that no other file has, for one that gets its own name later."""
    # As secrets.token_hex(), whose module takes a tenth of the time of a small copy to import.
    return f"{PREFIX}{os.urandom(8).hex()}"


def part_name(name: str) -> str:
    """Return the name under which an incomplete copy of a name is kept. Always the same, so that it can go on."""
    raw = os.fsencode(name)
    if len(f".{_PART}") + len(raw) > _NAME_BYTES:
        import hashlib  # takes longer than a small copy

        digits = hashlib.sha256(raw).hexdigest()[:_HASH_DIGITS]
        kept = _NAME_BYTES - len(f".-{digits}{_PART}")
        name = f"{os.fsdecode(raw[:kept])}-{digits}"
    return f".{name}{_PART}"


def has_name(fd: int, name: str, directory: int | None) -> bool:
    """Return whether an open file has a name."""
    try:
        status = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except OSError:
        return False
    return os.path.samestat(status, os.fstat(fd))


class KeptAttributes(NamedTuple):
    """What a file keeps when a new version takes its place. ``xattrs``: without those that it does not have."""

    status: os.stat_result
    xattrs: dict[str, bytes]

    @classmethod
    def of(cls, target: int | str) -> Self:
        """Return those of an open file or of a name, of which no link is followed."""
        follow = isinstance(target, int)
        status = os.stat(target, follow_symlinks=follow)
        xattrs = {}
        for name in (_ACCESS_LIST, PINNED):
            try:
                xattrs[name] = os.getxattr(target, name, follow_symlinks=follow)
            except OSError as error:
                if error.errno not in (errno.ENODATA, errno.EOPNOTSUPP, errno.EACCES):
                    raise
        return cls(status, xattrs)

    def give_to(self, fd: int) -> None:
        """Give them to an open file, the owner where this user may. A pin that it has stays.

        OSError of fchmod(2) and fsetxattr(2).
        """
        old, new = self.status, KeptAttributes.of(fd)
        if (new.status.st_uid, new.status.st_gid) != (old.st_uid, old.st_gid):
            with suppress(OSError):  # only root may, and the owner's limit may be reached
                os.fchown(fd, old.st_uid, old.st_gid)
        # Before the mode, in which the bits of the group are the mask of a list: alone they are rights of the group.
        for name, value in {_ACCESS_LIST: None, **self.xattrs}.items():
            if value != new.xattrs.get(name):
                _set_xattr(fd, name, value)
        if (os.fstat(fd).st_mode ^ old.st_mode) & _PERMISSIONS:
            os.fchmod(fd, old.st_mode & _PERMISSIONS)

    def restore(self, fd: int) -> None:
        """Undo give_to() on the file that they are of, as far as possible."""
        for name in (_ACCESS_LIST, PINNED):
            with suppress(OSError):
                _set_xattr(fd, name, self.xattrs.get(name))
        with suppress(OSError):
            os.fchmod(fd, self.status.st_mode & _PERMISSIONS)
        with suppress(OSError):
            os.fchown(fd, self.status.st_uid, self.status.st_gid)


def _set_xattr(fd: int, name: str, value: bytes | None) -> None:
    if value is None:
        os.removexattr(fd, name)
    else:
        os.setxattr(fd, name, value)


def remove_name(fd: int, name: str, directory: int | None) -> bool:
    """Remove the name of an open file; False where it has another name by now, or could not be removed."""
    if not has_name(fd, name, directory):
        return False
    try:
        os.unlink(name, dir_fd=directory)
    except OSError:
        return False
    return True


def _lock(fd: int) -> None:
    with suppress(OSError):  # not all file systems of the host have locks
        fcntl.flock(fd, fcntl.LOCK_EX)


class NewFile:
    """A new file in an open directory, which stays the caller's.

    A temporary name belongs to a living process as long as the file is locked.
    """

    def __init__(self, directory: int, fd: int, temporary: str, *, is_named: bool) -> None:
        self.fd = fd  # open for reading and writing; -1 once it is closed
        self.temporary = temporary  # the name until it is complete, if it has one
        self._directory = directory
        self._is_named = is_named

    @classmethod
    def create(cls, directory: int, mode: int = 0o666, named_mode: int | None = None) -> Self:
        """Create one that no other process goes on with.

        It has no name where the file system allows that (O_TMPFILE; FUSE since Linux 6.2), so a process that dies
        leaves nothing. ``named_mode``: its mode where it has a temporary one.
        """
        temporary, access = temporary_name(), os.O_RDWR | os.O_CLOEXEC
        is_named = False
        try:
            fd = os.open(".", access | os.O_TMPFILE, mode, dir_fd=directory)
        except OSError as error:
            if error.errno not in _NO_TMPFILE:
                raise
            mode = mode if named_mode is None else named_mode
            fd = os.open(temporary, access | os.O_CREAT | os.O_EXCL, mode, dir_fd=directory)
            is_named = True
            _lock(fd)
        return cls(directory, fd, temporary, is_named=is_named)

    @classmethod
    def part_of(cls, directory: int, name: str) -> Self:
        """Open or create the incomplete file of a name, part_name(), with which a later process can go on.

        OSError EBUSY if another process has it, EEXIST if it is not this user's own file.
        """
        temporary = part_name(name)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
        fd = os.open(temporary, flags, 0o666, dir_fd=directory)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_nlink != 1:
                raise OSError(errno.EEXIST, f"{temporary} is another user's file, or has other names")
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise OSError(errno.EBUSY, "another copy to this name is in progress") from None
            if not has_name(fd, temporary, directory):
                raise OSError(errno.EBUSY, "another copy to this name has just ended")
        except BaseException:
            os.close(fd)
            raise
        return cls(directory, fd, temporary, is_named=True)

    def keep_attributes_of(self, name: str) -> None:
        """Take what the file that this one will replace has, if there is one: see KeptAttributes."""
        try:
            attributes = KeptAttributes.of(f"{path_of(self._directory)}/{name}")
        except FileNotFoundError:
            return
        if stat.S_ISREG(attributes.status.st_mode):
            attributes.give_to(self.fd)

    def complete(self, name: str, *, replace: bool = True) -> None:
        """Give it its name in one step, in place of a file that has it. Without ``replace``: FileExistsError then."""
        if not self._is_named:
            try:
                self._link(name)
                return
            except FileExistsError:
                if not replace:
                    raise
                _lock(self.fd)
                self._link(self.temporary)
                self._is_named = True
        if not replace:
            self._link(name)
            self.discard()
            return
        os.rename(self.temporary, name, src_dir_fd=self._directory, dst_dir_fd=self._directory)
        self._is_named = False

    def _link(self, name: str) -> None:
        os.link(path_of(self.fd), name, dst_dir_fd=self._directory, follow_symlinks=True)

    def discard(self) -> None:
        """Remove the temporary name of an incomplete file."""
        if self._is_named:
            remove_name(self.fd, self.temporary, self._directory)
            self._is_named = False

    def close(self) -> None:
        """Close it, and discard it if it is incomplete. A second call does nothing."""
        if self.fd >= 0:
            self.discard()
            os.close(self.fd)
            self.fd = -1


def remove_leftovers(directory: int) -> None:
    """Remove the temporary names that processes have left in a directory when they died."""
    for name in os.listdir(directory):
        if not name.startswith(PREFIX):
            continue
        with suppress(OSError):  # locked by its writer, gone, or another user's
            with closed_after(
                os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
            ) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(name, dir_fd=directory)
