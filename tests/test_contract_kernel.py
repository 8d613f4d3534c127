"""docs/internals/kernel-differences.md: calls that the kernel answers differently for FUSE than for tmpfs."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import resource
import select
import signal
import stat
import struct
import subprocess
import time
from collections.abc import Callable
from errno import EAGAIN, EFAULT, EFBIG, EINVAL, ENODEV, ENOTTY, ENXIO, EOPNOTSUPP, EPERM
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support import linux
from support.processes import NOBODY, OTHER, as_nobody, errno_of, in_child, wait_until

libc = ctypes.CDLL(None, use_errno=True)
privileged = pytest.mark.skipif(os.geteuid() != 0, reason="takes root")


def code_of(result: int) -> int:
    """The errno of a call through ctypes that has just returned `result`."""
    return ctypes.get_errno() if result < 0 else 0


class Place(NamedTuple):
    """An empty directory, and a file of one byte in it that is open for reading and writing."""

    root: Path
    file: Path
    fd: int


def read_without_waiting(place: Place) -> int:
    nowait = 8
    return errno_of(os.preadv, place.fd, [bytearray(1)], 0, nowait)


def seals(place: Place) -> int:
    get_seals = 1034
    return errno_of(fcntl.fcntl, place.fd, get_seals)


def allocate_beyond_the_size_limit(place: Place) -> int:
    def allocate() -> int:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        return errno_of(linux.fallocate, place.fd, linux.FALLOC_KEEP_SIZE, 0, 8192)

    return int(in_child(allocate))


def fifo_keeps_its_times(place: Place) -> bool:
    os.mkfifo(place.root / "fifo")
    pipe = os.open(place.root / "fifo", os.O_RDWR)
    before = os.fstat(pipe).st_mtime_ns
    time.sleep(0.02)
    os.write(pipe, b"x")
    changed = os.fstat(pipe).st_mtime_ns
    os.close(pipe)
    return before == changed


def epoll(place: Place) -> int:
    with select.epoll() as poll:
        return errno_of(poll.register, place.fd, select.EPOLLIN)


def is_no_access(action: Callable[[Place], object]) -> Callable[[Place], bool]:
    """Whether the access time stays as it was."""

    def check(place: Place) -> bool:
        os.utime(place.fd, ns=(1, 2))
        action(place)
        return os.fstat(place.fd).st_atime_ns == 1

    return check


def send_at_the_end(place: Place) -> None:
    sink = os.open(place.root / "sink", os.O_WRONLY | os.O_CREAT)
    assert os.sendfile(sink, place.fd, 10, 100) == 0
    os.close(sink)


def map_one_byte(place: Place) -> None:
    mmap.mmap(place.fd, 1).close()


def read_at_the_end_into_nowhere(place: Place) -> int:
    return code_of(libc.pread(place.fd, ctypes.c_void_p(8), 4, ctypes.c_long(1)))


def unknown_ioctl_with_an_argument_nowhere(place: Place) -> int:
    return code_of(libc.ioctl(place.fd, ctypes.c_ulong(0xC0646663), ctypes.c_void_p(8)))


def name_of_an_unnamed_file(place: Place) -> bytes:
    """The first byte of what inotify calls it."""
    if linux.kernel_version() < (6, 2):
        pytest.skip("FUSE has O_TMPFILE from Linux 6.2 on")
    watch, in_modify = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC), 2
    libc.inotify_add_watch(watch, os.fsencode(place.root), in_modify)
    unnamed = os.open(place.root, os.O_TMPFILE | os.O_RDWR, 0o600)
    os.write(unnamed, b"x")
    name = os.read(watch, 4096)[16:17]
    os.close(unnamed)
    os.close(watch)
    return name


def spliced_data_after_a_write(place: Place) -> bytes:
    out, into = os.pipe()
    assert os.splice(place.fd, into, 1, offset_src=0) == 1
    os.pwrite(place.fd, b"z", 0)
    found = os.read(out, 1)
    os.close(out)
    os.close(into)
    return found


def seek_in_a_directory(place: Place) -> tuple[int, int]:
    directory = os.open(place.root, os.O_RDONLY)
    found = tuple(errno_of(os.lseek, directory, 0, whence) for whence in (os.SEEK_END, os.SEEK_DATA))
    os.close(directory)
    return found  # type: ignore[return-value]


def watch_the_file_system(place: Place) -> tuple[int, int]:
    """Of the whole file system, and of one directory."""
    report_fid, add, whole, create = 0x200, 1, 0x100, ctypes.c_uint64(0x100)
    found = []
    for flags in (add | whole, add):
        group = libc.fanotify_init(report_fid | 2, os.O_RDONLY)  # non-blocking
        assert group >= 0
        found.append(code_of(libc.fanotify_mark(group, flags, create, -100, os.fsencode(place.root))))
        os.close(group)
    return found[0], found[1]


def notice_of_cleared_bits(place: Place) -> int:
    watch, in_attrib = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC), 4
    place.file.chmod(0o4777)
    libc.inotify_add_watch(watch, os.fsencode(place.file), in_attrib)
    as_nobody(lambda: os.write(os.open(place.file, os.O_WRONLY), b"y"))
    assert stat.S_IMODE(place.file.stat().st_mode) == 0o777
    code = errno_of(os.read, watch, 4096)
    os.close(watch)
    return code


def chown_that_changes_nothing(place: Place) -> tuple[int, int]:
    """The result for another user, and the mode after the owner has called it from outside the group."""
    place.file.chmod(0o2706)
    refused = as_nobody(lambda: errno_of(os.chown, place.file, -1, -1))
    os.chown(place.file, NOBODY, OTHER)
    place.file.chmod(0o2706)
    as_nobody(lambda: os.chown(place.file, -1, -1))
    return refused, stat.S_IMODE(place.file.stat().st_mode)


def map_owners(place: Place) -> int:
    with subprocess.Popen(["unshare", "-U", "sh", "-c", "echo; exec sleep 600"], stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None
            if not holder.stdout.readline():
                pytest.skip("no user namespaces here")
            for kind in ("uid_map", "gid_map"):
                Path(f"/proc/{holder.pid}/{kind}").write_text("0 1000 10")
            open_tree, mount_setattr, clone, idmap, empty_path = 428, 442, 1, 0x100000, 0x1000
            with open(f"/proc/{holder.pid}/ns/user", "rb") as owners:
                tree = libc.syscall(open_tree, -100, os.fsencode(place.root), clone | os.O_CLOEXEC)
                assert tree >= 0
                wanted = struct.pack("QQQQ", idmap, 0, 0, owners.fileno())
                code = code_of(libc.syscall(mount_setattr, tree, b"", empty_path, wanted, len(wanted)))
                os.close(tree)
                return code
        finally:
            holder.kill()


def fibmap(place: Place) -> int:
    return errno_of(fcntl.ioctl, place.fd, 1, bytearray(8))


def register_faults(place: Place) -> int:
    """userfaultfd(2) for a mapping of the file."""
    number = {"x86_64": 323, "aarch64": 282}[os.uname().machine]
    user_mode_only, api, register, missing = 1, 0xC018AA3F, 0xC020AA00, 1
    handler = libc.syscall(number, os.O_CLOEXEC | user_mode_only)
    if handler < 0:
        pytest.skip(f"no userfaultfd here: {os.strerror(ctypes.get_errno())}")
    fcntl.ioctl(handler, api, struct.pack("=QQQ", 0xAA, 0, 0))
    os.ftruncate(place.fd, mmap.PAGESIZE)
    with mmap.mmap(place.fd, mmap.PAGESIZE) as pages:
        start = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        code = errno_of(fcntl.ioctl, handler, register, struct.pack("=QQQQ", start, mmap.PAGESIZE, missing, 0))
    os.close(handler)
    return code


def row(
    action: Callable[[Place], Any], here: object, on_tmpfs: object, *, cached: object = None, root: bool = False
) -> Any:
    """cached: the result where files use the page cache, if it is another one. root: only root can make the call."""
    inner = getattr(action, "__closure__", None)
    name = inner[0].cell_contents.__name__ if inner else action.__name__
    return pytest.param(
        action, here, on_tmpfs, here if cached is None else cached, id=name, marks=privileged if root else ()
    )


@pytest.mark.parametrize(
    ("action", "here", "on_tmpfs", "with_cache"),
    [
        row(read_without_waiting, (EOPNOTSUPP,), (0, EAGAIN, EOPNOTSUPP)),
        row(seals, EINVAL, 0),
        row(allocate_beyond_the_size_limit, 0, EFBIG),
        row(fifo_keeps_its_times, True, False),
        row(epoll, 0, EPERM),
        row(is_no_access(lambda place: os.read(place.fd, 0)), True, False),
        row(is_no_access(send_at_the_end), True, False),
        row(is_no_access(map_one_byte), True, False),
        row(read_at_the_end_into_nowhere, EFAULT, 0, cached=0),
        row(unknown_ioctl_with_an_argument_nowhere, EFAULT, ENOTTY),
        row(watch_the_file_system, (ENODEV, 0), (0, 0), root=True),
        row(notice_of_cleared_bits, EAGAIN, 0, cached=0, root=True),
        row(name_of_an_unnamed_file, b"/", b"#"),
        row(spliced_data_after_a_write, b"x", b"z", cached=b"z"),
        row(map_owners, EINVAL, 0, root=True),
        row(seek_in_a_directory, (0, ENXIO), (EINVAL, EINVAL)),
        row(chown_that_changes_nothing, (0, 0o2706), (EPERM, 0o706), root=True),
        row(register_faults, EINVAL, 0),
        row(fibmap, 0, EINVAL, root=True),
    ],
)
def test_the_kernel_answers_this_call_differently_for_fuse(
    root: Path,
    on_gpufs: bool,
    cached: bool,
    action: Callable[[Place], Any],
    here: object,
    on_tmpfs: object,
    with_cache: object,
) -> None:
    file = root / "file"
    file.write_bytes(b"x")
    fd = os.open(file, os.O_RDWR)
    try:
        found = action(Place(root, file, fd))
    finally:
        os.close(fd)
    wanted = on_tmpfs if not on_gpufs else with_cache if cached else here
    assert found in wanted if action is read_without_waiting else found == wanted  # type: ignore[operator]


def test_reading_ahead_counts_as_an_access(root: Path, on_gpufs: bool) -> None:
    (root / "file").write_bytes(b"x")
    fd = os.open(root / "file", os.O_RDWR)
    os.utime(fd, ns=(1, 2))
    os.posix_fadvise(fd, 0, 1, os.POSIX_FADV_WILLNEED)
    if on_gpufs:
        wait_until(lambda: os.fstat(fd).st_atime_ns > 1, 10, "an access time for the data read ahead")
    else:
        assert os.fstat(fd).st_atime_ns == 1
    os.close(fd)


def test_a_copy_sets_the_access_time_of_its_source_after_the_timeout(root: Path) -> None:
    (root / "file").write_bytes(b"x")
    source, target = os.open(root / "file", os.O_RDONLY), os.open(root / "copy", os.O_WRONLY | os.O_CREAT)
    os.utime(source, ns=(1, 2))
    assert os.copy_file_range(source, target, 1) == 1
    wait_until(lambda: os.fstat(source).st_atime_ns > 1, 10, "the end of the attribute time-out")
    os.close(source)
    os.close(target)
