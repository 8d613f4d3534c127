"""Locked host memory from Python: arrays and policies, and over fake GPUs that record calls."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
from support.data import MIB, assert_same, noise
from support.mounting import GPUFS, Mounter
from support.processes import PATIENCE, run

from gpufs import engine, statistics

REPOSITORY = Path(__file__).parent.parent
FAKES = REPOSITORY / "build/cmake/native/tests"


@pytest.fixture
def host() -> Iterator[engine.Engine]:
    with engine.Engine("host", devices=1, memory_bytes=256 * MIB) as opened:
        yield opened


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


def test_copies_are_counted_by_what_the_memory_is(host: engine.Engine) -> None:
    data = numpy.frombuffer(bytearray(noise(4 * MIB)), dtype=numpy.uint8)
    with engine.Buffer(host) as buffer:
        buffer.write(0, data)
        assert moved(host, "pageable", "in") == 4 * MIB
        with engine.HostLock(host, data[MIB : 2 * MIB]):
            buffer.write(MIB, data)  # a part of it is locked
            target = numpy.zeros(5 * MIB, dtype=numpy.uint8)
            with engine.HostLock(host, target[: 3 * MIB]):
                assert buffer.read(0, target) == 5 * MIB
        assert moved(host, "locked", "in") == MIB
        assert moved(host, "pageable", "in") == 7 * MIB
        assert moved(host, "locked", "out") == 3 * MIB
        assert moved(host, "pageable", "out") == 2 * MIB
        assert_same(target[:MIB].tobytes(), data[:MIB].tobytes())
        assert_same(target[MIB:].tobytes(), data.tobytes())
        # Holes and the end of the file, in parts.
        buffer.resize(9 * MIB)
        target = numpy.ones(8 * MIB, dtype=numpy.uint8)
        with engine.HostLock(host, target[MIB : 6 * MIB]):
            assert buffer.read(4 * MIB, target) == 5 * MIB
        assert_same(target[:MIB].tobytes(), data[3 * MIB :].tobytes())
        assert not target[MIB : 5 * MIB].any()
        assert target[5 * MIB :].all()


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


# ---- over fake GPUs ----

_BEGIN = """
import ctypes, errno, gc, sys
import numpy
from gpufs import engine, statistics

MIB = 1 << 20
driver, library = sys.argv[1], ctypes.CDLL(sys.argv[2])
names = {"cuda": ("cuMemHostRegister_v2", "cuMemHostUnregister"), "hip": ("hipHostRegister", "hipHostUnregister")}

class Control(ctypes.Structure):
    _fields_ = [
        ("reset", ctypes.c_void_p),
        ("fail", ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_int, ctypes.c_int, ctypes.c_int)),
        ("calls", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p)),
    ]

control_of = getattr(library, f"fake_{driver}_control")
control_of.restype = ctypes.POINTER(Control)
control = control_of().contents

def calls():
    wanted = (*names[driver], "copy, pinned", "copy, pageable")
    return tuple(control.calls(name.encode()) for name in wanted)

def fail(place, code, times=1):
    control.fail(names[driver][place].encode(), 1, code, times)

def moved(opened, backend, flow):
    return int(statistics.parse(opened.statistics_read())["devices"][0]["backends"][backend][flow]["bytes"])

def locked(opened):
    return statistics.parse(opened.statistics_read())["gauges"]["locked_bytes"]
