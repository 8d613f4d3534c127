"""The copy service over a fake engine: its rules, its clients' misbehaviour, and that it gives everything back."""

from __future__ import annotations

import errno
import os
import random
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
from support.copying import HOUR, MIB, FakeMount, open_descriptors, opened, wait_until
from support.processes import NOBODY, PATIENCE, in_child

from gpufs import protocol, service
from gpufs.client import Cancellation
from gpufs.client._connection import Connection
from gpufs.protocol import Copy, Goodbye, Hello, Result

READ, WRITE, BOTH = os.O_RDONLY, os.O_WRONLY, os.O_RDWR


@pytest.fixture
def make() -> Iterator[Callable[..., FakeMount]]:
    made: list[FakeMount] = []

    def start(limits: service.Limits | None = None, **options: Any) -> FakeMount:
        made.append(FakeMount(limits, **options))
        return made[-1]

    yield start
    for mount in made:
        mount.close()


@pytest.fixture
def fake(make: Callable[..., FakeMount]) -> FakeMount:
    return make()


def load(mount: FakeMount, host: int, buffer: int, **options: Any) -> Result:
    with mount.connect() as connection:
        return connection.copy("load", host, buffer, **options)


def greeted(mount: FakeMount) -> socket.socket:
    sock = mount.raw()
    protocol.send(sock, Hello([1], "test"))
    protocol.receive(sock)
    return sock


def answer(sock: socket.socket) -> Any:
    """The next message but progress; None at the end."""
    while True:
        try:
            data, _ = protocol.receive(sock)
        except ConnectionResetError:
            return None
        if not data:
            return None
        message = protocol.decode_server(data)
        if not isinstance(message, protocol.Progress):
            return message


def still_serves(mount: FakeMount) -> None:
    """A well-behaved client gets its copy, and nothing of what went before is left."""
    wait_until(mount.quiet)
    content = os.urandom(10_000)
    source = mount.file("good", content)
    target = mount.file("good", b"", mount.folder)
    with opened(source) as host, opened(target, WRITE) as buffer:
        assert load(mount, host, buffer).error == 0
    assert target.read_bytes() == content
    wait_until(mount.quiet)


# ---- copies ----


def test_load_and_store(fake: FakeMount) -> None:
    content = os.urandom(3 * MIB + 17)
    source, buffer = fake.file("source", content), fake.file("buffer", b"", fake.folder)
    back = fake.file("back", b"")
    with fake.connect() as connection:
        with opened(source) as host, opened(buffer, WRITE) as mount:
            loaded = connection.copy("load", host, mount)
        with opened(back, WRITE) as host, opened(buffer) as mount:
            stored = connection.copy("store", host, mount, sync="full")
    for result in (loaded, stored):
        assert (result.error, result.done, result.paths) == (0, len(content), {"fallback": len(content)})
        assert result.refusals == ["file_system"]
    assert buffer.read_bytes() == back.read_bytes() == content
    assert [request["sync"] for request in fake.backend.requests] == ["none", "full"]
    # A load tells the table before (set-id bits) and after (times); a store does not.
    assert fake.backend.writes == [buffer.stat().st_ino] * 2
    statistics = fake.service.statistics()
    assert statistics["completed"] == 2
    assert statistics["loaded_bytes"] == statistics["stored_bytes"] == len(content)
    assert statistics["path_bytes"] == {"fallback": 2 * len(content)}


def test_offsets_and_size(fake: FakeMount) -> None:
    source, buffer = fake.file("source", b"0123456789"), fake.file("buffer", b"abcdefghij", fake.folder)
    with opened(source) as host, opened(buffer, WRITE) as mount:
        result = load(fake, host, mount, host_offset=2, offset=5, size=3)
    assert result.done == 3
    assert buffer.read_bytes() == b"abcde234ij"


