"""The header of a safetensors file: reading it strictly, and writing it.

A file is the header's length (8 bytes, little endian), the header (JSON), and the tensors' bytes without gaps.
"""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from math import isinf
from typing import Any, NamedTuple, NoReturn

import msgspec

from gpufs.formats import FormatError
from gpufs.formats.budget import BoundedFile, Budget
from gpufs.formats.element_types import IN_SAFETENSORS
from gpufs.formats.layout import MAX_EXTENT, Extent

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
MAX_NAME = 4096  # characters
# publish() aligns the tensors' bytes to this.
DATA_ALIGNMENT = 4096
# Readers allow no gaps between tensors, so publish() fills those in a pool by tensors with such names.
PADDING_NAME = "gpufs.padding."
# In the metadata of a file that has freed its tensors, because a model server has published what it made of them.
RELEASED_KEY = "gpufs.released"
# In the metadata of what publish() writes: what the format cannot express about the tensors.
RECORDS_KEY = "gpufs"
# What may be an integer that JSON and Python read as different values. Names of tensors may match, too.
_UNUSUAL_INTEGER = re.compile(rb"-0|[0-9]{20}")
_FIELDS = ("dtype", "shape", "data_offsets")
_METADATA = "__metadata__"

BITS = {name: element.bits for name, element in IN_SAFETENSORS.items()}


class HeaderEntry(NamedTuple):
    """One tensor as the header describes it: bytes [start, end) after the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class _Entry(msgspec.Struct, gc=False):
    """The same as it is in the header."""

    dtype: str
    shape: tuple[Extent, ...]
    data_offsets: tuple[Extent, Extent]


@dataclass(frozen=True, slots=True)
class Header:
    """A valid header: the tensors ordered by offset, and the file's metadata."""

    entries: dict[str, HeaderEntry]
    metadata: dict[str, str] | None


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Switch Python's garbage collector off in this block.

    It searches for cycles whenever many objects are created. That is half of the time of a header with 100,000 tensors.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def header_bytes(prefix: bytes, file_bytes: int) -> int:
    """Return the length of the header, from the first 8 bytes of a file of file_bytes bytes."""
    if len(prefix) < LENGTH_BYTES:
        raise FormatError(f"the file has {file_bytes} bytes; a safetensors file has at least {LENGTH_BYTES}")
    length = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    if length > MAX_HEADER_BYTES:
        text = f"its header would have {length} bytes, and at most {MAX_HEADER_BYTES} are allowed"
        raise FormatError(f"it is not a safetensors file: {text}")
    if LENGTH_BYTES + length > file_bytes:
        raise FormatError(f"the header has {length} bytes and the file only {file_bytes}")
    return length


@without_garbage_collection()
def read_header(file: BoundedFile) -> tuple[int, Header]:
    """Return where the tensors' bytes begin, and the header: checked, as are the offsets in it."""
    length = header_bytes(file.beginning(LENGTH_BYTES), file.size)
    start = LENGTH_BYTES + length
    data_bytes = file.size - start
    try:
        fields = parse_json(file.read(LENGTH_BYTES, length), file)
    except FormatError:
        raise
    except (ValueError, RecursionError) as error:
        raise FormatError(f"the header is not valid JSON: {error}") from None
    if type(fields) is not dict:
        raise FormatError("the header is not a JSON object")
    metadata = fields.pop(_METADATA, None)
    if metadata is not None and not (type(metadata) is dict and all(type(value) is str for value in metadata.values())):
        raise FormatError(f"{_METADATA} is not an object of strings")
    entries = [(name, _parse_entry(name, value)) for name, value in fields.items()]
    entries.sort(key=lambda item: (item[1].start, item[1].end))
    end = 0
    for name, entry in entries:
        if entry.start != end or entry.end < entry.start:
            raise FormatError(
                f"tensor {name!r} is at [{entry.start}, {entry.end}) and the tensor before it ends at {end}: "
                "tensors may neither overlap nor leave gaps"
            )
        end = entry.end
        size = _tensor_bytes(name, entry)
        if size != entry.end - entry.start:
            raise FormatError(f"tensor {name!r} needs {size} bytes and has {entry.end - entry.start}")
    if end != data_bytes:
        if metadata is not None and RELEASED_KEY in metadata:
            raise FormatError(
                "a model server has freed the tensors after it had published the weights (keep_checkpoint: false): "
                "copy the file here again"
            )
        raise FormatError(f"the tensors end at {end} and the file's data at {data_bytes}")
    return start, Header(dict(entries), metadata)


