"""The bytes of files below backing/NAME: what programs may do with them, who moves them, and by which path."""

from __future__ import annotations

import errno
import mmap
import os
import resource
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.data import KIB, MIB, assert_same, directory, noise
from support.hanging import HangingMount
from support.mounting import GpufsMount, Mounter, Session
from support.processes import (
    NOBODY,
    errno_of,
    in_child,
    run,
    start_children,
    wait_children,
    wait_until,
)

pytestmark = [pytest.mark.driver, pytest.mark.skipif(os.geteuid() != 0, reason="mounts for several users")]

PAGE = 4 * KIB


class Place:
    """An empty directory of the host, open to all, and the same directory in a mount.

    Of its own for each test: for a second the mount may still show what a name meant before the host changed it.
    """

    def __init__(self, mount: GpufsMount, name: str, there: Path) -> None:
        self.mount = mount
        self.there = Path(tempfile.mkdtemp(dir=there))
        self.there.chmod(0o777)
        self.shown = mount.path / "backing" / name / self.there.name

    def file(self, name: str, data: bytes) -> Path:
        """A file of the host with these bytes, on its disk; its path in the mount."""
        with open(self.there / name, "wb") as file:
            file.write(data)
            os.fsync(file.fileno())
        return self.shown / name


@pytest.fixture(scope="module")
def backed(session: Session, driver: str) -> Iterator[tuple[GpufsMount, Path, Path]]:
    with directory("/var/tmp") as disk, directory("/dev/shm") as memory:
        words = ["--backing", f"disk={disk}", "--backing", f"memory={memory}"]
        with GpufsMount(session, *words, driver=driver, memory=256 * MIB, allow_other=True) as mount:
            yield mount, disk, memory


@pytest.fixture
def disk(backed: tuple[GpufsMount, Path, Path]) -> Iterator[Place]:
    mount, there, _ = backed
    mount.complaints(wait=False)
    yield Place(mount, "disk", there)
    for path in mount.device.iterdir():
        path.unlink()
    assert not mount.complaints(wait=False)


@pytest.fixture
def memory(backed: tuple[GpufsMount, Path, Path]) -> Place:
    mount, _, there = backed
    return Place(mount, "memory", there)


def working(mount: GpufsMount) -> int:
    """Requests that threads serve, or that wait for one."""
    gauges = mount.stats()["gauges"]
    return int(gauges["requests_running"] + gauges["requests_queued"])


def grown(after: dict[str, Any], before: dict[str, Any], path: str) -> int:
    return int(after[path]["bytes"]) - int(before[path]["bytes"])


def copy(source: Path, target: Path, count: int, source_at: int = 0, target_at: int = 0) -> int:
    """copy_file_range(2) until nothing comes any more; OSError where its first call fails."""
    flags = os.O_WRONLY | os.O_CREAT
    with open(source, "rb") as reader, open(os.open(target, flags, 0o644), "wb") as writer:
        done = 0
        while done < count:
            try:
                part = os.copy_file_range(
                    reader.fileno(), writer.fileno(), count - done, source_at + done, target_at + done
                )
            except OSError:
                if done:
                    break
                raise
            if part == 0:
                break
            done += part
        return done


# ---- who serves ----


def test_plain_cp_is_served_by_the_engine(disk: Place) -> None:
    shown = disk.file("source", noise(9 * MIB + 3))
    before = disk.mount.moved("in"), disk.mount.moved("out")
    asked = disk.mount.stats()["counters"]
    run("cp", shown, disk.mount.device / "copied")
    run("cp", disk.mount.device / "copied", disk.shown / "back")
    assert_same((disk.there / "back").read_bytes(), noise(9 * MIB + 3))
    for old, new in zip(before, (disk.mount.moved("in"), disk.mount.moved("out")), strict=True):
        assert grown(new, old, "fastpath") + grown(new, old, "fallback") == 9 * MIB + 3
    after = disk.mount.stats()["counters"]
    assert after["backing_copied_bytes"] - asked["backing_copied_bytes"] == 2 * (9 * MIB + 3)
    assert after["backing_read_bytes"] == asked["backing_read_bytes"]
    assert after["backing_written_bytes"] == asked["backing_written_bytes"]


