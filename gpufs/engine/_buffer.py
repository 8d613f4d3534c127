"""Buffers: the contents of a file, on a device."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

from gpufs.engine._arguments import instance, signed, unsigned
from gpufs.engine._arrays import host_range
from gpufs.engine._binding import Handle, check
from gpufs.engine._engine import Engine
from gpufs.engine._native import ffi, lib

if TYPE_CHECKING:
    from gpufs.engine._types import MemoryBuffer

SEEK_DATA: Final[int] = lib.GPUFS_SEEK_DATA
SEEK_HOLE: Final[int] = lib.GPUFS_SEEK_HOLE
KEEP_SIZE: Final[int] = lib.GPUFS_KEEP_SIZE
PUNCH_HOLE: Final[int] = lib.GPUFS_PUNCH_HOLE
ZERO_RANGE: Final[int] = lib.GPUFS_ZERO_RANGE


@dataclass(frozen=True, slots=True)
class BufferInfo:
    """A buffer's size and the device memory that it really holds, in bytes, and its device's index."""

    size: int
    held_bytes: int
    device: int


def _range(offset: int, size: int) -> tuple[int, int]:
    return unsigned("offset", offset), unsigned("size", size)


class Buffer(Handle):
    """An empty buffer on a device, which grows as it is written. It keeps its engine alive.

    EngineError: ENOSPC when the device is full (nothing has changed then), EFBIG beyond the largest size, EBADF once
    the buffer or its engine is closed.
    """

    __slots__ = ("engine",)

    def __init__(self, engine: Engine, device: int = 0) -> None:
        handle = ffi.new("gpufs_handle *")
        instance("engine", Engine, engine)
        check(lib.gpufs_buffer_create(engine._handle, signed("device", device), handle))
        self.engine = engine
        self._own(handle[0], lib.gpufs_buffer_close)

    @classmethod
    def _adopt(cls, engine: Engine, handle: int) -> Self:
        """A buffer for a handle that the engine has given."""
        buffer = cls.__new__(cls)
        buffer.engine = engine
        buffer._own(handle, lib.gpufs_buffer_close)
        return buffer

    @property
    def info(self) -> BufferInfo:
        """Size, memory held and device."""
        info = ffi.new("gpufs_buffer_info *")
        check(lib.gpufs_buffer_info_get(self._handle, info))
        return BufferInfo(info.size, info.held_bytes, info.device)

    def read(self, offset: int, destination: "MemoryBuffer") -> int:
        """Fills a writable contiguous buffer (bytearray, numpy array, ...) from ``offset``; returns the bytes read.

        Also a contiguous array in host memory that has DLPack. Fewer bytes than asked for only at the end of the file;
        holes read as zeros. Memory that is locked (:class:`HostLock`) the device writes to itself. TypeError,
        ValueError or BufferError when the destination is no such buffer; EngineError as :class:`HostLock` where
        locking is mandatory.
        """
        return self._move(lib.gpufs_buffer_read, offset, destination, writable=True)

    def read_bytes(self, offset: int, size: int) -> bytes:
        """At most ``size`` bytes from ``offset``, fewer at the end of the file."""
        data = bytearray(min(unsigned("size", size), max(self.info.size - unsigned("offset", offset), 0)))
        return bytes(memoryview(data)[: self.read(offset, data)])

    def write(self, offset: int, source: "MemoryBuffer") -> int:
        """Writes a contiguous buffer (bytes, numpy array, ...) at ``offset``, all of it; returns the bytes written.

        Also a contiguous array in host memory that has DLPack. Memory that is locked the device reads itself.
        """
        return self._move(lib.gpufs_buffer_write, offset, source, writable=False)

    def _move(self, call: Any, offset: int, memory: Any, *, writable: bool) -> int:
        host = host_range(memory, writable=writable)
        try:
            done = ffi.new("uint64_t *")
            check(call(self._handle, unsigned("offset", offset), ffi.cast("void *", host.address), host.bytes, done))
        finally:
            host.release()
        return int(done[0])

    def resize(self, size: int) -> None:
        """Sets the size: growing makes a hole, shrinking gives memory back."""
        check(lib.gpufs_buffer_resize(self._handle, unsigned("size", size)))

    def allocate(self, offset: int, size: int, *, keep_size: bool = False) -> None:
        """Takes the memory for a range now, as fallocate(2): the buffer grows to cover it unless ``keep_size``."""
        check(lib.gpufs_buffer_allocate(self._handle, KEEP_SIZE if keep_size else 0, *_range(offset, size)))

    def punch(self, offset: int, size: int) -> None:
        """Makes a hole of a range, which then reads as zeros; whole granules go back to the device."""
        check(lib.gpufs_buffer_allocate(self._handle, PUNCH_HOLE | KEEP_SIZE, *_range(offset, size)))

    def zero(self, offset: int, size: int, *, keep_size: bool = False) -> None:
        """Zeroes a range and keeps its memory; the buffer grows to cover it unless ``keep_size``."""
        check(
            lib.gpufs_buffer_allocate(self._handle, ZERO_RANGE | (KEEP_SIZE if keep_size else 0), *_range(offset, size))
        )

    def seek(self, offset: int, whence: int) -> int:
        """The next data (SEEK_DATA) or hole (SEEK_HOLE) at or after ``offset``. EngineError ENXIO past the end."""
        found = ffi.new("uint64_t *")
        check(lib.gpufs_buffer_seek(self._handle, signed("whence", whence), unsigned("offset", offset), found))
        return int(found[0])

    def address(self, maximum_bytes: int) -> int:
        """The device address of offset 0. From now on the buffer never moves and cannot grow past ``maximum_bytes``.

        Behind holes there is no memory: allocate() before a kernel touches what was never written.
        """
        address = ffi.new("uint64_t *")
        check(lib.gpufs_buffer_address(self._handle, unsigned("maximum_bytes", maximum_bytes), address))
        return int(address[0])
