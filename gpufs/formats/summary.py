"""What the numbers of a tensor are like, and how those of two tensors differ. Computed block by block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpufs.formats.elements import Block, codes, is_numeric, numbers


@dataclass(frozen=True, slots=True)
class Summary:
    """The finite numbers of a tensor, and how many others it has.

    Attributes
    ----------
    minimum, maximum
        Of the finite numbers; None if there are none.
    total
        The sum of the finite numbers.
    finite, nan, inf
        How many elements are finite, NaN, and infinite.
    """

    minimum: float | int | None = None
    maximum: float | int | None = None
    total: float = 0.0
    finite: int = 0
    nan: int = 0
    inf: int = 0

    @property
    def mean(self) -> float | None:
        """The mean of the finite numbers; None if there are none."""
        return self.total / self.finite if self.finite else None

    def times(self, count: int) -> Summary:
        """The summary of a tensor that repeats this one."""
        counts = (count * number for number in (self.finite, self.nan, self.inf))
        return Summary(self.minimum, self.maximum, count * self.total, *counts)

    def __add__(self, other: Summary) -> Summary:
        """The summary of both parts of a tensor."""
        low = [one for one in (self.minimum, other.minimum) if one is not None]
        high = [one for one in (self.maximum, other.maximum) if one is not None]
        return Summary(
            min(low, default=None),
            max(high, default=None),
            self.total + other.total,
            self.finite + other.finite,
            self.nan + other.nan,
            self.inf + other.inf,
        )


def summarize(dtype: str, block: Block) -> Summary:
    """The summary of a block of numbers."""
    values = numbers(dtype, block)
    nan = inf = 0
    if values.dtype.kind == "f":
        finite = np.isfinite(values)
        if not finite.all():
            nan = int(np.count_nonzero(np.isnan(values)))
            values = values[finite]
            inf = finite.size - values.size - nan
    if not values.size:
        return Summary(nan=nan, inf=inf)
    with np.errstate(over="ignore"):
        total = float(values.sum(dtype=np.float64))
    number = float if values.dtype.kind == "f" else int
    return Summary(number(values.min()), number(values.max()), total, values.size, nan, inf)


@dataclass(frozen=True, slots=True)
class Difference:
    """How two tensors of the same dtype and shape differ.

    Attributes
    ----------
    elements
        How many elements have other bits.
    largest
        The largest absolute difference of two numbers. NaN if one of a pair is NaN and the other is not.
    first
        The number of the first element that differs; None if there is none.
    """

    elements: int = 0
    largest: float | int = 0
    first: int | None = None

    def __add__(self, other: Difference) -> Difference:
        """The difference of both parts of two tensors."""
        pair = (self.largest, other.largest)
        largest = max(pair) if all(one == one for one in pair) else float("nan")
        first = [one for one in (self.first, other.first) if one is not None]
        return Difference(self.elements + other.elements, largest, min(first, default=None))


def compare(dtype: str, bits: int, one: Block, other: Block, start: int = 0) -> Difference:
    """The difference of two blocks of equal size. ``start``: the number of the first element."""
    different = codes(bits, one) != codes(bits, other)
    count = int(np.count_nonzero(different))
    if not count:
        return Difference()
    first = start + int(np.argmax(different))
    if not is_numeric(dtype):
        return Difference(count, 0, first)
    return Difference(count, _largest(numbers(dtype, one)[different], numbers(dtype, other)[different]), first)


def _largest(one: NDArray[Any], other: NDArray[Any]) -> float | int:
    if one.dtype.kind == "f":
        wide = np.promote_types(one.dtype, np.float64)
        with np.errstate(invalid="ignore", over="ignore"):
            return float(np.abs(one.astype(wide) - other.astype(wide)).max())
    # Of integers exactly: the difference of unsigned numbers, with wrap-around.
    wide = np.dtype(np.uint64)
    return int((np.maximum(one, other).astype(wide) - np.minimum(one, other).astype(wide)).max())
