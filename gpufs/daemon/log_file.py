"""Opens a mount's log file. Imports nothing of gpufs: the guard uses it, too."""

import os
import stat
from collections.abc import Collection
from errno import EISDIR, ELOOP, EPERM
from typing import Final

_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_MODE: Final = 0o640
_MOST_LINKS: Final = 40


def open_log_file(path: str) -> int:
    """Return a descriptor for appending to the file at an absolute path, which is created if it is missing.

    The path may lead through directories of other users, but not through their symbolic links: those could lead root's
    daemon to any file. A regular file must belong to root or to this user, and below another user's directory it must
    have no second name. A FIFO that nobody reads is an error (ENXIO) and does not block. OSError, with one line.
    """
    names = path.split("/")[::-1]  # what is left of the path, its next name last
    folder = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    ours = (0, os.geteuid(), os.fstat(folder).st_uid)  # the last: root outside of a user namespace
    kernels = os.stat("/proc/self").st_dev
    links = 0
    try:
        while True:
            name = names.pop()
            if name in ("", "."):
                if not names:
                    raise OSError(EISDIR, os.strerror(EISDIR))
                continue
            if not names:
                try:
                    return _checked(os.open(name, _FLAGS | os.O_NOFOLLOW, _MODE, dir_fd=folder), folder, ours)
                except OSError as failure:
                    if failure.errno != ELOOP:
                        raise
            step = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            status = os.fstat(step)
            if not stat.S_ISLNK(status.st_mode):
                os.close(folder)
                folder = step
                continue
            try:
                target = os.readlink("", dir_fd=step)
            finally:
                os.close(step)
            links += 1
            if status.st_uid not in ours or links > _MOST_LINKS:
                raise OSError(ELOOP, f"leads through the symbolic link {name} of user {status.st_uid}")
            if status.st_dev == kernels:  # such as /proc/self/fd/2, which only the kernel can follow
                if not names:
                    return os.open(name, _FLAGS, _MODE, dir_fd=folder)
                target = ""
                followed = os.open(name, os.O_PATH | os.O_CLOEXEC, dir_fd=folder)
            elif target.startswith("/"):
                followed = os.open("/", os.O_PATH | os.O_CLOEXEC)
            else:
                followed = os.dup(folder)
            os.close(folder)
            folder = followed
            names += target.split("/")[::-1]
    finally:
        os.close(folder)


def _checked(fd: int, folder: int, ours: Collection[int]) -> int:
    status = os.fstat(fd)
    if stat.S_ISREG(status.st_mode):
        if status.st_uid not in ours:
            os.close(fd)
            raise OSError(EPERM, f"belongs to user {status.st_uid}: remove it, or name another file")
        if status.st_nlink > 1 and os.fstat(folder).st_uid not in ours:
            os.close(fd)
            raise OSError(EPERM, "has several names, and its directory belongs to another user")
    return fd
