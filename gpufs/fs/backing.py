"""Directories of the host, shown below ``backing/NAME``.

A faithful pass-through: what the host says is the answer, errors too. Each inode that the kernel knows is reached by
an O_PATH descriptor, found with openat2 below the shown directory and never through a symbolic link. Attributes come
from the host at each question: these inodes are not in the engine's table. Whatever needs rights is done as the caller,
with his user, group and supplementary groups, on a thread, so neither a slow disk nor a hung server holds up the loop.

Symbolic links that are absolute or lead out of the shown directory are ELOOP when they are read. A directory shown
``:ro`` answers EROFS to every change. This mount itself inside a shown directory is EDEADLK.
"""

import contextlib
import ctypes
import errno
import fcntl
import functools
import logging
import os
import platform
import stat
import struct
import sys
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import pyfuse3
import trio

from gpufs.daemon import threads
from gpufs.engine import SET_NLINK, Attributes
from gpufs.fs.host_inodes import Backing, BackingNode, HostInodes, look_up, open_beneath
from gpufs.fs.nodes import Directory
from gpufs.fs.operations import UNNAMED, Operations, handler
from gpufs.fs.tree import RENAME_EXCHANGE, Tree, error

log = logging.getLogger(__name__)

T = TypeVar("T")
_Found = tuple[int, os.stat_result]

DIRECTORY_NAME: Final = b"backing"
_THREADS: Final = 32  # for the calls of one user on one file system
# Calls of the host that may be under way or wait for a thread: of one user, and of all. pyfuse3 serves more requests
# than that at a time (gpufs/daemon/loop.py), so those that wait for the host never use up its tasks.
_CALLS_OF_A_USER: Final = 1024
_CALLS: Final = 8192
_THREAD_PAUSE: Final = 0.5  # seconds between two attempts to start a thread for work that cannot be refused
# Seconds between two attempts to open a file on which another process has a lease, and until that is an error: the
# kernel breaks a lease after 45 seconds (/proc/sys/fs/lease-break-time).
_LEASE_PAUSE: Final = 0.05
_LEASE_PATIENCE: Final = 60.0
_OPEN_FILE: Final = 4  # descriptors that an open file has, at most
_NOT_THERE: Final = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
_SYS_SETGROUPS: Final = {"x86_64": 116, "aarch64": 159}.get(platform.machine(), -1)
_CHANGES: Final = os.O_WRONLY | os.O_RDWR | os.O_TRUNC
# What an open file here does not have from its caller: the kernel has made names and offsets of these.
_NOT_HANDED_ON: Final = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_APPEND | getattr(os, "O_DIRECT", 0)
_TO_RUN: Final = 0x20  # the kernel opens a program to run it (FMODE_EXEC); no open(2) says so
_SET_ID: Final = stat.S_ISUID | stat.S_ISGID
_IN_MEMORY: Final = (0x01021994, 0x858458F6, 0x958458F6)  # statfs(2)'s types of tmpfs, ramfs and hugetlbfs
_SETTABLE: Final = ("update_atime", "update_gid", "update_mode", "update_mtime", "update_size", "update_uid")
_ACCESS_ACL: Final = "system.posix_acl_access"
_DEFAULT_ACL: Final = "system.posix_acl_default"
_CAP_SYS_ADMIN: Final = 1 << 21
_TRUSTED: Final = "trusted."

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(slots=True)
class _OpenDirectory:
    """A directory that a program reads: ``fd`` is open for it. ``names`` are those that its positions count.

    ``fit``: how many of them the kernel's last question had room for. ``uid``: the user that opened it.
    """

    node: BackingNode
    fd: int
    uid: int
    names: list[bytes]
    fit: int = sys.maxsize


def _close(fd: int) -> None:
    """Closes a descriptor: it is gone whatever its file's server says, which may be the failure of earlier writes."""
    with contextlib.suppress(OSError):
        os.close(fd)


def _handed_on(flags: int) -> int:
    """What open(2) on the host gets of the flags that a caller gave."""
    flags &= ~_NOT_HANDED_ON
    # Access mode 3 asks for the rights to both and gives the use of neither, which the kernel sees to.
    return flags & ~os.O_WRONLY if flags & os.O_ACCMODE == os.O_ACCMODE else flags


