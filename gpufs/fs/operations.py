"""The requests that the native data plane leaves to Python, as pyfuse3 hands them over.

Native code answers READ, WRITE, LSEEK, FALLOCATE, COPY_FILE_RANGE, FSYNC and IOCTL of buffers, and GETATTR, STATX,
SETATTR, STATFS and the operations on extended attributes of all that is in its inode table. In the replies given here
it fills in the attributes from that table: handlers of names set the inode number, the type and the time-outs alone.

pyfuse3 ends the whole mount when a handler raises anything but FUSEError, so every handler is wrapped: an OSError
becomes its errno, everything else is logged with its traceback and becomes EIO. ENOSYS never leaves: the kernel would
switch the operation off for the mount.
"""

import errno
import functools
import logging
import os
import stat
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import pyfuse3
import trio

from gpufs.fs.nodes import BufferFile, ControlFile, Directory, Node, Stream, StreamFile, Symlink
from gpufs.fs.table import InodeTable
from gpufs.fs.tree import Tree, error

log = logging.getLogger(__name__)

# File handles made here count from 1; those of the engine have bit 62 set.
_FIRST_HANDLE = 1
# Bytes that a read of a stream gives at most: the kernel may find no memory for a larger message to it.
_STREAM_PART = 64 << 10
# Seconds that a stream of which there is one at a time is waited for: where a descriptor of it has been closed, which
# mostly was the last one, and where none has.
_ENDING_STREAM_PATIENCE = 10.0
_STREAM_PATIENCE = 0.5
# The name that the data plane gives for O_TMPFILE.
UNNAMED = b"/"

P = ParamSpec("P")
T = TypeVar("T")


