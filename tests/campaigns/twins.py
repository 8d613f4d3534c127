"""The same random system calls on a mount and on a tmpfs, side by side: every result and errno must be the same.

Both sides start empty. A step draws an operation with its arguments once and performs it on each side, as one of
several users: names, descriptors and data are drawn from few values so that calls meet what earlier ones left. After
some steps the trees are compared whole, and now and then which times a call has changed. The tmpfs is mounted with the
flags that a gpufs mount always has (nosuid, nodev). What docs/contract.md calls different is left out here, and only
that.
"""

from __future__ import annotations

import collections
import ctypes
import errno
import os
import random
import shutil
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy
from support import fake_gpu
from support.cli import gpufs
from support.processes import PATIENCE, errno_of, run, wait_until
from support.surviving import Survivor, failing_takeovers, mounted

import gpufs as gpufs_client
from campaigns.harness import Missing, Place

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long

KIB, MIB = 1024, 1024 * 1024
AT_FDCWD = -100
SLOTS = 4
CLOCK_REALTIME_COARSE = 5  # of tmpfs's times; it ticks every 1 to 10 ms, and later on a busy machine
NAMES = (b"a", b"b", b"c", b"d", b"e")
# (uid, gid, supplementary groups)
USERS = ((0, 0, ()), (0, 0, ()), (1001, 1001, ()), (1002, 1002, (1001,)), (1003, 1003, (1001, 1002)))
ODD_NAMES = (
    b"",
    b".",
    b"a/b/..",
    b"a/",
    b"a/.",
    b"b/..",
    b"c//a",
    b"./b",
    b"a/b/c/d/a",
    b"\xff\n",
    b"n" * 255,
    b"n" * 256,
)
FLAGS = (
    os.O_CREAT,
    os.O_EXCL,
    os.O_TRUNC,
    os.O_APPEND,
    os.O_DIRECTORY,
    os.O_NOFOLLOW,
    os.O_PATH,
    os.O_NOATIME,
    os.O_DIRECT,
    os.O_SYNC,
    os.O_DSYNC,
    os.O_TMPFILE,
)
MODES = (0o644, 0o600, 0o755, 0o777, 0o000, 0o4755, 0o2755, 0o2644, 0o6777, 0o1777, 0o2777, 0o711, 0o070, 0o007)
OFFSETS = (0, 1, 7, 511, 4096, 4097, 65535, 65536, 65537, MIB, 2 * MIB - 1, 2 * MIB, 3 * MIB)
LENGTHS = (0, 1, 3, 100, 4095, 4096, 8192, 65536, 100_000)
ATTRIBUTES = (
    b"user.a",
    b"user.b",
    b"trusted.a",
    b"security.a",
    b"user.",
    b"other.a",
    b"system.a",
    b"user." + b"n" * 251,
    b"system.posix_acl_access",
    b"system.posix_acl_default",
    b"security.capability",
)
UTIME_NOW, UTIME_OMIT = (1 << 30) - 1, (1 << 30) - 2


def call(number: int, *arguments: Any) -> int:
    """A system call by its number; OSError where it fails."""
    words = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
    result: int = libc.syscall(ctypes.c_long(number), *words)
    if result < 0:
        raise OSError(ctypes.get_errno(), "")
    return result


class Side:
    """One of the two: its directory and its open descriptors."""

    def __init__(self, root: Path) -> None:
        self.root = os.fsencode(root)
        self.fds = [-1] * SLOTS

    def path(self, name: bytes) -> bytes:
        return self.root + b"/" + name

    def keep(self, slot: int, fd: int) -> None:
        if self.fds[slot] >= 0:
            os.close(self.fds[slot])
        self.fds[slot] = fd

    def close(self) -> None:
        for slot in range(SLOTS):
            self.keep(slot, -1)


@contextmanager
def acting_as(user: tuple[int, int, tuple[int, ...]], umask: int) -> Iterator[None]:
    uid, gid, groups = user
    os.umask(umask)
    if uid:
        os.setgroups(list(groups))
        os.setegid(gid)
        os.seteuid(uid)
    try:
        yield
    finally:
        if uid:
            os.seteuid(0)
            os.setegid(0)
            os.setgroups([])
        os.umask(0o022)