def test_progress_comes_while_it_runs(fake: FakeMount) -> None:
    fake.backend.delay = 0.05
    source, buffer = fake.hollow("source", 400 * MIB), fake.file("buffer", b"", fake.folder)
    seen: list[protocol.Progress] = []

    def see(message: protocol.Progress) -> None:
        seen.append(message)
        if len(seen) == 3:
            fake.backend.delay = 0

    with opened(source) as host, opened(buffer, WRITE) as mount:
        result = load(fake, host, mount, interval=0.02, progress=see)
    assert result.done == 400 * MIB
    assert len(seen) >= 3
    assert [message.moved for message in seen] == sorted(message.moved for message in seen)
    assert seen[-1].total == 400 * MIB


# ---- failures ----


def test_a_failure_has_errno_device_code_and_count(fake: FakeMount) -> None:
    fake.backend.fail_at = (2 * MIB, errno.EIO)
    source, buffer = fake.file("source", bytes(5 * MIB)), fake.file("buffer", b"", fake.folder)
    with opened(source) as host, opened(buffer, WRITE) as mount:
        result = load(fake, host, mount)
    assert (result.error, result.device_code, result.done) == (errno.EIO, 77, 2 * MIB)
    assert result.message == "planned"
    assert fake.service.statistics()["failed"] == 1
    still_serves(make_healthy(fake))


def make_healthy(mount: FakeMount) -> FakeMount:
    mount.backend.fail_at = None
    mount.backend.delay = 0.0
    return mount


def test_a_failed_store_leaves_what_was_copied(fake: FakeMount) -> None:
    fake.backend.fail_at = (2 * MIB, errno.ENOSPC)
    fake.backend.sparse_tail = True
    target, buffer = fake.file("target", b""), fake.file("buffer", bytes(5 * MIB), fake.folder)
    with opened(target, WRITE) as host, opened(buffer) as mount, fake.connect() as connection:
        assert connection.copy("store", host, mount).done == 2 * MIB
    assert target.stat().st_size == 2 * MIB


def test_what_the_engine_refuses_is_the_result(fake: FakeMount) -> None:
    fake.backend.refuse_start = OSError(errno.EOPNOTSUPP, "fastpath is required: file_system")
    source, buffer = fake.file("source", b"1"), fake.file("buffer", b"", fake.folder)
    with opened(source) as host, opened(buffer, WRITE) as mount:
        result = load(fake, host, mount)
    assert (result.error, result.message) == (errno.EOPNOTSUPP, "fastpath is required: file_system")
    wait_until(fake.quiet)
    assert fake.service.statistics()["refused"] == 1


# ---- rights ----


def refused(mount: FakeMount, direction: str, host: int, buffer: int) -> tuple[int, str]:
    with mount.connect() as connection:
        result = connection.copy(direction, host, buffer)
    wait_until(mount.quiet)
    assert result.done == 0
    assert not mount.backend.requests
    return result.error, result.message


@pytest.mark.parametrize(
    ("direction", "host_flags", "buffer_flags", "which"),
    [
        ("load", READ, READ, "the file on the mount is not open for writing"),
        ("load", WRITE, WRITE, "the host's file is not open for reading"),
        ("store", READ, READ, "the host's file is not open for writing"),
        ("store", WRITE, WRITE, "the file on the mount is not open for reading"),
        ("load", os.O_PATH, WRITE, "the host's file is an O_PATH descriptor"),
        ("load", READ, os.O_PATH, "the file on the mount is an O_PATH descriptor"),
        ("store", os.O_PATH, READ, "the host's file is an O_PATH descriptor"),
        ("store", WRITE, os.O_PATH, "the file on the mount is an O_PATH descriptor"),
        ("store", WRITE | os.O_APPEND, READ, "the host's file is open for appending"),
        ("load", READ, WRITE | os.O_APPEND, "the file on the mount is open for appending"),
    ],
)
def test_the_access_mode_must_fit(
    fake: FakeMount, direction: str, host_flags: int, buffer_flags: int, which: str
) -> None:
    source, buffer = fake.file("file", b"host"), fake.file("file", b"device", fake.folder)
    with opened(source, host_flags) as host, opened(buffer, buffer_flags) as mount:
        assert refused(fake, direction, host, mount) == (errno.EBADF, which)
    assert source.read_bytes() == b"host"
    assert buffer.read_bytes() == b"device"


