"""Hands each request that the native data plane leaves to Python to the one that answers it.

Native code answers OPEN, READ, WRITE, LSEEK, FALLOCATE, COPY_FILE_RANGE, FLUSH, FSYNC, IOCTL and RELEASE of buffers,
LOOKUP, OPENDIR, FSYNCDIR and RELEASEDIR of directories except those of the host, and GETATTR, STATX, SETATTR, STATFS
and the operations on extended attributes of everything in its inode table. In the replies given here it fills in the
attributes from that table: Python sets only the inode number, the type and the time-outs.

Requests about an inode go to the :class:`~gpufs.fs.tree.Tree`, or for inodes of the host to
:class:`~gpufs.fs.backing.BackingHandler`; requests about an open file go to what its handle leads to
(:mod:`gpufs.fs.handles`).

pyfuse3 ends the whole mount if a handler raises anything but FUSEError. So an OSError becomes its errno here, and
everything else is logged with its traceback and becomes EIO. ENOSYS never leaves: the kernel would switch the operation
off for the whole mount.
"""

import errno
import functools
import logging
import os
import stat
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import pyfuse3

from gpufs.engine import Mount
from gpufs.fs.backing import BackingHandler
from gpufs.fs.backing.inodes import FIRST_INODE
from gpufs.fs.control_files import ControlFile
from gpufs.fs.errors import error
from gpufs.fs.handles import Handles, Opened
from gpufs.fs.nodes import Directory, Node, Symlink
from gpufs.fs.replies import Replies
from gpufs.fs.tree import Tree

log = logging.getLogger(__name__)

# Requests whose first argument, an inode or the directory of a name, selects who answers. The tree answers the first
# ones; the engine answers the last ones for all inodes in its table.
_OF_NAMES: Final = "mknod mkdir symlink unlink rmdir".split()
_OF_HOST: Final = "opendir getattr setattr setxattr getxattr listxattr removexattr".split()

P = ParamSpec("P")
T = TypeVar("T")


def _fuse_error(request: str, failure: Exception) -> pyfuse3.FUSEError:
    if isinstance(failure, pyfuse3.FUSEError):
        return failure
    if isinstance(failure, OSError):
        code = failure.errno or errno.EIO
        return pyfuse3.FUSEError(errno.EOPNOTSUPP if code == errno.ENOSYS else code)
    if isinstance(failure, MemoryError):
        return pyfuse3.FUSEError(errno.ENOMEM)
    log.error("%s failed", request, exc_info=failure)
    return pyfuse3.FUSEError(errno.EIO)


