"""Attaching on every driver: what an array says about itself, and what goes to whom."""

from __future__ import annotations

import ctypes
import os
from errno import EBUSY
from pathlib import Path

import numpy
import pytest
from support.attaching import leases, run_as_nobody
from support.data import MIB, noise
from support.mounting import Mounter
from support.processes import errno_of

import gpufs

pytestmark = [pytest.mark.driver, pytest.mark.complains]
KINDS = {"host": 1, "cuda": 2, "hip": 10}
# Memory of an AMD GPU that is one allocation cannot be shared.
OPTIONS = {"hip": ["--hip-memory", "virtual"]}


def test_an_array_names_its_device_and_follows_its_file(mount: Mounter, driver: str) -> None:
    mounted = mount(*OPTIONS.get(driver, []), memory=256 * MIB)
    path = mounted.device / "file"
    path.write_bytes(noise(5 * MIB))
    with gpufs.attach(path, "r+") as array:
        assert array.device == ("cpu" if driver == "host" else f"{driver}:0")
        assert array.__dlpack_device__() == (KINDS[driver], 0)
        assert (array.nbytes, array.private, array.mode) == (5 * MIB, False, "r+")
        assert array[MIB:].view("float32").address == array.address + MIB > MIB
        assert array.__dlpack__(max_version=(1, 0)) is not None
        if driver != "host":
            interface = array[16:].view("<f2", (-1, 2)).__cuda_array_interface__
            assert interface["data"] == (array.address + 16, False)
            assert (interface["shape"], interface["typestr"]) == (((5 * MIB - 16) // 4, 2), "<f2")
            with pytest.raises(TypeError, match="torch"):
                numpy.asarray(array)
            with pytest.raises(TypeError):
                array.memoryview()
        assert errno_of(os.truncate, path, 0) == EBUSY
        with open(path, "ab") as file:
            file.write(noise(8 * MIB))
        assert array.refresh().nbytes == 13 * MIB
        (lease,) = leases(mounted)
        assert (lease["bytes"], lease["pid"]) == (13 * MIB, os.getpid())
    del array
    assert leases(mounted) == [] or driver != "host"
    assert path.read_bytes() == noise(5 * MIB) + noise(8 * MIB)


READ = "import gpufs, sys; print(gpufs.attach(sys.argv[1]).private)"


@pytest.mark.skipif(os.geteuid() != 0, reason="acts as several users, which takes root")
@pytest.mark.parametrize("trusting", [False, True])
def test_readers_get_a_private_copy_on_gpus(mount: Mounter, driver: str, trusting: bool) -> None:
    """A descriptor of a GPU's memory always gives write access."""
    options = ["--trust-readers"] if trusting else []
    mounted = mount(*OPTIONS.get(driver, []), *options, memory=256 * MIB, allow_other=True)
    path: Path = mounted.device / "file"
    path.write_bytes(noise(5 * MIB))
    path.chmod(0o644)
    private = driver != "host" and not trusting
    assert run_as_nobody(READ, path) == f"{private}\n"


@pytest.mark.parametrize("trusting", [False, True])
def test_copy_on_write_stays_private(mount: Mounter, driver: str, trusting: bool) -> None:
    """What a program writes with mode "c" is seen by itself alone; only the memory of GPUs is copied at once."""
    if driver != "host" and "FAKE_KERNEL_ROOT" not in os.environ:
        pytest.skip("only a fake GPU's memory is written to here; tests/gpu has the test for real ones")
    options = ["--trust-readers"] if trusting else []
    mounted = mount(*OPTIONS.get(driver, []), *options, memory=256 * MIB)
    path = mounted.device / "file"
    path.write_bytes(noise(5 * MIB))
    with gpufs.attach(path, "c") as array, gpufs.attach(path, "c") as other:
        assert (array.private, array.mode) == (driver != "host", "c")
        ctypes.memset(array.address, 7, 3 * MIB)
        assert ctypes.string_at(array.address, 5 * MIB) == b"\7" * 3 * MIB + noise(5 * MIB)[3 * MIB :]
        assert ctypes.string_at(other.address, 5 * MIB) == noise(5 * MIB)
        assert path.read_bytes() == noise(5 * MIB)
        assert errno_of(os.truncate, path, 0) == EBUSY or driver != "host"