def test_files_of_the_wrong_place(fake: FakeMount) -> None:
    here, there = fake.file("file", b"host"), fake.file("file", b"", fake.folder)
    other = fake.file("other", b"device", fake.folder)
    with opened(here, BOTH) as host, opened(there, BOTH) as mount, opened(other, BOTH) as second:
        assert refused(fake, "load", host, host)[0] == errno.EXDEV
        assert refused(fake, "load", mount, host)[0] == errno.EXDEV
        assert refused(fake, "load", second, mount)[0] == errno.EDEADLK


def test_things_that_are_not_files(fake: FakeMount) -> None:
    regular, buffer = fake.file("file", b"host"), fake.file("file", b"", fake.folder)
    fifo, fifo_there = fake.host / "fifo", fake.folder / "fifo"
    os.mkfifo(fifo)
    os.mkfifo(fifo_there)
    read_end, write_end = os.pipe()
    ours, theirs = socket.socketpair()
    with opened(buffer, WRITE) as mount, opened(regular) as host, ours, theirs:
        with opened(Path("/dev/zero")) as zero, opened(fifo, BOTH) as queue:
            for bad in (zero, queue, read_end, ours.fileno()):
                assert refused(fake, "load", bad, mount)[0] == errno.EINVAL
        with opened(fake.host, READ | os.O_DIRECTORY) as directory:
            assert refused(fake, "load", directory, mount)[0] == errno.EISDIR
        with opened(fifo_there, BOTH) as queue:
            assert refused(fake, "load", host, queue)[0] == errno.EINVAL
    os.close(read_end)
    os.close(write_end)


@pytest.mark.parametrize("path", ["/proc/self/status", "/sys/kernel/uevent_seqnum"])
def test_interfaces_of_the_kernel_are_no_storage(fake: FakeMount, path: str) -> None:
    buffer = fake.file("file", b"", fake.folder)
    with opened(Path(path)) as host, opened(buffer, WRITE) as mount:
        error, message = refused(fake, "load", host, mount)
    assert error == errno.EINVAL
    assert "interface of the kernel" in message


def test_a_file_of_the_mount_without_device_memory(fake: FakeMount) -> None:
    source, buffer = fake.file("source", b"12345"), fake.file("buffer", b"", fake.folder)
    with opened(source) as host, opened(buffer, WRITE) as mount:
        buffer.unlink()
        assert refused(fake, "load", host, mount)[0] == errno.EINVAL


def test_set_id_bits_of_the_host_file_go(fake: FakeMount) -> None:
    target, buffer = fake.file("target", b""), fake.file("buffer", b"program", fake.folder)
    target.chmod(0o6777)
    with opened(target, WRITE) as host, opened(buffer) as mount, fake.connect() as connection:
        assert connection.copy("store", host, mount).error == 0
    assert stat.S_IMODE(target.stat().st_mode) == 0o777


def test_the_peers_identity_grants_nothing(make: Callable[..., FakeMount]) -> None:
    """Root's service and nobody: the same rules; what he could not open he cannot pass."""
    fake = make(allow_other=True)
    secret, buffer = fake.file("secret", b"root's"), fake.file("buffer", b"", fake.folder)
    secret.chmod(0o600)

    def attack() -> tuple[int, int]:
        with pytest.raises(PermissionError):
            os.open(secret, os.O_RDONLY)
        with opened(secret, os.O_PATH) as host, opened(buffer, WRITE) as mount:
            first = load(fake, host, mount).error
        with opened(secret, os.O_PATH) as host, opened(buffer) as mount, fake.connect() as connection:
            second = connection.copy("store", host, mount).error
        return first, second

    assert in_child(attack, uid=NOBODY, gid=NOBODY) == (errno.EBADF, errno.EBADF)
    assert secret.read_bytes() == b"root's"
    assert not fake.backend.requests


