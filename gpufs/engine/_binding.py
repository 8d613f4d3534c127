"""Errors and handles: what every class of the binding rests on."""

import ctypes
import os
import weakref
from collections.abc import Callable
from errno import ENOENT, ETIMEDOUT
from types import TracebackType
from typing import Any, Final, NoReturn, Self

from gpufs.engine._native import ffi, lib

# Looked up once: parsing a type's name costs more than the calls that use it.
HANDLE: Final = ffi.typeof("gpufs_handle *")
NUMBER: Final = ffi.typeof("uint64_t *")
SMALL_NUMBER: Final = ffi.typeof("int32_t *")


class EngineError(OSError):
    """A failure of the engine.

    Attributes
    ----------
    errno
        The kind of failure.
    strerror
        What happened.
    device_code
        The vendor runtime's own code; 0 if the failure did not come from a device.
    """

    def __init__(self, error: int, message: str, device_code: int = 0) -> None:
        super().__init__(error, message or os.strerror(error))
        self.device_code = device_code

    def __str__(self) -> str:
        text = str(self.strerror)
        return f"{text} (device code {self.device_code})" if self.device_code else text

    def __reduce__(self) -> tuple[type["EngineError"], tuple[int, str, int]]:
        return type(self), (self.errno or 0, str(self.strerror), self.device_code)


class _NotFound(EngineError, FileNotFoundError):
    """ENOENT, as OSError itself has a class for it."""


def failure(status: Any) -> EngineError:
    """Make the error for a failed status, in the thread that made the call."""
    text: bytes = ffi.string(lib.gpufs_message())
    kind = _NotFound if status.error == ENOENT else EngineError
    return kind(status.error, text.decode(errors="replace"), status.device_code)


def check(status: Any) -> None:
    """Raise EngineError unless the status is success."""
    if status.error:
        raise failure(status)


def reason_of(call: Any, *arguments: Any) -> str | None:
    """Return the text of the failure of a call that answers a question; None if it succeeds."""
    status = call(*arguments)
    return str(failure(status).strerror) if status.error else None


def result_of(kind: Any, call: Any, *arguments: Any) -> Any:
    """Return what a call writes to its last argument, a pointer of this ``kind``. Raise EngineError if it fails."""
    result = ffi.new(kind)
    check(call(*arguments, result))
    return result[0]


def python_function(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    """Return a function of Python's C interface. The functions of ``ctypes.pythonapi`` belong to the whole program."""
    function: Callable[..., Any] = ctypes.PYFUNCTYPE(result, *arguments)((name, ctypes.pythonapi))
    return function


_add_reference = python_function("Py_IncRef", None, ctypes.py_object)


def new_reference(held: object) -> Any:
    """Return an object's address with a reference, which one of the ``gpufs_drop_object`` functions drops."""
    _add_reference(held)
    return ffi.cast("void *", id(held))


def log_configure(fd: int, level: int) -> None:
    """Choose where the engine's log lines go.

    Parameters
    ----------
    fd
        A descriptor, which stays the caller's and must stay open; -1 turns logging off, which is the default. The
        engine's threads wait for a descriptor that blocks. Lines for which a non-blocking one has no space are dropped
        and counted.
    level
        The least level, a number of :mod:`logging`.

    Raises
    ------
    OSError
        EBADF if the descriptor is not open.
    """
    if fd != -1:
        os.fstat(fd)
    check(lib.gpufs_log_configure(fd, level))


def engine_version() -> str:
    """Return the version of the native engine.

    Returns
    -------
    str
        The same as ``gpufs.__version__`` in a consistent build.
    """
    text: bytes = ffi.string(lib.gpufs_version())
    return text.decode()


def _close_in(pid: int, close: Callable[[int], Any], handle: int) -> Any:
    # A forked child has the numbers of the handles, but not the engine's threads.
    return close(handle) if os.getpid() == pid else None


class Handle:
    """An object of the engine, closed by close(), ``with``, garbage collection, or when the interpreter exits."""

    __slots__ = ("__weakref__", "_close", "_finalizer", "_handle")

    def _own(self, handle: int, close: Callable[[int], Any] = lib.gpufs_close, *, at_exit: bool = True) -> None:
        self._handle = handle
        self._close = close
        self._finalizer = weakref.finalize(self, _close_in, os.getpid(), close, handle)
        self._finalizer.atexit = at_exit

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return not self._finalizer.alive

    def close(self) -> None:
        """Close the object. A second call does nothing, nor does one in a forked child.

        Raises
        ------
        EngineError
            The engine cannot close it. ETIMEDOUT: a device is stalled, and what it uses is released once it goes on.
        """
        finalizer = self._finalizer.detach()  # of several threads one gets it
        if finalizer is not None:
            _, close, arguments, _ = finalizer
            status = close(*arguments)
            if status is not None:
                check(status)

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} cannot be copied or pickled: it refers to an object of this process")

    def __repr__(self) -> str:
        return f"<{type(self).__module__}.{type(self).__name__}{' (closed)' if self.closed else ''}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except EngineError as failed:
            # The interruption is more important than the stalled device that it interrupted.
            if error is None or failed.errno != ETIMEDOUT:
                raise
            error.add_note(f"and closing {self!r}: {failed}")
