"""The limits of a mount: on the memory of each user's files on a device, and of the files below a directory."""

import os
from errno import EBUSY, EINVAL
from typing import Any

from gpufs.engine import NO_LIMIT, Mount
from gpufs.fs.nodes import Directory, Node
from gpufs.fs.tree import Tree


class Quotas:
    """Sets limits and reports them. Only the trio thread calls it."""

    def __init__(self, tree: Tree, table: Mount) -> None:
        self._tree = tree
        self._table = table

    def set(self, ino: int, uid: int | None, limit: int) -> None:
        """Limits a user on the device of a directory, or on all with the root; ``uid`` None: all below a directory.

        ``limit``: bytes, NO_LIMIT or DEFAULT_LIMIT, which is none for directories. OSError EINVAL for a directory that
        cannot have this limit, EBUSY if one above or below it has a limit.
        """
        tree = self._tree
        directory = tree.nodes.get(ino)
        if uid is not None:
            for device in range(len(tree.files)) if directory is tree.root else [self._device(directory)]:
                self._table.limit_user(device, uid, limit)
            return
        if not isinstance(directory, Directory) or directory.device < 0 or directory.closed:
            raise OSError(EINVAL, "only directories on a device, MOUNT/gpu0 and below, can have a limit")
        try:
            tree.limit(directory, max(limit, NO_LIMIT))
        except OSError as error:
            if error.errno != EBUSY:
                raise
            raise OSError(EBUSY, "a directory above or below it has a limit, and limits cannot be nested") from None

    def _device(self, directory: Node | None) -> int:
        """The device whose directory this is. OSError EINVAL for another one."""
        if directory is None or directory.parent is not self._tree.root or directory.device < 0:
            raise OSError(EINVAL, "a user's limit is for a whole mount or for one device: name MOUNT or MOUNT/gpu0")
        return directory.device

    def as_list(self, uid: int) -> list[dict[str, Any]]:
        """The limits, and what is used, that a user may see: root and the mount's owner all, others their own.

        For each: ``path`` from the mountpoint on, ``uid`` (None for a directory), ``used_bytes``, ``limit_bytes``
        (None without one).
        """
        everything = uid in (0, os.geteuid())
        known = self._table.quotas()
        found = []
        for key, account in known["users"].items():
            device, _, user = key.partition(":")
            if everything or int(user) == uid:
                found.append(_entry(f"gpu{device}", int(user), account))
        for key, account in known["directories"].items():
            if everything or self._table.inode_get(int(key)).uid == uid:
                found.append(_entry(os.fsdecode(self._tree.path(self._tree.directory(int(key)))), None, account))
        return found


def _entry(path: str, uid: int | None, account: dict[str, int]) -> dict[str, Any]:
    used, limit = account["used_bytes"], account.get("limit_bytes")
    return {"path": path, "uid": uid, "used_bytes": used, "limit_bytes": limit}
