"""The messages of the daemon's socket: what a packet may contain, and that nothing else is understood."""

from __future__ import annotations

import errno
import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpufs import protocol
from gpufs.protocol import Message, ProtocolError

# For each kind: fields that are allowed, at their bounds, and for each field what is refused.
NUMBER = (-1, True, 1.0, None, "1")
ID = (*NUMBER, 0, 1 << 32)
OFFSET = (*NUMBER, 1 << 63)
PLACEMENT = (-1, 256, 1.5, "8")
TEXT = ("x" * 1025, b"x", 1, None)
NUMBERS: tuple[Any, ...] = ([-1], ["1"], {}, None)
INODES: tuple[Any, ...] = (*NUMBERS, [], [1] * 1501)
LEASES: tuple[Any, ...] = (*INODES, [0], [1 << 32])
MOVE = ("", None, 1)
SECONDS = (-1, math.nan, True, None, "1")
COUNTS: tuple[Any, ...] = ({"x": -1}, {1: 1}, {"x" * 1025: 1}, {str(number): 1 for number in range(17)}, [], None)
CASES: dict[str, tuple[dict[str, Any], dict[str, tuple[Any, ...]]]] = {
    "hello": (
        {"versions": [1 << 16] * 16, "program": "ä" * 1024},
        {"versions": (*NUMBERS, [], [0], [1 << 17], [1] * 17), "program": TEXT},
    ),
    "copy": (
        {
            "id": (1 << 32) - 1,
            "direction": "load",
            "host_offset": (1 << 63) - 1,
            "offset": 0,
            "size": None,
            "fastpath": None,
            "sync": "full",
            "progress": 3600,
        },
        {
            "id": ID,
            "direction": ("sideways", None, 1),
            "host_offset": OFFSET,
            "offset": OFFSET,
            "size": (-1, True, 1.0, "1", 1 << 63),
            "fastpath": ("maybe", "", 1),
            "sync": ("", None, 1),
            "progress": (*SECONDS, 3600.5, math.inf),
        },
    ),
    "cancel": ({"id": 1}, {"id": ID}),
    "attach": (
        {"id": 1, "mode": "c", "placement": 255},
        {"id": ID, "mode": ("w", None, 1), "placement": (*PLACEMENT, True)},
    ),
    "refresh": ({"id": 2, "lease": 1, "start": (1 << 63) - 1}, {"id": ID, "lease": ID, "start": OFFSET}),
    "detach": ({"id": 2, "lease": 1}, {"id": ID, "lease": ID}),
    "sleep": ({"id": 2, "lease": 1}, {"id": ID, "lease": ID}),
    "wake": ({"id": 2, "lease": 1}, {"id": ID, "lease": ID}),
    "check": ({"id": 1, "leases": [(1 << 32) - 1] * 1500, "what": "sleep"}, {"id": ID, "leases": LEASES, "what": MOVE}),
    "park": (
        {"id": 1, "inodes": [(1 << 64) - 1] * 1500, "wait": 3600},
        {"id": ID, "inodes": INODES, "wait": (*SECONDS, 3600.5, math.inf)},
    ),
    "bring_back": ({"id": 1, "inodes": [1]}, {"id": ID, "inodes": INODES}),
    "listen": ({"id": 1}, {"id": ID}),
    "asked": ({"question": 1, "inodes": [1], "what": "wake"}, {"question": ID, "inodes": INODES, "what": MOVE}),
    "declined": ({"question": 1, "message": ""}, {"question": ID, "message": TEXT}),
    "revoke": ({"id": 1}, {"id": ID}),
    "register": (
        {
            "id": 1,
            "kind": "ipc",
            "offset": 0,
            "size": (1 << 63) - 1,
            "writable": False,
            "pci_address": "0000:01:00.0",
            "handle": b"x" * 64,
        },
        {
            "id": ID,
            "kind": ("fd", None, 1),
            "offset": OFFSET,
            "size": (*OFFSET, 0),
            "writable": (1, None),
            "pci_address": TEXT,
            "handle": (b"x", b"x" * 63, b"x" * 65, "x" * 64, None),
        },
    ),
    "unregister": ({"id": 2, "registration": 1}, {"id": ID, "registration": ID}),
    "set_quota": (
        {"id": 1, "uid": None, "limit": -2},
        {"id": ID, "uid": (-1, (1 << 32) - 1, True, "0"), "limit": (-3, 1 << 63, None, 1.0)},
    ),
    "welcome": (
        {"version": 1, "server": "", "requests": (1 << 64) - 1, "driver": "host"},
        {"version": ID, "server": TEXT, "requests": NUMBER, "driver": TEXT},
    ),
    "progress": (
        {"id": 1, "total": (1 << 64) - 1, "moved": 0, "paths": {str(number): 1 for number in range(16)}},
        {"id": ID, "total": NUMBER, "moved": NUMBER, "paths": COUNTS},
    ),
    "result": (
        {
            "id": 1,
            "error": 4095,
            "device_code": -(1 << 31),
            "message": "",
            "done": 1,
            "paths": {},
            "refusals": ["x"] * 64,
            "seconds": math.inf,
        },
        {
            "id": ID,
            "error": (*NUMBER, 4096),
            "device_code": (1 << 31, -(1 << 31) - 1, 1.0),
            "message": TEXT,
            "done": NUMBER,
            "paths": COUNTS,
            "refusals": (["x"] * 65, ["x" * 1025], [1], "x"),
            "seconds": SECONDS,
        },
    ),
    "attached": (
        {
            "id": 1,
            "error": 0,
            "message": "",
            "driver": "cuda",
            "pci_address": "",
            "device": 1 << 16,
            "size": (1 << 63) - 1,
            "private": True,
            "placement": 248,
            "pieces": 1 << 32,
        },
        {
            "id": ID,
            "error": (*NUMBER, 4096),
            "message": TEXT,
            "driver": TEXT,
            "pci_address": TEXT,
            "device": (*NUMBER, (1 << 16) + 1),
            "size": OFFSET,
            "private": (0, None),
            "placement": (*PLACEMENT, None),
            "pieces": (*NUMBER, (1 << 32) + 1),
        },
    ),
    "pieces": (
        {"id": 1, "offsets": [(1 << 64) - 1] * 253, "sizes": []},
        {"id": ID, "offsets": (*NUMBERS, [1] * 254), "sizes": (*NUMBERS, [1] * 254)},
    ),
    "done": ({"id": 1, "error": 0, "message": ""}, {"id": ID, "error": (*NUMBER, 4096), "message": TEXT}),
    "goodbye": ({"error": 0, "message": ""}, {"error": (*NUMBER, 4096), "message": TEXT}),
    "replaced": ({}, {}),
}
CLIENT = {kind.__struct_config__.tag for kind in protocol.kinds(protocol.ClientMessage)}


