"""The copy service and its clients where things happen in an order that is rare; each test brings its own about."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from support.copying import FakeMount, opened, wait_until
from support.processes import PATIENCE

from gpufs import protocol, service
from gpufs.client import Cancellation
from gpufs.client._connection import Connection
from gpufs.protocol import Cancel, Copy, Goodbye, Hello, Result, Welcome


@pytest.fixture
def make() -> Iterator[Callable[..., FakeMount]]:
    made: list[FakeMount] = []

    def start(**limits: Any) -> FakeMount:
        made.append(FakeMount(service.Limits(**limits)))
        return made[-1]

    yield start
    for mount in made:
        mount.close()


def test_cancel_while_a_thread_still_works_for_the_copy(make: Callable[..., FakeMount]) -> None:
    """The result comes after that thread has released the file: the caller may unmount its disk next."""
    fake = make(abandoned=600, grace=600)
    hang = fake.backend.hang = threading.Event()
    closing = fake.backend.closing = threading.Event()
    source, buffer = fake.file("source", b"1234"), fake.file("buffer", b"", fake.folder)
    with fake.raw() as sock, opened(source) as host, opened(buffer, os.O_WRONLY) as mount:
        protocol.send(sock, Hello([1], "test"))
        protocol.receive(sock)
        protocol.send(sock, Copy(1, "load"), (host, mount))
        wait_until(lambda: fake.backend.hanging == 1)
        protocol.send(sock, Cancel(1))
        protocol.send(sock, Copy(2, "load"), (host, mount))
        wait_until(lambda: fake.backend.hanging == 2)  # so what came before has been read
        hang.set()
        wait_until(lambda: fake.backend.held_up == 2)
        sock.setblocking(False)
        with pytest.raises(BlockingIOError):
            protocol.receive(sock)
        sock.settimeout(PATIENCE)
        closing.set()
        found = {}
        for _ in range(2):
            result = protocol.decode_server(protocol.receive(sock)[0])
            assert isinstance(result, Result)
            found[result.id] = result.error
    assert found == {1: errno.ECANCELED, 2: 0}
    wait_until(fake.quiet)


@pytest.mark.parametrize("said", [False, True], ids=["silent", "goodbye"])
@pytest.mark.parametrize("unread", [False, True], ids=["read", "unread"])
@pytest.mark.parametrize("kind", [Copy, Cancel])
def test_the_last_words_of_a_daemon_are_heard(
    monkeypatch: pytest.MonkeyPatch, kind: type, unread: bool, said: bool
) -> None:
    """It ends just before a message is sent, or with that message unread, of which the kernel speaks first."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    true_send = protocol.send
    true_send(theirs, Welcome(1, "test", 16))
    read_end, write_end = os.pipe()
    cancel = Cancellation()
    cancel.cancel()

    def send(sock: socket.socket, message: Any, descriptors: Sequence[int] = ()) -> None:
        def end() -> None:
            if said:
                true_send(theirs, Goodbye(errno.ESHUTDOWN, "the mount is ending"))
            theirs.close()

        if isinstance(message, kind) and not unread:
            end()
        true_send(sock, message, descriptors)
        if isinstance(message, kind):
            end()
        else:
            protocol.close_all(protocol.receive(theirs)[1])

    monkeypatch.setattr(protocol, "send", send)
    with Connection(ours) as connection, pytest.raises(OSError) as caught:
        connection.copy("load", read_end, write_end, cancel=cancel if kind is Cancel else None)
    if said:
        assert (caught.value.errno, caught.value.strerror) == (errno.ESHUTDOWN, "the mount is ending")
    else:
        assert caught.value.errno == errno.ECONNRESET
    for fd in (read_end, write_end):
        os.close(fd)
