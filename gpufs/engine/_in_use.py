"""Keeps objects alive while a device may use their memory, also after the engine gave up on the device."""

import ctypes
import errno
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final, Protocol

from gpufs.engine._binding import check
from gpufs.engine._completions import completions
from gpufs.engine._native import ffi


class InUse(Protocol):
    """An object with work in progress."""

    def in_use(self) -> object:
        """Return what must live until the work is over."""
        ...


class Used:
    """Keeps what one piece of work needs, as long as this object lives."""

    __slots__ = ("__weakref__", "_things")

    def __init__(self, *things: object) -> None:
        self._things = things

    def in_use(self) -> object:
        """Return everything that is kept."""
        return self._things


class Users:
    """The objects that have work in progress in an engine."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _users
        self._users: weakref.WeakSet[InUse] = weakref.WeakSet()

    def add(self, user: InUse) -> None:
        """Add an object; it is removed when it is collected."""
        with self._lock:
            self._users.add(user)

    def close(self, close: Callable[[int], Any], handle: int) -> Any:
        """Close the engine. What a stalled device still uses is never released."""
        with self._lock:
            used = [user.in_use() for user in self._users]
        status = close(handle)
        if status.error == errno.ETIMEDOUT:
            keep_for_ever(used)
        return status


def keep_for_ever(things: object) -> None:
    """Keep objects until the process ends, even after the interpreter has ended."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(things))


def close_or_leave(
    close: Callable[[int], Any],
    event_fd: Callable[[int, Any], Any],
    over: Callable[[int], bool],
    used: InUse,
    handle: int,
) -> Any:
    """Close a handle that has work in progress.

    Parameters
    ----------
    close, event_fd, over
        Functions of the handle: close it; store the descriptor that becomes readable when its work may be over; return
        whether the work is over.
    used
        What the work uses. It is kept alive until then.
    handle
        The handle.

    Returns
    -------
    status
        Of closing. If it is ETIMEDOUT, the handle is closed in the background when the work is over.
    """
    status = close(handle)
    if status.error != errno.ETIMEDOUT:
        return status

    def again() -> bool:
        if not over(handle):
            return True
        close(handle)
        keep.clear()
        return False

    keep: Final = [used]
    fd = ffi.new("int *")
    try:
        check(event_fd(handle, fd))
        completions.watch(fd[0], again)
    except (OSError, RuntimeError, MemoryError):
        keep_for_ever(keep)
    return status