def decoder(kind: str) -> Callable[[bytes], Message]:
    return protocol.decode_client if kind in CLIENT else protocol.decode_server


def packet(kind: str, fields: dict[str, Any]) -> bytes:
    return msgspec.msgpack.encode({"type": kind, **fields})


def refused(decode: Callable[[bytes], Message], data: bytes) -> str:
    with pytest.raises(ProtocolError) as refusal:
        decode(data)
    assert refusal.value.errno == errno.EPROTO
    return str(refusal.value.strerror)


@pytest.mark.parametrize("kind", CASES)
def test_each_message_has_its_fields_within_their_bounds(kind: str) -> None:
    fields, bad = CASES[kind]
    decode = decoder(kind)
    message = decode(packet(kind, fields))
    assert msgspec.structs.asdict(message) == fields
    assert decode(protocol.encode(message)) == message
    assert bad.keys() == fields.keys()
    for name, values in bad.items():
        for value in values:
            assert name in refused(decode, packet(kind, {**fields, name: value})), value
        refused(decode, packet(kind, {field: value for field, value in fields.items() if field != name}))
    assert "another" in refused(decode, packet(kind, {**fields, "another": 1}))
    other = protocol.decode_server if kind in CLIENT else protocol.decode_client
    refused(other, packet(kind, fields))


def test_all_messages_are_tested() -> None:
    assert CASES.keys() == {kind.__struct_config__.tag for kind in protocol.kinds(Message)}


@pytest.mark.parametrize("nested", [b"\x91", b"\x81\xa1a"], ids=["lists", "maps"])
@pytest.mark.parametrize("start", [b"", b"\x82\xa1a", b"\x82\xa4type\xa6cancel\xa2id"], ids=["alone", "first", "field"])
def test_a_message_that_is_nested_deeply_is_refused(start: bytes, nested: bytes) -> None:
    count = (protocol.MAX_MESSAGE - len(start)) // len(nested)
    refused(protocol.decode_client, start + nested * count)


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text() | st.binary(),
    lambda values: st.lists(values, max_size=5) | st.dictionaries(st.text(max_size=5), values, max_size=5),
    max_leaves=10,
)


@given(st.sampled_from(sorted(CASES)), st.data())
def test_a_damaged_message_is_understood_or_refused(kind: str, data: st.DataObject) -> None:
    fields = dict(CASES[kind][0])
    fields[data.draw(st.sampled_from([*fields, "another"]))] = data.draw(anything)
    content = bytearray(packet(kind, fields))
    for _ in range(data.draw(st.integers(0, 2))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    end = data.draw(st.none() | st.integers(0, len(content)))
    for decode in (protocol.decode_client, protocol.decode_server):
        try:
            message = decode(bytes(content[:end]))
        except ProtocolError:
            continue
        again = decode(protocol.encode(message))
        assert again == message
