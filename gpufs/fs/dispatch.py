"""Hands each request that the native data plane leaves to Python to the one that answers it.

Native code answers OPEN, READ, WRITE, LSEEK, FALLOCATE, COPY_FILE_RANGE, FLUSH, FSYNC, IOCTL and RELEASE of buffers,
LOOKUP, OPENDIR, FSYNCDIR and RELEASEDIR of directories except those of the host, and GETATTR, STATX, SETATTR, STATFS
and the operations on extended attributes of everything in its inode table. In the replies given here it fills in the
attributes from that table: Python sets only the inode number, the type and the time-outs.

Requests about an inode go to the :class:`~gpufs.fs.tree.Tree`, or for inodes of the host to
:class:`~gpufs.fs.backing.BackingHandler`; requests about an open file go to what its handle leads to
(:mod:`gpufs.fs.handles`).

An OSError that is raised here becomes its errno, everything else EIO (:mod:`gpufs.fs.connection`).
"""

import errno
import logging
import os
import stat
from collections.abc import Sequence

from gpufs.engine import Mount
from gpufs.fs.backing import BackingHandler
from gpufs.fs.backing.inodes import FIRST_INODE
from gpufs.fs.control_files import ControlFile
from gpufs.fs.errors import error
from gpufs.fs.handles import Handles, Opened
from gpufs.fs.nodes import Directory, Node, Symlink
from gpufs.fs.replies import Entry, Listing, Replies
from gpufs.fs.requests import Caller, Changes
from gpufs.fs.tree import Tree

log = logging.getLogger(__name__)


class _OpenDirectory(Opened):
    """A directory that a program lists, as far as the names reached when the listing began.

    So each name that stays is listed once while others come and go, and a program that creates a name for each one it
    finds reaches the end.
    """

    __slots__ = ("_directory", "_end", "_order", "_replies", "_table")

    def __init__(self, directory: Directory, table: Mount, replies: Replies) -> None:
        self._directory = directory
        self._table = table
        self._replies = replies
        self._order = directory.begin_listing()
        self._end = self._order.next

    async def readdir(self, start: int, listing: Listing) -> None:
        directory, lasts, add = self._directory, self._replies.lasts, listing.add_inode
        if start == 0:  # also after rewinddir(3)
            self._end = self._order.next
        # The kernel takes no references to "." and "..".
        for cookie, name, node in ((1, b".", directory), (2, b"..", directory.parent or directory)):
            if start < cookie and not add(name, node.ino, stat.S_IFDIR, cookie, lasts):
                return
        for number, name in self._order.between(max(start - 2, 0), self._end):
            child = directory.entries[name]
            if not add(name, child.ino, child.kind, number + 3, lasts):
                return
            self._table.inode_hold(child.ino)

    async def release(self) -> None:
        self._directory.end_listing()


