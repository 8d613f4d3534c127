"""The inodes of the host that the kernel knows below ``backing/``, and the descriptors that lead to them.

Each has an O_PATH descriptor. If there are very many, the descriptors of the files that have not been used for longest
are closed; such a file is found again by its name. If there are still more inodes, the kernel is asked to forget some.
"""

import contextlib
import ctypes
import os
import resource
import stat
import struct
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from errno import EDEADLK, ESTALE
from typing import Final

from gpufs.fs.errors import error
from gpufs.fs.nodes import Node

FIRST_INODE: Final = 1 << 48  # the tree's own numbers are below (native/src/fuse/open_files.h)
_MANY: Final = 100_000  # inodes, of half a KiB each, above which the kernel is asked to forget some
_TRIED: Final = 8  # inodes that are considered for each new one
_FEWEST: Final = 16  # descriptors of files that are kept in any case
_RESOLVE: Final = 0x08 | 0x04 | 0x02  # RESOLVE_BENEATH, _NO_SYMLINKS, _NO_MAGICLINKS
_SYS_OPENAT2: Final = 437  # the same on all architectures

_libc = ctypes.CDLL(None, use_errno=True)

_Key = tuple[str, int, int]  # the share's name, st_dev and st_ino
Found = tuple[int, os.stat_result]  # an O_PATH descriptor and what it leads to


@dataclass(frozen=True, slots=True)
class Share:
    """A directory of the host to show: its name below ``backing/``, its path, and whether it must not be changed."""

    name: str
    path: str
    read_only: bool


class BackingNode(Node):
    """An inode of the host; ``fd`` is an O_PATH descriptor of it, -1 while it has none.
    ``lookups`` counts the kernel's references.

    ``users`` counts its open handles and the calls in progress; while there are any it keeps its descriptor. ``entry``:
    the directory's number and the name by which the kernel last looked it up. ``nameless``: an open has already failed
    because the inode has no name any more.
    """

    __slots__ = ("asked_to_forget", "entry", "fd", "key", "lookups", "nameless", "share", "users")

    def __init__(self, ino: int, kind: int, fd: int, key: _Key, share: Share) -> None:
        super().__init__(ino, kind, -1)
        self.fd = fd
        self.key = key
        self.lookups = 0
        self.share = share
        self.entry: tuple[int, bytes] | None = None
        self.users = 0
        self.nameless = False
        self.asked_to_forget = False

    @property
    def device_number(self) -> int:
        """The st_dev of its file system."""
        return self.key[1]

    @property
    def link(self) -> str:
        """A path that leads to the inode, whatever its names are."""
        return f"/proc/self/fd/{self.fd}"


def open_beneath(directory: int, path: bytes, flags: int, mode: int = 0) -> int:
    """openat2(2), never through a symbolic link and never out of the directory."""
    how = struct.pack("=QQQ", flags | os.O_CLOEXEC, mode, _RESOLVE)
    fd: int = _libc.syscall(_SYS_OPENAT2, directory, path, how, len(how))
    if fd < 0:
        raise error(ctypes.get_errno())
    return fd


def look_up(directory: int, path: bytes) -> Found:
    """What a name leads to. The caller owns the descriptor."""
    fd = open_beneath(directory, path, os.O_PATH | os.O_NOFOLLOW)
    try:
        return fd, os.fstat(fd)
    except BaseException:
        os.close(fd)
        raise


