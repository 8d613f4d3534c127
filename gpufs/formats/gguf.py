"""GGUF files: models of llama.cpp, most of them quantised. https://github.com/ggml-org/ggml/blob/master/docs/gguf.md"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Final

from gpufs.formats import FormatError
from gpufs.formats.budget import BoundedFile
from gpufs.formats.layout import MAX_EXTENT

MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_DEFAULT_ALIGNMENT: Final = 32
_MAX_DIMENSIONS: Final = 4
# Bytes read at once. Headers have some MiB: the vocabulary is in them.
_WINDOW: Final = 1 << 20
_MAX_NESTED: Final = 8  # arrays of arrays
_MAX_TEXT: Final = 1 << 24
_CHARACTER_BYTES: Final = 6  # of a text, encoded, while it is decoded, and decoded
_TEXT_BYTES: Final = 1 << 10  # with the tensor or the value that it names
_SHOWN: Final = 100  # characters of a name, in messages
_STRING: Final = 8
_ARRAY: Final = 9
# The scalar types of metadata, by number.
_SCALARS: Final = {0: "B", 1: "b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "?", 10: "<Q", 11: "<q", 12: "<d"}
# The types of tensors by number: name, elements of a block, bytes of a block.
TYPES: Final = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of a GGUF file."""

    name: str
    type: str  # as GGUF names it: "F32", "Q4_K"
    block: int  # elements that are stored together; 1 for types that are not quantised
    # In elements, the fastest-changing dimension last, as numpy has it. GGUF itself counts from the other end.
    shape: tuple[int, ...]
    stored_shape: tuple[int, ...]  # in bytes for quantised types, else equal to ``shape``
    # Where it lies in the file.
    offset: int
    bytes: int


class _Cursor:
    """Reads the header from front to back, in windows."""

    def __init__(self, file: BoundedFile) -> None:
        self.file = file
        self._window = b""
        self._start = 0  # of the window in the file
        self.position = 0

    def take(self, count: int) -> bytes:
        begin = self.position - self._start
        if begin + count > len(self._window):
            self._start, begin = self.position, 0
            self._window = self.file.read(self.position, max(count, min(_WINDOW, self.file.size - self.position)))
        self.position += count
        return self._window[begin : begin + count]

    def number(self, layout: str) -> Any:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def text(self) -> str:
        length = self.number("<Q")
        if length > _MAX_TEXT:
            raise FormatError(f"a text of the header has {length} bytes; at most {_MAX_TEXT} are read")
        self.file.take(_TEXT_BYTES + _CHARACTER_BYTES * length)
        return self.take(length).decode(errors="replace")

    def value(self, kind: int, nested: int = 0) -> Any:
        """Return a value of the metadata. Arrays are only counted: they are vocabularies."""
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise FormatError(f"the metadata has a value of type {kind}, which is not known")
        inner, count = self.number("<I"), self.number("<Q")
        if inner in _SCALARS:
            self.skip(count * struct.calcsize(_SCALARS[inner]))
        elif inner == _STRING:
            for _ in range(count):
                self.file.take(0)
                self.skip(self.number("<Q"))
        elif inner == _ARRAY and nested < _MAX_NESTED:
            for _ in range(count):
                self.file.take(0)
                self.value(_ARRAY, nested + 1)
        else:
            raise FormatError(f"the metadata has an array of type {inner}, which is not known")
        return f"array of {count}"

    def skip(self, count: int) -> None:
        self.position += count
        if self.position - self._start > len(self._window):
            self._window = b""
            self._start = self.position


def read_gguf(file: BoundedFile) -> tuple[list[GgufTensor], dict[str, str]]:
    """Read the header of a GGUF file: its tensors by offset, and the metadata as text. Arrays are only counted.

    FormatError if it is damaged, of an unknown version, or has a type of tensors that is not known.
    """
    cursor = _Cursor(file)
    if cursor.take(len(MAGIC)) != MAGIC:
        raise FormatError("the file does not begin with GGUF")
    version = cursor.number("<I")
    if int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS:
        text = (
            "the file is big-endian, for machines of that byte order: gguf-convert-endian FILE little, of the package"
        )
        raise FormatError(f"{text} gguf, converts it")
    if version not in _VERSIONS:
        raise FormatError(f"the file has version {version} of GGUF; 2 and 3 are known")
    count, pairs = cursor.number("<Q"), cursor.number("<Q")
    metadata: dict[str, str] = {}
    alignment = _DEFAULT_ALIGNMENT
    for _ in range(pairs):
        key = cursor.text()
        value = cursor.value(cursor.number("<I"))
        if key == "general.alignment" and type(value) is int:
            alignment = value
        metadata[key] = str(value)
    if alignment <= 0 or alignment & (alignment - 1):
        raise FormatError(f"the alignment of {alignment} bytes is not a power of two")
    listed = [_read_info(cursor) for _ in range(count)]
    start = -(-cursor.position // alignment) * alignment
    tensors = sorted((_placed(*info, start, file.size) for info in listed), key=lambda tensor: tensor.offset)
    names: set[str] = set()
    end = 0
    for tensor in tensors:
        if tensor.name in names:
            raise FormatError(f"tensor {tensor.name[:_SHOWN]!r} appears twice")
        names.add(tensor.name)
        if tensor.offset < end:
            raise FormatError(f"tensor {tensor.name[:_SHOWN]!r} overlaps the one before it")
        end = max(end, tensor.offset + tensor.bytes)
    return tensors, metadata


def _read_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.text()
    dimensions = cursor.number("<I")
    if dimensions > _MAX_DIMENSIONS:
        raise FormatError(f"tensor {name[:_SHOWN]!r} has {dimensions} dimensions; GGUF has at most {_MAX_DIMENSIONS}")
    shape = struct.unpack(f"<{dimensions}Q", cursor.take(8 * dimensions))
    if max(shape, default=0) > MAX_EXTENT:
        raise FormatError(f"tensor {name[:_SHOWN]!r} has an extent of more than 63 bits")
    return name, tuple(reversed(shape)), cursor.number("<I"), cursor.number("<Q")


def _placed(name: str, shape: tuple[int, ...], kind: int, offset: int, start: int, size: int) -> GgufTensor:
    if kind not in TYPES:
        raise FormatError(f"tensor {name[:_SHOWN]!r} has type {kind}, which is not known")
    type_name, block, block_bytes = TYPES[kind]
    row = shape[-1] if shape else 1
    if row % block:
        raise FormatError(f"tensor {name[:_SHOWN]!r} has rows of {row} elements, which are not whole blocks of {block}")
    rows = 1
    for extent in shape[:-1]:
        rows *= extent
    row_bytes = row // block * block_bytes
    count = rows * row_bytes
    if start + offset + count > size:
        raise FormatError(f"tensor {name[:_SHOWN]!r} ends at {start + offset + count}, and the file has {size} bytes")
    stored = shape if block == 1 else (*shape[:-1], row_bytes)
    return GgufTensor(name, type_name, block, shape, stored, start + offset, count)