def told(found: os.stat_result) -> tuple[Any, ...]:
    """The attributes that must agree: not the numbers of inodes and devices, nor the size of a directory."""
    size = 0 if stat.S_ISDIR(found.st_mode) else found.st_size
    return (oct(found.st_mode), found.st_nlink, found.st_uid, found.st_gid, size, found.st_rdev)


# ---- operations: each takes a side and what was drawn for it, and returns something comparable ----

Operation = Callable[..., Any]
OPERATIONS: dict[str, tuple[int, Callable[[random.Random], tuple[Any, ...]], Operation]] = {}


def operation(weight: int, *draws: Callable[[random.Random], Any]) -> Callable[[Operation], Operation]:
    def register(function: Operation) -> Operation:
        OPERATIONS[function.__name__] = (weight, lambda r: tuple(draw(r) for draw in draws), function)
        return function

    return register


def a_name(r: random.Random) -> bytes:
    if r.random() < 0.08:
        return r.choice(ODD_NAMES)
    return b"/".join(r.choice(NAMES) for _ in range(r.choice((1, 1, 1, 2, 2, 3))))


def a_slot(r: random.Random) -> int:
    return r.randrange(SLOTS)


def one_of(*values: Any) -> Callable[[random.Random], Any]:
    return lambda r: r.choice(values)


def a_mode(r: random.Random) -> int:
    return r.choice(MODES)


def an_offset(r: random.Random) -> int:
    return r.choice(OFFSETS)


def a_length(r: random.Random) -> int:
    return r.choice(LENGTHS)


def an_owner(r: random.Random) -> int:
    return r.choice((-1, 0, 1001, 1002, 1003))


def some_flags(r: random.Random) -> int:
    if r.random() < 0.4:
        return os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
    flags = r.choice((os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_RDWR, 3))
    if r.random() < 0.6:
        flags |= os.O_CREAT
    for _ in range(r.choice((0, 0, 1, 1, 2, 3))):
        flags |= r.choice(FLAGS)
    return flags | os.O_NONBLOCK | os.O_CLOEXEC


