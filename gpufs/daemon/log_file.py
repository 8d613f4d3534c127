"""Opens a mount's log file, for the daemon and the guard."""

import os
import stat
from errno import EISDIR, EPERM
from typing import Final

from gpufs.safe_path import is_ours, located

_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY
_MODE: Final = 0o640


def open_log_file(path: str) -> int:
    """Return a descriptor for appending to the file at an absolute path, which is created if it is missing.

    The path may lead through directories of other users, but not through their symbolic links: those could lead root's
    daemon to any file. A regular file must belong to root or to this user, and below another user's directory it must
    have no second name. A FIFO that nobody reads is an error (ENXIO) and does not block. OSError, with one line.
    """
    with located(path, all_users=True) as place:
        if place.name == ".":
            raise OSError(EISDIR, os.strerror(EISDIR))
        fd = place.open(_FLAGS, _MODE)
        status = os.fstat(fd)
        if stat.S_ISREG(status.st_mode) and not place.follow:
            text = ""
            if not is_ours(status):
                text = f"belongs to user {status.st_uid}: remove it, or name another file"
            elif status.st_nlink > 1 and not is_ours(os.fstat(place.directory)):
                text = "has several names, and its directory belongs to another user"
            if text:
                os.close(fd)
                raise OSError(EPERM, text)
        return fd
