"""Files of counters in the runtime directories of users: finding, reading and removing them.

Every function may meet files that another user has made: nothing is read that is too large or not the right user's.
"""

import fcntl
import os
import re
import stat
import struct
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from errno import EINVAL, ENOENT, EPERM
from pathlib import Path
from typing import Any, Final

from gpufs.statistics._format import MAGIC, StatisticsError, parse
from gpufs.syscalls import closed_after

_SUFFIX: Final = ".stats"
_LARGEST: Final = 32 << 20
_MOST_FILES: Final = 8  # of one mount
_KEPT_SECONDS: Final = 3600.0  # of the last counters of a mount whose process died
_KEPT_FILES: Final = 64
_F_OFD_GETLK: Final = 36
_NO_EFFECTS: Final = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def file_name(pid: int, device: str) -> str:
    """Return the name of the file of a mount with this device number ("0:52"), which this process serves."""
    return f"{pid}{_ending(device)}"


def _ending(device: str) -> str:
    return f"-{device.replace(':', '-')}{_SUFFIX}"


def device_of(name: str) -> str | None:
    """Return the device number in a file_name(), also of a file that the kernel marks as deleted; None for others."""
    match = re.fullmatch(r"\d+-(\d+)-(\d+)" + re.escape(_SUFFIX) + r"(?: \(deleted\))?", name)
    return f"{match[1]}:{match[2]}" if match else None


def folders(uid: int) -> list[Path]:
    """Return the directories in which the files of a user's mounts may be."""
    if uid == 0:
        return [Path("/run/gpufs"), *temporary_folders(uid)]
    places = [Path(f"/run/user/{uid}/gpufs"), *temporary_folders(uid)]
    own = os.environ.get("XDG_RUNTIME_DIR")
    if own and Path(own) / "gpufs" not in places:
        places.insert(0, Path(own) / "gpufs")
    return places


def temporary_folders(uid: int) -> list[Path]:
    """Return a user's directories below /tmp. The first may be missing, or another user may have taken its name."""
    usual = f"gpufs-{_outer(uid)}"
    others = []
    with suppress(OSError), os.scandir("/tmp") as entries:
        for entry in entries:
            if entry.name.startswith(f"{usual}-") and entry.is_dir(follow_symlinks=False):
                with suppress(OSError):
                    if entry.stat(follow_symlinks=False).st_uid == uid:
                        others.append(Path(entry.path))
    return [Path("/tmp") / usual, *sorted(others)]


def _outer(uid: int) -> int:
    """Return a user's number outside of this user namespace: unique in /tmp, which namespaces share."""
    with suppress(OSError):
        with open("/proc/self/uid_map", encoding="ascii") as file:
            for line in file:
                inside, outside, count = map(int, line.split())
                if inside <= uid < inside + count:
                    return outside + uid - inside
    return uid


def find(device: str, uid: int, places: Iterable[Path] | None = None) -> list[Path]:
    """Return the files of the mount with this device number that are the user's own, the newest first."""
    dated = []
    for folder in folders(uid) if places is None else places:
        for path in _listed(folder, _ending(device)):
            with suppress(OSError):
                status = path.lstat()
                if status.st_uid == uid and stat.S_ISREG(status.st_mode):
                    dated.append((status.st_mtime_ns, path))
    return [path for _, path in sorted(dated, reverse=True)]


def _listed(folder: Path, ending: str = _SUFFIX) -> list[Path]:
    with suppress(OSError):
        return [folder / name for name in os.listdir(folder) if name.endswith(ending)]
    return []


def _readable(paths: Iterable[Path], uid: int) -> Iterator[dict[str, Any]]:
    """Yield the counters in those of the files that are the user's own and can be read."""
    for path in paths:
        with suppress(OSError, StatisticsError):
            yield read(path, uid)


