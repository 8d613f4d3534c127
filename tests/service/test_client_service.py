"""The copy service of a mount: its messages and limits, and clients that break its rules."""

from __future__ import annotations

import errno
import os
import random
import socket
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.copying import (
    BOTH,
    WRITE,
    answer,
    connection,
    greeted,
    opened,
    raw_connection,
    transfers,
    wait_for_no_copies,
)
from support.hanging import HangingMount
from support.mounting import GpufsMount, Mounter
from support.processes import NOBODY, PATIENCE, Snapshot, in_child, wait_until

from gpufs import protocol
from gpufs.protocol import Cancel, Copy, Goodbye, Hello

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a slow server and acts as another user")


@pytest.fixture
def files(root: Path, host: Path) -> tuple[Path, Path]:
    """A file of the host with four bytes, and an empty one on the mount; any user may write both."""
    source, buffer = host / "source", root / "buffer"
    source.write_bytes(b"1234")
    buffer.touch()
    for path in (source, buffer):
        path.chmod(0o666)
    return source, buffer


def still_serves(mount: GpufsMount, files: tuple[Path, Path]) -> None:
    """Another client gets its copy."""
    with opened(files[0]) as host, opened(files[1], WRITE) as buffer, connection(mount.path) as client:
        assert client.copy("load", host, buffer).error == 0
    assert files[1].read_bytes() == b"1234"


# ---- messages ----


def message(**changes: Any) -> bytes:
    """A copy message with some fields changed."""
    fields = msgspec.structs.asdict(Copy(1, "load"))
    return msgspec.msgpack.encode({"type": "copy", **fields, **changes})


BAD_FIELDS: list[dict[str, Any]] = [
    {"id": 0}, {"id": True}, {"id": 1 << 32}, {"direction": "sideways"}, {"direction": None}, {"offset": -1},
    {"host_offset": 1 << 63}, {"size": -1}, {"size": "1"}, {"fastpath": "maybe"}, {"sync": 1},
    {"progress": float("nan")}, {"progress": -1}, {"path": "/etc/shadow"},
]  # fmt: skip
BAD_CONTENTS: list[Any] = [
    {"type": "copy", "id": 1}, {"type": ["copy"]}, {"type": "shutdown"}, {"type": "result"}, {}, [], 7, None,
    {"type": "hello", "versions": [], "program": ""}, {"type": "hello", "versions": [1], "program": "x" * 5000},
    {"type": "hello", "versions": {"1": 1}, "program": ""}, {"type": "hello", "versions": [1], "program": "again"},
]  # fmt: skip
GARBAGE = [
    b"\0", b"\xc1", b"\x81", b"\x91" * 5000, b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xff" * 100,
    b"\xc7\x00\x05", b"\x81\xc0\xc0", random.Random(7).randbytes(300), message()[:-3], message() + b"\0",
    b"x" * (protocol.MAX_MESSAGE + 1),
]  # fmt: skip


def test_a_message_that_is_not_understood_ends_its_connection_alone(
    shared_mount: GpufsMount, files: tuple[Path, Path]
) -> None:
    packets = [message(**changes) for changes in BAD_FIELDS]
    packets += [msgspec.msgpack.encode(content) for content in BAD_CONTENTS]
    with connection(shared_mount.path), opened(files[0]) as host, opened(files[1], WRITE) as buffer:
        for packet in [*packets, *GARBAGE]:
            with greeted(shared_mount.path) as sock:
                socket.send_fds(sock, [packet], [host, buffer] if packet in packets[: len(BAD_FIELDS)] else [])
                goodbye = answer(sock)
                assert isinstance(goodbye, Goodbye), packet[:80]
                assert (goodbye.error, answer(sock)) == (errno.EPROTO, None), packet[:80]
        with raw_connection(shared_mount.path) as sock:  # nothing comes before hello
            protocol.send(sock, Cancel(1))
            assert answer(sock).error == errno.EPROTO
        with raw_connection(shared_mount.path) as sock:
            protocol.send(sock, Hello([99], "test"))
            assert answer(sock).error == errno.EPROTONOSUPPORT
    still_serves(shared_mount, files)


@pytest.mark.parametrize("count", [0, 1, 3, 250])
def test_a_copy_with_the_wrong_number_of_descriptors_is_refused(
    shared_mount: GpufsMount, files: tuple[Path, Path], count: int
) -> None:
    still_serves(shared_mount, files)
    before = Snapshot.of(shared_mount.pid).descriptors
    with greeted(shared_mount.path) as sock, opened(files[0]) as host:
        socket.send_fds(sock, [protocol.encode(Copy(1, "load"))], [host] * count)
        assert isinstance(answer(sock), Goodbye)
        wait_until(lambda: Snapshot.of(shared_mount.pid).descriptors <= before + 2, 10, "closed descriptors")
    still_serves(shared_mount, files)


# ---- copies ----


