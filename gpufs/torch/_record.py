"""The record that publish() adds to the plain format: one text in the metadata, which other tools ignore."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpufs.formats import FormatError
from gpufs.formats.budget import Budget
from gpufs.formats.safetensors import RECORDS_KEY, parse_json

_MAX_DIMENSIONS = 64
UNSAVED_BUFFER = "buffer, not in state_dict()"  # a kind; other buffers are "buffer"


@dataclass(frozen=True)
class TensorRecord:
    """Notes about one tensor.

    entry: the name of its bytes in the file, if it is another one. same_as: the tensor whose bytes these are.
    shape, strides: the layout in these bytes, in elements; without them the tensor is contiguous.
    """

    entry: str | None = None
    same_as: str | None = None
    shape: tuple[int, ...] | None = None
    strides: tuple[int, ...] | None = None
    kind: str | None = None
    requires_grad: bool = False
    attributes: dict[str, Any] = field(default_factory=dict)


def format_records(records: Mapping[str, TensorRecord]) -> str:
    """Return the text for the metadata."""
    empty = TensorRecord()
    return json.dumps(
        {
            name: {key: value for key, value in vars(record).items() if value != getattr(empty, key)}
            for name, record in records.items()
        },
        separators=(",", ":"),
    )


def parse_records(metadata: Mapping[str, str] | None, budget: Budget) -> dict[str, TensorRecord]:
    """Read the notes of a file, checked for form. FormatError if they are damaged."""
    text = (metadata or {}).get(RECORDS_KEY)
    if text is None:
        return {}
    try:
        records = parse_json(text.encode(), budget)
        return {name: _parse_record(fields) for name, fields in records.items()}
    except (ValueError, RecursionError, TypeError, AttributeError) as error:
        raise FormatError(f"the notes of gpufs in the metadata are damaged: {error}") from None


def _parse_record(fields: Mapping[str, Any]) -> TensorRecord:
    record = TensorRecord(**fields)
    for text in (record.entry, record.same_as, record.kind):
        if text is not None and type(text) is not str:
            raise ValueError(f"{text!r} is not a name")
    if type(record.attributes) is not dict or type(record.requires_grad) is not bool:
        raise ValueError("attributes or requires_grad have the wrong type")
    if (record.shape is None) != (record.strides is None):
        raise ValueError("shape and strides belong together")
    if record.shape is None or record.strides is None:
        return record
    numbers = [*record.shape, *record.strides]
    if len(record.shape) != len(record.strides) or len(record.shape) > _MAX_DIMENSIONS:
        raise ValueError("shape and strides have different lengths")
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError("shape and strides are not unsigned numbers")
    return TensorRecord(**{**vars(record), "shape": tuple(record.shape), "strides": tuple(record.strides)})


def span(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return how many elements lie between the first and the last element, both included."""
    if 0 in shape:
        return 0
    return 1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
