"""The kinds of nodes in the tree.

The tree's table of inodes owns the nodes; directory entries and references in the engine's table keep them there.
Only the trio thread uses nodes.
"""

import stat
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator


class Node:
    """What a name leads to. Not of a subclass: a FIFO, a socket or a device node, which the kernel serves.

    ``kind`` is the S_IF type. ``device`` is the index of the device whose directory contains the node, -1 for
    nodes above them. ``names`` counts the directory entries. ``name`` is the entry that came last, in the directory
    ``parent``; when the last entry is removed ``name`` is None and ``parent`` stays. ``limiting`` is the directory
    whose limit counts the node: the node itself or one above it. ``fixed`` nodes belong to the mount: they keep name,
    owner and mode.
    """

    __slots__ = ("_others", "device", "fixed", "ino", "kind", "limiting", "name", "names", "parent")

    def __init__(self, ino: int, kind: int, device: int) -> None:
        self.ino = ino
        self.kind = kind
        self.device = device
        self.names = 0
        self.parent: Directory | None = None
        self.name: bytes | None = None
        # All places but (parent, name), in the order in which they came; most nodes have none.
        self._others: dict[tuple[Directory, bytes], None] | None = None
        self.limiting: Directory | None = None
        self.fixed = False

    def enter(self, directory: "Directory", name: bytes) -> None:
        """It has got this name."""
        if self.name is not None and self.parent is not None:
            if self._others is None:
                self._others = {}
            self._others[self.parent, self.name] = None
        self.parent, self.name = directory, name

    def leave(self, directory: "Directory", name: bytes) -> None:
        """It has lost this name."""
        if self.name != name or self.parent is not directory:
            assert self._others is not None
            del self._others[directory, name]
        elif self._others:
            (self.parent, self.name), _ = self._others.popitem()
        else:
            self.name = None


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


class Order:
    """The names of a directory in the order in which they came, each with a number that it keeps.

    All listings of the directory use it, and need no copy of the names.
    """

    _SPARE = 64  # removed names that are always tolerated

    def __init__(self, names: Iterable[bytes]) -> None:
        found = list(names)
        self._names: list[bytes | None] = [*found]  # None: removed
        self._numbers = array("Q", range(len(found)))  # ascending
        self._number_of = {name: number for number, name in enumerate(found)}
        self.next = len(self._names)  # the number of the next name

    def add(self, name: bytes) -> None:
        """A new name, at the end."""
        self._names.append(name)
        self._numbers.append(self.next)
        self._number_of[name] = self.next
        self.next += 1

    def remove(self, name: bytes) -> None:
        """A name that is there."""
        self._names[bisect_left(self._numbers, self._number_of.pop(name))] = None
        if len(self._names) > 2 * len(self._number_of) + self._SPARE:
            left = [(name, number) for name, number in zip(self._names, self._numbers, strict=True) if name is not None]
            self._names = [name for name, _ in left]
            self._numbers = array("Q", (number for _, number in left))

    def between(self, start: int, end: int) -> Iterator[tuple[int, bytes]]:
        """The names with numbers from ``start`` to ``end``, which is left out. The names must not change meanwhile."""
        for index in range(bisect_left(self._numbers, start), len(self._names)):
            name, number = self._names[index], self._numbers[index]
            if number >= end:
                return
            if name is not None:
                yield number, name


class Directory(Node):
    """A directory: the nodes in it by name, in the order in which the names came.

    ``subdirectories`` counts the directories in it, for the link count; ``closed`` ones take no new names.
    """

    __slots__ = ("_listings", "_order", "closed", "entries", "subdirectories")

    def __init__(self, ino: int, device: int) -> None:
        super().__init__(ino, stat.S_IFDIR, device)
        self.closed = False
        self.subdirectories = 0
        self.entries: dict[bytes, Node] = {}
        self._order: Order | None = None  # while it is listed
        self._listings = 0

    def begin_listing(self) -> Order:
        """The order of its names until end_listing(), which each call needs."""
        if self._order is None:
            self._order = Order(self.entries)
        self._listings += 1
        return self._order

    def end_listing(self) -> None:
        """One listing has ended."""
        self._listings -= 1
        if not self._listings:
            self._order = None

    def attach(self, name: bytes, node: Node) -> None:
        """Gives a node a name; one that was there under it is replaced at the same place of the listing."""
        replaced = self.entries.get(name)
        self.subdirectories += isinstance(node, Directory) - isinstance(replaced, Directory)
        self.entries[name] = node
        if replaced is not None:
            replaced.leave(self, name)
        elif self._order is not None:
            self._order.add(name)
        node.enter(self, name)

    def detach(self, name: bytes) -> None:
        """Removes a name. KeyError if it is not there."""
        node = self.entries.pop(name)
        self.subdirectories -= isinstance(node, Directory)
        node.leave(self, name)
        if self._order is not None:
            self._order.remove(name)

    def contains(self, node: Node | None) -> bool:
        """Whether a node is this directory or stands anywhere below it."""
        while node is not None:
            if node is self:
                return True
            node = node.parent if node.parent is not node else None  # the root is its own parent
        return False
