"""Read-only extended attributes that describe a file: ``user.gpufs.*``.

They cannot be set or removed (EPERM), and are found by their name only and not listed, so that programs which copy
attributes do not carry them along. Who asks for ``user.gpufs.address`` gets a promise: from then on the file stays
where it is in its device's memory. All other attributes are the native engine's.
"""

import errno
from collections.abc import Callable

from gpufs.fs.nodes import BufferFile, Node
from gpufs.fs.table import InodeTable
from gpufs.fs.tree import Tree, error

PREFIX = b"user.gpufs."


class VirtualAttributes:
    """What there is to tell about a tree's nodes. Failures are OSError with the errno for the caller."""

    def __init__(self, tree: Tree, table: InodeTable, driver: str) -> None:
        self._table = table
        self._known: dict[bytes, Callable[[Node], bytes | None]] = {
            b"driver": lambda node: driver.encode() if node.device >= 0 else None,
            b"device": lambda node: b"gpu%d" % node.device if node.device >= 0 else None,
            b"address": self._address,
            b"bytes_held": self._bytes_held,
            b"last_path": tree.path,
            b"bytes_read": self._activity("bytes_read"),
            b"bytes_written": self._activity("bytes_written"),
            b"reads": self._activity("reads"),
            b"writes": self._activity("writes"),
            b"last_backend": self._activity("last_backend"),
        }

    def get(self, node: Node, name: bytes) -> bytes:
        """The value of an attribute. ENODATA if there is none."""
        describe = self._known.get(name[len(PREFIX) :]) if name.startswith(PREFIX) else None
        value = None if describe is None else describe(node)
        if value is None:
            raise error(errno.ENODATA)
        return value

    def _address(self, node: Node) -> bytes | None:
        """The address of offset 0 in the device's address space, which stays; the file may grow to the device's size.

        The file moves out of the slab that small ones share: it then holds memory of its own.
        """
        if not isinstance(node, BufferFile):
            return None
        return b"0x%x" % self._table.buffer_address(node.ino)

    def _bytes_held(self, node: Node) -> bytes | None:
        if not isinstance(node, BufferFile):
            return None
        return b"%d" % (self._table.inode_get(node.ino).blocks * 512)

    def _activity(self, name: str) -> Callable[[Node], bytes | None]:
        def value(node: Node) -> bytes | None:
            if not isinstance(node, BufferFile):
                return None
            return str(getattr(self._table.inode_activity(node.ino), name)).encode()

        return value