# ---- by which path; what drivers that have a fastpath do with files on a disk ----


# ---- how files are opened ----


def test_appends_go_to_the_end_of_the_hosts_file(disk: Place) -> None:
    """Programs of the host and several processes on the mount append at the same time."""
    shown, there = disk.file("log", b"start\n"), disk.there / "log"
    with open(shown, "ab", buffering=0) as ours, open(there, "ab", buffering=0) as theirs:
        for n in range(10):
            ours.write(b"ours %d\n" % n)
            theirs.write(b"theirs %d\n" % n)
    expected = b"".join(b"ours %d\ntheirs %d\n" % (n, n) for n in range(10))
    assert there.read_bytes() == b"start\n" + expected

    def append(index: int) -> None:
        with open(shown, "ab", buffering=0) as file:
            for n in range(50):
                file.write(b"%d %d\n" % (index, n))

    wait_children(start_children(4, append))
    lines = there.read_bytes().splitlines()[21:]
    assert len(lines) == 200
    for index in range(4):
        assert [line for line in lines if line.startswith(b"%d " % index)] == [b"%d %d" % (index, n) for n in range(50)]


def test_an_open_file_can_be_truncated_after_its_mode_changed(disk: Place) -> None:
    disk.file("file", noise(PAGE))
    (disk.there / "file").chmod(0o666)

    def act() -> int:
        os.setegid(NOBODY)
        os.seteuid(NOBODY)
        with open(disk.shown / "file", "r+b") as file:
            os.seteuid(0)
            (disk.there / "file").chmod(0o400)
            os.seteuid(NOBODY)
            os.ftruncate(file.fileno(), 100)
            return os.fstat(file.fileno()).st_size

    assert in_child(act) == (disk.there / "file").stat().st_size == 100


# ---- mappings ----


def test_shared_mappings(disk: Place) -> None:
    data = noise(MIB)
    shown = disk.file("file", data)
    with open(shown, "r+b", buffering=0) as file, mmap.mmap(file.fileno(), MIB) as mapping:
        assert_same(mapping[:], data)
        mapping[12345:12350] = b"patch"
        mapping.flush()
        assert (disk.there / "file").read_bytes()[12345:12350] == b"patch"
        # By another descriptor of the mount, with the pages still dirty.
        mapping[5:9] = b"more"
        assert os.pread(file.fileno(), 4, 5) == b"more"
    data = data[:5] + b"more" + data[9:12345] + b"patch" + data[12350:]
    assert_same((disk.there / "file").read_bytes(), data)
    with open(shown, "rb") as reader, mmap.mmap(reader.fileno(), MIB, access=mmap.ACCESS_READ) as mapping:
        assert_same(mapping[:], data)


# ---- several processes, and what changes below ----


def test_a_source_that_is_truncated_during_copies_ends_them_short(disk: Place) -> None:
    """The count of every copy is the size of its target, which has only bytes of the source."""
    size = 48 * MIB
    shown = disk.file("file", b"x" * size)
    for number in range(6):
        os.truncate(disk.there / "file", 0)
        (disk.there / "file").write_bytes(b"x" * size)
        target = disk.mount.device / f"copy{number}"
        child = start_children(1, lambda n: os.truncate(disk.there / "file", 4 * MIB + 5))
        done = copy(shown, target, size)
        wait_children(child)
        content = target.read_bytes()
        assert len(content) == done
        assert content == b"x" * done
        target.unlink()
    assert disk.mount.gauge("transfers_active") == 0


# ---- limits ----


