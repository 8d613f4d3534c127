"""Changes the limits of a mount."""

from __future__ import annotations

import errno
import os
from typing import Final

from gpufs import protocol
from gpufs.client import _daemons
from gpufs.protocol.statx import identity

MOST: Final = protocol.MAX_OFFSET
NO_LIMIT: Final = protocol.NO_LIMIT
DEFAULT_LIMIT: Final = protocol.DEFAULT_LIMIT


def set_quota(directory: str, uid: int | None, limit: int) -> None:
    """Limits what is below a directory, or with ``uid`` a user on its device; the mountpoint stands for all devices.

    ``limit``: bytes, NO_LIMIT (for users) or DEFAULT_LIMIT. OSError with the daemon's reason if it refuses, EXDEV
    outside of mounts.
    """
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        device = identity(fd).device
        mounts = _daemons.mounts_by_device().get(device)
        if mounts is None:
            raise OSError(errno.EXDEV, "is not on a gpufs mount", directory)
        # It gets the descriptor of its own directory and nothing else.
        with _daemons.connect(device, mounts, trusting=True) as daemon:
            daemon.request(protocol.SetQuota(1, uid, limit), (fd,))
    finally:
        os.close(fd)
