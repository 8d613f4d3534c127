"""libcuda from Python by ctypes, as far as the measurements need it; independent of gpufs.

Every call is ``cuda("cuName", ...)`` and raises :class:`CudaError` with the driver's code; integers are passed as 64
bits.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

MIB = 1 << 20
GIB = 1 << 30


class Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class Properties(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("windows", ctypes.c_void_p),
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    ]


class Access(ctypes.Structure):
    _fields_ = [("location", Location), ("flags", ctypes.c_int)]


class CudaError(Exception):
    """A call failed; ``code`` is the driver's."""

    def __init__(self, name: str, code: int) -> None:
        super().__init__(f"{name}: {code}")
        self.code = code


class Cuda:
    """libcuda, with every argument given as a ctypes value or a 64-bit integer."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")
        self("cuInit", 0)
        self.context = ctypes.c_void_p()
        self("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), 0)
        self.bind()
        self.properties = Properties(1, 1, Location(1, 0), None, 0, 0, 0)
        self.access = Access(Location(1, 0), 3)

    def __call__(self, name: str, *arguments: Any) -> None:
        code = self.try_call(name, *arguments)
        if code != 0:
            raise CudaError(name, code)

    def try_call(self, name: str, *arguments: Any) -> int:
        wide = [ctypes.c_uint64(a) if isinstance(a, int) else a for a in arguments]
        return int(getattr(self.library, name)(*wide))

    def bind(self) -> None:
        self("cuCtxSetCurrent", self.context)

    def name(self) -> str:
        """The first device's name."""
        text = ctypes.create_string_buffer(128)
        self("cuDeviceGetName", text, len(text), 0)
        return text.value.decode(errors="replace")

    def version(self) -> int:
        """The driver's version of the interface, 13000 for 13.0."""
        value = ctypes.c_int()
        self("cuDriverGetVersion", ctypes.byref(value))
        return value.value

    def attribute(self, number: int) -> int:
        value = ctypes.c_int()
        self("cuDeviceGetAttribute", ctypes.byref(value), number, 0)
        return value.value

    def reserve(self, size: int) -> int:
        address = ctypes.c_uint64()
        self("cuMemAddressReserve", ctypes.byref(address), size, 0, 0, 0)
        return address.value

    def create(self, size: int) -> int:
        handle = ctypes.c_uint64()
        self("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(self.properties), 0)
        return handle.value

    def map(self, address: int, size: int, handle: int) -> None:
        self("cuMemMap", address, size, 0, handle, 0)

    def allow(self, address: int, size: int) -> None:
        self("cuMemSetAccess", address, size, ctypes.byref(self.access), 1)

    def stream(self) -> ctypes.c_void_p:
        stream = ctypes.c_void_p()
        self("cuStreamCreate", ctypes.byref(stream), 1)
        return stream

    def event(self, flags: int) -> ctypes.c_void_p:
        event = ctypes.c_void_p()
        self("cuEventCreate", ctypes.byref(event), flags)
        return event

    def pinned(self, size: int) -> tuple[mmap.mmap, int]:
        memory = mmap.mmap(-1, size)
        memory[:: mmap.PAGESIZE] = b"x" * (size // mmap.PAGESIZE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self("cuMemHostRegister_v2", ctypes.c_void_p(address), size, 1)
        return memory, address
