"""Whether a copy fits into the file system of its destination."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpufs.units import bytes_text

if TYPE_CHECKING:
    from gpufs.mounting import MountEntry


def data_bytes(status: os.stat_result, size: int) -> int:
    """The least space that a copy of a file needs, in bytes. Holes need none."""
    return min(size, status.st_blocks * 512) if stat.S_ISREG(status.st_mode) else size


def shortage(fd: int, needed: int, mounts: Sequence[MountEntry]) -> str:
    """Why ``needed`` bytes do not fit, with the figures; "" if they do, or if the space is not known.

    ``fd``: the file that they replace, whose own space they can use, or a directory, also opened with O_PATH.
    ``mounts``: the mounts of gpufs with this file's st_dev.
    """
    try:
        space = os.fstatvfs(fd)
    except OSError:  # ENOSYS by a FUSE file system without STATFS
        return ""
    status = os.fstat(fd)
    free = (space.f_bavail if mounts or os.geteuid() else space.f_bfree) * space.f_frsize  # root may use the reserve
    reusable = status.st_blocks * 512 if stat.S_ISREG(status.st_mode) else 0
    if not space.f_blocks or needed <= free + reusable:
        return ""
    place = place_of(fd, mounts)
    texts = [bytes_text(needed), bytes_text(free)]
    if texts[0] == texts[1]:
        texts = [f"{needed} bytes", f"{free} bytes"]
    return f"needs {texts[0]}, {texts[1]} free{f' on {place}' if place else ''}"


def exceeds_all(fd: int, needed: int) -> bool:
    """Whether ``needed`` bytes are more than the file system of an open file has, so that waiting cannot help."""
    space = os.fstatvfs(fd)
    return needed > space.f_blocks * space.f_frsize


def place_of(fd: int, mounts: Sequence[MountEntry]) -> str:
    """What holds an open file: a directory of the mount, such as gpu0, or the mountpoint of the host's file system.

    "" if that is not known.
    """
    path = os.readlink(f"/proc/self/fd/{fd}")
    for mount in mounts:
        if path.startswith(mount.mountpoint.rstrip("/") + "/"):
            inside = mount.root + "/" + path.removeprefix(mount.mountpoint)
            return next(filter(None, inside.split("/")), "")
    if mounts or not os.path.isabs(path):
        return ""
    while not os.path.ismount(path):
        path = os.path.dirname(path)
    return path
