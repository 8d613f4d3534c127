"""Device memory that cannot be released: nothing is lost, and every device keeps working."""

from __future__ import annotations

import errno
import os

import pytest
from support.data import MIB, assert_same, noise, read_all
from support.linux import FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE, fallocate
from support.mounting import GpufsMount, Mounter
from support.processes import errno_of

pytestmark = pytest.mark.driver

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
