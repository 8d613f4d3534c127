"""FIFOs, sockets, locks, notifications: what the kernel does on top of any file system must work on this one."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import select
import signal
import socket
import stat
import struct
import threading
import time
from errno import EACCES, EAGAIN, EFAULT, EINVAL, ENODEV, ENOSYS, ENOTTY, ENXIO, EOPNOTSUPP, EPERM, EWOULDBLOCK
from pathlib import Path

import pytest
from support import linux
from support.data import noise
from support.processes import NOBODY, OTHER, as_nobody, errno_of, in_child, start_children, wait_children, wait_until

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


def test_sockets(root: Path) -> None:
    path = root / "socket"
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind(str(path))
        assert stat.S_ISSOCK(path.stat().st_mode)
        server.listen()
        client.connect(str(path))
        connection, _ = server.accept()
        with connection:
            client.sendall(b"through a socket on the mount")
            assert connection.recv(100) == b"through a socket on the mount"
        assert errno_of(os.open, path, os.O_RDONLY) == ENXIO


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


def test_range_locks_between_processes(root: Path) -> None:
    path = root / "file"
    path.write_bytes(bytes(1000))
    fd = os.open(path, os.O_RDWR)
    fcntl.lockf(fd, fcntl.LOCK_EX, 100, 50)

    def probe() -> tuple[int, int, int, int]:
        other = os.open(path, os.O_RDWR)
        held = fcntl.fcntl(other, fcntl.F_GETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0))
        return (
            errno_of(fcntl.lockf, other, fcntl.LOCK_EX | fcntl.LOCK_NB, 50, 0),
            errno_of(fcntl.lockf, other, fcntl.LOCK_EX | fcntl.LOCK_NB, 50, 100),
            errno_of(fcntl.lockf, other, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, 149),
            struct.unpack("hhqqi4x", held)[4],
        )

    before, inside, edge, owner = in_child(probe)
    assert before == 0
    assert inside in (EAGAIN, EACCES)
    assert edge in (EAGAIN, EACCES)
    assert owner == os.getpid()
    os.close(os.open(path, os.O_RDONLY))  # POSIX: closing any descriptor of the file drops the process's locks
    assert in_child(probe)[:3] == (0, 0, 0)
    os.close(fd)


def test_locks_of_open_file_descriptions(root: Path) -> None:
    path = root / "file"
    path.write_bytes(bytes(100))
    one, two = os.open(path, os.O_RDWR), os.open(path, os.O_RDWR)
    setlk, request = 37, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0)
    fcntl.fcntl(one, setlk, request)
    assert errno_of(fcntl.fcntl, two, setlk, request) in (EAGAIN, EACCES)
    os.close(one)
    fcntl.fcntl(two, setlk, request)
    os.close(two)


def test_waiting_for_a_lock(root: Path) -> None:
    (root / "counter").write_text("0")

    def count(_: int) -> None:
        for _ in range(50):
            with open(root / "counter", "r+") as file:
                fcntl.lockf(file, fcntl.LOCK_EX)
                value = int(file.read())
                file.seek(0)
                file.write(str(value + 1))
                file.flush()
                fcntl.lockf(file, fcntl.LOCK_UN)

    wait_children(start_children(4, count))
    assert (root / "counter").read_text() == "200"


def test_a_signal_ends_the_wait_for_a_lock(root: Path) -> None:
    (root / "file").touch()
    fd = os.open(root / "file", os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    child = os.fork()
    if child == 0:
        fcntl.flock(os.open(root / "file", os.O_RDWR), fcntl.LOCK_EX)
        os._exit(0)
    time.sleep(0.1)
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGTERM
    os.close(fd)


def test_regular_files_are_always_ready(root: Path) -> None:
    (root / "file").write_bytes(b"x")
    fd = os.open(root / "file", os.O_RDWR)
    poll = select.poll()
    poll.register(fd, select.POLLIN | select.POLLOUT)
    assert poll.poll(1000) == [(fd, select.POLLIN | select.POLLOUT)]
    os.close(fd)


def test_leases(root: Path) -> None:
    """A lease is given, or refused with EINVAL; either way the file stays usable."""
    (root / "file").write_bytes(b"x")
    fd = os.open(root / "file", os.O_RDONLY)
    code = errno_of(fcntl.fcntl, fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    assert code in (0, EINVAL, EAGAIN)
    if code == 0:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    os.close(fd)
    (root / "file").write_bytes(b"y")


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


def test_what_the_kernel_does_differently_on_fuse(root: Path, on_gpufs: bool, cached: bool) -> None:
    """Each is decided above the file system: nothing that it answers could change it."""
    os.mkfifo(root / "fifo")
    pipe = os.open(root / "fifo", os.O_RDWR)
    before = os.fstat(pipe).st_mtime_ns
    time.sleep(0.02)
    os.write(pipe, b"x")
    assert (os.fstat(pipe).st_mtime_ns == before) == on_gpufs
    os.close(pipe)

    (root / "file").write_bytes(b"x")
    fd = os.open(root / "file", os.O_RDWR)
    with select.epoll() as poll:
        assert errno_of(poll.register, fd, select.EPOLLIN) == (0 if on_gpufs else EPERM)
    if os.geteuid() == 0:
        fibmap = 1
        assert errno_of(fcntl.ioctl, fd, fibmap, bytearray(8)) == (0 if on_gpufs else EINVAL)
    f_get_seals = 1034
    assert errno_of(fcntl.fcntl, fd, f_get_seals) == (EINVAL if on_gpufs else 0)
    os.utime(fd, ns=(1, 2))
    assert os.read(fd, 0) == b""
    assert (os.fstat(fd).st_atime_ns == 1) == on_gpufs
    with mmap.mmap(fd, 1):
        assert (os.fstat(fd).st_atime_ns == 1) == on_gpufs
    os.utime(fd, ns=(1, 2))
    os.posix_fadvise(fd, 0, 1, os.POSIX_FADV_WILLNEED)
    if on_gpufs:
        wait_until(lambda: os.fstat(fd).st_atime_ns > 1, 10, "what is read ahead to count as an access")
    assert (os.fstat(fd).st_atime_ns == 1) != on_gpufs
    os.utime(fd, ns=(1, 2))
    sink = os.open(root / "sink", os.O_WRONLY | os.O_CREAT)
    assert os.sendfile(sink, fd, 10, 100) == 0
    assert (os.fstat(fd).st_atime_ns == 1) == on_gpufs
    os.close(sink)
    read_end, write_end = os.pipe()
    assert os.splice(fd, write_end, 1, offset_src=0) == 1
    os.pwrite(fd, b"z", 0)
    assert os.read(read_end, 1) == (b"x" if on_gpufs and not cached else b"z")
    os.close(read_end)
    os.close(write_end)
    os.close(fd)
    directory = os.open(root, os.O_RDONLY)
    assert errno_of(os.lseek, directory, 0, os.SEEK_END) == (0 if on_gpufs else EINVAL)
    assert errno_of(os.lseek, directory, 0, os.SEEK_DATA) == (ENXIO if on_gpufs else EINVAL)
    os.close(directory)

    unnamed = -1
    watch, in_modify = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC), 2
    libc.inotify_add_watch(watch, os.fsencode(root), in_modify)
    with contextlib.suppress(OSError):  # FUSE has them from Linux 6.2 on
        unnamed = os.open(root, os.O_TMPFILE | os.O_RDWR, 0o600)
    if unnamed >= 0:
        os.write(unnamed, b"x")
        name = os.read(watch, 4096)[16:].rstrip(b"\0")
        assert name == b"/" if on_gpufs else name.startswith(b"#")
        os.close(unnamed)
    os.close(watch)

    if os.geteuid() == 0:
        watch, in_attrib = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC), 4
        (root / "file").chmod(0o4777)
        libc.inotify_add_watch(watch, os.fsencode(root / "file"), in_attrib)
        as_nobody(lambda: os.write(os.open(root / "file", os.O_WRONLY), b"y"))
        assert stat.S_IMODE((root / "file").stat().st_mode) == 0o777
        assert errno_of(os.read, watch, 4096) == (EAGAIN if on_gpufs and not cached else 0)
        os.close(watch)

        (root / "file").chmod(0o2706)
        refused = as_nobody(lambda: errno_of(os.chown, root / "file", -1, -1))
        assert refused == (0 if on_gpufs else EPERM)
        assert stat.S_IMODE((root / "file").stat().st_mode) == 0o2706
        os.chown(root / "file", NOBODY, OTHER)
        (root / "file").chmod(0o2706)
        as_nobody(lambda: os.chown(root / "file", -1, -1))
        assert stat.S_IMODE((root / "file").stat().st_mode) == (0o2706 if on_gpufs else 0o706)


def test_what_the_kernel_checks_first_on_fuse(root: Path, on_gpufs: bool, cached: bool) -> None:
    (root / "file").write_bytes(b"x")
    fd = os.open(root / "file", os.O_RDWR)
    nowhere = ctypes.c_void_p(8)
    ctypes.set_errno(0)
    assert libc.pread(fd, nowhere, 4, ctypes.c_long(0)) == -1
    assert ctypes.get_errno() == EFAULT
    ctypes.set_errno(0)
    libc.pread(fd, nowhere, 4, ctypes.c_long(1))
    assert ctypes.get_errno() == (EFAULT if on_gpufs and not cached else 0)
    ctypes.set_errno(0)
    assert libc.ioctl(fd, ctypes.c_ulong(0xC0646663), nowhere) == -1  # nobody's, with an argument of 100 bytes
    assert ctypes.get_errno() == (EFAULT if on_gpufs else ENOTTY)
    os.close(fd)


def test_a_copy_is_an_access(root: Path) -> None:
    (root / "file").write_bytes(b"x")
    source, target = os.open(root / "file", os.O_RDONLY), os.open(root / "copy", os.O_WRONLY | os.O_CREAT)
    os.utime(source, ns=(1, 2))
    assert os.copy_file_range(source, target, 1) == 1
    wait_until(lambda: os.fstat(source).st_atime_ns > 1, 10, "the time-out of what the kernel knows of the source")
    os.close(source)
    os.close(target)


@pytest.mark.skipif(os.geteuid() != 0, reason="watching others takes root")
def test_watching_the_whole_file_system(root: Path, on_gpufs: bool) -> None:
    report_fid, add, whole, create = 0x200, 1, 0x100, ctypes.c_uint64(0x100)
    group = libc.fanotify_init(report_fid | 2, os.O_RDONLY)  # non-blocking
    assert group >= 0
    path = os.fsencode(root)
    ctypes.set_errno(0)
    libc.fanotify_mark(group, add | whole, create, -100, path)
    assert ctypes.get_errno() == (ENODEV if on_gpufs else 0)
    libc.fanotify_mark(group, 2 | whole, create, -100, path)  # elsewhere others make files all the time
    with contextlib.suppress(BlockingIOError):
        while os.read(group, 1 << 16):
            pass
    assert libc.fanotify_mark(group, add, create, -100, path) == 0
    (root / "file").touch()
    assert len(os.read(group, 4096)) > 0
    os.close(group)


def test_what_is_different_by_design(root: Path, on_gpufs: bool) -> None:
    (root / "file").touch()
    fd = os.open(root / "file", os.O_RDWR)
    os.posix_fallocate(fd, 0, 4096)
    # the device does not track what of its memory was written
    assert errno_of(os.lseek, fd, 0, os.SEEK_DATA) == (0 if on_gpufs else ENXIO)
    os.close(fd)