def test_the_socket_is_its_owners_alone(make: Callable[..., FakeMount]) -> None:
    private, public = make(), make(allow_other=True)
    assert stat.S_IMODE(os.stat(private.socket).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(public.socket).st_mode) == 0o666

    def connect() -> int:
        try:
            private.connect().close()
        except PermissionError:
            public.connect().close()
            return 1
        return 0

    assert in_child(connect, uid=NOBODY, gid=NOBODY) == 1


# ---- cancellation and disconnection ----


def test_cancel_ends_a_copy_soon(fake: FakeMount) -> None:
    fake.backend.delay = 0.02
    source, buffer = fake.hollow("source", HOUR), fake.file("buffer", b"", fake.folder)
    cancel = Cancellation()
    with opened(source) as host, opened(buffer, WRITE) as mount:
        with fake.once(fake.backend.has_moved, cancel.cancel):
            result = load(fake, host, mount, cancel=cancel)
    assert result.error == errno.ECANCELED
    assert 0 < result.done < HOUR
    assert buffer.stat().st_size == result.done
    assert fake.service.statistics()["cancelled"] == 1
    still_serves(make_healthy(fake))


def test_cancel_while_the_file_does_not_open(fake: FakeMount) -> None:
    fake.backend.hang = threading.Event()
    source, buffer = fake.file("source", b"1234"), fake.file("buffer", b"", fake.folder)
    cancel = Cancellation()
    with opened(source) as host, opened(buffer, WRITE) as mount:
        with fake.once(lambda: fake.backend.hanging == 1, cancel.cancel):
            assert load(fake, host, mount, cancel=cancel).error == errno.ECANCELED
    fake.backend.hang.set()
    fake.backend.hang = None
    still_serves(fake)
    assert len(fake.backend.requests) == 1  # the hung one never started


def test_a_client_that_goes_takes_its_copies_along(fake: FakeMount) -> None:
    fake.backend.delay = 0.02
    source, buffer = fake.hollow("source", HOUR), fake.file("buffer", b"", fake.folder)
    sock = greeted(fake)
    with opened(source) as host, opened(buffer, WRITE) as mount:
        for number in (1, 2, 3):
            protocol.send(sock, Copy(number, "load"), (host, mount))
    wait_until(lambda: fake.service.statistics()["running"] == 3)
    wait_until(lambda: len(fake.backend.requests) == 3)
    sock.close()
    wait_until(fake.quiet)
    assert fake.service.statistics()["cancelled"] == 3
    still_serves(make_healthy(fake))


def test_the_end_of_the_service_cancels_and_tells(fake: FakeMount) -> None:
    fake.backend.delay = 0.02
    fake.backend.sparse_tail = True
    target, buffer = fake.file("target", b""), fake.hollow("buffer", HOUR, fake.folder)
    with opened(target, WRITE) as host, opened(buffer) as mount, fake.connect() as connection:
        with fake.once(fake.backend.has_moved, fake.stop):
            result = connection.copy("store", host, mount)
        assert result.error == errno.ECANCELED
        assert target.stat().st_size == result.done
        with pytest.raises(OSError) as ended:
            connection.copy("store", host, mount)
        assert ended.value.errno in (errno.ESHUTDOWN, errno.EPIPE, errno.ECONNRESET)
    assert not os.path.exists(fake.socket)
    assert not fake.backend.open


def test_a_transfer_that_does_not_end_is_not_a_success(make: Callable[..., FakeMount]) -> None:
    fake = make(service.Limits(grace=0.3))
    fake.backend.deaf = True
    fake.backend.delay = 0.02
    source, buffer = fake.hollow("source", HOUR), fake.file("buffer", b"", fake.folder)
    with opened(source) as host, opened(buffer, WRITE) as mount, fake.connect() as connection:
        with fake.once(fake.backend.has_moved, fake.stop):
            assert connection.copy("load", host, mount).error == errno.ETIMEDOUT


