"""The native engine from Python: typed objects, errors with their codes, lifetimes."""

import errno
import gc
import pickle
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
from support.data import MIB, noise
from support.processes import PATIENCE

from gpufs import engine


@pytest.fixture
def host() -> Iterator[engine.Engine]:
    with engine.Engine("host", devices=2, memory_bytes=64 * MIB) as opened:
        yield opened


def test_devices(host: engine.Engine) -> None:
    assert [device.index for device in host.devices] == [0, 1]
    info = host.devices[1].info
    assert (info.index, info.total_bytes, info.granule, info.cpu_addressable) == (1, 64 * MIB, 2 * MIB, True)
    memory = host.devices[1].memory()
    assert (memory.free_bytes, memory.held_bytes, memory.health) == (64 * MIB, 0, None)


@pytest.mark.parametrize(
    ("driver", "memory", "error"),
    [("host", 0, errno.EINVAL), ("host", 1, errno.EINVAL), ("abacus", 4 * MIB, errno.EINVAL)],
)
def test_engines_that_cannot_be(driver: str, memory: int, error: int) -> None:
    with pytest.raises(engine.EngineError) as failure:
        engine.Engine(driver, memory_bytes=memory)
    assert failure.value.errno == error
    assert failure.value.device_code == 0
    assert str(failure.value)


def test_errors_keep_both_codes() -> None:
    error = engine.EngineError(errno.EIO, "the device is lost", 719)
    assert isinstance(error, OSError)
    assert str(error) == "the device is lost (device code 719)"
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.errno, copy.strerror, copy.device_code) == (errno.EIO, "the device is lost", 719)


def test_buffer_takes_any_memory(host: engine.Engine) -> None:
    with engine.Buffer(host, 1) as buffer:
        array = numpy.arange(MIB, dtype="float32")
        assert buffer.write(4096, array) == array.nbytes
        assert buffer.info == engine.BufferInfo(4096 + array.nbytes, 6 * MIB, 1)
        back = numpy.empty_like(array)
        assert buffer.read(4096, back) == array.nbytes
        assert (back == array).all()
        part = bytearray(10)
        assert buffer.read(4096 + array.nbytes - 4, part) == 4
        assert buffer.read(1 << 40, part) == 0
        assert buffer.read_bytes(4096, 8) == array.tobytes()[:8]
        with pytest.raises((BufferError, TypeError, ValueError)):
            buffer.read(0, b"read only")
        with pytest.raises((BufferError, TypeError, ValueError)):
            buffer.write(0, array[::2])


def test_holes(host: engine.Engine) -> None:
    with engine.Buffer(host) as buffer:
        buffer.resize(8 * MIB)
        assert buffer.info.held_bytes == 0
        buffer.write(4 * MIB, b"x")
        assert buffer.seek(0, engine.SEEK_DATA) == 4 * MIB
        assert buffer.seek(4 * MIB, engine.SEEK_HOLE) == 6 * MIB
        buffer.punch(4 * MIB, 2 * MIB)
        assert buffer.info == engine.BufferInfo(8 * MIB, 0, 0)
        with pytest.raises(engine.EngineError) as failure:
            buffer.seek(0, engine.SEEK_DATA)
        assert failure.value.errno == errno.ENXIO
        buffer.allocate(8 * MIB, 2 * MIB, keep_size=True)
        assert buffer.info == engine.BufferInfo(8 * MIB, 2 * MIB, 0)
        buffer.zero(0, 10 * MIB)
        assert buffer.info.size == 10 * MIB


def test_full_device_changes_nothing(host: engine.Engine) -> None:
    with engine.Buffer(host) as buffer:
        buffer.write(0, noise(MIB))
        with pytest.raises(engine.EngineError) as failure:
            buffer.write(MIB, bytes(64 * MIB))
        assert failure.value.errno == errno.ENOSPC
        assert buffer.info.size == MIB
        assert buffer.read_bytes(0, MIB) == noise(MIB)
    assert host.devices[0].memory().held_bytes == 0


def test_closed_objects_say_so(host: engine.Engine) -> None:
    buffer = engine.Buffer(host)
    buffer.close()
    buffer.close()
    assert buffer.closed
    with pytest.raises(engine.EngineError) as failure:
        buffer.write(0, b"x")
    assert failure.value.errno == errno.EBADF


def test_buffer_keeps_its_engine_alive() -> None:
    buffer = engine.Buffer(engine.Engine("host", memory_bytes=4 * MIB))
    gc.collect()
    assert buffer.write(0, b"x") == 1
    kept = weakref.ref(buffer.engine)
    del buffer
    gc.collect()
    assert kept() is None


def test_transfers(host: engine.Engine, tmp_path: Path) -> None:
    data = noise(5 * MIB + 123)
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(data)
    with engine.Buffer(host) as buffer:
        with open(source, "rb") as file, engine.BackingFile(host, file.fileno()) as backing:
            assert backing.info.readable
            assert not backing.info.writable
            with engine.Transfer("load", backing, buffer) as transfer:
                assert transfer.wait(PATIENCE)
                transfer.result()
                progress = transfer.progress()
                assert (progress.state, progress.error, progress.prefix) == ("done", 0, len(data))
                assert progress.fastpath_bytes + progress.fallback_bytes == len(data)
        assert buffer.read_bytes(0, len(data)) == data
        with open(target, "wb") as sink, engine.BackingFile(host, sink.fileno()) as backing:
            with engine.Transfer("store", backing, buffer, size=MIB + 1, buffer_offset=7, sync="data") as transfer:
                assert transfer.wait(PATIENCE)
                assert transfer.failure() is None
        assert target.read_bytes() == data[7 : MIB + 8]
    assert host.io_statistics()["devices"][0]["load"]["transfers"] == 1


@pytest.mark.parametrize(
    "script",
    [
        "b = e.Buffer(host); b.write(0, b'x')",
        "import os; pid = os.fork(); os.waitpid(pid, 0) if pid else None",
        "import threading; threading.Thread(target=lambda: e.Buffer(host).write(0, bytes(1 << 20))).start()",
        "raise SystemExit(0)",
    ],
)
def test_exit_without_closing(script: str) -> None:
    """The interpreter ends cleanly, with threads of the engine running and in a forked child."""
    code = f"import gpufs.engine as e\nhost = e.Engine('host', devices=2, memory_bytes=8 << 20)\n{script}\n"
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
