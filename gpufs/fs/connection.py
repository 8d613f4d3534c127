"""The control plane's end of the socket between the planes: reads requests, and routes each to what answers it.

The messages are the kernel's, in the layout of linux/fuse.h, except for those that the engine translates
(native/src/fuse/control_messages.h). The engine answers INIT and INTERRUPT itself. docs/architecture.md says under "Two
planes" why pyfuse3 does not read them.
"""

import enum
import errno
import logging
import os
import socket
import time
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from struct import Struct
from typing import Any, Final, TypeAlias

import trio

from gpufs.fs.backing import BackingHandler
from gpufs.fs.backing.inodes import FIRST_INODE
from gpufs.fs.control_files import ControlFile
from gpufs.fs.requests import Caller, Changes, Handles, InodeReply, Listing
from gpufs.syscalls import os_error

log = logging.getLogger(__name__)

_LARGEST_MESSAGE: Final = (1 << 20) + 4096
# Requests that a task answers before others run.
_IN_A_ROW: Final = 16

_HEADER: Final = Struct("=2I2Q3I4x")  # of a request: length, opcode, unique, nodeid, uid, gid, pid
_REPLY: Final = Struct("=IiQ")
_OPENED: Final = Struct("=QI4x")
_EMPTY: Final = Struct("")
_ONE: Final = Struct("=I4x")
_TWO: Final = Struct("=2I")
_SETXATTR: Final = Struct("=2I8x")
_THREE: Final = Struct("=3I4x")
_HANDLE: Final = Struct("=Q")
_HANDLE_AND_FLAGS: Final = Struct("=QI4x")
_READ: Final = Struct("=2QI")
_FORGOTTEN: Final = Struct("=2Q")
_SETATTR: Final = Struct("=I4x6Q4I4x2I")

_OPEN_DIRECT_IO: Final = 1
_DATA_ONLY: Final = 1  # of FSYNCDIR


class Opcode(enum.IntEnum):
    """The kinds of requests that native code passes on, as linux/fuse.h numbers them."""

    LOOKUP = 1
    GETATTR = 3
    SETATTR = 4
    READLINK = 5
    SYMLINK = 6
    MKNOD = 8
    MKDIR = 9
    UNLINK = 10
    RMDIR = 11
    RENAME = 12
    LINK = 13
    OPEN = 14
    READ = 15
    WRITE = 16
    STATFS = 17
    RELEASE = 18
    FSYNC = 20
    SETXATTR = 21
    GETXATTR = 22
    LISTXATTR = 23
    REMOVEXATTR = 24
    FLUSH = 25
    OPENDIR = 27
    RELEASEDIR = 29
    FSYNCDIR = 30
    CREATE = 35
    BATCH_FORGET = 42
    READDIRPLUS = 44
    RENAME2 = 45


class Fattr(enum.IntFlag):
    """The attributes that a SETATTR changes, as linux/fuse.h numbers them."""

    MODE = 1 << 0
    UID = 1 << 1
    GID = 1 << 2
    SIZE = 1 << 3
    ATIME = 1 << 4
    MTIME = 1 << 5
    FH = 1 << 6  # the request names an open file
    ATIME_NOW = 1 << 7
    MTIME_NOW = 1 << 8


# ---- who answers ----


class Operations:
    """The control plane of one mount: its open files, and what answers for control files and the host's inodes."""

    def __init__(
        self, handles: Handles, control_files: Mapping[int, ControlFile], backing: BackingHandler | None = None
    ) -> None:
        self.handles = handles
        self._control_files = control_files
        self._backing = backing

    def host(self, inode: int) -> BackingHandler:
        """Return the handler of a host's inode. ESTALE for another one: it has just gone from the engine's table."""
        if self._backing is None or inode < FIRST_INODE:
            raise os_error(errno.ESTALE)
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
            raise os_error(errno.EACCES)
        return self.handles.add(await file.open(caller.uid))


# ---- requests ----


_Request: TypeAlias = Callable[[Operations, int, bytes, Caller], Awaitable[bytes]]


def _text(body: bytes, at: int = 0) -> bytes:
    """The text that begins at a place of a message, where a zero ends it."""
    return body[at : body.index(0, at)]


def _of_host(
    method: Callable[..., Awaitable[InodeReply | bytes | None]], layout: Struct = _EMPTY, texts: int = 0
) -> _Request:
    """Return what passes a request about the host on: the fields of its layout, and so many texts after them."""

    async def answer(to: Operations, inode: int, body: bytes, caller: Caller) -> bytes:
        names = body[layout.size :].split(b"\0", texts)[:texts]
        reply = await method(to.host(inode), inode, *layout.unpack_from(body), *names, caller)
        return reply.message if isinstance(reply, InodeReply) else reply or b""

    return answer


