"""Which format a file has that holds no tensors for gpufs, by its first bytes, and what reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gpufs.formats import FormatError

# What recognize() needs of the beginning of a file.
PREFIX_BYTES: Final = 512
_ZIP: Final = b"PK\x03\x04"
_ZIP_NAME: Final = 30  # where the name of the first member begins
_TAR_MAGIC: Final = 257
# The number that torch.save pickled first before it wrote zip files.
_TORCH_LEGACY: Final = b"\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"


@dataclass(frozen=True, slots=True)
class Kind:
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
_GGUF: Final = Kind("GGUF", "gpufs.torch.load(path) has its tensors in place, gguf.GGUFReader(path) reads it")
_TORCH: Final = Kind("zip of torch.save", "gpufs.torch.load(path) has its tensors in place, torch.load(path) reads it")
_NPZ: Final = Kind("npz", "gpufs.torch.load(path) has its arrays in place, numpy.load(path) reads it")
_HTML: Final = Kind("HTML", "a web page, so the download has failed")
_POINTER: Final = Kind("Git LFS pointer", "`git lfs pull` downloads the file that it stands for")
_NPY: Final = Kind("npy", "gpufs.torch.load(path) has its array in place, numpy.load(path) reads it")

# By the first bytes.
_MAGIC: Final = (
    (b"GGUF", _GGUF),
    (b"\x93NUMPY", _NPY),
    (b"\x89HDF\r\n\x1a\n", Kind("HDF5", "h5py.File(path) reads it")),
    (b"PAR1", Kind("Parquet", "pyarrow.parquet.read_table(path) reads it")),
    (b"ARROW1", Kind("Arrow", "pyarrow.memory_map(path) and pyarrow.ipc.open_file() read it")),
    (b"version https://git-lfs", _POINTER),
    (b"\x1f\x8b", Kind("gzip", _UNPACK)),
    (b"\x28\xb5\x2f\xfd", Kind("zstd", _UNPACK)),
    (b"\xfd7zXZ\0", Kind("xz", _UNPACK)),
    (b"BZh", Kind("bzip2", _UNPACK)),
    (b"\x04\x22\x4d\x18", Kind("lz4", _UNPACK)),
    (b"\x7fELF", Kind("ELF", "a program or a library")),
    (b"<!doctype html", _HTML),
    (b"<!DOCTYPE html", _HTML),
    (b"<html", _HTML),
)


def recognize(prefix: bytes) -> Kind | None:
    """The format of a file that begins with these bytes, of which PREFIX_BYTES are enough; None if it is unknown."""
    for magic, kind in _MAGIC:
        if prefix.startswith(magic):
            return kind
    if prefix.startswith(_ZIP):
        return _kind_of_zip(prefix)
    if prefix[_TAR_MAGIC : _TAR_MAGIC + 5] == b"ustar":
        return Kind("tar", _UNPACK)
    # A pickle begins with its protocol, and from protocol 4 on with a frame.
    if prefix[:1] == b"\x80" and prefix[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        if prefix[2:].startswith(_TORCH_LEGACY):
            return Kind("old torch.save", "torch.load(path) reads it, gpufs.torch.publish() makes safetensors of it")
        if prefix[1] < 4 or prefix[2:3] == b"\x95":
            return Kind("pickle", "torch.load(path) or pickle.load() may read it: only from people whom you trust")
    return None


def check_safetensors(prefix: bytes) -> None:
    """FormatError if a file that should be safetensors has another known format, which the text names."""
    kind = None if prefix[8:9] == b"{" else recognize(prefix)
    if kind is not None:
        raise FormatError(f"the format is {kind.name}, not safetensors: {kind.remedy}")


def _kind_of_zip(prefix: bytes) -> Kind:
    length = int.from_bytes(prefix[26:28], "little")
    name = prefix[_ZIP_NAME : _ZIP_NAME + length]
    if name.endswith((b"/data.pkl", b"/byteorder", b"/.format_version")):
        return _TORCH
    if name.endswith(b".npy"):
        return _NPZ
    return Kind("zip", _UNPACK)
