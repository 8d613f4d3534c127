"""Extended attributes: stored ones, and read-only ones that describe a file.

``user.*`` is stored for whoever the kernel lets through (it allows files and directories, by their mode), ``trusted.*``
for root; other namespaces are EOPNOTSUPP. ``user.gpufs.*`` tells about the file and cannot be set or removed (EPERM);
it is found by its name only and not listed, so that programs which copy attributes do not carry it along. Who asks for
``user.gpufs.address`` gets a promise: from then on the file stays where it is in its device's memory.
"""

import errno
from collections.abc import Callable

from gpufs.fs.nodes import BufferFile, Node
from gpufs.fs.table import InodeTable
from gpufs.fs.tree import Tree, error

VALUE_MAX = 1 << 16  # bytes of one value, the kernel's limit
NAMES_MAX = 1 << 16  # bytes of all names of a file, what listxattr(2) can return
TOTAL_MAX = 1 << 20  # bytes of names and values of a file
VIRTUAL = b"user.gpufs."
XATTR_CREATE = 1
XATTR_REPLACE = 2


class ExtendedAttributes:
    """The extended attributes of a tree's nodes. Failures are OSError with the errno for the caller."""

    def __init__(self, tree: Tree, table: InodeTable, driver: str) -> None:
        self._tree = tree
        self._table = table
        self._virtual: dict[bytes, Callable[[Node], bytes | None]] = {
            b"driver": lambda node: driver.encode() if node.device >= 0 else None,
            b"device": lambda node: b"gpu%d" % node.device if node.device >= 0 else None,
            b"address": self._address,
            b"bytes_held": self._bytes_held,
            b"last_path": tree.path,
        }

    def get(self, node: Node, name: bytes, *, root: bool) -> bytes:
        """The value of an attribute. ENODATA if there is none."""
        if name.startswith(VIRTUAL):
            describe = self._virtual.get(name[len(VIRTUAL) :])
            value = None if describe is None else describe(node)
        else:
            _check_namespace(name, root=root)
            value = None if node.xattrs is None else node.xattrs.get(name)
        if value is None:
            raise error(errno.ENODATA)
        return value

    def set(self, node: Node, name: bytes, value: bytes, *, root: bool) -> None:
        """Stores an attribute. E2BIG for a value, ENOSPC for a file's attributes that are too large together."""
        self._check_change(node, name, root=root)
        if len(value) > VALUE_MAX:
            raise error(errno.E2BIG)
        kept = {} if node.xattrs is None else node.xattrs
        names = len(name) + 1 + sum(len(other) + 1 for other in kept if other != name)
        values = len(value) + sum(len(other) for key, other in kept.items() if key != name)
        if names > NAMES_MAX or names + values > TOTAL_MAX:
            raise error(errno.ENOSPC)
        kept[name] = value
        node.xattrs = kept

    def remove(self, node: Node, name: bytes, *, root: bool) -> None:
        """Removes an attribute. ENODATA if there is none."""
        self._check_change(node, name, root=root)
        if node.xattrs is None or name not in node.xattrs:
            raise error(errno.ENODATA)
        del node.xattrs[name]

    def names(self, node: Node, *, root: bool) -> list[bytes]:
        """The names of the stored attributes that the caller may know of."""
        if node.xattrs is None:
            return []
        return [name for name in node.xattrs if root or not name.startswith(b"trusted.")]

    def _check_change(self, node: Node, name: bytes, *, root: bool) -> None:
        if node.fixed or name.startswith(VIRTUAL):
            raise error(errno.EPERM)
        _check_namespace(name, root=root)

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


def _check_namespace(name: bytes, *, root: bool) -> None:
    if not name.startswith((b"user.", b"trusted.")):
        raise error(errno.EOPNOTSUPP)
    if name in (b"user.", b"trusted."):
        raise error(errno.EINVAL)
    if name.startswith(b"trusted.") and not root:
        raise error(errno.EPERM)
