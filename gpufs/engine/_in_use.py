"""Keeps objects alive while a device may use their memory, also after the engine gave up on the device."""

import errno
import threading
import weakref
from collections.abc import Callable
from typing import Any

from gpufs.engine._binding import new_reference
from gpufs.engine._native import lib


class InUse:
    """The objects that work in progress uses. They are kept as long as this object lives."""

    def __init__(self, *used: object) -> None:
        self._used = used

    def in_use(self) -> object:
        """Return what must live until the work is over."""
        return self._used


class WorkInProgress:
    """The work in progress in an engine."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _users
        self._users: weakref.WeakSet[InUse] = weakref.WeakSet()

    def add(self, user: InUse) -> None:
        """Add an object; it is removed when it is collected."""
        with self._lock:
            self._users.add(user)

    def close(self, handle: int) -> Any:
        """Close the engine. What a stalled device still uses is never released."""
        with self._lock:
            used = [user.in_use() for user in self._users]
        status = lib.gpufs_engine_close(handle)
        if status.error == errno.ETIMEDOUT:
            keep_for_ever(used)
        return status


def keep_for_ever(held: object) -> None:
    """Keep objects until the process ends, even after the interpreter has ended.

    Parameters
    ----------
    held
        An object, with all that it refers to.
    """
    new_reference(held)


def close_or_defer(wait: Callable[[int], bool], used: InUse, handle: int) -> Any:
    """Close a handle that has work in progress, which uses what is ``used``. Return the status of closing.

    If that is ETIMEDOUT, a thread closes it when the work is over: ``wait`` waits for that, a second at most, and
    returns whether it is.
    """
    status = lib.gpufs_close(handle)
    if status.error == errno.ETIMEDOUT:
        try:
            threading.Thread(target=_close_later, args=(wait, used, handle), name="gpufs-close", daemon=True).start()
        except (RuntimeError, MemoryError):
            keep_for_ever(used)
    return status


def _close_later(wait: Callable[[int], bool], used: InUse, handle: int) -> None:
    while not wait(handle):
        pass
    lib.gpufs_close(handle)
    del used
