"""Attributes: sizes and blocks, the three times with nanoseconds, extended attributes, statfs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from errno import E2BIG
from pathlib import Path
from typing import Any

import pytest
from support import linux
from support.data import GRANULE, MIB, noise
from support.processes import errno_of, shell, wait_until

TIMES = ("atime", "mtime", "ctime")


@pytest.fixture
def file(root: Path) -> Path:
    path = root / "file"
    path.write_bytes(b"0123456789")
    return path


def times(path: Path) -> dict[str, int]:
    found = os.lstat(path)
    return {name: getattr(found, f"st_{name}_ns") for name in TIMES}


def changed(path: Path, action: Callable[[], Any]) -> set[str]:
    """Which of the three times the action changes; each change must be to the present."""
    before = times(path)
    time.sleep(0.012)  # the kernel's coarse clock ticks every 4 to 10 ms
    begin = time.time_ns()
    action()
    after = times(path)
    moved = {name for name in TIMES if before[name] != after[name]}
    for name in moved:
        assert begin - 15_000_000 <= after[name] <= time.time_ns() + 15_000_000, name
    return moved


# ---- times ----


def test_each_call_changes_the_right_times_of_a_file(file: Path) -> None:
    fd = os.open(file, os.O_RDWR)
    data = {"mtime", "ctime"}
    assert changed(file, lambda: os.pwrite(fd, b"x", 0)) == data
    assert changed(file, lambda: os.ftruncate(fd, 5)) == data
    assert changed(file, lambda: os.truncate(file, 100)) == data
    assert changed(file, lambda: os.truncate(file, 100)) == data  # the size stays
    assert changed(file, lambda: linux.fallocate(fd, 3, 0, 50)) == data
    assert changed(file, lambda: os.pwrite(fd, b"", 0)) == set()
    assert changed(file, lambda: os.chmod(file, 0o600)) == {"ctime"}
    assert changed(file, lambda: os.chown(file, 0, 0)) == {"ctime"}
    assert changed(file, lambda: os.chown(file, -1, -1)) == {"ctime"}
    assert changed(file, lambda: os.link(file, file.with_name("two"))) == {"ctime"}
    assert changed(file, lambda: os.unlink(file.with_name("two"))) == {"ctime"}
    assert changed(file, lambda: os.setxattr(file, "user.x", b"y")) == {"ctime"}
    assert changed(file, lambda: os.stat(file)) == set()
    assert changed(file, lambda: os.close(os.open(file, os.O_RDONLY))) == set()
    assert changed(file, lambda: os.close(os.open(file, os.O_WRONLY | os.O_TRUNC))) == data
    os.close(fd)


def test_each_call_changes_the_right_times_of_a_directory(root: Path) -> None:
    inner = root / "dir"
    inner.mkdir()
    entries = {"mtime", "ctime"}
    assert changed(inner, (inner / "file").touch) == entries
    assert changed(inner, (inner / "sub").mkdir) == entries
    assert changed(inner, lambda: os.symlink("x", inner / "link")) == entries
    assert changed(inner, lambda: os.link(inner / "file", inner / "hard")) == entries
    assert changed(inner, lambda: os.rename(inner / "hard", inner / "moved")) == entries
    assert changed(inner, (inner / "moved").unlink) == entries
    assert changed(inner, (inner / "sub").rmdir) == entries
    assert changed(inner, lambda: (inner / "file").write_text("x")) == set()
    assert changed(inner, lambda: os.chmod(inner, 0o700)) == {"ctime"}
    quiet = os.open(inner, os.O_RDONLY | os.O_NOATIME)
    assert changed(inner, lambda: os.listdir(quiet)) == set()
    os.close(quiet)
    assert changed(inner, lambda: os.listdir(inner)) == {"atime"}


# ---- sizes ----


@pytest.mark.driver
def test_blocks_count_allocated_memory(root: Path) -> None:
    """A GPU's file may have preallocated memory while it is open for writing; it is released after the last close."""
    path = root / "file"

    def held() -> int:
        return path.stat().st_blocks * 512

    with open(path, "wb", buffering=0) as file:
        assert held() == 0
        file.write(noise(4 * MIB))
        assert held() >= 4 * MIB
    wait_until(lambda: held() == 4 * MIB, 10, "preallocated memory to be released")
    os.truncate(path, 400 * MIB)
    assert held() == 4 * MIB
    with open(path, "r+b", buffering=0) as file:
        os.pwrite(file.fileno(), b"x", 300 * MIB)
    wait_until(lambda: 4 * MIB < held() <= 4 * MIB + GRANULE, 10, "one granule more")
    with open(path, "r+b", buffering=0) as file:
        linux.fallocate(file.fileno(), 3, 0, 2 * MIB)
    wait_until(lambda: held() <= 2 * MIB + GRANULE, 10, "the hole to be released")
    assert 4096 <= path.stat().st_blksize <= MIB
    assert int(shell(f"du -k {root}/file | cut -f1").stdout) * 1024 == held()
    assert int(shell(f"du -k --apparent-size {root}/file | cut -f1").stdout) * 1024 == 400 * MIB
    os.truncate(path, 200 * MIB)
    assert held() == 2 * MIB


def test_an_attribute_has_64_kibibytes_at_most(file: Path, on_gpufs: bool) -> None:
    size = 65536 if on_gpufs else 4096
    os.setxattr(file, "user.big", bytes(size))
    assert os.getxattr(file, "user.big") == bytes(size)
    assert errno_of(os.setxattr, file, "user.big", bytes(65537)) == E2BIG
