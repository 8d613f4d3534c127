"""What users ask of a mount apart from data: to change its limits, and to end leases."""

from __future__ import annotations

import errno
import os
from typing import Final

from gpufs import protocol
from gpufs.client import _daemons
from gpufs.syscalls import identity

MOST: Final = protocol.MAX_OFFSET
NO_LIMIT: Final = protocol.NO_LIMIT
DEFAULT_LIMIT: Final = protocol.DEFAULT_LIMIT


def set_quota(directory: str, uid: int | None, limit: int) -> None:
    """Limit what is below a directory, or with ``uid`` a user on its device; the mountpoint stands for all devices.

    ``limit``: bytes, NO_LIMIT (for users) or DEFAULT_LIMIT. OSError with the daemon's reason if it refuses, EXDEV
    outside of mounts.
    """
    _ask(directory, os.O_DIRECTORY, protocol.SetQuota(1, uid, limit))


def revoke(path: str) -> None:
    """End all leases on a file of a mount, so that it can be made smaller and replaced.

    The programs keep their mappings: docs/contract.md says what these show. OSError with the daemon's reason if it
    refuses, EXDEV outside of mounts.
    """
    _ask(path, 0, protocol.Revoke(1))


def _ask(path: str, flags: int, request: protocol.SetQuota | protocol.Revoke) -> None:
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC | flags)
    try:
        device = identity(fd).device
        mounts = _daemons.mounts_by_device().get(device)
        if mounts is None:
            raise OSError(errno.EXDEV, "is not on a gpufs mount", path)
        # It gets the descriptor of its own file and nothing else.
        with _daemons.connect(device, mounts, trusting=True) as daemon:
            daemon.request(request, (fd,))
    finally:
        os.close(fd)
