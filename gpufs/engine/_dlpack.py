"""Exchange of memory with other libraries by DLPack, https://dmlc.github.io/dlpack."""

import ctypes
from collections.abc import Sequence
from typing import Any, Final

from gpufs.engine._binding import Handle, check, new_reference, python_function
from gpufs.engine._native import ffi, lib

# DLPack's kinds of devices, by driver; and the driver of each kind. "host": also memory that is pinned for a GPU.
KIND_OF_DRIVER: Final = {"host": 1, "cuda": 2, "hip": 10}
DRIVER_OF_KIND: Final = {1: "host", 2: "cuda", 3: "host", 10: "hip", 11: "host", 13: "cuda"}
# Streams that a consumer may not name, by the array API standard: 0 is ambiguous in CUDA, 1 and 2 exist only there.
_NO_STREAMS: Final[dict[str, tuple[int, ...]]] = {"cuda": (0,), "hip": (1, 2)}
# A capsule refers to its name, so they are constants.
_VERSIONED_NAME: Final = ctypes.c_char_p(b"dltensor_versioned")
_NAME: Final = ctypes.c_char_p(b"dltensor")
_new_capsule: Final = python_function(
    "PyCapsule_New", ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
)
_DROP: Final = ffi.cast("void(*)(void *)", lib.gpufs_drop_object_address())


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
        if driver == "host" or stream < -1 or stream in _NO_STREAMS[driver]:
            raise ValueError(f"stream: {stream} is not a stream of the {driver} driver that DLPack knows")
    kind = KIND_OF_DRIVER[driver]
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
    name = _VERSIONED_NAME if versioned else _NAME
    return _new_capsule(int(ffi.cast("uintptr_t", managed[0])), name, lib.gpufs_capsule_destructor())
