"""Arrays of other libraries as address and size, and memory of the engine as DLPack capsules for them.

DLPack: https://dmlc.github.io/dlpack.
"""

import ctypes
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

from gpufs.drivers import DRIVER_OF_DLPACK, DRIVERS, HOST
from gpufs.engine._arguments import has_references, view_of
from gpufs.engine._binding import Handle, check, new_reference, python_function
from gpufs.engine._engine import Engine
from gpufs.engine._native import ffi, lib

if TYPE_CHECKING:  # numpy takes 100 ms to import
    from typing import TypeAlias

    from numpy.typing import NDArray
    from typing_extensions import Buffer as PythonBuffer

    # Before Python 3.12 numpy does not declare that its arrays have the buffer protocol.
    MemoryBuffer: TypeAlias = PythonBuffer | NDArray[Any]

_DLPACK_VERSION: Final = (1, 1)  # the newest whose capsules are understood; every 1.x is laid out alike
_DLPACK_READ_ONLY: Final = 1
_DLPACK_PADDED: Final = 4
# A capsule refers to its name, so these are constants.
_VERSIONED_NAME: Final = ctypes.c_char_p(b"dltensor_versioned")
_LEGACY_NAME: Final = ctypes.c_char_p(b"dltensor")
_pointer_of: Final = python_function("PyCapsule_GetPointer", ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
_is_capsule: Final = python_function("PyCapsule_IsValid", ctypes.c_int, ctypes.py_object, ctypes.c_char_p)
_new_capsule: Final = python_function(
    "PyCapsule_New", ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
)
_DROP: Final = ffi.cast("void(*)(void *)", lib.gpufs_drop_object_address())
_new_bytes_capsule: Final[Callable[..., Any]] = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.py_object, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_int64
)(lib.gpufs_bytes_capsule_address())
_CUDA_INTERFACE: Final = "__cuda_array_interface__"
# "<f4", "|b1", "<M8[ns]": byte order, kind, bytes of an element (for "U": characters of 4 bytes).
_TYPE: Final = re.compile(r"[<>|=]?([A-Za-z])(\d+)(?:\[.*\])?")
_CHARACTER_BYTES: Final = 4


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


@dataclass(frozen=True, slots=True)
class ArrayMemory:
    """Contiguous memory of an object."""

    # Where the memory begins, and its size.
    address: int
    bytes: int
    read_only: bool  # whether it may not be written
    keep: object  # what keeps the memory allocated
    on_host: bool | None = True  # whether it is host memory; None if that is not known
    device: int | None = 0  # the number of its device as the vendor counts; None if the object does not name it

    def release(self) -> None:
        """End the use of an object with the buffer protocol."""
        if isinstance(self.keep, ffi.CData):
            ffi.release(self.keep)


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


# ---- arrays of other libraries ----


def device_range(engine: Engine, memory: object, *, writable: bool) -> tuple[DeviceRange, object]:
    """Find the device memory of an array, or a DeviceRange, and what must be kept alive while it is used.

    For the host driver ``memory`` is a contiguous object with the buffer protocol, or an array in host memory with
    DLPack; for GPUs an array with ``__cuda_array_interface__`` (CUDA) or DLPack. The program's own work on it must be
    over. TypeError for another object; ValueError for an array that is not contiguous, is read-only although
    ``writable``, or is on another kind of device.
    """
    if isinstance(memory, DeviceRange):
        return memory, None
    if engine.driver == HOST:
        try:
            array = host_memory(memory, writable=writable)
        except BufferError as error:
            raise ValueError(str(error)) from error
    elif engine.driver == "cuda" and isinstance(memory, SupportsCudaArrayInterface):
        array = _read_interface(memory, _CUDA_INTERFACE, writable=writable)
        if array.device is None and len(engine.devices) > 1:
            raise ValueError("memory: the array does not name its device: use a DeviceRange")
    elif isinstance(memory, SupportsDLPack):
        if _dlpack_driver(memory) != engine.driver:
            raise ValueError(f"memory: the array is not on a device of the {engine.driver} driver")
        array = _read_dlpack(memory, writable=writable)
    else:
        raise TypeError(f"memory: {type(memory).__name__} is neither a Buffer nor an array on a device")
    return DeviceRange(array.device or 0, array.address, array.bytes), array.keep