def _is_locked(fd: int) -> bool:
    """Return whether a process holds the writer's lock on a file that is open for reading."""
    wanted = struct.pack("hhlli", fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
    (kind,) = struct.unpack_from("h", fcntl.fcntl(fd, _F_OFD_GETLK, wanted))
    return bool(kind != fcntl.F_UNLCK)


def read(path: Path, uid: int | None = None) -> dict[str, Any]:
    """Read the counters in a file.

    Parameters
    ----------
    path
        The file.
    uid
        The user whose file it must be; by default any.

    Returns
    -------
    dict
        As `parse` returns it.

    Raises
    ------
    OSError
        The file cannot be read, is not a regular file, or is not the user's.
    StatisticsError
        The file does not contain counters, or is damaged.
    """
    with open(path, "rb", buffering=0, opener=lambda name, flags: os.open(name, flags | _NO_EFFECTS)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(EINVAL, "not a regular file", str(path))
        if uid is not None and status.st_uid != uid:
            raise OSError(EPERM, "the file of another user", str(path))
        if status.st_size > _LARGEST:
            raise StatisticsError(f"{path}: too large for a file of counters")
        alive = _is_locked(file.fileno())
        return parse(file.read(status.st_size), alive=alive)


def read_mount(device: str, uid: int, mountpoint: str) -> dict[str, Any]:
    """Read the counters of a user's mount.

    Parameters
    ----------
    device
        The mount's device number.
    uid
        The user who made it.
    mountpoint
        Where it is. A dead process of another place may have served a mount with the same number before.

    Raises
    ------
    FileNotFoundError
        There are none that can be read.
    """
    newest: dict[str, Any] | None = None
    for folder in folders(uid):  # the last is below /tmp, where another user may have made it
        for counters in _readable(find(device, uid, [folder])[:_MOST_FILES], uid):
            if counters["alive"]:
                return counters
            if counters["mountpoint"] == mountpoint:
                newest = newest or counters
    if newest is None:
        raise FileNotFoundError(ENOENT, os.strerror(ENOENT))
    return newest


def read_left_behind(mountpoint: str, uid: int) -> dict[str, Any]:
    """Read the last counters of a user's mount at this path whose process died and that is gone.

    They stay until the user's next mount there, or for an hour. FileNotFoundError without them.
    """
    paths = [path for folder in folders(uid) for path in _listed(folder)]
    dead = [
        counters for counters in _readable(paths, uid) if not counters["alive"] and counters["mountpoint"] == mountpoint
    ]
    if not dead:
        raise FileNotFoundError(ENOENT, os.strerror(ENOENT))
    return max(dead, key=lambda counters: counters["updated"])


def remove_dead(device: str, uid: int) -> None:
    """Remove the counters that dead processes left of a mount with this device number."""
    for path in find(device, uid):
        _remove_if_dead(path)


def sweep(folder: Path, devices: Iterable[str], mountpoint: str = "") -> None:
    """Remove what dead processes left in a folder.

    Parameters
    ----------
    folder
        A runtime directory.
    devices
        Device numbers of mounts whose counters stay.
    mountpoint
        Where the caller mounts. The last counters of mounts at other places stay for an hour, so that a user who wants
        to know why a mount died does not lose them to another mount.
    """
    keep = tuple(map(_ending, devices))
    kept: list[tuple[float, Path]] = []
    for path in _listed(folder):
        if path.name.endswith(keep):
            continue
        try:
            counters = read(path, os.getuid())
            elsewhere = counters["mountpoint"] not in (None, mountpoint)
            if not counters["alive"] and elsewhere and time.time() - counters["updated"] < _KEPT_SECONDS:
                kept.append((counters["updated"], path))
                continue
        except OSError:
            continue
        except StatisticsError:
            pass  # of another version, perhaps
        _remove_if_dead(path)
    for _, path in sorted(kept, reverse=True)[_KEPT_FILES:]:
        _remove_if_dead(path)


def _remove_if_dead(path: Path) -> None:
    # Its user can put a link in place of the folder at any moment.
    with suppress(OSError), closed_after(os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)) as folder:
        with closed_after(os.open(path.name, _NO_EFFECTS, dir_fd=folder)) as file:
            # A file whose first bytes are not there yet is of a process that is just making it.
            if os.read(file, len(MAGIC)) == MAGIC and not _is_locked(file):
                os.unlink(path.name, dir_fd=folder)
