"""Sparse files: fallocate in every mode, SEEK_DATA and SEEK_HOLE."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import linux
from support.data import GIB, GRANULE, MIB, assert_same
from support.linux import FALLOC_KEEP_SIZE
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


def test_allocated_memory_is_data_on_a_device(fd: int, on_gpufs: bool) -> None:
    """A device does not track which of its memory was written."""
    linux.fallocate(fd, 0, 0, 4096)
    assert extents(fd) == ([(0, 4096)] if on_gpufs else [])
