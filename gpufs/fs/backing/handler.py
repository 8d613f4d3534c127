"""Answers the requests about names and attributes below ``backing/``."""

import contextlib
import os
import stat
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from errno import ELOOP, ENODATA, EOPNOTSUPP, EPERM, ERANGE, EROFS, ESTALE, EXDEV
from typing import Final

from gpufs import syscalls
from gpufs.engine import Attributes, Mount
from gpufs.fs.backing import open_files
from gpufs.fs.backing.calls import HostCalls, with_daemons_rights
from gpufs.fs.backing.inodes import FIRST_INODE, BackingNode, Found, HostInodes, Share
from gpufs.fs.backing.open_files import OpenFiles
from gpufs.fs.requests import ROOT_INODE, Caller, Changes, Handles, InodeReply, Listing, Opened, entry_reply, host_reply
from gpufs.syscalls import os_error

DIRECTORY_NAME: Final = b"backing"
_ACLS: Final = (b"system.posix_acl_access", b"system.posix_acl_default")
_TRUSTED: Final = "trusted."


def _truncate(node: BackingNode, size: int) -> None:
    """truncate(2), but raises BlockingIOError instead of waiting for another process's lease."""
    fd = os.open(node.link, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        os.ftruncate(fd, size)
    finally:
        open_files.close_quietly(fd)


def _file_system_status(fd: int) -> bytes:
    """statfs(2) of a file's file system in FUSE's form (struct fuse_kstatfs)."""
    status = os.fstatvfs(fd)
    blocks = (status.f_blocks, status.f_bfree, status.f_bavail, status.f_files, status.f_ffree)
    return struct.pack("=5Q4I24x", *blocks, status.f_bsize, status.f_namemax, status.f_frsize, 0)


def _change_mode(node: BackingNode, wanted: int) -> None:
    """chmod(2) as the caller. Only the kernel takes set-id bits and nothing else, after a write or a truncation.

    (Had the caller asked for that, the kernel would have made sure that it is the owner.)
    """
    now = stat.S_IMODE(os.fstat(node.fd).st_mode)
    if wanted == now:
        return
    if wanted | (now & open_files.SET_ID) == now:
        with with_daemons_rights():
            os.chmod(node.link, wanted)
    else:
        os.chmod(node.link, wanted)


def _fitting(value: bytes, size: int) -> bytes:
    """An extended attribute, or a list of their names, as far as there is room for it; for size 0 only its length."""
    if size == 0:
        return struct.pack("=I4x", len(value))
    if len(value) > size:
        raise os_error(ERANGE)
    return value


def _read_link(node: BackingNode, share: BackingNode) -> bytes:
    """Return the target of a symbolic link. ELOOP if it is absolute, or leads out of the share from its place."""
    target = os.readlink(b"", dir_fd=node.fd)
    parts = target.split(b"/")
    if target.startswith(b"/"):
        raise os_error(ELOOP)
    if b".." not in parts:
        return target
    top = os.readlink(os.fsencode(share.link)).rstrip(b"/") + b"/"
    path = os.readlink(os.fsencode(node.link))
    # The path is one of the names of a link that has several.
    if not path.startswith(top) or os.fstat(node.fd).st_nlink > 1:
        raise os_error(ELOOP)
    depth = path.removeprefix(top).count(b"/")
    for part in parts:
        if part == b"..":
            depth -= 1
        elif part not in (b"", b"."):
            depth += 1
        if depth < 0:
            raise os_error(ELOOP)
    return target


@dataclass(slots=True)
class _ShareListing(Opened):
    """The directory ``backing`` itself, open for reading."""

    handler: "BackingHandler"

    async def readdir(self, start: int, listing: Listing) -> None:
        above = entry_reply(FIRST_INODE, stat.S_IFDIR)
        for cookie, name in ((1, b"."), (2, b"..")):
            if start < cookie and not listing.add(name, above, cookie):
                return
        for cookie, name in enumerate(self.handler.shares, 3):
            if start < cookie:
                if not listing.add(name, self.handler.share_reply(name), cookie):
                    return
                self.handler.shares[name][0].lookups += 1


class BackingHandler:
    """Shows directories of the host below ``backing/``: answers the requests about their inodes."""

    def __init__(
        self,
        mount: Mount,
        handles: Handles,
        shares: Sequence[Share],
        *,
        st_dev: int,
        uid: int,
        gid: int,
    ) -> None:
        """``st_dev``: the mount's device number. OSError, with the path, if a directory cannot be opened."""
        self._mount = mount
        self._handles = handles
        self._inodes = HostInodes(st_dev)
        self._calls = HostCalls(self._inodes)
        self._files = OpenFiles(mount, handles, self._calls)
        directory = Attributes(ino=FIRST_INODE, mode=stat.S_IFDIR | 0o555, uid=uid, gid=gid)
        mount.place(ROOT_INODE, DIRECTORY_NAME, directory)
        self.shares: dict[bytes, tuple[BackingNode, os.stat_result]] = {}
        try:
            for share in shares:
                fd = os.open(share.path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
                status = os.fstat(fd)
                node = self._inodes.meet((fd, status), share, None)
                node.shown = True
                self.shares[os.fsencode(share.name)] = node, status
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        self._inodes.close()

    # ---- helpers ----

    def _node(self, inode: int) -> BackingNode:
        node = self._inodes.get(inode)
        if node is None:
            raise os_error(EPERM if inode == FIRST_INODE else ESTALE)
        return node

    def _changeable(self, inode: int) -> BackingNode:
        node = self._node(inode)
        if node.share.read_only:
            raise os_error(EROFS)
        return node

    def _adopt(self, opened: Found, parent: BackingNode, name: bytes) -> InodeReply:
        """Return the reply that gives the kernel one more reference; takes the descriptor over."""
        node = self._inodes.meet(opened, parent.share, None if name == open_files.UNNAMED else (parent.ino, name))
        node.lookups += 1
        return host_reply(node.ino, opened[1])

    def share_reply(self, name: bytes) -> InodeReply:
        """Return the reply for a shown directory, without asking its server: the kernel asks for attributes itself."""
        node, status = self.shares[name]
        return host_reply(node.ino, status, lasts=False)

    async def _find(self, uid: int, parent: BackingNode, name: bytes) -> InodeReply:
        return self._adopt(await self._calls.look_up(uid, parent, name), parent, name)

    async def _make(self, inode: int, name: bytes, caller: Caller, make: Callable[[BackingNode], None]) -> InodeReply:
        parent = self._changeable(inode)
        await self._calls.run_as_caller(caller, parent, lambda: make(parent))
        return await self._find(caller.uid, parent, name)

    # ---- names ----

    async def lookup(self, parent_inode: int, name: bytes, caller: Caller) -> InodeReply:
        if parent_inode == FIRST_INODE:
            if name in (b".", b".."):
                ino = FIRST_INODE if name == b"." else ROOT_INODE
                self._mount.inode_hold(ino)
                return entry_reply(ino, stat.S_IFDIR)
            if name not in self.shares:
                return entry_reply(0, 0)
            self.shares[name][0].lookups += 1
            return self.share_reply(name)
        parent = self._node(parent_inode)
        if name in (b".", b".."):
            raise os_error(ESTALE)
        try:
            return await self._find(caller.uid, parent, name)
        except FileNotFoundError:
            return entry_reply(0, 0)

    def forget(self, inode: int, count: int) -> None:
        node = self._inodes.get(inode)
        if node is not None:
            self._inodes.forget(node, count)

    async def create(
        self, parent_inode: int, name: bytes, mode: int, flags: int, umask: int, caller: Caller
    ) -> tuple[int, InodeReply]:
        with self._files.count.entered(caller.uid):
            return await self._create(self._changeable(parent_inode), name, mode, flags, umask, caller)

    async def _create(
        self, parent: BackingNode, name: bytes, mode: int, flags: int, umask: int, caller: Caller
    ) -> tuple[int, InodeReply]:
        fd, opened = await self._calls.run_as_caller(
            caller, parent, lambda: self._files.create(parent, name, mode, flags, umask)
        )
        try:
            reply = self._adopt(opened, parent, name)
            node = self._node(reply.ino)
        except BaseException:
            os.close(fd)
            raise
        try:
            return await self._files.opened(node, caller.uid, fd), reply
        except BaseException:
            self.forget(node.ino, 1)  # the kernel does not get the reference
            raise

    async def mknod(
        self, parent_inode: int, mode: int, rdev: int, umask: int, name: bytes, caller: Caller
    ) -> InodeReply:
        def make(parent: BackingNode) -> None:
            os.mknod(name, stat.S_IFMT(mode) | open_files.new_mode(parent, mode, umask), rdev, dir_fd=parent.fd)

        return await self._make(parent_inode, name, caller, make)

    async def mkdir(self, parent_inode: int, mode: int, umask: int, name: bytes, caller: Caller) -> InodeReply:
        def make(parent: BackingNode) -> None:
            os.mkdir(name, open_files.new_mode(parent, mode, umask), dir_fd=parent.fd)

        return await self._make(parent_inode, name, caller, make)

    async def symlink(self, parent_inode: int, name: bytes, target: bytes, caller: Caller) -> InodeReply:
        return await self._make(parent_inode, name, caller, lambda parent: os.symlink(target, name, dir_fd=parent.fd))

    async def link(self, new_parent_inode: int, inode: int, new_name: bytes, caller: Caller) -> InodeReply:
        node, parent = self._node(inode), self._node(new_parent_inode)
        if node.share is not parent.share:
            raise os_error(EXDEV)
        self._changeable(new_parent_inode)

        def make() -> None:
            os.link(os.fsencode(node.link), new_name, dst_dir_fd=parent.fd, follow_symlinks=True)

        await self._calls.run_as_caller(caller, node, make, parent)
        return await self._find(caller.uid, parent, new_name)

    async def readlink(self, inode: int, caller: Caller) -> bytes:
        node = self._node(inode)
        share, _ = self.shares[os.fsencode(node.share.name)]
        return await self._calls.run(caller.uid, node, lambda: _read_link(node, share))

    async def unlink(self, parent_inode: int, name: bytes, caller: Caller) -> None:
        parent = self._changeable(parent_inode)
        await self._calls.run_as_caller(caller, parent, lambda: os.unlink(name, dir_fd=parent.fd))

    async def rmdir(self, parent_inode: int, name: bytes, caller: Caller) -> None:
        parent = self._changeable(parent_inode)
        await self._calls.run_as_caller(caller, parent, lambda: os.rmdir(name, dir_fd=parent.fd))

    async def rename(self, old_parent: int, new_parent: int, old_name: bytes, new_name: bytes, caller: Caller) -> None:
        await self.rename2(old_parent, new_parent, 0, old_name, new_name, caller)

    async def rename2(
        self, old_parent: int, new_parent: int, flags: int, old_name: bytes, new_name: bytes, caller: Caller
    ) -> None:
        old, new = self._node(old_parent), self._node(new_parent)
        if old.share is not new.share:
            raise os_error(EXDEV)
        self._changeable(old_parent)
        await self._calls.run_as_caller(
            caller, old, lambda: syscalls.renameat2(old.fd, old_name, new.fd, new_name, flags), new
        )

    # ---- attributes ----

    async def getattr(self, inode: int, caller: Caller) -> bytes:
        node = self._node(inode)
        status = await self._calls.run(caller.uid, node, lambda: os.fstat(node.fd))
        return host_reply(inode, status).attributes()

    async def setattr(self, inode: int, asked: Changes, fh: int | None, caller: Caller) -> bytes:
        node = self._changeable(inode)
        mode, uid, gid = asked.mode, asked.uid, asked.gid
        size, atime, mtime = asked.size, asked.atime, asked.mtime
        opened = self._handles.get(fh)
        open_fd = opened.fd if isinstance(opened, open_files.OpenHostFile) else None

        def change() -> None:
            if mode is not None and size is not None:
                _change_mode(node, stat.S_IMODE(mode))  # before the host takes set-id bits away by itself
            if size is not None:
                # An open file may be truncated whatever its mode is by now.
                if open_fd is None:
                    _truncate(node, size)
                else:
                    os.ftruncate(open_fd, size)
            if asked == Changes():
                # chown(-1, -1); or a change of contents takes a set-gid bit away, which open() has done.
                with contextlib.suppress(PermissionError):
                    os.chown(node.link, -1, -1)
            if uid is not None or gid is not None:
                os.chown(node.link, -1 if uid is None else uid, -1 if gid is None else gid)
            if mode is not None and size is None:
                wanted = stat.S_IMODE(mode)
                if uid is not None or gid is not None:
                    # The kernel's idea of the set-id bits that a new owner leaves; the host has removed them itself.
                    wanted &= os.fstat(node.fd).st_mode | ~open_files.SET_ID
                _change_mode(node, wanted)
            if atime is not None or mtime is not None:
                now = os.fstat(node.fd)
                times = (now.st_atime_ns if atime is None else atime, now.st_mtime_ns if mtime is None else mtime)
                try:
                    os.utime(node.link, ns=times)
                except PermissionError:
                    # A caller with write access may set both to the present. The kernel lets only the owner set other
                    # times, but does not pass on which of the two this is.
                    if atime is None or atime != mtime:
                        raise
                    os.utime(node.link)

        await self._calls.retry_past_leases(caller.uid, 0, lambda: self._calls.run_as_caller(caller, node, change))
        return await self.getattr(inode, caller)

    async def statfs(self, inode: int, caller: Caller) -> bytes:
        node = self._node(inode)
        return await self._calls.run_as_caller(caller, node, lambda: _file_system_status(node.fd))

    # ---- extended attributes ----

    async def setxattr(self, inode: int, name: bytes, value: bytes, flags: int, caller: Caller) -> None:
        node = self._changeable(inode)
        await self._calls.run_as_caller(caller, node, lambda: os.setxattr(node.link, name, value, flags))

    async def getxattr(self, inode: int, size: int, name: bytes, caller: Caller) -> bytes:
        node = self._node(inode)
        try:
            return _fitting(await self._calls.run_as_caller(caller, node, lambda: os.getxattr(node.link, name)), size)
        except OSError as failure:
            # On a file system without access control lists the kernel's permission check would fail with this.
            if failure.errno == EOPNOTSUPP and name in _ACLS:
                raise os_error(ENODATA) from None
            raise

    async def listxattr(self, inode: int, size: int, caller: Caller) -> bytes:
        node = self._node(inode)
        names = await self._calls.run_as_caller(caller, node, lambda: os.listxattr(node.link))
        # The daemon sees all of them, the caller perhaps not.
        if any(name.startswith(_TRUSTED) for name in names) and caller.uid != 0:
            names = [name for name in names if not name.startswith(_TRUSTED)]
        return _fitting(b"".join(os.fsencode(name) + b"\0" for name in names), size)

    async def removexattr(self, inode: int, name: bytes, caller: Caller) -> None:
        node = self._changeable(inode)
        await self._calls.run_as_caller(caller, node, lambda: os.removexattr(node.link, name))

    # ---- opening ----

    async def open(self, inode: int, flags: int, caller: Caller) -> int:
        node = self._changeable(inode) if open_files.changes(flags) else self._node(inode)
        return await self._files.open(node, flags, caller)

    async def opendir(self, inode: int, caller: Caller) -> int:
        if inode == FIRST_INODE:
            return self._handles.add(_ShareListing(self))
        node = self._node(inode)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        count = self._files.count
        with count.entered(caller.uid):
            fd = await self._calls.run_as_caller(caller, node, lambda: os.open(node.link, flags))
        node.users += 1
        above = entry_reply(node.ino, stat.S_IFDIR)
        return self._handles.add(
            open_files.OpenDirectory(node, fd, caller.uid, self._calls, count, above, self._adopt, self.forget)
        )
