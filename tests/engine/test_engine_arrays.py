"""Arrays of other libraries: DLPack of every version, __cuda_array_interface__, host memory."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
from support.data import noise
from support.processes import wait_until

from gpufs import engine
from gpufs.engine._arrays import device_range

_CPU, _CUDA, _CUDA_HOST = 1, 2, 3
_READ_ONLY, _PADDED = 1, 4


@pytest.fixture
def file(host: engine.Engine, tmp_path: Path) -> Iterator[engine.BackingFile]:
    (tmp_path / "file").write_bytes(noise(4096))
    with engine.BackingFile.open(host, bytes(tmp_path / "file"), "r+") as opened:
        yield opened


class Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class Versioned(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint32 * 2),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    )


class Array:
    """An array that has only DLPack, of a version or of before versions (None)."""

    def __init__(
        self,
        memory: bytearray,
        shape: tuple[int, ...],
        *,
        bits: int = 8,
        strides: tuple[int, ...] | None = None,
        version: tuple[int, int] | None = (1, 0),
        flags: int = 0,
        kind: int = _CPU,
        device: int = 0,
        offset: int = 0,
    ) -> None:
        self.keep = (ctypes.c_char * len(memory)).from_buffer(memory)
        self.shape = (ctypes.c_int64 * len(shape))(*shape)
        self.strides = None if strides is None else (ctypes.c_int64 * len(strides))(*strides)
        self.version = version
        tensor = Tensor(
            ctypes.addressof(self.keep),
            kind,
            device,
            len(shape),
            0,
            bits,
            1,
            ctypes.cast(self.shape, ctypes.POINTER(ctypes.c_int64)),
            ctypes.cast(self.strides, ctypes.POINTER(ctypes.c_int64)) if self.strides is not None else None,
            offset,
        )
        numbers = (ctypes.c_uint32 * 2)(*(version or (0, 0)))
        self.managed = tensor if version is None else Versioned(numbers, None, None, flags, tensor)
        self.kind = kind
        self.asked: list[Any] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.kind, 0

    def __dlpack__(self, **options: Any) -> Any:
        self.asked.append(options)
        if self.version is None and options:
            raise TypeError("an unexpected keyword")
        make = ctypes.pythonapi.PyCapsule_New
        make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        self.name = b"dltensor" if self.version is None else b"dltensor_versioned"
        return make(ctypes.addressof(self.managed), self.name, None)


@pytest.mark.parametrize("version", [None, (1, 0), (1, 3)])
def test_dlpack_arrays_of_every_version_work(
    host: engine.Engine, file: engine.BackingFile, version: tuple[int, int] | None
) -> None:
    memory = bytearray(4096)
    assert file.read(Array(memory, (16, 128), bits=16, version=version)) == 4096
    assert memory == noise(4096)
    part = bytearray(4096)
    assert file.read(Array(part, (10,), bits=8, strides=(1,), offset=100, version=version)) == 10
    assert part == bytes(100) + noise(4096)[:10] + bytes(3986)
    with engine.Buffer(host) as buffer:
        assert buffer.write(0, Array(memory, (4096,), version=version)) == 4096  # type: ignore[arg-type]
        again = bytearray(4096)
        assert buffer.read(0, Array(again, (4096,), version=version)) == 4096  # type: ignore[arg-type]
        assert again == memory
    assert file.write(Array(memory, (4096,), kind=_CUDA_HOST, device=3, version=version)) == 4096  # pinned memory


def test_functions_of_the_whole_program_stay_as_they_are(host: engine.Engine, file: engine.BackingFile) -> None:
    """Other libraries may declare functions of Python's C interface in their own way."""
    functions = [ctypes.pythonapi[name] for name in ("Py_IncRef", "PyCapsule_New", "PyCapsule_GetPointer")]
    shared = [ctypes.pythonapi.Py_IncRef, ctypes.pythonapi.PyCapsule_New, ctypes.pythonapi.PyCapsule_GetPointer]
    before = [(function.argtypes, function.restype) for function in functions]
    for function in shared:
        function.argtypes, function.restype = (ctypes.c_char_p,), None
    try:
        array = numpy.zeros(4096, numpy.uint8)
        assert file.read(array) == 4096
        with engine.Buffer(host) as buffer:
            buffer.write(0, array)
            with engine.Lease(buffer, local=True, writable=True) as lease:
                assert engine.dlpack_capsule(lease, "host", 0, lease.address, (4096,)) is not None
                assert engine.dlpack_capsule(object(), "host", 0, lease.address, (4096,)) is not None
        assert all(function.argtypes == (ctypes.c_char_p,) for function in shared)
    finally:
        for function, (arguments, result) in zip(shared, before, strict=True):
            function.argtypes, function.restype = arguments, result


