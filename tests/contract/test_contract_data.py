"""Reading and writing files: every way a program has to move bytes, offsets at the edges, open flags, and holes."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from errno import (
    EACCES,
    EFBIG,
    EINTR,
    EINVAL,
    ENOENT,
    EOPNOTSUPP,
)
from functools import partial
from pathlib import Path

import pytest
from support import linux
from support.data import GIB, GRANULE, MIB, assert_same, noise, read_all, write_all
from support.linux import FALLOC_COLLAPSE_RANGE, FALLOC_INSERT_RANGE, FALLOC_KEEP_SIZE, kernel_version
from support.processes import PATIENCE, as_nobody, errno_of, start_children, wait_children


@pytest.fixture
def file(root: Path) -> Path:
    return root / "file"


def open_new(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)


def test_other_allocation_modes_are_refused(file: Path) -> None:
    file.write_bytes(noise(MIB))
    with open(file, "r+b") as opened:
        for mode in (FALLOC_COLLAPSE_RANGE, FALLOC_INSERT_RANGE):
            assert errno_of(linux.fallocate, opened.fileno(), mode, 0, 4096) == EOPNOTSUPP
    assert file.read_bytes() == noise(MIB)


# ---- open flags ----


@pytest.mark.driver
def test_appending_processes_do_not_overwrite_each_other(file: Path) -> None:
    file.touch()
    records, writers = 150, 4

    def append(index: int) -> None:
        fd = os.open(file, os.O_WRONLY | os.O_APPEND)
        for number in range(records):
            body = bytes([65 + index]) * (1 + (number * 977 + index * 131) % 9000)
            line = b"%d %d %d " % (index, number, len(body)) + body + b"\n"
            assert os.write(fd, line) == len(line)
        os.close(fd)

    wait_children(start_children(writers, append))
    seen: dict[int, int] = dict.fromkeys(range(writers), 0)
    for line in file.read_bytes().splitlines():
        index, number, length, body = line.split(b" ")
        assert int(number) == seen[int(index)]
        assert body == bytes([65 + int(index)]) * int(length)
        seen[int(index)] += 1
    assert set(seen.values()) == {records}


@pytest.mark.driver
def test_writes_that_overlap_do_not_mix(file: Path) -> None:
    """Two threads write the same range at the same moment: afterwards it has what one of them wrote."""
    size, rounds, mixed = 512 << 10, 1_000, 0
    file.write_bytes(bytes(size))
    ready, done = threading.Barrier(3), threading.Barrier(3)

    def write(data: bytes) -> None:
        with open(file, "r+b", buffering=0) as opened:
            for _ in range(rounds):
                ready.wait(PATIENCE)
                os.pwrite(opened.fileno(), data, 0)
                done.wait(PATIENCE)

    with ThreadPoolExecutor() as pool:
        writers = [pool.submit(write, letter * size) for letter in (b"A", b"B")]
        for _ in range(rounds):
            ready.wait(PATIENCE)
            done.wait(PATIENCE)
            mixed += len(set(file.read_bytes())) != 1
        for writer in writers:
            writer.result()
    assert not mixed


def test_a_truncating_open_that_fails_keeps_the_contents(file: Path) -> None:
    """The caller may not write, or a signal interrupts the call at any point."""
    content = noise(8 * MIB)
    file.write_bytes(content)
    file.chmod(0o444)
    if os.geteuid() == 0:
        for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR):
            assert as_nobody(partial(errno_of, os.open, file, flags | os.O_TRUNC)) == EACCES
    assert_same(read_all(file), content)
    file.chmod(0o644)
    libc = ctypes.CDLL(None, use_errno=True)
    handler = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.siginterrupt(signal.SIGALRM, True)
    try:
        for number in range(24):
            file.write_bytes(content)
            signal.setitimer(signal.ITIMER_REAL, 0.0001 + 0.0002 * number, 0.001)
            fd = libc.open(os.fsencode(file), os.O_WRONLY | os.O_TRUNC)
            code = ctypes.get_errno()
            signal.setitimer(signal.ITIMER_REAL, 0)
            if fd >= 0:
                os.close(fd)
                assert file.stat().st_size == 0
            else:
                assert code == EINTR
                assert_same(read_all(file), content)
    finally:
        signal.signal(signal.SIGALRM, handler)


def test_unnamed_files_can_be_named_later(root: Path, on_gpufs: bool) -> None:
    code = errno_of(lambda: os.close(os.open(root, os.O_TMPFILE | os.O_RDWR, 0o600)))
    if on_gpufs and code == EOPNOTSUPP and kernel_version() < (6, 2):
        return  # before, FUSE had no request for it
    assert code == 0
    fd = os.open(root, os.O_TMPFILE | os.O_RDWR, 0o640)
    data = noise(3 * MIB + 5)
    write_all(fd, data, 0)
    found = os.fstat(fd)
    assert (found.st_nlink, found.st_size, found.st_mode & 0o7777) == (0, len(data), 0o640)
    assert os.listdir(root) == []
    linux.link_descriptor(fd, root / "named")
    assert os.fstat(fd).st_nlink == 1
    assert_same(read_all(root / "named"), data)
    linux.link_descriptor(fd, root / "again")
    assert os.fstat(fd).st_nlink == 2
    os.unlink(root / "named")
    os.unlink(root / "again")
    assert errno_of(linux.link_descriptor, fd, root / "late") == ENOENT  # a name that was removed does not come back
    assert_same(os.pread(fd, len(data), 0), data)
    os.close(fd)
    fd = os.open(root, os.O_TMPFILE | os.O_RDWR | os.O_EXCL, 0o600)
    assert errno_of(linux.link_descriptor, fd, root / "named") == ENOENT
    os.close(fd)


# ---- large files and the end of the number line ----


@pytest.mark.driver
def test_sparse_files_may_be_larger_than_four_gibibytes(file: Path) -> None:
    fd = open_new(file)
    places = [0, 2 * GIB - 3, 4 * GIB - 3, 4 * GIB + 5 * MIB, 9 * GIB + 1]
    for index, place in enumerate(places):
        os.pwrite(fd, noise(10_000, index), place)
    for index, place in enumerate(places):
        assert_same(os.pread(fd, 10_000, place), noise(10_000, index), f"at {place}")
    assert os.fstat(fd).st_size == 9 * GIB + 1 + 10_000
    assert os.fstat(fd).st_blocks * 512 <= 10 * 2 * GRANULE
    assert os.pread(fd, 100, 3 * GIB) == bytes(100)
    assert os.lseek(fd, 5 * GIB, os.SEEK_DATA) > 8 * GIB
    os.ftruncate(fd, 4 * GIB + 1)
    assert_same(os.pread(fd, 10_000, 4 * GIB - 3), noise(10_000, 2)[:4])
    os.close(fd)


@pytest.mark.driver
def test_the_largest_file_has_64_tebibytes(file: Path, on_gpufs: bool) -> None:
    fd = open_new(file)
    os.write(fd, b"abc")
    last = 2**63 - 1
    assert errno_of(os.pwrite, fd, b"xx", last) in (EFBIG, EINVAL)
    assert errno_of(os.pwrite, fd, b"x", last - 1) in (EFBIG, EINVAL) or not on_gpufs
    assert errno_of(linux.fallocate, fd, 0, last - 1, 2) == EFBIG
    assert errno_of(linux.fallocate, fd, 0, 0, 0) == EINVAL
    assert errno_of(linux.fallocate, fd, 0, -1, 1) == EINVAL
    assert errno_of(os.pread, fd, 10, last) in (0, EINVAL)
    if on_gpufs:
        # A buffer has a stated largest size, 64 TiB: a device's address space is smaller than tmpfs's numbers.
        assert errno_of(os.truncate, file, 2**62) == EFBIG
        assert errno_of(os.truncate, file, 2**46 + 1) == EFBIG
        assert errno_of(os.pwrite, fd, b"x", 2**46) == EFBIG
        assert os.pwrite(fd, bytes(100), 2**46 - 10) == 10  # what fits
        assert file.stat().st_size == 2**46
        assert errno_of(linux.fallocate, fd, 0, 2**46, 1) == EFBIG
        for place in (2**46, 2**63 - 5):
            assert errno_of(os.copy_file_range, fd, fd, 3, 0, place) == EFBIG
        os.truncate(file, 2**46)
    else:
        os.truncate(file, 2**62)
    assert os.pread(fd, 10, 2**46 - 4) == bytes(10)[: file.stat().st_size - (2**46 - 4)]
    assert os.pread(fd, 4, 0) == b"abc\0"
    os.close(fd)


# ---- other system calls that move data ----


@pytest.mark.driver
def test_a_mapping_can_be_written_to_its_own_file(file: Path) -> None:
    """The data of the write must be paged in from the very file that is being written."""
    data = noise(4 * MIB, 7)
    file.write_bytes(data)
    fd = os.open(file, os.O_RDWR)
    for flags in (mmap.MAP_PRIVATE, mmap.MAP_SHARED):
        with mmap.mmap(fd, 4 * MIB, flags=flags, prot=mmap.PROT_READ) as area:
            assert os.pwrite(fd, area, 6 * MIB) == 4 * MIB
            assert_same(os.pread(fd, 4 * MIB, 6 * MIB), data)
    with mmap.mmap(fd, 4 * MIB, flags=mmap.MAP_SHARED) as area:
        assert os.preadv(fd, [area], 6 * MIB) == 4 * MIB
        area.flush()
    assert_same(read_all(file), data + bytes(2 * MIB) + data)
    os.close(fd)


@pytest.fixture
def fd(root: Path) -> Iterator[int]:
    """A new file, open for reading and writing."""
    fd = os.open(root / "file", os.O_RDWR | os.O_CREAT, 0o644)
    yield fd
    os.close(fd)


def held(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def extents(fd: int) -> list[tuple[int, int]]:
    """The file's data as (begin, end), by SEEK_DATA and SEEK_HOLE."""
    found, at, size = [], 0, os.fstat(fd).st_size
    while at < size and (begin := linux.find_data(fd, at)) is not None:
        at = os.lseek(fd, begin, os.SEEK_HOLE)
        assert begin < at <= size
        found.append((begin, at))
    return found