async def _setattr(to: Operations, inode: int, body: bytes, caller: Caller) -> bytes:
    valid, fh, size, _, atime, mtime, _, atime_ns, mtime_ns, _, mode, uid, gid = _SETATTR.unpack_from(body)
    now = time.time_ns()

    def set_time(set_bit: int, now_bit: int, seconds: int, nanoseconds: int) -> int | None:
        if valid & now_bit:
            return now
        if not valid & set_bit:
            return None
        return (seconds - (1 << 64) if seconds >> 63 else seconds) * 1_000_000_000 + int(nanoseconds)

    changes = Changes(
        mode=mode if valid & Fattr.MODE else None,
        uid=uid if valid & Fattr.UID else None,
        gid=gid if valid & Fattr.GID else None,
        size=size if valid & Fattr.SIZE else None,
        atime=set_time(Fattr.ATIME, Fattr.ATIME_NOW, atime, atime_ns),
        mtime=set_time(Fattr.MTIME, Fattr.MTIME_NOW, mtime, mtime_ns),
    )
    return await to.host(inode).setattr(inode, changes, fh if valid & Fattr.FH else None, caller)


async def _open(to: Operations, inode: int, body: bytes, caller: Caller) -> bytes:
    flags, _ = _TWO.unpack_from(body)
    return _OPENED.pack(await to.open(inode, flags, caller), _OPEN_DIRECT_IO)


async def _create(to: Operations, inode: int, body: bytes, caller: Caller) -> bytes:
    flags, mode, umask = _THREE.unpack_from(body)
    handle, entry = await to.host(inode).create(inode, _text(body, _THREE.size), mode, flags, umask, caller)
    return entry.message + _OPENED.pack(handle, _OPEN_DIRECT_IO)


async def _read(to: Operations, inode: int, body: bytes, caller: Caller) -> bytes:
    handle, offset, size = _READ.unpack_from(body)
    return await to.handles.existing(handle).read(offset, size)


async def _write(to: Operations, inode: int, body: bytes, caller: Caller) -> bytes:
    raise os_error(errno.EBADF)  # control files are never open for writing, and the engine writes all others


async def _release(to: Operations, inode: int, body: bytes, caller: Caller) -> bytes:
    opened = to.handles.pop(*_HANDLE.unpack_from(body))
    if opened is not None:
        await opened.release()
    return b""


async def _nothing(to: Operations, inode: int, body: bytes, caller: Caller) -> bytes:
    return b""


async def _setxattr(to: Operations, inode: int, body: bytes, caller: Caller) -> bytes:
    size, flags = _SETXATTR.unpack_from(body)
    name = _text(body, _SETXATTR.size)
    value = body[_SETXATTR.size + len(name) + 1 :][:size]
    await to.host(inode).setxattr(inode, name, value, flags, caller)
    return b""


async def _opendir(to: Operations, inode: int, body: bytes, caller: Caller) -> bytes:
    return _OPENED.pack(await to.host(inode).opendir(inode, caller), 0)


async def _readdirplus(to: Operations, inode: int, body: bytes, caller: Caller) -> bytes:
    handle, start, size = _READ.unpack_from(body)
    listing = Listing(size)
    await to.handles.existing(handle).readdir(start, listing)
    return listing.message()


async def _fsyncdir(to: Operations, inode: int, body: bytes, caller: Caller) -> bytes:
    handle, flags = _HANDLE_AND_FLAGS.unpack_from(body)
    await to.handles.existing(handle).sync(data_only=bool(flags & _DATA_ONLY))
    return b""


# For other opcodes the kernel gets ENOSYS, and does without the operation from then on, or fails it.
_REQUESTS: Final[dict[int, _Request]] = {
    Opcode.LOOKUP: _of_host(BackingHandler.lookup, texts=1),
    Opcode.GETATTR: _of_host(BackingHandler.getattr),
    Opcode.SETATTR: _setattr,
    Opcode.READLINK: _of_host(BackingHandler.readlink),
    Opcode.SYMLINK: _of_host(BackingHandler.symlink, texts=2),
    Opcode.MKNOD: _of_host(BackingHandler.mknod, _THREE, texts=1),
    Opcode.MKDIR: _of_host(BackingHandler.mkdir, _TWO, texts=1),
    Opcode.UNLINK: _of_host(BackingHandler.unlink, texts=1),
    Opcode.RMDIR: _of_host(BackingHandler.rmdir, texts=1),
    Opcode.RENAME: _of_host(BackingHandler.rename, _HANDLE, texts=2),
    Opcode.LINK: _of_host(BackingHandler.link, _HANDLE, texts=1),
    Opcode.OPEN: _open,
    Opcode.READ: _read,
    Opcode.WRITE: _write,
    Opcode.STATFS: _of_host(BackingHandler.statfs),
    Opcode.RELEASE: _release,
    Opcode.FSYNC: _nothing,
    Opcode.SETXATTR: _setxattr,
    Opcode.GETXATTR: _of_host(BackingHandler.getxattr, _ONE, texts=1),
    Opcode.LISTXATTR: _of_host(BackingHandler.listxattr, _ONE),
    Opcode.REMOVEXATTR: _of_host(BackingHandler.removexattr, texts=1),
    Opcode.FLUSH: _nothing,
    Opcode.OPENDIR: _opendir,
    Opcode.RELEASEDIR: _release,
    Opcode.FSYNCDIR: _fsyncdir,
    Opcode.CREATE: _create,
    Opcode.READDIRPLUS: _readdirplus,
    Opcode.RENAME2: _of_host(BackingHandler.rename2, _HANDLE_AND_FLAGS, texts=2),
}


