"""Memory that another program leases, mapped into this one; and pools, which divide its addresses among allocations."""

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from gpufs.engine import _native
from gpufs.engine._arguments import text, unsigned
from gpufs.engine._binding import HANDLE, Handle, check, result_of
from gpufs.engine._native import ffi, lib

# The functions for torch.cuda.memory.CUDAPluggableAllocator: library, allocation, release.
TORCH_ALLOCATOR: Final = (str(_native.__file__), "gpufs_torch_allocate", "gpufs_torch_free")
Bytes: TypeAlias = bytes  # whose name is also a property's


@dataclass(frozen=True, slots=True)
class SharedPiece:
    """One piece of a buffer's memory, as a descriptor for another program.

    Attributes
    ----------
    offset, bytes
        The part of the buffer's memory; its first byte lies at :attr:`Lease.placement`.
    fd
        The descriptor, close-on-exec. It belongs to whoever has the piece: pass it to :meth:`Mapping.add`, or close it.
    """

    offset: int
    bytes: int
    fd: int


class Mapping(Handle):
    """Memory that another program leases, mapped into this one. No engine is needed.

    It is unmapped by close(), ``with`` and garbage collection. What is mapped when the interpreter exits stays mapped
    until the process has ended.

    Parameters
    ----------
    driver
        "host", "cuda" or "hip": that of the program that leases the memory.
    pci_address
        The device's :attr:`DeviceInfo.pci_address`. Devices have other numbers where CUDA_VISIBLE_DEVICES is set.
    writable
        Whether this program may write to the memory.
    private
        Whether what it writes stays in this program. Host memory is then copied page by page as it is written to.
        Memory of a GPU must be a copy for this program already.
    reserve
        Bytes of addresses, for the memory and what it grows by later.

    Raises
    ------
    EngineError
        ENODEV: this process does not see the device. ENOMEM: no addresses. EOPNOTSUPP: the driver cannot map memory of
        other programs.

    See Also
    --------
    Lease : has an example.
    """

    __slots__ = ()

    def __init__(self, driver: str, pci_address: str, *, writable: bool, private: bool = False, reserve: int) -> None:
        flags = (lib.GPUFS_LEASE_WRITE if writable else 0) | (lib.GPUFS_MAPPING_PRIVATE if private else 0)
        names = text("driver", driver), text("pci_address", pci_address)
        handle = result_of(HANDLE, lib.gpufs_mapping_open, *names, flags, unsigned("reserve", reserve))
        # Not at the exit: daemon threads, finalizers and exit handlers may still use the memory.
        self._own(handle, at_exit=False)

    def add(self, pieces: Iterable[SharedPiece]) -> None:
        """Map pieces after what is mapped. Their descriptors are closed, also after a failure.

        Parameters
        ----------
        pieces
            In order; the first begins at :attr:`bytes`.

        Raises
        ------
        EngineError
            EFBIG: they do not fit into the reserved addresses. EINVAL: they are not the next ones. EACCES: the
            descriptors do not allow writing.
        """
        listed = list(pieces)
        memory = ffi.new("gpufs_shared_piece[]", [(piece.offset, piece.bytes, piece.fd, 0) for piece in listed])
        check(lib.gpufs_mapping_add(self._handle, memory, len(listed)))

    def clear(self) -> None:
        """Unmap all pieces and keep the addresses, at which :meth:`add` can map others.

        Waits for all work that this program has queued on the device. Whatever uses the memory until then fails as the
        driver has it: on the host with SIGSEGV.
        """
        check(lib.gpufs_mapping_clear(self._handle))

    def read(self, offset: int, size: int) -> "Bytes":
        """Copy mapped memory to the host, after all work that this program has queued on the device.

        Parameters
        ----------
        offset, size
            The part of the mapping, in bytes.

        Returns
        -------
        bytes
            Its contents.

        Raises
        ------
        EngineError
            EINVAL: not all of it is mapped.
        """
        content = ffi.new("char[]", unsigned("size", size))
        check(lib.gpufs_mapping_read(self._handle, unsigned("offset", offset), content, size))
        read: Bytes = ffi.buffer(content)[:]
        return read

    def explain_accesses(self, reason: str) -> None:
        """Have a line printed when an access of this program to the mapping, which is host memory, is not allowed.

        The access is SIGSEGV, which does what it would do otherwise, after the line.

        Parameters
        ----------
        reason
            The line, for standard error; "" for none from now on.
        """
        check(lib.gpufs_mapping_explain_accesses(self._handle, text("reason", reason)))

    def _info(self) -> Any:
        return result_of("gpufs_mapping_info *", lib.gpufs_mapping_info_get, self._handle)

    @property
    def address(self) -> int:
        """The device address of the first byte."""
        return int(self._info().address)

    @property
    def bytes(self) -> int:
        """The mapped bytes, whole pieces: as a rule more than the file has."""
        return int(self._info().bytes)

    @property
    def capacity(self) -> int:
        """The reserved bytes."""
        return int(self._info().capacity)

    @property
    def device(self) -> int:
        """The number of the device in this process, as CUDA or HIP counts."""
        return int(self._info().device)


# ---- pools of addresses ----


class _EnteredPools(threading.local):
    """The pools that the calling thread has entered, the innermost last."""

    def __init__(self) -> None:
        self.pools: list[AddressPool] = []


_entered: Final = _EnteredPools()


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
        self._own(result_of(HANDLE, lib.gpufs_pool_open, address, size))

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
        """Return the bytes that are allocated, and those of the largest free range."""
        used, largest = ffi.new("uint64_t *"), ffi.new("uint64_t *")
        check(lib.gpufs_pool_usage(self._handle, used, largest))
        return int(used[0]), int(largest[0])
