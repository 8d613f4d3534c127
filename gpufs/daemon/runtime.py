"""The directory in which a daemon has its socket and its counters while it runs."""

import errno
import logging
import os
import stat
from pathlib import Path

from gpufs import mounting, statistics
from gpufs.daemon.startup import StartFailure

log = logging.getLogger("gpufs.daemon")


def runtime_directory(*, allow_other: bool) -> str:
    """Where this user's sockets are, made if need be. StartFailure where no place for it can be had.

    Everybody may pass through it with ``allow_other``, since the socket then has to be found by others. Root's is below
    /run; the others are for containers without it, and for who is root in a user namespace alone.
    """
    uid = os.geteuid()
    parent = os.environ.get("XDG_RUNTIME_DIR")
    places = ["/run/gpufs"] if uid == 0 else []
    if parent and not allow_other and os.path.isdir(parent) and os.stat(parent).st_uid == uid:
        places.append(os.path.join(parent, "gpufs"))
    places.append(str(statistics.folders(uid)[-1]))
    mode = 0o711 if allow_other or uid == 0 else 0o700
    problems = []
    for path in places:
        try:
            _own_directory(path, mode, chmod=allow_other or uid == 0)
        except OSError as failure:
            problems.append(failure)
        else:
            return path
    raise StartFailure(
        problems[0].errno or errno.EIO, "; ".join(f"{failure.filename}: {failure.strerror}" for failure in problems)
    )


def _own_directory(path: str, mode: int, *, chmod: bool) -> None:
    """Makes a directory, or finds one of this user's there. OSError with its name where neither can be."""
    try:
        os.mkdir(path, mode)
    except FileExistsError:
        pass
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise OSError(errno.EPERM, "belongs to somebody else: remove it or set XDG_RUNTIME_DIR", path)
    if stat.S_IMODE(found.st_mode) & 0o777 != mode and chmod:
        os.chmod(path, mode)


class CountersFile:
    """The file that the mount's counters live in. Left behind by a process that is killed, removed at every other end.

    The engine makes it before there is a mount to name it after.
    """

    def __init__(self, folder: str, mountpoint: str) -> None:
        self._folder = folder
        self.path = os.path.join(folder, statistics.file_name(os.getpid(), "new"))
        statistics.sweep(Path(folder), [entry.device for entry in mounting.mounts()], mountpoint)

    def belongs_to(self, device: str) -> None:
        """The mount has this device number, "major:minor"."""
        path = os.path.join(self._folder, statistics.file_name(os.getpid(), device))
        try:
            os.rename(self.path, path)
        except OSError as failure:
            log.warning("the counters cannot be read from outside: %s: %s", path, failure.strerror)
        else:
            self.path = path

    def remove(self) -> None:
        """Takes it away, if it is there."""
        try:
            os.unlink(self.path)
        except OSError:
            pass  # never made
