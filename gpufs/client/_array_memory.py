"""Finds the memory of an array: torch, CuPy, numba, JAX, numpy, or anything with one of their protocols."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any, Final

# Kinds of devices in DLPack.
_CPU: Final = 1
_CUDA: Final = 2
_CUDA_HOST: Final = 3
_ROCM: Final = 10
_ROCM_HOST: Final = 11
_CUDA_MANAGED: Final = 13
_ON_DEVICE: Final = (_CUDA, _ROCM, _CUDA_MANAGED)
_NOT_CONTIGUOUS: Final = "the array is not contiguous: register a contiguous copy, or the array that it is a view of"


@dataclass(frozen=True)
class ArrayMemory:
    """Contiguous memory. ``on_device`` None: unknown. ``owner`` keeps it allocated."""

    address: int
    size: int
    on_device: bool | None
    writable: bool
    owner: object


def memory_of(array: Any, size: int | None) -> ArrayMemory:
    """The memory of an array, or of an address and a size in bytes. TypeError, ValueError."""
    if isinstance(array, int):
        if size is None:
            raise TypeError("an address needs a size in bytes")
        memory = ArrayMemory(array, size, None, True, None)
    elif size is not None:
        raise TypeError("size is for addresses: an array has its own")
    elif hasattr(array, "data_ptr") and hasattr(array, "is_contiguous"):
        memory = _of_tensor(array)
    else:
        memory = _of_protocol(array)
    if memory.size <= 0:
        raise ValueError("the array is empty")
    if memory.address <= 0:
        raise ValueError(f"{memory.address:#x} is not an address")
    return memory


def _of_tensor(tensor: Any) -> ArrayMemory:
    """A torch tensor of any element type, also one that requires a gradient."""
    if tensor.device.type not in ("cpu", "cuda"):
        raise ValueError(f"a tensor on the device {tensor.device} has no memory that can be shared")
    if not tensor.is_contiguous():
        raise ValueError(_NOT_CONTIGUOUS)
    return ArrayMemory(tensor.data_ptr(), tensor.nbytes, tensor.device.type == "cuda", True, tensor)


def _of_protocol(array: Any) -> ArrayMemory:
    for name in ("__cuda_array_interface__", "__array_interface__"):
        interface = getattr(array, name, None)
        if interface is not None:
            address, read_only = interface["data"]
            shape, item = tuple(interface["shape"]), _item_bytes(interface["typestr"])
            _check_contiguous(shape, interface.get("strides"), item)
            return ArrayMemory(address, prod(shape) * item, name[2:6] == "cuda", not read_only, array)
    if hasattr(array, "__dlpack__"):
        return _of_dlpack(array)
    raise TypeError(
        f"{type(array).__name__} is neither an address nor an array with __cuda_array_interface__, "
        "__array_interface__ or __dlpack__"
    )


def _item_bytes(typestr: str) -> int:
    count = re.match(r".(.)(\d+)", typestr)  # "<f4", "<M8[ns]"
    if count is None:
        raise TypeError(f"{typestr!r} is not the type of an element")
    return int(count[2]) * (4 if count[1] == "U" else 1)


def _check_contiguous(shape: tuple[int, ...], strides: Iterable[int] | None, item: int) -> None:
    """``strides`` in the unit of ``item``, None for a contiguous array."""
    expected = item
    for length, stride in zip(reversed(shape), reversed(tuple(strides or ())), strict=False):
        if length > 1 and stride != expected:
            raise ValueError(_NOT_CONTIGUOUS)
        expected *= length


class _DlTensor(ctypes.Structure):
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


def _of_dlpack(array: Any) -> ArrayMemory:
    """By an unversioned capsule, which every producer makes; unused, it frees itself."""
    capsule = array.__dlpack__()
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    tensor = ctypes.cast(get(capsule, b"dltensor"), ctypes.POINTER(_DlTensor)).contents
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = tensor.strides[: tensor.ndim] if tensor.strides else None
    _check_contiguous(shape, strides, 1)
    size = (prod(shape) * tensor.bits * tensor.lanes + 7) // 8
    if tensor.device_type not in (*_ON_DEVICE, _CPU, _CUDA_HOST, _ROCM_HOST):
        raise ValueError(f"memory of a device of DLPack's kind {tensor.device_type} cannot be shared")
    address = (tensor.data or 0) + tensor.byte_offset
    # The capsule as well: the array's own memory may be another.
    return ArrayMemory(address, size, tensor.device_type in _ON_DEVICE, True, (array, capsule))
