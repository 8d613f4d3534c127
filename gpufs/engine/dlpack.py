"""DLPack capsules of memory that a Python object owns; those of memory that a native object owns are in _dlpack.py."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from gpufs.engine._native import ffi, lib

CPU: Final = 1  # kinds of devices
CUDA: Final = 2
ROCM: Final = 10
_READ_ONLY: Final = 1


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


# Called with the interpreter's lock, since it takes and returns Python objects.
_capsule: Final = ctypes.PYFUNCTYPE(
    ctypes.py_object,
    ctypes.py_object,
    ctypes.c_int,
    ctypes.c_uint64,
    ctypes.POINTER(_Tensor),
    ctypes.POINTER(ctypes.c_int64),
)(int(ffi.cast("uintptr_t", lib.gpufs_dlpack_capsule_address())))


@dataclass(frozen=True, slots=True)
class DLPackType:
    """The type of an element: its kind in DLPack's numbers, and its bits."""

    code: int
    bits: int


def export(
    owner: object,
    *,
    address: int,
    device: tuple[int, int],
    element: DLPackType,
    shape: Sequence[int],
    strides: Sequence[int],
    read_only: bool,
    max_version: tuple[int, int] | None,
) -> Any:
    """Make a capsule of an array.

    Parameters
    ----------
    owner
        Kept alive until the capsule's consumer releases the memory.
    address
        Where the first element is.
    device
        The kind of device and its number in this process.
    element
        The type of an element.
    shape, strides
        The extents, and the distances in elements.
    read_only
        Marked in a versioned capsule. Capsules from before there were versions cannot mark it.
    max_version
        The newest version that the consumer understands. None, or one before 1.0: a capsule without a version.

    Returns
    -------
    capsule
        A new capsule for one consumer.
    """
    versioned = max_version is not None and max_version[0] >= 1
    extents = (ctypes.c_int64 * (2 * len(shape)))(*shape, *strides)
    tensor = _Tensor(address, *device, len(shape), element.code, element.bits, 1)
    return _capsule(owner, versioned, _READ_ONLY if read_only else 0, tensor, extents)
