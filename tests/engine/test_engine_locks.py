"""Locked host memory from Python: arrays and policies, and over fake GPUs that record calls."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
from support import fake_gpu
from support.data import MIB, assert_same, noise
from support.mounting import GPUFS, Mounter
from support.processes import run

from gpufs import engine, statistics


def gauges(opened: engine.Engine) -> tuple[int, int]:
    found = statistics.parse(opened.statistics_read())["gauges"]
    return found["locked_bytes"], found["locked_ranges"]


def moved(opened: engine.Engine, backend: str, flow: str) -> int:
    return int(statistics.parse(opened.statistics_read())["devices"][0]["backends"][backend][flow]["bytes"])


def is_locked(lock: engine.HostLock) -> bool:
    return lock.locked


@contextlib.contextmanager
def failure(error: int) -> Iterator[pytest.ExceptionInfo[engine.EngineError]]:
    with pytest.raises(engine.EngineError) as raised:
        yield raised
    assert raised.value.errno == error, raised.value


def test_an_array_is_locked_while_the_lock_lives(host: engine.Engine) -> None:
    array = numpy.arange(MIB, dtype=numpy.uint8)
    with engine.HostLock(host, array) as lock:
        assert (lock.address, lock.size) == (array.ctypes.data, MIB)
        assert lock.locked
        assert not lock.foreign
        assert not lock.read_only
        assert gauges(host) == (MIB, 1)
        inside = engine.HostLock(host, array[100:200])
        assert gauges(host) == (MIB, 1)
    assert is_locked(lock) is False
    assert gauges(host) == (MIB, 1)  # for the one inside
    del inside
    gc.collect()
    assert gauges(host) == (0, 0)
    lock.close()
    with failure(errno.ENOENT) as raised:
        lock.unlock()
    assert f"{lock.address:#x}" in str(raised.value)


def test_memory_lives_as_long_as_its_lock(host: engine.Engine) -> None:
    data = bytearray(b"x" * 5000)
    lock = engine.HostLock(host, data)
    with pytest.raises(BufferError):
        data.extend(b"more")
    lock.unlock()
    data.extend(b"more")


def test_overlaps_are_errors_that_name_both(host: engine.Engine) -> None:
    array = numpy.zeros(10000, dtype=numpy.uint8)
    with engine.HostLock(host, array[2000:6000]) as lock:
        for part in (array[1000:3000], array[5000:8000], array):
            with failure(errno.EEXIST) as raised:
                engine.HostLock(host, part)
            for address in (lock.address, part.ctypes.data):
                assert f"{address:#x}-" in str(raised.value)
        engine.HostLock(host, array[6000:]).unlock()
    assert gauges(host) == (0, 0)


def test_mandatory_locking_is_for_the_time_of_a_copy() -> None:
    with (
        engine.Engine("host", devices=1, memory_bytes=64 * MIB, lock_policy="mandatory") as host,
        engine.Buffer(host) as buffer,
    ):
        data = bytearray(noise(3 * MIB))
        buffer.write(0, data)
        assert buffer.read_bytes(0, len(data)) == data
        assert moved(host, "locked", "in") == moved(host, "locked", "out") == 3 * MIB
        assert moved(host, "pageable", "in") == moved(host, "pageable", "out") == 0
        assert gauges(host) == (0, 0)
        part = memoryview(data)[MIB:]
        with engine.HostLock(host, part), failure(errno.EEXIST) as raised:
            buffer.write(0, data)
        assert "mandatory" in str(raised.value)
        assert buffer.write(0, b"") == 0


def test_an_engine_that_closes_unlocks() -> None:
    array = numpy.zeros(MIB, dtype=numpy.uint8)
    with engine.Engine("host", devices=1, memory_bytes=64 * MIB) as host:
        lock = engine.HostLock(host, array)
    with failure(errno.EBADF):
        lock.unlock()
    lock.close()
    assert not lock.locked


# ---- a mount's own memory for requests ----


# Every call to pin memory fails as if there were no more.
_NO_PINNING = "hipHostRegister:1:2:1000000"


@pytest.mark.parametrize("policy", ["auto", "off", "mandatory"])
def test_the_memory_of_requests(mount: Mounter, policy: str) -> None:
    own = mount("--lock-policy", policy, driver="hip", environment=fake_gpu.hip(), memory=64 * MIB)
    (own.device / "file").write_bytes(noise(3 * MIB))
    assert_same((own.device / "file").read_bytes(), noise(3 * MIB))
    found = own.stats()["gauges"]
    assert (found["request_pinned_bytes"] > 0) == (policy != "off")
    assert found["locked_bytes"] == found["locked_ranges"] == 0
    own.unmount()


def test_requests_whose_memory_cannot_be_locked(mount: Mounter, tmp_path: Path) -> None:
    plans = fake_gpu.hip(FAKE_HIP_FAULTS=_NO_PINNING)
    own = mount(driver="hip", environment=plans, memory=64 * MIB)
    (own.device / "file").write_bytes(b"works all the same")
    assert (own.device / "file").read_bytes() == b"works all the same"
    assert own.gauge("request_pinned_bytes") == 0
    own.unmount()
    words = (*GPUFS, "mount", tmp_path, "--driver", "hip", "--lock-policy", "mandatory")
    failed = run(*words, env={**os.environ, **plans}, check=False)
    assert failed.returncode == 1
    assert "mandatory" in failed.stderr
    assert "lock less" in failed.stderr
    assert not os.path.ismount(tmp_path)