def test_the_clients_file_size_limit(disk: Place) -> None:
    disk.file("file", b"")
    buffer = disk.mount.device / "buffer"
    buffer.write_bytes(noise(2 * MIB))

    def act() -> tuple[int, int, int, int]:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, MIB))
        with open(disk.shown / "file", "r+b", buffering=0) as file:
            short = os.pwrite(file.fileno(), bytes(PAGE), MIB - 100)
            beyond = errno_of(os.pwrite, file.fileno(), b"x", MIB)
            return (
                short,
                beyond,
                errno_of(os.ftruncate, file.fileno(), MIB + 1),
                copy(buffer, disk.shown / "big", 2 * MIB),
            )

    assert in_child(act) == (100, errno.EFBIG, errno.EFBIG, MIB)
    assert (disk.there / "big").stat().st_size == MIB


def test_the_daemons_file_size_limit(disk: Place) -> None:
    """The limit of the shell that started it must not kill it."""
    disk.file("file", b"")
    buffer = disk.mount.device / "buffer"
    buffer.write_bytes(noise(2 * MIB))
    before = resource.prlimit(disk.mount.pid, resource.RLIMIT_FSIZE, (MIB, before_hard := resource.RLIM_INFINITY))
    try:
        with open(disk.shown / "file", "r+b", buffering=0) as file:
            assert errno_of(os.pwrite, file.fileno(), b"x", MIB) == errno.EFBIG
            assert errno_of(os.ftruncate, file.fileno(), MIB + 1) == errno.EFBIG
        assert errno_of(copy, buffer, disk.shown / "file", 2 * MIB, 0, MIB) == errno.EFBIG
    finally:
        resource.prlimit(disk.mount.pid, resource.RLIMIT_FSIZE, (before[0], before_hard))
    assert disk.mount.alive()
    assert (disk.there / "file").stat().st_size == 0


@pytest.fixture
def small(mount: Mounter) -> Iterator[Place]:
    """A disk of 4 MiB."""
    with directory("/tmp") as there:
        run("mount", "-t", "tmpfs", "-o", "size=4m,mode=777", "none", there)
        try:
            one = mount("--backing", f"small={there}")
            yield Place(one, "small", there)
            one.unmount()
        finally:
            run("umount", "-l", there)


def test_free_space_is_that_of_the_hosts_disk(small: Place) -> None:
    small.file("file", noise(MIB))
    (small.there / "dir").mkdir()
    for path in (small.shown, small.shown / "dir", small.shown / "file"):
        assert numbers(os.statvfs(path)) == numbers(os.statvfs(small.there))
    with open(small.shown / "file", "rb") as file:
        assert numbers(os.fstatvfs(file.fileno())) == numbers(os.statvfs(small.there))
    assert shutil.disk_usage(small.shown).total == 4 * MIB
    mount, backing = small.mount.path, small.mount.path / "backing"
    # On a GPU other programs take and free memory between the two calls.
    wait_until(lambda: numbers(os.statvfs(mount)) == numbers(os.statvfs(backing)), 10, "the same numbers")


def numbers(found: os.statvfs_result) -> tuple[int, ...]:
    """All but the flags, which are the mount's."""
    sizes = (found.f_bsize, found.f_frsize, found.f_blocks, found.f_bfree, found.f_bavail)
    return (*sizes, found.f_files, found.f_ffree, found.f_namemax)


