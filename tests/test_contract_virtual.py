"""Read-only attributes that describe a file: user.gpufs.device, .driver, .bytes_held, .address, .last_path, and what
has been moved of it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from errno import EACCES, EFBIG, ENODATA, ENOSPC, EPERM
from pathlib import Path

import pytest
from support.data import MIB, noise
from support.mounting import GPUFS, GpufsMount, Mounter
from support.processes import as_nobody, errno_of, run

COUNTS = ("bytes_read", "bytes_written", "reads", "writes")
NAMES = ("device", "driver", "bytes_held", "address", "last_path", *COUNTS, "last_backend")


@pytest.fixture
def folder(shared_mount: GpufsMount) -> Iterator[Path]:
    path = shared_mount.device / "virtual"
    path.mkdir()
    yield path
    shutil.rmtree(path)


def virtual(path: Path, name: str) -> str:
    return os.getxattr(path, f"user.gpufs.{name}").decode()


@pytest.mark.driver
def test_what_they_say(folder: Path, driver: str, shared_mount: GpufsMount) -> None:
    file = folder / "file"
    file.write_bytes(noise(5 * MIB))
    assert virtual(file, "driver") == driver
    assert virtual(file, "device") == "gpu0"
    assert int(virtual(file, "bytes_held")) == os.stat(file).st_blocks * 512 >= 5 * MIB
    assert virtual(file, "last_path") == "/gpu0/virtual/file"
    assert int(virtual(file, "address"), 16) > 0
    for device in shared_mount.path.glob("gpu*"):
        other = device / "file"
        other.write_bytes(b"x")
        assert virtual(other, "device") == device.name
        other.unlink()


def test_what_has_no_buffer(folder: Path, shared_mount: GpufsMount) -> None:
    assert virtual(folder, "device") == "gpu0"
    assert virtual(folder, "last_path") == "/gpu0/virtual"
    for name in ("address", "bytes_held", *COUNTS, "last_backend", "nonsense", ""):
        assert errno_of(virtual, folder, name) == ENODATA
    assert errno_of(virtual, shared_mount.path / ".gpufs/version", "device") == ENODATA
    (folder / "link").symlink_to("file")
    assert errno_of(os.getxattr, folder / "link", "user.gpufs.device", follow_symlinks=False) in (ENODATA, EPERM)


def test_they_are_read_only_and_not_listed(folder: Path) -> None:
    file = folder / "file"
    file.write_bytes(b"x")
    for name in (*NAMES, "nonsense"):
        for flags in (0, os.XATTR_CREATE, os.XATTR_REPLACE):
            assert errno_of(os.setxattr, file, f"user.gpufs.{name}", b"1", flags) == EPERM
        assert errno_of(os.removexattr, file, f"user.gpufs.{name}") == EPERM
    os.setxattr(file, "user.own", b"1")
    assert os.listxattr(file) == ["user.own"]
    file.chmod(0o640)
    assert as_nobody(lambda: errno_of(os.getxattr, file, "user.gpufs.address")) == EACCES
    assert as_nobody(lambda: errno_of(os.setxattr, file, "user.gpufs.address", b"1")) in (EACCES, EPERM)


def counts(path: Path) -> tuple[int, ...]:
    return tuple(int(virtual(path, name)) for name in COUNTS)


@pytest.mark.driver
def test_what_has_been_moved(folder: Path, tmp_path: Path, cached: bool) -> None:
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


def test_copies_do_not_carry_them(folder: Path) -> None:
    (folder / "file").write_bytes(b"x")
    run("cp", "-a", folder / "file", folder / "copy")
    assert virtual(folder / "copy", "last_path") == "/gpu0/virtual/copy"


def test_the_last_path_is_where_it_was_named_last(folder: Path) -> None:
    file = folder / "file"
    file.write_bytes(b"x")
    os.rename(file, folder / "moved")
    assert virtual(folder / "moved", "last_path") == "/gpu0/virtual/moved"
    with open(folder / "moved", "rb") as opened:
        os.unlink(folder / "moved")
        assert os.getxattr(opened.fileno(), "user.gpufs.last_path") == b"/gpu0/virtual/moved"


@pytest.mark.driver
def test_the_address_stays(folder: Path) -> None:
    """Whatever happens to the file: it grows, shrinks to nothing, is renamed, loses pieces, and grows again."""
    file = folder / "file"
    file.write_bytes(b"small")  # in a slab that it shares
    address = virtual(file, "address")
    assert int(address, 16) % (2 * MIB) == 0
    assert file.read_bytes() == b"small"
    with open(file, "r+b") as opened:
        for size in (100, 3 * MIB, 0, 40 * MIB, 5 * MIB, 64 * MIB):
            opened.truncate(size)
            opened.seek(0)
            opened.write(noise(min(size, 3 * MIB)))
            opened.flush()
            assert virtual(file, "address") == address
    run("fallocate", "--punch-hole", "--offset", "0", "--length", str(2 * MIB), file)
    assert virtual(file, "address") == address
    os.rename(file, folder / "moved")
    assert virtual(folder / "moved", "address") == address
    (folder / "second").write_bytes(b"another")
    assert virtual(folder / "second", "address") != address


def test_the_address_leads_to_the_bytes(mount: Mounter) -> None:
    """On the host driver it is an address of the daemon's."""
    mounted = mount()
    file = mounted.device / "file"
    file.write_bytes(noise(3 * MIB))
    address = int(virtual(file, "address"), 16)
    with open(f"/proc/{mounted.pid}/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        assert memory.read(MIB) == noise(3 * MIB)[:MIB]
    mounted.unmount()


def test_limits_of_a_file_whose_address_is_known(mount: Mounter) -> None:
    """It may grow to its device's size, and not past it; one that is larger already may stay so."""
    mounted = mount(memory=64 * MIB)
    file, sparse = mounted.device / "file", mounted.device / "sparse"
    file.touch()
    address = virtual(file, "address")
    os.truncate(file, 64 * MIB)
    assert errno_of(os.truncate, file, 65 * MIB) == EFBIG
    assert os.stat(file).st_size == 64 * MIB
    assert virtual(file, "address") == address
    sparse.touch()
    os.truncate(sparse, 1 << 30)
    assert virtual(sparse, "address") == virtual(sparse, "address")
    assert errno_of(os.truncate, sparse, 2 << 30) == EFBIG
    file.unlink()
    small = mounted.device / "small"
    small.write_bytes(b"in a slab")
    with open(mounted.device / "rest", "wb") as rest:
        size = 0
        while errno_of(os.posix_fallocate, rest.fileno(), size, 2 * MIB) == 0:
            size += 2 * MIB
    assert errno_of(virtual, small, "address") == ENOSPC
    assert small.read_bytes() == b"in a slab"
    mounted.unmount()