class HostInodes:
    """See above. Owns the descriptors; only the trio thread uses it.

    ``nodes`` is the tree's table of inodes, to which these belong as well; ``device`` the st_dev of this mount;
    ``forget`` asks the kernel to forget a name.
    """

    def __init__(self, nodes: dict[int, Node], device: int, forget: Callable[[int, bytes], None]) -> None:
        self._nodes = nodes
        self._device = device
        self._forget = forget
        self._next_ino = FIRST_INODE + 1  # FIRST_INODE is the directory backing/
        # Both begin with the inode that was used longest ago. The second holds those, but no directories, with a
        # descriptor: the working directory of a program must be found whatever its name becomes.
        self._known: OrderedDict[_Key, BackingNode] = OrderedDict()
        self._files: OrderedDict[_Key, BackingNode] = OrderedDict()
        self._directories = 0

    def close(self) -> None:
        """Closes the descriptors."""
        for node in self._known.values():
            if node.fd >= 0:
                os.close(node.fd)
        self._known.clear()
        self._files.clear()

    def get(self, ino: int) -> BackingNode | None:
        """The inode with a number, None if it is none of the host's."""
        node = self._nodes.get(ino)
        return node if isinstance(node, BackingNode) else None

    def meet(self, found: Found, share: Share, entry: tuple[int, bytes] | None) -> BackingNode:
        """The node that was found by a name; takes the descriptor over. EDEADLK for an inode of this mount."""
        fd, status = found
        if status.st_dev == self._device:
            os.close(fd)
            raise error(EDEADLK)
        key = share.name, status.st_dev, status.st_ino
        kind = stat.S_IFMT(status.st_mode)
        node = self._known.get(key)
        if node is None or node.kind != kind:  # without a descriptor its number may have gone to another inode
            node = BackingNode(self._next_ino, kind, -1, key, share)
            self._next_ino += 1
            self._known[key] = self._nodes[node.ino] = node
            self._directories += kind == stat.S_IFDIR
            self._ask_to_forget_some()
        self._known.move_to_end(key)
        node.entry = entry or node.entry
        node.asked_to_forget = False
        self._give_descriptor(node, fd)
        return node

    async def wake(self, node: BackingNode, find: Callable[[BackingNode, bytes], Awaitable[Found]]) -> None:
        """Makes sure that an inode has a descriptor. ESTALE if its name leads elsewhere now.

        ``find`` looks a name up in a directory.
        """
        if node.fd >= 0:
            if node.key in self._files:
                self._files.move_to_end(node.key)
            return
        parent = self.get(node.entry[0]) if node.entry is not None else None
        if parent is None or node.entry is None:
            raise error(ESTALE)
        fd, status = await find(parent, node.entry[1])
        if node.key[1:] != (status.st_dev, status.st_ino):
            os.close(fd)
            raise error(ESTALE)
        self._give_descriptor(node, fd)

    def forget(self, node: BackingNode, count: int) -> None:
        """The kernel drops references; the node goes with the last one."""
        node.lookups = max(0, node.lookups - count)
        if node.lookups == 0 and node.names == 0:
            del self._nodes[node.ino]
            for table in (self._known, self._files):
                if table.get(node.key) is node:
                    del table[node.key]
            self._directories -= node.kind == stat.S_IFDIR
            if node.fd >= 0:
                os.close(node.fd)

    def _give_descriptor(self, node: BackingNode, fd: int) -> None:
        """Takes a descriptor over for an inode, and closes one that has not been used for long if there are many."""
        if node.fd >= 0:
            os.close(fd)
        else:
            node.fd = fd
        if node.kind == stat.S_IFDIR:
            return
        self._files[node.key] = node
        self._files.move_to_end(node.key)
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = max(_FEWEST, descriptors // 2 - self._directories)
        for _ in range(_TRIED):
            if len(self._files) <= most:
                return
            key, oldest = next(iter(self._files.items()))
            self._files.move_to_end(key)
            if oldest.users == 0 and oldest is not node:
                del self._files[key]
                os.close(oldest.fd)
                oldest.fd = -1

    def _ask_to_forget_some(self) -> None:
        """Asks the kernel to forget inodes if there are very many. It does so later, and only what it does not use.

        Directories are left alone as long as possible: the working directory of a program would lose its name.
        """
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        many_directories = self._directories > descriptors // 4
        if len(self._known) <= _MANY and not many_directories:
            return
        for _ in range(_TRIED):
            key, node = next(iter(self._known.items()))
            self._known.move_to_end(key)
            busy = node.users > 0 or node.names > 0 or (node.kind == stat.S_IFDIR and not many_directories)
            if node.entry is not None and not node.asked_to_forget and not busy:
                node.asked_to_forget = True  # once for each time that it is looked up
                with contextlib.suppress(OSError):  # the mount ends
                    self._forget(*node.entry)