def test_a_full_disk(small: Place) -> None:
    """Writes and copies report what they have done, then ENOSPC. Other files stay."""
    buffer = small.mount.device / "buffer"
    buffer.write_bytes(noise(8 * MIB))
    small.file("kept", b"precious")
    with open(small.shown / "file", "wb", buffering=0) as file:
        written = 0
        while not (failed := errno_of(file.write, noise(MIB))):
            written = (small.there / "file").stat().st_size
        assert failed == errno.ENOSPC
    assert (small.there / "file").stat().st_size == written
    assert 3 * MIB <= written < 4 * MIB
    assert errno_of(copy, buffer, small.shown / "other", 8 * MIB) == errno.ENOSPC
    assert (small.there / "other").stat().st_size == 0
    (small.shown / "file").unlink()
    # Closing goes on after close(2) has returned.
    wait_until(lambda: os.statvfs(small.there).f_bavail * PAGE > 3 * MIB, 10, "the removed file's room")
    # Nothing where later pieces, which are written at the same time, took all the room.
    assert errno_of(copy, buffer, small.shown / "other", 8 * MIB) in (0, errno.ENOSPC)
    done = (small.there / "other").stat().st_size
    assert done < 4 * MIB
    assert_same((small.there / "other").read_bytes(), noise(8 * MIB)[:done])
    assert run("cp", buffer, small.shown / "other", check=False).returncode == 1
    assert (small.there / "kept").read_bytes() == b"precious"
    assert small.mount.gauge("transfers_active") == 0


# ---- servers that hang or end ----


def test_a_server_that_ends_gives_errors(mount: Mounter) -> None:
    """Waiting and later calls fail, and the mount continues."""
    with HangingMount(size=8 * MIB, good=MIB) as server:
        one = mount("--backing", f"net={server.path}")
        shown = one.path / "backing" / "net" / "file"
        with open(shown, "rb", buffering=0) as file:
            assert os.pread(file.fileno(), PAGE, 0) == bytes(PAGE)

            def wait(index: int) -> None:
                found = errno_of(os.pread, file.fileno(), PAGE, (4 + index) * MIB)
                assert found in (errno.ENOTCONN, errno.ECONNABORTED, errno.EIO)

            waiting = start_children(2, wait)
            wait_until(lambda: working(one) >= 1, 20, "reads to hang")
            server.release()
            wait_children(waiting)
            assert errno_of(os.pread, file.fileno(), PAGE, 2 * MIB) == errno.ENOTCONN
        assert errno_of(copy, shown, one.device / "copy", MIB) == errno.ENOTCONN
        (one.device / "alive").write_bytes(b"yes")
        one.complaints()
        one.unmount()


def test_hung_servers_block_no_other_files(mount: Mounter) -> None:
    """Files on disks are read and copied, and the mount can end, while 30 calls wait for two servers."""
    children: list[int] = []
    with directory("/var/tmp") as there, HangingMount(good=PAGE) as first, HangingMount(good=PAGE) as second:
        words = ["--backing", f"disk={there}", "--backing", f"one={first.path}", "--backing", f"two={second.path}"]
        one = mount(*words)
        place = Place(one, "disk", there)
        shown = place.file("file", noise(3 * MIB))

        def hang(index: int) -> None:
            source = one.path / "backing" / ("one", "two")[index % 2] / "file"
            with open(source, "rb", buffering=0) as file:
                if index < 20:
                    errno_of(os.pread, file.fileno(), PAGE, (index + 1) * MIB)
                else:
                    errno_of(copy, source, one.device / f"hung{index}", 64 * MIB)

        children = start_children(30, hang)
        try:
            wait_until(lambda: working(one) >= 30, 30, "everybody to hang")
            wait_until(lambda: one.gauge("transfers_active") >= 10, 30, "transfers to hang")
            assert_same(shown.read_bytes(), noise(3 * MIB))
            assert copy(shown, one.device / "copy", 3 * MIB) == 3 * MIB
            assert copy(one.device / "copy", place.shown / "back", 3 * MIB) == 3 * MIB
            assert_same((place.there / "back").read_bytes(), noise(3 * MIB))
            one.signal(signal.SIGTERM)
            wait_until(lambda: "has ended" in one.log.read_text(), 15, "the mount to end")
            assert not one.mounted()
        finally:
            # A process is gone only when the last of its threads is, and these wait for the servers.
            first.release()
            second.release()
            for child in children:
                os.waitpid(child, 0)
        one.complaints()
        one.wait_ended(30, code=None)
