"""Read-only attributes that count what has been moved of a file: user.gpufs.bytes_read, .reads and others."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from errno import EACCES, ENODATA, EPERM
from pathlib import Path

import pytest
from support.data import MIB, noise
from support.mounting import GPUFS, GpufsMount
from support.processes import as_nobody, errno_of, run, wait_until

import gpufs

COUNTS = ("bytes_read", "bytes_written", "reads", "writes")
NAMES = (*COUNTS, "last_backend", "leases", "writers", "changes")


@pytest.fixture
def folder(shared_mount: GpufsMount) -> Iterator[Path]:
    path = shared_mount.device / "virtual"
    path.mkdir()
    yield path
    shutil.rmtree(path)


def virtual(path: Path, name: str) -> str:
    return os.getxattr(path, f"user.gpufs.{name}").decode()


def test_only_regular_files_have_counters(folder: Path, shared_mount: GpufsMount) -> None:
    for name in (*NAMES, "nonsense", ""):
        assert errno_of(virtual, folder, name) == ENODATA
        assert errno_of(virtual, shared_mount.path / ".gpufs/version", name) == ENODATA
    (folder / "link").symlink_to("file")
    assert errno_of(os.getxattr, folder / "link", "user.gpufs.reads", follow_symlinks=False) in (ENODATA, EPERM)


def test_the_counters_of_a_file_are_read_only_and_not_listed(folder: Path) -> None:
    file = folder / "file"
    file.write_bytes(b"x")
    for name in (*NAMES, "nonsense"):
        for flags in (0, os.XATTR_CREATE, os.XATTR_REPLACE):
            assert errno_of(os.setxattr, file, f"user.gpufs.{name}", b"1", flags) == EPERM
        assert errno_of(os.removexattr, file, f"user.gpufs.{name}") == EPERM
    os.setxattr(file, "user.own", b"1")
    assert os.listxattr(file) == ["user.own"]
    file.chmod(0o640)
    assert as_nobody(lambda: errno_of(os.getxattr, file, "user.gpufs.reads")) == EACCES
    assert as_nobody(lambda: errno_of(os.setxattr, file, "user.gpufs.reads", b"1")) in (EACCES, EPERM)


def counts(path: Path) -> tuple[int, ...]:
    return tuple(int(virtual(path, name)) for name in COUNTS)


@pytest.mark.driver
def test_a_file_counts_its_reads_and_writes(folder: Path, tmp_path: Path, cached: bool) -> None:
    file = folder / "file"
    file.touch()
    assert counts(file) == (0, 0, 0, 0)
    assert virtual(file, "last_backend") == ""
    fd = os.open(file, os.O_RDWR)
    try:
        for place in range(3):
            os.pwrite(fd, b"x" * 1000, place * 1000)
        assert counts(file) == (0, 3000, 0, 3)
        assert len(os.pread(fd, 4096, 1000)) == 2000
        assert os.pread(fd, 4096, 3000) == b""  # nothing is moved at the end
        assert counts(file) == (3000 if cached else 2000, 3000, 1, 3)  # the cache reads whole pages
        assert virtual(file, "last_backend") == "mount"
    finally:
        os.close(fd)
    # Copies by other paths than the kernel's READ and WRITE count as well.
    other = folder / "other"
    with open(file, "rb") as source, open(other, "wb") as target:
        assert os.copy_file_range(source.fileno(), target.fileno(), 3000) == 3000
    assert counts(file) == (6000 if cached else 5000, 3000, 2, 3)
    assert counts(other) == (0, 3000, 0, 1)
    assert virtual(file, "last_backend") == virtual(other, "last_backend") == "device_copy"
    (tmp_path / "big").write_bytes(noise(9 * MIB))
    run(*GPUFS, "cp", "--fastpath", "off", tmp_path / "big", folder / "big")
    bytes_read, bytes_written, reads, writes = counts(folder / "big")
    assert (bytes_read, bytes_written, reads) == (0, 9 * MIB, 0)
    assert writes >= 2
    assert virtual(folder / "big", "last_backend") == "fallback"


def test_copies_do_not_carry_counters(folder: Path) -> None:
    (folder / "file").write_bytes(b"x")
    assert (folder / "file").read_bytes() == b"x"
    run("cp", "-a", folder / "file", folder / "copy")
    assert counts(folder / "copy")[0] == 0


def test_a_file_counts_its_changes_and_programs(folder: Path) -> None:
    """Whatever changes the contents counts, and nothing else."""
    file = folder / "file"

    def changes() -> int:
        return int(virtual(file, "changes"))

    file.write_bytes(noise(MIB))
    before = changes()
    file.read_bytes()
    file.chmod(0o600)
    os.utime(file, ns=(0, 0))
    file.rename(folder / "other").rename(file)
    with file.open("r+b"), gpufs.attach(file, "r"):
        assert (virtual(file, "leases"), virtual(file, "writers")) == ("1", "0")
    assert changes() == before
    for change in (
        lambda: file.write_bytes(b"x"),
        lambda: os.truncate(file, MIB),
        lambda: run("fallocate", "--punch-hole", "--offset", "0", "--length", "4096", file),
        lambda: run("fallocate", "--length", "4096", file),
        lambda: run(*GPUFS, "cp", GPUFS[0], file),
    ):
        change()
        assert changes() > before
        before = changes()
    with gpufs.attach(file, "r+"):
        assert (virtual(file, "leases"), virtual(file, "writers")) == ("1", "1")
        assert changes() > before
        before = changes()
    wait_until(lambda: changes() > before, 1, "the end of the lease")
    assert (virtual(file, "leases"), virtual(file, "writers")) == ("0", "0")
