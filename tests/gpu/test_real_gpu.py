"""Tests on real GPUs: memory allocated and freed, as other programs see it, and several devices."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import pytest
from support.mounting import GpufsMount, Mounter
from support.processes import wait_until

from gpufs import statistics
from gpufs.engine import Buffer, Engine, HostLock

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_cuda"), pytest.mark.alone, pytest.mark.timeout(120)]

MIB = 1 << 20
GIB = 1 << 30


@pytest.fixture
def gpu(mount: Mounter) -> GpufsMount:
    return mount()


def run(*words: str | Path) -> str:
    return subprocess.run([str(word) for word in words], check=True, capture_output=True, text=True, timeout=100).stdout


def test_memory_goes_back_to_other_programs(gpu: GpufsMount) -> None:
    """What a deleted file, a shorter one and a hole held can be allocated by another process soon."""

    def goes_below(bytes_held: int) -> None:
        wait_until(lambda: before - engine.devices[0].memory().free_bytes < bytes_held, 10, "the memory to come back")

    with Engine("cuda") as engine:
        before = engine.devices[0].memory().free_bytes
        file = gpu.device / "large"
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT)
        try:
            os.posix_fallocate(descriptor, 0, 3 * GIB)
            assert before - engine.devices[0].memory().free_bytes >= 3 * GIB
            os.ftruncate(descriptor, GIB)
            goes_below(GIB + 256 * MIB)
            os.pwrite(descriptor, b"kept", 256 * MIB - 4)
            os.pwrite(descriptor, b"kept", 768 * MIB)
            run("fallocate", "-p", "-o", str(256 * MIB), "-l", str(512 * MIB), file)
            goes_below(512 * MIB + 256 * MIB)
            assert os.pread(descriptor, 4, 256 * MIB - 4) == b"kept"
            assert os.pread(descriptor, 4, 768 * MIB) == b"kept"
            assert os.pread(descriptor, 4096, 512 * MIB) == bytes(4096)
        finally:
            os.close(descriptor)
            file.unlink()
        goes_below(256 * MIB)


def test_a_full_device_is_enospc_and_goes_on(gpu: GpufsMount) -> None:
    """ENOSPC beyond the device's memory; existing data stays, and the device still works."""
    free = os.statvfs(gpu.device).f_bavail * os.statvfs(gpu.device).f_frsize
    keep = gpu.device / "keep"
    keep.write_bytes(b"still here" * 1000)
    large = gpu.device / "large"
    descriptor = os.open(large, os.O_RDWR | os.O_CREAT)
    try:
        with pytest.raises(OSError) as caught:
            os.posix_fallocate(descriptor, 0, free + GIB)
        assert caught.value.errno == errno.ENOSPC
        os.posix_fallocate(descriptor, 0, free // 2)
        with pytest.raises(OSError) as caught:
            os.posix_fallocate(descriptor, free // 2, free)
        assert caught.value.errno == errno.ENOSPC
    finally:
        os.close(descriptor)
    large.unlink()
    assert keep.read_bytes() == b"still here" * 1000
    (gpu.device / "next").write_bytes(bytes(64 * MIB))


def moved(engine: Engine, backend: str) -> tuple[int, int]:
    found = statistics.parse(engine.statistics_read())["devices"][0]["backends"][backend]
    return found["in"]["bytes"], found["out"]["bytes"]


def test_locked_memory_goes_straight() -> None:
    """A gibibyte of numpy, whole and in parts, without bounce buffers."""
    numpy = pytest.importorskip("numpy")
    with Engine("cuda", lock_policy="off") as engine, Buffer(engine) as buffer:
        data = numpy.random.default_rng(7).integers(0, 256, GIB, dtype=numpy.uint8)
        back = numpy.zeros_like(data)
        with HostLock(engine, data), HostLock(engine, back):
            assert buffer.write(0, data) == GIB
            assert buffer.read(0, back) == GIB
            assert moved(engine, "locked") == (GIB, GIB)
            assert moved(engine, "pageable") == (0, 0)
            assert statistics.parse(engine.statistics_read())["gauges"]["bounce_pinned_bytes"] == 0
        assert (data == back).all()
        # Only a part of it is locked: a copy across the border would be refused.
        with HostLock(engine, data[100 * MIB + 5 : 300 * MIB + 7]):
            back[:] = 0
            buffer.write(0, data)
            buffer.read(0, back)
            assert (data == back).all()
            buffer.read(0, data)
        assert (data == back).all()
        assert moved(engine, "locked")[0] == GIB + 200 * MIB + 2
