"""Host memory that is locked, so that devices copy from and to it themselves."""

import errno
import functools
from typing import TYPE_CHECKING, Any

from gpufs.engine._arguments import instance, unsigned
from gpufs.engine._arrays import ArrayMemory, host_memory
from gpufs.engine._binding import EngineError, Handle, check, result_of
from gpufs.engine._engine import Engine
from gpufs.engine._native import ffi, lib

if TYPE_CHECKING:
    from gpufs.engine._arrays import MemoryBuffer, SupportsDLPack


def _unlock(host: ArrayMemory, engine: int) -> Any:
    return lib.gpufs_host_unlock(engine, ffi.cast("void *", host.address), host.bytes)


class HostLock(Handle):
    """Locks host memory until unlock(), close(), the end of ``with``, or until this object goes.

    Any bytes may be locked, not only whole pages. A range inside a locked one is locked together with it: the last
    lock that goes unlocks. Memory that another library has locked already counts as locked and stays so afterwards. A
    forked child has none of the locks.

    Parameters
    ----------
    engine
        The engine whose devices are to reach the memory.
    memory
        A contiguous object that has the buffer protocol (numpy array, bytearray, mmap, ...), an array in host memory
        that has DLPack (a tensor of PyTorch), or an address. Objects are kept alive; memory named by its address must
        stay mapped until it is unlocked, and nobody notices when it does not.
    size
        Bytes at an address.
    read_only
        Whether it is only going to be copied to devices, and may be mapped for reading only. None: as the object says
        (an address: no).

    Raises
    ------
    EngineError
        EINVAL for an empty range; EFAULT where it is not mapped; EEXIST where it overlaps a locked range and is not
        inside it; EACCES where it is locked as read-only; ENOMEM when no more can be locked, and what to do about it.
    TypeError, ValueError
        The memory cannot be locked.
    """

    __slots__ = ("_host", "engine")

    def __init__(
        self,
        engine: Engine,
        memory: "MemoryBuffer | SupportsDLPack | int",
        size: int | None = None,
        *,
        read_only: bool | None = None,
    ) -> None:
        instance("engine", Engine, engine)
        if isinstance(memory, int):
            if size is None:
                raise TypeError("an address needs a size")
            host = ArrayMemory(unsigned("memory", memory), unsigned("size", size), bool(read_only), None)
        elif size is not None:
            raise TypeError("only an address has a size")
        else:
            array = host_memory(memory, writable=read_only is False)
            readable_only = array.read_only if read_only is None else read_only
            host = ArrayMemory(array.address, array.bytes, readable_only, array.keep)
        try:
            check(lib.gpufs_host_lock(engine._handle, ffi.cast("void *", host.address), host.bytes, host.read_only))
        except BaseException:
            host.release()
            raise
        self.engine = engine
        self._host: ArrayMemory = host
        # The call that unlocks it refers to the memory, which so exists until then.
        self._own(engine._handle, functools.partial(_unlock, host))

    @property
    def address(self) -> int:
        """Where it begins."""
        return self._host.address

    @property
    def size(self) -> int:
        """Bytes."""
        return self._host.bytes

    @property
    def read_only(self) -> bool:
        """Whether it was locked for copies to devices only."""
        return self._host.read_only

    @property
    def locked(self) -> bool:
        """Whether it still is, by this object."""
        return not self.closed

    @property
    def foreign(self) -> bool:
        """Whether another library had locked it before. EngineError ENOENT once it is unlocked."""
        return bool(self._info().foreign)

    @property
    def device_address(self) -> int | None:
        """Where kernels on every device of the driver find it; None where the driver gives no address.

        The host driver gives the address itself. docs/locked-memory.md says which accesses are coherent. EngineError
        ENOENT once it is unlocked.
        """
        return int(self._info().device_address) or None

    def _info(self) -> Any:
        place = self.engine._handle, ffi.cast("void *", self._host.address), self._host.bytes
        return result_of("gpufs_host_lock_info *", lib.gpufs_host_lock_info_get, *place)

    def unlock(self) -> None:
        """Unlock it. EngineError ENOENT when that has been done; the driver's own failure leaves it locked."""
        # Only one of several threads goes on: the range may be locked by others, whose lock must not be undone.
        if self._finalizer.detach() is None:
            raise EngineError(
                errno.ENOENT,
                f"{self.address:#x}-{self.address + self.size:#x} ({self.size} bytes) is not locked by this object any "
                "more",
            )
        status = self._close(self._handle)
        if status.error not in (0, errno.EBADF):
            self._own(self._handle, self._close)
        else:
            self._host.release()
        check(status)

    def close(self) -> None:
        """Unlock it. A second call does nothing, nor does one after the engine was closed or in a forked child."""
        try:
            self.unlock()
        except EngineError as error:
            if error.errno not in (errno.EBADF, errno.ENOENT):
                raise
