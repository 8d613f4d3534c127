"""The part of msgpack that the messages between daemon and client are made of.

The package of that name imports datetime and more, which takes as long as a copy of half a gigabyte does; the messages
are small maps of texts, numbers, lists and maps. What this writes is msgpack like any other's.
"""

from __future__ import annotations

import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Final

_DEEPEST: Final = 8  # maps and lists in one another

# By the first byte: the format of a number; of the length of a text, a list or a map.
_NUMBERS: Final = {
    0xCA: ">f",
    0xCB: ">d",
    0xCC: ">B",
    0xCD: ">H",
    0xCE: ">I",
    0xCF: ">Q",
    0xD0: ">b",
    0xD1: ">h",
    0xD2: ">i",
    0xD3: ">q",
}
_TEXTS: Final = {0xD9: ">B", 0xDA: ">H", 0xDB: ">I"}
_LISTS: Final = {0xDC: ">H", 0xDD: ">I"}
_MAPS: Final = {0xDE: ">H", 0xDF: ">I"}
_CONSTANTS: Final = {0xC0: None, 0xC2: False, 0xC3: True}


def pack(value: Any) -> bytes:
    """The bytes of a value. TypeError for what messages do not have, OverflowError for numbers of more than 64 bits."""
    out = bytearray()
    _pack(value, out)
    return bytes(out)


def _pack(value: Any, out: bytearray) -> None:
    kind = type(value)
    if value is None:
        out.append(0xC0)
    elif kind is bool:
        out.append(0xC3 if value else 0xC2)
    elif kind is int:
        if 0 <= value < 128:
            out.append(value)
        elif -(1 << 63) <= value < 1 << 64:
            out += struct.pack(">BQ", 0xCF, value) if value > 0 else struct.pack(">Bq", 0xD3, value)
        else:
            raise OverflowError("a number of more than 64 bits")
    elif kind is float:
        out += struct.pack(">Bd", 0xCB, value)
    elif kind is str:
        text = value.encode()
        out += bytes((0xA0 | len(text),)) if len(text) < 32 else struct.pack(">BI", 0xDB, len(text))
        out += text
    elif kind is list or kind is tuple:
        out += bytes((0x90 | len(value),)) if len(value) < 16 else struct.pack(">BI", 0xDD, len(value))
        for item in value:
            _pack(item, out)
    elif kind is dict:
        out += bytes((0x80 | len(value),)) if len(value) < 16 else struct.pack(">BI", 0xDF, len(value))
        for name, item in value.items():
            _pack(name, out)
            _pack(item, out)
    else:
        raise TypeError(f"{kind.__name__} is not part of a message")


def unpack(data: bytes) -> Any:
    """The one value that the bytes are. ValueError where they are none, or of a kind that messages do not have."""
    value, end = _unpack(data, 0, 0)
    if end != len(data):
        raise ValueError("more bytes than those of one value")
    return value


def _unpack(data: bytes, at: int, depth: int) -> tuple[Any, int]:
    if depth > _DEEPEST:
        raise ValueError("too deep")
    if at >= len(data):
        raise ValueError("it ends in the middle of a value")
    first = data[at]
    at += 1
    if first < 0x80:
        return first, at
    if first >= 0xE0:
        return first - 0x100, at
    if first in _CONSTANTS:
        return _CONSTANTS[first], at
    if first in _NUMBERS:
        return _number(_NUMBERS[first], data, at)
    if first < 0x90:
        return _map(data, at, first & 0x0F, depth)
    if first < 0xA0:
        return _list(data, at, first & 0x0F, depth)
    if first < 0xC0:
        return _text(data, at, first & 0x1F)
    for lengths, read in ((_TEXTS, None), (_LISTS, _list), (_MAPS, _map)):
        if first in lengths:
            count, at = _number(lengths[first], data, at)
            return _text(data, at, count) if read is None else read(data, at, count, depth)
    raise ValueError(f"a value of a kind that messages do not have ({first:#x})")


def _number(form: str, data: bytes, at: int) -> tuple[Any, int]:
    end = at + struct.calcsize(form)
    if end > len(data):
        raise ValueError("it ends in the middle of a value")
    return struct.unpack_from(form, data, at)[0], end


def _text(data: bytes, at: int, count: int) -> tuple[str, int]:
    end = at + count
    if end > len(data):
        raise ValueError("it ends in the middle of a text")
    return data[at:end].decode(), end  # UnicodeDecodeError is a ValueError


def _list(data: bytes, at: int, count: int, depth: int) -> tuple[list[Any], int]:
    items = []
    for _ in range(count):
        item, at = _unpack(data, at, depth + 1)
        items.append(item)
    return items, at


def _map(data: bytes, at: int, count: int, depth: int) -> tuple[dict[Any, Any], int]:
    items: dict[Any, Any] = {}
    for _ in range(count):
        name, at = _unpack(data, at, depth + 1)
        if type(name) is not str:
            raise ValueError("a map whose names are not texts")
        items[name], at = _unpack(data, at, depth + 1)
    return items, at
