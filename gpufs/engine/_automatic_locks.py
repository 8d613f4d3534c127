"""Locking of arrays that are used again and again, without being asked for."""

import os
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from gpufs.engine._native import ffi, lib

if TYPE_CHECKING:
    from gpufs.engine._arrays import HostRange

# Locking 1 GiB takes as long as copying it five times through the driver's own memory, so that it pays late; below a
# megabyte the driver's way costs next to nothing.
_LEAST: Final = 1 << 20
_TIMES: Final = 3
_SHARE: Final = 4  # of the machine's memory: one part in so many


@dataclass(slots=True)
class _Array:
    """An array that has been seen: where its memory is, and how many bytes of it have been copied."""

    address: int
    bytes: int
    copied: int = 0
    tried: bool = False
    locked: bool = False


class AutomaticLocks:
    """What one engine has locked by itself. Any thread may use it.

    Only memory whose end is seen can be locked: that of numpy arrays which own it. Such an array cannot move its memory
    while somebody waits for its end (numpy refuses to resize it), and tells of it before the memory goes. It is locked
    as a whole, whatever part of it is copied: each part that the program itself locks is inside then, and no error.
    """

    def __init__(self, engine: int) -> None:
        self._engine = engine
        self._pid = os.getpid()
        self._limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // _SHARE
        # Re-entrant: an array may go, and be told of, wherever the interpreter frees something.
        self._lock = threading.RLock()  # guards all below; not held while the driver locks
        self._bytes = 0
        self._seen: dict[int, _Array] = {}  # by the array's id

    def seen(self, memory: Any, host: "HostRange") -> None:
        """Memory is about to be copied from or to: locks its array when enough of that has been copied."""
        if host.bytes < _LEAST:
            return
        owner = _owner_of(memory)
        if owner is None or host.read_only or os.getpid() != self._pid:
            return
        with self._lock:
            array = self._seen.get(id(owner))
            if array is None:
                array = self._seen[id(owner)] = _Array(owner.ctypes.data, owner.nbytes)
                weakref.finalize(owner, self._gone, id(owner)).atexit = False
            array.copied += host.bytes
            if array.tried or array.copied < _TIMES * array.bytes:
                return
            # Whatever comes of it, it is tried once.
            array.tried = True
            inside = array.address <= host.address and host.address + host.bytes <= array.address + array.bytes
            if not inside or self._bytes + array.bytes > self._limit:
                return
            self._bytes += array.bytes
        # What cannot be locked is copied as it was before.
        status = lib.gpufs_host_lock(self._engine, ffi.cast("void *", array.address), array.bytes, 0)
        with self._lock:
            if status.error:
                self._bytes -= array.bytes
            else:
                array.locked = True

    def _gone(self, owner: int) -> None:
        # A forked child has none of its parent's locks, and another thread may have held this one.
        if os.getpid() != self._pid:
            return
        with self._lock:
            array = self._seen.pop(owner, None)
            if array is None or not array.locked:
                return
            self._bytes -= array.bytes
        # An engine that is closed has unlocked it already.
        lib.gpufs_host_unlock(self._engine, ffi.cast("void *", array.address), array.bytes)


def _owner_of(memory: Any) -> Any:
    """The numpy array that owns an array's memory; None where that is something else."""
    while True:
        flags = getattr(memory, "flags", None)
        if flags is None or not hasattr(flags, "owndata"):
            return None
        if flags.owndata:
            return memory
        memory = memory.base
