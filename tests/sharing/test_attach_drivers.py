"""Attaching on every driver: what an array says about itself, and what goes to whom."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from errno import EBUSY, EINVAL, EISDIR, ENOENT, EOPNOTSUPP, EXDEV
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from support.attaching import leases, run_as_nobody
from support.cli import inspected
from support.data import MIB, noise
from support.mounting import Mounter
from support.processes import errno_of, run

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


# ---- values ----


def test_values_of_an_array(mount: Mounter, driver: str) -> None:
    """tobytes() and item() copy to the host on every driver, also of what is not contiguous."""
    mounted = mount(*OPTIONS.get(driver, []), memory=256 * MIB)
    content = bytearray(noise(4 * MIB))
    numbers = numpy.array([[1.5, -2.0], [0.25, 4096.0]], numpy.float32)
    content[: numbers.nbytes] = numbers.tobytes()
    content[64:66] = b"\x80\x3f"  # 1.0 as bfloat16
    content[128:129] = b"3"
    path = mounted.device / "file"
    path.write_bytes(content)
    with gpufs.attach(path) as array:
        assert array[MIB : MIB + 100].tobytes() == content[MIB : MIB + 100]
        table = array[: numbers.nbytes].view("float32", (2, 2))
        assert table[:, 1].tobytes() == numbers[:, 1].tobytes()
        assert table[1, 0].item() == 0.25
        assert array[64:66].view("bfloat16").item() == 1.0
        assert array[:0].tobytes() == b""
        assert table[::-1, ::-1].tobytes() == numbers[::-1, ::-1].tobytes()
        assert table[::-1, 1][1].item() == -2.0
        with pytest.raises(ValueError, match="4 elements"):
            table.item()
        assert (int(table[1, 1]), float(table[1, 0]), bool(table[0, 0])) == (4096, 0.25, True)
        assert int(array[128]) == ord("3")  # and not 3, which is the text in this byte
        with pytest.raises(ValueError, match="4 elements"):
            bool(table)
        for other in (array, table, numbers, content, bytes(content), [1.5, -2.0], 1.5, numpy.float32(1.5)):
            for one in (array, table[0, 0]):
                if one is not other:
                    with pytest.raises(TypeError):
                        _ = one == other
        assert array not in ("text", None)
        assert len({array, table}) == 2
        senseless: list[Callable[[], Any]] = [
            lambda: table + 1, lambda: 2 * table, lambda: -table, lambda: table < 3, lambda: table @ table,
        ]  # fmt: skip
        for compute in senseless:
            with pytest.raises(TypeError, match="torch"):
                compute()
        equal: list[Any] = [numpy.float32, numpy.dtype("f4"), torch.float32, "float32"]
        others: list[Any] = [numpy.int8, torch.bfloat16, "float64", None, 3]
        for kind in equal + others:
            assert ((table.dtype == kind), (table.dtype != kind)) == (kind in equal, kind in others)
        assert {table.dtype: 1}["float32"]
        assert table.T.tobytes() == numbers.T.tobytes()
        for flat in (table.reshape(4), table.reshape(-1), table.reshape((4,)), table.reshape(1, 4)[0]):
            assert flat.tobytes() == numbers.tobytes()
        if driver == "host":
            assert numpy.array_equal(table.T.numpy(), numbers.T)
            assert numpy.array_equal(numbers + table, table + numbers)
            assert torch.equal(table.T.torch(), torch.from_numpy(numbers).T)
        else:
            with pytest.raises(TypeError, match="torch"):
                table.numpy()


def test_a_new_file_as_an_array(mount: Mounter, driver: str, tmp_path: Path) -> None:
    mounted = mount(*OPTIONS.get(driver, []), memory=64 * MIB)
    path = mounted.device / "new"
    with gpufs.create(path, (3, MIB), "bfloat16", mode=0o640) as array:
        assert (array.shape, array.dtype, array.mode) == ((3, MIB), "bfloat16", "r+")
        assert path.read_bytes() == bytes(6 * MIB)
        assert path.stat().st_mode & 0o777 == 0o640
        with open(path, "r+b") as file:
            file.write(b"\x80\x3f")
        assert array[0, 0].item() == 1.0
        if driver != "host":
            with pytest.raises(TypeError, match="torch"):
                array.view("uint16")[0] = 1
        (listed,) = inspected(path)["tensors"]
        assert (listed["dtype"], listed["shape"]) == ("bfloat16", [3, MIB])
    with gpufs.create(mounted.device / "empty", (0, 4), "float32") as array:
        assert array.shape == (0, 4)
    with pytest.raises(FileExistsError):
        gpufs.create(path, 1)
    assert path.stat().st_size == 6 * MIB
    failures: tuple[tuple[type[Exception], Path, Any, str], ...] = (
        (gpufs.NotOnMount, tmp_path / "none", 1, "uint8"),
        (FileNotFoundError, mounted.device / "missing" / "none", 1, "uint8"),
        (ValueError, mounted.device / "none", (3, -1), "uint8"),
        (TypeError, mounted.device / "none", 1, "float33"),
    )
    for kind, name, shape, dtype in failures:
        with pytest.raises(kind):
            gpufs.create(name, shape, dtype)
        assert not name.exists()
    with pytest.raises(gpufs.DeviceFull, match="128 MiB"):
        gpufs.create(mounted.device / "none", 128 * MIB)
    assert not (mounted.device / "none").exists()


def test_a_copy_can_be_ruled_out(mount: Mounter, driver: str) -> None:
    mounted = mount(*OPTIONS.get(driver, []), memory=32 * MIB)
    path = mounted.device / "file"
    path.write_bytes(noise(20 * MIB))  # a copy does not fit beside it
    gpufs.attach(path, copy=False).close()
    if driver == "host":  # a page is copied when it is written to
        gpufs.attach(path, "c", copy=False).close()
    else:
        with pytest.raises(ValueError, match="copy=False"):
            gpufs.attach(path, "c", copy=False)
    with pytest.raises(ValueError, match="copy"):
        gpufs.attach(path, copy=True)  # type: ignore[arg-type]
    assert leases(mounted) == [] or driver != "host"


# ---- many files ----


def bytes_of(array: gpufs.DeviceArray) -> bytes:
    return ctypes.string_at(array.address, array.nbytes)


@pytest.fixture
def readable(driver: str) -> None:
    if driver != "host" and "FAKE_KERNEL_ROOT" not in os.environ:
        pytest.skip("only a fake GPU's memory is read here; tests/gpu has the test for real ones")


@pytest.mark.usefixtures("readable")
def test_many_files_are_attached_in_their_order(mount: Mounter, driver: str) -> None:
    """Small ones on two devices, empty and linked ones, and one that is large enough to be attached itself."""
    mounted = mount(*OPTIONS.get(driver, []), "--devices", "2", memory=256 * MIB)
    contents = {f"gpu{number % 2}/{number}": noise(number * 7, number) for number in range(300)}
    contents["gpu0/large"] = noise(3 * MIB)
    for name, content in contents.items():
        (mounted.path / name).write_bytes(content)
    (mounted.path / "gpu1/link").symlink_to("../gpu0/200")
    contents["gpu1/link"] = contents["gpu0/200"]
    arrays = gpufs.attach_many(mounted.path / name for name in contents)
    assert [bytes_of(array) for array in arrays] == list(contents.values())
    assert [array.path for array in arrays] == [str(mounted.path / name) for name in contents]
    devices = {array.path: array.device for array in arrays}
    assert devices[str(mounted.path / "gpu1/1")] == ("cpu" if driver == "host" else f"{driver}:1")
    assert devices[str(mounted.path / "gpu1/link")] == ("cpu" if driver == "host" else f"{driver}:0")
    (lease,) = leases(mounted)
    assert Path(lease["path"]).name == "large"
    for array in arrays:
        assert array.private == (array.nbytes < 2 * MIB)
        assert array.address % 256 == 0
    assert errno_of(arrays[5].refresh) == EOPNOTSUPP
    kept = arrays[7][8:]
    del arrays, array
    assert bytes_of(kept) == contents["gpu1/7"][8:]
    assert leases(mounted) == [] or driver != "host"


@pytest.mark.skipif(os.geteuid() != 0, reason="bind mounts take root")
def test_many_files_through_a_bind_mount_of_a_directory(mount: Mounter, driver: str, tmp_path: Path) -> None:
    mounted = mount(*OPTIONS.get(driver, []), memory=256 * MIB)
    (mounted.device / "folder").mkdir()
    (mounted.device / "folder" / "file").write_bytes(b"content")
    (tmp_path / "bound").mkdir()
    run("mount", "--bind", mounted.device / "folder", tmp_path / "bound")
    try:
        (array,) = gpufs.attach_many([tmp_path / "bound" / "file"])
        assert (array.tobytes(), array.device) == (b"content", "cpu" if driver == "host" else f"{driver}:0")
    finally:
        run("umount", tmp_path / "bound")


@pytest.mark.usefixtures("readable")
def test_many_files_that_are_written_to(mount: Mounter, driver: str) -> None:
    """Mode "c" leaves the files alone, and "r+" is their memory."""
    mounted = mount(*OPTIONS.get(driver, []), memory=256 * MIB)
    paths = [mounted.device / str(number) for number in range(3)]
    for path in paths:
        path.write_bytes(b"before")
    for array in gpufs.attach_many(paths, "c"):
        ctypes.memset(array.address, ord("c"), 6)
        assert bytes_of(array) == b"cccccc"
    assert [path.read_bytes() for path in paths] == [b"before"] * 3
    for array in gpufs.attach_many(paths, "r+"):
        assert not array.private
        ctypes.memset(array.address, ord("w"), 6)
    assert [path.read_bytes() for path in paths] == [b"wwwwww"] * 3


def test_many_files_of_which_one_is_missing(mount: Mounter, driver: str, tmp_path: Path) -> None:
    """The error names the file, whatever is wrong with it, and nothing stays attached."""
    mounted = mount(*OPTIONS.get(driver, []), memory=256 * MIB)
    (mounted.device / "small").write_bytes(b"small")
    (mounted.device / "large").write_bytes(noise(3 * MIB))
    os.mkfifo(mounted.device / "fifo")
    (tmp_path / "elsewhere").write_bytes(b"elsewhere")
    wrong = {
        mounted.device / "missing": ENOENT,
        mounted.device: EISDIR,
        mounted.device / "fifo": EINVAL,
        tmp_path / "elsewhere": EXDEV,
        mounted.path / ".gpufs/version": EINVAL,
    }
    for path, number in wrong.items():
        with pytest.raises(OSError) as failed:
            gpufs.attach_many([mounted.device / "large", mounted.device / "small", path])
        assert (failed.value.errno, failed.value.filename) == (number, str(path))
        del failed
    assert leases(mounted) == [] or driver != "host"
    with pytest.raises(ValueError, match="mode"):
        gpufs.attach_many([], "w")  # type: ignore[arg-type]
    assert gpufs.attach_many([]) == []
