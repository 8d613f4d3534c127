"""Checks of arguments: an error names the argument and what is wrong with it."""

import math
import re
from collections.abc import Mapping
from operator import index
from typing import Any, TypeVar

from gpufs.engine._native import ffi

_Value = TypeVar("_Value")


def _whole(name: str, value: int) -> int:
    try:
        return index(value)
    except TypeError:
        raise TypeError(f"{name}: {value!r} is not a whole number") from None


def unsigned(name: str, value: int) -> int:
    """Return a size, offset or address of 64 bits. TypeError if it is not an integer, ValueError if it does not fit."""
    number = _whole(name, value)
    if not 0 <= number < 1 << 64:
        raise ValueError(f"{name}: {number} is " + ("negative" if number < 0 else "more than 64 bits"))
    return number


def signed(name: str, value: int) -> int:
    """Return a number of 32 bits, as :func:`unsigned`."""
    number = _whole(name, value)
    if not -1 << 31 <= number < 1 << 31:
        raise ValueError(f"{name}: {number} is out of range")
    return number


def seconds(name: str, value: float | None) -> float:
    """Return a time to wait: None is for ever, a negative number 0. TypeError or ValueError for anything else."""
    if value is None:
        return math.inf
    try:
        number = float(value)
    except OverflowError:  # a whole number of that many digits
        return math.inf if value > 0 else 0.0
    except (TypeError, ValueError):
        raise TypeError(f"{name}: {value!r} is not a time in seconds") from None
    if math.isnan(number):
        raise ValueError(f"{name}: {value!r} is not a time in seconds")
    return max(number, 0.0)


def choice(name: str, table: Mapping[str, _Value], value: str) -> _Value:
    """Return the value of a word. ValueError, which lists the words, for another one."""
    try:
        return table[value]
    except (KeyError, TypeError):
        raise ValueError(f"{name}: {value!r} is not one of {', '.join(table)}") from None


def text(name: str, value: str) -> bytes:
    """Return a text as bytes for the engine. TypeError if it is not a str, ValueError if it contains a NUL."""
    if not isinstance(value, str):
        raise TypeError(f"{name}: {value!r} is not a str")
    encoded = value.encode(errors="surrogateescape")
    if b"\0" in encoded:
        raise ValueError(f"{name}: {value!r} contains a NUL")
    return encoded


def instance(name: str, kind: type, value: object) -> None:
    """Raise TypeError unless the value is of this kind."""
    if not isinstance(value, kind):
        raise TypeError(f"{name}: {type(value).__name__} is not {kind.__name__}")


def view_of(memory: Any, *, writable: bool) -> Any:
    """Return the bytes of an object with the buffer protocol, as a cffi object that keeps it alive.

    TypeError for an object without the protocol and for arrays of Python objects, whose bytes are references;
    ValueError or BufferError for memory that is not contiguous, or is read-only although ``writable``.
    """
    try:
        view = ffi.from_buffer(memory, require_writable=writable)
    except TypeError:
        raise TypeError(
            f"memory: {type(memory).__name__} has no bytes to copy: pass an array, a bytearray, a memoryview or an mmap"
        ) from None
    except (BufferError, ValueError) as error:
        raise type(error)(f"memory: {_remedy(str(error), memory)}") from None
    if has_references(memory):
        raise TypeError("memory: an array of Python objects contains references, not data")
    return view


def _remedy(said: str, memory: object) -> str:
    """Add to a library's message what to do about it."""
    if "contiguous" in said:
        return f"the {type(memory).__name__} is not contiguous in C order: copy it first (numpy.ascontiguousarray)"
    if "read-only" in said or "writable" in said:
        return f"the {type(memory).__name__} is read-only: pass one that can be written"
    return said


def has_references(memory: Any) -> bool:
    """Return whether it is an array of Python objects, whose bytes are references."""
    kind = getattr(memory, "dtype", None)
    if kind is not None:
        return bool(getattr(kind, "hasobject", False))
    try:
        form = memoryview(memory).format
    except (TypeError, ValueError, BufferError):
        return False  # a kind without a format, such as numpy's dates: plain data
    return "O" in re.sub(":[^:]*:", "", form)  # names of fields are between colons
