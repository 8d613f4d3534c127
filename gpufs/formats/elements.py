"""The elements of tensors as numbers: numpy's types, bfloat16, and floats of 8 bits and less; their statistics."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from math import gcd
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gpufs.formats import FormatError
from gpufs.formats.element_types import named

Block: TypeAlias = "bytes | memoryview"
# About the bytes that are converted at once. Elements of 6 bits fill whole bytes in groups of 3 bytes.
_BLOCK_BYTES = 3 << 20


@dataclass(frozen=True)
class _SmallFloat:
    """A float of at most 8 bits. ``special``: which codes are not numbers."""

    bits: int
    mantissa: int
    bias: int
    special: str = ""

    @functools.cached_property
    def values(self) -> NDArray[np.float32]:
        code = np.arange(1 << self.bits)
        if self.special == "scale":  # powers of two without a sign
            values = 2.0 ** (code - self.bias)
            values[-1] = np.nan
            return values.astype(np.float32)
        top = (1 << (self.bits - 1 - self.mantissa)) - 1
        exponent = (code >> self.mantissa) & top
        fraction = (code & ((1 << self.mantissa) - 1)) / (1 << self.mantissa)
        values = np.where(
            exponent > 0, (1 + fraction) * 2.0 ** (exponent - self.bias), fraction * 2.0 ** (1 - self.bias)
        )
        if self.special == "ieee":
            values[exponent == top] = np.where(fraction[exponent == top] == 0, np.inf, np.nan)
        elif self.special == "finite":
            values[(code & 0x7F) == 0x7F] = np.nan
        values[code >> (self.bits - 1) == 1] *= -1
        if self.special == "unsigned zero":
            values[0x80] = np.nan
        return values.astype(np.float32)


_SMALL = {
    "F4": _SmallFloat(4, 1, 1),
    "F6_E2M3": _SmallFloat(6, 3, 1),
    "F6_E3M2": _SmallFloat(6, 2, 3),
    "float8_e5m2": _SmallFloat(8, 2, 15, "ieee"),
    "float8_e4m3fn": _SmallFloat(8, 3, 7, "finite"),
    "float8_e4m3fnuz": _SmallFloat(8, 3, 8, "unsigned zero"),
    "float8_e5m2fnuz": _SmallFloat(8, 2, 16, "unsigned zero"),
    "float8_e8m0fnu": _SmallFloat(8, 0, 127, "scale"),
}


def is_numeric(dtype: str) -> bool:
    """Return whether the elements are numbers. Texts, dates and records are not."""
    try:
        return named(dtype) is not None or np.dtype(dtype).kind in "biufc"
    except (TypeError, ValueError, SyntaxError):
        return False  # a record, which no name stands for


def element_bits(dtype: str) -> int:
    """Return the size of an element of a number's type. FormatError if the type is unknown."""
    known = named(dtype)
    if known is not None:
        return known.bits
    if not re.fullmatch("[<>|=]?[A-Za-z][A-Za-z0-9_]{0,31}", dtype) or not is_numeric(dtype):
        raise FormatError(f"{dtype[:40]!r} is not a type of numbers like float32, bfloat16 or uint8")
    return 8 * np.dtype(dtype).itemsize


def unit_bytes(bits: int) -> int:
    """Return the least size that contains whole elements."""
    return bits // gcd(bits, 8) if bits < 8 else bits // 8