class Operations:
    """The control plane of one mount."""

    def __init__(
        self, table: Mount, handles: Handles, tree: Tree, replies: Replies, backing: BackingHandler | None = None
    ) -> None:
        self._table = table
        self._handles = handles
        self._tree = tree
        self._backing = backing
        self._replies = replies

    def _directory(self, fh: int) -> Opened:
        """An open directory. The engine opens all but those of the host; Python learns of them when they are read."""
        opened = self._handles.get(fh)
        if opened is None and (inode := self._table.directory_of(fh)) is not None:
            opened = _OpenDirectory(self._tree.directory(inode), self._table, self._replies)
            self._handles.add(opened, fh)
        return opened or self._handles.existing(fh)

    def _host(self, inode: int) -> BackingHandler | None:
        """What answers for an inode of the host; None for another one."""
        return self._backing if inode >= FIRST_INODE else None

    def _only_host(self, inode: int) -> BackingHandler:
        """As _host(), where the engine answers for all inodes in its table. ESTALE if one has just gone from it."""
        if host := self._host(inode):
            return host
        raise error(errno.ESTALE)

    def _hosts(self, one: int, other: int) -> BackingHandler | None:
        """As _host(), for two inodes of one request. EXDEV unless both or none are the host's."""
        host = self._host(one)
        if host is not self._host(other):
            raise error(errno.EXDEV)
        return host

    def _referenced(self, node: Node) -> Entry:
        """The reply that gives the kernel one more reference to a node."""
        self._table.inode_hold(node.ino)
        return self._replies.entry(node.ino, node.kind)

    def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        for inode, count in inode_list:
            try:
                (self._host(inode) or self._tree).forget(inode, count)
            except Exception:
                log.exception("forget of inode %d failed", inode)

    async def lookup(self, parent_inode: int, name: bytes, caller: Caller) -> Entry:
        if host := self._host(parent_inode):
            return await host.lookup(parent_inode, name, caller)
        try:
            return self._referenced(self._tree.lookup(parent_inode, name))
        except FileNotFoundError:
            return self._replies.no_entry

    async def create(self, parent_inode: int, name: bytes, mode: int, flags: int, caller: Caller) -> tuple[int, Entry]:
        try:
            if host := self._host(parent_inode):
                return await host.create(parent_inode, name, mode, flags, caller)
            node = self._tree.create(parent_inode, name, mode, caller)
        except FileExistsError:
            if flags & os.O_EXCL:
                raise
            # The kernel remembers that there was no such name. On ESTALE it looks the name up again and opens the file.
            raise error(errno.ESTALE) from None
        try:
            handle = self._table.file_open(node.ino, flags)
        except OSError:
            if node.names:
                self._tree.unlink(parent_inode, name)
            else:
                self._tree.forget(node.ino, 0)
            raise
        return handle, self._referenced(node)

    async def mknod(self, parent_inode: int, name: bytes, mode: int, rdev: int, caller: Caller) -> Entry:
        if host := self._host(parent_inode):
            return await host.mknod(parent_inode, name, mode, rdev, caller)
        return self._referenced(self._tree.mknod(parent_inode, name, mode, rdev, caller))

    async def mkdir(self, parent_inode: int, name: bytes, mode: int, caller: Caller) -> Entry:
        if host := self._host(parent_inode):
            return await host.mkdir(parent_inode, name, mode, caller)
        return self._referenced(self._tree.mkdir(parent_inode, name, mode, caller))

    async def symlink(self, parent_inode: int, name: bytes, target: bytes, caller: Caller) -> Entry:
        if host := self._host(parent_inode):
            return await host.symlink(parent_inode, name, target, caller)
        return self._referenced(self._tree.symlink(parent_inode, name, target, caller))

    async def unlink(self, parent_inode: int, name: bytes, caller: Caller) -> None:
        if host := self._host(parent_inode):
            await host.unlink(parent_inode, name, caller)
        else:
            self._tree.unlink(parent_inode, name, caller)

    async def rmdir(self, parent_inode: int, name: bytes, caller: Caller) -> None:
        if host := self._host(parent_inode):
            await host.rmdir(parent_inode, name, caller)
        else:
            self._tree.rmdir(parent_inode, name, caller)

    async def open(self, inode: int, flags: int, caller: Caller) -> int:
        if host := self._host(inode):
            return await host.open(inode, flags, caller)
        node = self._tree.node(inode)
        if not isinstance(node, ControlFile):
            raise error(errno.EISDIR if isinstance(node, Directory) else errno.EINVAL)
        if flags & (os.O_ACCMODE | os.O_TRUNC) != os.O_RDONLY:
            raise error(errno.EACCES)
        return self._handles.add(await node.open(caller.uid))

    async def readlink(self, inode: int, caller: Caller) -> bytes:
        if host := self._host(inode):
            return await host.readlink(inode, caller)
        node = self._tree.node(inode)
        if not isinstance(node, Symlink):
            raise error(errno.EINVAL)
        self._table.inode_read(inode)
        return node.target

    async def link(self, inode: int, new_parent_inode: int, new_name: bytes, caller: Caller) -> Entry:
        if host := self._hosts(inode, new_parent_inode):
            return await host.link(inode, new_parent_inode, new_name, caller)
        return self._referenced(self._tree.link(inode, new_parent_inode, new_name, caller))

    async def rename(
        self,
        parent_inode_old: int,
        name_old: bytes,
        parent_inode_new: int,
        name_new: bytes,
        flags: int,
        caller: Caller,
    ) -> None:
        names = (parent_inode_old, name_old, parent_inode_new, name_new)
        if host := self._hosts(parent_inode_old, parent_inode_new):
            await host.rename(*names, flags, caller)
        else:
            self._tree.rename(*names, flags, caller)

    async def getattr(self, inode: int, caller: Caller) -> Entry:
        return await self._only_host(inode).getattr(inode, caller)

    async def setattr(self, inode: int, changes: Changes, fh: int | None, caller: Caller) -> Entry:
        return await self._only_host(inode).setattr(inode, changes, fh, caller)

    async def statfs(self, inode: int, caller: Caller) -> bytes:
        return await self._only_host(inode).statfs(inode, caller)

    async def setxattr(self, inode: int, name: bytes, value: bytes, flags: int, caller: Caller) -> None:
        await self._only_host(inode).setxattr(inode, name, value, flags, caller)

    async def getxattr(self, inode: int, name: bytes, caller: Caller) -> bytes:
        return await self._only_host(inode).getxattr(inode, name, caller)

    async def listxattr(self, inode: int, caller: Caller) -> Sequence[bytes]:
        return await self._only_host(inode).listxattr(inode, caller)

    async def removexattr(self, inode: int, name: bytes, caller: Caller) -> None:
        await self._only_host(inode).removexattr(inode, name, caller)

    async def opendir(self, inode: int, caller: Caller) -> int:
        return await self._only_host(inode).opendir(inode, caller)

    async def readdir(self, fh: int, start: int, listing: Listing) -> None:
        await self._directory(fh).readdir(start, listing)

    async def fsyncdir(self, fh: int, datasync: bool) -> None:
        await self._handles.existing(fh).sync(data_only=datasync)

    async def read(self, fh: int, off: int, size: int) -> bytes:
        return await self._handles.existing(fh).read(off, size)

    async def release(self, fh: int) -> None:
        opened = self._handles.pop(fh)
        if opened is not None:
            await opened.release()
