"""Opening the host's files, whose bytes the engine then moves, and listing its directories."""

import contextlib
import fcntl
import functools
import logging
import os
import resource
import stat
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from errno import EDEADLK, EINVAL, EMFILE, ESTALE
from typing import Any, Final

from gpufs.fs.backing.calls import HostCalls, acting_as, with_daemons_rights
from gpufs.fs.backing.inodes import BackingNode, Found, look_up
from gpufs.fs.requests import Caller, Handles, InodeReply, Listing, Opened
from gpufs.syscalls import file_system_type, open_beneath, os_error, path_of, trusted

log = logging.getLogger(__name__)

# Flags of the caller that an open file here does not get: the kernel has already acted on these.
_NOT_PASSED_ON: Final = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_APPEND | getattr(os, "O_DIRECT", 0)
_TO_RUN: Final = 0x20  # the kernel opens a program to run it (FMODE_EXEC); open(2) has no such flag
_CHANGES: Final = os.O_WRONLY | os.O_RDWR | os.O_TRUNC
_IN_MEMORY: Final = (0x01021994, 0x858458F6, 0x958458F6)  # statfs(2)'s types of tmpfs, ramfs and hugetlbfs
_DEFAULT_ACL: Final = "system.posix_acl_default"
_SHARE: Final = 16  # one user may have as many files open as this process may have descriptors, divided by this
_AT_ONCE: Final = 32  # names that a thread looks up for a listing
UNNAMED: Final = b"/"  # the name that the data plane gives for O_TMPFILE
SET_ID: Final = stat.S_ISUID | stat.S_ISGID


def close_quietly(fd: int) -> None:
    """Close a descriptor. close(2) may report that earlier writes failed, but the descriptor is closed."""
    with contextlib.suppress(OSError):
        os.close(fd)


def changes(flags: int) -> bool:
    """Return whether an open with these flags may change the file."""
    return bool(flags & _CHANGES)


def new_mode(parent: BackingNode, mode: int, umask: int) -> int:
    """Return the permission bits for a new file. The directory's default access control list replaces the umask."""
    try:
        os.getxattr(parent.link, _DEFAULT_ACL)
    except OSError:
        mode &= ~umask
    return stat.S_IMODE(mode)


def _passed_on(flags: int) -> int:
    flags &= ~_NOT_PASSED_ON
    # Access mode 3 needs the rights to read and write but allows neither, which the kernel enforces.
    return flags & ~os.O_WRONLY if flags & os.O_ACCMODE == os.O_ACCMODE else flags


def _is_in_memory(fd: int) -> bool:
    try:
        return file_system_type(fd) in _IN_MEMORY
    except OSError:
        return False


def _drop_set_id(fd: int, status: os.stat_result, in_group: bool) -> None:
    """Before the first write by a plain user, who need not be the owner."""
    mode = stat.S_IMODE(status.st_mode) & ~stat.S_ISUID
    if mode & stat.S_IXGRP or not in_group:
        mode &= ~stat.S_ISGID
    if mode != stat.S_IMODE(status.st_mode):
        with with_daemons_rights():
            os.fchmod(fd, mode)


def _open_for_caller(node: BackingNode, flags: int) -> int:
    """Open as the caller, also a program that the caller may run but not read."""
    try:
        return os.open(node.link, flags)
    except PermissionError:
        if not flags & _TO_RUN or not os.access(node.link, os.X_OK, effective_ids=True):
            raise
        with with_daemons_rights():
            return os.open(node.link, flags)


@dataclass(slots=True)
class OpenHostFile(Opened):
    """A file that the engine reads and writes under ``handle``.

    ``fd``: for truncation, if the file is open for writing. ``uid``: the user that opened it.
    """

    files: "OpenFiles"
    node: BackingNode
    uid: int
    handle: int
    fd: int | None

    async def release(self) -> None:
        self.node.users -= 1
        self.files.calls.release(self.uid, self.node, self._close)

    def _close(self) -> None:
        if self.fd is not None:
            close_quietly(self.fd)
        try:
            self.files.engine.file_release(self.handle)
        except OSError:
            log.exception("a file below backing/ is not released")
        self.files.count.leave(self.uid)


