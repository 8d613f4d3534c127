"""Where the tensors of a file are, whatever its format."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from math import prod
from operator import mul

from gpufs.formats import FormatError, archive, gguf, safetensors, torch_archive
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
    """The tensors of a file in the order of their offsets.

    ``format``: "safetensors", "npy", "npz", "GGUF" or "torch.save".
    """

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
        None if the file has none of these formats, or is a zip archive whose tensors are not in the file as they are:
        compressed, or below a pickle that needs more than tensors and containers.

    Raises
    ------
    FormatError
        The header is damaged. The text has the figures.
    """
    prefix = read(0, min(size, safetensors.LENGTH_BYTES + 1))
    if name.endswith(".npy") or prefix.startswith(_MAGIC):
        return Layout("npy", (read_npy(size, read),))
    if not name.endswith(".safetensors"):
        if prefix.startswith(gguf.MAGIC):
            return _gguf_layout(size, read)
        if prefix.startswith(archive.MAGIC):
            try:
                return _archive_layout(size, read)
            except FormatError:
                return None
        if not _resembles_safetensors(prefix, size):
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


def _gguf_layout(size: int, read: Callable[[int, int], bytes]) -> Layout:
    tensors, metadata = gguf.read_gguf(size, read)
    places = (
        TensorPlace(one.name, one.type, safetensors.BITS.get(one.type, 8), one.shape, one.offset, one.bytes)
        for one in tensors
    )
    return Layout("GGUF", tuple(places), metadata)


def _archive_layout(size: int, read: Callable[[int, int], bytes]) -> Layout | None:
    members = archive.read_members(size, read)
    if torch_archive.pickle_name(members) is not None:
        places = [_place_of_stored(*item) for item in torch_archive.named(torch_archive.read_torch_archive(size, read))]
        return Layout("torch.save", tuple(sorted(places, key=lambda place: place.offset)))
    arrays = []
    for name, member in members.items():
        if not name.endswith(".npy"):
            return None
        place = read_npy(member.bytes, partial(_read_from, read, member.offset))
        arrays.append(replace(place, name=name.removesuffix(".npy"), offset=member.offset + place.offset))
    return Layout("npz", tuple(arrays)) if arrays else None


def _read_from(read: Callable[[int, int], bytes], start: int, offset: int, count: int) -> bytes:
    return read(start + offset, count)


def _place_of_stored(name: str, tensor: torch_archive.StoredTensor) -> TensorPlace:
    bits = safetensors.BITS[tensor.dtype]
    offset, count = tensor.place(bits // 8)
    elements = prod(tensor.shape)
    dtype = tensor.dtype
    if count != elements * bits // 8:
        dtype += " strided"  # other elements lie between those of the tensor, so its bytes are not its numbers
    columns = tuple(accumulate(tensor.shape[:-1], mul, initial=1))  # the strides if the first index changes fastest
    fortran = len(tensor.shape) > 1 and tensor.strides == columns and tensor.strides[-1] != 1
    return TensorPlace(name, dtype, bits, tensor.shape, offset, count, fortran)


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
