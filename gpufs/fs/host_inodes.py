"""The inodes of the host that the kernel knows below ``backing/``, and the descriptors that lead to them.

Each has an O_PATH descriptor while there are enough. Of more inodes those rest that nobody has used for longest: their
descriptors are closed, and opened anew by their names when they are asked for. What is in use does not rest, nor what
is not found by its name, which the kernel is asked to forget: somebody on the host has renamed or removed it. Where he
does that while it rests it is ESTALE, for which the kernel looks the name up again.

Owned by the operations on them; the trio thread alone uses it.
"""

import contextlib
import ctypes
import errno
import os
import resource
import stat
import struct
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gpufs.fs.nodes import Node
from gpufs.fs.tree import error

_FIRST_INO: Final = 1 << 48  # the tree's own numbers are below
_FEWEST: Final = 16  # descriptors for inodes, whatever else there is
_ELSEWHERE: Final = 128  # descriptors that threads and the rest of the daemon may need
_AT_ONCE: Final = 32  # names that a thread looks up
_SHARES: Final = 64  # of all descriptors: what a thread that looks names up may have
_TRIED: Final = 8  # inodes, for each that is new where there are many: to let rest, or to be forgotten
# Inodes above which the kernel is asked to forget some: each takes half a KiB.
_MANY: Final = 100_000
_MOST_NAMES: Final = 2048  # in a path
_RESOLVE: Final = 0x08 | 0x04 | 0x02  # RESOLVE_BENEATH, _NO_SYMLINKS, _NO_MAGICLINKS
_SYS_OPENAT2: Final = 437  # the same on all architectures
_AT_EMPTY_PATH: Final = 0x1000
_HANDLE_BYTES: Final = 128  # at most

_libc = ctypes.CDLL(None, use_errno=True)


# A directory's number and a name in it.
_Entry = tuple[int, bytes]
# The name of the shown directory, st_dev and st_ino; for a symbolic link also its entry. So each name of a link has an
# inode of its own, and READLINK knows in which directory the link is.
_Key = tuple[str, int, int, _Entry | None]


@dataclass(frozen=True, slots=True)
class Backing:
    """A directory of the host to show: its name below ``backing/``, its path, and whether it must not be changed."""

    name: str
    path: str
    read_only: bool


class BackingNode(Node):
    """An inode of the host: ``fd`` is an O_PATH descriptor of it.

    ``fd`` is -1 while it rests; ``users`` counts the handles of it that are open and the requests under way on it,
    which keep it from that.
    ``entry``: the directory's number and the name by which the kernel last asked for it; None where it has not, or the
    name has gone to another.
    ``stamp``: what tells it from others that get its number later.
    ``nameless``: an open has been told that it has no name any more.
    """

    __slots__ = ("asked_to_forget", "entry", "fd", "key", "nameless", "share", "stamp", "users")

    def __init__(self, ino: int, kind: int, fd: int, key: _Key, share: Backing) -> None:
        super().__init__(ino, kind, -1)
        self.fd = fd
        self.key = key
        self.share = share
        self.entry: _Entry | None = None
        self.users = 0
        self.stamp: bytes | None = None
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

    def is_at(self, fd: int, found: os.stat_result) -> bool:
        """Whether a descriptor is one of this inode, which rests."""
        same = self.key[1:3] == (found.st_dev, found.st_ino) and self.kind == stat.S_IFMT(found.st_mode)
        return same and (self.stamp is None or self.stamp == _stamp_of(fd))


def open_beneath(directory: int, path: bytes, flags: int, mode: int = 0) -> int:
    """openat2(2), never through a symbolic link and never out of the directory."""
    how = struct.pack("=QQQ", flags | os.O_CLOEXEC, mode, _RESOLVE)
    fd: int = _libc.syscall(_SYS_OPENAT2, directory, path, how, len(how))
    if fd < 0:
        raise error(ctypes.get_errno())
    return fd


def look_up(directory: int, path: bytes) -> tuple[int, os.stat_result]:
    """An O_PATH descriptor of what is there, and its attributes."""
    fd = open_beneath(directory, path, os.O_PATH | os.O_NOFOLLOW)
    try:
        return fd, os.fstat(fd)
    except BaseException:
        os.close(fd)
        raise


