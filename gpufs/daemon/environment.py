"""The surroundings of the daemon's process: its limits, the directory of its socket, the service manager."""

import errno
import functools
import logging
import os
import resource
import socket
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

from gpufs import config, mounting, statistics, threads
from gpufs.daemon.startup import StartFailure

log = logging.getLogger("gpufs.daemon")

# Descriptors that root's daemon raises its limit to, if the kernel allows that many.
_DESCRIPTORS: Final = 1 << 20
# On the scale from -1000 (never killed) to 1000 this has everything else that takes memory killed first.
_OOM_SCORE: Final = -900
# Bytes of a directory's path: the kernel takes 107 of a socket's, and below the directory it has up to 32.
_LONGEST: Final = 107 - 32
_SEND_SECONDS: Final = 5.0  # for a service manager whose queue is full


def set_limits(*, core_dumps: bool) -> None:
    """Raise the limits on descriptors and file sizes, and forbid core files unless they are wanted.

    The host driver's devices are files, and the kernel applies each client's own limit on file sizes. Core files never
    contain device memory or pinned memory: those mappings are excluded.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        largest = max(most, min(int(Path("/proc/sys/fs/nr_open").read_text()), _DESCRIPTORS))
        resource.setrlimit(resource.RLIMIT_NOFILE, (largest, largest))
    except (OSError, ValueError):  # without CAP_SYS_RESOURCE
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    except (ValueError, PermissionError):  # without CAP_SYS_RESOURCE
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (most if core_dumps else 0, most))


def spare_from_oom_killer(root: Path = Path("/")) -> None:
    """Make the kernel kill other processes first when memory is short, and so for processes that are started later.

    For root's mounts alone: many programs depend on them. In a cgroup with a limit the order of its processes is left
    to whoever has set the limit. ``root`` contains /proc and /sys.
    """
    if os.geteuid() != 0 or config.is_memory_limited(root):
        return
    score = root / "proc/self/oom_score_adj"
    try:
        if int(score.read_text()) > _OOM_SCORE:
            score.write_text(str(_OOM_SCORE))
    except OSError as failure:  # without CAP_SYS_RESOURCE
        log.info("oom_score_adj stays as it is: %s", failure.strerror)


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
    with suppress(FileExistsError):
        os.mkdir(path, mode)
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
        with suppress(OSError):  # the engine has not created the file
            os.unlink(self.path)


class ServiceManager:
    """sd_notify(3): datagrams to the socket that NOTIFY_SOCKET names; does nothing without one."""

    def __init__(self) -> None:
        # The programs that we start must not see them.
        self._address = os.environ.pop("NOTIFY_SOCKET", "")
        interval = os.environ.pop("WATCHDOG_USEC", "")
        for_us = os.environ.pop("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self.watchdog_seconds = int(interval) / 1e6 if interval.isdecimal() and for_us else 0.0

    async def notify(self, text: str) -> None:
        """Send assignments, one a line: "READY=1", "STOPPING=1"; "WATCHDOG=1" every ``watchdog_seconds`` if not 0.

        Raises nothing: a failure is logged.
        """
        if self._address:
            # On a thread: a service manager that does not read must not stop the mount.
            with suppress(OSError):  # no thread is free
                # The text must be UTF-8, and the name of a mountpoint need not be.
                data = text.encode(errors="replace")
                await threads.run(functools.partial(self._send, data), abandon_on_cancel=True)

    def _send(self, text: bytes) -> None:
        name = os.fsencode("\0" + self._address[1:] if self._address.startswith("@") else self._address)
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.settimeout(_SEND_SECONDS)
                sender.connect(name)
                sender.send(text)
        except Exception as failure:  # noqa: BLE001 - the mount does not depend on it
            log.warning("cannot notify the service manager at %s: %s", self._address, failure)