# ---- hostile clients ----


def packet(content: Any) -> bytes:
    return bytes(msgpack.packb(content))


GARBAGE = [
    b"\x00",
    b"\xff" * 100,
    random.Random(7).randbytes(300),
    b"x" * 60_000,
    packet({"type": "copy"}),
    packet({"type": "hello", "versions": [1], "program": "again"}),
    packet({"type": "result"}),
    protocol.encode(Copy(1, "load"))[:-3],
]


@pytest.mark.parametrize("data", GARBAGE, ids=lambda data: data[:8].hex())
@pytest.mark.parametrize("greet", [False, True])
def test_garbage_ends_the_connection_alone(fake: FakeMount, data: bytes, greet: bool) -> None:
    with greeted(fake) if greet else fake.raw() as sock, fake.connect():
        if not greet and b"again" in data:
            return  # an ordinary first message
        sock.send(data)
        goodbye = answer(sock)
        assert isinstance(goodbye, Goodbye)
        assert goodbye.error == errno.EPROTO
        assert answer(sock) is None
    assert fake.service.statistics()["violations"] == 1
    still_serves(fake)


@pytest.mark.parametrize("count", [0, 1, 3, 250])
def test_the_wrong_number_of_descriptors(fake: FakeMount, count: int) -> None:
    source = fake.file("source", b"1234")
    with greeted(fake) as sock, opened(source) as host:
        wait_until(lambda: fake.service.statistics()["connections"] == 1)
        before = open_descriptors()
        socket.send_fds(sock, [protocol.encode(Copy(1, "load"))], [host] * count)
        goodbye = answer(sock)
        assert isinstance(goodbye, Goodbye)
        assert "descriptors" in goodbye.message
        wait_until(lambda: open_descriptors() < before)  # the service's end of the connection has gone too
    still_serves(fake)


def test_a_flood_of_descriptors(fake: FakeMount) -> None:
    """A thousand descriptors in messages that the service takes one by one: none stays open."""
    source = fake.file("source", b"1234")
    before = open_descriptors()
    for _ in range(10):
        with greeted(fake) as sock, opened(source) as host:
            for _ in range(50):
                try:
                    socket.send_fds(sock, [protocol.encode(protocol.Cancel(9))], [host, host])
                except OSError:
                    break
    wait_until(lambda: open_descriptors() <= before)
    still_serves(fake)


def test_the_service_out_of_descriptors(fake: FakeMount) -> None:
    """A message whose descriptors it cannot take ends that connection and nothing else."""
    import resource

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    source, buffer = fake.file("source", b"1234"), fake.file("buffer", b"", fake.folder)
    with greeted(fake) as sock, opened(source) as host, opened(buffer, WRITE) as mount:
        highest = max(int(name) for name in os.listdir("/proc/self/fd"))
        spare = []
        try:
            while True:  # fill the gaps below the highest
                fd = os.dup(host)
                spare.append(fd)
                if fd > highest:
                    break
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(spare) + 1, limits[1]))
            protocol.send(sock, Copy(1, "load"), (host, mount))
            goodbye = answer(sock)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            for fd in spare:
                os.close(fd)
        assert isinstance(goodbye, Goodbye)
        assert goodbye.error == errno.EMFILE
    still_serves(fake)


def test_silence_is_not_waited_for(make: Callable[..., FakeMount]) -> None:
    for limits, connect in ((service.Limits(hello=0.2), FakeMount.raw), (service.Limits(idle=0.2), greeted)):
        with connect(make(limits)) as sock:
            goodbye = answer(sock)
            assert isinstance(goodbye, Goodbye)
            assert goodbye.error == errno.ETIMEDOUT