def test_unusable_dlpack_arrays_are_refused(host: engine.Engine, file: engine.BackingFile) -> None:
    memory = bytearray(4096)
    with pytest.raises(ValueError, match=r"^memory: .* read-only"):
        file.read(Array(memory, (4096,), flags=_READ_ONLY))
    assert file.write(Array(memory, (4096,), flags=_READ_ONLY)) == 4096
    with pytest.raises(ValueError, match="version 2"):
        file.read(Array(memory, (4096,), version=(2, 0)))
    with pytest.raises(ValueError, match=r"^memory: .*contiguous"):
        file.read(Array(memory, (64, 32), strides=(64, 1)))
    with pytest.raises(ValueError, match="not in host memory"):
        file.read(Array(memory, (4096,), kind=_CUDA))

    class Garbage:
        def __dlpack_device__(self) -> Any:
            return "x"

        def __dlpack__(self, **_: Any) -> Any:
            return 5

    class NoArray(Garbage):
        def __dlpack_device__(self) -> Any:
            return 1, 0

    with pytest.raises(ValueError, match=r"Garbage.__dlpack_device__\(\) is not understood"):
        file.read(Garbage())
    with pytest.raises(ValueError, match=r"NoArray.__dlpack__\(\) did not return an array"):
        file.read(NoArray())


@pytest.mark.parametrize(("flags", "count"), [(0, 3), (_PADDED, 5)])
def test_elements_smaller_than_a_byte(file: engine.BackingFile, flags: int, count: int) -> None:
    assert file.read(Array(bytearray(8), (5,), bits=4, flags=flags)) == count


@pytest.mark.parametrize("version", [None, (1, 0)])
def test_arrays_are_released(host: engine.Engine, file: engine.BackingFile, version: tuple[int, int] | None) -> None:
    array = Array(bytearray(4096), (4096,), version=version)
    before = sys.getrefcount(array)
    with engine.Buffer(host) as buffer:
        for _ in range(20):
            file.read(array)
            buffer.write(0, array)  # type: ignore[arg-type]
            file.read_async(array).result(60)
    gc.collect()
    # The thread of futures releases the last one a moment after it is done.
    wait_until(lambda: sys.getrefcount(array) <= before, 10, "the array to be released")
    assert sys.getrefcount(array.keep) <= 3


class Interface:
    def __init__(self, **interface: Any) -> None:
        self.__cuda_array_interface__ = {"data": (1 << 20, False), "version": 3, **interface}


class Gpu:
    driver = "cuda"
    devices: tuple[None, ...] = (None,)


def of(writable: bool = False, **interface: Any) -> tuple[int, int]:
    found, _ = device_range(Gpu(), Interface(**interface), writable=writable)  # type: ignore[arg-type]
    return found.address, found.bytes


@pytest.mark.parametrize(
    ("typestr", "item"), [("<f4", 4), (">f8", 8), ("|b1", 1), ("<f2", 2), ("<V2", 2), ("<c16", 16), ("<M8[ns]", 8)]
)
@pytest.mark.parametrize("version", [2, 3])
def test_cuda_arrays_of_all_types_work(typestr: str, item: int, version: int) -> None:
    assert of(shape=(3, 5), typestr=typestr, version=version) == (1 << 20, 15 * item)
    assert of(shape=(3, 5), typestr=typestr, version=version, strides=(5 * item, item), stream=1)[1] == 15 * item
    assert of(shape=(), typestr=typestr)[1] == item
    assert of(shape=(0, 5), typestr=typestr, data=(0, False)) == (0, 0)
    assert of(shape=(1, 5), typestr=typestr, strides=(7, item))[1] == 5 * item


