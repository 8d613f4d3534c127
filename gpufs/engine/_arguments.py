"""Checks of what programs pass in: what is wrong is named, and nothing that would hurt them goes to the engine."""

import math
import re
from collections.abc import Mapping
from operator import index
from typing import Any, TypeVar

from gpufs.engine._native import ffi

_Value = TypeVar("_Value")


def unsigned(name: str, value: int) -> int:
    """A size, offset or address of 64 bits. TypeError for no whole number, ValueError for one that does not fit."""
    try:
        number = index(value)
    except TypeError:
        raise TypeError(f"{name}: {value!r} is not a whole number") from None
    if not 0 <= number < 1 << 64:
        raise ValueError(f"{name}: {number} is " + ("negative" if number < 0 else "more than 64 bits"))
    return number


def signed(name: str, value: int) -> int:
    """A number of 32 bits, as :func:`unsigned`."""
    try:
        number = index(value)
    except TypeError:
        raise TypeError(f"{name}: {value!r} is not a whole number") from None
    if not -1 << 31 <= number < 1 << 31:
        raise ValueError(f"{name}: {number} is out of range")
    return number


def seconds(name: str, value: float | None) -> float:
    """A time to wait for; None: for ever, negative: not at all. TypeError or ValueError for what is no time."""
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
    """What a word stands for. ValueError that names the words there are."""
    try:
        return table[value]
    except (KeyError, TypeError):
        raise ValueError(f"{name}: {value!r} is not one of {', '.join(table)}") from None


def text(name: str, value: str) -> bytes:
    """A text for the engine. TypeError or ValueError where it is none, or has a NUL in it."""
    if not isinstance(value, str):
        raise TypeError(f"{name}: {value!r} is not a text")
    encoded = value.encode(errors="surrogateescape")
    if b"\0" in encoded:
        raise ValueError(f"{name}: {value!r} has a NUL in it")
    return encoded


def instance(name: str, kind: type, value: object) -> None:
    """TypeError unless it is one."""
    if not isinstance(value, kind):
        raise TypeError(f"{name}: {type(value).__name__} is not {kind.__name__}")


def view_of(memory: Any, *, writable: bool) -> Any:
    """The bytes of an object with the buffer protocol, which they keep alive.

    TypeError for an object without it and for arrays of Python objects, whose bytes are references; ValueError or
    BufferError for memory that is not contiguous, or read-only where it is to be written.
    """
    try:
        view = ffi.from_buffer(memory, require_writable=writable)
    except TypeError:
        raise TypeError(
            f"memory: {type(memory).__name__} has no bytes to copy: give an array, a bytearray, a memoryview or an mmap"
        ) from None
    except (BufferError, ValueError) as error:
        raise type(error)(f"memory: {_remedy(str(error), memory)}") from None
    if has_references(memory):
        raise TypeError("memory: an array of Python objects has references in it, and no data")
    return view


def _remedy(said: str, memory: object) -> str:
    """What a library said of its object, and what to do about it."""
    if "contiguous" in said:
        return f"the {type(memory).__name__} is not contiguous in C's order: copy it first (numpy.ascontiguousarray)"
    if "read-only" in said or "writable" in said:
        return f"the {type(memory).__name__} is read-only, and is to be written: give one that can be"
    return said


def has_references(memory: Any) -> bool:
    """Whether it is an array of Python objects, whose bytes are no data."""
    kind = getattr(memory, "dtype", None)
    if kind is not None:
        return bool(getattr(kind, "hasobject", False))
    try:
        form = memoryview(memory).format
    except (TypeError, ValueError, BufferError):
        return False  # of a kind that formats do not know: plain data
    return "O" in re.sub(":[^:]*:", "", form)  # between colons stand names of fields
