"""Serves requests of clients to change limits."""

import os
from errno import EINVAL, ENOTDIR, EPERM, EXDEV
from stat import S_ISDIR

from gpufs.protocol import SetQuota
from gpufs.protocol.statx import identity
from gpufs.service._mount import ServedMount


def set_quota(mount: ServedMount, device: int, uid: int, message: SetQuota, descriptors: list[int]) -> None:
    """Changes a limit for a client of this user; ``device``: the st_dev of the mount. Only the trio thread calls it.

    OSError EPERM unless it is root or the mount's owner; EINVAL, ENOTDIR, EXDEV or EBUSY for a directory that cannot
    have this limit.
    """
    if uid not in (0, os.geteuid()):
        raise OSError(EPERM, "only root and the user who mounted may change limits")
    if len(descriptors) != 1:
        raise OSError(EINVAL, "a limit takes the descriptor of one directory")
    found = identity(descriptors[0])
    if found.device != device:
        raise OSError(EXDEV, "the directory is not on this mount")
    if not S_ISDIR(found.mode):
        raise OSError(ENOTDIR, os.strerror(ENOTDIR))
    if message.uid is None:
        mount.quotas.set_directory(found.ino, message.limit)
    else:
        mount.quotas.set_user(found.ino, message.uid, message.limit)
