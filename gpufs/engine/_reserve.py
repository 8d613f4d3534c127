"""Memory set aside for this interpreter, for when the system gives no more."""

import ctypes
import os
import sys
from typing import Final

from gpufs.engine._binding import check
from gpufs.engine._native import ffi, lib

# Called as a function of the interpreter's own: by cffi it would use what it is to make room for.
_prepare: Final = ctypes.PYFUNCTYPE(ctypes.c_int)(
    int(ffi.cast("uintptr_t", ffi.addressof(lib, "gpufs_prepare_thread")))
)
# PYMEM_DOMAIN_RAW of CPython's C interface: what the others ask when they have nothing left themselves.
_RAW: Final = 0


def prepare_thread() -> bool:
    """Makes sure that this thread's calls of the engine find room for its own variables. False without memory.

    For threads that may make their first call while memory is lacking: the C library would end the process there.
    """
    return bool(_prepare() == 0)


def set_memory_aside() -> bool:
    """Puts some MiB behind the interpreter's own allocators, which take them once the C library has nothing to give.

    For a process that must not end for a MemoryError: what it has begun can go on, and a mount begins nothing that
    keeps memory until there is some again. Call it once, while no other thread runs. False where the interpreter was
    started with allocators that do not rest on malloc(3) (PYTHONMALLOC, ``-X dev``, a debug
    build); EngineError ENOMEM without memory.
    """
    debugging = bool(os.environ.get("PYTHONMALLOC")) or sys.flags.dev_mode or hasattr(sys, "gettotalrefcount")
    if debugging or sys.implementation.name != "cpython":
        return False
    prepare_thread()
    memory, pages = ffi.new("gpufs_allocator *"), ffi.new("gpufs_page_allocator *")
    memory_at, pages_at = (ctypes.c_void_p(int(ffi.cast("uintptr_t", at))) for at in (memory, pages))
    python = ctypes.pythonapi
    python.PyMem_GetAllocator(_RAW, memory_at)
    python.PyObject_GetArenaAllocator(pages_at)
    check(lib.gpufs_reserve_behind(memory, pages))
    python.PyMem_SetAllocator(_RAW, memory_at)
    python.PyObject_SetArenaAllocator(pages_at)
    return True