"""


def over_fake(tmp_path: Path, driver: str, program: str) -> None:
    """Runs a program, after the lines above, in a process whose GPU library is the fake one."""
    folder = tmp_path
    if driver == "hip":
        library = FAKES / "fake_hip/rocm7/libamdhip64.so.7"
        folder = library.parent
    else:
        built = FAKES / "fake_cuda/libgpufs_fake_cuda.so"
        library = tmp_path / "libcuda.so.1"
        if built.exists():
            library.symlink_to(built)
    if not library.exists():
        pytest.skip("the fake libraries are not built (scripts/build gpufs_tests)")
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder), "PYTHONPATH": str(REPOSITORY)}
    outcome = subprocess.run(
        [sys.executable, "-c", _BEGIN + textwrap.dedent(program), driver, str(library)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert outcome.returncode == 0, outcome.stderr


both = pytest.mark.parametrize("fake", ["cuda", "hip"])


@both
def test_locked_memory_is_copied_without_a_detour(tmp_path: Path, fake: str) -> None:
    over_fake(
        tmp_path,
        fake,
        """
        with engine.Engine(driver, lock_policy="off") as gpu, engine.Buffer(gpu) as buffer:
            data = numpy.random.default_rng(1).integers(0, 256, 8 * MIB, dtype=numpy.uint8)
            back = numpy.zeros_like(data)
            with engine.HostLock(gpu, data), engine.HostLock(gpu, data[5:50]), engine.HostLock(gpu, back):
                assert calls() == (2, 0, 0, 0), calls()
                buffer.write(0, data)
                buffer.read(0, back)
                assert locked(gpu) == 16 * MIB
            assert (data == back).all()
            assert calls() == (2, 2, 2, 0), calls()
            assert moved(gpu, "locked", "in") == moved(gpu, "locked", "out") == 8 * MIB
            assert moved(gpu, "pageable", "in") == moved(gpu, "pageable", "out") == 0
            assert gpu.io_statistics()["bounce_pool"]["pinned_bytes"] == 0
            # What is locked in part goes in parts: a copy across the border is refused.
            with engine.HostLock(gpu, data[MIB : 3 * MIB]):
                buffer.write(0, data)
                back[:] = 0
                buffer.read(0, back)
            assert (data == back).all()
            assert calls() == (3, 3, 3, 3), calls()  # pageable: before, after, and all of it back
            assert moved(gpu, "locked", "in") == 10 * MIB and moved(gpu, "pageable", "in") == 6 * MIB
            buffer.write(0, data)
            assert calls() == (3, 3, 3, 4), calls()
        """,
    )


@both
def test_the_drivers_failures(tmp_path: Path, fake: str) -> None:
    over_fake(
        tmp_path,
        fake,
        """
        with engine.Engine(driver) as gpu, engine.Buffer(gpu) as buffer:
            data = numpy.zeros(MIB, dtype=numpy.uint8)
            fail(0, 2)  # out of memory
            try:
                engine.HostLock(gpu, data)
            except engine.EngineError as error:
                assert error.errno == errno.ENOMEM and error.device_code == 2, error
                assert "lock less" in str(error) and f"{data.ctypes.data:#x}" in str(error), error
            else:
                raise AssertionError("it was locked")
            assert locked(gpu) == 0 and calls()[:2] == (1, 0)
            lock = engine.HostLock(gpu, data)
            fail(1, 801)  # not supported
            try:
                lock.unlock()
            except engine.EngineError as error:
                assert error.device_code == 801, error
            else:
                raise AssertionError("it was unlocked")
            assert lock.locked and locked(gpu) == MIB
            lock.unlock()
            assert locked(gpu) == 0 and calls()[:2] == (2, 2)
        with engine.Engine(driver, lock_policy="mandatory") as gpu, engine.Buffer(gpu) as buffer:
            buffer.write(0, data)
            assert moved(gpu, "locked", "in") == MIB and calls()[:2] == (3, 3), calls()
            fail(0, 2)
            try:
                buffer.write(0, data)
            except engine.EngineError as error:
                assert error.errno == errno.ENOMEM and "mandatory" in str(error), error
            else:
                raise AssertionError("it was written")
        """,
    )


@both
def test_what_another_library_locked(tmp_path: Path, fake: str) -> None:
    over_fake(
        tmp_path,
        fake,
        """
        with engine.Engine(driver) as gpu, engine.Engine(driver) as other, engine.Buffer(gpu) as buffer:
            data = numpy.zeros(8 * MIB, dtype=numpy.uint8)
            with engine.HostLock(other, data[MIB:]):
                with engine.HostLock(gpu, data[2 * MIB : 3 * MIB]) as lock:
                    assert lock.foreign and locked(gpu) == 7 * MIB
                    buffer.write(0, data[4 * MIB :])
                    assert moved(gpu, "locked", "in") == 4 * MIB
                assert locked(gpu) == 0 and locked(other) == 7 * MIB
                try:
                    engine.HostLock(gpu, data[: 2 * MIB])
                except engine.EngineError as error:
                    assert error.errno == errno.EEXIST and "another library" in str(error), error
                else:
                    raise AssertionError("it was locked")
                assert calls()[1] == 0
            assert calls()[1] == 1
        """,
    )


# ---- a mount's own memory for requests ----


def hip_environment(**plans: str) -> dict[str, str]:
    folder = FAKES / "fake_hip/rocm7"
    if not (folder / "libamdhip64.so.7").exists():
        pytest.skip("the fake libraries are not built (scripts/build gpufs_tests)")
    return {"LD_LIBRARY_PATH": str(folder), **plans}


# Every call to pin memory fails as if there were no more.
_NO_PINNING = "hipHostRegister:1:2:1000000"


@pytest.mark.parametrize("policy", ["auto", "off", "mandatory"])
def test_the_memory_of_requests(mount: Mounter, policy: str) -> None:
    own = mount("--lock-policy", policy, driver="hip", environment=hip_environment(), memory=64 * MIB)
    (own.device / "file").write_bytes(noise(3 * MIB))
    assert_same((own.device / "file").read_bytes(), noise(3 * MIB))
    found = json.loads((own.path / ".gpufs/stats").read_text())["gauges"]
    assert (found["request_pinned_bytes"] > 0) == (policy != "off")
    assert found["locked_bytes"] == found["locked_ranges"] == 0
    own.unmount()


def test_requests_whose_memory_cannot_be_locked(mount: Mounter, tmp_path: Path) -> None:
    plans = hip_environment(FAKE_HIP_FAULTS=_NO_PINNING)
    own = mount(driver="hip", environment=plans, memory=64 * MIB)
    (own.device / "file").write_bytes(b"works all the same")
    assert (own.device / "file").read_bytes() == b"works all the same"
    assert json.loads((own.path / ".gpufs/stats").read_text())["gauges"]["request_pinned_bytes"] == 0
    own.unmount()
    words = (*GPUFS, "mount", tmp_path, "--driver", "hip", "--lock-policy", "mandatory")
    failed = run(*words, env={**os.environ, **plans}, check=False)
    assert failed.returncode == 1
    assert "mandatory" in failed.stderr
    assert "lock less" in failed.stderr
    assert not os.path.ismount(tmp_path)