class OpenCount:
    """Counts the files and directories of the host that each user has open. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: Counter[int] = Counter()

    @contextlib.contextmanager
    def entered(self, uid: int) -> Iterator[None]:
        """Count a file that the block opens. EMFILE beyond a user's share; root and the mount's owner have none."""
        self._enter(uid)
        try:
            yield
        except BaseException:
            self.leave(uid)
            raise

    def _enter(self, uid: int) -> None:
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        with self._lock:
            if not trusted(uid) and self._open[uid] >= descriptors // _SHARE:
                raise os_error(EMFILE)
            self._open[uid] += 1

    def leave(self, uid: int) -> None:
        with self._lock:
            self._open[uid] -= 1
            if not self._open[uid]:
                del self._open[uid]


class OpenFiles:
    """Opens files as their callers and gives them to the engine, which has descriptors of its own."""

    def __init__(self, engine: Any, handles: Handles, calls: HostCalls) -> None:
        self.engine = engine
        self.calls = calls
        self._handles = handles
        self.count = OpenCount()
        self._in_memory: dict[int, bool] = {}  # file systems by st_dev

    async def open(self, node: BackingNode, flags: int, caller: Caller) -> int:
        """open(2)."""
        uid, gid, pid = caller.uid, caller.gid, caller.pid

        def open_as_caller() -> int:
            # If it was removed on the host the kernel may still know the name: on ESTALE it looks the name up again. If
            # the caller meant this very file (by /proc/self/fd) the kernel then opens it once more.
            before = os.fstat(node.fd)
            if not node.nameless and before.st_nlink == 0:
                node.nameless = True
                raise os_error(ESTALE)
            if not stat.S_ISREG(before.st_mode):
                raise os_error(EINVAL)
            fd = _open_for_caller(node, _passed_on(flags) | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                if not flags & os.O_NONBLOCK:
                    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_NONBLOCK)
                status = os.fstat(fd)
                # The engine writes as root, and root's writes would leave these bits.
                if changes(flags) and uid != 0 and status.st_mode & SET_ID:
                    _drop_set_id(fd, status, status.st_gid == gid or status.st_gid in os.getgroups())
                return self._reopen_for_mapping(fd, status, flags)
            except BaseException:
                os.close(fd)
                raise

        def work() -> tuple[int, int | None]:
            with acting_as(uid, gid, pid):
                fd = open_as_caller()
            try:
                return self._give_to_engine(fd)
            except BaseException:
                close_quietly(fd)
                raise

        with self.count.entered(uid):
            node.users += 1
            try:
                handle, kept = await self.calls.retry_past_leases(uid, flags, lambda: self.calls.run(uid, node, work))
            except BaseException:
                node.users -= 1
                raise
        return self._opened(node, uid, handle, kept)

    def create(self, parent: BackingNode, name: bytes, mode: int, flags: int, umask: int) -> tuple[int, Found]:
        """Create a file as the caller, on a thread. Return it open, and as look_up() does.

        It never opens an existing file: that may be a FIFO or have a lease, and the kernel keeps the whole directory
        locked until this call returns.
        """
        wanted = _passed_on(flags) & ~os.O_TMPFILE
        permissions = new_mode(parent, mode, umask)
        if name == UNNAMED:
            # Without O_EXCL, which the kernel obeys itself.
            fd = os.open(parent.link, wanted | os.O_TMPFILE | os.O_CLOEXEC, permissions)
        else:
            fd = open_beneath(parent.fd, name, wanted | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, permissions)
        try:
            status = os.fstat(fd)
            fd = self._reopen_for_mapping(fd, status, wanted)
            return fd, (os.open(path_of(fd), os.O_PATH | os.O_CLOEXEC), status)
        except BaseException:
            os.close(fd)
            raise

    async def opened(self, node: BackingNode, uid: int, fd: int) -> int:
        """Give the engine a file that create() opened and its caller counted, descriptor and all. Return its handle."""
        try:
            handle, kept = await self.calls.run(uid, node, lambda: self._give_to_engine(fd))
        except BaseException:
            close_quietly(fd)
            raise
        node.users += 1
        return self._opened(node, uid, handle, kept)

    def _opened(self, node: BackingNode, uid: int, handle: int, kept: int | None) -> int:
        self._handles.add(OpenHostFile(self, node, uid, handle, kept), handle)
        return handle

    def _give_to_engine(self, fd: int) -> tuple[int, int | None]:
        """Give an open file to the engine, on a thread. Return the handle and the descriptor that is kept, if any.

        Takes the descriptor over unless it fails.
        """
        handle: int = self.engine.backing_file_open(fd)
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY:
            return handle, fd
        close_quietly(fd)
        return handle, None

    def _reopen_for_mapping(self, fd: int, status: os.stat_result, flags: int) -> int:
        """Open, as the caller, a write-only file in memory for reading too, if the caller may read it.

        write(2) admits one writer at a time to such a file, but a mapping, which must be readable, admits any number.
        Programs like cp open their destination for writing only. The kernel still refuses reads by this handle. Takes
        the descriptor over; returns it if there is nothing to gain.
        """
        if flags & os.O_ACCMODE != os.O_WRONLY or not stat.S_ISREG(status.st_mode):
            return fd
        if status.st_dev not in self._in_memory:
            self._in_memory[status.st_dev] = _is_in_memory(fd)
        if not self._in_memory[status.st_dev]:
            return fd
        dropped = _NOT_PASSED_ON | os.O_ACCMODE | os.O_TRUNC
        try:
            both = os.open(path_of(fd), flags & ~dropped | os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return fd
        os.close(fd)
        return both


def _names_in(directory: int) -> list[bytes]:
    with os.scandir(directory) as entries:  # from the beginning, wherever the descriptor's offset is
        return [os.fsencode(entry.name) for entry in entries]


def _look_up_each(parent: BackingNode, names: Sequence[bytes]) -> deque[tuple[bytes, Found | None]]:
    """Return what each name leads to, None if it is gone; stop before a failure unless the first name fails."""
    each: deque[tuple[bytes, Found | None]] = deque()
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


@dataclass(slots=True)
class OpenDirectory(Opened):
    """A directory that a program reads. Positions count in ``names``.

    ``fit``: how many entries fitted into the kernel's last READDIR. ``uid``: the user that opened it. ``adopt`` makes
    the reply for an entry, and ``forget`` takes that back.
    """

    node: BackingNode
    fd: int
    uid: int
    calls: HostCalls
    count: OpenCount
    above: InodeReply
    adopt: Callable[[Found, BackingNode, bytes], InodeReply]
    forget: Callable[[int, int], None]
    names: list[bytes] = field(default_factory=list)
    fit: int = sys.maxsize

    async def readdir(self, start: int, listing: Listing) -> None:
        if start == 0:  # the first time, and after rewinddir(3), which shows what is new
            self.names = await self.calls.run(self.uid, self.node, functools.partial(_names_in, self.fd))
        for cookie, name in ((1, b"."), (2, b"..")):
            if start < cookie and not listing.add(name, self.above, cookie):
                return
        listed = 0
        index = max(start - 2, 0)
        while index < len(self.names):
            names = self.names[index : index + max(1, min(_AT_ONCE, self.fit - listed))]
            try:
                each = await self.calls.run(self.uid, self.node, functools.partial(_look_up_each, self.node, names))
            except OSError:
                if listed:
                    return  # after an error the kernel would never forget the entries so far; it asks again from here
                raise
            try:
                while each:
                    name, entry = each.popleft()
                    index += 1
                    if entry is None:
                        continue
                    try:
                        reply = self.adopt(entry, self.node, name)
                    except OSError as failure:
                        if failure.errno == EDEADLK:
                            continue
                        raise
                    if not listing.add(name, reply, index + 2):
                        self.forget(reply.ino, 1)
                        self.fit = listed
                        return
                    listed += 1
            finally:
                for _, entry in each:
                    if entry is not None:
                        os.close(entry[0])

    async def sync(self, *, data_only: bool) -> None:
        await self.calls.run(self.uid, self.node, functools.partial(os.fdatasync if data_only else os.fsync, self.fd))

    async def release(self) -> None:
        self.node.users -= 1
        self.calls.release(self.uid, self.node, self._close)

    def _close(self) -> None:
        close_quietly(self.fd)
        self.count.leave(self.uid)
