"""Whether a copy fits into the file system of its destination, and the wait for memory that is being released."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Sequence
from typing import Final

from gpufs.client._cancellation import Cancellation
from gpufs.client._daemons import control_file
from gpufs.client._space import shortage
from gpufs.mounting import MountEntry, place_of
from gpufs.syscalls import os_error

# How long copies wait for memory: a file that has just been removed or closed frees its memory a moment later.
_WAIT_SECONDS: Final = 3.0
_RETRY_SECONDS: Final = 0.02


class SpaceCheck:
    """The check before copies, which wait for memory for a limited time in all: if many do not fit, only the first do.

    Any thread may call.
    """

    def __init__(self) -> None:
        self._seconds_left = _WAIT_SECONDS

    def check(
        self,
        fd: int,
        needed: int,
        mounts: Sequence[MountEntry],
        cancel: Cancellation | None,
        *,
        largest: int | None = None,
    ) -> None:
        """OSError ENOSPC, with the figures, if ``needed`` bytes do not fit where an open file or directory is.

        Waits for the memory of files that have just been removed. ``mounts``: the mounts of gpufs with this st_dev.
        ``largest``: of several files, the bytes of the largest one: a full device may park the others.
        """
        waited = False
        while text := shortage(fd, needed, mounts):
            if largest is not None and not shortage(fd, largest, mounts) and needed <= _free_with_parking(fd, mounts):
                return
            if self._seconds_left <= 0 or not mounts or _exceeds_all(fd, needed):
                raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {text}")
            if cancel is not None and cancel.cancelled:
                raise os_error(errno.ECANCELED)
            time.sleep(_RETRY_SECONDS)
            self._seconds_left -= _RETRY_SECONDS
            waited = True
        if waited:
            self._seconds_left = _WAIT_SECONDS


def data_bytes(status: os.stat_result, size: int) -> int:
    """The least space that a copy of a file needs, in bytes. Holes need none."""
    return min(size, status.st_blocks * 512) if stat.S_ISREG(status.st_mode) else size


def _free_with_parking(fd: int, mounts: Sequence[MountEntry]) -> int:
    """What several files can take together on a device that parks files when it is full (--evict); else 0."""
    place = place_of(fd, mounts)
    root = next((entry for entry in mounts if entry.root == "/"), None)
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


def _exceeds_all(fd: int, needed: int) -> bool:
    """Whether ``needed`` bytes are more than the file system of an open file has, so that waiting cannot help."""
    space = os.fstatvfs(fd)
    return needed > space.f_blocks * space.f_frsize
