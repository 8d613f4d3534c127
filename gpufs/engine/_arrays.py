"""Arrays of other libraries, as address and size."""

import ctypes
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

from gpufs.engine._arguments import has_references, view_of
from gpufs.engine._binding import python_function
from gpufs.engine._dlpack import DRIVER_OF_KIND
from gpufs.engine._engine import Engine
from gpufs.engine._native import ffi

if TYPE_CHECKING:  # numpy takes 100 ms to import
    from typing import TypeAlias

    from numpy.typing import NDArray
    from typing_extensions import Buffer as PythonBuffer

    # Before Python 3.12 numpy does not declare that its arrays have the buffer protocol.
    MemoryBuffer: TypeAlias = PythonBuffer | NDArray[Any]

_DLPACK_VERSION: Final = (1, 1)  # the newest whose capsules are understood; every 1.x is laid out alike
_DLPACK_READ_ONLY: Final = 1
_DLPACK_PADDED: Final = 4
_pointer_of: Final = python_function("PyCapsule_GetPointer", ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
_is_capsule: Final = python_function("PyCapsule_IsValid", ctypes.c_int, ctypes.py_object, ctypes.c_char_p)
# "<f4", "|b1", "<M8[ns]": byte order, kind, bytes of an element.
_TYPE: Final = re.compile(r"[<>|=]?([A-Za-z])(\d+)(?:\[.*\])?")


@dataclass(frozen=True, slots=True)
class DeviceRange:
    """Device memory that the program allocated itself.

    Attributes
    ----------
    device
        The index of the device in the engine.
    address, bytes
        Where the memory begins, and its size.
    """

    device: int
    address: int
    bytes: int


@runtime_checkable
class SupportsCudaArrayInterface(Protocol):
    """Arrays on a GPU of Numba, CuPy, PyTorch and others."""

    @property
    def __cuda_array_interface__(self) -> Mapping[str, Any]: ...


@runtime_checkable
class SupportsDLPack(Protocol):
    """Arrays of libraries that can exchange them with others."""

    def __dlpack__(self) -> Any: ...

    def __dlpack_device__(self) -> tuple[Any, Any]: ...


def device_range(engine: Engine, memory: object, *, writable: bool) -> tuple[DeviceRange, object]:
    """Find the device memory of an array.

    Parameters
    ----------
    engine
        Decides what kind of memory it must be. For the host driver: a contiguous object with the buffer protocol, or an
        array in host memory with DLPack. For GPUs: an array with ``__cuda_array_interface__`` (CUDA) or DLPack.
    memory
        The array, or a DeviceRange. The program's own work on it must be over: synchronise its stream first.
    writable
        Whether it must be writable.

    Returns
    -------
    DeviceRange, object
        The memory, and what must be kept alive while it is used.

    Raises
    ------
    ValueError
        The array is not contiguous, is read-only although ``writable``, or is on another kind of device.
    TypeError
        The object is not an array.
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
        if DRIVER_OF_KIND.get(_dlpack_kind(memory)) != engine.driver:
            raise ValueError(f"memory: the array is not on a device of the {engine.driver} driver")
        device, array = read_dlpack(memory, writable=writable)
        return DeviceRange(device, array.address, array.bytes), array.keep
    raise TypeError(f"memory: {type(memory).__name__} is neither a Buffer nor an array on a device")


def _check_contiguous(shape: tuple[int, ...], strides: tuple[int, ...] | None, item: int) -> int:
    """Return the number of elements of an array. ValueError unless it is contiguous in C order.

    ``item`` is the size of an element in the unit of the strides.
    """
    expected = item
    if strides is not None and 0 not in shape:
        for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
            if extent != 1 and stride != expected:
                raise ValueError("memory: the array is not contiguous in C order: copy it first (.contiguous())")
            expected *= extent
    return math.prod(shape)


def _read_only() -> ValueError:
    return ValueError("memory: the array is read-only: pass one that can be written")


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
        raise TypeError("memory: an array of Python objects contains references, not data")
    if mask is not None:
        raise ValueError("memory: a masked array has holes that its bytes do not show: fill it first")
    if writable and read_only:
        raise _read_only()
    size = _check_contiguous(shape, strides, int(item)) * int(item)
    # The interface does not name the device. Some libraries have an attribute for it.
    device = getattr(memory, "device", None)
    number = getattr(device, "index", getattr(device, "id", None))
    if number is None:
        if len(engine.devices) > 1:
            raise ValueError("memory: the array does not name its device: use a DeviceRange")
        number = 0
    return DeviceRange(int(number), int(address or 0), size)


@dataclass(frozen=True, slots=True)
class HostRange:
    """Memory of an object, usually of the host; ``keep`` keeps it alive."""

    address: int
    bytes: int
    read_only: bool
    keep: object

    def release(self) -> None:
        """End the use of an object with the buffer protocol."""
        if isinstance(self.keep, ffi.CData):
            ffi.release(self.keep)


def host_range(memory: Any, *, writable: bool) -> HostRange:
    """Find the host memory of a contiguous object with the buffer protocol, or of an array in host memory with DLPack.

    TypeError for other objects; ValueError or BufferError for an array that is not contiguous, is read-only although
    ``writable``, or is on a device.
    """
    try:
        view = view_of(memory, writable=writable)
    except TypeError:
        if not isinstance(memory, SupportsDLPack) or has_references(memory):
            raise
        if DRIVER_OF_KIND.get(_dlpack_kind(memory)) != "host":
            raise ValueError("memory: the array is not in host memory") from None
        return read_dlpack(memory, writable=writable)[1]
    return HostRange(int(ffi.cast("uintptr_t", view)), len(view), not writable and not _is_writable(memory), view)


def _is_writable(memory: Any) -> bool:
    # memoryview() would show it, but does not support all kinds of data (numpy's dates).
    try:
        ffi.release(ffi.from_buffer(memory, require_writable=True))
    except (BufferError, TypeError, ValueError):
        return False
    return True


def _dlpack_kind(memory: SupportsDLPack) -> int:
    try:
        kind, _ = memory.__dlpack_device__()
        return int(kind)
    except (TypeError, ValueError) as error:
        raise ValueError(f"memory: {type(memory).__name__}.__dlpack_device__() is not understood: {error}") from error


def read_dlpack(memory: SupportsDLPack, *, writable: bool) -> tuple[int, HostRange]:
    """Return the device and the memory of an array, by a capsule of version 1 or of before versions.

    The latter cannot mark what is read-only. The capsule is not consumed: it frees what it holds when it is collected,
    after the transfer.
    """
    give: Any = memory.__dlpack__
    try:
        capsule = give(max_version=_DLPACK_VERSION)
    except TypeError:  # from before there were versions
        capsule = give()
    flags = 0
    if _is_capsule(capsule, b"dltensor_versioned"):
        versioned = ffi.cast("gpufs_dl_versioned *", _pointer_of(capsule, b"dltensor_versioned"))
        if versioned.major != _DLPACK_VERSION[0]:
            raise ValueError(f"memory: the array has DLPack of version {versioned.major}, which is not understood")
        flags, tensor = versioned.flags, versioned.tensor
    elif _is_capsule(capsule, b"dltensor"):
        tensor = ffi.cast("gpufs_dl_legacy *", _pointer_of(capsule, b"dltensor")).tensor
    else:
        raise ValueError(f"memory: {type(memory).__name__}.__dlpack__() did not return an array")
    read_only = bool(flags & _DLPACK_READ_ONLY)
    if writable and read_only:
        raise _read_only()
    shape = tuple(ffi.unpack(tensor.shape, tensor.ndim))
    strides = tuple(ffi.unpack(tensor.strides, tensor.ndim)) if tensor.strides else None
    # Elements smaller than a byte are packed unless the flag says that they are padded.
    bits = tensor.bits * tensor.lanes
    if flags & _DLPACK_PADDED:
        bits = -(-bits // 8) * 8
    size = -(-_check_contiguous(shape, strides, 1) * bits // 8)
    # The device of pinned host memory is the GPU that it was pinned for.
    device = 0 if DRIVER_OF_KIND.get(tensor.device_type) == "host" else int(tensor.device_id)
    return device, HostRange(int(ffi.cast("uintptr_t", tensor.data)) + tensor.byte_offset, size, read_only, capsule)
