"""What the namespace needs of the native engine: its table of inodes and open files.

:class:`gpufs.engine.Mount` is one; tests bring their own.
"""

from typing import Protocol

from gpufs.engine import Attributes


class InodeTable(Protocol):
    """Attributes of every inode, and the open buffers. Failures are :class:`OSError` with ``errno`` set."""

    def inode_add(self, attributes: Attributes, parent: int = 0, umask: int = 0) -> None:
        """Adds an inode; a regular file with a device gets an empty buffer there. EEXIST if known.

        ``parent``: the directory that a user makes it in, which hands down its group and access control lists, or the
        mode is taken ``umask`` from.
        """

    def inode_remove(self, ino: int) -> None:
        """Removes an inode; its buffer lives until the last open file ends. ENOENT if unknown."""

    def inode_get(self, ino: int) -> Attributes:
        """The attributes as they are now. ENOENT if unknown."""

    def inode_set(self, ino: int, set: int, attributes: Attributes) -> Attributes:  # noqa: A002
        """Sets what the SET_ bits name, all or nothing, and returns the result. ENOENT if unknown."""

    def inode_read(self, ino: int) -> None:
        """Sets the access time where the mount's options have it. ENOENT if unknown."""

    def limit_user(self, device: int, uid: int, limit: int) -> None:
        """Limits the memory of a user's files on a device, in bytes, or NO_LIMIT or DEFAULT_LIMIT."""

    def limit_directory(self, ino: int, limit: int) -> None:
        """Limits the memory of what is created in a directory from now on, in bytes, or NO_LIMIT."""

    def charge_to(self, ino: int, directory: int) -> None:
        """Counts an inode as if it had been created in this limited directory; 0: in none."""

    def quotas(self) -> dict[str, dict[str, dict[str, int]]]:
        """What is used and allowed: "users" by "device:uid" and "directories" by inode."""

    def file_open(self, ino: int, flags: int) -> int:
        """Opens a buffer and returns the file handle, below 2**63."""

    def file_release(self, fh: int) -> None:
        """Closes a file handle. EBADF if unknown."""