def test_a_hung_file_takes_its_clients_threads_alone(make: Callable[..., FakeMount]) -> None:
    fake = make(service.Limits(prepare=600, threads=2))
    hang = fake.backend.hang = threading.Event()
    source, buffer = fake.file("source", b"1234"), fake.file("buffer", b"", fake.folder)
    sock = greeted(fake)
    with opened(source) as host, opened(buffer, WRITE) as mount:
        for number in range(1, 9):
            protocol.send(sock, Copy(number, "load"), (host, mount))
        wait_until(lambda: fake.service.statistics()["running"] == 8)
        wait_until(lambda: fake.backend.hanging == 2)
        threads = threading.active_count()
        fake.backend.hang = None  # for the others
        with fake.connect() as still:
            assert still.copy("load", host, mount).error == 0
        assert fake.service.statistics()["running"] == 8  # it waited for none of them
        assert threading.active_count() <= threads + 2
        hang.set()
        assert {answer(sock).error for _ in range(8)} == {0}
    sock.close()
    still_serves(fake)


def test_a_hung_file_is_given_up(make: Callable[..., FakeMount]) -> None:
    fake = make(service.Limits(prepare=0.3, threads=2))
    hang = fake.backend.hang = threading.Event()
    source, buffer = fake.file("source", b"1234"), fake.file("buffer", b"", fake.folder)
    with greeted(fake) as sock, opened(source) as host, opened(buffer, WRITE) as mount:
        for number in range(1, 9):
            protocol.send(sock, Copy(number, "load"), (host, mount))
        assert {answer(sock).error for _ in range(8)} == {errno.ETIMEDOUT}
    hang.set()


def test_too_many_connections(make: Callable[..., FakeMount]) -> None:
    fake = make(service.Limits(connections_per_user=3))
    kept = [fake.connect() for _ in range(3)]
    with fake.raw() as sock:
        goodbye = answer(sock)
        assert isinstance(goodbye, Goodbye)
        assert goodbye.error == errno.EBUSY
    for connection in kept:
        connection.close()
    wait_until(lambda: fake.service.statistics()["connections"] == 0)
    assert fake.service.statistics()["rejected"] == 1
    still_serves(fake)


def connected_as_nobody(mount: FakeMount, count: int) -> list[socket.socket]:
    """Connections that a process of another user made; one that was refused has its farewell."""

    def connect(channel: socket.socket) -> None:
        socks = [mount.raw() for _ in range(count)]
        socket.send_fds(channel, [b"x"], [sock.fileno() for sock in socks])

    ours, theirs = socket.socketpair()
    with ours, theirs:
        in_child(lambda: connect(theirs), uid=NOBODY, gid=NOBODY)
        _, descriptors, _, _ = socket.recv_fds(ours, 1, count)
    socks = [socket.socket(fileno=fd) for fd in descriptors]
    for sock in socks:
        sock.settimeout(PATIENCE)
    return socks


def test_other_users_do_not_take_the_owners_connections(make: Callable[..., FakeMount]) -> None:
    fake = make(service.Limits(connections=4), allow_other=True)
    held = connected_as_nobody(fake, 5)
    goodbye = answer(held[-1])
    assert isinstance(goodbye, Goodbye)
    assert goodbye.error == errno.EBUSY
    source, buffer = fake.file("source", b"1234"), fake.file("buffer", b"", fake.folder)
    with opened(source) as host, opened(buffer, WRITE) as mount:
        assert load(fake, host, mount).error == 0
    for sock in held:
        sock.close()
    still_serves(fake)


