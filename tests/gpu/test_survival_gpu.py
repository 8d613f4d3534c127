"""Memory of a real GPU survives the daemon, beside what tests/survival/test_survival.py shows on every driver."""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Self

import pytest
from support.cli import gpufs
from support.data import GIB, MIB, sha256
from support.processes import PATIENCE, wait_until
from support.surviving import Survivor, mounted

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


PART = 8 * GIB  # of each of five files on each GPU

# Computes with the tensors of all files again and again; prints a checksum of all results of each pass.
COMPUTE = """
import sys, torch, gpufs
arrays = [gpufs.attach(path, mode="r+") for path in sys.argv[1:]]
tensors = [torch.from_dlpack(array).view(torch.int64) for array in arrays]
print("ready", flush=True)
for line in sys.stdin:
    sums = []
    for tensor in tensors:
        folded = tensor.view(-1, 1 << 20).sum(dim=0)
        sums.append(int((folded * torch.arange(1 << 20, device=tensor.device)).sum().item()))
    print(sums, flush=True)
"""


class _Reader(threading.Thread):
    """Reads a file a MiB at a time and remembers the longest read."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path, self.longest, self.ended = path, 0.0, threading.Event()

    def run(self) -> None:
        with open(self.path, "rb", buffering=0) as file:
            while not self.ended.is_set():
                began = time.monotonic()
                if not file.read(MIB):
                    file.seek(0)
                self.longest = max(self.longest, time.monotonic() - began)


class _Bus(threading.Thread):
    """Estimates the bytes that cross PCIe, in both directions of the first GPU, from NVML's samples of 20 ms.

    https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html, nvmlDeviceGetPcieThroughput (KB a second).
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self._ended = 0.0, threading.Event()
        self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        self._gpu = ctypes.c_void_p()
        assert self._nvml.nvmlInit_v2() == 0
        assert self._nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(self._gpu)) == 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()

    def run(self) -> None:
        latest = time.monotonic()
        while not self._ended.is_set():
            rate = 0
            for counter in (0, 1):  # sent, received
                value = ctypes.c_uint()
                assert self._nvml.nvmlDeviceGetPcieThroughput(self._gpu, counter, ctypes.byref(value)) == 0
                rate += value.value * 1000
            now = time.monotonic()
            self.bytes += rate * (now - latest)
            latest = now


def _taken() -> dict[str, int]:
    """MiB of each GPU as nvidia-smi shows them."""
    words = ["nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader,nounits"]
    lines = subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()
    return {index: int(used) for index, used in (line.split(", ") for line in lines)}


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_forty_gibibytes_survive_ten_deaths(driver: str, tmp_path: Path) -> None:
    """A program computes with 40 GiB of each GPU while the daemon is killed: equal results, and nothing is copied."""
    pytest.importorskip("torch")
    with (
        mounted(tmp_path / "mount", "--memory", "60G", driver=driver) as mount,
        tempfile.NamedTemporaryFile(dir="/dev/shm") as source,
    ):
        devices = sorted(mount.path.glob("gpu[0-9]*"))
        for _ in range(PART // (64 * MIB)):
            source.write(os.urandom(64 * MIB))
        source.flush()
        files = [device / f"part{number}" for device in devices for number in range(5)]
        for number in range(5):
            gpufs("cp", source.name, *[f"--target-directory={device}" for device in devices])
            for device in devices:
                (device / Path(source.name).name).rename(device / f"part{number}")
        with subprocess.Popen(
            [sys.executable, "-c", COMPUTE, *map(str, files)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as program:
            try:
                pauses = _kill_under(program, mount, files[0])
            finally:
                program.kill()
        for file in files:
            assert subprocess.run(["cmp", source.name, file], check=False).returncode == 0
    print(f"pauses {min(pauses):.3f} to {max(pauses):.3f} s, median {sorted(pauses)[5]:.3f}")
    assert max(pauses) < PATIENCE


def _kill_under(program: subprocess.Popen[str], mount: Survivor, file: Path) -> list[float]:
    """Kills the daemon ten times while the program computes and somebody reads; the longest read of each time."""
    assert program.stdin is not None
    assert program.stdout is not None
    stdin, stdout = program.stdin, program.stdout
    assert stdout.readline() == "ready\n"

    def begin() -> None:
        stdin.write("go\n")
        stdin.flush()

    begin()
    expected = json.loads(stdout.readline())
    before = _taken()
    pauses = []
    for _ in range(10):
        reader = _Reader(file)
        reader.start()
        try:
            begin()
            mount.kill()
            assert json.loads(stdout.readline()) == expected
        finally:
            reader.ended.set()
            reader.join()
        pauses.append(reader.longest)
        begin()
        assert json.loads(stdout.readline()) == expected
    with _Bus() as death:
        begin()
        mount.kill()
        assert json.loads(stdout.readline()) == expected
    with _Bus() as load, open(file, "rb", buffering=0) as content:
        while content.read(MIB):
            pass
    print(
        f"over PCIe: {death.bytes / MIB:.0f} MiB at a death, {load.bytes / MIB:.0f} MiB at a read of {PART / MIB:.0f}"
    )
    assert death.bytes < PART / 8 < load.bytes
    after = _taken()
    print(f"nvidia-smi: {before} MiB before, {after} after")
    assert all(abs(after[gpu] - before[gpu]) <= 64 for gpu in before)
    return pauses


def _await_another(mount: Path, former: int) -> None:
    wait_until(lambda: library.status(mount).pid not in (None, former), PATIENCE, "another daemon")
