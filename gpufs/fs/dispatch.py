"""Hands each request that the native data plane leaves to Python to the one that answers it.

Native code answers OPEN, READ, WRITE, LSEEK, FALLOCATE, COPY_FILE_RANGE, FSYNC and IOCTL of buffers, LOOKUP and OPENDIR
of directories except those of the host, and GETATTR, STATX, SETATTR, STATFS and the operations on extended attributes
of everything in its inode table. In the replies given here it fills in the attributes from that table: Python sets only
the inode number, the type and the time-outs.

Requests about an inode go to :class:`~gpufs.fs.names.NamesHandler`, or for inodes of the host to
:class:`~gpufs.fs.backing.BackingHandler`; requests about an open file go to what its handle leads to
(:mod:`gpufs.fs.handles`).

pyfuse3 ends the whole mount if a handler raises anything but FUSEError. So an OSError becomes its errno here, and
everything else is logged with its traceback and becomes EIO. ENOSYS never leaves: the kernel would switch the operation
off for the whole mount.
"""

import errno
import functools
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import pyfuse3

from gpufs.engine import Mount
from gpufs.fs.backing import BackingHandler
from gpufs.fs.backing.inodes import FIRST_INODE
from gpufs.fs.errors import error
from gpufs.fs.handles import Handles, Opened
from gpufs.fs.names import NamesHandler

log = logging.getLogger(__name__)

# Requests whose first argument, an inode or the directory of a name, selects the handler.
_BY_INODE: Final = "lookup create mknod mkdir symlink readlink unlink rmdir opendir open".split()
# Requests about attributes. The engine answers them for every inode in its table.
_OF_HOST: Final = "getattr setattr setxattr getxattr listxattr removexattr".split()

P = ParamSpec("P")
T = TypeVar("T")
Handler = NamesHandler | BackingHandler


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


class Operations(pyfuse3.Operations):
    """The control plane of one mount, for :func:`pyfuse3.init`."""

    supports_dot_lookup = True
    enable_writeback_cache = False
    enable_acl = False

    def __init__(
        self, table: Mount, handles: Handles, names: NamesHandler, backing: BackingHandler | None = None
    ) -> None:
        super().__init__()
        self._table = table
        self._handles = handles
        self._names = names
        self._backing = backing

    def _directory(self, fh: int) -> Opened:
        """An open directory. The engine opens all but those of the host; Python learns of them when they are read."""
        opened = self._handles.get(fh)
        if opened is None and (inode := self._table.directory_of(fh)) is not None:
            opened = self._names.listing(inode)
            self._handles.add(opened, fh)
        return opened or self._handles.existing(fh)

    def _handler(self, inode: int) -> Handler:
        return self._names if self._backing is None or inode < FIRST_INODE else self._backing

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        for inode, count in inode_list:
            try:
                self._handler(inode).forget(inode, count)
            except Exception:
                log.exception("forget of inode %d failed", inode)

    @_request
    async def link(
        self, inode: int, new_parent_inode: int, new_name: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        handler = self._handler(inode)
        if handler is not self._handler(new_parent_inode):
            raise error(errno.EXDEV)
        return await handler.link(inode, new_parent_inode, new_name, ctx)

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
        handler = self._handler(parent_inode_old)
        if handler is not self._handler(parent_inode_new):
            raise error(errno.EXDEV)
        await handler.rename(parent_inode_old, name_old, parent_inode_new, name_new, flags, ctx)

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
        if opened is None:
            self._table.file_release(fh)
        else:
            await opened.release()

    @_request
    async def releasedir(self, fh: int) -> None:
        opened = self._handles.pop(fh)
        if opened is not None:
            await opened.release()


def _by_inode(name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
    async def request(self: Operations, inode: int, *arguments: Any) -> Any:
        try:
            handler = self._handler(inode)
            if handler is self._names and name in _OF_HOST:
                raise error(errno.ESTALE)  # the inode has just gone from the engine's table
            return await getattr(handler, name)(inode, *arguments)
        except Exception as failure:  # noqa: BLE001 - logged and turned into an errno
            raise _fuse_error(name, failure) from None

    request.__name__ = name
    return request


for _name in (*_BY_INODE, *_OF_HOST):
    setattr(Operations, _name, _by_inode(_name))
