"""The replies that describe inodes to the kernel, in the layout of linux/fuse.h."""

import os
import stat
from struct import Struct
from typing import Final, NamedTuple

# A fuse_entry_out is the inode, how long the reply lasts, and a fuse_attr. It lasts for so many seconds: those of the
# name, those of the attributes, nanoseconds of both.
_LASTS: Final = Struct("=8x2Q2I")
_ATTRIBUTES: Final = Struct("=6Q10I")
_ENTRY: Final = Struct("=Q32s88s")
_ENTRY_OF_TABLE: Final = Struct("=Q32sQ52xI24x")  # with an inode number and a type as the only attributes
_ATTRIBUTES_REPLY: Final = Struct("=QI4x88s")  # fuse_attr_out: seconds, nanoseconds, fuse_attr
_LISTED: Final = Struct("=128s2Q2I")  # an entry, its inode, the next entry's cookie, the name's length, its type
_LISTED_OF_TABLE: Final = Struct("=Q32sQ52xI24x2Q2I")  # _ENTRY_OF_TABLE and the rest of _LISTED
_PADDING: Final = tuple(b"\0" * (-length % 8) for length in range(8))
_SECOND: Final = 1_000_000_000


class Entry(NamedTuple):
    """A reply about an inode. ``mode``: its type, with or without permission bits; ``message``: a fuse_entry_out."""

    ino: int
    mode: int
    message: bytes

    def attributes(self) -> bytes:
        """The same as a fuse_attr_out."""
        _, lasts, attributes = _ENTRY.unpack(self.message)
        _, seconds, _, nanoseconds = _LASTS.unpack(lasts)
        return _ATTRIBUTES_REPLY.pack(seconds, nanoseconds, attributes)


class Replies:
    """Builds replies with the mount's time-outs: for how many seconds the kernel may trust a name and attributes.

    A name that does not exist may be remembered as well: ``no_entry`` is that reply.
    """

    def __init__(self, entry_timeout: float, attribute_timeout: float) -> None:
        name, name_ns = divmod(int(entry_timeout * _SECOND), _SECOND)
        attributes, attributes_ns = divmod(int(attribute_timeout * _SECOND), _SECOND)
        self.lasts = _LASTS.pack(name, attributes, name_ns, attributes_ns)
        self._name_lasts = _LASTS.pack(name, 0, name_ns, 0)
        self.no_entry = self.entry(0, 0)

    def entry(self, ino: int, kind: int) -> Entry:
        """The reply for an inode of the engine's table, which fills in all attributes but the type."""
        return Entry(ino, kind, _ENTRY_OF_TABLE.pack(ino, self.lasts, ino, kind))

    def host_entry(self, ino: int, found: os.stat_result, *, lasts: bool = True) -> Entry:
        """The reply for an inode of the host. ``lasts``: whether the kernel may trust the attributes."""
        atime, atime_ns = divmod(found.st_atime_ns, _SECOND)
        mtime, mtime_ns = divmod(found.st_mtime_ns, _SECOND)
        ctime, ctime_ns = divmod(found.st_ctime_ns, _SECOND)
        times = (*(seconds & 0xFFFFFFFFFFFFFFFF for seconds in (atime, mtime, ctime)), atime_ns, mtime_ns, ctime_ns)
        owner = (found.st_mode, found.st_nlink, found.st_uid, found.st_gid)
        device, block = found.st_rdev & 0xFFFFFFFF, found.st_blksize
        attributes = _ATTRIBUTES.pack(ino, found.st_size, found.st_blocks, *times, *owner, device, block, 0)
        return Entry(ino, found.st_mode, _ENTRY.pack(ino, self.lasts if lasts else self._name_lasts, attributes))


class Listing:
    """The entries of a directory that fit into one reply to READDIRPLUS."""

    def __init__(self, size: int) -> None:
        self._room = size
        self._parts: list[bytes] = []

    def add(self, name: bytes, entry: Entry, cookie: int) -> bool:
        """Adds an entry unless it no longer fits. ``cookie``: where a listing goes on that has read this entry."""
        kind = stat.S_IFMT(entry.mode) >> 12
        return self._add(_LISTED.pack(entry.message, entry.ino, cookie, len(name), kind), name)

    def add_inode(self, name: bytes, ino: int, kind: int, cookie: int, lasts: bytes) -> bool:
        """The same for an inode of the engine's table. ``lasts``: that of :class:`Replies`."""
        return self._add(_LISTED_OF_TABLE.pack(ino, lasts, ino, kind, ino, cookie, len(name), kind >> 12), name)

    def _add(self, described: bytes, name: bytes) -> bool:
        message = described + name + _PADDING[len(name) % 8]
        if len(message) > self._room:
            return False
        self._room -= len(message)
        self._parts.append(message)
        return True

    def message(self) -> bytes:
        """The reply."""
        return b"".join(self._parts)
