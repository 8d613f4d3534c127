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
from gpufs.engine._binding import Handle, check, failure
from gpufs.engine._engine import Engine
from gpufs.engine._native import ffi, lib

if TYPE_CHECKING:
    from typing import TypeAlias

    from gpufs.engine._arrays import MemoryBuffer

    # A number, or the place from which it is read when the stream comes to the operation.
    Number: TypeAlias = "int | Late | ctypes.c_int64 | ctypes.c_uint64 | MemoryBuffer"

Fixed = Literal["buffer_offset", "file_offset", "size"]

_FIXED: Final[dict[str, int]] = {
    "buffer_offset": lib.GPUFS_STREAM_FIXED_BUFFER_OFFSET,
    "file_offset": lib.GPUFS_STREAM_FIXED_FILE_OFFSET,
    "size": lib.GPUFS_STREAM_FIXED_SIZE,
}
_NUMBER_BYTES: Final = 8
# What memory may be said to consist of that has a number in it: such numbers, or bytes.
_INTEGERS: Final = frozenset("qQlLnNBbc")
_LONGEST_PATIENCE: Final = (1 << 31) - 1  # milliseconds
# Waiting of the main thread, which signals come to: in parts of so many seconds, or in naps of this share of what it
# has taken so far.
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
    patience: float | None = None,
    stream_waits: Literal["auto", "off"] = "auto",
) -> None:
    """Sets how an engine's operations run; 0 is the engine's choice. Before its first stream, batch or operation.

    ``operations``: under way at most (65536). ``stream_depth``: outstanding on one stream at most (256).
    ``patience``: seconds that a submission waits for a stream that is full before it is EAGAIN (10). ``stream_waits``
    "off": calls of the host hold streams, as where a device cannot wait for a value. EngineError EBUSY afterwards,
    EINVAL for what is out of range.
    """
    instance("engine", Engine, engine)
    options = {
        "operations": unsigned("operations", operations),
        "stream_depth": unsigned("stream_depth", stream_depth),
        "patience_ms": -1 if patience is None else int(min(seconds("patience", patience) * 1000, _LONGEST_PATIENCE)),
        "stream_waits": choice("stream_waits", {"auto": lib.GPUFS_AUTO, "off": lib.GPUFS_OFF}, stream_waits),
    }
    check(lib.gpufs_async_configure(engine._handle, ffi.new("gpufs_async_options *", options)))


@dataclass(frozen=True, slots=True)
class Late:
    """A 64-bit number in memory that an operation reads when its stream comes to it.

    ``address`` is where it is for the CPU; ``keep`` is kept alive until the operation is over.
    """

    address: int
    keep: object = None