def data(length: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(length)


def a_seed(r: random.Random) -> int:
    return r.randrange(1 << 30)


@operation(20, a_slot, a_name, some_flags, a_mode)
def open_file(side: Side, slot: int, name: bytes, flags: int, mode: int) -> Any:
    side.keep(slot, os.open(side.path(name), flags, mode))
    return told(os.fstat(side.fds[slot]))


@operation(5, a_slot, a_slot, a_name, some_flags, a_mode)
def open_at(side: Side, slot: int, directory: int, name: bytes, flags: int, mode: int) -> Any:
    side.keep(slot, os.open(name, flags, mode, dir_fd=side.fds[directory]))
    return told(os.fstat(side.fds[slot]))


@operation(3, a_slot, a_slot, one_of(os.O_RDONLY, os.O_RDWR, os.O_PATH, os.O_WRONLY | os.O_TRUNC))
def reopen(side: Side, slot: int, source: int, flags: int) -> Any:
    side.keep(slot, os.open(f"/proc/self/fd/{side.fds[source]}", flags | os.O_NONBLOCK | os.O_CLOEXEC))
    return told(os.fstat(side.fds[slot]))


@operation(4, a_slot)
def close(side: Side, slot: int) -> None:
    side.keep(slot, -1)


@operation(14, a_name, a_mode)
def mkdir(side: Side, name: bytes, mode: int) -> None:
    os.mkdir(side.path(name), mode)


@operation(
    4,
    a_name,
    a_mode,
    one_of(stat.S_IFREG, 0, stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFCHR, stat.S_IFBLK, stat.S_IFDIR),
    one_of(0, os.makedev(1, 3), os.makedev(300, 70000)),
)
def mknod(side: Side, name: bytes, mode: int, kind: int, device: int) -> None:
    os.mknod(side.path(name), kind | mode, device)


@operation(6, one_of(b"a", b"b/c", b"a/../d", b"nowhere", b".", b"x" * 4095, b"x" * 4096, b"", b"/no/where"), a_name)
def symlink(side: Side, target: bytes, name: bytes) -> None:
    os.symlink(target, side.path(name))


@operation(8, a_name, a_name, one_of(0, 0x400, 0x1000, 0x2))
def link(side: Side, old: bytes, new: bytes, flags: int) -> None:
    if libc.linkat(AT_FDCWD, side.path(old), AT_FDCWD, side.path(new), flags):
        raise OSError(ctypes.get_errno(), "")


@operation(3, a_slot, a_name, one_of(0x1000, 0x400))
def link_descriptor(side: Side, slot: int, name: bytes, flags: int) -> None:
    old = b"" if flags == 0x1000 else b"/proc/self/fd/%d" % side.fds[slot]
    if libc.linkat(side.fds[slot] if flags == 0x1000 else AT_FDCWD, old, AT_FDCWD, side.path(name), flags):
        raise OSError(ctypes.get_errno(), "")


@operation(10, a_name)
def unlink(side: Side, name: bytes) -> None:
    os.unlink(side.path(name))


@operation(6, a_name)
def rmdir(side: Side, name: bytes) -> None:
    os.rmdir(side.path(name))


@operation(14, a_name, a_name, one_of(0, 0, 0, 0, 1, 2, 2, 4, 3, 5, 6, 8))
def rename(side: Side, old: bytes, new: bytes, flags: int) -> None:
    if libc.renameat2(AT_FDCWD, side.path(old), AT_FDCWD, side.path(new), flags):
        raise OSError(ctypes.get_errno(), "")


@operation(3, a_name)
def readlink(side: Side, name: bytes) -> bytes:
    return os.readlink(side.path(name))


@operation(6, a_name, one_of(True, False))
def stat_name(side: Side, name: bytes, follow: bool) -> Any:
    return told(os.stat(side.path(name), follow_symlinks=follow))


@operation(3, a_slot)
def stat_descriptor(side: Side, slot: int) -> Any:
    return told(os.fstat(side.fds[slot]))


@operation(3, a_name, one_of(0, 1, 2, 4, 7))
def access(side: Side, name: bytes, how: int) -> Any:
    return os.access(side.path(name), how, effective_ids=True)


@operation(8, a_name, a_mode)
def chmod(side: Side, name: bytes, mode: int) -> None:
    os.chmod(side.path(name), mode)


@operation(3, a_slot, a_mode)
def chmod_descriptor(side: Side, slot: int, mode: int) -> None:
    os.fchmod(side.fds[slot], mode)


def ask_tmpfs_alone(found: os.stat_result, uid: int, gid: int) -> None:
    """OSError for chown(2) calls that change nothing: the kernel passes them to tmpfs, but not to FUSE."""
    marked = found.st_mode & (stat.S_ISGID | stat.S_IXGRP) == stat.S_ISGID
    if (uid, gid) == (-1, -1) and marked and os.geteuid() not in (0, found.st_uid):
        raise OSError(errno.ENODATA, "")


@operation(8, a_name, an_owner, an_owner, one_of(True, False))
def chown(side: Side, name: bytes, uid: int, gid: int, follow: bool) -> None:
    ask_tmpfs_alone(os.stat(side.path(name), follow_symlinks=follow), uid, gid)
    os.chown(side.path(name), uid, gid, follow_symlinks=follow)


@operation(2, a_slot, an_owner, an_owner)
def chown_descriptor(side: Side, slot: int, uid: int, gid: int) -> None:
    ask_tmpfs_alone(os.fstat(side.fds[slot]), uid, gid)
    os.fchown(side.fds[slot], uid, gid)


@operation(
    5,
    a_name,
    one_of((0, 0), (5, 6), (0, UTIME_NOW), (0, UTIME_OMIT), (1, 10**9), (-5, 3), (2**33, 9)),
    one_of((7, 999_999_999), (0, UTIME_NOW), (0, UTIME_OMIT), (2**40, 0)),
    one_of(0, 0x100, 0x1000, 8),
)
def utimensat(side: Side, name: bytes, atime: tuple[int, int], mtime: tuple[int, int], flags: int) -> Any:
    times = (ctypes.c_long * 4)(*atime, *mtime)
    if libc.utimensat(AT_FDCWD, side.path(name), times, flags):
        raise OSError(ctypes.get_errno(), "")
    found = os.stat(side.path(name), follow_symlinks=flags != 0x100)
    explicit = [(found.st_atime_ns, atime), (found.st_mtime_ns, mtime)]
    return [value for value, asked in explicit if asked[1] < UTIME_OMIT]


@operation(5, a_name, one_of(0, 1, 5000, 65536, 70_000, 3 * MIB, -1, 2**63 - 1))
def truncate(side: Side, name: bytes, size: int) -> None:
    if size == 2**63 - 1:
        size = -(2**63)  # the largest size differs: see the contract
    found = os.stat(side.path(name))
    if size == 0 == found.st_size and stat.S_ISREG(found.st_mode):
        raise OSError(errno.ENODATA, "")  # other file systems set the times then, tmpfs does not
    os.truncate(side.path(name), size)


@operation(5, a_slot, one_of(0, 1, 5000, 65536, 70_000, 3 * MIB, -1))
def truncate_descriptor(side: Side, slot: int, size: int) -> None:
    os.ftruncate(side.fds[slot], size)


@operation(10, a_slot, a_length, a_seed)
def write(side: Side, slot: int, length: int, seed: int) -> Any:
    return os.write(side.fds[slot], data(length, seed)), position(side, slot)


@operation(8, a_slot, a_length, a_seed, an_offset)
def pwrite(side: Side, slot: int, length: int, seed: int, offset: int) -> Any:
    return os.pwrite(side.fds[slot], data(length, seed), offset)


@operation(6, a_slot, a_length, a_seed, an_offset, one_of(0, 1, 2, 4, 8, 16, 32, 64, 128, 256))
def pwritev2(side: Side, slot: int, length: int, seed: int, offset: int, flags: int) -> Any:
    if flags in (8, 64, 128):
        flags = 0  # RWF_NOWAIT, RWF_ATOMIC, RWF_DONTCACHE: the kernel's promises about its own cache
    return os.pwritev(side.fds[slot], [data(length, seed), b"tail"], offset, flags)


def position(side: Side, slot: int) -> int:
    return os.lseek(side.fds[slot], 0, os.SEEK_CUR)


@operation(6, a_slot, a_length)
def read(side: Side, slot: int, length: int) -> Any:
    length = max(length, 1)  # a read of nothing counts as an access on tmpfs, and is not even asked for on FUSE
    return os.read(side.fds[slot], length), position(side, slot)


@operation(6, a_slot, a_length, an_offset, one_of(0, 1, 2, 4, 16, 1024))
def preadv2(side: Side, slot: int, length: int, offset: int, flags: int) -> Any:
    parts = [bytearray(length), bytearray(10)]
    return os.preadv(side.fds[slot], parts, offset, flags), parts


@operation(5, a_slot, one_of(0, 1, 2, 5, 7), one_of(0, 1, -1, 4096, 65536, 5_000_000, -(2**62)))
def lseek(side: Side, slot: int, whence: int, offset: int) -> Any:
    if whence == os.SEEK_END and stat.S_ISDIR(os.fstat(side.fds[slot]).st_mode):
        raise OSError(errno.EINVAL, "")  # which the kernel says of directories on tmpfs alone
    return os.lseek(side.fds[slot], offset, whence)


@operation(6, a_slot, one_of(0, 1, 2, 3, 8, 32, 64, 19, 128), an_offset, a_length)
def fallocate(side: Side, slot: int, mode: int, offset: int, length: int) -> Any:
    """Without ZERO_RANGE, which tmpfs does not have."""
    if mode in (8, 32, 64):
        mode |= 1  # refused on both; collapsing and inserting have refusals of their own on tmpfs
    call(285, side.fds[slot], mode, offset, length)
    return os.fstat(side.fds[slot]).st_size


@operation(6, a_slot, a_slot, an_offset, an_offset, a_length, one_of(0, 0, 0, 1))
def copy_file_range(side: Side, source: int, target: int, at: int, to: int, length: int, flags: int) -> Any:
    begins = [ctypes.c_int64(at), ctypes.c_int64(to)]
    moved = call(
        326, side.fds[source], ctypes.byref(begins[0]), side.fds[target], ctypes.byref(begins[1]), length, flags
    )
    return moved, [one.value for one in begins]


def source_of(side: Side, slot: int, target: int) -> int:
    """The descriptor. OSError if the two sides would behave differently.

    From the end of a file nothing is asked of a FUSE file system, which then counts no access. And tmpfs puts its own
    pages into a pipe: what comes from a file and goes there changes on the way.
    """
    found = os.fstat(side.fds[slot])
    if stat.S_ISREG(found.st_mode) and (found.st_size == 0 or os.path.samestat(found, os.fstat(side.fds[target]))):
        raise OSError(errno.ENODATA, "")
    return side.fds[slot]


@operation(3, a_slot, a_slot, one_of(0), one_of(1, 100, 4096, 10_000))
def sendfile(side: Side, target: int, source: int, offset: int, length: int) -> Any:
    return os.sendfile(side.fds[target], source_of(side, source, target), offset, length)


@operation(3, a_slot, a_slot, one_of(0), an_offset, one_of(1, 100, 4096, 10_000))
def splice(side: Side, source: int, target: int, at: int, to: int, length: int) -> Any:
    read_end, write_end = os.pipe2(os.O_NONBLOCK)
    try:
        moved = os.splice(source_of(side, source, target), write_end, length, offset_src=at)
        return moved, os.splice(read_end, side.fds[target], length, offset_dst=to) if moved else 0
    finally:
        os.close(read_end)
        os.close(write_end)


@operation(2, a_slot, one_of(os.fsync, os.fdatasync))
def sync(side: Side, slot: int, how: Callable[[int], None]) -> None:
    how(side.fds[slot])


@operation(
    10,
    a_name,
    one_of(*ATTRIBUTES),
    one_of(
        b"",
        b"1",
        b"x" * 300,
        b"y" * 65537,
        struct.pack("<IHHIHHIHHI", 2, 1, 6, 2**32 - 1, 4, 4, 2**32 - 1, 32, 0, 2**32 - 1),
        struct.pack(
            "<IHHIHHIHHIHHIHHI", 2, 1, 7, 2**32 - 1, 2, 6, 1001, 4, 5, 2**32 - 1, 16, 5, 2**32 - 1, 32, 1, 2**32 - 1
        ),
    ),
    one_of(0, 0, 1, 2, 3, 4),
    one_of(True, False),
)
def setxattr(side: Side, name: bytes, attribute: bytes, value: bytes, flags: int, follow: bool) -> None:
    os.setxattr(side.path(name), attribute, value, flags, follow_symlinks=follow)


@operation(4, a_name, one_of(*ATTRIBUTES), one_of(True, False))
def getxattr(side: Side, name: bytes, attribute: bytes, follow: bool) -> bytes:
    return os.getxattr(side.path(name), attribute, follow_symlinks=follow)


@operation(3, a_slot)
def listxattr(side: Side, slot: int) -> Any:
    return sorted(os.listxattr(side.fds[slot]))


@operation(4, a_name, one_of(*ATTRIBUTES))
def removexattr(side: Side, name: bytes, attribute: bytes) -> None:
    os.removexattr(side.path(name), attribute)


@operation(5, a_name)
def listing(side: Side, name: bytes) -> Any:
    with os.scandir(side.path(name)) as entries:
        return sorted((entry.name, entry.is_dir(follow_symlinks=False), entry.is_symlink()) for entry in entries)


@operation(2, a_slot)
def listing_of_descriptor(side: Side, slot: int) -> Any:
    os.lseek(side.fds[slot], 0, os.SEEK_SET)  # other positions differ between file systems
    return sorted(os.listdir(side.fds[slot]))


# ---- comparing ----


def attribute(path: bytes, name: str) -> bytes | int | None:
    try:
        return os.getxattr(path, name, follow_symlinks=False)
    except OSError as failure:  # capabilities that the kernel cannot parse
        return failure.errno


def tree(root: bytes) -> dict[bytes, Any]:
    """All that two equal trees have in common."""
    found: dict[bytes, Any] = {}
    for directory, folders, files in os.walk(root):
        folders.sort()
        for name in sorted([*folders, *files]):
            path = os.path.join(directory, name)
            status = os.lstat(path)
            attributes = {one: attribute(path, one) for one in os.listxattr(path, follow_symlinks=False)}
            content = None
            if stat.S_ISLNK(status.st_mode):
                content = os.readlink(path)
            elif stat.S_ISREG(status.st_mode):
                content = Path(os.fsdecode(path)).read_bytes()
            found[path.removeprefix(root)] = (told(status), attributes, content)
    return found


def times(root: bytes) -> dict[bytes, tuple[int, int, int, int]]:
    """The number of each path's file, and its times.

    FIFOs and sockets have times that the kernel keeps for its own file systems alone.
    """
    found = {}
    for directory, folders, files in os.walk(root):
        folders.sort()
        for path in [directory, *(os.path.join(directory, name) for name in [*folders, *files])]:
            status = os.lstat(path)
            if not stat.S_ISFIFO(status.st_mode):
                found[path.removeprefix(root)] = (
                    status.st_ino,
                    status.st_atime_ns,
                    status.st_mtime_ns,
                    status.st_ctime_ns,
                )
    return found


def await_tick() -> None:
    """Waits until tmpfs's clock has passed all times that were set until now.

    An access at the very time of a change counts again at each further access (relatime): tmpfs's clock allows that.
    """
    now = time.time_ns()
    while time.clock_gettime_ns(CLOCK_REALTIME_COARSE) <= now:
        time.sleep(0.001)


def settled_times(root: bytes) -> dict[bytes, tuple[int, int, int, int]]:
    """The times after a reset, so that every access to a file changes its access time."""
    for path in sorted(times(root)):
        os.utime(root + path, ns=(1, 2), follow_symlinks=False)
    await_tick()
    return times(root)


def moved(before: dict[bytes, Any], after: dict[bytes, Any]) -> dict[bytes, str]:
    """The times that changed, as letters by path. Paths that name another file now are left out."""
    return {
        path: "".join(
            letter for letter, old, new in zip("amc", before[path][1:], after[path][1:], strict=True) if old != new
        )
        for path in before.keys() & after.keys()
        if before[path][0] == after[path][0] and before[path] != after[path]
    }


class Different(AssertionError):
    """The two sides do not agree."""


def perform(side: Side, function: Operation, arguments: tuple[Any, ...]) -> Any:
    try:
        return function(side, *arguments)
    except OSError as failure:
        return errno.errorcode.get(failure.errno or 0, failure.errno)
    except ValueError as failure:  # Python itself refuses, a descriptor of -1 for one
        return str(failure)


def play(
    ours: Path, theirs: Path, seed: int, steps: int, without: Collection[str] = (), *, cached: bool = False
) -> None:
    """Raises Different if a step, or the tree after some steps, is not the same on both sides.

    cached: the kernel caches what is read. It then does not ask for it again, and no access is seen.
    """
    r = random.Random(seed)
    every = 50
    names = [name for name in OPERATIONS if name not in without]
    weights = [OPERATIONS[name][0] for name in names]
    sides = [Side(ours), Side(theirs)]
    log: collections.deque[str] = collections.deque(maxlen=25)
    try:
        for step in range(steps):
            name = r.choices(names, weights)[0]
            _, draw, function = OPERATIONS[name]
            arguments = draw(r)
            user, umask = r.choice(USERS), r.choice((0, 0o022, 0o027, 0o077))
            timed = r.random() < 0.02
            before = [settled_times(side.root) for side in sides] if timed else []
            if timed:
                await_tick()
            results = []
            for side in sides:
                with acting_as(user, umask):
                    results.append(perform(side, function, arguments))
            shown = f"{step}: {name}{arguments!r:.200} as {user[0]} umask {umask:03o} -> "
            log.append(f"{shown}{results[0]!r:.100}")
            if results[0] != results[1]:
                one, other = results
                raise Different(f"{shown}\n  mount: {one!r:.600}\n  tmpfs: {other!r:.600}")
            if timed and not (cached and name in ("read", "preadv2")):
                changes = [moved(old, times(side.root)) for old, side in zip(before, sides, strict=True)]
                if changes[0] != changes[1]:
                    raise Different(f"{shown} times\n  mount: {changes[0]}\n  tmpfs: {changes[1]}")
            if step % every == every - 1:
                trees = [tree(side.root) for side in sides]
                if trees[0] != trees[1]:
                    wrong = [
                        (path, *(str(one.get(path))[:300] for one in trees))
                        for path in trees[0].keys() | trees[1].keys()
                        if trees[0].get(path) != trees[1].get(path)
                    ]
                    raise Different(f"after step {step}: {wrong[:3]}")
    except Different as error:
        error.add_note(f"seed {seed}\n" + "\n".join(log))
        raise
    finally:
        for side in sides:
            side.close()


@contextmanager
def like_a_mount() -> Iterator[Path]:
    """A tmpfs with the flags that a gpufs mount always has."""
    path = Path(tempfile.mkdtemp(prefix="gpufs-twins-"))
    run("mount", "-t", "tmpfs", "-o", "nosuid,nodev,size=1G,mode=755", "none", str(path))
    try:
        yield path
    finally:
        run("umount", "-l", str(path))
        path.rmdir()


def twins(place: Place) -> str:
    if os.geteuid() != 0:
        raise Missing("acts as several users")
    rounds, steps = (4, 400) if place.quick else (150, 2000)
    seed = random.SystemRandom().randrange(1 << 30)
    with like_a_mount() as other:
        for number in range(rounds):
            pair = (place.root / f"r{number}", other / f"r{number}")
            for path in pair:
                path.mkdir()
                path.chmod(0o777)
            play(*pair, seed + number, steps)
            for path in pair:
                shutil.rmtree(path, ignore_errors=True)  # a step may have removed it
    return f"{rounds} rounds of {steps} calls on both, seed {seed}"


# It is a program of its own, as the campaign acts as other users with all its threads.
KILL = """
import random, sys, time
from pathlib import Path
from support.surviving import Survivor

mount, deaths = Survivor(Path(sys.argv[1])), int(sys.argv[2])
chance = random.Random(int(sys.argv[3]))
for _ in range(deaths):
    time.sleep(chance.random() * 0.4)
    mount.kill()
"""


def phase_of_errors(mount: Survivor, broken: Path) -> None:
    """No daemon can start until calls fail. What is closed and removed in that time is free afterwards."""
    names = ("closed", "removed")
    fds = [os.open(mount.device / name, os.O_RDWR | os.O_CREAT) for name in names]
    for fd in fds:
        os.write(fd, b"contents" * 50_000)
    os.unlink(mount.device / "removed")
    broken.touch()
    if pid := mount.pid:  # the killer may have ended
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: errno_of(lambda: os.listdir(mount.device)) == errno.EIO, PATIENCE, "errors")
    for fd in fds:
        with suppress(OSError):
            os.close(fd)
    broken.unlink()
    gpufs("restart", mount.path)
    if (mount.device / "closed").read_bytes() != b"contents" * 50_000:
        raise AssertionError("a file that was closed while calls failed has changed")
    os.unlink(mount.device / "closed")