def test_a_user_with_bad_connections_gets_no_more_for_a_while(make: Callable[..., FakeMount]) -> None:
    fake = make(service.Limits(bad_connections=3), allow_other=True)
    for _ in range(3):
        (sock,) = connected_as_nobody(fake, 1)
        with sock:
            sock.send(b"garbage")
            assert answer(sock).error == errno.EPROTO
    wait_until(fake.quiet)
    (sock,) = connected_as_nobody(fake, 1)
    with sock:
        assert answer(sock).error == errno.EBUSY
    still_serves(fake)  # of the owner

    def accepted() -> bool:
        (sock,) = connected_as_nobody(fake, 1)
        with sock:
            try:
                protocol.send(sock, Hello([1], "test"))
            except BrokenPipeError:
                return False
            return isinstance(answer(sock), protocol.Welcome)

    wait_until(accepted)


def test_too_many_requests(make: Callable[..., FakeMount]) -> None:
    fake = make(service.Limits(requests=3))
    fake.backend.delay = 0.05
    source, buffer = fake.hollow("source", HOUR), fake.file("buffer", b"", fake.folder)
    with greeted(fake) as sock, opened(source) as host, opened(buffer, WRITE) as mount:
        for number in range(1, 5):
            protocol.send(sock, Copy(number, "load"), (host, mount))
        messages = []
        while (message := answer(sock)) is not None:
            messages.append(message)
    assert sorted(message.error for message in messages if isinstance(message, Result)) == [errno.ECANCELED] * 3
    assert isinstance(messages[-1], Goodbye)
    still_serves(make_healthy(fake))


def test_an_id_that_is_under_way(fake: FakeMount) -> None:
    fake.backend.delay = 0.05
    source, buffer = fake.hollow("source", HOUR), fake.file("buffer", b"", fake.folder)
    with greeted(fake) as sock, opened(source) as host, opened(buffer, WRITE) as mount:
        for _ in range(2):
            protocol.send(sock, Copy(5, "load"), (host, mount))
        assert answer(sock).error == errno.ECANCELED
        assert isinstance(answer(sock), Goodbye)
    still_serves(make_healthy(fake))


def test_a_client_that_does_not_read(make: Callable[..., FakeMount]) -> None:
    """Many results wait for it at once, for as long as the limit says; then it is sent away."""
    fake = make(service.Limits(send=0.5, messages_per_second=1_000_000))
    source, buffer = fake.file("source", b"1234"), fake.file("buffer", b"", fake.folder)
    with greeted(fake) as sock, opened(source) as host, opened(buffer, WRITE) as mount:
        number = 0
        while fake.service.statistics()["connections"]:
            if number - fake.service.statistics()["completed"] >= 8:
                time.sleep(0.001)
                continue
            number += 1
            try:
                sock.settimeout(0.2)
                protocol.send(sock, Copy(number, "load"), (host, mount))
            except OSError:
                break
        wait_until(lambda: fake.service.statistics()["connections"] == 0)
        answers = 0
        while answer(sock) is not None:
            answers += 1
    statistics = fake.service.statistics()
    assert statistics["violations"] == 0
    assert 8 < answers < statistics["completed"]
    still_serves(make_healthy(fake))


def test_a_killed_client(fake: FakeMount) -> None:
    """SIGKILL in the middle: the copy ends, the file has the size that was copied."""
    fake.backend.delay = 0.02
    fake.backend.sparse_tail = True
    target, buffer = fake.file("target", b""), fake.hollow("buffer", HOUR, fake.folder)
    child = os.fork()
    if child == 0:
        try:
            with opened(target, WRITE) as host, opened(buffer) as mount, Connection(fake.raw()) as connection:
                connection.copy("store", host, mount)
        finally:
            os._exit(1)
    wait_until(fake.backend.has_moved)
    os.kill(child, 9)
    os.waitpid(child, 0)
    wait_until(fake.quiet)
    copied = fake.service.statistics()["stored_bytes"]
    assert 0 < copied < HOUR
    assert target.stat().st_size == copied


def test_a_stale_socket_is_replaced_and_another_ones_left(make: Callable[..., FakeMount]) -> None:
    fake = make()
    dead = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    os.unlink(fake.socket)
    dead.bind(fake.socket)
    dead.close()
    fake.stop()
    assert os.path.exists(fake.socket)  # it was not ours any more
