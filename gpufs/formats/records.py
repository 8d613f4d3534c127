"""The record that publish() adds to a safetensors file: one text in the metadata, which other tools ignore."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from gpufs.formats import FormatError
from gpufs.formats.budget import Budget
from gpufs.formats.layout import Extent
from gpufs.formats.safetensors import RECORDS_KEY, parse_json

_MAX_DIMENSIONS = 64
UNSAVED_BUFFER = "buffer, not in state_dict()"  # a kind; other buffers are "buffer"


class TensorRecord(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Notes about one tensor.

    entry: the name of its bytes in the file, if it is another one. same_as: the tensor whose bytes these are.
    shape, strides: the layout in these bytes, in elements; without them the tensor is contiguous.
    """

    entry: str | None = None
    same_as: str | None = None
    shape: tuple[Extent, ...] | None = None
    strides: tuple[Extent, ...] | None = None
    kind: str | None = None
    requires_grad: bool = False
    attributes: dict[str, Any] = {}

    def __post_init__(self) -> None:
        if (self.shape is None) != (self.strides is None):
            raise ValueError("shape and strides belong together")
        if not len(self.shape or ()) == len(self.strides or ()) <= _MAX_DIMENSIONS:
            raise ValueError("shape and strides have different lengths, or too many numbers")


def format_records(records: Mapping[str, TensorRecord]) -> str:
    """Return the text for the metadata."""
    return msgspec.json.encode(records).decode()


def parse_records(metadata: Mapping[str, str] | None, budget: Budget) -> dict[str, TensorRecord]:
    """Read the notes of a file, checked for form. FormatError if they are damaged."""
    text = (metadata or {}).get(RECORDS_KEY)
    if text is None:
        return {}
    try:
        return msgspec.convert(parse_json(text.encode(), budget), dict[str, TensorRecord])
    except (ValueError, RecursionError) as error:
        raise FormatError(f"the notes of gpufs in the metadata are damaged: {error}") from None


def span(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return how many elements lie between the first and the last element, both included."""
    if 0 in shape:
        return 0
    return 1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