def test_a_part_of_a_file_is_copied(shared_mount: GpufsMount, files: tuple[Path, Path]) -> None:
    files[0].write_bytes(b"0123456789")
    files[1].write_bytes(b"abcdefghij")
    with opened(files[0], BOTH) as host, opened(files[1], BOTH) as buffer, connection(shared_mount.path) as client:
        assert client.copy("load", host, buffer, host_offset=2, offset=5, size=3).done == 3
        assert files[1].read_bytes() == b"abcde234ij"
        assert client.copy("store", host, buffer, host_offset=8, offset=0, sync="full").done == 10
        assert files[0].read_bytes() == b"01234567abcde234ij"


@pytest.mark.complains  # a thread may wait for the slow server longer than a cancellation
def test_progress_is_sent_and_a_cancelled_copy_keeps_what_it_copied(
    shared_mount: GpufsMount, files: tuple[Path, Path], slow: HangingMount
) -> None:
    with opened(slow.file) as host, opened(files[1], WRITE) as buffer, greeted(shared_mount.path) as sock:
        protocol.send(sock, Copy(1, "load", progress=0.02), (host, buffer))
        seen: list[int] = []
        while len(seen) < 3 or not seen[-1]:
            progress = protocol.decode_server(protocol.receive(sock)[0])
            assert isinstance(progress, protocol.Progress)
            assert progress.total == 1 << 30
            seen.append(progress.moved)
        protocol.send(sock, Cancel(1))
        result = answer(sock)
    assert seen == sorted(seen)
    assert result.error == errno.ECANCELED
    assert files[1].stat().st_size == result.done < 1 << 30


# ---- limits ----


def as_nobody(mount: GpufsMount, count: int) -> list[socket.socket]:
    """Connections that a process of another user has made."""

    def connect(channel: socket.socket) -> None:
        socks = [raw_connection(mount.path) for _ in range(count)]
        for sock in socks:
            socket.send_fds(channel, [b"x"], [sock.fileno()])

    ours, theirs = socket.socketpair()
    with ours, theirs:
        in_child(lambda: connect(theirs), uid=NOBODY, gid=NOBODY)
        descriptors = [fd for _ in range(count) for fd in socket.recv_fds(ours, 1, 1)[1]]
    socks = [socket.socket(fileno=fd) for fd in descriptors]
    for sock in socks:
        sock.settimeout(PATIENCE)
    return socks


def test_connections_of_a_user_are_bounded(mount: Mounter) -> None:
    own = mount(allow_other=True)
    held = as_nobody(own, 257)
    with held.pop() as refused:
        assert answer(refused).error == errno.EBUSY
    for sock in held:
        protocol.send(sock, Hello([1], "test"))
        assert isinstance(answer(sock), protocol.Welcome)
        sock.close()
    wait_until(lambda: transfers(own)["connections"] == 0, 10, "the end of all connections")
    own.rescue()


@pytest.mark.complains  # a thread may wait for the slow server longer than a cancellation
@pytest.mark.parametrize("numbers", [range(1, 18), (5, 5)], ids=["too many", "an ID twice"])
def test_copies_of_a_connection_are_bounded(
    shared_mount: GpufsMount, files: tuple[Path, Path], slow: HangingMount, numbers: tuple[int, ...]
) -> None:
    with greeted(shared_mount.path) as sock, opened(slow.file) as host, opened(files[1], WRITE) as buffer:
        for number in numbers:
            protocol.send(sock, Copy(number, "load"), (host, buffer))
        messages = []
        while (found := answer(sock)) is not None:
            messages.append(found)
    assert isinstance(messages[-1], Goodbye)
    assert all(found.error for found in messages[:-1])
    wait_for_no_copies(shared_mount)
    still_serves(shared_mount, files)


@pytest.mark.complains
def test_clients_that_neither_send_nor_receive_are_disconnected(
    shared_mount: GpufsMount, files: tuple[Path, Path]
) -> None:
    silent = raw_connection(shared_mount.path)
    with greeted(shared_mount.path) as sock, opened(files[0]) as host:
        sock.settimeout(0.2)
        number = 0
        while number % 64 or transfers(shared_mount)["connections"] == 2:
            number += 1
            try:
                protocol.send(sock, Copy(number, "load"), (host, host))  # refused, which takes least
            except TimeoutError:
                time.sleep(0.01)
            except OSError:
                break
    with silent:
        assert answer(silent).error == errno.ETIMEDOUT  # it has not sent hello
    still_serves(shared_mount, files)


def test_the_socket_is_open_to_those_who_may_use_the_mount(mount: Mounter) -> None:
    for own, mode in ((mount(), 0o600), (mount(allow_other=True), 0o666)):
        path = (own.path / ".gpufs/socket").read_text().strip()
        held = os.open(path, os.O_PATH)  # no other file gets its inode number
        assert stat.S_IMODE(os.fstat(held).st_mode) == mode
        own.unmount()
        with suppress(FileNotFoundError):  # another mount may have got the device number by now
            assert not os.path.samestat(os.stat(path), os.fstat(held))
        os.close(held)
