"""Ends the leases that other programs have on a file."""

from __future__ import annotations

import errno
import os

from gpufs import protocol
from gpufs.client import _daemons
from gpufs.protocol.statx import identity


def revoke(path: str) -> None:
    """Ends all leases on a file of a mount, so that it can be made smaller and replaced.

    The programs keep their mappings: docs/contract.md says what these show. OSError with the daemon's reason if it
    refuses, EXDEV outside of mounts.
    """
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        device = identity(fd).device
        mounts = _daemons.mounts_by_device().get(device)
        if mounts is None:
            raise OSError(errno.EXDEV, "is not on a gpufs mount", path)
        # It gets the descriptor of its own file and nothing else.
        with _daemons.connect(device, mounts, trusting=True) as daemon:
            daemon.request(protocol.Revoke(1), (fd,))
    finally:
        os.close(fd)