def block_bytes(bits: int) -> int:
    """Return the size of a block that is converted at once. It contains whole elements."""
    element = max(bits // 8, 1)
    return max(_BLOCK_BYTES // element, 1) * element


def codes(bits: int, block: Block) -> NDArray[Any]:
    """Return the bits of each element of ``bits`` bits. Elements are the same where these are equal."""
    if bits < 8:
        packed = np.frombuffer(block, np.uint8)
        each = np.unpackbits(packed, bitorder="little").reshape(-1, bits)
        combined: NDArray[Any] = each @ (1 << np.arange(bits, dtype=np.uint8))
        return combined
    if bits in (8, 16, 32, 64):
        return np.frombuffer(block, f"<u{bits // 8}")
    return np.frombuffer(block, np.dtype((np.void, bits // 8)))


def numbers(dtype: str, block: Block) -> NDArray[Any]:
    """Return the elements as numpy's integers or floats. Complex numbers become their magnitudes."""
    known = named(dtype)
    if known is not None and known.name in _SMALL:
        small = _SMALL[known.name]
        return np.take(small.values, codes(small.bits, block))
    if known is not None and known.name == "bfloat16":
        return (np.frombuffer(block, "<u2").astype(np.uint32) << 16).view(np.float32)
    values: NDArray[Any] = np.frombuffer(block, dtype if known is None else known.typestr)
    if values.dtype.kind == "c":
        values = np.abs(values)
    if values.dtype.kind == "b":
        return values.view(np.uint8)
    return values.astype(np.float32) if values.dtype.itemsize == 2 and values.dtype.kind == "f" else values


# ---- statistics, computed block by block ----


@dataclass(frozen=True, slots=True)
class Summary:
    """The finite numbers of a tensor, and how many others it has."""

    # Of the finite numbers; None if there are none.
    minimum: float | int | None = None
    maximum: float | int | None = None
    total: float = 0.0  # the sum of the finite numbers
    # How many elements are finite, NaN, and infinite.
    finite: int = 0
    nan: int = 0
    inf: int = 0
    first_nan: int | None = None  # the number of the first element that is NaN; None if there is none

    @property
    def mean(self) -> float | None:
        """The mean of the finite numbers; None if there are none."""
        return self.total / self.finite if self.finite else None

    def times(self, count: int) -> Summary:
        """Return the summary of a tensor that repeats this one."""
        counts = (count * number for number in (self.finite, self.nan, self.inf))
        return Summary(self.minimum, self.maximum, count * self.total, *counts)

    def __add__(self, other: Summary) -> Summary:
        """Return the summary of both parts of a tensor."""
        low = [value for value in (self.minimum, other.minimum) if value is not None]
        high = [value for value in (self.maximum, other.maximum) if value is not None]
        first = [value for value in (self.first_nan, other.first_nan) if value is not None]
        return Summary(
            min(low, default=None),
            max(high, default=None),
            self.total + other.total,
            self.finite + other.finite,
            self.nan + other.nan,
            self.inf + other.inf,
            min(first, default=None),
        )


def summarize(dtype: str, block: Block, start: int = 0) -> Summary:
    """Return the summary of a block of numbers. ``start``: the number of the first element."""
    values = numbers(dtype, block)
    nan = inf = 0
    first_nan = None
    if values.dtype.kind == "f":
        finite = np.isfinite(values)
        if not finite.all():
            is_nan = np.isnan(values)
            nan = int(np.count_nonzero(is_nan))
            first_nan = start + int(np.argmax(is_nan)) if nan else None
            values = values[finite]
            inf = finite.size - values.size - nan
    if not values.size:
        return Summary(nan=nan, inf=inf, first_nan=first_nan)
    with np.errstate(over="ignore", invalid="ignore"):
        total = float(values.sum(dtype=np.float64))
    number = float if values.dtype.kind == "f" else int
    return Summary(number(values.min()), number(values.max()), total, values.size, nan, inf, first_nan)


@dataclass(frozen=True, slots=True)
class Difference:
    """How two tensors of the same dtype and shape differ."""

    elements: int = 0  # how many elements have other bits
    # The largest absolute difference of two numbers. NaN if one of a pair is NaN and the other is not.
    largest: float | int = 0
    first: int | None = None  # the number of the first element that differs; None if there is none

    def __add__(self, other: Difference) -> Difference:
        """Return the difference of both parts of two tensors."""
        pair = (self.largest, other.largest)
        largest = max(pair) if all(value == value for value in pair) else float("nan")
        first = [value for value in (self.first, other.first) if value is not None]
        return Difference(self.elements + other.elements, largest, min(first, default=None))


def compare(dtype: str, bits: int, ours: Block, theirs: Block, start: int) -> Difference:
    """Return the difference of two blocks of equal size. ``start``: the number of the first element."""
    different = codes(bits, ours) != codes(bits, theirs)
    count = int(np.count_nonzero(different))
    if not count:
        return Difference()
    first = start + int(np.argmax(different))
    if not is_numeric(dtype):
        return Difference(count, 0, first)
    return Difference(count, _largest(numbers(dtype, ours)[different], numbers(dtype, theirs)[different]), first)


def _largest(ours: NDArray[Any], theirs: NDArray[Any]) -> float | int:
    if ours.dtype.kind == "f":
        wide = np.promote_types(ours.dtype, np.float64)
        with np.errstate(invalid="ignore", over="ignore"):
            return float(np.abs(ours.astype(wide) - theirs.astype(wide)).max())
    # The difference of integers is exact: that of unsigned numbers, with wrap-around.
    wide = np.dtype(np.uint64)
    return int((np.maximum(ours, theirs).astype(wide) - np.minimum(ours, theirs).astype(wide)).max())
