"""Memory of a real GPU survives the daemon, beside what tests/test_survival.py shows on every driver."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest
from support.cli import gpufs
from support.data import GIB, MIB, sha256
from support.processes import PATIENCE, wait_until

import gpufs as library

pytestmark = [pytest.mark.gpu, pytest.mark.alone]


def test_files_of_a_gpu_survive(driver: str, tmp_path: Path) -> None:
    """Contents, attached arrays and free memory are right after the daemon was killed twice and restarted."""
    mount = tmp_path / "mount"
    mount.mkdir()
    gpufs("mount", mount, "--driver", driver, "--devices", "1", "--log-file", tmp_path / "log")
    try:
        device = mount / "gpu0"
        data = random.Random(0).randbytes(64 * MIB)
        with open(device / "large", "wb") as file:
            for _ in range(3 * GIB // len(data)):
                file.write(data)
        for number in range(200):
            (device / f"small-{number}").write_bytes(data[: number * 1000])
        with open(device / "large", "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, 3 * GIB)
        expected = sha256(device / "large")
        array = library.attach(device / "large", mode="r+")
        for death in range(3):
            former = library.status(mount).pid
            assert former
            if death < 2:
                os.kill(former, signal.SIGKILL)
            else:
                gpufs("restart", mount)
            _await_another(mount, former)
            assert sha256(device / "large") == expected
            assert (device / "small-150").read_bytes() == data[:150_000]
        with open(device / "large", "r+b") as file:
            file.write(b"seen by the array")
        assert bytes(array[:17].tobytes()) == b"seen by the array"
        array.close()
        for path in device.iterdir():
            path.unlink()
        wait_until(lambda: library.status(mount).devices[0].used_bytes == 0, PATIENCE, "the memory to be free")
    finally:
        gpufs("umount", "--force", mount)
    print((tmp_path / "log").read_text())


def _await_another(mount: Path, former: int) -> None:
    wait_until(lambda: library.status(mount).pid not in (None, former), PATIENCE, "another daemon")