@pytest.mark.parametrize(
    ("interface", "error", "said"),
    [
        ({"shape": (4,), "typestr": "|O8"}, TypeError, "references"),
        ({"shape": (4,), "typestr": "<f4", "mask": object()}, ValueError, "masked"),
        ({"shape": (-4,), "typestr": "<f4"}, ValueError, "not understood"),
        ({"shape": (4, 4), "typestr": "<f4", "strides": (4,)}, ValueError, "not understood"),
        ({"shape": (4.5,), "typestr": "<f4"}, ValueError, "not understood"),
        ({"shape": (4, 4), "typestr": "<f4", "strides": (4, 16)}, ValueError, "contiguous"),
        ({"shape": (4,), "typestr": "<f4", "strides": (-4,)}, ValueError, "contiguous"),
        ({"shape": (4,), "typestr": "<f4", "data": (1 << 20, True)}, ValueError, "read-only"),
        ({}, ValueError, "not understood"),
        ({"shape": (4,)}, ValueError, "not understood"),
        ({"shape": (4,), "typestr": "<f4", "data": None}, ValueError, "not understood"),
        ({"shape": (4,), "typestr": "float"}, ValueError, "not understood"),
        ({"shape": None, "typestr": "<f4"}, ValueError, "not understood"),
    ],
)
def test_unusable_cuda_arrays_are_refused(interface: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=f"^memory: .*{said}"):
        of(writable=True, **interface)


def test_the_device_of_cuda_arrays() -> None:
    class Two(Gpu):
        devices = (None, None)

    array: Any = Interface(shape=(4,), typestr="<f4")
    with pytest.raises(ValueError, match="does not name its device"):
        device_range(Two(), array, writable=False)  # type: ignore[arg-type]
    array.device = type("Device", (), {"id": 1})()
    assert device_range(Two(), array, writable=False)[0] == engine.DeviceRange(1, 1 << 20, 16)  # type: ignore[arg-type]


def test_dlpack_arrays_on_a_gpu() -> None:
    memory = bytearray(4096)
    array = Array(memory, (16, 128), bits=16, kind=_CUDA, device=1)
    found, keep = device_range(Gpu(), array, writable=True)  # type: ignore[arg-type]
    assert (found.device, found.address, found.bytes) == (1, ctypes.addressof(array.keep), 4096)
    assert keep is not None
    with pytest.raises(ValueError, match="cuda driver"):
        device_range(Gpu(), Array(memory, (4096,)), writable=True)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="neither a Buffer nor an array"):
        device_range(Gpu(), object(), writable=True)  # type: ignore[arg-type]


def test_errors_of_arrays_give_advice(host: engine.Engine, file: engine.BackingFile) -> None:
    wide = numpy.zeros((4, 4))
    fixed = numpy.zeros(4)
    fixed.flags.writeable = False
    with engine.Buffer(host) as buffer:
        wrong: list[tuple[Any, str]] = [
            (wide[:, ::2], "ndarray is not contiguous.*ascontiguousarray"),
            (wide.T, "ndarray is not contiguous.*ascontiguousarray"),
            (memoryview(bytearray(8))[::2], "memoryview is not contiguous"),
            (fixed, "ndarray is read-only"),
            (bytes(8), "bytes is read-only"),
            (memoryview(b"x"), "memoryview is read-only"),
            ("text", "str has no bytes to copy: pass an array"),
            ([1, 2], "list has no bytes to copy: pass an array"),
            (None, "NoneType has no bytes to copy"),
        ]
        for memory, said in wrong:
            calls: tuple[Callable[[], object], ...] = (
                lambda memory=memory: file.read(memory),  # type: ignore[misc]
                lambda memory=memory: buffer.read(0, memory),  # type: ignore[misc]
                lambda memory=memory: engine.HostLock(host, memory, read_only=False),  # type: ignore[misc]
            )
            for call in calls:
                with pytest.raises((TypeError, ValueError, BufferError), match=f"^memory: .*{said}"):
                    call()
