"""What one plain user can take of a mount's device addresses and memory: the others go on working."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support import fake_gpu
from support.attaching import Attacker
from support.bystanders import assert_unharmed
from support.copying import socket_path
from support.data import MIB
from support.mounting import GpufsMount, Mounter
from support.processes import NOBODY, as_nobody, errno_of, wait_until

from gpufs import protocol

pytestmark = [pytest.mark.skipif(os.geteuid() != 0, reason="acts as several users, which takes root")]
REFUSED = (errno.EDQUOT, errno.ENOSPC)


@pytest.fixture(params=["host", "cuda"])
def own(request: pytest.FixtureRequest, mount: Mounter, tmp_path: Path) -> GpufsMount:
    """A mount with a directory for nobody, over host memory and over a fake of CUDA."""
    environment = fake_gpu.environment(tmp_path) if request.param == "cuda" else {}
    made = mount(
        "--user-memory",
        "256M",
        driver=request.param,
        memory=1024 * MIB,
        allow_other=True,
        environment=environment,
    )
    folder = made.device / "nobodys"
    folder.mkdir()
    os.chown(folder, NOBODY, NOBODY)
    return made


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
def test_sparse_files_leave_addresses_to_others(own: GpufsMount) -> None:
    folder = own.device / "nobodys"

    def attack(ready: Callable[[], None]) -> None:
        assert write_far_away(folder) > 1
        ready()

    assert_unharmed(own, attack)
    assert any("addresses" in line for line in own.complaints())
    assert own.status()["devices"]

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
