"""Pools of addresses: a program's allocator places its objects in memory that is attached."""

from __future__ import annotations

from typing import Final

from gpufs.engine import _native
from gpufs.engine._binding import Handle, check
from gpufs.engine._native import ffi, lib

# The functions for torch.cuda.memory.CUDAPluggableAllocator: library, allocation, release.
TORCH_ALLOCATOR: Final = (str(_native.__file__), "gpufs_torch_allocate", "gpufs_torch_free")


class AddressPool(Handle):
    """Divides a range of addresses among allocations. Touches no memory.

    Parameters
    ----------
    address
        Where the range begins.
    size
        Its bytes.
    """

    __slots__ = ()

    def __init__(self, address: int, size: int) -> None:
        handle = ffi.new("gpufs_handle *")
        check(lib.gpufs_pool_open(address, size, handle))
        self._own(handle[0])

    def enter(self) -> None:
        """The calling thread allocates from this pool from now on."""
        check(lib.gpufs_pool_enter(self._handle))

    @staticmethod
    def leave() -> None:
        """The calling thread allocates from no pool."""
        check(lib.gpufs_pool_enter(0))

    def usage(self) -> tuple[int, int]:
        """The bytes that are allocated, and those of the largest free range."""
        used, largest = ffi.new("uint64_t *"), ffi.new("uint64_t *")
        check(lib.gpufs_pool_usage(self._handle, used, largest))
        return int(used[0]), int(largest[0])
