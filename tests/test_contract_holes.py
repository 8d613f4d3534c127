"""Sparse files: fallocate in every mode, SEEK_DATA and SEEK_HOLE, copy_file_range."""

from __future__ import annotations

import os
from collections.abc import Iterator
from errno import EBADF, EFBIG, EINVAL, EISDIR, EOPNOTSUPP, EXDEV
from pathlib import Path

import pytest
from support import linux
from support.data import GIB, GRANULE, MIB, assert_same, noise, write_all
from support.linux import FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE, FALLOC_ZERO_RANGE
from support.processes import errno_of

pytestmark = pytest.mark.driver


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


@pytest.mark.parametrize("offset", [0, 1, 4096, GRANULE - 1, 3 * GRANULE + 5])
@pytest.mark.parametrize("length", [1, 4096, GRANULE, 5 * MIB + 3])
def test_allocating(fd: int, offset: int, length: int) -> None:
    os.write(fd, b"before")
    linux.fallocate(fd, 0, offset, length)
    assert os.fstat(fd).st_size == max(6, offset + length)
    assert held(fd) >= length
    assert_same(os.pread(fd, 16 * MIB, 0), b"before" + bytes(max(0, offset + length - 6)))


def test_allocating_and_keeping_the_size(fd: int) -> None:
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


@pytest.mark.parametrize("offset", [0, 1, 4095, 65536, GRANULE - 1, GRANULE, GRANULE + 7])
@pytest.mark.parametrize("length", [1, 4096, 12345, GRANULE, 2 * GRANULE, 3 * GRANULE + 1])
def test_punching(fd: int, offset: int, length: int) -> None:
    data = bytearray(noise(5 * GRANULE, 1))
    write_all(fd, data, 0)
    linux.fallocate(fd, FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE, offset, length)
    data[offset : offset + length] = bytes(length)
    assert os.fstat(fd).st_size == len(data)
    assert_same(os.pread(fd, len(data) + 1, 0), bytes(data))
    inner = (offset + length) // GRANULE - -(-offset // GRANULE)
    assert held(fd) <= (5 - max(0, inner)) * GRANULE
    # what is written into the hole afterwards stands alone
    os.pwrite(fd, b"again", offset)
    data[offset : offset + 5] = b"again"
    assert_same(os.pread(fd, len(data) + 1, 0), bytes(data))


@pytest.mark.parametrize("keep", [0, FALLOC_KEEP_SIZE])
@pytest.mark.parametrize(
    ("offset", "length"), [(0, 4096), (5, 1), (4095, 70_000), (GRANULE - 1, GRANULE + 2), (MIB, 9 * MIB)]
)
def test_zeroing(fd: int, on_gpufs: bool, keep: int, offset: int, length: int) -> None:
    data = bytearray(noise(3 * GRANULE, 2))
    write_all(fd, data, 0)
    code = errno_of(linux.fallocate, fd, FALLOC_ZERO_RANGE | keep, offset, length)
    if not on_gpufs and code == EOPNOTSUPP:
        return  # tmpfs has no ZERO_RANGE; device memory is zeroed by the device, so gpufs offers it
    assert code == 0
    end = offset + length
    if not keep and end > len(data):
        data += bytes(end - len(data))
    data[offset : min(end, len(data))] = bytes(min(end, len(data)) - offset)
    assert os.fstat(fd).st_size == len(data)
    assert_same(os.pread(fd, 64 * MIB, 0), bytes(data))


def test_refused_modes(fd: int, root: Path) -> None:
    write_all(fd, noise(4 * GRANULE), 0)
    assert errno_of(linux.fallocate, fd, linux.FALLOC_COLLAPSE_RANGE, 0, GRANULE) == EOPNOTSUPP
    assert errno_of(linux.fallocate, fd, linux.FALLOC_INSERT_RANGE, 0, GRANULE) == EOPNOTSUPP
    assert errno_of(linux.fallocate, fd, FALLOC_PUNCH_HOLE, 0, GRANULE) == EOPNOTSUPP  # needs KEEP_SIZE
    assert errno_of(linux.fallocate, fd, 0x1000, 0, GRANULE) == EOPNOTSUPP
    assert errno_of(linux.fallocate, fd, 0, 0, -1) == EINVAL
    reader = os.open(root / "file", os.O_RDONLY)
    assert errno_of(linux.fallocate, reader, 0, 0, 1) == EBADF
    os.close(reader)
    assert_same(os.pread(fd, 5 * GRANULE, 0), noise(4 * GRANULE))


# ---- SEEK_DATA, SEEK_HOLE ----


def test_seeking_data_and_holes(fd: int) -> None:
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


def test_no_data_is_ever_said_to_be_a_hole(fd: int) -> None:
    data = bytearray(20 * MIB)
    os.ftruncate(fd, len(data))
    for step in range(60):
        at, length = (step * 7_654_321) % (19 * MIB), 1 + (step * 91_283) % 700_000
        if step % 3 == 2:
            linux.fallocate(fd, FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE, at, length)
            data[at : at + length] = bytes(length)
        else:
            os.pwrite(fd, noise(length, step), at)
            data[at : at + length] = noise(length, step)
        covered = 0
        for begin, end in extents(fd):
            assert not any(memoryview(data)[covered:begin].tobytes().strip(b"\0"))
            covered = end
        assert not data[covered:].strip(b"\0")
    assert_same(os.pread(fd, len(data), 0), bytes(data))


