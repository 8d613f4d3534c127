"""What of a program's own memory a device may use, and what becomes of it where the engine gave up on a device."""

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
    """Whoever has work under way."""

    def in_use(self) -> object:
        """What must live until that is over."""
        ...


class Used:
    """What one piece of work needs, for as long as this lives."""

    __slots__ = ("__weakref__", "_things")

    def __init__(self, *things: object) -> None:
        self._things = things

    def in_use(self) -> object:
        """All of it."""
        return self._things


class Users:
    """All that have work under way in an engine."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _users
        self._users: weakref.WeakSet[InUse] = weakref.WeakSet()

    def add(self, user: InUse) -> None:
        """Lists a user until it goes."""
        with self._lock:
            self._users.add(user)

    def close(self, close: Callable[[int], Any], handle: int) -> Any:
        """Closes the engine. What was in use stays for ever where the device did not get done with it."""
        with self._lock:
            used = [user.in_use() for user in self._users]
        status = close(handle)
        if status.error == errno.ETIMEDOUT:
            keep_for_ever(used)
        return status


def keep_for_ever(things: object) -> None:
    """Nothing of it goes before the process ends, not even with the interpreter."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(things))


def close_or_leave(
    close: Callable[[int], Any],
    event_fd: Callable[[int, Any], Any],
    over: Callable[[int], bool],
    used: InUse,
    handle: int,
) -> Any:
    """Closes what has work under way; gives the status.

    If that is ETIMEDOUT the handle is open still. It is closed, and ``used`` let go, once ``over(handle)`` is true,
    which is asked when the descriptor that ``event_fd`` gives becomes readable.
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
