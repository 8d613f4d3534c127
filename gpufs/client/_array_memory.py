"""Finds the memory of an array: torch, CuPy, numba, JAX, numpy, or anything with one of their protocols."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any, Final

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


def _of_dlpack(array: Any) -> ArrayMemory:
    from gpufs.engine._arrays import read_dlpack
    from gpufs.engine._dlpack import DRIVER_OF_KIND

    kind = int(array.__dlpack_device__()[0])
    if kind not in DRIVER_OF_KIND:
        raise ValueError(f"memory of a device of DLPack's kind {kind} cannot be shared")
    _, found = read_dlpack(array, writable=False)
    # The capsule as well: the array's own memory may be another.
    return ArrayMemory(
        found.address, found.bytes, DRIVER_OF_KIND[kind] != "host", not found.read_only, (array, found.keep)
    )