def parse_json(data: bytes, budget: Budget | None = None) -> Any:
    """Read JSON as strictly as the format asks: ValueError for a key that appears twice, NaN, or half a character.

    FormatError if it needs more memory than a header may have.
    """
    (budget or Budget()).take_json(data)
    return json.loads(
        data.decode("utf-8"),
        # An escape can stand for half a character, which no UTF-8 text can hold.
        object_pairs_hook=_whole if b"\\u" in data else _unique,
        parse_int=_parse_integer if _UNUSUAL_INTEGER.search(data) else None,  # None: json's own, which is faster
        parse_float=_parse_float,
        parse_constant=_refuse_constant,
    )


def _whole(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    for text in chain.from_iterable(pairs):
        if type(text) is str:
            text.encode("utf-8")
    return _unique(pairs)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        for name, _ in pairs:
            if name not in unique:
                raise ValueError(f"the key {name[:100]!r} appears twice")
            del unique[name]
    return unique


def _parse_integer(text: str) -> int | float:
    # -0 is not an unsigned number either.
    return _parse_float(text) if text.startswith("-") or len(text) > 20 else int(text)


def _parse_float(text: str) -> float:
    value = float(text)
    if isinf(value):
        raise ValueError(f"{text[:40]} is too large a number")
    return value


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON value")


def _parse_entry(name: str, value: Any) -> HeaderEntry:
    if len(name) > MAX_NAME:
        raise FormatError(f"the name {name[:100]!r}... has {len(name)} characters; at most {MAX_NAME} are read")
    try:
        entry = msgspec.convert(value, _Entry)
    except msgspec.ValidationError as error:
        raise FormatError(f"tensor {name!r}: {error}") from None
    if entry.dtype not in BITS:
        raise FormatError(f"tensor {name!r} has the unknown dtype {entry.dtype[:100]!r}")
    return HeaderEntry(entry.dtype, entry.shape, *entry.data_offsets)


def _tensor_bytes(name: str, entry: HeaderEntry) -> int:
    count = 1
    for extent in entry.shape:
        count *= extent
        if count > MAX_EXTENT:
            break
    bits = count * BITS[entry.dtype]
    if bits > MAX_EXTENT:
        raise FormatError(f"tensor {name!r}: shape {list(entry.shape)} is too large")
    if bits % 8:
        raise FormatError(f"tensor {name!r} does not end at a whole byte")
    return bits // 8


def build_header(entries: Iterable[tuple[str, HeaderEntry]], metadata: Mapping[str, str], *, size: int = 0) -> bytes:
    """Return the first bytes of a file: length and header, padded so that the tensors' bytes begin aligned.

    size: how many bytes these are, if that is given. ValueError if the header is longer; TypeError or ValueError for
    what no reader would accept.
    """
    for key, value in metadata.items():
        if not (isinstance(key, str) and isinstance(value, str)):
            raise TypeError(f"metadata: {key!r}: {value!r} are not two texts, as safetensors needs them")
    fields: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    for name, entry in entries:
        if name == _METADATA:
            raise ValueError(f"safetensors files cannot have a tensor called {_METADATA}")
        fields[name] = dict(zip(_FIELDS, (entry.dtype, entry.shape, (entry.start, entry.end)), strict=True))
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    if size and LENGTH_BYTES + len(text) > size:
        raise ValueError(f"the header has {LENGTH_BYTES + len(text)} bytes; there is space for {size}")
    text += b" " * (size - LENGTH_BYTES - len(text) if size else -(LENGTH_BYTES + len(text)) % DATA_ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"the header has {len(text)} bytes; at most {MAX_HEADER_BYTES} are allowed")
    return len(text).to_bytes(LENGTH_BYTES, "little") + text