def _key(share: Backing, found: os.stat_result, entry: _Entry | None) -> _Key:
    return share.name, found.st_dev, found.st_ino, entry if stat.S_ISLNK(found.st_mode) else None


def _stamp_of(fd: int) -> bytes | None:
    """What name_to_handle_at(2) tells an inode by; None where its file system has no such thing."""
    handle = ctypes.create_string_buffer(struct.pack("=Ii", _HANDLE_BYTES, 0), 8 + _HANDLE_BYTES)
    mount = ctypes.c_int()
    if _libc.name_to_handle_at(fd, b"", handle, ctypes.byref(mount), _AT_EMPTY_PATH):
        return None
    (count,) = struct.unpack_from("=I", handle)
    return handle.raw[4 : 8 + count]


class HostInodes:
    """See above. ``elsewhere`` tells how many descriptors open files have, ``forget`` asks the kernel to forget a name.

    ``nodes`` is the tree's table of inodes, to which these belong as well; ``device`` the st_dev of this mount.
    """

    def __init__(
        self,
        nodes: dict[int, Node],
        device: int,
        elsewhere: Callable[[], int],
        forget: Callable[[int, bytes], None],
    ) -> None:
        self._nodes = nodes
        self._device = device
        self._elsewhere = elsewhere
        self._forget = forget
        self._next_ino = _FIRST_INO
        # Both have those first that have been used, or looked at, longest ago.
        self._known: OrderedDict[_Key, BackingNode] = OrderedDict()
        self._awake: OrderedDict[int, BackingNode] = OrderedDict()
        self._named: dict[_Entry, BackingNode] = {}  # by their entries

    def close(self) -> None:
        """Gives the descriptors back."""
        for node in self._awake.values():
            os.close(node.fd)
        self._awake.clear()
        self._known.clear()

    def of(self, ino: int) -> BackingNode | None:
        """The inode that the kernel knows by a number."""
        node = self._nodes.get(ino)
        return node if isinstance(node, BackingNode) else None

    @property
    def made(self) -> int:
        """How many inodes there have been."""
        return self._next_ino - _FIRST_INO

    @property
    def at_once(self) -> int:
        """How many names a thread looks up."""
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return max(1, min(_AT_ONCE, most // _SHARES))

    @property
    def some_rest(self) -> bool:
        return len(self._known) > len(self._awake)

    def meet(self, fd: int, found: os.stat_result, share: Backing, entry: _Entry | None) -> BackingNode:
        """The node for an O_PATH descriptor found by a name; takes it over. EDEADLK for what is in this mount."""
        if found.st_dev == self._device:
            os.close(fd)
            raise error(errno.EDEADLK)
        node = self.known(fd, found, share, entry)
        if node is not None:
            return node
        key = _key(share, found, entry)
        node = BackingNode(self._next_ino, stat.S_IFMT(found.st_mode), fd, key, share)
        self._next_ino += 1
        self._known[key] = node
        self._nodes[node.ino] = node
        self._awake[node.ino] = node
        self._let_rest()
        self._let_forget()
        return node

    def known(self, fd: int, found: os.stat_result, share: Backing, entry: _Entry | None) -> BackingNode | None:
        """The node, awake, for an O_PATH descriptor, which it takes over; None, and the descriptor stays, without."""
        node = self._known.get(_key(share, found, entry))
        if node is None:
            return None
        if node.fd >= 0:
            os.close(fd)
            self._awake.move_to_end(node.ino)
        elif node.is_at(fd, found):
            self.wake(node, fd)
        else:
            return None  # another has its number by now
        return node

    def drop(self, node: BackingNode) -> None:
        """The kernel has forgotten it."""
        self.set_entry(node, None)
        del self._nodes[node.ino]
        if self._known.get(node.key) is node:
            del self._known[node.key]
        if node.fd >= 0:
            del self._awake[node.ino]
            os.close(node.fd)

    def set_entry(self, node: BackingNode, entry: _Entry | None) -> None:
        """The name by which the kernel knows it, and no other any more."""
        if node.entry is not None:
            del self._named[node.entry]
        node.entry = entry
        node.asked_to_forget = False
        if entry is not None:
            before = self._named.get(entry)
            if before is not None:
                before.entry = None
            self._named[entry] = node

    def at(self, entry: _Entry) -> BackingNode | None:
        """The inode that the kernel knows by a name, as far as is known here."""
        return self._named.get(entry)

    def move(self, node: BackingNode, entry: _Entry) -> None:
        """The kernel knows it by another name now: it has been renamed."""
        self.set_entry(node, entry)
        if node.key[3] is not None and self._known.get(node.key) is node:
            del self._known[node.key]
            node.key = (*node.key[:3], entry)
            self._known[node.key] = node

    def depth(self, node: BackingNode) -> int:
        """The number of directories above an inode, with the shown one, where the kernel knows it; 1 if unknown."""
        count = 0
        at = node
        while at.names == 0:  # a shown directory has a name here
            above = None if at.entry is None else self.of(at.entry[0])
            if above is None or count == _MOST_NAMES:
                return 1
            count += 1
            at = above
        return count

    def use(self, node: BackingNode) -> None:
        """It is not among those that rest next."""
        self._awake.move_to_end(node.ino)

    def way_to(self, node: BackingNode) -> tuple[BackingNode, bytes]:
        """How a node that rests is found again: a directory that does not, and the path from there. ESTALE without."""
        names: list[bytes] = []
        at = node
        while at.fd < 0:
            above = None if at.entry is None else self.of(at.entry[0])
            if at.entry is None or above is None:
                raise error(errno.ESTALE)
            names.append(at.entry[1])
            at = above
        return at, b"/".join(reversed(names))

    def wake(self, node: BackingNode, fd: int) -> None:
        """Gives a node that rests its descriptor, unless it has got one meanwhile."""
        if node.fd >= 0:
            os.close(fd)
            return
        node.fd = fd
        self._awake[node.ino] = node
        self._let_rest()

    def _let_rest(self) -> None:
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._let_rest_above(max(_FEWEST, min(most // 2, most - _ELSEWHERE - self._elsewhere())), _TRIED)

    def let_more_rest(self) -> bool:
        """Where there is no descriptor left for other things: lets half of the inodes rest. False where none can."""
        awake = len(self._awake)
        self._let_rest_above(awake // 2, awake)
        return len(self._awake) < awake

    def _let_rest_above(self, most: int, tries: int) -> None:
        for _ in range(tries):
            if len(self._awake) <= most:
                return
            node = next(iter(self._awake.values()))
            self._awake.move_to_end(node.ino)
            if node.users > 0 or node.names > 0:
                continue  # one that has a name here is a shown directory
            if not self._found_by_name(node):
                self._ask_to_forget(node)
            else:
                node.stamp = _stamp_of(node.fd)
                del self._awake[node.ino]
                os.close(node.fd)
                node.fd = -1

    def _found_by_name(self, node: BackingNode) -> bool:
        """Whether the names that the kernel knows lead to it now, as far as this machine knows."""
        names: list[bytes] = []
        at = node
        while at.names == 0:
            above = None if at.entry is None else self.of(at.entry[0])
            if at.entry is None or above is None or len(names) == _MOST_NAMES:
                return False
            names.append(at.entry[1])
            at = above
        try:
            top = os.readlink(os.fsencode(at.link)).rstrip(b"/")
            return os.readlink(os.fsencode(node.link)) == b"/".join([top, *reversed(names)])
        except OSError:
            return False  # a path that is too long

    def _let_forget(self) -> None:
        """Asks the kernel to forget files where there are very many: it does where nobody uses them, some time later.

        Directories stay: a program may be in one, which would lose its name.
        """
        if len(self._known) <= _MANY:
            return
        for _ in range(_TRIED):
            key, node = next(iter(self._known.items()))
            self._known.move_to_end(key)
            if node.users == 0 and node.kind != stat.S_IFDIR:
                self._ask_to_forget(node)

    def _ask_to_forget(self, node: BackingNode) -> None:
        """Once for each time that it is found: what is not heard while its directory is read may be much."""
        if node.entry is None or node.asked_to_forget:
            return
        node.asked_to_forget = True
        with contextlib.suppress(OSError):  # the mount ends
            self._forget(*node.entry)
