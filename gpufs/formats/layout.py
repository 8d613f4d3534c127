"""Finds the tensors of a file, whatever its format, and names formats whose tensors gpufs does not read."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from math import prod
from operator import mul
from typing import Any, Final, Self

from gpufs.formats import FormatError, archives, gguf, safetensors

# The name of the array in an npy file, which names none.
ARRAY_NAME = "array"
NPY_MAGIC: Final = b"\x93NUMPY"
# Magic, version, and the largest length field.
_NPY_PREFIX_BYTES = 12
# What numpy reads at most, unless it may unpickle.
_NPY_HEADER_BYTES = 10_000
_SHOWN: Final = 100  # characters of a name, in messages


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
    if name.endswith(".npy") or prefix.startswith(NPY_MAGIC):
        return Layout("npy", (read_npy(size, read),))
    if not name.endswith(".safetensors"):
        if prefix.startswith(gguf.MAGIC):
            return _gguf_layout(size, read)
        if prefix.startswith((archives.MAGIC, archives.EMPTY_MAGIC)):
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
        TensorPlace(
            tensor.name, tensor.type, safetensors.BITS.get(tensor.type, 8), tensor.shape, tensor.offset, tensor.bytes
        )
        for tensor in tensors
    )
    return Layout("GGUF", tuple(places), metadata)


def _archive_layout(size: int, read: Callable[[int, int], bytes]) -> Layout | None:
    members = archives.read_members(size, read)
    if archives.pickle_name(members) is not None:
        places = [_place_of_stored(*item) for item in archives.named(archives.read_torch_archive(size, read))]
        return Layout("torch.save", tuple(sorted(places, key=lambda place: place.offset)))
    arrays, others = read_npz(members, read)
    if members and not arrays:
        return None
    return Layout("npz", tuple(arrays), others or None)


def read_npz(
    members: Mapping[str, archives.Member], read: Callable[[int, int], bytes]
) -> tuple[list[TensorPlace], dict[str, str]]:
    """Return the arrays of an npz file, and why each other member is not one, both by their names in numpy."""
    arrays: list[TensorPlace] = []
    others: dict[str, str] = {}
    for name, member in members.items():
        shown = name.removesuffix(".npy")
        if shown == name:
            others[name] = "not an array"
            continue
        try:
            place = read_npy(member.bytes, partial(_read_from, read, member.offset))
        except ObjectsError:
            others[shown] = "an array of Python objects"
            continue
        except FormatError as error:
            raise FormatError(f"member {name[:_SHOWN]!r}: {error}") from None
        arrays.append(replace(place, name=shown, offset=member.offset + place.offset))
    return arrays, others


class ObjectsError(FormatError):
    """An array contains Python objects."""


def _read_from(read: Callable[[int, int], bytes], start: int, offset: int, count: int) -> bytes:
    return read(start + offset, count)


def _place_of_stored(name: str, tensor: archives.StoredTensor) -> TensorPlace:
    bits = safetensors.BITS[tensor.dtype]
    offset, count = tensor.place(bits // 8)
    elements = prod(tensor.shape)
    dtype = tensor.dtype
    if count != elements * bits // 8:
        dtype += " strided"  # other elements lie between those of the tensor, so its bytes are not its numbers
    # Nor are they its numbers if torch conjugates or negates them when it reads.
    dtype += " conjugated" * tensor.conjugated + " negated" * tensor.negated
    columns = tuple(accumulate(tensor.shape[:-1], mul, initial=1))  # the strides if the first index changes fastest
    fortran = len(tensor.shape) > 1 and tensor.strides == columns and tensor.strides[-1] != 1
    return TensorPlace(name, dtype, bits, tensor.shape, offset, count, fortran)


def read_npy(size: int, read: Callable[[int, int], bytes]) -> TensorPlace:
    """Return the array of an npy file."""
    from numpy.lib import format as npy

    prefix = read(0, min(size, _NPY_PREFIX_BYTES))
    if not prefix.startswith(NPY_MAGIC) or len(prefix) < _NPY_PREFIX_BYTES:
        raise FormatError(f"the file has {size} bytes and begins with {prefix[: len(NPY_MAGIC)]!r}, not {NPY_MAGIC!r}")
    major = prefix[len(NPY_MAGIC)]
    # Version 3.0 is 2.0 with UTF-8 in the names of fields.
    width, parse = (2, npy.read_array_header_1_0) if major == 1 else (4, npy.read_array_header_2_0)
    if major not in (1, 2, 3):
        raise FormatError(f"the header has version {major}.{prefix[len(NPY_MAGIC) + 1]}; 1.0, 2.0 and 3.0 are known")
    begin = len(NPY_MAGIC) + 2
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
        raise ObjectsError("the array contains Python objects, whose size is not in the header")
    if count * dtype.itemsize > size - offset:
        raise FormatError(
            f"{list(shape)} elements of {dtype} need {count * dtype.itemsize} bytes; the file has {size - offset} "
            "after its header"
        )
    bits = 8 * dtype.itemsize
    return TensorPlace(ARRAY_NAME, str(dtype), bits, shape, offset, count * dtype.itemsize, fortran_order)


# ---- other formats, by their first bytes ----

# What recognize() needs of the beginning of a file.
PREFIX_BYTES: Final = 512
_ZIP_NAME: Final = 30  # where the name of the first member begins
_TAR_MAGIC: Final = 257
# The number that torch.save pickled first before it wrote zip files.
_TORCH_LEGACY: Final = b"\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"


@dataclass(frozen=True, slots=True)
class Format:
    """A format.

    Attributes
    ----------
    name
        For people: "GGUF", "zip of torch.save".
    remedy
        What reads such a file, or makes another one of it.
    """

    name: str
    remedy: str


_UNPACK: Final = "unpack it first"
_GGUF: Final = Format("GGUF", "gpufs.torch.load(path) has its tensors in place, gguf.GGUFReader(path) reads it")
_TORCH: Final = Format(
    "zip of torch.save", "gpufs.torch.load(path) has its tensors in place, torch.load(path) reads it"
)
_NPZ: Final = Format("npz", "gpufs.torch.load(path) has its arrays in place, numpy.load(path) reads it")
_HTML: Final = Format("HTML", "a web page, so the download has failed")
_POINTER: Final = Format("Git LFS pointer", "`git lfs pull` downloads the file that it stands for")
_NPY: Final = Format("npy", "gpufs.torch.load(path) has its array in place, numpy.load(path) reads it")

# The formats that their first bytes show.
_MAGIC: Final = (
    (gguf.MAGIC, _GGUF),
    (NPY_MAGIC, _NPY),
    (b"\x89HDF\r\n\x1a\n", Format("HDF5", "h5py.File(path) reads it")),
    (b"PAR1", Format("Parquet", "pyarrow.parquet.read_table(path) reads it")),
    (b"ARROW1", Format("Arrow", "pyarrow.memory_map(path) and pyarrow.ipc.open_file() read it")),
    (b"version https://git-lfs", _POINTER),
    (b"\x1f\x8b", Format("gzip", _UNPACK)),
    (b"\x28\xb5\x2f\xfd", Format("zstd", _UNPACK)),
    (b"\xfd7zXZ\0", Format("xz", _UNPACK)),
    (b"BZh", Format("bzip2", _UNPACK)),
    (b"\x04\x22\x4d\x18", Format("lz4", _UNPACK)),
    (b"\x7fELF", Format("ELF", "a program or a library")),
    (b"<!doctype html", _HTML),
    (b"<!DOCTYPE html", _HTML),
    (b"<html", _HTML),
)


def recognize(prefix: bytes) -> Format | None:
    """Return the format of a file by its first bytes, of which PREFIX_BYTES are enough; None if it is unknown."""
    for magic, kind in _MAGIC:
        if prefix.startswith(magic):
            return kind
    if prefix.startswith(archives.MAGIC):
        return _kind_of_zip(prefix)
    if prefix.startswith(archives.EMPTY_MAGIC):
        return Format("zip", "it has no members")
    if prefix[_TAR_MAGIC : _TAR_MAGIC + 5] == b"ustar":
        return Format("tar", _UNPACK)
    # A pickle begins with its protocol, and from protocol 4 on with a frame.
    if prefix[:1] == b"\x80" and prefix[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        if prefix[2:].startswith(_TORCH_LEGACY):
            return Format("old torch.save", "torch.load(path) reads it, gpufs.torch.publish() makes safetensors of it")
        if prefix[1] < 4 or prefix[2:3] == b"\x95":
            return Format("pickle", "torch.load(path) or pickle.load() may read it: only from people whom you trust")
    return None


def check_safetensors(prefix: bytes) -> None:
    """Raise FormatError if a file that should be safetensors has another known format, which the text names."""
    kind = None if prefix[8:9] == b"{" else recognize(prefix)
    if kind is not None:
        raise FormatError(f"the format is {kind.name}, not safetensors: {kind.remedy}")


def _kind_of_zip(prefix: bytes) -> Format:
    length = int.from_bytes(prefix[26:28], "little")
    name = prefix[_ZIP_NAME : _ZIP_NAME + length]
    if name.endswith((b"/data.pkl", b"/byteorder", b"/.format_version")):
        return _TORCH
    if name.endswith(b".npy"):
        return _NPZ
    return Format("zip", _UNPACK)


# ---- files without a header ----

# The extended attribute that register() sets.
TYPE_ATTRIBUTE: Final = "user.tensor"
_MAX_DIMENSIONS: Final = 64
_MAX_TEXT: Final = 1024
_SCALAR: Final = "scalar"


@dataclass(frozen=True, slots=True)
class GivenType:
    """The type of a file without a header.

    Attributes
    ----------
    dtype
        A name of numpy or torch, for example "float32" or "bfloat16", or one of safetensors.
    shape
        None: one dimension of as many elements as the file has.
    """

    dtype: str
    shape: tuple[int, ...] | None = None

    @classmethod
    def of_array(cls, array: Any) -> Self | None:
        """Return the type of an array; None if it has none, as an address."""
        dtype, shape = getattr(array, "dtype", None), getattr(array, "shape", None)
        if dtype is None or shape is None:
            return None
        return cls(str(dtype).removeprefix("torch."), tuple(int(extent) for extent in shape))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the text that str() gives. FormatError if it is not one."""
        dtype, _, shape = text.partition(" ")
        return cls(dtype, parse_shape(shape))

    def __str__(self) -> str:
        return self.dtype if self.shape is None else f"{self.dtype} {'x'.join(map(str, self.shape)) or _SCALAR}"

    def layout(self, size: int) -> Layout:
        """Return the one tensor of a file of ``size`` bytes. FormatError if they do not fit."""
        from gpufs.formats.elements import element_bits

        bits = element_bits(self.dtype)
        if self.shape is None:
            if 8 * size % bits:
                raise FormatError(f"the file has {size} bytes, which are not whole elements of {self.dtype}")
            shape: tuple[int, ...] = (8 * size // bits,)
        else:
            shape = self.shape
        needed = -(-prod(shape) * bits // 8)
        if needed != size:
            raise FormatError(f"the file has {size} bytes, and {self} needs {needed}")
        return Layout("raw", (TensorPlace(ARRAY_NAME, self.dtype, bits, shape, 0, size),))


def parse_shape(text: str) -> tuple[int, ...]:
    """Read a shape as `gpufs inspect` prints it: "256x128" or "scalar". FormatError if it is not one."""
    if text == _SCALAR:
        return ()
    extents = text.split("x")
    if (
        len(text) > _MAX_TEXT
        or len(extents) > _MAX_DIMENSIONS
        or not all(re.fullmatch("[0-9]{1,19}", extent) for extent in extents)
    ):
        raise FormatError(f"{text[:40]!r} is not a shape like 256x128")
    return tuple(map(int, extents))
