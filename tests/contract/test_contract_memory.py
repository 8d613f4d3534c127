"""Where gpufs is not tmpfs: devices with a limit, what a full device does to files, the read-only parts of the tree."""

from __future__ import annotations

import errno
import json
import os
from errno import EACCES, ENOSPC, EPERM, EROFS
from pathlib import Path

import pytest
from support import linux
from support.data import GRANULE, KIB, MIB, assert_same, noise, read_all
from support.linux import FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE, fallocate
from support.mounting import GPUFS, GpufsMount, Mounter
from support.processes import errno_of, run, start_children, wait_children, wait_until

MEMORY = 64 * MIB
REFUSED = (EACCES, EPERM, EROFS)


@pytest.fixture
def small(mount: Mounter) -> GpufsMount:
    """A mount of two devices with 64 MiB each."""
    return mount(devices=2, memory=MEMORY, allow_other=True)


def fill(path: Path, seed: int = 1) -> int:
    """Writes noise until the device is full; returns the size reached. The last write may be short."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    block, at, code = noise(MIB, seed), 0, 0
    while not code:
        try:
            done = os.pwrite(fd, memoryview(block)[at % MIB :], at)
            assert done > 0
            at += done
        except OSError as error:
            code = error.errno or -1
    os.close(fd)
    assert code == ENOSPC
    assert path.stat().st_size == at
    return at


def free_bytes(path: Path) -> int:
    found = os.statvfs(path)
    return found.f_bfree * found.f_frsize


def test_a_full_device(small: GpufsMount) -> None:
    size = fill(small.device / "large")
    assert MEMORY - 4 * GRANULE <= size <= MEMORY
    content = read_all(small.device / "large")
    assert_same(content, (noise(MIB, 1) * 65)[:size])
    # what is there may be changed, what is not cannot be added
    fd = os.open(small.device / "large", os.O_RDWR)
    assert os.pwrite(fd, b"changed", MIB) == 7
    assert errno_of(os.pwrite, fd, noise(4 * MIB), size) == ENOSPC
    assert os.fstat(fd).st_size == size
    os.close(fd)
    # the other device has its own memory
    (small.path / "gpu1" / "other").write_bytes(noise(20 * MIB, 2))
    assert_same(read_all(small.path / "gpu1" / "other"), noise(20 * MIB, 2))
    # and the space is there again
    os.unlink(small.device / "large")
    assert fill(small.device / "again", 3) == size


def test_allocation_is_all_or_nothing(small: GpufsMount) -> None:
    fd = os.open(small.device / "file", os.O_RDWR | os.O_CREAT)
    before = free_bytes(small.device)
    assert errno_of(linux.fallocate, fd, 0, 0, MEMORY + GRANULE) == ENOSPC
    assert os.fstat(fd).st_size == 0
    assert os.fstat(fd).st_blocks == 0
    assert free_bytes(small.device) == before
    linux.fallocate(fd, 0, 0, MEMORY)
    assert os.fstat(fd).st_blocks * 512 == MEMORY
    assert free_bytes(small.device) == 0
    os.close(fd)


def test_copies_to_a_full_device_fail_and_keep_the_beginning(small: GpufsMount) -> None:
    (small.device / "source").write_bytes(noise(40 * MIB, 7))
    done = run("cp", small.device / "source", small.device / "copy", check=False)
    assert done.returncode == 1
    assert "No space left on device" in done.stderr
    copied = (small.device / "copy").stat().st_size
    assert copied <= MEMORY - 40 * MIB
    assert_same(read_all(small.device / "copy"), noise(40 * MIB, 7)[:copied])
    (small.device / "copy").unlink()
    run("cp", small.device / "source", small.path / "gpu1" / "copy")  # there is room on the other device
    assert_same(read_all(small.path / "gpu1" / "copy"), noise(40 * MIB, 7))
    source = os.open(small.device / "source", os.O_RDONLY)
    target = os.open(small.device / "target", os.O_WRONLY | os.O_CREAT)
    total, code = 0, 0
    while not code:
        try:
            total += os.copy_file_range(source, target, 40 * MIB - total, total, total)
        except OSError as error:
            code = error.errno or -1
    assert code == ENOSPC
    assert os.fstat(target).st_size == total
    assert_same(read_all(small.device / "target"), noise(40 * MIB, 7)[:total])
    os.close(source)
    os.close(target)
    with open(small.device / "sparse", "wb") as file:
        file.truncate(32 * MIB)
        os.pwrite(file.fileno(), b"data", 20 * MIB)
    os.unlink(small.path / "gpu1" / "copy")
    run("cp", small.device / "sparse", small.path / "gpu1" / "copy")  # holes stay holes
    assert_same(read_all(small.path / "gpu1" / "copy"), read_all(small.device / "sparse"))
    assert (small.path / "gpu1" / "copy").stat().st_blocks * 512 <= 2 * GRANULE


def test_small_files_fill_a_device_and_free_it(small: GpufsMount) -> None:
    before = free_bytes(small.device)
    count, code = 0, 0
    while not code:
        code = errno_of((small.device / f"file{count}").write_bytes, noise(30 * KIB, count))
        count += not code
    assert code == ENOSPC
    assert count > 500  # thousands of small files must not cost a granule each
    for number in range(0, count, 97):
        assert read_all(small.device / f"file{number}") == noise(30 * KIB, number)
    for name in os.listdir(small.device):
        os.unlink(small.device / name)
    wait_until(lambda: free_bytes(small.device) == before, 10, "the memory of small files to come back")


def test_new_memory_reads_as_zeros(small: GpufsMount) -> None:
    (small.device / "secret").write_bytes(b"\xaa" * (MEMORY - 2 * GRANULE))
    os.unlink(small.device / "secret")
    fd = os.open(small.device / "file", os.O_RDWR | os.O_CREAT)
    size = MEMORY - 2 * GRANULE
    wait_until(lambda: errno_of(linux.fallocate, fd, 0, 0, size) == 0, 10, "the memory to be free")
    assert_same(os.pread(fd, size, 0), bytes(size))
    os.ftruncate(fd, 0)
    os.ftruncate(fd, size)
    for at in range(100, size, GRANULE):
        os.pwrite(fd, b"x", at)
    content = os.pread(fd, size, 0)
    assert content.strip(b"\0x") == b""
    assert content.count(b"x") == size // GRANULE
    os.close(fd)
    for number in range(300):
        (small.device / f"small{number}").write_bytes(b"\xbb" * 5000)
    for number in range(300):
        os.unlink(small.device / f"small{number}")
    for number in range(60):
        fd = os.open(small.device / f"new{number}", os.O_RDWR | os.O_CREAT)
        os.pwrite(fd, b"x", 20_000)
        assert os.pread(fd, 30_000, 0) == bytes(20_000) + b"x"
        os.close(fd)


# ---- the tree above the devices ----


def test_root_and_control_files_are_read_only(shared_mount: GpufsMount) -> None:
    top = shared_mount.path
    names = sorted(os.listdir(top))
    assert names[:3] == [".gpufs", "README", "gpu0"]
    assert {"version", "status"} <= set(os.listdir(top / ".gpufs"))
    for folder in (top, top / ".gpufs"):
        assert errno_of(os.mkdir, folder / "x") in REFUSED
        assert errno_of(os.open, folder / "x", os.O_CREAT | os.O_WRONLY) in REFUSED
        assert errno_of(os.symlink, "y", folder / "x") in REFUSED
        assert errno_of(os.mkfifo, folder / "x") in REFUSED
        assert errno_of(os.rename, shared_mount.device, folder / "x") != 0
    assert errno_of(os.rmdir, top / "gpu0") != 0
    assert errno_of(os.rmdir, top / ".gpufs") != 0
    for name in ("version", "status"):
        path = top / ".gpufs" / name
        for flags in (os.O_WRONLY, os.O_RDWR, os.O_RDONLY | os.O_TRUNC):
            assert errno_of(os.open, path, flags) in REFUSED
        assert errno_of(os.truncate, path, 0) in REFUSED
        assert errno_of(os.unlink, path) in REFUSED
        assert errno_of(os.rename, path, shared_mount.device / "x") != 0
        assert errno_of(os.link, path, shared_mount.device / "x") != 0
        assert errno_of(os.chmod, path, 0o777) in REFUSED
    assert sorted(os.listdir(top)) == names


@pytest.mark.driver
def test_df_is_consistent_while_files_come_and_go(mount: Mounter) -> None:
    """Used and free memory are never more than there is, and `gpufs df` and statfs agree on what is free."""
    mounted = mount("--keep-freed", "0", memory=4 * MEMORY)

    def device() -> dict[str, int]:
        found: list[dict[str, int]] = json.loads(run(*GPUFS, "df", "--json", mounted.path).stdout)
        assert found[0]["used_bytes"] + found[0]["free_bytes"] <= found[0]["total_bytes"]
        return found[0]

    before = device()
    for number in range(3):
        (mounted.device / "file").write_bytes(noise(48 * MIB, number))
        held = device()["used_bytes"] - before["used_bytes"]
        assert held >= 48 * MIB
        unlinked = os.open(mounted.device / "file", os.O_PATH)
        (mounted.device / "file").unlink()
        found = device()  # memory that has no name any more is taken for as long as somebody has the file
        assert (found["used_bytes"] - before["used_bytes"], found["free_bytes"]) == (
            48 * MIB,
            free_bytes(mounted.device),
        )
        os.close(unlinked)
        wait_until(lambda: device() == before, 60, "the memory of the unlinked file to come back")
    assert free_bytes(mounted.device) == before["free_bytes"]
    mounted.unmount()


@pytest.mark.driver
def test_closing_gives_preallocated_memory_back(mount: Mounter) -> None:
    """A growing file may have preallocated memory until its last writer closes it."""
    mounted = mount(memory=1 << 30)
    before = free_bytes(mounted.device)
    files = [mounted.device / f"file{number}" for number in range(4)]
    for file in files:
        run("dd", "if=/dev/zero", f"of={file}", "bs=1M", "count=66")
    held = sum(os.stat(file).st_blocks * 512 for file in files)
    wait_until(lambda: before - free_bytes(mounted.device) == 4 * 66 * MIB, 60, "preallocated memory to come back")
    wait_until(lambda: sum(os.stat(file).st_blocks * 512 for file in files) == 4 * 66 * MIB, 60, "blocks to follow")
    assert held >= 4 * 66 * MIB
    # Another writer keeps it, and a reader does not.
    with open(files[0], "ab", buffering=0) as first, open(files[0], "ab", buffering=0) as second, open(files[0], "rb"):
        for _ in range(70):
            first.write(noise(MIB))
        second.write(noise(MIB))
        second.close()
        first.write(noise(MIB))
        first.close()
        wait_until(lambda: before - free_bytes(mounted.device) == 336 * MIB, 60, "preallocated memory to come back")
    mounted.unmount()


def test_racing_writers_on_a_full_device_keep_whole_blocks(small: GpufsMount) -> None:
    """Two writers race for the last memory: every block of either file is whole, and sizes match what was written."""

    def write(index: int) -> None:
        size = fill(small.device / f"file{index}", 10 + index)
        (small.path / "gpu1" / f"size{index}").write_text(str(size))

    wait_children(start_children(2, write))
    total = 0
    for index in range(2):
        size = int((small.path / "gpu1" / f"size{index}").read_text())
        total += size
        assert_same(read_all(small.device / f"file{index}"), (noise(MIB, 10 + index) * 65)[:size])
    assert MEMORY - 4 * GRANULE <= total <= MEMORY


MOST_FILES = 300  # a real GPU may have more addresses than these files can take


def use_up_addresses(mount: GpufsMount) -> list[str]:
    """Creates sparse files until the device has no addresses left, or MOST_FILES; returns their names."""
    paths: list[str] = []
    size = 1 << 46
    while size >= 16 * MIB and len(paths) < MOST_FILES:
        path = str(mount.device / f"sparse-{len(paths)}")
        fd = os.open(path, os.O_RDWR | os.O_CREAT)
        paths.append(path)
        code = errno_of(os.pwrite, fd, b"x", size - 1)
        os.close(fd)
        assert code in (0, errno.ENOSPC)
        if code:
            size //= 2
    return paths


def punch(fd: int, offset: int, size: int) -> None:
    fallocate(fd, FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE, offset, size)


@pytest.mark.driver
def test_punching_works_when_addresses_have_run_out(mount: Mounter) -> None:
    """Freeing part of an allocation needs other addresses. Without any, the memory is kept and used again."""
    one = mount(memory=1024 * MIB)
    content = bytearray(noise(64 * MIB))
    file = one.device / "file"
    with open(file, "w+b", buffering=0) as opened:
        fd = opened.fileno()
        os.posix_fallocate(fd, 0, len(content))
        os.pwrite(fd, content, 0)
        sparse = use_up_addresses(one)
        punch(fd, 2 * MIB, 2 * MIB)
        content[2 * MIB : 4 * MIB] = bytes(2 * MIB)
        assert_same(read_all(file), bytes(content))
        for path in sparse:
            os.unlink(path)
        os.pwrite(fd, b"again", 2 * MIB)
        content[2 * MIB : 2 * MIB + 5] = b"again"
        punch(fd, 8 * MIB, 2 * MIB)
        content[8 * MIB : 10 * MIB] = bytes(2 * MIB)
        assert_same(read_all(file), bytes(content))
        os.ftruncate(fd, 30 * MIB + 1)
        os.ftruncate(fd, len(content))
        content[30 * MIB + 1 :] = bytes(len(content) - 30 * MIB - 1)
        assert_same(read_all(file), bytes(content))
    status = one.status()
    assert {device["health"] for device in status["devices"]} == {"good"}
