"""Buffers: memory of a device that grows and shrinks like a file; and leases, which share it with other programs."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

from gpufs.drivers import DRIVERS
from gpufs.engine._arguments import instance, signed, text, unsigned
from gpufs.engine._arrays import dlpack_capsule, host_memory
from gpufs.engine._binding import HANDLE, NUMBER, Handle, check, result_of
from gpufs.engine._engine import Engine
from gpufs.engine._mapping import SharedPiece
from gpufs.engine._native import ffi, lib

if TYPE_CHECKING:
    from typing import TypeAlias

    from numpy.typing import NDArray
    from typing_extensions import Buffer as PythonBuffer

    from gpufs.engine._arrays import DeviceRange, MemoryBuffer, SupportsCudaArrayInterface, SupportsDLPack

SEEK_DATA: Final[int] = lib.GPUFS_SEEK_DATA
SEEK_HOLE: Final[int] = lib.GPUFS_SEEK_HOLE
KEEP_SIZE: Final[int] = lib.GPUFS_KEEP_SIZE
PUNCH_HOLE: Final[int] = lib.GPUFS_PUNCH_HOLE
ZERO_RANGE: Final[int] = lib.GPUFS_ZERO_RANGE
_INFO: Final = ffi.typeof("gpufs_buffer_info *")
_NO_LIMIT: Final = (1 << 64) - 1
_AT_ONCE: Final = 256  # pieces of one call


@dataclass(frozen=True, slots=True)
class BufferInfo:
    """Facts about a buffer.

    Attributes
    ----------
    size
        Bytes from the start to the end, holes included.
    held_bytes
        Bytes of device memory that it takes.
    room_bytes
        Bytes that limits allow it to take in addition; None without a limit.
    device
        The index of its device.
    placement
        Where in its memory the first byte lies, in bytes; see :class:`Lease`.
    parked_bytes
        Bytes of the host tier that hold its contents; 0 if they are on the device.
    """

    size: int
    held_bytes: int
    room_bytes: int | None
    device: int
    placement: int
    parked_bytes: int


def _range(offset: int, size: int) -> tuple[int, int]:
    return unsigned("offset", offset), unsigned("size", size)


class Buffer(Handle):
    """An empty buffer on a device, which grows as it is written. It keeps its engine alive.

    Every method raises EngineError EBADF once the buffer or its engine is closed. One that needs memory raises ENOSPC
    if the device is full, and has no effect then; EFBIG beyond the largest size.

    Parameters
    ----------
    engine
        The engine.
    device
        The index of the device.

    Examples
    --------
    >>> with Engine("host", devices=1, memory_bytes=64 << 20) as engine, Buffer(engine) as buffer:
    ...     buffer.write(0, b"weights")
    ...     buffer.read_bytes(0, 3)
    7
    b'wei'

    Other libraries use the memory in place: ``torch.from_dlpack(buffer)`` and, on the host driver,
    ``numpy.asarray(buffer)`` are arrays of its bytes.
    """

    __slots__ = ("_views", "engine")
    # Addresses that were given out by __cuda_array_interface__: bytes, address, and what keeps them.
    _views: list[tuple[int, int, object]]

    def __init__(self, engine: Engine, device: int = 0) -> None:
        instance("engine", Engine, engine)
        handle = result_of(HANDLE, lib.gpufs_buffer_create, engine._handle, signed("device", device))
        self.engine = engine
        self._views = []
        self._own(handle)

    @classmethod
    def _adopt(cls, engine: Engine, handle: int) -> Self:
        """Make a buffer of a handle that the engine has returned."""
        buffer = cls.__new__(cls)
        buffer.engine = engine
        buffer._views = []
        buffer._own(handle)
        return buffer

    def __len__(self) -> int:
        return self.info.size

    def __repr__(self) -> str:
        if self.closed or self.engine.closed:
            return super().__repr__()
        info = self.info
        return f"<gpufs.engine.Buffer {info.size} bytes on {self.engine.driver}:{info.device}>"

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return DLPack's kind and number of the device."""
        return DRIVERS[self.engine.driver].dlpack, self.info.device

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[Any, Any] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Return the memory as a DLPack capsule: a writable array of uint8, with as many elements as bytes.

        Holes of the buffer get memory. While the consumer's array lives, it cannot be cut off or punched (EBUSY). Where
        device memory is plain (HIP), its size is also the largest that the buffer can have from then on.

        Parameters
        ----------
        stream, max_version, dl_device, copy
            As the array API standard says. A copy on request is refused: copy the resulting array.

        Raises
        ------
        BufferError, ValueError, TypeError
            The consumer asks for what is not possible.
        EngineError
            ENOSPC: no memory for the holes.
        """
        asked = {"stream": stream, "max_version": max_version, "dl_device": dl_device, "copy": copy}
        return self._view(**asked)[2]

    def _view(self, **asked: Any) -> tuple[int, int, Any]:
        with Lease(self, writable=True, label="an array of this process", local=True) as lease:
            size, address = lease.bytes, lease.address
            driver, device = self.engine.driver, self.info.device
            return size, address, dlpack_capsule(lease, driver, device, address, (size,), **asked)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The memory as an array of uint8, on GPUs. Cutting it off is EBUSY as long as this object exists."""
        if self.engine.driver == "host":
            raise AttributeError("__cuda_array_interface__: the buffer is in host memory")
        if not self._views or self._views[-1][0] != self.info.size:
            self._views.append(self._view())
        size, address, _ = self._views[-1]
        data = (address, False)
        return {"shape": (size,), "typestr": "|u1", "data": data, "strides": None, "stream": None, "version": 3}

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> "NDArray[Any]":
        """Return the memory as a numpy array, without a copy. TypeError on GPUs, whose memory numpy cannot use."""
        if self.engine.driver != "host":
            raise TypeError(
                f"{self!r} is in the memory of a GPU, which numpy cannot use: copy it with read(), or pass it to "
                "torch.from_dlpack or cupy.from_dlpack"
            )
        import numpy

        array = numpy.from_dlpack(self)
        if dtype is not None and numpy.dtype(dtype) != array.dtype:
            if copy is False:
                raise ValueError(f"an array of {numpy.dtype(dtype)} would be a copy of the buffer's bytes")
            return array.astype(dtype)
        return array.copy() if copy else array

    @property
    def info(self) -> BufferInfo:
        """The facts about the buffer now."""
        info = result_of(_INFO, lib.gpufs_buffer_info_get, self._handle)
        limit = None if info.room_bytes == _NO_LIMIT else info.room_bytes
        return BufferInfo(info.size, info.held_bytes, limit, info.device, info.placement, info.parked_bytes)

    def read(self, offset: int, destination: "MemoryBuffer") -> int:
        """Copy into host memory. Holes read as zeros.

        Parameters
        ----------
        offset
            Where to begin, in bytes.
        destination
            Writable contiguous memory to fill: a bytearray, a numpy array or another object with the buffer protocol,
            or an array in host memory with DLPack. The device itself writes to memory that is locked.

        Returns
        -------
        int
            The bytes read, fewer than the destination has only at the end of the buffer.

        Raises
        ------
        TypeError, ValueError, BufferError
            The destination is not such memory.
        EngineError
            Locking is mandatory and the destination cannot be locked.

        See Also
        --------
        HostLock : locks host memory.
        """
        return self._move(lib.gpufs_buffer_read, offset, destination, writable=True)

    def read_bytes(self, offset: int, size: int) -> bytes:
        """Return at most ``size`` bytes from ``offset``, fewer at the end of the buffer."""
        data = bytearray(min(unsigned("size", size), max(self.info.size - unsigned("offset", offset), 0)))
        return bytes(memoryview(data)[: self.read(offset, data)])

    def write(self, offset: int, source: "MemoryBuffer") -> int:
        """Copy from host memory. The buffer grows as needed.

        Parameters
        ----------
        offset
            Where to begin, in bytes.
        source
            Contiguous memory: bytes, a numpy array or another object with the buffer protocol, or an array in host
            memory with DLPack. The device itself reads memory that is locked.

        Returns
        -------
        int
            The bytes written: all of the source.

        Raises
        ------
        TypeError, ValueError, BufferError
            The source is not such memory.
        EngineError
            The device is full, or locking is mandatory and the source cannot be locked.
        """
        return self._move(lib.gpufs_buffer_write, offset, source, writable=False)

    def _move(self, call: Any, offset: int, memory: Any, *, writable: bool) -> int:
        host = host_memory(memory, writable=writable)
        try:
            place = self._handle, unsigned("offset", offset), ffi.cast("void *", host.address), host.bytes
            return int(result_of(NUMBER, call, *place))
        finally:
            host.release()

    def copy_from(self, source: "Buffer", source_offset: int = 0, offset: int = 0, size: int | None = None) -> int:
        """Copy from another buffer of the engine, within the device or between devices.

        Parameters
        ----------
        source
            The buffer to copy from.
        source_offset, offset
            Where to begin there and here, in bytes.
        size
            How many bytes; by default all to the end of the source.

        Returns
        -------
        int
            The bytes copied, fewer than ``size`` only at the end of the source. Holes become zeros.
        """
        instance("source", Buffer, source)
        count = (1 << 64) - 1 if size is None else unsigned("size", size)
        place = unsigned("source_offset", source_offset), self._handle, unsigned("offset", offset)
        return int(result_of(NUMBER, lib.gpufs_buffer_copy, source._handle, *place, count))

    def await_memory(self, size: int, seconds: float) -> None:
        """Wait before a growth by ``size`` bytes, while they are missing and memory of removed files is being freed.

        Waits at most ``seconds``, and does not report whether the memory is free now.
        """
        check(lib.gpufs_buffer_await_memory(self._handle, size, round(seconds * 1000)))

    def resize(self, size: int) -> None:
        """Set the size: growing makes a hole, shrinking releases memory."""
        check(lib.gpufs_buffer_resize(self._handle, unsigned("size", size)))

    def allocate(self, offset: int, size: int, *, keep_size: bool = False) -> None:
        """Allocate the memory for a range now. The buffer grows to cover it unless ``keep_size``."""
        check(lib.gpufs_buffer_allocate(self._handle, KEEP_SIZE if keep_size else 0, *_range(offset, size)))

    def punch(self, offset: int, size: int) -> None:
        """Make a hole of a range, which then reads as zeros. Whole granules are released to the device."""
        check(lib.gpufs_buffer_allocate(self._handle, PUNCH_HOLE | KEEP_SIZE, *_range(offset, size)))

    def zero(self, offset: int, size: int, *, keep_size: bool = False) -> None:
        """Zero a range and keep its memory. The buffer grows to cover it unless ``keep_size``."""
        check(
            lib.gpufs_buffer_allocate(self._handle, ZERO_RANGE | (KEEP_SIZE if keep_size else 0), *_range(offset, size))
        )

    def seek(self, offset: int, whence: int) -> int:
        """Find the next data or hole.

        Parameters
        ----------
        offset
            Where to begin, in bytes.
        whence
            SEEK_DATA or SEEK_HOLE.

        Returns
        -------
        int
            The offset of the first data, or hole, at or after ``offset``.

        Raises
        ------
        EngineError
            ENXIO if ``offset`` is past the end, or no data follows it.
        """
        place = signed("whence", whence), unsigned("offset", offset)
        return int(result_of(NUMBER, lib.gpufs_buffer_seek, self._handle, *place))


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
    local
        The memory is used by its address in this process, and is not exported.
    placement
        Where in its memory the first byte should lie, below 256, so that what the program uses is aligned. The contents
        move there unless others use them, or the device is full: see :attr:`placement`. None: it does not matter.

    Raises
    ------
    EngineError
        EINVAL: the placement is not below 256. ENODATA: the buffer has holes, and the lease is not for writing. ENOSPC:
        no memory for the holes. EOPNOTSUPP: the device cannot share memory; the text says why.

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

    def __init__(
        self,
        buffer: Buffer,
        *,
        writable: bool = False,
        label: str = "",
        local: bool = False,
        placement: int | None = None,
    ) -> None:
        instance("buffer", Buffer, buffer)
        flags = (lib.GPUFS_LEASE_WRITE if writable else 0) | (lib.GPUFS_LEASE_LOCAL if local else 0)
        place = -1 if placement is None else unsigned("placement", placement)
        self._own(result_of(HANDLE, lib.gpufs_lease_open, buffer._handle, flags, text("label", label), place))

    @classmethod
    def _adopt(cls, handle: int) -> "Lease":
        lease = cls.__new__(cls)
        lease._own(handle)
        return lease

    def _info(self) -> Any:
        return result_of("gpufs_lease_info *", lib.gpufs_lease_info_get, self._handle)

    @property
    def bytes(self) -> int:
        """The bytes of the buffer that are leased: its size when the lease began, or at the last refresh()."""
        return int(self._info().bytes)

    @property
    def address(self) -> int:
        """The device address of the first byte in this process, valid until refresh() or close(); 0 if empty."""
        return int(self._info().address)

    @property
    def placement(self) -> int:
        """Where in the memory of the pieces the first byte lies, in bytes."""
        return int(self._info().placement)

    def refresh(self) -> None:
        """Extend the lease to the buffer's size now. Fails as the constructor does; the lease is then as before."""
        check(lib.gpufs_lease_refresh(self._handle))

    def pieces(self, start: int = 0, most: int | None = None) -> list[SharedPiece]:
        """Return descriptors of the memory, in order and without gaps.

        Parameters
        ----------
        start
            0, or the end of a piece that was returned before: to get what refresh() has added.
        most
            How many pieces to return at most; by default all.

        Returns
        -------
        list of SharedPiece
            Their descriptors belong to the caller. The first byte lies at :attr:`placement` of the memory, and the last
            piece may reach beyond the leased bytes.
        """
        pieces: list[SharedPiece] = []
        memory = ffi.new("gpufs_shared_piece[]", _AT_ONCE)
        count = ffi.new("uint64_t *")
        try:
            while True:
                capacity = _AT_ONCE if most is None else min(_AT_ONCE, unsigned("most", most) - len(pieces))
                check(lib.gpufs_lease_pieces(self._handle, unsigned("start", start), memory, capacity, count))
                part = [SharedPiece(piece.offset, piece.bytes, piece.fd) for piece in memory[0 : count[0]]]
                pieces += part
                if len(part) < capacity or len(pieces) == most:
                    return pieces
                start = part[-1].offset + part[-1].bytes
        except BaseException:
            for piece in pieces:
                os.close(piece.fd)
            raise


if TYPE_CHECKING:
    # What a transfer can move to and from: see device_range() for arrays.
    Memory: TypeAlias = Buffer | DeviceRange | SupportsCudaArrayInterface | SupportsDLPack | PythonBuffer
