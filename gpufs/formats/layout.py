"""Where the tensors of a file are, whatever its format."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass

from gpufs.formats import FormatError, safetensors
from gpufs.formats.kinds import PREFIX_BYTES, check_safetensors

# The name of the array in an npy file, which names none.
ARRAY_NAME = "array"
_MAGIC = b"\x93NUMPY"  # of npy files
# Magic, version, and the largest length field.
_NPY_PREFIX_BYTES = 12
# What numpy reads at most, unless it may unpickle.
_NPY_HEADER_BYTES = 10_000


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A tensor in a file.

    Attributes
    ----------
    dtype
        As the format names it: "BF16" in safetensors files, "float32" in npy files.
    bits
        Of an element.
    offset
        Of the first byte, from the start of the file.
    fortran_order
        Whether the first index changes fastest in the file.
    """

    name: str
    dtype: str
    bits: int
    shape: tuple[int, ...]
    offset: int
    bytes: int
    fortran_order: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    """The tensors of a file in the order of their offsets. ``format``: "safetensors" or "npy"."""

    format: str
    tensors: tuple[TensorPlace, ...]
    metadata: dict[str, str] | None = None


def read_layout(name: str, size: int, read: Callable[[int, int], bytes]) -> Layout | None:
    """Find the tensors of a file.

    Parameters
    ----------
    name
        The file's name. A name that ends with .safetensors or .npy decides the format, else the first bytes do.
    size
        Of the file, in bytes.
    read
        ``read(offset, count)`` returns bytes of the file.

    Returns
    -------
    Layout or None
        None if the file has neither format.

    Raises
    ------
    FormatError
        The header is damaged. The text has the figures.
    """
    prefix = read(0, min(size, safetensors.LENGTH_BYTES + 1))
    if name.endswith(".npy") or prefix.startswith(_MAGIC):
        return Layout("npy", (read_npy(size, read),))
    if not name.endswith(".safetensors") and not _resembles_safetensors(prefix, size):
        return None
    check_safetensors(read(0, min(size, PREFIX_BYTES)))
    length = safetensors.header_bytes(prefix, size)
    start = safetensors.LENGTH_BYTES + length
    header = safetensors.parse_header(read(safetensors.LENGTH_BYTES, length), size - start)
    places = (
        TensorPlace(
            name, entry.dtype, safetensors.BITS[entry.dtype], entry.shape, start + entry.start, entry.end - entry.start
        )
        for name, entry in header.entries.items()
    )
    return Layout("safetensors", tuple(places), header.metadata)


def _resembles_safetensors(prefix: bytes, size: int) -> bool:
    try:
        safetensors.header_bytes(prefix, size)
    except FormatError:
        return False
    return prefix.endswith(b"{")


def read_npy(size: int, read: Callable[[int, int], bytes]) -> TensorPlace:
    """The array of an npy file."""
    from numpy.lib import format as npy

    prefix = read(0, min(size, _NPY_PREFIX_BYTES))
    if not prefix.startswith(_MAGIC) or len(prefix) < _NPY_PREFIX_BYTES:
        raise FormatError(f"the file has {size} bytes and begins with {prefix[: len(_MAGIC)]!r}, not {_MAGIC!r}")
    major = prefix[len(_MAGIC)]
    # Version 3.0 is 2.0 with UTF-8 in the names of fields.
    width, parse = (2, npy.read_array_header_1_0) if major == 1 else (4, npy.read_array_header_2_0)
    if major not in (1, 2, 3):
        raise FormatError(f"the header has version {major}.{prefix[len(_MAGIC) + 1]}; 1.0, 2.0 and 3.0 are known")
    begin = len(_MAGIC) + 2
    length = int.from_bytes(prefix[begin : begin + width], "little")
    offset = begin + width + length
    if length > _NPY_HEADER_BYTES:
        raise FormatError(f"the header has {length} bytes; at most {_NPY_HEADER_BYTES} are read")
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
    bits = 8 * dtype.itemsize
    return TensorPlace(ARRAY_NAME, str(dtype), bits, shape, offset, count * dtype.itemsize, fortran_order)
