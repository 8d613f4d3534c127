"""Opens paths that lead through directories of other users, without their symbolic links.

Whoever may write to a directory can put a link into it at any moment, so a path is followed name by name, and each
descriptor is what was checked.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from errno import ELOOP, ENOENT
from typing import Final, NamedTuple

from gpufs.syscalls import open_directory, path_of

_FOLLOWED: Final = os.O_PATH | os.O_CLOEXEC
_MOST_LINKS: Final = 40


class Place(NamedTuple):
    """The last name of a path, and the directory that has it, open with O_PATH.

    ``follow``: it is a link of the kernel, such as /proc/self/fd/2, which only the kernel can follow. Otherwise it was
    no link, and is opened as none.
    """

    directory: int
    name: str
    follow: bool = False

    @property
    def path(self) -> str:
        """Its path without symbolic links."""
        if self.follow:
            return os.readlink(self.name, dir_fd=self.directory)
        folder = os.readlink(path_of(self.directory))
        return folder if self.name == "." else os.path.join(folder, self.name)

    def open(self, flags: int, mode: int = 0o777) -> int:
        flags |= os.O_CLOEXEC | (0 if self.follow else os.O_NOFOLLOW)
        return os.open(self.name, flags, mode, dir_fd=self.directory)


def is_ours(status: os.stat_result) -> bool:
    """Return whether a file belongs to this user or to root, also to root outside of a user namespace."""
    return status.st_uid in (0, os.geteuid(), os.stat("/").st_uid)


@contextmanager
def located(path: str, *, all_users: bool = False) -> Iterator[Place]:
    """Find the place of a path, whose last name need not exist. OSError ELOOP for another user's symbolic link.

    That is for root, whose rights the other user would borrow, unless ``all_users``.
    """
    try:
        place = _find(path, checks=all_users or os.geteuid() == 0)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None
    try:
        yield place
    finally:
        os.close(place.directory)


def _find(path: str, *, checks: bool) -> Place:
    if not path:
        raise OSError(ENOENT, os.strerror(ENOENT))
    names = path.split("/")[::-1]  # what is left of the path, its next name last
    kernels = os.stat("/proc/self").st_dev
    folder = os.open("/" if path.startswith("/") else ".", _FOLLOWED | os.O_DIRECTORY)
    links = 0
    try:
        while True:
            name = names.pop() or "."
            if not names and name == "..":
                names = ["."]
            try:
                step = os.open(name, _FOLLOWED | os.O_NOFOLLOW, dir_fd=folder)
            except FileNotFoundError:
                if names:
                    raise
                return Place(folder, name)
            status = os.fstat(step)
            if stat.S_ISLNK(status.st_mode):
                links += 1
                target = os.readlink("", dir_fd=step).split("/")
                os.close(step)
                if links > _MOST_LINKS or (checks and not is_ours(status)):
                    raise OSError(ELOOP, f"leads through the symbolic link {name} of user {status.st_uid}")
                if status.st_dev != kernels:
                    names += target[::-1]
                    step = os.dup(folder) if target[0] else os.open("/", _FOLLOWED)
                elif names:
                    step = os.open(name, _FOLLOWED, dir_fd=folder)
                else:
                    return Place(folder, name, follow=True)
            else:
                os.close(step)
                if not names:
                    return Place(folder, name)
                step = open_directory(folder, os.fsencode(name))
            os.close(folder)
            folder = step
    except BaseException:
        os.close(folder)
        raise


def open_path(path: str, flags: int, mode: int = 0o777) -> int:
    """As os.open(), for root without other users' symbolic links."""
    with located(path) as place:
        try:
            return place.open(flags, mode)
        except OSError as error:
            raise OSError(error.errno, error.strerror, path) from None


def real(path: str) -> str:
    """As os.path.realpath(), for root without other users' symbolic links. Only the last name need not exist."""
    with located(path) as place:
        return place.path