def _errno_of(opcode: int, failure: Exception) -> int:
    """The errno for a request that failed. Only OSError and MemoryError are expected."""
    if isinstance(failure, OSError):
        code = failure.errno or errno.EIO
        # On ENOSYS the kernel would do without the operation for the whole mount.
        return errno.EOPNOTSUPP if code == errno.ENOSYS else code
    if isinstance(failure, MemoryError):
        return errno.ENOMEM
    log.error("%s failed", Opcode(opcode).name, exc_info=failure)
    return errno.EIO


# ---- the socket ----


@types.coroutine
def _watched(work: Coroutine[Any, Any, None], on_wait: Callable[[], None]) -> Generator[Any, Any, bool]:
    """Does the work. Whether it waited for something; ``on_wait`` is called before it first does."""
    try:
        trap = work.send(None)
    except StopIteration:
        return False
    on_wait()
    while True:
        result = yield trap
        try:
            trap = work.send(result)
        except StopIteration:
            return True


class RequestLoop:
    """Answers requests, many at a time.

    Most are answered without waiting for anything, one after the other in the same task. When a request makes that task
    wait, another one goes on with the next requests: up to ``most_tasks`` requests wait at a time.
    """

    def __init__(self, control: socket.socket, operations: Operations, most_tasks: int) -> None:
        """``control``: the end of the data plane's socket pair, which stays the caller's."""
        self._socket = control
        self._operations = operations
        self._buffer = memoryview(bytearray(_LARGEST_MESSAGE))
        self._free_tasks = most_tasks - 1
        self._is_read = True  # by a task, which may wait for the next request
        self._ended = False
        self._pause = trio.CancelScope()

    async def serve(self) -> None:
        """Answers requests until the socket is closed at the other end, or stop() is called."""
        async with trio.open_nursery() as self._nursery:
            self._nursery.start_soon(self._read)

    def stop(self) -> None:
        """Ends serve() once the requests in progress are answered."""
        self._ended = True
        self._pause.cancel()

    async def _read(self) -> None:
        in_a_row = 0
        while not self._ended:
            try:
                size = self._socket.recv_into(self._buffer, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                in_a_row = 0
                with trio.CancelScope() as self._pause:
                    await trio.lowlevel.wait_readable(self._socket)
                continue
            except ConnectionError:
                size = 0
            if size == 0:
                self._ended = True
                break
            if await _watched(self._answer(bytes(self._buffer[:size])), self._read_in_another_task):
                if self._is_read:
                    self._free_tasks += 1
                    return
                self._is_read = True
            in_a_row += 1
            if in_a_row == _IN_A_ROW:
                in_a_row = 0
                await trio.lowlevel.checkpoint()

    def _read_in_another_task(self) -> None:
        """The task that reads requests is about to wait for something else."""
        self._is_read = self._free_tasks > 0
        if self._is_read:
            self._free_tasks -= 1
            self._nursery.start_soon(self._read)

    async def _answer(self, message: bytes) -> None:
        length, opcode, unique, inode, uid, gid, pid = _HEADER.unpack_from(message)
        body = message[_HEADER.size :]
        if opcode == Opcode.BATCH_FORGET:
            count, _ = _TWO.unpack_from(body)
            self._operations.forget(list(_FORGOTTEN.iter_unpack(body[_TWO.size :][: count * _FORGOTTEN.size])))
            return
        request = _REQUESTS.get(opcode)
        code, reply = 0, b""
        try:
            if request is None:
                code = errno.ENOSYS
            elif length != len(message):
                code = errno.EIO
            else:
                reply = await request(self._operations, inode, body, Caller(uid, gid, pid))
        except Exception as failure:  # noqa: BLE001 - logged and turned into an errno
            code = _errno_of(opcode, failure)
        self._send(unique, code, reply)

    def _send(self, unique: int, code: int, reply: bytes) -> None:
        try:
            self._socket.send(_REPLY.pack(_REPLY.size + len(reply), -code, unique) + reply)
        except ConnectionError:  # the mount has ended
            pass
        except OSError as failure:
            # The kernel may have no memory for a large message.
            log.error("a reply of %d bytes could not be sent: %s", len(reply), failure)
            if reply:
                self._send(unique, errno.ENOMEM, b"")
