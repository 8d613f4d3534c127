"""Memory that programs share: leases in the program that holds it, mappings in those that use it."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from gpufs.engine._arguments import instance, text, unsigned
from gpufs.engine._binding import Handle, check
from gpufs.engine._native import ffi, lib

if TYPE_CHECKING:
    from gpufs.engine._buffer import Buffer

_AT_ONCE: Final = 256  # pieces of one call


@dataclass(frozen=True, slots=True)
class SharedPiece:
    """One piece of a buffer's memory, as a descriptor for another program.

    Attributes
    ----------
    offset, bytes
        The part of the buffer.
    fd
        The descriptor, close-on-exec. It belongs to whoever has the piece: pass it to :meth:`Mapping.add`, or close it.
    """

    offset: int
    bytes: int
    fd: int


class Lease(Handle):
    """Keeps the memory of a buffer where it is, for another program that maps it.

    While the lease is open, the first ``bytes`` bytes of the buffer cannot be cut off or punched (EBUSY); the buffer
    can grow. The memory exists until the last lease is closed, also if the buffer or its file is closed or removed.

    Parameters
    ----------
    buffer
        The buffer.
    writable
        Whether those who map the memory may write to it. The descriptors of GPUs give access for writing in either
        case. Holes of the buffer get memory.
    label
        What messages call the holder, for example "PID 42 (python)".

    Raises
    ------
    EngineError
        ENODATA: the buffer has holes, and the lease is not for writing. ENOSPC: no memory for the holes. EOPNOTSUPP:
        the device cannot share memory; the text says why.

    Examples
    --------
    >>> with Engine("host", devices=1, memory_bytes=64 << 20) as engine, Buffer(engine) as buffer:
    ...     buffer.write(0, b"weights")
    ...     with Lease(buffer, writable=True) as lease, Mapping("host", "", writable=True, reserve=1 << 21) as mapping:
    ...         mapping.add(lease.pieces())
    ...         mapping.bytes
    7
    2097152
    """

    __slots__ = ()

    def __init__(self, buffer: "Buffer", *, writable: bool = False, label: str = "") -> None:
        self._open(buffer, lib.GPUFS_LEASE_WRITE if writable else 0, label)

    @classmethod
    def _local(cls, buffer: "Buffer") -> "Lease":
        """Make a lease for use of the address in this process."""
        lease = cls.__new__(cls)
        lease._open(buffer, lib.GPUFS_LEASE_WRITE | lib.GPUFS_LEASE_LOCAL, "an array of this process")
        return lease

    def _open(self, buffer: "Buffer", flags: int, label: str) -> None:
        handle = ffi.new("gpufs_handle *")
        instance("buffer", Handle, buffer)
        check(lib.gpufs_lease_open(buffer._handle, flags, text("label", label), handle))
        self._own(handle[0], lib.gpufs_lease_close)

    def _info(self) -> Any:
        info = ffi.new("gpufs_lease_info *")
        check(lib.gpufs_lease_info_get(self._handle, info))
        return info

    @property
    def bytes(self) -> int:
        """The bytes of the buffer that are leased: its size when the lease began, or at the last refresh()."""
        return int(self._info().bytes)

    @property
    def address(self) -> int:
        """The device address of the first byte in this process, valid until refresh() or close(); 0 if empty."""
        return int(self._info().address)

    def refresh(self) -> None:
        """Extend the lease to the buffer's size now. Fails as the constructor does; the lease is then as before."""
        check(lib.gpufs_lease_refresh(self._handle))

    def pieces(self, start: int = 0) -> list[SharedPiece]:
        """Return descriptors of the memory, in order and without gaps.

        Parameters
        ----------
        start
            0, or the end of a piece that was returned before: to get what refresh() has added.

        Returns
        -------
        list of SharedPiece
            Their descriptors belong to the caller. The last piece may reach beyond the leased bytes.
        """
        pieces: list[SharedPiece] = []
        memory = ffi.new("gpufs_shared_piece[]", _AT_ONCE)
        count = ffi.new("uint64_t *")
        try:
            while True:
                check(
                    lib.gpufs_lease_pieces(self._handle, unsigned("start", start), memory, _AT_ONCE, count),
                )
                found = [SharedPiece(piece.offset, piece.bytes, piece.fd) for piece in memory[0 : count[0]]]
                pieces += found
                if len(found) < _AT_ONCE:
                    return pieces
                start = found[-1].offset + found[-1].bytes
        except BaseException:
            for piece in pieces:
                os.close(piece.fd)
            raise


class Mapping(Handle):
    """Memory that another program leases, mapped into this one. No engine is needed.

    Parameters
    ----------
    driver
        "host", "cuda" or "hip": that of the program that leases the memory.
    pci_address
        The device's :attr:`DeviceInfo.pci_address`. Devices have other numbers where CUDA_VISIBLE_DEVICES is set.
    writable
        Whether this program may write to the memory.
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

    def __init__(self, driver: str, pci_address: str, *, writable: bool, reserve: int) -> None:
        handle = ffi.new("gpufs_handle *")
        flags = lib.GPUFS_LEASE_WRITE if writable else 0
        names = text("driver", driver), text("pci_address", pci_address)
        check(lib.gpufs_mapping_open(*names, flags, unsigned("reserve", reserve), handle))
        self._own(handle[0], lib.gpufs_mapping_close)

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

    def _info(self) -> Any:
        info = ffi.new("gpufs_mapping_info *")
        check(lib.gpufs_mapping_info_get(self._handle, info))
        return info

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
