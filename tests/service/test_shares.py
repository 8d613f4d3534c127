"""What one plain user can take of a mount's device addresses and memory: the others go on working."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support import linux
from support.attaching import Attacker
from support.bystanders import assert_unharmed
from support.copying import socket_path
from support.data import MIB, assert_same, noise
from support.mounting import GpufsMount, Mounter
from support.processes import NOBODY, as_nobody, errno_of, wait_until

from gpufs import modes, protocol

pytestmark = [pytest.mark.skipif(os.geteuid() != 0, reason="acts as several users, which takes root")]
REFUSED = (errno.EDQUOT, errno.ENOSPC)


def write_far_away(folder: Path) -> int:
    """Writes a byte at the end of sparse files, the largest first, until not even short ones find addresses."""
    made = 0
    for exponent in range(46, 20, -1):
        while made < 500:
            path = folder / f"sparse{made}"
            fd = os.open(path, os.O_CREAT | os.O_WRONLY)
            code = errno_of(os.pwrite, fd, b"x", (1 << exponent) - 1)
            os.close(fd)
            if code:
                assert code in REFUSED
                path.unlink()
                break
            made += 1
    return made


@pytest.mark.complains
def test_sparse_files_leave_addresses_to_others(own: Mounter) -> None:
    mounted = own("--user-memory", "256M", memory=1024 * MIB)
    folder = mounted.device / "nobodys"

    def attack(ready: Callable[[], None]) -> None:
        assert write_far_away(folder) > 1
        ready()

    assert_unharmed(mounted, attack)
    assert any("addresses" in line for line in mounted.complaints())
    assert mounted.status()["devices"]

    def again() -> None:
        for path in folder.iterdir():
            path.unlink()
        wait_until(lambda: errno_of(write_far, folder / "again") == 0, 10, "the addresses of removed files")

    def write_far(path: Path) -> None:
        with open(path, "wb", buffering=0) as file:
            os.pwrite(file.fileno(), b"x", (1 << 44) - 1)

    as_nobody(again)


def test_registered_memory_counts_as_memory(mount: Mounter) -> None:
    """Sparse files in memory have addresses, and get memory when they are written."""
    own = mount("--user-memory", "64M", memory=256 * MIB, allow_other=True)
    folder, socket = own.device / "nobodys", socket_path(own.path)
    folder.mkdir()
    os.chown(folder, NOBODY, NOBODY)

    def attack(ready: Callable[[], None]) -> None:
        client = Attacker(socket)
        assert client.greet()
        made = 0
        for exponent in range(46, 11, -1):
            while made < 240:
                shared = os.memfd_create("sparse")
                os.ftruncate(shared, 1 << exponent)
                path = folder / f"live{made}"
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
                message = protocol.Register(made + 1, "file", 0, 1 << exponent)
                answer, _ = client.ask(message, [fd, shared])
                os.close(fd)
                os.close(shared)
                if answer.get("error"):
                    assert answer["error"] in REFUSED, answer
                    path.unlink()
                    break
                made += 1
        assert made
        ready()
        while True:
            for path in folder.iterdir():
                path.read_bytes()

    assert_unharmed(own, attack)


# ---- small files share slabs ----


def fill_with_small_files(folder: Path, size: int) -> int:
    """Makes files of so many bytes until the device or the user's limit is full. How many there are."""
    made = 0
    while True:
        path = folder / f"{size}-{made}"
        fd = os.open(path, os.O_CREAT | os.O_WRONLY)
        code = errno_of(os.pwrite, fd, made.to_bytes(8, "little") * (size // 8), 0)
        os.close(fd)
        if code:
            assert code in REFUSED
            path.unlink()
            return made
        made += 1


def free_bytes(mount: GpufsMount) -> int:
    found = os.statvfs(mount.device)
    return found.f_bavail * found.f_frsize


def test_removing_small_files_frees_memory(own: Mounter) -> None:
    """Every other file is removed: half of the memory is free, for files of any size."""
    mounted = own("--user-memory", "0", memory=16 * MIB)
    folder, size = mounted.device / "nobodys", 4096
    made = fill_with_small_files(folder, size)
    assert made > 3_000
    assert free_bytes(mounted) < 2 * MIB
    for number in range(0, made, 2):
        (folder / f"{size}-{number}").unlink()
    wait_until(lambda: free_bytes(mounted) > 5 * MIB, 10, "half of the memory is free")
    (folder / "large").write_bytes(noise(5 * MIB))
    (folder / "medium").write_bytes(noise(60_000))
    assert_same((folder / "large").read_bytes(), noise(5 * MIB))
    for number in range(1, made, 2):
        found = (folder / f"{size}-{number}").read_bytes()
        assert_same(found, number.to_bytes(8, "little") * (size // 8), f"file {number}")


def test_few_small_files_keep_no_memory_from_others(own: Mounter) -> None:
    """One small file is kept in each slab, for each size of slots: others still get what the quota leaves."""
    mounted = own("--user-memory", "8M", memory=48 * MIB)
    folder = mounted.device / "nobodys"

    def attack(ready: Callable[[], None]) -> None:
        for size in (4096, 8192, 16384, 32768, 65536):
            slab = 2 * MIB // size
            for number in range(fill_with_small_files(folder, size)):
                if number % slab:
                    (folder / f"{size}-{number}").unlink()
        ready()

    assert_unharmed(mounted, attack)
    (mounted.device / "rest").write_bytes(bytes(30 * MIB))


# ---- memory that clients may write to ----


def test_a_client_cannot_keep_more_than_its_file_has(mount: Mounter) -> None:
    """A file attached for writing: memory that its client allocates beside it goes, and growth finds zeros."""
    own = mount(memory=64 * MIB, allow_other=True)
    path = own.device / "file"
    path.write_bytes(noise(2 * MIB))
    with open(path, "r+b", buffering=0) as file, Attacker(socket_path(own.path)) as client:
        assert client.greet()
        answer, (shared,) = client.ask(protocol.Attach(1, modes.READ_WRITE), [file.fileno()])
        assert not answer.get("error")
        linux.fallocate(shared, 0, 0, 40 * MIB)
        os.pwrite(shared, b"hidden", 5 * MIB)
        os.statvfs(own.device)
        assert os.fstat(shared).st_blocks * 512 == 2 * MIB
        os.pwrite(shared, b"hidden", 9 * MIB)
        os.pwrite(file.fileno(), b"end", 8 * MIB)
        os.ftruncate(file.fileno(), 10 * MIB)
        expected = noise(2 * MIB) + bytes(6 * MIB) + b"end" + bytes(2 * MIB - 3)
        assert_same(path.read_bytes(), expected)
        os.close(shared)
    assert_same(path.read_bytes(), expected)


# ---- memory of removed files ----


def test_removed_files_are_free_at_once(mount: Mounter) -> None:
    own = mount(memory=256 * MIB)
    (own.device / "kept").write_bytes(bytes(32 * MIB))
    for _ in range(2):
        (own.device / "large").write_bytes(bytes(192 * MIB))
        assert free_bytes(own) <= 32 * MIB
        (own.device / "large").unlink()
        for _ in range(20):
            assert free_bytes(own) == 224 * MIB
