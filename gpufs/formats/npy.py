"""Arrays of numpy: npy files, and the members of npz files."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Final

from numpy.lib import format as npy

from gpufs.formats import FormatError, archives
from gpufs.formats.budget import BoundedFile, BudgetExceeded
from gpufs.formats.layout import ARRAY_NAME, MAX_EXTENT, TensorPlace

MAGIC: Final = b"\x93NUMPY"
# Magic, version, and the largest length field.
_PREFIX_BYTES: Final = 12
# numpy reads no longer header, unless it may unpickle.
_HEADER_BYTES: Final = 10_000
_CHARACTER_BYTES: Final = 32  # what a character of the header takes, parsed
_MAX_DIMENSIONS: Final = 64


def read_npz(members: Mapping[str, archives.Member], file: BoundedFile) -> tuple[list[TensorPlace], dict[str, str]]:
    """Return the arrays of an npz file, and why each other member is not one, both by their names in numpy."""
    arrays: list[TensorPlace] = []
    others: dict[str, str] = {}
    for name, member in members.items():
        shown = name.removesuffix(".npy")
        if shown == name:
            others[name] = "not an array"
            continue
        try:
            place = read_npy(file, member.offset, member.bytes)
        except ObjectsError:
            others[shown] = "an array of Python objects"
            continue
        except BudgetExceeded:
            raise
        except FormatError as error:
            raise FormatError(f"member {name!r}: {error}") from None
        arrays.append(replace(place, name=shown))
    return arrays, others


class ObjectsError(FormatError):
    """An array contains Python objects."""


def read_npy(file: BoundedFile, start: int, size: int) -> TensorPlace:
    """Return the array in ``size`` bytes of the file from ``start`` on."""
    prefix = file.read(start, min(size, _PREFIX_BYTES))
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
    if length > _HEADER_BYTES:
        raise FormatError(f"the header has {length} bytes; at most {_HEADER_BYTES} are read")
    if offset > size:
        raise FormatError(f"the header ends at {offset} and the file at {size}")
    file.take(_CHARACTER_BYTES * length)
    try:
        shape, fortran_order, dtype = parse(io.BytesIO(file.read(start + begin, offset - begin)))
    except FormatError:
        raise
    except Exception as error:  # noqa: BLE001 - numpy raises many kinds, also tokenize's
        raise FormatError(f"the header of {length} bytes is not valid: {' '.join(str(error).split())}") from None
    if len(shape) > _MAX_DIMENSIONS or not all(type(extent) is int and 0 <= extent <= MAX_EXTENT for extent in shape):
        raise FormatError(f"the shape is not of at most {_MAX_DIMENSIONS} unsigned numbers")
    count = prod(shape)
    if dtype.hasobject:
        raise ObjectsError("the array contains Python objects, whose size is not in the header")
    if count * dtype.itemsize > size - offset:
        raise FormatError(
            f"{list(shape)} elements of {dtype} need {count * dtype.itemsize} bytes; the file has {size - offset} "
            "after its header"
        )
    bits = 8 * dtype.itemsize
    return TensorPlace(ARRAY_NAME, str(dtype), bits, shape, start + offset, count * dtype.itemsize, fortran_order)
