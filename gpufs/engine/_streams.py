"""Streams on which operations are queued, and numbers that operations read when their stream reaches them."""

import ctypes
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, runtime_checkable

from gpufs.engine._arguments import choice, instance, seconds, signed, unsigned, view_of
from gpufs.engine._binding import HANDLE, Handle, check, failure, result_of
from gpufs.engine._engine import Engine
from gpufs.engine._native import ffi, lib

if TYPE_CHECKING:
    from typing import TypeAlias

    from gpufs.engine._arrays import MemoryBuffer

Fixed = Literal["buffer_offset", "file_offset", "size"]

_FIXED: Final[dict[str, int]] = {
    "buffer_offset": lib.GPUFS_STREAM_FIXED_BUFFER_OFFSET,
    "file_offset": lib.GPUFS_STREAM_FIXED_FILE_OFFSET,
    "size": lib.GPUFS_STREAM_FIXED_SIZE,
}
_NUMBER_BYTES: Final = 8
# Formats of memory that may contain a number: 64-bit integers, or bytes.
_INTEGERS: Final = frozenset("qQlLnNBbc")
_LONGEST_TIMEOUT: Final = (1 << 31) - 1  # milliseconds
# The main thread, which handles signals, waits in parts of at most so many seconds, or of this share of the time that
# it has waited so far.
_PART_SECONDS: Final = 0.05
_NAP: Final = 1 / 16


@runtime_checkable
class SupportsCudaStream(Protocol):
    """A stream of another library: ``__cuda_stream__()`` gives the protocol's version and the runtime's handle."""

    def __cuda_stream__(self) -> tuple[int, int]: ...


StreamLike = SupportsCudaStream | int


def configure_operations(
    engine: Engine,
    *,
    operations: int = 0,
    stream_depth: int = 0,
    timeout: float | None = None,
    stream_waits: Literal["auto", "off"] = "auto",
) -> None:
    """Set the options of an engine's operations, before its first stream, batch or operation.

    Parameters
    ----------
    operations
        The most operations that run at the same time; 0 is 65536.
    stream_depth
        The most outstanding operations of one stream; 0 is 256.
    timeout
        Seconds that a submission waits for a full stream before it fails with EAGAIN; None is 10.
    stream_waits
        "off": calls of the host block streams, as on a device that cannot wait for a value.

    Raises
    ------
    EngineError
        EBUSY once the engine has used streams or batches, EINVAL for a value that is out of range.
    """
    instance("engine", Engine, engine)
    options = {
        "operations": unsigned("operations", operations),
        "stream_depth": unsigned("stream_depth", stream_depth),
        "timeout_ms": -1 if timeout is None else int(min(seconds("timeout", timeout) * 1000, _LONGEST_TIMEOUT)),
        "stream_waits": choice("stream_waits", {"auto": lib.GPUFS_AUTO, "off": lib.GPUFS_OFF}, stream_waits),
    }
    check(lib.gpufs_async_configure(engine._handle, ffi.new("gpufs_async_options *", options)))


@dataclass(frozen=True, slots=True)
class Late:
    """A 64-bit number in memory that an operation reads when its stream reaches it.

    Attributes
    ----------
    address
        Its address for the CPU.
    keep
        An object that is kept alive until the operation has ended.
    """

    address: int
    keep: object = None


class Cells(Handle):
    """64-bit signed integers in pinned memory, initially zero, which kernels can read and write, too.

    ``cells[n]`` reads and sets one, :meth:`late` passes it to an operation. Close them only after the operations and
    kernels that use them have ended. The engine keeps the memory of closed cells for later ones of the same size.

    Parameters
    ----------
    engine
        The engine of the operations.
    count
        How many numbers.
    device
        The device whose kernels use them.

    Raises
    ------
    EngineError
        ENOMEM if no more memory can be pinned.
    ValueError
        On use, once they or their engine are closed.
    """

    __slots__ = ("_count", "_memory", "device_address", "engine")

    def __init__(self, engine: Engine, count: int = 1, device: int = 0) -> None:
        instance("engine", Engine, engine)
        handle = ffi.new("gpufs_handle *")
        memory = ffi.new("void **")
        address = ffi.new("uint64_t *")
        size = unsigned("count", unsigned("count", count) * _NUMBER_BYTES)
        check(lib.gpufs_pinned_create(engine._handle, signed("device", device), size, handle, memory, address))
        self.engine = engine
        self.device_address = int(address[0])
        self._count = count
        self._memory = ffi.cast("int64_t *", memory[0])
        self._own(handle[0])

    def __len__(self) -> int:
        return self._count

    def _at(self, index: int) -> int:
        if self.closed or self.engine.closed:
            raise ValueError("the cells are closed")
        index = signed("index", index)
        if not -self._count <= index < self._count:
            raise IndexError("no such cell")
        return index % self._count

    def __getitem__(self, index: int) -> int:
        return int(self._memory[self._at(index)])

    def __setitem__(self, index: int, value: int) -> None:
        try:
            self._memory[self._at(index)] = value
        except OverflowError:
            raise ValueError(f"value: {value!r} is not a signed integer of 64 bits") from None

    def late(self, index: int = 0) -> Late:
        """Pass a cell to an operation, as a number or as the place of its count."""
        address = int(ffi.cast("uintptr_t", self._memory)) + self._at(index) * _NUMBER_BYTES
        return Late(address, self)


