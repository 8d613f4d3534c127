"""The messages of the copy service: what is one and what is not."""

from __future__ import annotations

import errno
import os
import socket
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpufs import protocol
from gpufs.protocol import (
    Attach,
    Attached,
    Cancel,
    Copy,
    Detach,
    Detached,
    Goodbye,
    Hello,
    Pieces,
    Progress,
    ProtocolError,
    Refresh,
    Result,
    Welcome,
)

CLIENT: list[protocol.ClientMessage] = [
    Hello([1, 2], "a program"),
    Copy(1, "load"),
    Copy(7, "store", 4096, 1 << 40, 10, "require", "full", 0.5),
    Cancel(7),
    Attach(8, "r+"),
    Refresh(8, 1 << 40),
    Detach(8),
]
SERVER: list[protocol.ServerMessage] = [
    Welcome(1, "gpufs 1.0", 16),
    Progress(7, 100, 50, {"fastpath": 50}),
    Result(7, 5, -3, "failed", 12, {"fallback": 12}, ["file_system"], 0.25),
    Attached(8, 0, "", "cuda", "0000:01:00.0", 3, 1 << 40, True, 1024),
    Pieces(8, [0, 1 << 30], [1 << 30, 1 << 30]),
    Detached(8),
    Goodbye(110, "too slow"),
]


@pytest.mark.parametrize("message", [*CLIENT, *SERVER], ids=lambda message: type(message).__name__)
def test_a_message_is_decoded_as_it_was_encoded(message: Any) -> None:
    decode: Any = protocol.decode_client if message in CLIENT else protocol.decode_server
    assert decode(protocol.encode(message)) == message


def test_neither_side_takes_the_messages_of_its_own_kind() -> None:
    for message in CLIENT:
        with pytest.raises(ProtocolError):
            protocol.decode_server(protocol.encode(message))
    for answer in SERVER:
        with pytest.raises(ProtocolError):
            protocol.decode_client(protocol.encode(answer))


def copy_with(**changes: Any) -> dict[str, Any]:
    base = {"type": "copy", **{name: getattr(CLIENT[1], name) for name in Copy.CHECKS}}
    return base | changes


BAD = [
    copy_with(id=0),
    copy_with(id=True),
    copy_with(id=1 << 32),
    copy_with(direction="sideways"),
    copy_with(direction=None),
    copy_with(offset=-1),
    copy_with(host_offset=1 << 63),
    copy_with(size=-1),
    copy_with(size="1"),
    copy_with(fastpath="maybe"),
    copy_with(sync=1),
    copy_with(progress=float("nan")),
    copy_with(progress=-1),
    copy_with(path="/etc/shadow"),
    {"type": "copy", "id": 1},
    {"type": ["copy"]},
    {"type": "hello", "versions": [], "program": ""},
    {"type": "hello", "versions": [1], "program": "x" * 5000},
    {"type": "hello", "versions": {"1": 1}, "program": ""},
    {"type": "attach", "id": 1, "mode": "w"},
    {"type": "attach", "id": 1, "mode": "r", "path": "/etc/shadow"},
    {"type": "refresh", "id": 1, "start": -1},
    {"type": "detach", "id": 0},
    {"type": "shutdown"},
    {},
    [],
    7,
    None,
]


@pytest.mark.parametrize("content", BAD, ids=repr)
def test_bad_messages_are_refused(content: Any) -> None:
    with pytest.raises(ProtocolError) as refused:
        protocol.decode_client(msgpack.packb(content))
    assert refused.value.errno == errno.EPROTO


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x81",
        b"\x91" * 5000,
        b"\xdf\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xd7\xff" + b"\xff" * 8,
        b"\xc7\x00\x05",
        b"\x81\xc0\xc0",
        b"\x81\xa1\xff\x01",
        protocol.encode(CLIENT[0]) + b"\x00",
        protocol.encode(CLIENT[0])[:-1],
        b"\x00" * (protocol.MAX_MESSAGE + 1),
    ],
    ids=lambda data: data[:12].hex(),
)
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        protocol.decode_client(data)


@given(st.binary(max_size=400))
def test_any_bytes_are_a_message_or_refused(data: bytes) -> None:
    for decode in (protocol.decode_client, protocol.decode_server):
        try:
            decode(data)
        except ProtocolError:
            pass


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(list(copy_with())), values))
def test_any_fields_are_a_message_or_refused(changes: dict[str, Any]) -> None:
    try:
        message = protocol.decode_client(msgpack.packb(copy_with(**changes)))
    except ProtocolError:
        return
    assert isinstance(message, Copy)
    assert 0 <= message.offset < 1 << 63


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def test_descriptors_come_close_on_exec() -> None:
    ours, theirs = pair()
    with ours, theirs, open(os.devnull) as file:
        protocol.send(ours, Copy(1, "load"), (file.fileno(), file.fileno()))
        data, descriptors = protocol.receive(theirs)
        assert protocol.decode_client(data) == Copy(1, "load")
        assert len(descriptors) == 2
        assert not any(os.get_inheritable(fd) for fd in descriptors)
        protocol.close_all(descriptors)


def test_too_many_descriptors_are_all_closed() -> None:
    ours, theirs = pair()
    with ours, theirs, open(os.devnull) as file:
        before = len(os.listdir("/proc/self/fd"))
        socket.send_fds(ours, [b"x"], [file.fileno()] * 200)
        with pytest.raises(ProtocolError, match="descriptors"):
            protocol.receive(theirs)
        assert len(os.listdir("/proc/self/fd")) <= before


def test_a_large_message_is_refused_with_its_descriptors() -> None:
    ours, theirs = pair()
    with ours, theirs, open(os.devnull) as file:
        before = len(os.listdir("/proc/self/fd"))
        socket.send_fds(ours, [b"x" * (protocol.MAX_MESSAGE + 1)], [file.fileno()])
        with pytest.raises(ProtocolError, match="more than"):
            protocol.receive(theirs)
        assert len(os.listdir("/proc/self/fd")) <= before
