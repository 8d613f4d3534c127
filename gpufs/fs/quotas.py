"""The limits of a mount: on the memory of each user's files on a device, and of the files below a directory."""

import os
from errno import EINVAL
from typing import Any

from gpufs.engine import NO_LIMIT, Mount
from gpufs.fs.requests import ROOT_INODE
from gpufs.syscalls import trusted


class Quotas:
    """Sets limits and reports them. Only the trio thread calls it."""

    def __init__(self, mount: Mount) -> None:
        self._mount = mount

    def set(self, ino: int, uid: int | None, limit: int) -> None:
        """Limits a user on the device of a directory, or on all with the root; ``uid`` None: all below a directory.

        ``limit``: bytes, NO_LIMIT or DEFAULT_LIMIT, which is none for directories. OSError EINVAL for a directory that
        cannot have this limit, EBUSY if one above or below it has a limit.
        """
        if uid is None:
            self._mount.limit_directory(ino, max(limit, NO_LIMIT))
            return
        for device in range(len(self._mount.engine.devices)) if ino == ROOT_INODE else [self._device(ino)]:
            self._mount.limit_user(device, uid, limit)

    def _device(self, ino: int) -> int:
        """The device whose directory this is. OSError EINVAL for another one."""
        path = self._mount.path(ino)
        device = self._mount.inode_get(ino).device if path is not None and b"/" not in path else -1
        if device < 0:
            raise OSError(EINVAL, "a user's limit is for a whole mount or for one device: name MOUNT or MOUNT/gpu0")
        return device

    def as_list(self, uid: int) -> list[dict[str, Any]]:
        """The limits, and what is used, that a user may see: root and the mount's owner all, others their own.

        For each: ``path`` from the mountpoint on, ``uid`` (None for a directory), ``used_bytes``, ``limit_bytes``
        (None without one).
        """
        everything = trusted(uid)
        limits = []
        for directory, device, number, used, limit in self._mount.quotas():
            owner, path = number, self._mount.engine.devices[device].info.directory
            if directory:
                owner = self._mount.inode_get(directory).uid
                path = os.fsdecode(self._mount.path(directory) or b"(removed)")
            if everything or owner == uid:
                entry = {"path": path, "uid": None if directory else number, "used_bytes": used}
                limits.append({**entry, "limit_bytes": None if limit == NO_LIMIT else limit})
        return limits
