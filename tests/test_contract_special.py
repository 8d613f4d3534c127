"""FIFOs, sockets, locks, leases and notifications, which the kernel provides on top of a file system."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import stat
import struct
import threading
from errno import EACCES, EAGAIN, EINVAL, ENOSYS, ENXIO, EOPNOTSUPP, EWOULDBLOCK
from pathlib import Path

import pytest
from support import linux
from support.data import noise
from support.processes import errno_of, in_child, start_children, wait_children, wait_until

F_OFD_SETLK = 37
libc = ctypes.CDLL(None, use_errno=True)


def test_fifos_pass_data(root: Path) -> None:
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


def test_flock_locks_exclude_each_other(root: Path) -> None:
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


@pytest.mark.parametrize("command", [fcntl.F_SETLK, F_OFD_SETLK], ids=["fcntl", "OFD"])
def test_a_range_lock_excludes_other_processes(root: Path, command: int) -> None:
    path = root / "file"
    path.write_bytes(bytes(1000))

    def lock(fd: int, kind: int, start: int, length: int) -> int:
        return errno_of(fcntl.fcntl, fd, command, struct.pack("hhqqi4x", kind, os.SEEK_SET, start, length, 0))

    def probe() -> list[int]:
        other = os.open(path, os.O_RDWR)
        ranges = ((fcntl.F_WRLCK, 0, 50), (fcntl.F_WRLCK, 100, 50), (fcntl.F_RDLCK, 149, 1))
        return [lock(other, *wanted) for wanted in ranges]

    fd = os.open(path, os.O_RDWR)
    assert lock(fd, fcntl.F_WRLCK, 50, 100) == 0
    before, inside, edge = in_child(probe)
    assert before == 0
    assert {inside, edge} <= {EAGAIN, EACCES}
    # Closing any other descriptor of the file releases a lock of fcntl(2), as POSIX says, and no OFD lock.
    os.close(os.open(path, os.O_RDONLY))
    assert (in_child(probe)[1] == 0) == (command == fcntl.F_SETLK)
    os.close(fd)
    assert in_child(probe) == [0, 0, 0]


def test_a_lock_ends_with_its_process(root: Path) -> None:
    """A killed holder releases its lock, and the process that waits for the lock continues."""
    path = root / "file"
    path.touch()
    ready, tell = os.pipe()

    def hold() -> None:
        fcntl.flock(os.open(path, os.O_RDWR), fcntl.LOCK_EX)
        os.write(tell, b"x")
        signal.pause()

    holder = os.fork()
    if holder == 0:
        try:
            hold()
        finally:
            os._exit(1)
    os.read(ready, 1)
    waiter = start_children(1, lambda _: fcntl.flock(os.open(path, os.O_RDWR), fcntl.LOCK_EX))
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)
    wait_children(waiter)
    os.close(ready)
    os.close(tell)


def test_opening_breaks_a_lease(root: Path) -> None:
    got: list[int] = []
    number = signal.SIGRTMIN + 3
    before = signal.signal(number, lambda *_: got.append(1))
    try:
        (root / "file").write_bytes(b"x")
        fd = os.open(root / "file", os.O_RDWR)
        f_setsig = 10
        fcntl.fcntl(fd, f_setsig, number)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        assert fcntl.fcntl(fd, fcntl.F_GETLEASE) == fcntl.F_WRLCK
        assert errno_of(os.open, root / "file", os.O_RDONLY | os.O_NONBLOCK) == EWOULDBLOCK
        wait_until(lambda: got, 10, "the signal to the holder")
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        os.close(os.open(root / "file", os.O_RDONLY | os.O_NONBLOCK))
        os.close(fd)
    finally:
        signal.signal(number, before)


def test_inotify_reports_changes(root: Path) -> None:
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
