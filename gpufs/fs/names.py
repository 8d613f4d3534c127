"""Answers the requests about names in memory: the root, the GPU directories, and the files below ``.gpufs``."""

import os
import stat
from dataclasses import dataclass
from errno import EACCES, EINVAL, EISDIR, ESTALE

import pyfuse3

from gpufs.engine import Mount
from gpufs.fs.control_files import ControlFile, StreamFile
from gpufs.fs.errors import error
from gpufs.fs.handles import Handles, Opened
from gpufs.fs.nodes import BufferFile, Directory, Node, Symlink
from gpufs.fs.replies import Replies
from gpufs.fs.tree import Tree

UNNAMED = b"/"  # the name that the data plane gives for O_TMPFILE


@dataclass(slots=True)
class _Listing(Opened):
    """A directory that a program lists, up to the entry whose cookie is ``last``.

    Later entries are left out: a program that creates a name for each one it finds would never reach the end.
    """

    directory: Directory
    table: Mount
    reply: pyfuse3.EntryAttributes
    last: int

    async def readdir(self, start: int, token: pyfuse3.ReaddirToken) -> None:
        directory, reply, add = self.directory, self.reply, pyfuse3.readdir_reply
        if start == 0:  # also after rewinddir(3)
            self.last = directory.last_cookie
        # The kernel takes no references to "." and "..".
        for cookie, name, node in ((1, b".", directory), (2, b"..", directory.parent or directory)):
            if start < cookie:
                reply.st_ino = node.ino
                reply.st_mode = stat.S_IFDIR
                if not add(token, name, reply, cookie):
                    return
        for cookie, name, child in directory.after(start, self.last):
            reply.st_ino = child.ino
            reply.st_mode = child.kind
            if not add(token, name, reply, cookie):
                return
            self.table.inode_hold(child.ino)


class NamesHandler:
    """Joins the tree of names to the engine's inode table."""

    def __init__(self, tree: Tree, table: Mount, handles: Handles, replies: Replies) -> None:
        self._tree = tree
        self._table = table
        self._handles = handles
        self._reply = replies.entry(0, 0)  # one is enough: pyfuse3 copies a reply before it runs anything else
        self._no_entry = replies.no_entry

    # ---- names ----

    async def lookup(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        try:
            node = self._tree.lookup(parent_inode, name)
        except FileNotFoundError:
            return self._no_entry
        return self._referenced(node)

    def forget(self, inode: int, count: int) -> None:
        """The kernel drops references."""
        self._tree.forget(inode, count)

    async def create(
        self, parent_inode: int, name: bytes, mode: int, flags: int, ctx: pyfuse3.RequestContext
    ) -> tuple[pyfuse3.FileInfo, pyfuse3.EntryAttributes]:
        try:
            if name == UNNAMED:
                node = self._tree.create_unnamed(parent_inode, mode, ctx.uid, ctx.gid, ctx.umask)
            else:
                node = self._tree.create(parent_inode, name, mode, ctx.uid, ctx.gid, ctx.umask)
        except FileExistsError:
            if flags & os.O_EXCL:
                raise
            # The kernel believed that there is no such name. On ESTALE it looks the name up again and opens the file.
            raise error(ESTALE) from None
        try:
            info = self._open_buffer(node, flags)
        except OSError:
            if node.names:
                self._tree.unlink(parent_inode, name)
            else:
                self._tree.forget(node.ino, 0)
            raise
        return info, self._referenced(node)

    async def mknod(
        self, parent_inode: int, name: bytes, mode: int, rdev: int, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        return self._referenced(self._tree.mknod(parent_inode, name, mode, rdev, ctx.uid, ctx.gid, ctx.umask))

    async def mkdir(
        self, parent_inode: int, name: bytes, mode: int, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        return self._referenced(self._tree.mkdir(parent_inode, name, mode, ctx.uid, ctx.gid, ctx.umask))

    async def symlink(
        self, parent_inode: int, name: bytes, target: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        return self._referenced(self._tree.symlink(parent_inode, name, target, ctx.uid, ctx.gid))

    async def link(
        self, inode: int, new_parent_inode: int, new_name: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        return self._referenced(self._tree.link(inode, new_parent_inode, new_name))

    async def readlink(self, inode: int, ctx: pyfuse3.RequestContext) -> bytes:
        node = self._tree.node(inode)
        if not isinstance(node, Symlink):
            raise error(EINVAL)
        self._table.inode_read(inode)
        return node.target

    async def unlink(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        self._tree.unlink(parent_inode, name)

    async def rmdir(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        self._tree.rmdir(parent_inode, name)

    async def rename(
        self,
        parent_inode_old: int,
        name_old: bytes,
        parent_inode_new: int,
        name_new: bytes,
        flags: int,
        ctx: pyfuse3.RequestContext,
    ) -> None:
        self._tree.rename(parent_inode_old, name_old, parent_inode_new, name_new, flags, ctx.uid, ctx.gid)

    # ---- opening ----

    async def opendir(self, inode: int, ctx: pyfuse3.RequestContext) -> int:
        raise error(ESTALE)  # the engine opens directories: this one has just gone from its table

    def listing(self, inode: int) -> Opened:
        """What a program sees of a directory that it has opened."""
        directory = self._tree.directory(inode)
        return _Listing(directory, self._table, self._reply, directory.last_cookie)

    async def open(self, inode: int, flags: int, ctx: pyfuse3.RequestContext) -> pyfuse3.FileInfo:
        node = self._tree.node(inode)
        if isinstance(node, (ControlFile, StreamFile)):
            if flags & (os.O_ACCMODE | os.O_TRUNC) != os.O_RDONLY:
                raise error(EACCES)
            handle = self._handles.add(await node.open(ctx.uid))
            return pyfuse3.FileInfo(fh=handle, direct_io=True, keep_cache=False)
        raise error(EISDIR if isinstance(node, Directory) else EINVAL)

    def _open_buffer(self, node: BufferFile, flags: int) -> pyfuse3.FileInfo:
        return pyfuse3.FileInfo(fh=self._table.file_open(node.ino, flags), direct_io=True, keep_cache=False)

    def _referenced(self, node: Node) -> pyfuse3.EntryAttributes:
        """The reply that gives the kernel one more reference to a node."""
        self._table.inode_hold(node.ino)
        self._reply.st_ino = node.ino
        self._reply.st_mode = node.kind
        return self._reply
