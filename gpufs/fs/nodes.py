"""The kinds of nodes in the tree, and the order in which a directory lists them.

The tree's table of inodes owns the nodes; directory entries and references in the engine's table keep them there.
Only the trio thread uses nodes.
"""

import stat
from bisect import bisect_right
from collections.abc import Iterator
from operator import attrgetter

_cookie = attrgetter("cookie")

# Cookies 1 and 2 are "." and "..".
FIRST_COOKIE = 3


class Node:
    """What a name leads to.

    ``kind`` is the S_IF type. ``device`` is the index of the device whose directory contains the node, -1 for
    nodes above them. ``names`` counts the directory entries. ``parent`` is the directory of the last name; it stays
    when the name is removed. ``limiting`` is the directory whose limit counts the node: the node itself or one above
    it. ``fixed`` nodes belong to the mount: they keep name, owner and mode.
    """

    __slots__ = ("device", "fixed", "ino", "kind", "limiting", "names", "parent")

    def __init__(self, ino: int, kind: int, device: int) -> None:
        self.ino = ino
        self.kind = kind
        self.device = device
        self.names = 0
        self.parent: Directory | None = None
        self.limiting: Directory | None = None
        self.fixed = False


class BufferFile(Node):
    """A regular file: a buffer on a device. Unlinked, it keeps its memory until the kernel forgets the inode.

    ``unnamed``: it has never had a name (O_TMPFILE), and may be given one.
    """

    __slots__ = ("unnamed",)

    def __init__(self, ino: int, device: int, *, unnamed: bool = False) -> None:
        super().__init__(ino, stat.S_IFREG, device)
        self.unnamed = unnamed


class Symlink(Node):
    """A symbolic link."""

    __slots__ = ("target",)

    def __init__(self, ino: int, device: int, target: bytes) -> None:
        super().__init__(ino, stat.S_IFLNK, device)
        self.target = target


class Special(Node):
    """A FIFO, a socket or a device node: the kernel serves it, the tree only names it."""

    __slots__ = ()


class Entry:
    """A name in a directory. ``node`` is None once the name is gone."""

    __slots__ = ("cookie", "name", "node")

    def __init__(self, cookie: int, name: bytes, node: Node) -> None:
        self.cookie = cookie
        self.name = name
        self.node: Node | None = node


class Directory(Node):
    """A directory. ``subdirectories`` counts those in it, for the link count; ``closed`` ones take no new names.

    Entries are listed in the order in which they came. Each has a cookie, larger than all before it and never used
    again in this directory, so a listing can stop and go on anywhere while names come and go: it finds every name
    that was there all the time exactly once. Removed entries stay in the order as gaps until half of it is gaps.
    """

    __slots__ = ("_gaps", "_next_cookie", "_order", "closed", "entries", "subdirectories")

    def __init__(self, ino: int, device: int) -> None:
        super().__init__(ino, stat.S_IFDIR, device)
        self.closed = False
        self.subdirectories = 0
        self.entries: dict[bytes, Entry] = {}
        self._order: list[Entry] = []
        self._next_cookie = FIRST_COOKIE
        self._gaps = 0

    def get(self, name: bytes) -> Node | None:
        """The node behind a name, or None."""
        entry = self.entries.get(name)
        return None if entry is None else entry.node

    def attach(self, name: bytes, node: Node) -> None:
        """Gives a node a name; one that was there under it is replaced at the same place of the listing."""
        entry = self.entries.get(name)
        if entry is None:
            entry = Entry(self._next_cookie, name, node)
            self._next_cookie += 1
            self._order.append(entry)
            self.entries[name] = entry
        else:
            if isinstance(entry.node, Directory):
                self.subdirectories -= 1
            entry.node = node
        if isinstance(node, Directory):
            self.subdirectories += 1
        node.parent = self

    def detach(self, name: bytes) -> None:
        """Removes a name. KeyError if it is not there."""
        entry = self.entries.pop(name)
        if isinstance(entry.node, Directory):
            self.subdirectories -= 1
        entry.node = None
        self._gaps += 1
        if self._gaps > 64 and self._gaps * 2 > len(self._order):
            self._order = [kept for kept in self._order if kept.node is not None]
            self._gaps = 0

    def rename(self, old: bytes, new: bytes) -> None:
        """Gives an entry a new name that no other has; its place in listings stays. KeyError if it does not exist."""
        entry = self.entries.pop(old)
        self.entries[new] = entry
        entry.name = new
        if entry.node is not None:
            entry.node.parent = self

    @property
    def last_cookie(self) -> int:
        """The largest cookie that an entry has had so far."""
        return self._next_cookie - 1

    def after(self, cookie: int, last: int | None = None) -> Iterator[tuple[int, bytes, Node]]:
        """(cookie, name, node) of the entries behind a cookie, up to that whose cookie is ``last``.

        Not to be used across a change of the directory.
        """
        order = self._order
        for index in range(bisect_right(order, cookie, key=_cookie), len(order)):
            entry = order[index]
            if last is not None and entry.cookie > last:
                return
            if entry.node is not None:
                yield entry.cookie, entry.name, entry.node

    def contains(self, node: Node | None) -> bool:
        """Whether a node is this directory or stands anywhere below it."""
        while node is not None:
            if node is self:
                return True
            node = node.parent if node.parent is not node else None  # the root is its own parent
        return False