@pytest.mark.driver
def test_allocation_can_keep_the_size(fd: int) -> None:
    os.write(fd, b"before")
    linux.fallocate(fd, FALLOC_KEEP_SIZE, 0, 8 * MIB)
    assert os.fstat(fd).st_size == 6
    assert held(fd) >= 8 * MIB
    assert os.pread(fd, 100, 0) == b"before"
    os.ftruncate(fd, 8 * MIB)
    assert_same(os.pread(fd, 9 * MIB, 0), b"before" + bytes(8 * MIB - 6))
    linux.fallocate(fd, FALLOC_KEEP_SIZE, 0, 20 * MIB)
    os.ftruncate(fd, 6)  # a truncate frees what was allocated beyond
    assert held(fd) <= GRANULE


# ---- SEEK_DATA, SEEK_HOLE ----


@pytest.mark.driver
def test_seeking_finds_data_and_holes(fd: int) -> None:
    os.ftruncate(fd, 64 * MIB)
    assert extents(fd) == []
    for at in (10 * MIB + 3, 30 * MIB, 64 * MIB - 1):
        os.pwrite(fd, b"x", at)
    found = extents(fd)
    assert len(found) == 3
    for (begin, end), at in zip(found, (10 * MIB + 3, 30 * MIB, 64 * MIB - 1), strict=True):
        assert begin <= at < end
        assert end - begin <= GRANULE  # memory is taken in granules, so a granule with one byte is all data
    assert found[-1][1] == 64 * MIB  # there is always a hole at the end
    assert os.lseek(fd, 0, os.SEEK_HOLE) == 0
    assert os.lseek(fd, found[0][0], os.SEEK_HOLE) == found[0][1]
    for whence in (os.SEEK_DATA, os.SEEK_HOLE):
        assert errno_of(os.lseek, fd, 64 * MIB, whence) == 6
        assert errno_of(os.lseek, fd, GIB, whence) == 6
        assert errno_of(os.lseek, fd, -1, whence) == 6
    os.ftruncate(fd, 30 * MIB)
    assert len(extents(fd)) == 1
    os.ftruncate(fd, 0)
    assert errno_of(os.lseek, fd, 0, os.SEEK_DATA) == 6


@pytest.mark.driver
def test_allocated_memory_is_data_on_a_device(fd: int, on_gpufs: bool) -> None:
    """A device does not track which of its memory was written."""
    linux.fallocate(fd, 0, 0, 4096)
    assert extents(fd) == ([(0, 4096)] if on_gpufs else [])