def host_memory(memory: Any, *, writable: bool) -> ArrayMemory:
    """Find the host memory of a contiguous object with the buffer protocol, or of an array in host memory with DLPack.

    TypeError for other objects; ValueError or BufferError for an array that is not contiguous, is read-only although
    ``writable``, or is on a device.
    """
    try:
        view = view_of(memory, writable=writable)
    except TypeError:
        if not isinstance(memory, SupportsDLPack) or has_references(memory):
            raise
        if _dlpack_driver(memory) != HOST:
            raise ValueError("memory: the array is not in host memory") from None
        return _read_dlpack(memory, writable=writable)
    return ArrayMemory(int(ffi.cast("uintptr_t", view)), len(view), not writable and not _is_writable(memory), view)


def array_memory(array: Any) -> ArrayMemory:
    """Find the memory of an array that has one of the array interfaces or DLPack, on any device.

    TypeError for other objects; ValueError for an array that is not contiguous or is not understood.
    """
    for name in (_CUDA_INTERFACE, "__array_interface__"):
        if getattr(array, name, None) is not None:
            return _read_interface(array, name, writable=False)
    if not isinstance(array, SupportsDLPack):
        raise TypeError(
            f"memory: {type(array).__name__} is not an array: it has neither {_CUDA_INTERFACE} nor "
            "__array_interface__ nor __dlpack__"
        )
    if _dlpack_driver(array) is None:
        raise ValueError("memory: the array is on a device that no driver serves")
    return _read_dlpack(array, writable=False)


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


def _read_interface(array: object, name: str, *, writable: bool) -> ArrayMemory:
    interface = getattr(array, name)
    try:
        address, read_only = interface["data"]
        kind, item = _TYPE.fullmatch(str(interface["typestr"])).groups()  # type: ignore[union-attr]
        shape, strides = tuple(map(index, interface["shape"])), interface.get("strides")
        strides = None if strides is None else tuple(map(index, strides))
        if min(shape, default=0) < 0 or (strides is not None and len(strides) != len(shape)):
            raise ValueError(f"shape {shape}, strides {strides}")
        mask = interface.get("mask")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"memory: the array's {name} is not understood: {error!r}") from error
    if kind == "O":
        raise TypeError("memory: an array of Python objects contains references, not data")
    if mask is not None:
        raise ValueError("memory: a masked array has holes that its bytes do not show: fill it first")
    if writable and read_only:
        raise _read_only()
    item_bytes = int(item) * (_CHARACTER_BYTES if kind == "U" else 1)
    size = _check_contiguous(shape, strides, item_bytes) * item_bytes
    # The interface does not name the device. Some libraries have an attribute for it.
    device = getattr(array, "device", None)
    number = getattr(device, "index", getattr(device, "id", None))
    on_host = name != _CUDA_INTERFACE
    return ArrayMemory(
        int(address or 0), size, bool(read_only), array, on_host, None if on_host or number is None else int(number)
    )


def _is_writable(memory: Any) -> bool:
    # memoryview() would show it, but does not support all kinds of data (numpy's dates).
    try:
        ffi.release(ffi.from_buffer(memory, require_writable=True))
    except (BufferError, TypeError, ValueError):
        return False
    return True


def _dlpack_driver(array: SupportsDLPack) -> str | None:
    """Return the driver whose memory an array is in; None for devices that no driver serves."""
    try:
        kind, _ = array.__dlpack_device__()
        return DRIVER_OF_DLPACK.get(int(kind))
    except (TypeError, ValueError) as error:
        raise ValueError(f"memory: {type(array).__name__}.__dlpack_device__() is not understood: {error}") from error


def _read_dlpack(array: SupportsDLPack, *, writable: bool) -> ArrayMemory:
    """Return the memory of an array, by a capsule of version 1 or of before versions.

    The latter cannot mark what is read-only. The capsule is not consumed: it frees what it holds when it is collected,
    after the transfer.
    """
    export: Any = array.__dlpack__
    try:
        capsule = export(max_version=_DLPACK_VERSION)
    except TypeError:  # from before there were versions
        capsule = export()
    flags = 0
    if _is_capsule(capsule, _VERSIONED_NAME):
        versioned = ffi.cast("gpufs_dl_versioned *", _pointer_of(capsule, _VERSIONED_NAME))
        if versioned.major != _DLPACK_VERSION[0]:
            raise ValueError(f"memory: the array has DLPack of version {versioned.major}, which is not understood")
        flags, tensor = versioned.flags, versioned.tensor
    elif _is_capsule(capsule, _LEGACY_NAME):
        tensor = ffi.cast("gpufs_dl_legacy *", _pointer_of(capsule, _LEGACY_NAME)).tensor
    else:
        raise ValueError(f"memory: {type(array).__name__}.__dlpack__() did not return an array")
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
    address = int(ffi.cast("uintptr_t", tensor.data)) + tensor.byte_offset
    on_host = DRIVER_OF_DLPACK.get(tensor.device_type) == HOST
    # The device of pinned host memory is the GPU that it was pinned for.
    device = 0 if on_host else int(tensor.device_id)
    # The array as well: it may own the memory without its capsule.
    return ArrayMemory(address, size, read_only, (array, capsule), on_host, device)


