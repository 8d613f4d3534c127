"""The header of an npy file, numpy's format for one array."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gpufs.formats import FormatError

MAGIC = b"\x93NUMPY"
# Magic, version, and the largest length field.
_PREFIX_BYTES = 12


@dataclass(frozen=True, slots=True)
class ArrayHeader:
    """A valid header. ``offset``: where the array's bytes begin in the file."""

    dtype: Any  # numpy.dtype
    shape: tuple[int, ...]
    fortran_order: bool
    offset: int
    bytes: int


def read_header(size: int, read: Callable[[int, int], bytes]) -> ArrayHeader:
    """Reads and checks the header of a file of ``size`` bytes, which ``read(offset, count)`` reads."""
    from numpy.lib import format as npy

    prefix = read(0, min(size, _PREFIX_BYTES))
    if not prefix.startswith(MAGIC) or len(prefix) < _PREFIX_BYTES:
        raise FormatError(f"the file has {size} bytes and begins with {prefix[: len(MAGIC)]!r}, not {MAGIC!r}")
    major = prefix[len(MAGIC)]
    # Version 3.0 is 2.0 with UTF-8 in the names of fields.
    width, parse = (2, npy.read_array_header_1_0) if major == 1 else (4, npy.read_array_header_2_0)
    if major not in (1, 2, 3):
        raise FormatError(f"the header has version {major}.{prefix[len(MAGIC) + 1]}; 1.0, 2.0 and 3.0 are known")
    begin = len(MAGIC) + 2
    length = int.from_bytes(prefix[begin : begin + width], "little")
    offset = begin + width + length
    if offset > size:
        raise FormatError(f"the header ends at {offset} and the file at {size}")
    try:
        shape, fortran_order, dtype = parse(io.BytesIO(read(begin, offset - begin)))
    except Exception as error:  # noqa: BLE001 - numpy raises many kinds, also tokenize's
        raise FormatError(f"the header of {length} bytes is not valid: {' '.join(str(error).split())}") from None
    count = 1
    for extent in shape:
        if extent < 0:
            raise FormatError(f"the shape {list(shape)} has a negative extent")
        count *= extent
    if dtype.hasobject:
        raise FormatError("the array contains Python objects, whose size is not in the header")
    if count * dtype.itemsize > size - offset:
        raise FormatError(
            f"{list(shape)} elements of {dtype} need {count * dtype.itemsize} bytes; the file has {size - offset} "
            "after its header"
        )
    return ArrayHeader(dtype, shape, fortran_order, offset, count * dtype.itemsize)
