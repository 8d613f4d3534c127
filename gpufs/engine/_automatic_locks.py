"""Locking of arrays that are used again and again, without being asked for."""

import os
import threading
import weakref
from typing import TYPE_CHECKING, Any, Final

from gpufs.engine._native import ffi, lib

if TYPE_CHECKING:
    from gpufs.engine._arrays import HostRange

# Locking 1 GiB takes as long as copying it five times through the driver's own memory, so that it pays late; below a
# megabyte the driver's way costs next to nothing.
_LEAST: Final = 1 << 20
_TIMES: Final = 3
_SHARE: Final = 4  # of the machine's memory: one part in so many

_LOCKED: Final = -1
_REFUSED: Final = -2

_Range = tuple[int, int]  # address and bytes


class AutomaticLocks:
    """What one engine has locked by itself. Any thread may use it.

    Only memory whose end is seen can be locked: that of numpy arrays which own it. Such an array cannot move its memory
    while somebody waits for its end (numpy refuses to resize it), and tells of it before the memory goes.
    """

    def __init__(self, engine: int) -> None:
        self._engine = engine
        self._pid = os.getpid()
        self._limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // _SHARE
        # Re-entrant: an array may go, and be told of, wherever the interpreter frees something.
        self._lock = threading.RLock()  # guards all below; not held while the driver locks
        self._bytes = 0
        self._seen: dict[int, dict[_Range, int]] = {}  # by the array's id; how often, _LOCKED or _REFUSED

    def seen(self, memory: Any, host: "HostRange") -> None:
        """Memory is about to be copied from or to: locks it when that has happened often enough."""
        if host.bytes < _LEAST:
            return
        owner = _owner_of(memory)
        if owner is None or host.read_only or os.getpid() != self._pid:
            return
        place = (host.address, host.bytes)
        with self._lock:
            ranges = self._seen.get(id(owner))
            if ranges is None:
                ranges = self._seen[id(owner)] = {}
                weakref.finalize(owner, self._gone, id(owner)).atexit = False
            times = ranges.get(place, 0)
            if times in (_LOCKED, _REFUSED):
                return
            if times + 1 < _TIMES:
                ranges[place] = times + 1
                return
            # Whatever comes of it, it is tried once.
            ranges[place] = _REFUSED
            if self._bytes + host.bytes > self._limit:
                return
            self._bytes += host.bytes
        # What cannot be locked is copied as it was before.
        status = lib.gpufs_host_lock(self._engine, ffi.cast("void *", host.address), host.bytes, 0)
        with self._lock:
            if status.error:
                self._bytes -= host.bytes
            else:
                ranges[place] = _LOCKED

    def _gone(self, owner: int) -> None:
        # A forked child has none of its parent's locks, and another thread may have held this one.
        if os.getpid() != self._pid:
            return
        with self._lock:
            locked = [place for place, times in self._seen.pop(owner, {}).items() if times == _LOCKED]
            self._bytes -= sum(size for _, size in locked)
        for address, size in locked:
            # An engine that is closed has unlocked it already.
            lib.gpufs_host_unlock(self._engine, ffi.cast("void *", address), size)


def _owner_of(memory: Any) -> Any:
    """The numpy array that owns an array's memory; None where that is something else."""
    while True:
        flags = getattr(memory, "flags", None)
        if flags is None or not hasattr(flags, "owndata"):
            return None
        if flags.owndata:
            return memory
        memory = memory.base