def handler(
    function: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Wraps a handler so that only FUSEError leaves it."""

    @functools.wraps(function)
    async def wrapped(self: Any, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await function(self, *args, **kwargs)
        except pyfuse3.FUSEError:
            raise
        except OSError as failure:
            code = failure.errno or errno.EIO
            raise pyfuse3.FUSEError(errno.EOPNOTSUPP if code == errno.ENOSYS else code) from None
        except MemoryError:
            raise pyfuse3.FUSEError(errno.ENOMEM) from None
        except Exception:
            log.exception("%s failed", function.__name__)
            raise pyfuse3.FUSEError(errno.EIO) from None

    return cast(Callable[Concatenate[Any, P], Coroutine[Any, Any, T]], wrapped)


@dataclass(slots=True)
class OpenDirectory:
    """A directory that a program lists. What comes after its entry ``last`` came later, and is not for this listing:

    it would have no end where the program makes a new name for each that it finds.
    """

    directory: Directory
    last: int


class Operations(pyfuse3.Operations):
    """The control plane of one mount, for :func:`pyfuse3.init`.

    Time-outs are in seconds: how long the kernel may trust a name (also that there is none) and attributes.
    """

    supports_dot_lookup = True
    enable_writeback_cache = False
    enable_acl = False

    def __init__(
        self,
        tree: Tree,
        table: InodeTable,
        *,
        entry_timeout: float,
        attribute_timeout: float,
    ) -> None:
        super().__init__()
        self._tree = tree
        self._table = table
        self._entry_timeout = entry_timeout
        self._attribute_timeout = attribute_timeout
        self._next_handle = _FIRST_HANDLE
        self._contents: dict[int, bytes] = {}
        self._streams: dict[int, Stream] = {}
        self._ending_streams: set[int] = set()  # of these
        self._stream_closed = trio.Event()  # of the next one
        self._directories: dict[int, OpenDirectory] = {}
        # pyfuse3 copies a reply before it runs anything else, so one object serves all.
        self._reply = self._entry_reply(0, 0)
        self._no_entry = self._entry_reply(0, 0)

    def inodes_gone(self) -> int:
        """How many inodes there are no more, of the mount and of directories of the host; from some number on."""
        return self._tree.inodes_made - len(self._tree.nodes)

    # ---- names ----

    @handler
    async def lookup(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        try:
            node = self._tree.lookup(parent_inode, name)
        except FileNotFoundError:
            return self._no_entry
        return self._referenced(node)

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        for ino, count in inode_list:
            try:
                self._tree.forget(ino, count)
            except Exception:
                log.exception("forget of inode %d failed", ino)

    @handler
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
            # The kernel believed that there is no such name: it looks again, and opens what it finds.
            raise error(errno.ESTALE) from None
        try:
            info = self._open_buffer(node, flags)
        except (OSError, MemoryError):
            if node.names:
                self._tree.unlink(parent_inode, name)
            else:
                self._tree.forget(node.ino, 0)
            raise
        return info, self._referenced(node)

    @handler
    async def mknod(
        self, parent_inode: int, name: bytes, mode: int, rdev: int, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        return self._referenced(self._tree.mknod(parent_inode, name, mode, rdev, ctx.uid, ctx.gid, ctx.umask))

    @handler
    async def mkdir(
        self, parent_inode: int, name: bytes, mode: int, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        return self._referenced(self._tree.mkdir(parent_inode, name, mode, ctx.uid, ctx.gid, ctx.umask))

    @handler
    async def symlink(
        self, parent_inode: int, name: bytes, target: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        return self._referenced(self._tree.symlink(parent_inode, name, target, ctx.uid, ctx.gid))

    @handler
    async def link(
        self, inode: int, new_parent_inode: int, new_name: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        return self._referenced(self._tree.link(inode, new_parent_inode, new_name))

    @handler
    async def readlink(self, inode: int, ctx: pyfuse3.RequestContext) -> bytes:
        node = self._tree.node(inode)
        if not isinstance(node, Symlink):
            raise error(errno.EINVAL)
        self._table.inode_read(inode)
        return node.target

    @handler
    async def unlink(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        self._tree.unlink(parent_inode, name)

    @handler
    async def rmdir(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        self._tree.rmdir(parent_inode, name)

    @handler
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

    # ---- directories ----

    @handler
    async def opendir(self, inode: int, ctx: pyfuse3.RequestContext) -> int:
        directory = self._tree.directory(inode)
        handle = self._take_handle()
        self._directories[handle] = OpenDirectory(directory, directory.last_cookie)
        return handle

    @handler
    async def readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        opened = self._directories[fh]
        directory = opened.directory
        if start_id == 0:  # also after rewinddir(3)
            opened.last = directory.last_cookie
        reply, add = self._reply, pyfuse3.readdir_reply
        # "." and ".." are no references for the kernel to forget.
        for cookie, name, node in ((1, b".", directory), (2, b"..", directory.parent or directory)):
            if start_id < cookie:
                reply.st_ino = node.ino
                reply.st_mode = stat.S_IFDIR
                if not add(token, name, reply, cookie):
                    return
        for cookie, name, child in directory.after(start_id, opened.last):
            reply.st_ino = child.ino
            reply.st_mode = child.kind
            if not add(token, name, reply, cookie):
                return
            child.lookups += 1

    @handler
    async def releasedir(self, fh: int) -> None:
        self._directories.pop(fh, None)

    @handler
    async def fsyncdir(self, fh: int, datasync: bool) -> None:
        pass

    # ---- attributes ----

    # Those of what the table knows are answered natively; what is left here has gone meanwhile.

    @handler
    async def getattr(self, inode: int, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        raise error(errno.ESTALE)

    @handler
    async def setattr(
        self,
        inode: int,
        attr: pyfuse3.EntryAttributes,
        fields: pyfuse3.SetattrFields,
        fh: int | None,
        ctx: pyfuse3.RequestContext,
    ) -> pyfuse3.EntryAttributes:
        raise error(errno.ESTALE)

    @handler
    async def access(self, inode: int, mode: int, ctx: pyfuse3.RequestContext) -> bool:
        return True  # the mount has default_permissions: the kernel has checked

    # ---- extended attributes ----

    @handler
    async def setxattr(self, inode: int, name: bytes, value: bytes, ctx: pyfuse3.RequestContext) -> None:
        raise error(errno.ESTALE)

    @handler
    async def getxattr(self, inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> bytes:
        raise error(errno.ESTALE)

    @handler
    async def listxattr(self, inode: int, ctx: pyfuse3.RequestContext) -> Sequence[bytes]:
        raise error(errno.ESTALE)

    @handler
    async def removexattr(self, inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        raise error(errno.ESTALE)

    # ---- open files ----

    @handler
    async def open(self, inode: int, flags: int, ctx: pyfuse3.RequestContext) -> pyfuse3.FileInfo:
        node = self._tree.node(inode)
        if isinstance(node, BufferFile):
            return self._open_buffer(node, flags)
        if isinstance(node, ControlFile):
            if flags & (os.O_ACCMODE | os.O_TRUNC) != os.O_RDONLY:
                raise error(errno.EACCES)
            handle = self._take_handle()
            self._contents[handle] = node.produce(ctx.uid)
            return pyfuse3.FileInfo(fh=handle, direct_io=True, keep_cache=False)
        if isinstance(node, StreamFile):
            if flags & (os.O_ACCMODE | os.O_TRUNC) != os.O_RDONLY:
                raise error(errno.EACCES)
            stream = await self._begin(node)
            handle = self._take_handle()
            self._streams[handle] = stream
            return pyfuse3.FileInfo(fh=handle, direct_io=True, keep_cache=False)
        raise error(errno.EISDIR if isinstance(node, Directory) else errno.EINVAL)

    @handler
    async def read(self, fh: int, off: int, size: int) -> bytes:
        stream = self._streams.get(fh)
        if stream is not None:
            return stream.read(min(size, _STREAM_PART))
        return self._content(fh)[off : off + size]

    @handler
    async def write(self, fh: int, off: int, buf: bytes) -> int:
        raise error(errno.EBADF)  # control files are never open for writing, buffers are written natively

    @handler
    async def flush(self, fh: int) -> None:
        if fh in self._streams:
            self._ending_streams.add(fh)

    @handler
    async def fsync(self, fh: int, datasync: bool) -> None:
        pass

    @handler
    async def release(self, fh: int) -> None:
        stream = self._streams.pop(fh, None)
        if stream is not None:
            self._ending_streams.discard(fh)
            stream.close()
            self._stream_closed.set()
            self._stream_closed = trio.Event()
        elif self._contents.pop(fh, None) is None:
            self._table.file_release(fh)

    # ---- inside ----

    async def _begin(self, node: StreamFile) -> Stream:
        """Begins a stream. That of a descriptor which has just been closed may end behind the next one's opening."""
        with trio.move_on_after(_ENDING_STREAM_PATIENCE if self._ending_streams else _STREAM_PATIENCE):
            while True:
                try:
                    return node.begin()
                except OSError as failure:
                    if failure.errno != errno.EBUSY:
                        raise
                await self._stream_closed.wait()
        return node.begin()

    def _take_handle(self) -> int:
        handle = self._next_handle
        self._next_handle += 1
        return handle

    def _content(self, fh: int) -> bytes:
        content = self._contents.get(fh)
        if content is None:
            raise error(errno.EBADF)
        return content

    def _open_buffer(self, node: BufferFile, flags: int) -> pyfuse3.FileInfo:
        return pyfuse3.FileInfo(fh=self._table.file_open(node.ino, flags), direct_io=True, keep_cache=False)

    def _entry_reply(self, ino: int, kind: int) -> pyfuse3.EntryAttributes:
        reply = pyfuse3.EntryAttributes()
        reply.st_ino = ino
        reply.st_mode = kind
        reply.entry_timeout = self._entry_timeout
        reply.attr_timeout = self._attribute_timeout
        return reply

    def _referenced(self, node: Node) -> pyfuse3.EntryAttributes:
        """The reply that gives the kernel one more reference to a node."""
        node.lookups += 1
        reply = self._reply
        reply.st_ino = node.ino
        reply.st_mode = node.kind
        return reply
