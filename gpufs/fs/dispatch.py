"""Routes the FUSE requests that the native code does not answer.

Native code answers all requests about inodes of its table and about buffers, and READ, WRITE and what else moves bytes
of the host's files. The rest is here: requests about the host's inodes, which :class:`~gpufs.fs.backing.BackingHandler`
answers, and those about control files and other open files of the control plane (:mod:`gpufs.fs.handles`).

An OSError that is raised here becomes its errno, everything else EIO (:mod:`gpufs.fs.connection`).
"""

import errno
import logging
import os
from collections.abc import Mapping, Sequence

from gpufs.fs.backing import BackingHandler
from gpufs.fs.backing.inodes import FIRST_INODE
from gpufs.fs.control_files import ControlFile
from gpufs.fs.errors import error
from gpufs.fs.handles import Handles
from gpufs.fs.replies import Listing
from gpufs.fs.requests import Caller

log = logging.getLogger(__name__)


class Operations:
    """The control plane of one mount.

    Parameters
    ----------
    handles
        The open files of the control plane.
    control_files
        By inode number.
    backing
        What answers for the host's inodes, if the mount shows directories of the host.
    """

    def __init__(
        self, handles: Handles, control_files: Mapping[int, ControlFile], backing: BackingHandler | None = None
    ) -> None:
        self._handles = handles
        self._control_files = control_files
        self._backing = backing

    @property
    def host_inodes(self) -> int:
        """How many inodes of the host the kernel knows."""
        return self._backing.inode_count if self._backing is not None else 0

    def host(self, inode: int) -> BackingHandler:
        """What answers for an inode of the host. ESTALE for another one: it has just gone from the engine's table."""
        if self._backing is None or inode < FIRST_INODE:
            raise error(errno.ESTALE)
        return self._backing

    def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        """Drop references of the kernel."""
        for inode, count in inode_list:
            if self._backing is None or inode < FIRST_INODE:
                continue  # gone already
            try:
                self._backing.forget(inode, count)
            except Exception:
                log.exception("forget of inode %d failed", inode)

    async def open(self, inode: int, flags: int, caller: Caller) -> int:
        """Open a control file or a file of the host; the result is the handle."""
        file = self._control_files.get(inode)
        if file is None:
            return await self.host(inode).open(inode, flags, caller)
        if flags & (os.O_ACCMODE | os.O_TRUNC) != os.O_RDONLY:
            raise error(errno.EACCES)
        return self._handles.add(await file.open(caller.uid))

    async def readdir(self, handle: int, start: int, listing: Listing) -> None:
        """List the entries after a cookie."""
        await self._handles.existing(handle).readdir(start, listing)

    async def fsyncdir(self, handle: int, datasync: bool) -> None:
        """Wait until a directory is on the disk."""
        await self._handles.existing(handle).sync(data_only=datasync)

    async def read(self, handle: int, offset: int, size: int) -> bytes:
        """Read bytes of a control file."""
        return await self._handles.existing(handle).read(offset, size)

    async def release(self, handle: int) -> None:
        """Close a file whose last descriptor is closed."""
        opened = self._handles.pop(handle)
        if opened is not None:
            await opened.release()