def _truncate(node: BackingNode, size: int) -> None:
    """truncate(2), but BlockingIOError instead of waiting for another process's lease."""
    fd = os.open(node.link, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        os.ftruncate(fd, size)
    finally:
        _close(fd)


def _rename(old: int, old_name: bytes, new: int, new_name: bytes, flags: int) -> None:
    if _libc.renameat2(old, old_name, new, new_name, flags):
        raise error(ctypes.get_errno())


def _set_groups(groups: Sequence[int]) -> None:
    """Of the calling thread alone: the C library's function would set those of the process."""
    if _SYS_SETGROUPS < 0:
        raise error(errno.ENOSYS)
    array = (ctypes.c_uint32 * len(groups))(*groups)
    if _libc.syscall(_SYS_SETGROUPS, len(groups), array):
        raise error(ctypes.get_errno())


@contextlib.contextmanager
def _identity(uid: int, gid: int, pid: int) -> Iterator[None]:
    """The calling thread acts as a user, also on file systems: as root's daemon can; a user's acts as itself."""
    if os.geteuid() != 0 or uid == 0:
        yield
        return
    try:
        groups = sorted(pyfuse3.get_sup_groups(pid)) if pid else []
    except (OSError, RuntimeError) as failure:
        if isinstance(failure, OSError) and failure.errno == errno.EMFILE:
            raise
        groups = []  # the caller has gone, or is of another PID namespace: he gets no more than his group
    before = os.getgroups()
    _set_groups(groups)
    try:
        _libc.setfsgid(gid)
        _libc.setfsuid(uid)  # takes the rights over files as well
        yield
    finally:
        _libc.setfsuid(0)
        _libc.setfsgid(os.getegid())
        _set_groups(before)


def _in_memory(fd: int) -> bool:
    """Whether a file's pages are all that there is of it."""
    found = ctypes.create_string_buffer(256)
    return _libc.fstatfs(fd, found) == 0 and ctypes.c_ulong.from_buffer(found).value & 0xFFFFFFFF in _IN_MEMORY


def _room(fd: int) -> bytes:
    """What statfs(2) says of a file's file system, as FUSE has it (struct fuse_kstatfs)."""
    found = os.fstatvfs(fd)
    blocks = (found.f_blocks, found.f_bfree, found.f_bavail, found.f_files, found.f_ffree)
    return struct.pack("=5Q4I24x", *blocks, found.f_bsize, found.f_namemax, found.f_frsize, 0)


@contextlib.contextmanager
def _daemons_rights() -> Iterator[None]:
    """Inside of _identity(): the daemon's own rights over files for a moment."""
    if os.geteuid() != 0:
        yield
        return
    caller = _libc.setfsuid(0)
    try:
        yield
    finally:
        _libc.setfsuid(caller)


def _new_mode(parent: BackingNode, mode: int, umask: int) -> int:
    """Permission bits for a new file: where its directory hands an access control list down, that takes from them."""
    try:
        os.getxattr(parent.link, _DEFAULT_ACL)
    except OSError:
        mode &= ~umask
    return stat.S_IMODE(mode)


def _administers(pid: int) -> bool:
    """Whether a process may know of trusted.* attributes: it has CAP_SYS_ADMIN. Not of one that has gone."""
    try:
        with open(f"/proc/{pid}/status", "rb") as status:
            held = next(line for line in status if line.startswith(b"CapEff:"))
    except (OSError, StopIteration):
        return False
    return bool(int(held.split()[1], 16) & _CAP_SYS_ADMIN)


def _names_in(directory: int) -> list[bytes]:
    """What there is in an open directory now."""
    with os.scandir(directory) as entries:  # from its beginning, wherever the descriptor was left
        return [os.fsencode(entry.name) for entry in entries]


def _look_up_each(parent: BackingNode, names: Sequence[bytes]) -> deque[tuple[bytes, _Found | None]]:
    """What each name leads to, None where there is no such name any more; up to a failure, which the first one's is."""
    each: deque[tuple[bytes, _Found | None]] = deque()
    for name in names:
        try:
            each.append((name, look_up(parent.fd, name)))
        except FileNotFoundError:
            each.append((name, None))
        except OSError:
            if not each:
                raise
            break
    return each


@contextlib.contextmanager
def _used(*nodes: BackingNode) -> Iterator[None]:
    """None of them rests meanwhile."""
    for node in nodes:
        node.users += 1
    try:
        yield
    finally:
        for node in nodes:
            node.users -= 1


def _leads_out(target: bytes, depth: int) -> bool:
    """Whether a link in a directory ``depth`` levels below the shown one leads out of it."""
    if target.startswith(b"/"):
        return True
    for part in target.split(b"/"):
        if part == b"..":
            depth -= 1
            if depth < 0:
                return True
        elif part not in (b"", b"."):
            depth += 1
    return False


class BackingOperations(Operations):
    """The control plane of a mount that shows directories of the host; what is not below them is as ever."""

    def __init__(
        self,
        tree: Tree,
        table: Any,
        *,
        backings: Sequence[Backing],
        device: int,
        uid: int,
        gid: int,
        **options: Any,
    ) -> None:
        """``device``: the st_dev of this mount. OSError, with the path, when a directory cannot be opened."""
        super().__init__(tree, table, **options)
        self._mount = table
        self._threads: dict[tuple[int, int], trio.CapacityLimiter] = {}  # by user and st_dev
        self._calls: Counter[int] = Counter()  # that are under way, by user
        self._in_memory: dict[int, bool] = {}  # file systems by st_dev
        self._inodes = HostInodes(tree.nodes, device, self._descriptors, lambda *entry: table.invalidate_entry(*entry))
        self._listed: dict[int, _OpenDirectory] = {}  # by handle
        # By handle, with the user that opened it. The descriptor of a file open for writing is kept for truncation.
        self._open_files: dict[int, tuple[BackingNode, int, int | None]] = {}
        self._shown = Directory(tree._take_ino(), -1)
        self._shown.fixed = True
        tree._place(tree.root, DIRECTORY_NAME, self._shown, 0o555, uid, gid)
        table.inode_set(tree.root.ino, SET_NLINK, Attributes(nlink=2 + tree.root.subdirectories))
        self._shares: dict[bytes, tuple[BackingNode, os.stat_result]] = {}
        try:
            for share in backings:
                fd = os.open(share.path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
                found = os.fstat(fd)
                node = self._inodes.meet(fd, found, share, None)
                node.names = 1  # stays
                self._shares[os.fsencode(share.name)] = node, found
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Gives the descriptors back."""
        self._inodes.close()
        for directory in self._listed.values():
            os.close(directory.fd)
        self._listed.clear()
        for _, _, kept in self._open_files.values():
            if kept is not None:
                os.close(kept)
        self._open_files.clear()

    def inodes_gone(self) -> int:
        return super().inodes_gone() + self._inodes.made

    # ---- inside ----

    def _backing(self, ino: int) -> BackingNode | None:
        return self._inodes.of(ino)

    def _descriptors(self) -> int:
        """What open files and directories have, at most."""
        return _OPEN_FILE * len(self._open_files) + len(self._listed)

    async def _as_caller(
        self,
        node: BackingNode,
        ctx: pyfuse3.RequestContext,
        work: Callable[[], T],
        *also: BackingNode,
        again: bool = False,
    ) -> T:
        """Runs work, which asks the server of a node's file, on a thread with the caller's identity."""
        uid, gid, pid = ctx.uid, ctx.gid, ctx.pid

        def run() -> T:
            with _identity(uid, gid, pid):
                return work()

        return await self._on_thread(uid, node, run, *also, again=again)

    @contextlib.contextmanager
    def _call_of(self, uid: int) -> Iterator[None]:
        """A call that may wait for the host. EBUSY if this user, or all users together, have too many of them."""
        if self._calls[uid] >= _CALLS_OF_A_USER or self._calls.total() >= _CALLS:
            raise error(errno.EBUSY)
        self._calls[uid] += 1
        try:
            yield
        finally:
            self._calls[uid] -= 1
            if not self._calls[uid]:
                del self._calls[uid]

    async def _in_thread(self, uid: int, device: int, work: Callable[[], T]) -> T:
        """Runs work on one of the threads that a user's calls on a file system have."""
        key = uid, device
        limiter = self._threads.setdefault(key, trio.CapacityLimiter(_THREADS))
        try:
            return await threads.run(work, abandon_on_cancel=True, limiter=limiter)
        finally:
            if not limiter.borrowed_tokens and not limiter.statistics().tasks_waiting:
                self._threads.pop(key, None)

    async def _on_thread(
        self, uid: int, node: BackingNode, work: Callable[[], T], *also: BackingNode, again: bool = False
    ) -> T:
        """Runs work, which asks the server of a node's file, on a thread. This node and others have descriptors then.

        ``again``: work that finds no descriptor for its own use may be repeated; it is, once more inodes rest.
        A server that hangs blocks this user's calls on its files, and unmounting does not wait for it.
        """
        with self._call_of(uid), _used(node, *also):
            for each in (node, *also):
                if each.fd < 0:
                    await self._wake(uid, each)
                else:
                    self._inodes.use(each)
            while True:
                try:
                    return await self._in_thread(uid, node.device_number, work)
                except OSError as failure:
                    if failure.errno != errno.EMFILE or not again or not self._inodes.let_more_rest():
                        raise

    async def _past_leases(self, uid: int, flags: int, attempt: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Retries an open that does not wait until the file's lease is released; the kernel breaks it in the end.

        With O_NONBLOCK the caller gets EAGAIN at once.
        """
        deadline = trio.current_time() + _LEASE_PATIENCE
        while True:
            try:
                return await attempt()
            except BlockingIOError:
                if flags & os.O_NONBLOCK or trio.current_time() >= deadline:
                    raise
            with self._call_of(uid):
                await trio.sleep(_LEASE_PAUSE)

    async def _wake(self, uid: int, node: BackingNode) -> None:
        """Finds an inode that rests again. ESTALE where its names lead to it no more: the kernel looks them up anew."""
        above, path = self._inodes.way_to(node)
        try:
            fd, found = await self._on_thread(uid, above, lambda: look_up(above.fd, path), again=True)
        except OSError as failure:
            raise error(errno.ESTALE if failure.errno in _NOT_THERE else failure.errno or errno.EIO) from None
        if node.fd < 0 and not node.is_at(fd, found):
            os.close(fd)
            raise error(errno.ESTALE)
        self._inodes.wake(node, fd)

    def _give_back(self, uid: int, node: BackingNode, work: Callable[[], None]) -> None:
        """Starts work that releases something of a node's, and raises nothing. Does not wait for it.

        (The kernel sends few RELEASE requests at a time, for all files together, and must not wait either.)
        """
        trio.lowlevel.spawn_system_task(self._give_back_now, uid, node.device_number, work)

    async def _give_back_now(self, uid: int, device: int, work: Callable[[], None]) -> None:
        while True:
            try:
                return await self._in_thread(uid, device, work)
            except OSError:  # no thread can be started now
                await trio.sleep(_THREAD_PAUSE)

    def _changeable(self, *nodes: BackingNode) -> None:
        if any(node.share.read_only for node in nodes):
            raise error(errno.EROFS)

    def _attributes(self, node: BackingNode, found: os.stat_result) -> pyfuse3.EntryAttributes:
        reply = self._entry_reply(node.ino, found.st_mode)
        reply.st_nlink = found.st_nlink
        reply.st_uid = found.st_uid
        reply.st_gid = found.st_gid
        reply.st_rdev = found.st_rdev
        reply.st_size = found.st_size
        reply.st_blocks = found.st_blocks
        reply.st_blksize = found.st_blksize
        reply.st_atime_ns = found.st_atime_ns
        reply.st_mtime_ns = found.st_mtime_ns
        reply.st_ctime_ns = found.st_ctime_ns
        return reply

    def _adopt(self, fd: int, found: os.stat_result, parent: BackingNode, name: bytes) -> pyfuse3.EntryAttributes:
        """The reply that gives the kernel one more reference; takes the descriptor over."""
        entry = None if name == UNNAMED else (parent.ino, name)
        node = self._inodes.meet(fd, found, parent.share, entry)
        node.lookups += 1
        self._inodes.set_entry(node, entry)
        return self._attributes(node, found)

    def _share_reply(self, name: bytes) -> pyfuse3.EntryAttributes:
        """For a shown directory, without asking its server. The kernel asks for attributes when it needs them."""
        share, found = self._shares[name]
        reply = self._attributes(share, found)
        reply.attr_timeout = 0
        return reply

    async def _look_up(self, uid: int, parent: BackingNode, name: bytes) -> tuple[int, os.stat_result]:
        return await self._on_thread(uid, parent, lambda: look_up(parent.fd, name), again=True)

    async def _find(self, uid: int, parent: BackingNode, name: bytes) -> pyfuse3.EntryAttributes:
        fd, found = await self._look_up(uid, parent, name)
        return self._adopt(fd, found, parent, name)

    @contextlib.asynccontextmanager
    async def _parted(self, uid: int, *names: tuple[BackingNode, bytes]) -> AsyncIterator[None]:
        """While names are taken from inodes: those stay without them, as who has them open by O_PATH expects."""
        kept: list[BackingNode] = []
        with contextlib.ExitStack() as stack:
            if self._inodes.some_rest:
                for parent, name in names:
                    with contextlib.suppress(OSError):
                        fd, found = await self._look_up(uid, parent, name)
                        node = self._inodes.known(fd, found, parent.share, (parent.ino, name))
                        if node is None:
                            os.close(fd)
                        else:
                            stack.enter_context(_used(node))
                            kept.append(node)
            yield
            for node in kept:
                self._inodes.set_entry(node, None)

    # ---- names ----

    @handler
    async def lookup(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        if parent_inode == self._shown.ino and name not in (b".", b".."):
            if name not in self._shares:
                return self._no_entry
            self._shares[name][0].lookups += 1
            return self._share_reply(name)
        parent = self._backing(parent_inode)
        if parent is None:
            return await super().lookup(parent_inode, name, ctx)
        if name in (b".", b".."):
            raise error(errno.ESTALE)
        try:
            return await self._find(ctx.uid, parent, name)
        except FileNotFoundError:
            return self._no_entry

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        others = []
        for ino, count in inode_list:
            node = self._backing(ino)
            if node is None:
                others.append((ino, count))
                continue
            node.lookups = max(0, node.lookups - count)
            if node.lookups == 0 and node.names == 0:
                self._inodes.drop(node)
        if others:
            await super().forget(others)

    @handler
    async def create(
        self, parent_inode: int, name: bytes, mode: int, flags: int, ctx: pyfuse3.RequestContext
    ) -> tuple[pyfuse3.FileInfo, pyfuse3.EntryAttributes]:
        parent = self._backing(parent_inode)
        if parent is None:
            return await super().create(parent_inode, name, mode, flags, ctx)
        self._changeable(parent)
        asked = _handed_on(flags) & ~os.O_TMPFILE
        # An existing file is never opened here: it may be a FIFO, or have a lease, and the kernel keeps the whole
        # directory locked until this call returns.
        wanted = asked | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW

        def make() -> tuple[int, int, os.stat_result]:
            permissions = _new_mode(parent, mode, ctx.umask)
            if name == UNNAMED:
                # Without O_EXCL, which the kernel obeys itself.
                fd = os.open(parent.link, asked | os.O_TMPFILE | os.O_CLOEXEC, permissions)
            else:
                fd = open_beneath(parent.fd, name, wanted, permissions)
            try:
                found = os.fstat(fd)
                fd = self._for_both(fd, found, asked)
                return fd, os.open(f"/proc/self/fd/{fd}", os.O_PATH | os.O_CLOEXEC), found
            except BaseException:
                os.close(fd)
                raise

        try:
            fd, path_fd, found = await self._as_caller(parent, ctx, make)
        except FileExistsError:
            if flags & os.O_EXCL:
                raise
            # The kernel had no such name: on ESTALE it looks the name up again and opens the file.
            raise error(errno.ESTALE) from None
        try:
            reply = self._adopt(path_fd, found, parent, name)
            node = self._backing(reply.st_ino)
        except BaseException:
            os.close(fd)
            raise
        assert node is not None
        try:
            handle, kept = await self._on_thread(ctx.uid, node, lambda: self._hand_over(node, fd), again=True)
        except BaseException:
            _close(fd)
            await self.forget([(node.ino, 1)])  # the kernel hears of no reference
            raise
        return self._opened(node, ctx.uid, handle, kept), reply

    async def _make(
        self,
        parent: BackingNode,
        name: bytes,
        ctx: pyfuse3.RequestContext,
        make: Callable[[], None],
        *also: BackingNode,
    ) -> pyfuse3.EntryAttributes:
        self._changeable(parent)
        await self._as_caller(parent, ctx, make, *also)
        return await self._find(ctx.uid, parent, name)

    @handler
    async def mknod(
        self, parent_inode: int, name: bytes, mode: int, rdev: int, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        parent = self._backing(parent_inode)
        if parent is None:
            return await super().mknod(parent_inode, name, mode, rdev, ctx)
        return await self._make(
            parent,
            name,
            ctx,
            lambda: os.mknod(name, stat.S_IFMT(mode) | _new_mode(parent, mode, ctx.umask), rdev, dir_fd=parent.fd),
        )

    @handler
    async def mkdir(
        self, parent_inode: int, name: bytes, mode: int, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        parent = self._backing(parent_inode)
        if parent is None:
            return await super().mkdir(parent_inode, name, mode, ctx)
        return await self._make(
            parent, name, ctx, lambda: os.mkdir(name, _new_mode(parent, mode, ctx.umask), dir_fd=parent.fd)
        )

    @handler
    async def symlink(
        self, parent_inode: int, name: bytes, target: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        parent = self._backing(parent_inode)
        if parent is None:
            return await super().symlink(parent_inode, name, target, ctx)
        return await self._make(parent, name, ctx, lambda: os.symlink(target, name, dir_fd=parent.fd))

    @handler
    async def link(
        self, inode: int, new_parent_inode: int, new_name: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        node, parent = self._backing(inode), self._backing(new_parent_inode)
        if node is None and parent is None:
            return await super().link(inode, new_parent_inode, new_name, ctx)
        if node is None or parent is None or node.share is not parent.share:
            raise error(errno.EXDEV)
        return await self._make(
            parent,
            new_name,
            ctx,
            lambda: os.link(os.fsencode(node.link), new_name, dst_dir_fd=parent.fd, follow_symlinks=True),
            node,
        )

    @handler
    async def readlink(self, inode: int, ctx: pyfuse3.RequestContext) -> bytes:
        node = self._backing(inode)
        if node is None:
            return await super().readlink(inode, ctx)
        target = await self._on_thread(ctx.uid, node, lambda: os.readlink(b"", dir_fd=node.fd))
        if _leads_out(target, self._inodes.depth(node) - 1):
            raise error(errno.ELOOP)
        return target

    @handler
    async def unlink(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        parent = self._backing(parent_inode)
        if parent is None:
            await super().unlink(parent_inode, name, ctx)
            return
        self._changeable(parent)
        async with self._parted(ctx.uid, (parent, name)):
            await self._as_caller(parent, ctx, lambda: os.unlink(name, dir_fd=parent.fd))

    @handler
    async def rmdir(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        parent = self._backing(parent_inode)
        if parent is None:
            await super().rmdir(parent_inode, name, ctx)
            return
        self._changeable(parent)
        async with self._parted(ctx.uid, (parent, name)):
            await self._as_caller(parent, ctx, lambda: os.rmdir(name, dir_fd=parent.fd))

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
        old, new = self._backing(parent_inode_old), self._backing(parent_inode_new)
        if old is None and new is None:
            await super().rename(parent_inode_old, name_old, parent_inode_new, name_new, flags, ctx)
            return
        if old is None or new is None or old.share is not new.share:
            raise error(errno.EXDEV)
        self._changeable(old, new)
        one, other = (old.ino, name_old), (new.ino, name_new)
        moved, replaced = self._inodes.at(one), self._inodes.at(other)
        async with self._parted(ctx.uid, (old, name_old), (new, name_new)):
            await self._as_caller(old, ctx, lambda: _rename(old.fd, name_old, new.fd, name_new, flags), new)
        if flags & RENAME_EXCHANGE and replaced is not None:
            self._inodes.move(replaced, one)
        if moved is not None:
            self._inodes.move(moved, other)

    # ---- directories ----

    @handler
    async def opendir(self, inode: int, ctx: pyfuse3.RequestContext) -> int:
        node = self._backing(inode)
        if node is None:
            return await super().opendir(inode, ctx)

        def open_it() -> int:
            return os.open(node.link, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

        fd = await self._as_caller(node, ctx, open_it, again=True)
        handle = self._take_handle()
        self._listed[handle] = _OpenDirectory(node, fd, ctx.uid, [])
        return handle

    @handler
    async def readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        directory = self._listed.get(fh)
        if directory is None:
            opened = self._directories.get(fh)
            if opened is not None and opened.directory is self._shown:
                self._list_shares(start_id, token)
                return
            await super().readdir(fh, start_id, token)
            return
        node = directory.node
        if start_id == 0:  # the first time, and after rewinddir(3), which shows what is new
            directory.names = await self._on_thread(directory.uid, node, functools.partial(_names_in, directory.fd))
        above = self._entry_reply(node.ino, stat.S_IFDIR)
        for cookie, name in ((1, b"."), (2, b"..")):
            if start_id < cookie and not pyfuse3.readdir_reply(token, name, above, cookie):
                return
        listed = 0
        index = max(start_id - 2, 0)
        while index < len(directory.names):
            names = directory.names[index : index + max(1, min(self._inodes.at_once, directory.fit - listed))]
            try:
                look = functools.partial(_look_up_each, node, names)
                each = await self._on_thread(directory.uid, node, look, again=True)
            except OSError:
                if listed:
                    return  # what the kernel has no answer about it would never forget; it asks again from here on
                raise
            try:
                while each:
                    name, found = each.popleft()
                    index += 1
                    if found is None:
                        continue
                    try:
                        reply = self._adopt(*found, node, name)
                    except OSError as failure:
                        if failure.errno == errno.EDEADLK:
                            continue
                        raise
                    if not pyfuse3.readdir_reply(token, name, reply, index + 2):
                        await self.forget([(reply.st_ino, 1)])
                        directory.fit = listed
                        return
                    listed += 1
            finally:
                for _, found in each:
                    if found is not None:
                        os.close(found[0])

    def _list_shares(self, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        above = self._entry_reply(self._shown.ino, stat.S_IFDIR)
        for cookie, name in ((1, b"."), (2, b"..")):
            if start_id < cookie and not pyfuse3.readdir_reply(token, name, above, cookie):
                return
        for cookie, (name, (share, _)) in enumerate(self._shares.items(), 3):
            if start_id >= cookie:
                continue
            if not pyfuse3.readdir_reply(token, name, self._share_reply(name), cookie):
                return
            share.lookups += 1

    @handler
    async def releasedir(self, fh: int) -> None:
        directory = self._listed.pop(fh, None)
        if directory is None:
            await super().releasedir(fh)
            return
        self._give_back(directory.uid, directory.node, functools.partial(_close, directory.fd))

    @handler
    async def fsyncdir(self, fh: int, datasync: bool) -> None:
        directory = self._listed.get(fh)
        if directory is None:
            await super().fsyncdir(fh, datasync)
            return
        sync = functools.partial(os.fdatasync if datasync else os.fsync, directory.fd)
        await self._on_thread(directory.uid, directory.node, sync)

    # ---- attributes ----

    @handler
    async def getattr(self, inode: int, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        node = self._backing(inode)
        if node is None:
            return await super().getattr(inode, ctx)
        found = await self._on_thread(ctx.uid, node, lambda: os.fstat(node.fd))
        return self._attributes(node, found)

    @handler
    async def setattr(
        self,
        inode: int,
        attr: pyfuse3.EntryAttributes,
        fields: pyfuse3.SetattrFields,
        fh: int | None,
        ctx: pyfuse3.RequestContext,
    ) -> pyfuse3.EntryAttributes:
        node = self._backing(inode)
        if node is None:
            return await super().setattr(inode, attr, fields, fh, ctx)
        self._changeable(node)
        mode, uid, gid = attr.st_mode, attr.st_uid, attr.st_gid
        size, atime, mtime = attr.st_size, attr.st_atime_ns, attr.st_mtime_ns
        _, _, open_fd = self._open_files.get(fh, (node, 0, None)) if fh is not None else (node, 0, None)

        def change() -> None:
            if fields.update_mode and fields.update_size:
                self._change_mode(node, stat.S_IMODE(mode))  # before the host takes set-id bits away by itself
            if fields.update_size:
                # An open file may be truncated whatever its mode says by now.
                if open_fd is None:
                    _truncate(node, size)
                else:
                    os.ftruncate(open_fd, size)
            if not any(getattr(fields, name) for name in _SETTABLE):
                # chown(-1, -1); or a change of contents takes a set-gid bit away, which open() has seen to.
                with contextlib.suppress(PermissionError):
                    os.chown(node.link, -1, -1)
            if fields.update_uid or fields.update_gid:
                os.chown(node.link, uid if fields.update_uid else -1, gid if fields.update_gid else -1)
            if fields.update_mode and not fields.update_size:
                wanted = stat.S_IMODE(mode)
                if fields.update_uid or fields.update_gid:
                    # What the kernel thinks that a new owner leaves of set-id bits; the host has seen to them.
                    wanted &= os.fstat(node.fd).st_mode | ~_SET_ID
                self._change_mode(node, wanted)
            if fields.update_atime or fields.update_mtime:
                now = os.fstat(node.fd)
                times = (
                    atime if fields.update_atime else now.st_atime_ns,
                    mtime if fields.update_mtime else now.st_mtime_ns,
                )
                try:
                    os.utime(node.link, ns=times)
                except PermissionError:
                    # Who may write may set both to the present, and no other than the owner has the kernel let through
                    # for anything else; that it was the present is lost on the way.
                    if not (fields.update_atime and fields.update_mtime and atime == mtime):
                        raise
                    os.utime(node.link)

        await self._past_leases(ctx.uid, 0, lambda: self._as_caller(node, ctx, change))
        found = await self._on_thread(ctx.uid, node, lambda: os.fstat(node.fd))
        return self._attributes(node, found)

    # ---- extended attributes ----

    @handler
    async def setxattr(self, inode: int, name: bytes, value: bytes, ctx: pyfuse3.RequestContext) -> None:
        node = self._backing(inode)
        if node is None:
            await super().setxattr(inode, name, value, ctx)
            return
        self._changeable(node)
        flags, name = int(name[:1]), name[1:]  # the engine has put them together, see Session::relay_setxattr
        await self._as_caller(node, ctx, lambda: os.setxattr(node.link, name, value, flags))

    @handler
    async def getxattr(self, inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> bytes:
        node = self._backing(inode)
        if node is None:
            return await super().getxattr(inode, name, ctx)
        if not name:  # statfs(2), see Session::relay_statfs
            return await self._as_caller(node, ctx, lambda: _room(node.fd))
        try:
            return await self._as_caller(node, ctx, lambda: os.getxattr(node.link, name))
        except OSError as failure:
            # A file system without such lists: the kernel, which checks by them, would take that for a failure.
            if failure.errno == errno.EOPNOTSUPP and os.fsdecode(name) in (_ACCESS_ACL, _DEFAULT_ACL):
                raise error(errno.ENODATA) from None
            raise

    @handler
    async def listxattr(self, inode: int, ctx: pyfuse3.RequestContext) -> Sequence[bytes]:
        node = self._backing(inode)
        if node is None:
            return await super().listxattr(inode, ctx)
        names = await self._as_caller(node, ctx, lambda: os.listxattr(node.link))
        # The daemon may know of all of them.
        if any(name.startswith(_TRUSTED) for name in names) and not _administers(ctx.pid):
            names = [name for name in names if not name.startswith(_TRUSTED)]
        return [os.fsencode(name) for name in names]

    @handler
    async def removexattr(self, inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        node = self._backing(inode)
        if node is None:
            await super().removexattr(inode, name, ctx)
            return
        self._changeable(node)
        await self._as_caller(node, ctx, lambda: os.removexattr(node.link, name))

    # ---- open files ----

    @handler
    async def open(self, inode: int, flags: int, ctx: pyfuse3.RequestContext) -> pyfuse3.FileInfo:
        node = self._backing(inode)
        if node is None:
            return await super().open(inode, flags, ctx)
        if flags & _CHANGES:
            self._changeable(node)
        uid, gid, pid = ctx.uid, ctx.gid, ctx.pid

        def open_it() -> int:
            # Removed on the host while the kernel still knew the name, perhaps: then it looks the name up anew. Who
            # means this very file (by /proc/self/fd) asks once more, which the kernel does for him.
            before = os.fstat(node.fd)
            if not node.nameless and before.st_nlink == 0:
                node.nameless = True
                raise error(errno.ESTALE)
            if not stat.S_ISREG(before.st_mode):
                raise error(errno.EINVAL)
            fd = self._open_for_caller(node, _handed_on(flags) | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                if not flags & os.O_NONBLOCK:
                    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_NONBLOCK)
                # The engine writes as root, for whom the host would leave them.
                found = os.fstat(fd)
                if flags & _CHANGES and uid != 0 and found.st_mode & _SET_ID:
                    self._drop_set_id(fd, found, found.st_gid == gid or found.st_gid in os.getgroups())
                return self._for_both(fd, found, flags)
            except BaseException:
                os.close(fd)
                raise

        def open_and_hand_over() -> tuple[int, int | None]:
            with _identity(uid, gid, pid):
                fd = open_it()
            try:
                return self._hand_over(node, fd)
            except BaseException:
                _close(fd)
                raise

        with _used(node):
            handle, kept = await self._past_leases(
                uid, flags, lambda: self._on_thread(uid, node, open_and_hand_over, again=True)
            )
            return self._opened(node, uid, handle, kept)

    @staticmethod
    def _open_for_caller(node: BackingNode, flags: int) -> int:
        """As the caller: open(2), also of a program that he may run but not read."""
        try:
            return os.open(node.link, flags)
        except PermissionError:
            if not flags & _TO_RUN or not os.access(node.link, os.X_OK, effective_ids=True):
                raise
            with _daemons_rights():
                return os.open(node.link, flags)

    def _for_both(self, fd: int, found: os.stat_result, flags: int) -> int:
        """As the caller: his file in memory that was opened for writing alone, opened for both where he may read it.

        Such a file has one writer at a time, but its pages have any number, through a mapping, which must be readable
        (programs like cp do not ask for that). He himself still cannot read by this handle: the kernel sees to that.
        Takes the descriptor over; returns it where there is nothing to gain.
        """
        if flags & os.O_ACCMODE != os.O_WRONLY or not stat.S_ISREG(found.st_mode):
            return fd
        if found.st_dev not in self._in_memory:
            self._in_memory[found.st_dev] = _in_memory(fd)
        if not self._in_memory[found.st_dev]:
            return fd
        given_up = _NOT_HANDED_ON | os.O_ACCMODE | os.O_TRUNC
        try:
            both = os.open(f"/proc/self/fd/{fd}", flags & ~given_up | os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return fd
        os.close(fd)
        return both

    @staticmethod
    def _change_mode(node: BackingNode, wanted: int) -> None:
        """chmod(2) as the caller; but where set-id bits alone go, that is the kernel, after a write or a truncation.

        (Had he asked for it himself, the kernel would have made sure that he is the owner.)
        """
        now = stat.S_IMODE(os.fstat(node.fd).st_mode)
        if wanted == now:
            return
        if wanted | (now & _SET_ID) == now:
            with _daemons_rights():
                os.chmod(node.link, wanted)
        else:
            os.chmod(node.link, wanted)

    @staticmethod
    def _drop_set_id(fd: int, found: os.stat_result, in_group: bool) -> None:
        """Before the first write by a plain user, who may not be the owner."""
        mode = stat.S_IMODE(found.st_mode) & ~stat.S_ISUID
        if mode & stat.S_IXGRP or not in_group:
            mode &= ~stat.S_ISGID
        if mode == stat.S_IMODE(found.st_mode):
            return
        with _daemons_rights():
            os.fchmod(fd, mode)

    def _hand_over(self, node: BackingNode, fd: int) -> tuple[int, int | None]:
        """Gives an open file to the engine, which moves its bytes: its handle, and the descriptor that is kept.

        Takes the descriptor over unless it fails.
        """
        handle: int = self._mount.backing_file_open(node.ino, fd)  # with descriptors of its own
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY:
            return handle, fd
        _close(fd)
        return handle, None

    def _opened(self, node: BackingNode, uid: int, handle: int, kept: int | None) -> pyfuse3.FileInfo:
        self._open_files[handle] = (node, uid, kept)
        node.users += 1
        return pyfuse3.FileInfo(fh=handle, direct_io=True, keep_cache=False)

    @handler
    async def release(self, fh: int) -> None:
        if fh not in self._open_files:
            await super().release(fh)
            return
        node, uid, kept = self._open_files.pop(fh)
        node.users -= 1

        def close() -> None:
            if kept is not None:
                _close(kept)
            try:
                self._mount.file_release(fh)
            except OSError:
                log.exception("a file of backing/ is not released")

        self._give_back(uid, node, close)
