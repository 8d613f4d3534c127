"""Where the tensors of a file are, whatever its format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gpufs.formats import FormatError, npy, safetensors

# The name of the array in an npy file, which names none.
ARRAY_NAME = "array"


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
    if name.endswith(".npy") or prefix.startswith(npy.MAGIC):
        found = npy.read_header(size, read)
        kind = (str(found.dtype), 8 * found.dtype.itemsize)
        return Layout(
            "npy", (TensorPlace(ARRAY_NAME, *kind, found.shape, found.offset, found.bytes, found.fortran_order),)
        )
    if not name.endswith(".safetensors") and not _resembles_safetensors(prefix, size):
        return None
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
