"""The files of mounts at and below a path, and their memory, for commands that list or change them."""

import os
import resource
import stat
from collections.abc import Iterator
from errno import ENODATA
from typing import NamedTuple

from gpufs import mounting, safe_path
from gpufs.cli._output import complain
from gpufs.drivers import DEVICE_DIRECTORIES
from gpufs.syscalls import close_all, path_of


class Found(NamedTuple):
    """A file or directory of a walk, and the directory that has it, which is open until the next one is found."""

    path: str  # for messages
    status: os.stat_result
    directory: int
    name: str

    @property
    def place(self) -> str:
        """A path that leads to this name alone, whatever others do to the directories above it."""
        return f"{path_of(self.directory)}/{self.name}"


def files_of(root: str, *, recursive: bool) -> Iterator[Found]:
    """Yield the regular files at or in a directory, and with ``recursive`` below it, in the order of their names.

    Without ``recursive`` also the directories in it. In a mount's root, only the device directories count.
    """
    roots = {entry.mountpoint for entry in mounting.mounts() if entry.root == "/"}
    left: list[tuple[int, str, Iterator[str]]] = []  # the directories that are open, and their names to come
    try:
        with safe_path.located(root) as place:
            status = os.stat(place.name, dir_fd=place.directory, follow_symlinks=False)
            if stat.S_ISREG(status.st_mode):
                yield Found(root, status, place.directory, place.name)
            if stat.S_ISDIR(status.st_mode):
                left.append(_listed(root, place.name, place.directory))
    except OSError as error:
        _not_listed(root, error)
    device = status.st_dev if left else 0  # what is mounted below is not listed
    try:
        while left:
            fd, folder, names = left[-1]
            for name in names:
                path = os.path.join(folder, name)
                try:
                    status = os.stat(name, dir_fd=fd, follow_symlinks=False)
                except OSError:  # removed by now
                    continue
                is_directory = stat.S_ISDIR(status.st_mode)
                goes_on = is_directory and recursive and status.st_dev == device
                if folder in roots:
                    goes_on = is_directory and name.startswith(DEVICE_DIRECTORIES)
                elif stat.S_ISREG(status.st_mode) or (is_directory and not recursive):
                    yield Found(path, status, fd, name)
                if goes_on:
                    try:
                        left.append(_listed(path, name, fd))
                        break
                    except OSError as error:
                        _not_listed(path, error)
            else:
                os.close(left.pop()[0])
    finally:
        close_all(fd for fd, _, _ in left)


def _listed(path: str, name: str, directory: int) -> tuple[int, str, Iterator[str]]:
    fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    try:
        return fd, path, iter(sorted(os.listdir(fd)))
    except OSError:
        os.close(fd)
        raise


def _not_listed(path: str, error: OSError) -> None:
    complain(f"{path}: {error.strerror}")


def raise_descriptor_limit() -> None:
    """Let this process have as many open files as the system allows it: a directory that is copied is open."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


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
