"""The tensors of a file: where they lie, and what they are in files without a header."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Annotated, Any, Final, Self

from msgspec import Meta

from gpufs.formats import FormatError

# The name of an array in a file that names none.
ARRAY_NAME: Final = "array"
MAX_EXTENT: Final = (1 << 63) - 1  # of torch and numpy
Extent = Annotated[int, Meta(ge=0, le=MAX_EXTENT)]


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A tensor in a file."""

    name: str
    dtype: str  # as the format names it: "BF16" in safetensors files, "float32" in npy files
    bits: int  # of an element
    shape: tuple[int, ...]
    offset: int  # of the first byte, from the start of the file
    bytes: int
    fortran_order: bool = False  # whether the first index changes fastest in the file


@dataclass(frozen=True, slots=True)
class Layout:
    """The tensors of a file in the order of their offsets.

    ``format``: "safetensors", "npy", "npz", "GGUF" or "torch.save".
    """

    format: str
    tensors: tuple[TensorPlace, ...]
    metadata: dict[str, str] | None = None


# ---- files without a header ----

# The extended attribute that register() and create() set.
TYPE_ATTRIBUTE: Final = "user.tensor"
_MAX_DIMENSIONS: Final = 64
_MAX_TEXT: Final = 1024
_SCALAR: Final = "scalar"


@dataclass(frozen=True, slots=True)
class GivenType:
    """The type of a file without a header."""

    dtype: str  # a name of numpy or torch, for example "float32" or "bfloat16", or one of safetensors
    shape: tuple[int, ...] | None = None  # None: one dimension of as many elements as the file has

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


def note_type(fd: int, kind: GivenType) -> None:
    """Note the type of an open file, if that is possible."""
    with suppress(OSError):  # in a file that its owner may not write, or without memory for metadata
        os.setxattr(fd, TYPE_ATTRIBUTE, str(kind).encode("ascii", "replace"))


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
