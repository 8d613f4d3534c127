"""Files of the host, and the reads and writes between them and device memory."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

from gpufs.engine._arguments import choice, instance, signed
from gpufs.engine._binding import HANDLE, result_of
from gpufs.engine._engine import Engine, refusal_names
from gpufs.engine._futures import OperationFuture, start
from gpufs.engine._native import ffi, lib
from gpufs.engine._operations import Operation
from gpufs.engine._streams import Stream, StreamLike
from gpufs.engine._transfer import HostFile, Transfer
from gpufs.syscalls import closed_after

if TYPE_CHECKING:
    from gpufs.engine._buffer import Memory
    from gpufs.engine._streams import Number


@dataclass(frozen=True, slots=True)
class BackingInfo:
    """Facts that the engine knows about a file of the host.

    Attributes
    ----------
    file_system
        Its type, for example "ext4"; "" if its mount is not visible to this process.
    block_device, readable, writable
        What it is, and what its descriptor allows.
    direct
        Whether it could also be opened with O_DIRECT.
    offset_align, memory_align
        What O_DIRECT asks of offsets and of memory, in bytes.
    fastpath_refusals
        Why the fastpath does not take the file.
    """

    file_system: str
    block_device: bool
    readable: bool
    writable: bool
    direct: bool
    offset_align: int
    memory_align: int
    fastpath_refusals: tuple[str, ...]


class BackingFile(HostFile):
    """A regular file or block device of the host, for transfers. It keeps its engine alive.

    The engine opens descriptors of its own with the access mode of ``fd``, never a wider one. This may block for as
    long as the file's server does.

    Parameters
    ----------
    engine
        The engine of the transfers.
    fd
        A descriptor of the file, which stays the caller's.

    Raises
    ------
    EngineError
        EBADF for an O_PATH descriptor, EISDIR or EINVAL for another kind of file, EDEADLK for a file on a mount of
        gpufs.
    """

    __slots__ = ()

    def __init__(self, engine: Engine, fd: int) -> None:
        instance("engine", Engine, engine)
        handle = result_of(HANDLE, lib.gpufs_backing_open, engine._handle, signed("fd", fd))
        self.engine = engine
        self._own(handle)

    @classmethod
    def open(
        cls,
        engine: Engine,
        path: str | bytes | os.PathLike[str] | os.PathLike[bytes],
        mode: Literal["r", "r+", "w"] = "r",
    ) -> Self:
        """Open a file by its path: "r" for reading, "r+" for both, "w" for both, created or emptied.

        Raises OSError like os.open(), and EngineError like the constructor.
        """
        modes = {"r": os.O_RDONLY, "r+": os.O_RDWR, "w": os.O_RDWR | os.O_CREAT | os.O_TRUNC}
        flags = choice("mode", modes, mode)
        with closed_after(os.open(path, flags | os.O_CLOEXEC, 0o666)) as fd:
            return cls(engine, fd)

    @property
    def info(self) -> BackingInfo:
        """The facts that the engine knows about the file."""
        info = result_of("gpufs_backing_info *", lib.gpufs_backing_info_get, self._handle)
        return BackingInfo(
            ffi.string(info.file_system).decode(errors="replace"),
            bool(info.block_device),
            bool(info.readable),
            bool(info.writable),
            bool(info.direct),
            info.offset_align,
            info.memory_align,
            tuple(refusal_names(info.fastpath_refusals)),
        )

    def read(
        self, memory: "Memory", size: int | None = None, file_offset: int = 0, buffer_offset: int = 0, **options: Any
    ) -> int:
        """Read from the file into device memory and wait for the end.

        An exception that arrives during the wait (KeyboardInterrupt) cancels the read.

        Parameters
        ----------
        memory
            A buffer, or device memory of the program: a :class:`DeviceRange` or an array.
        size
            In bytes; None: as much as there is and fits.
        file_offset, buffer_offset
            In bytes.
        options
            Those of :class:`Transfer`.

        Returns
        -------
        int
            The bytes read: fewer than ``size`` at the end of the file.

        Raises
        ------
        TransferError
            The read failed, also after progress.
        EngineError, TypeError, ValueError
            The read could not be queued.
        """
        with Transfer("load", self, memory, size, file_offset, buffer_offset, **options) as transfer:
            return transfer.finish()

    def write(
        self, memory: "Memory", size: int | None = None, file_offset: int = 0, buffer_offset: int = 0, **options: Any
    ) -> int:
        """Write device memory to the file and wait; return the bytes written. Otherwise like :meth:`read`.

        The bytes are durable only with ``sync="data"`` or ``sync="full"``.
        """
        with Transfer("store", self, memory, size, file_offset, buffer_offset, **options) as transfer:
            return transfer.finish()

    def read_async(
        self,
        memory: "Memory",
        size: "Number | None" = None,
        file_offset: "Number" = 0,
        buffer_offset: "Number" = 0,
        *,
        stream: Stream | StreamLike | None = None,
        **options: Any,
    ) -> OperationFuture:
        """Queue a read on a stream: it starts when the stream reaches it, and the stream waits for its end.

        Numbers may be late, ``options`` are those of :class:`Operation`. Without a stream the read starts at once.

        Raises
        ------
        EngineError
            EAGAIN if too many operations are under way, EINVAL if memory and stream are on different devices, EBUSY for
            a stream that is being captured into a graph.
        TypeError, ValueError
            An argument cannot be used.
        """
        return start(Operation("load", self, memory, size, file_offset, buffer_offset, stream=stream, **options))

    def write_async(
        self,
        memory: "Memory",
        size: "Number | None" = None,
        file_offset: "Number" = 0,
        buffer_offset: "Number" = 0,
        *,
        stream: Stream | StreamLike | None = None,
        **options: Any,
    ) -> OperationFuture:
        """Queue a write of device memory to the file on a stream. Otherwise like :meth:`read_async`."""
        return start(Operation("store", self, memory, size, file_offset, buffer_offset, stream=stream, **options))
