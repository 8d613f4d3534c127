"""Device memory that a program already has: arrays of other libraries as address and size."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from operator import index
from typing import Any, Final, Protocol, runtime_checkable

from gpufs.engine._arguments import has_references, view_of
from gpufs.engine._engine import Engine
from gpufs.engine._native import ffi

# Kinds of devices in DLPack, and the driver whose memory each is.
_CPU: Final = 1
_CUDA: Final = 2
_CUDA_HOST: Final = 3
_ROCM: Final = 10
_ROCM_HOST: Final = 11
_CUDA_MANAGED: Final = 13
_HOST_KINDS: Final = frozenset({_CPU, _CUDA_HOST, _ROCM_HOST})
_DRIVER_OF: Final = {
    _CPU: "host",
    _CUDA: "cuda",
    _CUDA_HOST: "host",
    _CUDA_MANAGED: "cuda",
    _ROCM: "hip",
    _ROCM_HOST: "host",
}


_DLPACK_VERSION: Final = (1, 1)  # the newest whose capsules are understood; every 1.x is laid out alike
_DLPACK_READ_ONLY: Final = 1
_DLPACK_PADDED: Final = 4
# "<f4", "|b1", "<M8[ns]": byte order, kind, bytes of an element.
_TYPE: Final = re.compile(r"[<>|=]?([A-Za-z])(\d+)(?:\[.*\])?")


@dataclass(frozen=True, slots=True)
class DeviceRange:
    """Device memory that the program allocated itself: the index of its device in the engine, address and bytes."""

    device: int
    address: int
    bytes: int


@runtime_checkable
class SupportsCudaArrayInterface(Protocol):
    """What Numba, CuPy, PyTorch and others give their arrays on a GPU."""

    @property
    def __cuda_array_interface__(self) -> Mapping[str, Any]: ...


@runtime_checkable
class SupportsDLPack(Protocol):
    """What every array library gives its arrays for exchange with others."""

    def __dlpack__(self) -> Any: ...

    def __dlpack_device__(self) -> tuple[Any, Any]: ...


def device_range(engine: Engine, memory: object, *, writable: bool) -> tuple[DeviceRange, object]:
    """The device memory of an array, and what must be kept alive while it is used.

    Host engines take every contiguous object that has the buffer protocol or, in host memory, DLPack; GPU engines take
    what has ``__cuda_array_interface__`` (CUDA) or DLPack. The program's own work on the memory must be done:
    synchronise the stream that produces it first.

    ValueError for an array that is not contiguous, that is read-only where it is to be written, or that lies on
    another kind of device; TypeError for an object that is no array.
    """
    if isinstance(memory, DeviceRange):
        return memory, None
    if engine.driver == "host":
        try:
            found = host_range(memory, writable=writable)
        except BufferError as error:
            raise ValueError(str(error)) from error
        return DeviceRange(0, found.address, found.bytes), found.keep
    if engine.driver == "cuda" and isinstance(memory, SupportsCudaArrayInterface):
        return _from_cuda_array(engine, memory, writable), memory
    if isinstance(memory, SupportsDLPack):
        return _from_dlpack(engine, memory, writable=writable)
    raise TypeError(f"memory: {type(memory).__name__} is neither a Buffer nor an array on a device")


def _check_contiguous(shape: tuple[int, ...], strides: tuple[int, ...] | None, item: int) -> int:
    """The elements of an array that is contiguous in C's order; strides are in units of which an element has ``item``.

    ValueError where it is not.
    """
    expected = item
    if strides is not None and 0 not in shape:
        for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
            if extent != 1 and stride != expected:
                raise ValueError("memory: the array is not contiguous in C's order: copy it first (.contiguous())")
            expected *= extent
    return math.prod(shape)


def _read_only() -> ValueError:
    return ValueError("memory: the array is read-only, and is to be written: give one that can be")


def _from_cuda_array(engine: Engine, memory: SupportsCudaArrayInterface, writable: bool) -> DeviceRange:
    interface = memory.__cuda_array_interface__
    try:
        address, read_only = interface["data"]
        kind, item = _TYPE.fullmatch(str(interface["typestr"])).groups()  # type: ignore[union-attr]
        shape, strides = tuple(map(index, interface["shape"])), interface.get("strides")
        strides = None if strides is None else tuple(map(index, strides))
        if min(shape, default=0) < 0 or (strides is not None and len(strides) != len(shape)):
            raise ValueError(f"shape {shape}, strides {strides}")
        mask = interface.get("mask")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"memory: the array's __cuda_array_interface__ is not understood: {error!r}") from error
    if kind == "O":
        raise TypeError("memory: an array of Python objects has references in it, and no data")
    if mask is not None:
        raise ValueError("memory: a masked array has holes that its bytes do not tell: fill it first")
    if writable and read_only:
        raise _read_only()
    size = _check_contiguous(shape, strides, int(item)) * int(item)
    # The interface does not say on which device the memory is; libraries that know say so themselves.
    device = getattr(memory, "device", None)
    number = getattr(device, "index", getattr(device, "id", None))
    if number is None:
        if len(engine.devices) > 1:
            raise ValueError("memory: the array does not say on which device it is: use a DeviceRange")
        number = 0
    return DeviceRange(int(number), int(address or 0), size)


@dataclass(frozen=True, slots=True)
class HostRange:
    """Host memory of an object: its address and bytes, whether it must not be written, and what keeps it alive."""

    address: int
    bytes: int
    read_only: bool
    keep: object

    def release(self) -> None:
        """Ends the use of an object that has the buffer protocol."""
        if isinstance(self.keep, ffi.CData):
            ffi.release(self.keep)


def host_range(memory: Any, *, writable: bool) -> HostRange:
    """The host memory of a contiguous object that has the buffer protocol, or of a DLPack array in host memory.

    TypeError for what is neither, ValueError or BufferError for an array that is not contiguous, that is read-only
    where it is to be written, or that lies on a device.
    """
    try:
        view = view_of(memory, writable=writable)
    except TypeError:
        if not isinstance(memory, SupportsDLPack) or has_references(memory):
            raise
        if _dlpack_kind(memory) not in _HOST_KINDS:
            raise ValueError("memory: the array is not in host memory") from None
        found = _look_at_dlpack(memory, writable=writable)
        return HostRange(found.address, found.bytes, found.read_only, found.capsule)
    return HostRange(int(ffi.cast("uintptr_t", view)), len(view), not writable and not _is_writable(memory), view)


def _is_writable(memory: Any) -> bool:
    # memoryview() would tell, but does not know all kinds of data (numpy's dates).
    try:
        ffi.release(ffi.from_buffer(memory, require_writable=True))
    except (BufferError, TypeError, ValueError):
        return False
    return True


@dataclass(frozen=True, slots=True)
class _Tensor:
    """What DLPack says of an array, and the capsule that keeps it."""

    device: int
    address: int
    bytes: int
    read_only: bool
    capsule: object


def _dlpack_kind(memory: SupportsDLPack) -> int:
    try:
        kind, _ = memory.__dlpack_device__()
        return int(kind)
    except (TypeError, ValueError) as error:
        raise ValueError(f"memory: {type(memory).__name__}.__dlpack_device__() is not understood: {error}") from error


def _from_dlpack(engine: Engine, memory: SupportsDLPack, *, writable: bool) -> tuple[DeviceRange, object]:
    if _DRIVER_OF.get(_dlpack_kind(memory)) != engine.driver:
        raise ValueError(f"memory: the array is not on a device of the {engine.driver} driver")
    found = _look_at_dlpack(memory, writable=writable)
    return DeviceRange(found.device, found.address, found.bytes), found.capsule


def _look_at_dlpack(memory: SupportsDLPack, *, writable: bool) -> _Tensor:
    """Of version 1, or of what was before it, which cannot tell what is read-only.

    Only looked at, never taken over: the capsule frees what it holds when it goes, which is after the transfer.
    """
    import ctypes

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
            ("major", ctypes.c_uint32),
            ("minor", ctypes.c_uint32),
            ("context", ctypes.c_void_p),
            ("deleter", ctypes.c_void_p),
            ("flags", ctypes.c_uint64),
            ("tensor", Tensor),
        )

    give: Any = memory.__dlpack__
    try:
        capsule = give(max_version=_DLPACK_VERSION)
    except TypeError:  # from before there were versions
        capsule = give()
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype = ctypes.c_void_p
    pointer_of.argtypes = (ctypes.py_object, ctypes.c_char_p)
    is_valid = ctypes.pythonapi.PyCapsule_IsValid
    is_valid.argtypes = (ctypes.py_object, ctypes.c_char_p)
    flags = 0
    if is_valid(capsule, b"dltensor_versioned"):
        versioned = Versioned.from_address(pointer_of(capsule, b"dltensor_versioned"))
        if versioned.major != _DLPACK_VERSION[0]:
            raise ValueError(f"memory: the array has DLPack of version {versioned.major}, which is not understood")
        flags, tensor = versioned.flags, versioned.tensor
    elif is_valid(capsule, b"dltensor"):
        tensor = Tensor.from_address(pointer_of(capsule, b"dltensor"))
    else:
        raise ValueError(f"memory: {type(memory).__name__}.__dlpack__() gave no array")
    read_only = bool(flags & _DLPACK_READ_ONLY)
    if writable and read_only:
        raise _read_only()
    shape = tuple(tensor.shape[axis] for axis in range(tensor.ndim))
    strides = tuple(tensor.strides[axis] for axis in range(tensor.ndim)) if tensor.strides else None
    # Elements smaller than a byte lie side by side unless they are said to be padded.
    bits = tensor.bits * tensor.lanes
    if flags & _DLPACK_PADDED:
        bits = -(-bits // 8) * 8
    size = -(-_check_contiguous(shape, strides, 1) * bits // 8)
    # Host memory that a GPU's runtime has pinned says which GPU that was.
    device = 0 if tensor.device_type in _HOST_KINDS else int(tensor.device_id)
    return _Tensor(device, int(tensor.data or 0) + int(tensor.byte_offset), size, read_only, capsule)
