"""Whether something fits where an open file is, in words, and how much space there can be."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence

from gpufs.client._daemons import control_file
from gpufs.mounting import MountEntry, place_of, root_of
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
    root = root_of(mounts)
    try:
        return root is not None and space.f_blocks < os.statvfs(os.path.join(root.mountpoint, place)).f_blocks
    except OSError:
        return False


def free_with_parking(fd: int, mounts: Sequence[MountEntry]) -> int:
    """What several files can take together on a device that parks files when it is full (--evict); else 0."""
    place = place_of(fd, mounts)
    root = root_of(mounts)
    if root is None:
        return 0
    try:
        status = control_file(root, "status")
    except OSError:
        return 0
    devices = {device["name"]: device for device in status["devices"]}
    space = os.fstatvfs(fd)
    # A limit of a directory is not the device's memory.
    if place not in devices or space.f_blocks * space.f_frsize < devices[place]["total_bytes"]:
        return 0
    if not status["knobs"].get("evict"):
        return 0
    return int(devices[place]["free_bytes"] + devices["host0"]["free_bytes"])


def exceeds_all(fd: int, needed: int) -> bool:
    """Whether ``needed`` bytes are more than the file system of an open file has, so that waiting cannot help."""
    space = os.fstatvfs(fd)
    return needed > space.f_blocks * space.f_frsize
