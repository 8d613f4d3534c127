"""Locks, leases and ioctls, which the kernel provides on top of a file system."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
from errno import EACCES, EAGAIN, EINVAL, ENOSYS, EOPNOTSUPP, EWOULDBLOCK
from pathlib import Path

import pytest
from support import linux
from support.processes import errno_of, in_child, wait_until

F_OFD_SETLK = 37


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


def test_ioctls_are_refused(root: Path, on_gpufs: bool) -> None:
    (root / "file").write_bytes(b"x")
    fd = os.open(root / "file", os.O_RDWR)
    for request in (0x5401, 0x40046601, 0x12345678):  # TCGETS, FS_IOC_SETFLAGS, nobody's
        assert errno_of(fcntl.ioctl, fd, request, bytes(64)) in (25, 95, EINVAL)  # ENOTTY, EOPNOTSUPP
    assert os.isatty(fd) is False
    os.close(fd)
    if on_gpufs:  # ENOSYS before Linux 6.17
        assert errno_of(linux.file_attributes, root / "file") in (EOPNOTSUPP, ENOSYS)
