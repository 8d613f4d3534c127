"""The inodes of the host that the kernel knows below ``backing/``, and the descriptors that lead to them.

Each has an O_PATH descriptor. If there are very many, the descriptors that have not been used for longest are closed;
such an inode is found again by its name.
"""

import os
import resource
import stat
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from errno import EDEADLK, ESTALE
from typing import Final

from gpufs.syscalls import open_beneath, os_error, path_of

FIRST_INODE: Final = 1 << 48  # the numbers of the engine's table are below (native/src/fuse/open_files.h)
_TRIED: Final = 8  # inodes whose descriptors may be closed for each new one

_Key = tuple[str, int, int]  # the share's name, st_dev and st_ino
Found = tuple[int, os.stat_result]  # an O_PATH descriptor and what it leads to


@dataclass(frozen=True, slots=True)
class Share:
    """A directory of the host to show: its name below ``backing/``, its path, and whether it must not be changed."""

    name: str
    path: str
    read_only: bool


class BackingNode:
    """An inode of the host; ``kind`` is its S_IF type, ``fd`` an O_PATH descriptor of it, -1 while it has none.

    ``lookups`` counts the kernel's references; a node that is ``shown`` as a directory below ``backing/`` needs none.
    ``users`` counts its open handles and the calls in progress; while there are any it keeps its descriptor. ``entry``:
    the directory's number and the name by which the kernel last looked it up. ``nameless``: an open has already failed
    because the inode has no name any more.
    """

    __slots__ = ("entry", "fd", "ino", "key", "kind", "lookups", "nameless", "share", "shown", "users")

    def __init__(self, ino: int, kind: int, fd: int, key: _Key, share: Share) -> None:
        self.ino = ino
        self.kind = kind
        self.fd = fd
        self.key = key
        self.lookups = 0
        self.share = share
        self.entry: tuple[int, bytes] | None = None
        self.users = 0
        self.nameless = False
        self.shown = False

    @property
    def device_number(self) -> int:
        return self.key[1]

    @property
    def link(self) -> str:
        """A path that leads to the inode, whatever its names are."""
        return path_of(self.fd)


def look_up(directory: int, path: bytes) -> Found:
    """Return what a name leads to. The caller owns the descriptor."""
    fd = open_beneath(directory, path, os.O_PATH | os.O_NOFOLLOW)
    try:
        return fd, os.fstat(fd)
    except BaseException:
        os.close(fd)
        raise


class HostInodes:
    """See above. Owns the descriptors; only the trio thread uses it.

    ``st_dev`` is the device number of this mount.
    """

    def __init__(self, st_dev: int) -> None:
        self._nodes: dict[int, BackingNode] = {}
        self._st_dev = st_dev
        self._next_ino = FIRST_INODE + 1  # FIRST_INODE is the directory backing/
        self._known: dict[_Key, BackingNode] = {}
        # The inodes with a descriptor, beginning with the one that was used longest ago.
        self._open: OrderedDict[int, BackingNode] = OrderedDict()

    def close(self) -> None:
        for node in self._open.values():
            os.close(node.fd)
        self._known.clear()
        self._open.clear()

    def get(self, ino: int) -> BackingNode | None:
        """The inode with a number, None if it is none of the host's."""
        return self._nodes.get(ino)

    def meet(self, opened: Found, share: Share, entry: tuple[int, bytes] | None) -> BackingNode:
        """Return the node that was found by a name; takes the descriptor over. EDEADLK for an inode of this mount."""
        fd, status = opened
        if status.st_dev == self._st_dev:
            os.close(fd)
            raise os_error(EDEADLK)
        key = share.name, status.st_dev, status.st_ino
        kind = stat.S_IFMT(status.st_mode)
        node = self._known.get(key)
        if node is None or node.kind != kind:  # without a descriptor its number may have gone to another inode
            node = BackingNode(self._next_ino, kind, -1, key, share)
            self._next_ino += 1
            self._known[key] = self._nodes[node.ino] = node
        node.entry = entry or node.entry
        self._give_descriptor(node, fd)
        return node

    async def wake(self, node: BackingNode, find: Callable[[BackingNode, bytes], Awaitable[Found]]) -> None:
        """Make sure that an inode has a descriptor. ESTALE if its name leads elsewhere now.

        ``find`` looks a name up in a directory.
        """
        if node.fd >= 0:
            self._open.move_to_end(node.ino)
            return
        parent = self.get(node.entry[0]) if node.entry is not None else None
        if parent is None or node.entry is None:
            raise os_error(ESTALE)
        fd, status = await find(parent, node.entry[1])
        if node.key[1:] != (status.st_dev, status.st_ino):
            os.close(fd)
            raise os_error(ESTALE)
        self._give_descriptor(node, fd)

    def forget(self, node: BackingNode, count: int) -> None:
        """Drop references of the kernel; the last one removes the node."""
        node.lookups = max(0, node.lookups - count)
        if node.lookups == 0 and not node.shown:
            del self._nodes[node.ino]
            if self._known.get(node.key) is node:
                del self._known[node.key]
            if node.fd >= 0:
                del self._open[node.ino]
                os.close(node.fd)

    def _give_descriptor(self, node: BackingNode, fd: int) -> None:
        """Take a descriptor over for an inode, and close one that has not been used for long if there are many."""
        if node.fd >= 0:
            os.close(fd)
        else:
            node.fd = fd
            self._open[node.ino] = node
        self._open.move_to_end(node.ino)
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        for _ in range(_TRIED):
            if len(self._open) <= descriptors // 2:
                return
            oldest = next(iter(self._open.values()))
            self._open.move_to_end(oldest.ino)
            if oldest.users == 0 and oldest.entry is not None and oldest is not node:
                del self._open[oldest.ino]
                os.close(oldest.fd)
                oldest.fd = -1
