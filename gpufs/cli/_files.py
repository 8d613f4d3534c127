"""The files of mounts at and below a path, and their memory, for commands that list or change them."""

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from errno import ENODATA

from gpufs import mounting
from gpufs.cli._output import complain
from gpufs.drivers import DEVICE_DIRECTORIES


def files_of(root: str, *, recursive: bool) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the regular files at or in a directory, and with ``recursive`` below it, in the order of their names.

    Without ``recursive`` also the directories in it. In a mount's root, only the device directories count.
    """
    try:
        status = os.lstat(root)
    except OSError as error:
        _not_listed(error)
        return
    if not stat.S_ISDIR(status.st_mode):
        if stat.S_ISREG(status.st_mode):
            yield root, status
        return
    roots = {entry.mountpoint for entry in mounting.mounts() if entry.root == "/"}
    device = status.st_dev  # what is mounted below is not listed
    left = [root]  # a stack: directories may be nested more deeply than functions may
    while left:
        folder = left.pop()
        below = []
        try:
            names = sorted(os.listdir(folder))
        except OSError as error:
            _not_listed(error)
            continue
        for name in names:
            path = os.path.join(folder, name)
            with suppress(OSError):  # removed by now
                status = os.lstat(path)
                is_directory = stat.S_ISDIR(status.st_mode)
                if folder in roots:
                    if is_directory and name.startswith(DEVICE_DIRECTORIES):
                        below.append(path)
                    continue
                if stat.S_ISREG(status.st_mode) or (is_directory and not recursive):
                    yield path, status
                if is_directory and recursive and status.st_dev == device:
                    below.append(path)
        left += reversed(below)


def _not_listed(error: OSError) -> None:
    complain(f"{os.fsdecode(error.filename)}: {error.strerror}")


def held_bytes(status: os.stat_result) -> int:
    """The memory of a file, wherever it is."""
    return status.st_blocks * 512


def parked_bytes(path: str, *, follow: bool = True) -> int | None:
    """How much of a file's memory is in the host's memory. None: this user may not read the file.

    OSError ENODATA for files of the mount that have no memory, such as those of the host and of gpufs itself.
    """
    try:
        return int(os.getxattr(path, "user.gpufs.parked_bytes", follow_symlinks=follow))
    except PermissionError:
        return None
    except OSError as error:
        if error.errno != ENODATA:
            raise
        raise OSError(ENODATA, "is not in a device's memory") from None
