"""Pools of addresses: a program's allocator places its objects in memory that is attached."""

from __future__ import annotations

import threading
from typing import Final

from gpufs.engine import _native
from gpufs.engine._binding import Handle, check
from gpufs.engine._native import ffi, lib

# The functions for torch.cuda.memory.CUDAPluggableAllocator: library, allocation, release.
TORCH_ALLOCATOR: Final = (str(_native.__file__), "gpufs_torch_allocate", "gpufs_torch_free")


class _Entered(threading.local):
    """The pools that the calling thread has entered, the innermost last."""

    def __init__(self) -> None:
        self.pools: list[AddressPool] = []


_entered: Final = _Entered()


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
        """Have the calling thread allocate from this pool until leave()."""
        check(lib.gpufs_pool_enter(self._handle))
        _entered.pools.append(self)

    @staticmethod
    def leave() -> None:
        """Have the calling thread allocate from the pool that it had entered before, or from none."""
        _entered.pools.pop()
        outer = _entered.pools[-1]._handle if _entered.pools else 0
        check(lib.gpufs_pool_enter(outer))

    def usage(self) -> tuple[int, int]:
        """The bytes that are allocated, and those of the largest free range."""
        used, largest = ffi.new("uint64_t *"), ffi.new("uint64_t *")
        check(lib.gpufs_pool_usage(self._handle, used, largest))
        return int(used[0]), int(largest[0])