# ---- memory of the engine for other libraries ----


def dlpack_capsule(
    owner: object,
    driver: str,
    device: int,
    address: int,
    shape: Sequence[int],
    *,
    strides: Sequence[int] | None = None,
    code: int = 1,
    bits: int = 8,
    read_only: bool = False,
    stream: int | None = None,
    max_version: tuple[int, int] | None = None,
    dl_device: tuple[Any, Any] | None = None,
    copy: bool | None = None,
) -> Any:
    """Return the capsule for ``__dlpack__()`` of an array in shared memory.

    Copies by the engine are complete when they return, so the consumer's stream never has to wait for anything.

    Parameters
    ----------
    owner
        What the memory belongs to, until the consumer releases it: a :class:`Lease` or a :class:`Mapping`, whose memory
        stays even if it is closed, or any other object, which is kept alive.
    driver, device
        Where it is; the number as CUDA or HIP counts.
    address, shape
        The first byte, and the elements in each dimension.
    strides
        The distances in elements. None: contiguous in C order.
    code, bits
        DLPack's type: by default uint8.
    read_only
        Whether the consumer may not write. DLPack before 1.0 cannot say so; the memory is protected all the same.
    stream, max_version, dl_device, copy
        What the consumer has passed to ``__dlpack__()``.

    Returns
    -------
    capsule
        What ``from_dlpack()`` of a library takes, once.

    Raises
    ------
    BufferError
        The consumer wants a copy, or the array on another device.
    ValueError, TypeError
        The stream is none of the driver's.
    """
    if stream is not None:
        if not isinstance(stream, int):
            raise TypeError(f"stream: {stream!r} is not a stream's number")
        if driver == HOST or stream < -1 or stream in DRIVERS[driver].reserved_streams:
            raise ValueError(f"stream: {stream} is not a stream of the {driver} driver that DLPack knows")
    kind = DRIVERS[driver].dlpack
    if dl_device is not None and (int(dl_device[0]), int(dl_device[1])) != (kind, device):
        raise BufferError(f"the memory is on device {device} of the {driver} driver: copy it there first")
    if copy:
        raise BufferError("the memory is shared in place: make the copy from the resulting array")
    versioned = max_version is not None and max_version[0] >= 1
    extents = ffi.new("int64_t[]", shape)
    distances = ffi.NULL if strides is None else ffi.new("int64_t[]", strides)
    data = ffi.cast("void *", address)
    tensor = ffi.new("gpufs_dl_tensor *", (data, kind, device, len(shape), code, bits, 1, extents, distances, 0))
    managed = ffi.new("void **")
    if isinstance(owner, Handle):
        check(lib.gpufs_tensor_export(owner._handle, ffi.NULL, ffi.NULL, tensor, versioned, read_only, managed))
    else:
        check(lib.gpufs_tensor_export(0, new_reference(owner), _DROP, tensor, versioned, read_only, managed))
    name = _VERSIONED_NAME if versioned else _LEGACY_NAME
    return _new_capsule(int(ffi.cast("uintptr_t", managed[0])), name, lib.gpufs_capsule_destructor())


def bytes_capsule(owner: object, driver: str, device: int, address: int, count: int) -> Any:
    """Return a DLPack capsule of bytes: as :func:`dlpack_capsule`, in less time, since a file has thousands of tensors.

    Parameters
    ----------
    owner
        An object that keeps the memory, until the consumer releases it.
    driver, device
        As for :func:`dlpack_capsule`.
    address, count
        The first byte, and the number of bytes.

    Returns
    -------
    capsule
        What ``from_dlpack()`` of a library takes, once.
    """
    return _new_bytes_capsule(owner, address, DRIVERS[driver].dlpack, device, count)
