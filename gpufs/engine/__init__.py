"""The native engine from Python: devices, buffers, transfers and the data plane of a mount.

A thin and typed layer over the engine's C interface (``native/include/gpufs.h``, which states the contract of
each call). Sizes and offsets are in bytes, times are integers of seconds and nanoseconds. Calls release the
interpreter's lock and may be made from any thread. A failure raises :class:`EngineError`, an :class:`OSError`.

Objects keep alive what they need: a :class:`Buffer` its :class:`Engine`. All are context managers. An engine that was
not closed is closed when the interpreter exits.
"""

import os
from types import FunctionType

try:
    import gpufs.engine._native  # noqa: F401
except ModuleNotFoundError:
    # Python looks into the current directory first, so a checkout that was not built hides an installed gpufs.
    raise ImportError(
        f"{os.path.dirname(os.path.dirname(__file__))} has no compiled engine. If gpufs is installed, run Python in"
        " another directory, because this one hides it; otherwise run make build here"
    ) from None

from gpufs.engine._arrays import DeviceRange, bytes_capsule, dlpack_capsule
from gpufs.engine._backing import BackingFile, BackingInfo
from gpufs.engine._binding import EngineError, engine_version, log_configure
from gpufs.engine._buffer import KEEP_SIZE, PUNCH_HOLE, SEEK_DATA, SEEK_HOLE, ZERO_RANGE, Buffer, BufferInfo, Lease
from gpufs.engine._engine import (
    Device,
    DeviceInfo,
    DeviceMemory,
    Engine,
    Trace,
    fastpath_probe,
    io_configure,
    refusal_names,
)
from gpufs.engine._futures import OperationFuture
from gpufs.engine._in_use import keep_for_ever
from gpufs.engine._keeper import KeeperLink
from gpufs.engine._locks import HostLock
from gpufs.engine._mapping import TORCH_ALLOCATOR, AddressPool, Mapping, SharedPiece
from gpufs.engine._mount import (
    DEFAULT_LIMIT,
    NO_LIMIT,
    NOATIME,
    RELATIME,
    STRICTATIME,
    Attributes,
    Mount,
    journal_format,
    relay_pair,
)
from gpufs.engine._operations import Batch, Operation, OperationResult
from gpufs.engine._streams import Cells, Late, Stream, SupportsCudaStream, configure_operations
from gpufs.engine._transfer import Transfer, TransferError, TransferProgress

__all__ = [
    "DEFAULT_LIMIT",
    "KEEP_SIZE",
    "NOATIME",
    "NO_LIMIT",
    "PUNCH_HOLE",
    "RELATIME",
    "SEEK_DATA",
    "SEEK_HOLE",
    "STRICTATIME",
    "TORCH_ALLOCATOR",
    "ZERO_RANGE",
    "AddressPool",
    "Attributes",
    "BackingFile",
    "BackingInfo",
    "Batch",
    "Buffer",
    "BufferInfo",
    "Cells",
    "Device",
    "DeviceInfo",
    "DeviceMemory",
    "DeviceRange",
    "Engine",
    "EngineError",
    "HostLock",
    "KeeperLink",
    "Late",
    "Lease",
    "Mapping",
    "Mount",
    "Operation",
    "OperationFuture",
    "OperationResult",
    "SharedPiece",
    "Stream",
    "SupportsCudaStream",
    "Trace",
    "Transfer",
    "TransferError",
    "TransferProgress",
    "bytes_capsule",
    "configure_operations",
    "dlpack_capsule",
    "engine_version",
    "fastpath_probe",
    "io_configure",
    "journal_format",
    "keep_for_ever",
    "log_configure",
    "refusal_names",
    "relay_pair",
]

# In tracebacks, repr() and pickles they name themselves as programs know them.
for _public in map(globals().__getitem__, __all__):
    if isinstance(_public, (type, FunctionType)):
        _public.__module__ = __name__
del _public