# ---- copy_file_range ----


@pytest.fixture
def pair(root: Path) -> Iterator[tuple[int, int]]:
    """Two new files with descriptors for reading and writing; the first has 5 MiB and a bit of noise."""
    source = os.open(root / "source", os.O_RDWR | os.O_CREAT, 0o644)
    target = os.open(root / "target", os.O_RDWR | os.O_CREAT, 0o644)
    write_all(source, noise(5 * MIB + 123, 3), 0)
    yield source, target
    os.close(source)
    os.close(target)


def copy_all(source: int, target: int, count: int, source_at: int, target_at: int) -> int:
    done = 0
    while done < count:
        moved = os.copy_file_range(source, target, count - done, source_at + done, target_at + done)
        if moved == 0:
            break
        done += moved
    return done


@pytest.mark.parametrize("count", [1, 4096, 12345, GRANULE + 1, 5 * MIB + 123])
@pytest.mark.parametrize("source_at", [0, 1, MIB + 7])
@pytest.mark.parametrize("target_at", [0, 3, 2 * GRANULE - 1])
def test_copying_ranges(pair: tuple[int, int], count: int, source_at: int, target_at: int) -> None:
    source, target = pair
    data = noise(5 * MIB + 123, 3)[source_at : source_at + count]
    assert copy_all(source, target, count, source_at, target_at) == len(data)
    assert os.fstat(target).st_size == target_at + len(data)
    assert_same(os.pread(target, 16 * MIB, 0), bytes(target_at) + data)
    assert_same(os.pread(source, 16 * MIB, 0), noise(5 * MIB + 123, 3))


def test_copying_within_one_file(pair: tuple[int, int]) -> None:
    source, _ = pair
    data = bytearray(noise(5 * MIB + 123, 3))
    assert copy_all(source, source, MIB, 0, 3 * MIB) == MIB
    data[3 * MIB : 4 * MIB] = data[:MIB]
    assert copy_all(source, source, GRANULE, 0, GRANULE) == GRANULE  # adjacent is not overlapping
    data[GRANULE : 2 * GRANULE] = data[:GRANULE]
    assert errno_of(os.copy_file_range, source, source, 100, 0, 99) == EINVAL
    assert errno_of(os.copy_file_range, source, source, 100, 99, 0) == EINVAL
    assert errno_of(os.copy_file_range, source, source, 100, 7, 7) == EINVAL
    assert_same(os.pread(source, 16 * MIB, 0), bytes(data))


def test_copying_holes(pair: tuple[int, int]) -> None:
    source, target = pair
    os.ftruncate(source, 0)
    os.ftruncate(source, 10 * MIB)
    os.pwrite(source, b"island", 5 * MIB)
    write_all(target, noise(10 * MIB, 4), 0)
    assert copy_all(source, target, 10 * MIB, 0, 0) == 10 * MIB
    assert_same(os.pread(target, 11 * MIB, 0), bytes(5 * MIB) + b"island" + bytes(5 * MIB - 6))


def test_copying_refusals(pair: tuple[int, int], root: Path, reference: Path, on_gpufs: bool) -> None:
    source, target = pair
    directory = os.open(root, os.O_RDONLY)
    reader = os.open(root / "target", os.O_RDONLY)
    writer = os.open(root / "source", os.O_WRONLY)
    appender = os.open(root / "target", os.O_WRONLY | os.O_APPEND)
    pipe, other = os.pipe()
    assert errno_of(os.copy_file_range, directory, target, 10, 0, 0) == EISDIR
    assert errno_of(os.copy_file_range, source, directory, 10, 0, 0) in (EISDIR, EBADF)
    assert errno_of(os.copy_file_range, source, reader, 10, 0, 0) == EBADF
    assert errno_of(os.copy_file_range, writer, target, 10, 0, 0) == EBADF
    assert errno_of(os.copy_file_range, source, appender, 10, 0, 0) == EBADF
    assert errno_of(os.copy_file_range, pipe, target, 10) == EINVAL
    assert errno_of(linux.copy_file_range_flags, source, target, 10, 1) == EINVAL
    # another file system: the kernel refuses (or copies through the page cache, on some kernels for one type)
    with open(reference / "elsewhere", "w+b") as elsewhere:
        assert errno_of(os.copy_file_range, source, elsewhere.fileno(), 10, 0, 0) in (0, EXDEV)
    assert os.fstat(target).st_size == 0
    if on_gpufs:  # tmpfs has sizes up to the end of the number line, a buffer has not
        assert errno_of(os.copy_file_range, source, target, 10, 0, 2**63 - 5) == EFBIG
        assert errno_of(os.copy_file_range, source, target, 10, 0, 2**46) == EFBIG
        assert os.fstat(target).st_size == 0
    for fd in (directory, reader, writer, appender, pipe, other):
        os.close(fd)
