"""The table of formats: how files of each are recognized, what finds their tensors, and what else reads them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from operator import mul
from typing import Final

from gpufs.formats import FormatError, archives, gguf, npy, safetensors
from gpufs.formats.budget import BoundedFile, BudgetExceeded
from gpufs.formats.element_types import named
from gpufs.formats.layout import Layout, TensorPlace

# recognize() needs so many bytes of the beginning of a file.
PREFIX_BYTES: Final = 512
_ZIP_NAME: Final = 30  # where the name of the first member begins
_TAR_MAGIC: Final = 257
# The number that torch.save pickled first before it wrote zip files.
_TORCH_LEGACY: Final = b"\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"


class NotInPlace(FormatError):
    """The tensors of an archive of torch or numpy are not in the file as they are, or the archive is damaged."""


@dataclass(frozen=True, slots=True, eq=False)
class Format:
    """A format."""

    name: str  # for people: "GGUF", "torch.save"
    remedy: str  # what reads such a file, or makes another one of it
    magic: tuple[bytes, ...] = ()  # what files have at the offset ``at``: one of these
    at: int = 0
    # What the name of the first member of a zip archive ends with: one of these.
    first_member: tuple[bytes, ...] = (b"",)
    suffix: str | None = None  # a file whose name ends so has this format, whatever its bytes are
    # Finds the tensors of a file. None: gpufs does not read them.
    layout: Callable[[BoundedFile], Layout | None] | None = None

    def begins(self, prefix: bytes) -> bool:
        """Return whether a file with this beginning has the format."""
        if not prefix.startswith(self.magic, self.at):
            return False
        length = int.from_bytes(prefix[26:28], "little")
        return prefix[_ZIP_NAME : _ZIP_NAME + length].endswith(self.first_member)


def read_layout(name: str, file: BoundedFile) -> Layout | None:
    """Find the tensors of a file. A name that ends with .safetensors or .npy decides the format, else the first bytes.

    None if the file has none of these formats. FormatError if the header is damaged; NotInPlace if the file is a zip
    archive whose tensors are not in it as they are: compressed, or below a pickle that needs more than tensors and
    containers.
    """
    prefix = file.beginning(PREFIX_BYTES)
    found = next((each for each in FORMATS if each.suffix and name.endswith(each.suffix)), None)
    if found is None:
        found = SAFETENSORS if _resembles_safetensors(prefix, file.size) else recognize(prefix)
    return None if found is None or found.layout is None else found.layout(file)


def recognize(prefix: bytes) -> Format | None:
    """Return the format of a file by its first bytes, of which PREFIX_BYTES are enough; None if it is unknown.

    They do not show safetensors.
    """
    return next((each for each in FORMATS if each.begins(prefix)), None)


def check_safetensors(prefix: bytes) -> None:
    """Raise FormatError if a file that should be safetensors has another known format, which the text names."""
    kind = None if prefix[8:9] == b"{" else recognize(prefix)
    if kind is not None:
        raise FormatError(f"the format is {kind.name}, not safetensors: {kind.remedy}")


# ---- the layouts ----


def _resembles_safetensors(prefix: bytes, size: int) -> bool:
    try:
        safetensors.header_bytes(prefix, size)
    except FormatError:
        return False
    return prefix[safetensors.LENGTH_BYTES :].startswith(b"{")


def _safetensors_layout(file: BoundedFile) -> Layout:
    check_safetensors(file.beginning(PREFIX_BYTES))
    start, header = safetensors.read_header(file)
    places = (
        TensorPlace(
            name, entry.dtype, safetensors.BITS[entry.dtype], entry.shape, start + entry.start, entry.end - entry.start
        )
        for name, entry in header.entries.items()
    )
    return Layout("safetensors", tuple(places), header.metadata)


def _gguf_layout(file: BoundedFile) -> Layout:
    tensors, metadata = gguf.read_gguf(file)
    places = (
        TensorPlace(
            tensor.name, tensor.type, safetensors.BITS.get(tensor.type, 8), tensor.shape, tensor.offset, tensor.bytes
        )
        for tensor in tensors
    )
    return Layout("GGUF", tuple(places), metadata)


def _npy_layout(file: BoundedFile) -> Layout:
    return Layout("npy", (npy.read_npy(file, 0, file.size),))


def _archive_layout(file: BoundedFile) -> Layout | None:
    try:
        members = archives.read_members(file)
        if archives.pickle_name(members) is not None:
            stored = archives.named(archives.read_torch_archive(file, members), file)
            places = [_place_of_stored(*item) for item in stored]
            return Layout("torch.save", tuple(sorted(places, key=lambda place: place.offset)))
        arrays, others = npy.read_npz(members, file)
    except BudgetExceeded:
        raise
    except FormatError as error:
        raise NotInPlace(str(error)) from None
    return None if members and not arrays else Layout("npz", tuple(arrays), others or None)


def _zip_layout(file: BoundedFile) -> Layout | None:
    """Look for tensors in an archive whose first member shows none."""
    try:
        return _archive_layout(file)
    except NotInPlace:
        return None


def _place_of_stored(name: str, tensor: archives.StoredTensor) -> TensorPlace:
    element = named(tensor.dtype)
    assert element is not None, tensor.dtype  # as the pickle was read
    bits = element.bits
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


# ---- the table: of formats with the same magic the first one counts ----

SAFETENSORS: Final = Format(
    "safetensors", "gpufs.torch.load_file(path) has its tensors", suffix=".safetensors", layout=_safetensors_layout
)
NPY: Final = Format(
    "npy",
    "gpufs.torch.load(path) has its array in place, numpy.load(path) reads it",
    (npy.MAGIC,),
    suffix=".npy",
    layout=_npy_layout,
)
GGUF: Final = Format(
    "GGUF",
    "gpufs.torch.load(path) has its tensors in place, gguf.GGUFReader(path) reads it",
    (gguf.MAGIC,),
    layout=_gguf_layout,
)
_UNPACK: Final = "unpack it first"
TORCH_SAVE: Final = Format(
    "torch.save",
    "gpufs.torch.load(path) has its tensors in place, torch.load(path) reads it",
    (archives.MAGIC,),
    first_member=(b"/data.pkl", b"/byteorder", b"/.format_version"),
    layout=_archive_layout,
)
NPZ: Final = Format(
    "npz",
    "gpufs.torch.load(path) has its arrays in place, numpy.load(path) reads it",
    (archives.MAGIC,),
    first_member=(b".npy",),
    layout=_archive_layout,
)
# Zip archives. Their first member does not always show what they are, so all are read in the same way.
ARCHIVES: Final = (
    TORCH_SAVE,
    NPZ,
    Format("zip", "it has no members", (archives.EMPTY_MAGIC,), layout=_zip_layout),
    Format("zip", _UNPACK, (archives.MAGIC,), layout=_zip_layout),
)
FORMATS: Final = (
    SAFETENSORS,
    NPY,
    GGUF,
    *ARCHIVES,
    Format("HDF5", "h5py.File(path) reads it", (b"\x89HDF\r\n\x1a\n",)),
    Format("Parquet", "pyarrow.parquet.read_table(path) reads it", (b"PAR1",)),
    Format("Arrow", "pyarrow.memory_map(path) and pyarrow.ipc.open_file() read it", (b"ARROW1",)),
    Format("Git LFS pointer", "`git lfs pull` downloads the file that it stands for", (b"version https://git-lfs",)),
    Format("gzip", _UNPACK, (b"\x1f\x8b",)),
    Format("zstd", _UNPACK, (b"\x28\xb5\x2f\xfd",)),
    Format("xz", _UNPACK, (b"\xfd7zXZ\0",)),
    Format("bzip2", _UNPACK, (b"BZh",)),
    Format("lz4", _UNPACK, (b"\x04\x22\x4d\x18",)),
    Format("tar", _UNPACK, (b"ustar",), at=_TAR_MAGIC),
    Format("ELF", "a program or a library", (b"\x7fELF",)),
    Format("HTML", "a web page, so the download has failed", (b"<!doctype html", b"<!DOCTYPE html", b"<html")),
    # A pickle begins with its protocol, and from protocol 4 on with a frame.
    Format(
        "old torch.save",
        "torch.load(path) reads it, gpufs.torch.publish() makes safetensors of it",
        tuple(b"\x80" + bytes([protocol]) + _TORCH_LEGACY for protocol in (2, 3, 4, 5)),
    ),
    Format(
        "pickle",
        "torch.load(path) or pickle.load() may read it: only from people whom you trust",
        (b"\x80\x02", b"\x80\x03", b"\x80\x04\x95", b"\x80\x05\x95"),
    ),
)
