"""Device memory that a program already has: arrays of other libraries as address and size."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
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

    Host engines take every contiguous object that has the buffer protocol; GPU engines take what has
    ``__cuda_array_interface__`` (CUDA) or DLPack. The program's own work on the memory must be done: synchronise the
    stream that produces it first.

    ValueError for an array that is not contiguous, that is read-only where it is to be written, or that lies on
    another kind of device; TypeError for an object that is no array.
    """
    if isinstance(memory, DeviceRange):
        return memory, None
    if engine.driver == "host":
        return _from_buffer_protocol(memory, writable)
    if engine.driver == "cuda" and isinstance(memory, SupportsCudaArrayInterface):
        return _from_cuda_array(engine, memory, writable), memory
    if isinstance(memory, SupportsDLPack):
        return _from_dlpack(engine, memory)
    raise TypeError(f"{type(memory).__name__} is neither a Buffer nor an array on a device")


def _from_buffer_protocol(memory: Any, writable: bool) -> tuple[DeviceRange, object]:
    try:
        view = view_of(memory, writable=writable)
    except BufferError as error:
        raise ValueError(str(error)) from error
    return DeviceRange(0, int(ffi.cast("uintptr_t", view)), len(view)), view


def _check_contiguous(shape: tuple[int, ...], strides: tuple[int, ...] | None, item: int) -> int:
    """The bytes of an array that is contiguous in C's order; strides are in bytes."""
    expected = item
    if strides is not None and 0 not in shape:
        for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
            if extent != 1 and stride != expected:
                raise ValueError("the array is not contiguous")
            expected *= extent
    return item * math.prod(shape)


def _from_cuda_array(engine: Engine, memory: SupportsCudaArrayInterface, writable: bool) -> DeviceRange:
    interface = memory.__cuda_array_interface__
    try:
        address, read_only = interface["data"]
        item = int(str(interface["typestr"])[2:])
        shape, strides = tuple(interface["shape"]), interface.get("strides")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"the array's __cuda_array_interface__ is not understood: {error!r}") from error
    if writable and read_only:
        raise ValueError("the array is read-only")
    size = _check_contiguous(shape, strides, item)
    # The interface does not say on which device the memory is; libraries that know say so themselves.
    device = getattr(memory, "device", None)
    index = getattr(device, "index", getattr(device, "id", None))
    if index is None:
        if len(engine.devices) > 1:
            raise ValueError("the array does not say on which device it is: use a DeviceRange")
        index = 0
    return DeviceRange(int(index), int(address or 0), size)


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
        if int(memory.__dlpack_device__()[0]) not in _HOST_KINDS:
            raise ValueError("the array is not in host memory") from None
        found, capsule = _look_at_dlpack(memory)
        return HostRange(found.address, found.bytes, False, capsule)
    return HostRange(int(ffi.cast("uintptr_t", view)), len(view), not writable and not _is_writable(memory), view)


def _is_writable(memory: Any) -> bool:
    # memoryview() would tell, but does not know all kinds of data (numpy's dates).
    try:
        ffi.release(ffi.from_buffer(memory, require_writable=True))
    except (BufferError, TypeError, ValueError):
        return False
    return True


def _from_dlpack(engine: Engine, memory: SupportsDLPack) -> tuple[DeviceRange, object]:
    kind = int(memory.__dlpack_device__()[0])
    if _DRIVER_OF.get(kind) != engine.driver:
        raise ValueError(f"the array is not on a device of the {engine.driver} driver")
    return _look_at_dlpack(memory)


def _look_at_dlpack(memory: SupportsDLPack) -> tuple[DeviceRange, object]:
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

    # Only looked at, never taken over: the capsule frees what it holds when it goes, which is after the transfer.
    capsule = memory.__dlpack__()
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype = ctypes.c_void_p
    pointer_of.argtypes = (ctypes.py_object, ctypes.c_char_p)
    pointer = pointer_of(capsule, b"dltensor")
    tensor = Tensor.from_address(pointer)
    item = (tensor.bits * tensor.lanes + 7) // 8
    shape = tuple(tensor.shape[axis] for axis in range(tensor.ndim))
    strides = tuple(tensor.strides[axis] * item for axis in range(tensor.ndim)) if tensor.strides else None
    size = _check_contiguous(shape, strides, item)
    return DeviceRange(int(tensor.device_id), int(tensor.data or 0) + int(tensor.byte_offset), size), capsule
