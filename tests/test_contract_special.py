"""FIFOs, sockets, locks, notifications: what the kernel does on top of any file system must work on this one."""

from __future__ import annotations

import ctypes
import fcntl
import os
import stat
import struct
import threading
from errno import EINVAL, ENOSYS, ENXIO, EOPNOTSUPP, EWOULDBLOCK
from pathlib import Path

from support import linux
from support.data import noise
from support.processes import errno_of

libc = ctypes.CDLL(None, use_errno=True)


def test_fifos(root: Path) -> None:
    fifo = root / "fifo"
    os.mkfifo(fifo, 0o640)
    assert stat.S_ISFIFO(fifo.stat().st_mode)
    assert errno_of(os.open, fifo, os.O_WRONLY | os.O_NONBLOCK) == ENXIO
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append(fifo.read_bytes()))
    reader.start()
    fifo.write_bytes(noise(300_000))
    reader.join()
    assert received == [noise(300_000)]
    assert fifo.stat().st_size == 0
    os.rename(fifo, root / "moved")
    os.unlink(root / "moved")


def test_whole_file_locks(root: Path) -> None:
    (root / "file").touch()
    first, second = os.open(root / "file", os.O_RDWR), os.open(root / "file", os.O_RDWR)
    fcntl.flock(first, fcntl.LOCK_SH)
    fcntl.flock(second, fcntl.LOCK_SH)
    assert errno_of(fcntl.flock, second, fcntl.LOCK_EX | fcntl.LOCK_NB) == EWOULDBLOCK
    fcntl.flock(first, fcntl.LOCK_UN)
    fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert errno_of(fcntl.flock, first, fcntl.LOCK_SH | fcntl.LOCK_NB) == EWOULDBLOCK
    os.close(second)
    fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(first)


def test_changes_are_notified(root: Path) -> None:
    fd = libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
    assert libc.inotify_add_watch(fd, os.fsencode(root), 0xFFF) > 0
    (root / "file").write_bytes(b"x")
    os.rename(root / "file", root / "moved")
    os.unlink(root / "moved")
    (root / "dir").mkdir()
    events, data, at = [], os.read(fd, 65536), 0
    while at < len(data):
        _, mask, _, length = struct.unpack_from("iIII", data, at)
        events.append((mask & 0xFFF, data[at + 16 : at + 16 + length].rstrip(b"\0")))
        at += 16 + length
    os.close(fd)
    create, modify, moved_from, moved_to, delete = 0x100, 0x2, 0x40, 0x80, 0x200
    for wanted in (
        (create, b"file"),
        (modify, b"file"),
        (moved_from, b"file"),
        (moved_to, b"moved"),
        (delete, b"moved"),
        (create, b"dir"),
    ):
        assert wanted in events


def test_ioctls_are_refused(root: Path, on_gpufs: bool) -> None:
    (root / "file").write_bytes(b"x")
    fd = os.open(root / "file", os.O_RDWR)
    for request in (0x5401, 0x40046601, 0x12345678):  # TCGETS, FS_IOC_SETFLAGS, nobody's
        assert errno_of(fcntl.ioctl, fd, request, bytes(64)) in (25, 95, EINVAL)  # ENOTTY, EOPNOTSUPP
    assert os.isatty(fd) is False
    os.close(fd)
    if on_gpufs:  # ENOSYS before Linux 6.17
        assert errno_of(linux.file_attributes, root / "file") in (EOPNOTSUPP, ENOSYS)