@contextmanager
def in_use(mount: Survivor) -> Iterator[Callable[[int], None]]:
    """This program uses a file of 4 MiB in place, which has grown to 64 MiB of which nothing else was written."""
    path = mount.device / "used"
    path.write_bytes(bytes(4 * MIB))
    with gpufs_client.attach(path, "r+") as memory:
        os.truncate(path, 64 * MIB)

        def check(number: int) -> None:
            numpy.asarray(memory)[:] = number % 256
            if path.read_bytes() != bytes([number % 256]) * (4 * MIB) + bytes(60 * MIB):
                raise AssertionError("the file in use is not the memory that its program has")
            if errno_of(lambda: os.truncate(path, 0)) is None:
                raise AssertionError("the lease of the file in use is lost")

        yield check
    os.unlink(path)


def killed_twins(place: Place, driver: str = "host") -> str:
    """The same while the daemon of the mount is killed again and again, beside a program that has a sparse file in use.

    driver: cuda runs over the fake library.
    """
    if os.geteuid() != 0:
        raise Missing("acts as several users")
    deaths = 10 if place.quick else 200
    seed = random.SystemRandom().randrange(1 << 30)
    rounds = 0
    place.host.chmod(0o755)  # for the other users
    environment, broken = failing_takeovers(place.host, "os._exit(1)")
    if driver != "host":
        environment |= fake_gpu.environment(place.host)
    survivor = mounted(place.host / "mount", "--allow-other", driver=driver, environment=environment)
    with survivor as mount, like_a_mount() as other:
        ours = mount.device / "twins"
        ours.mkdir()
        # The fake library gives its memory to the daemons alone.
        using = in_use(mount) if driver == "host" else nullcontext(lambda _: None)
        words = [sys.executable, "-c", KILL, str(mount.path), str(deaths), str(seed)]
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        with using as check, subprocess.Popen(words, env=variables) as killer:
            try:
                while killer.poll() is None:
                    pair = (ours / f"r{rounds}", other / f"r{rounds}")
                    for path in pair:
                        path.mkdir()
                        path.chmod(0o777)
                    play(*pair, seed + rounds, 400)
                    for path in pair:
                        shutil.rmtree(path, ignore_errors=True)  # a step may have removed it
                    check(rounds)
                    rounds += 1
                    if rounds % 20 == 5:
                        phase_of_errors(mount, broken)
            finally:
                killer.kill()
        if killer.returncode:
            raise AssertionError(f"a daemon did not come back; seed {seed}")
        wait_until(lambda: not gpufs_client.status(mount.path).devices[0].used_bytes, PATIENCE, "free memory")
    return f"{deaths} deaths during {rounds} rounds of 400 calls on both, seed {seed}"
