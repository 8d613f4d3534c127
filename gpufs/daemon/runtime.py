"""The directory that holds a daemon's socket and counters while it runs."""

import errno
import logging
import os
import stat
import tempfile
from pathlib import Path
from typing import Final

from gpufs import mounting, statistics
from gpufs.daemon.startup import StartFailure

log = logging.getLogger("gpufs.daemon")

# Bytes of a directory's path: the kernel takes 107 of a socket's, and its name in the directory has up to 32.
_LONGEST: Final = 107 - 32


def runtime_directory(*, allow_other: bool) -> str:
    """Return the directory of this user's sockets, created if necessary. StartFailure if no place for it is usable.

    With ``allow_other`` everybody may search it, because other users must find the socket. Root's is below /run; the
    other places serve containers without /run and the root of a user namespace. In /tmp another user may have taken the
    usual name: it gets a random ending then.
    """
    uid = os.geteuid()
    parent = os.environ.get("XDG_RUNTIME_DIR")
    places = ["/run/gpufs"] if uid == 0 else []
    if parent and not allow_other and os.path.isdir(parent) and os.stat(parent).st_uid == uid:
        place = os.path.join(parent, "gpufs")
        if len(os.fsencode(place)) <= _LONGEST:
            places.append(place)
    usual, *others = map(str, statistics.temporary_folders(uid))
    mode = 0o711 if allow_other or uid == 0 else 0o700
    problems = []
    for path in (*places, usual, *others, None):
        try:
            if path is None:
                path = tempfile.mkdtemp(prefix=f"{os.path.basename(usual)}-", dir=os.path.dirname(usual))
            _own_directory(path, mode, chmod=allow_other or uid == 0)
        except OSError as failure:
            problems.append(failure)
        else:
            return path
    raise StartFailure(
        problems[0].errno or errno.EIO, "; ".join(f"{failure.filename}: {failure.strerror}" for failure in problems)
    )


def _own_directory(path: str, mode: int, *, chmod: bool) -> None:
    """Create a directory, or accept one that this user owns. OSError, with its name, if neither is possible."""
    try:
        os.mkdir(path, mode)
    except FileExistsError:
        pass
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise OSError(errno.EPERM, "belongs to another user: remove it or set XDG_RUNTIME_DIR", path)
    if stat.S_IMODE(status.st_mode) & 0o777 != mode and chmod:
        os.chmod(path, mode)


class CountersFile:
    """The file with the mount's counters. A killed daemon leaves it; every other end removes it.

    The engine creates it before the mount exists after which it is named.
    """

    def __init__(self, folder: str, mountpoint: str) -> None:
        self._folder = folder
        self.path = os.path.join(folder, statistics.file_name(os.getpid(), "new"))
        statistics.sweep(Path(folder), [entry.device for entry in mounting.mounts()], mountpoint)

    def belongs_to(self, device: str) -> None:
        """Rename it after the mount's device number, "major:minor"."""
        path = os.path.join(self._folder, statistics.file_name(os.getpid(), device))
        try:
            os.rename(self.path, path)
        except OSError as failure:
            log.warning("other programs cannot read the counters: %s: %s", path, failure.strerror)
        else:
            self.path = path

    def remove(self) -> None:
        """Remove it if it exists."""
        try:
            os.unlink(self.path)
        except OSError:
            pass  # it was never created
