"""Whether something fits where an open file is, in words."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence

from gpufs.mounting import MountEntry, place_of
from gpufs.units import bytes_text


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
    limit = " within a directory's limit" if _has_limit(space, place, mounts) else ""
    return f"needs {texts[0]}, {texts[1]} free{limit}{f' on {place}' if place else ''}"


def _has_limit(space: os.statvfs_result, place: str, mounts: Sequence[MountEntry]) -> bool:
    """Whether ``space`` is that of a directory with a limit: it has less than its device."""
    root = next((entry for entry in mounts if entry.root == "/"), None)
    try:
        return root is not None and space.f_blocks < os.statvfs(os.path.join(root.mountpoint, place)).f_blocks
    except OSError:
        return False
