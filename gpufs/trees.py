"""Removes directories with all that is in them, whatever their depth is, and whatever others do there.

Nothing is looked up by path, no symbolic link is followed, and a level costs neither a descriptor nor a call of a
function: three descriptors are open, and memory has the names that are left of each level.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from typing import Final

from gpufs.syscalls import closed_after, open_beneath

_LISTED: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_NAMED: Final = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
# More is a user who makes directories faster than they are removed.
_MOST_LEVELS: Final = 100_000


def remove_tree(directory: int, name: str) -> None:
    """Remove a directory of an open one, if it is there, with all that is in it.

    OSError for the first name that cannot be removed, ENOTEMPTY or EBUSY if others add or move names at the same time.
    """
    with suppress(FileNotFoundError):
        with closed_after(open_beneath(directory, os.fsencode(name), _LISTED, cross_mounts=False)) as fd:
            remove_below(fd)
        os.rmdir(name, dir_fd=directory)


def remove_below(directory: int) -> None:
    """Remove all that a directory has, which is open for reading. OSError as remove_tree()."""
    # Each level above the present one: its status, the name of the next level in it, and the names that are left.
    above: list[tuple[os.stat_result, str, list[str]]] = []
    fd, names = os.dup(directory), os.listdir(directory)
    try:
        while names or above:
            if names:
                name = names.pop()
                try:
                    os.unlink(name, dir_fd=fd)
                except FileNotFoundError:
                    pass
                except IsADirectoryError:
                    if len(above) == _MOST_LEVELS:
                        raise OSError(errno.ENOTEMPTY, f"has more than {_MOST_LEVELS} levels of directories") from None
                    below = open_beneath(fd, os.fsencode(name), _LISTED, cross_mounts=False)
                    above.append((os.fstat(fd), name, names))
                    os.close(fd)
                    fd, names = below, os.listdir(below)
                continue
            status, name, names = above.pop()
            upper = os.open("..", _NAMED, dir_fd=fd)
            os.close(fd)
            fd = upper
            if not os.path.samestat(os.fstat(fd), status):
                raise OSError(errno.EBUSY, "another process has moved a directory that is being removed")
            with suppress(FileNotFoundError):
                os.rmdir(name, dir_fd=fd)
    finally:
        os.close(fd)