def _request(
    function: Callable[Concatenate["Operations", P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate["Operations", P], Coroutine[Any, Any, T]]:
    """Wraps a request so that only FUSEError leaves it."""

    @functools.wraps(function)
    async def wrapped(self: "Operations", /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await function(self, *args, **kwargs)
        except Exception as failure:  # noqa: BLE001 - logged and turned into an errno
            raise _fuse_error(function.__name__, failure) from None

    return wrapped


class _Listing(Opened):
    """A directory that a program lists, as far as the names reached when the listing began.

    So each name that stays is listed once while others come and go, and a program that creates a name for each one it
    finds reaches the end.
    """

    __slots__ = ("_directory", "_end", "_order", "_reply", "_table")

    def __init__(self, directory: Directory, table: Mount, reply: pyfuse3.EntryAttributes) -> None:
        self._directory = directory
        self._table = table
        self._reply = reply
        self._order = directory.begin_listing()
        self._end = self._order.next

    async def readdir(self, start: int, token: pyfuse3.ReaddirToken) -> None:
        directory, reply, add = self._directory, self._reply, pyfuse3.readdir_reply
        if start == 0:  # also after rewinddir(3)
            self._end = self._order.next
        # The kernel takes no references to "." and "..".
        for cookie, name, node in ((1, b".", directory), (2, b"..", directory.parent or directory)):
            if start < cookie:
                reply.st_ino = node.ino
                reply.st_mode = stat.S_IFDIR
                if not add(token, name, reply, cookie):
                    return
        for number, name in self._order.between(max(start - 2, 0), self._end):
            child = directory.entries[name]
            reply.st_ino = child.ino
            reply.st_mode = child.kind
            if not add(token, name, reply, number + 3):
                return
            self._table.inode_hold(child.ino)

    async def release(self) -> None:
        self._directory.end_listing()


class Operations(pyfuse3.Operations):
    """The control plane of one mount, for :func:`pyfuse3.init`."""

    supports_dot_lookup = True
    enable_writeback_cache = False
    enable_acl = False

    def __init__(
        self, table: Mount, handles: Handles, tree: Tree, replies: Replies, backing: BackingHandler | None = None
    ) -> None:
        super().__init__()
        self._table = table
        self._handles = handles
        self._tree = tree
        self._backing = backing
        self._reply = replies.entry(0, 0)  # one is enough: pyfuse3 copies a reply before it runs anything else
        self._no_entry = replies.no_entry

    def _directory(self, fh: int) -> Opened:
        """An open directory. The engine opens all but those of the host; Python learns of them when they are read."""
        opened = self._handles.get(fh)
        if opened is None and (inode := self._table.directory_of(fh)) is not None:
            opened = _Listing(self._tree.directory(inode), self._table, self._reply)
            self._handles.add(opened, fh)
        return opened or self._handles.existing(fh)

    def _host(self, inode: int) -> BackingHandler | None:
        """What answers for an inode of the host; None for another one."""
        return self._backing if inode >= FIRST_INODE else None

    def _hosts(self, one: int, other: int) -> BackingHandler | None:
        """As _host(), for two inodes of one request. EXDEV unless both or none are the host's."""
        host = self._host(one)
        if host is not self._host(other):
            raise error(errno.EXDEV)
        return host

    def _referenced(self, node: Node) -> pyfuse3.EntryAttributes:
        """The reply that gives the kernel one more reference to a node."""
        self._table.inode_hold(node.ino)
        self._reply.st_ino = node.ino
        self._reply.st_mode = node.kind
        return self._reply

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        for inode, count in inode_list:
            try:
                (self._host(inode) or self._tree).forget(inode, count)
            except Exception:
                log.exception("forget of inode %d failed", inode)

    @_request
    async def lookup(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        if host := self._host(parent_inode):
            return await host.lookup(parent_inode, name, ctx)
        try:
            return self._referenced(self._tree.lookup(parent_inode, name))
        except FileNotFoundError:
            return self._no_entry

    @_request
    async def create(
        self, parent_inode: int, name: bytes, mode: int, flags: int, ctx: pyfuse3.RequestContext
    ) -> tuple[pyfuse3.FileInfo, pyfuse3.EntryAttributes]:
        try:
            if host := self._host(parent_inode):
                return await host.create(parent_inode, name, mode, flags, ctx)
            node = self._tree.create(parent_inode, name, mode, ctx)
        except FileExistsError:
            if flags & os.O_EXCL:
                raise
            # The kernel remembers that there was no such name. On ESTALE it looks the name up again and opens the file.
            raise error(errno.ESTALE) from None
        try:
            info = pyfuse3.FileInfo(fh=self._table.file_open(node.ino, flags), direct_io=True, keep_cache=False)
        except OSError:
            if node.names:
                self._tree.unlink(parent_inode, name)
            else:
                self._tree.forget(node.ino, 0)
            raise
        return info, self._referenced(node)

    @_request
    async def open(self, inode: int, flags: int, ctx: pyfuse3.RequestContext) -> pyfuse3.FileInfo:
        if host := self._host(inode):
            return await host.open(inode, flags, ctx)
        node = self._tree.node(inode)
        if not isinstance(node, ControlFile):
            raise error(errno.EISDIR if isinstance(node, Directory) else errno.EINVAL)
        if flags & (os.O_ACCMODE | os.O_TRUNC) != os.O_RDONLY:
            raise error(errno.EACCES)
        handle = self._handles.add(await node.open(ctx.uid))
        return pyfuse3.FileInfo(fh=handle, direct_io=True, keep_cache=False)

    @_request
    async def readlink(self, inode: int, ctx: pyfuse3.RequestContext) -> bytes:
        if host := self._host(inode):
            return await host.readlink(inode, ctx)
        node = self._tree.node(inode)
        if not isinstance(node, Symlink):
            raise error(errno.EINVAL)
        self._table.inode_read(inode)
        return node.target

    @_request
    async def link(
        self, inode: int, new_parent_inode: int, new_name: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        if host := self._hosts(inode, new_parent_inode):
            return await host.link(inode, new_parent_inode, new_name, ctx)
        return self._referenced(self._tree.link(inode, new_parent_inode, new_name, ctx))

    @_request
    async def rename(
        self,
        parent_inode_old: int,
        name_old: bytes,
        parent_inode_new: int,
        name_new: bytes,
        flags: int,
        ctx: pyfuse3.RequestContext,
    ) -> None:
        names = (parent_inode_old, name_old, parent_inode_new, name_new)
        if host := self._hosts(parent_inode_old, parent_inode_new):
            await host.rename(*names, flags, ctx)
        else:
            self._tree.rename(*names, flags, ctx)

    @_request
    async def access(self, inode: int, mode: int, ctx: pyfuse3.RequestContext) -> bool:
        return True  # the mount has default_permissions: the kernel has checked

    @_request
    async def readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        await self._directory(fh).readdir(start_id, token)

    @_request
    async def fsyncdir(self, fh: int, datasync: bool) -> None:
        await self._handles.existing(fh).sync(data_only=datasync)

    @_request
    async def read(self, fh: int, off: int, size: int) -> bytes:
        return await self._handles.existing(fh).read(off, size)

    @_request
    async def write(self, fh: int, off: int, buf: bytes) -> int:
        raise error(errno.EBADF)  # control files are never open for writing, and the engine writes all others

    @_request
    async def flush(self, fh: int) -> None:
        pass

    @_request
    async def fsync(self, fh: int, datasync: bool) -> None:
        pass

    @_request
    async def release(self, fh: int) -> None:
        opened = self._handles.pop(fh)
        if opened is not None:
            await opened.release()

    @_request
    async def releasedir(self, fh: int) -> None:
        await self.release(fh)


def _by_inode(name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
    async def request(self: Operations, inode: int, *arguments: Any) -> Any:
        if host := self._host(inode):
            return await getattr(host, name)(inode, *arguments)
        if name in _OF_HOST:
            raise error(errno.ESTALE)  # the inode has just gone from the engine's table
        node = getattr(self._tree, name)(inode, *arguments)
        return None if node is None else self._referenced(node)

    request.__name__ = name
    return _request(request)


for _name in (*_OF_NAMES, *_OF_HOST):
    setattr(Operations, _name, _by_inode(_name))