class Stream(Handle):
    """A stream on which operations are queued: the engine's own, or one of the program.

    Closing a stream lets its queued operations continue. A stream of the engine is destroyed when they are done.

    Parameters
    ----------
    stream
        None creates one. Otherwise an object with ``__cuda_stream__`` or the runtime's handle (CUstream, hipStream_t),
        which must live until its operations have ended.
    device
        Its device. None: device 0 for a new stream, otherwise the one that the runtime reports. A default stream
        belongs to the current device of this thread.
    fixed
        Numbers that are read when an operation is submitted, although they are given late.
    aligned
        All sizes and offsets are multiples of 4096; others fail with EINVAL.
    """

    __slots__ = ("engine",)

    def __init__(
        self,
        engine: Engine,
        stream: StreamLike | None = None,
        *,
        device: int | None = None,
        fixed: Iterable[Fixed] = (),
        aligned: bool = False,
    ) -> None:
        instance("engine", Engine, engine)
        flags = lib.GPUFS_STREAM_ALIGNED if aligned else 0
        for name in fixed:
            flags |= choice("fixed", _FIXED, name)
        native = ffi.NULL if stream is None else ffi.new("uint64_t *", native_handle(stream))
        where = (0 if stream is None else -1) if device is None else signed("device", device)
        handle = result_of(HANDLE, lib.gpufs_stream_open, engine._handle, where, native, flags)
        self.engine = engine
        self._own(handle)

    def _info(self) -> Any:
        return result_of("gpufs_stream_info *", lib.gpufs_stream_info_get, self._handle)

    @property
    def handle(self) -> int:
        """The handle of the vendor's runtime."""
        return int(self._info().native)

    @property
    def device(self) -> int:
        """The index of its device."""
        return int(self._info().device)

    @property
    def outstanding(self) -> int:
        """The number of operations that the stream has not passed."""
        return int(self._info().outstanding)

    @property
    def waits_for_values(self) -> bool:
        """Whether the device waits for the end of an operation; otherwise a call of the host does."""
        return bool(self._info().waits_for_values)

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return the protocol's version and the handle, for other libraries."""
        return 0, self.handle

    def call(self, function: Callable[[], object]) -> None:
        """Call ``function()`` when the stream reaches it. Work that is queued later waits until it has returned.

        It runs on a thread of the driver, which streams may share: it should be short, and must neither call the
        vendor's runtime nor wait for operations. Its exceptions go to :func:`sys.unraisablehook`.
        """
        if not callable(function):
            raise TypeError(f"{function!r} cannot be called")
        number = next(_numbers)
        _functions[number] = function
        status = lib.gpufs_stream_call(self._handle, _native_call, ffi.cast("void *", number))
        if status.error:
            del _functions[number]
            raise failure(status)

    def synchronize(self) -> None:
        """Wait until all work that is queued now is done, including the program's own.

        KeyboardInterrupt is raised while operations are waited for, but not during the program's own work.
        """
        if threading.current_thread() is threading.main_thread():
            began = time.monotonic()
            while self.outstanding:
                time.sleep(min(max((time.monotonic() - began) * _NAP, 20e-6), _PART_SECONDS))
        check(lib.gpufs_stream_synchronize(self._handle))


# Functions that streams will call, by their numbers.
_functions: Final[dict[int, Callable[[], object]]] = {}
_numbers: Final = itertools.count(1)


def _call_from_stream(number: int) -> None:
    _functions.pop(number)()  # ctypes passes its exceptions to the hook


_called: Final = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_call_from_stream)
_native_call: Final = ffi.cast("void (*)(void *)", ctypes.cast(_called, ctypes.c_void_p).value or 0)


def native_handle(stream: StreamLike) -> int:
    """Return the vendor's handle of a stream. TypeError for another object."""
    if isinstance(stream, SupportsCudaStream):
        return unsigned("stream", stream.__cuda_stream__()[1])
    if isinstance(stream, int) and not isinstance(stream, bool):
        return unsigned("stream", stream)
    raise TypeError(f"{type(stream).__name__} is neither a stream nor a stream's handle")


def number_address(name: str, number: Any, *, writable: bool) -> tuple[int, object]:
    """Return the address of a 64-bit number and its owner. TypeError or ValueError for another object."""
    if isinstance(number, Late):
        address = unsigned("address", number.address)
        if address == 0:
            raise ValueError("address: 0 is not the address of a number")
        return address, number.keep
    if isinstance(number, (ctypes.c_int64, ctypes.c_uint64)):
        return ctypes.addressof(number), number
    try:
        form = memoryview(number).format
    except TypeError:
        raise TypeError(f"{name}: {number!r} is neither a whole number nor 8 bytes of memory with one") from None
    # Any other format would be read as an integer, too: 8.0 as 4620693217682128896.
    if form.lstrip("@=<" if sys.byteorder == "little" else "@=>!") not in _INTEGERS:
        raise TypeError(f"{name}: {number!r} does not contain a whole number of 64 bits")
    view = view_of(number, writable=writable)
    if len(view) != _NUMBER_BYTES:
        raise ValueError(f"{name}: a late number has 64 bits")
    return int(ffi.cast("uintptr_t", view)), view


if TYPE_CHECKING:
    # A number, or the place from which it is read when the stream reaches the operation.
    Number: TypeAlias = int | Late | ctypes.c_int64 | ctypes.c_uint64 | MemoryBuffer