class Cells(Handle):
    """64-bit signed integers in pinned memory, zero at first, which kernels can read and write, too.

    ``cells[n]`` reads and sets one, :meth:`late` names it to an operation. EngineError ENOMEM when no more memory can
    be pinned. They must not be closed before the operations and kernels that use them are over. The memory of closed
    cells is kept for the next ones of their size until the engine is closed.
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
        self._own(handle[0], lib.gpufs_pinned_close)

    def __len__(self) -> int:
        return self._count

    def _at(self, index: int) -> int:
        if self.closed:
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
            raise ValueError(f"value: {value!r} is no signed integer of 64 bits") from None

    def late(self, index: int = 0) -> Late:
        """Names a cell to an operation, as a number or as the place of its count."""
        address = int(ffi.cast("uintptr_t", self._memory)) + self._at(index) * _NUMBER_BYTES
        return Late(address, self)


class Stream(Handle):
    """A stream on which operations are queued: the engine's own, or one that the program has.

    ``stream``: None makes one, on ``device`` (0 if not given); otherwise an object with ``__cuda_stream__`` or the
    runtime's handle (CUstream, hipStream_t), which must live until its operations are over. Whose it is the runtime
    tells, unless ``device`` does; a default stream is that of the device current on this thread.

    ``fixed``: numbers that are read when an operation is submitted, though they are given late. ``aligned``: all sizes
    and offsets are multiples of 4096, EINVAL otherwise.

    Closing lets queued operations go on; an engine's own stream ends once all that is queued on it is done.
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
        handle = ffi.new("gpufs_handle *")
        if stream is None:
            check(lib.gpufs_stream_create(engine._handle, signed("device", device or 0), flags, handle))
        else:
            where = -1 if device is None else signed("device", device)
            check(lib.gpufs_stream_register(engine._handle, where, native_handle(stream), flags, handle))
        self.engine = engine
        self._own(handle[0], lib.gpufs_stream_close)

    def _info(self) -> Any:
        info = ffi.new("gpufs_stream_info *")
        check(lib.gpufs_stream_info_get(self._handle, info))
        return info

    @property
    def handle(self) -> int:
        """What the vendor's runtime calls the stream."""
        return int(self._info().native)

    @property
    def device(self) -> int:
        """The index of its device."""
        return int(self._info().device)

    @property
    def outstanding(self) -> int:
        """Operations that the stream has not left behind it."""
        return int(self._info().outstanding)

    @property
    def waits_for_values(self) -> bool:
        """Whether the device itself waits for an operation's end; otherwise a call of the host does."""
        return bool(self._info().waits_for_values)

    def __cuda_stream__(self) -> tuple[int, int]:
        """The protocol's version and the handle, for other libraries."""
        return 0, self.handle

    def call(self, function: Callable[[], object]) -> None:
        """Calls ``function()`` when the stream comes to it; what is queued behind waits until it has returned.

        It runs on a thread of the driver's, which streams may share: it should be short, and must neither call the
        vendor's runtime nor wait for operations. What it raises goes to :func:`sys.unraisablehook`.
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
        """Waits until all that is queued now is done, the program's own work too.

        KeyboardInterrupt comes as soon as nothing but the program's own work is waited for.
        """
        if threading.current_thread() is threading.main_thread():
            began = time.monotonic()
            while self.outstanding:
                time.sleep(min(max((time.monotonic() - began) * _NAP, 20e-6), _PART_SECONDS))
        check(lib.gpufs_stream_synchronize(self._handle))


# Python functions that streams are to call, by the number that stands for each.
_functions: Final[dict[int, Callable[[], object]]] = {}
_numbers: Final = itertools.count(1)


def _call_from_stream(number: int) -> None:
    _functions.pop(number)()  # what it raises ctypes gives to the hook


_called: Final = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_call_from_stream)
_native_call: Final = ffi.cast("void (*)(void *)", ctypes.cast(_called, ctypes.c_void_p).value or 0)


def native_handle(stream: StreamLike) -> int:
    """What the vendor's runtime calls a stream. TypeError for what is none."""
    if isinstance(stream, SupportsCudaStream):
        return unsigned("stream", stream.__cuda_stream__()[1])
    if isinstance(stream, int) and not isinstance(stream, bool):
        return unsigned("stream", stream)
    raise TypeError(f"{type(stream).__name__} is neither a stream nor a stream's handle")


def number_address(name: str, number: Any, *, writable: bool) -> tuple[int, object]:
    """The address of a 64-bit number, and what keeps it there. TypeError or ValueError for what is none."""
    if isinstance(number, Late):
        address = unsigned("address", number.address)
        if address == 0:
            raise ValueError("address: there is no number at 0")
        return address, number.keep
    if isinstance(number, (ctypes.c_int64, ctypes.c_uint64)):
        return ctypes.addressof(number), number
    try:
        form = memoryview(number).format
    except TypeError:
        raise TypeError(f"{name}: {number!r} is neither a whole number nor 8 bytes of memory with one") from None
    # Others than integers of this machine would be read as one all the same: 8.0 as 4620693217682128896.
    if form.lstrip("@=<" if sys.byteorder == "little" else "@=>!") not in _INTEGERS:
        raise TypeError(f"{name}: {number!r} has no whole number of 64 bits in it")
    view = view_of(number, writable=writable)
    if len(view) != _NUMBER_BYTES:
        raise ValueError(f"{name}: a late number has 64 bits")
    return int(ffi.cast("uintptr_t", view)), view
