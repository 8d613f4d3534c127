"""Whether something fits where an open file is, in words, and how much space there can be."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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


class Granules(NamedTuple):
    """How a device allocates memory: files of at most ``slot`` bytes take powers of two, others whole granules."""

    granule: int = 1
    slot: int = 0

    def held(self, size: int) -> int:
        """Return the memory that so many bytes of a file take, at least."""
        return 1 << (size - 1).bit_length() if 0 < size <= self.slot else -(-size // self.granule) * self.granule

    def held_by(self, sizes: Mapping[int, tuple[int, int]]) -> int:
        """Return the same for files of which only this is known: by the bits of their sizes their count and bytes."""
        return sum(max(total, count * self.held((1 << bits) // 2 + 1)) for bits, (count, total) in sizes.items())

    def __str__(self) -> str:
        above = f"above {bytes_text(self.slot)} " if self.slot else ""
        return f"files {above}take whole granules of {bytes_text(self.granule)}"


def granules_of(fd: int, mounts: Sequence[MountEntry]) -> Granules:
    """Return how files in an open directory take memory; in bytes where no device is, or the mount does not say."""
    found = _device_at(fd, mounts)
    return Granules() if found is None else Granules(found[1]["granule_bytes"], found[1]["slot_bytes"])


def free_with_parking(fd: int, mounts: Sequence[MountEntry]) -> int:
    """What several files can take together on a device that parks files when it is full (--evict); else 0."""
    found = _device_at(fd, mounts)
    space = os.fstatvfs(fd)
    # A limit of a directory is not the device's memory.
    if found is None or space.f_blocks * space.f_frsize < found[1]["total_bytes"]:
        return 0
    status, device = found
    if not status["knobs"].get("evict"):
        return 0
    return int(device["free_bytes"] + sum(each["free_bytes"] for each in status["devices"] if each["name"] == "host0"))


def _device_at(fd: int, mounts: Sequence[MountEntry]) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return a mount's status and of it the device where an open file is; None where there is none, or no answer."""
    root = root_of(mounts)
    if root is None:
        return None
    try:
        status = control_file(root, "status")
    except OSError:
        return None
    place = place_of(fd, mounts)
    return next(((status, device) for device in status["devices"] if device["name"] == place), None)


def exceeds_all(fd: int, needed: int) -> bool:
    """Whether ``needed`` bytes are more than the file system of an open file has, so that waiting cannot help."""
    space = os.fstatvfs(fd)
    return needed > space.f_blocks * space.f_frsize
