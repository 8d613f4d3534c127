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
        self("cuCtxSetCurrent", self.context)

    def __call__(self, name: str, *arguments: Any) -> None:
        wide = [ctypes.c_uint64(a) if isinstance(a, int) else a for a in arguments]
        code = int(getattr(self.library, name)(*wide))
        if code != 0:
            raise CudaError(name, code)

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

    def stream(self) -> ctypes.c_void_p:
        stream = ctypes.c_void_p()
        self("cuStreamCreate", ctypes.byref(stream), 1)
        return stream

    def pinned(self, size: int) -> tuple[mmap.mmap, int]:
        memory = mmap.mmap(-1, size)
        memory[:: mmap.PAGESIZE] = b"x" * (size // mmap.PAGESIZE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self("cuMemHostRegister_v2", ctypes.c_void_p(address), size, 1)
        return memory, address
