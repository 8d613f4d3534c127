"""The native engine from Python: typed objects, errors with their codes, lifetimes."""

import errno
import gc
import pickle
import shutil
import subprocess
import sys
import sysconfig
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.data import MIB

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
def test_wrong_engine_options_are_refused(driver: str, memory: int, error: int) -> None:
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


def test_closed_objects_raise_ebadf(host: engine.Engine) -> None:
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


def test_a_checkout_that_hides_the_installed_gpufs_is_named(tmp_path: Path) -> None:
    shutil.copytree(
        Path(__file__).parents[1] / "gpufs", tmp_path / "gpufs", ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    # -S, so that only this path leads to other packages: the test environment finds its own gpufs first.
    program = f"import sys; sys.path.append({sysconfig.get_path('purelib')!r}); import gpufs.engine"
    done = subprocess.run([sys.executable, "-S", "-c", program], cwd=tmp_path, capture_output=True, text=True)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError")
    assert str(tmp_path) in last
