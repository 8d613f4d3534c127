"""Who may send each message of the daemon's socket: the table in docs, the one in the code, and what follows."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import re
import socket
from collections.abc import Iterator
from errno import EBADF, EBUSY, ENOSPC, EOPNOTSUPP, EPERM
from pathlib import Path
from typing import Any

import pytest
from support.attaching import Attacker
from support.copying import opened, socket_path
from support.data import MIB, directory, noise
from support.mounting import Mounter
from support.pages import DOCS
from support.processes import NOBODY, OTHER, Snapshot, as_nobody, errno_of, in_child, wait_until
from support.surviving import Survivor, mounted

from gpufs import protocol
from gpufs.modes import Mode
from gpufs.service import rights

SIZE = 4 * MIB


def test_the_table_of_messages_is_that_of_the_code() -> None:
    page = (DOCS / "security.md").read_text().partition("## Messages")[2].partition("\n## ")[0]
    shown = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", page, re.M)
    table = {kind.__struct_config__.tag: right.who for kind, right in rights.TABLE.items()}
    assert dict(shown) == table
    assert len(shown) == len(table)
    assert table.keys() == {kind.__struct_config__.tag for kind in protocol.kinds(protocol.ClientMessage)}


@pytest.fixture(scope="module")
def place() -> Iterator[Survivor]:
    """A mount that survives its daemon, open to all, with host memory."""
    if os.geteuid() != 0:
        pytest.skip("acts as several users, which takes root")
    with (
        directory("/tmp") as folder,
        mounted(folder / "mnt", "--allow-other", "--host-memory", "16M", memory="64M") as made,
    ):
        folder.chmod(0o711)
        made.device.chmod(0o1777)
        yield made


@pytest.fixture
def file(place: Survivor) -> Iterator[Path]:
    path = place.device / "model"
    path.write_bytes(noise(SIZE))
    path.chmod(0o644)
    yield path
    path.unlink(missing_ok=True)


@contextlib.contextmanager
def client(place: Survivor) -> Iterator[Attacker]:
    with Attacker(socket_path(place.path)) as made:
        assert made.greet()
        yield made


def attached(made: Attacker, number: int, fd: int, mode: Mode = "r") -> dict[str, Any]:
    answer, received = made.ask(protocol.Attach(number, mode), [fd])
    for one in received:
        os.close(one)
    assert not answer["error"], answer
    return dict(answer)


def error_of(made: Attacker, message: protocol.ClientMessage, descriptors: list[int] | None = None) -> int:
    answer, received = made.ask(message, descriptors)
    for one in received:
        os.close(one)
    return int(answer["error"])


def parked(path: Path) -> bool:
    return int(os.getxattr(path, "user.gpufs.parked_bytes")) > 0


def test_another_user_moves_no_file_ends_no_lease_and_sets_no_limit(place: Survivor, file: Path) -> None:
    ino = file.stat().st_ino

    def attack() -> list[int]:
        with client(place) as made, opened(file, os.O_PATH) as fd, opened(place.device, os.O_PATH) as folder:
            return [
                error_of(made, protocol.Park(1, [ino], 0.0)),
                error_of(made, protocol.BringBack(1, [ino])),
                error_of(made, protocol.Revoke(1), [fd]),
                error_of(made, protocol.SetQuota(1, None, MIB), [folder]),
                error_of(made, protocol.SetQuota(1, NOBODY, protocol.NO_LIMIT), [folder]),
            ]

    assert as_nobody(attack) == [EPERM] * 5
    assert not parked(file)


def test_numbers_mean_what_the_same_connection_has(place: Survivor, file: Path) -> None:
    with client(place) as owner, client(place) as other, opened(file) as fd:
        attached(owner, 1, fd)
        for message in (
            protocol.Refresh(9, 1, 0),
            protocol.Sleep(9, 1),
            protocol.Wake(9, 1),
            protocol.Check(1, [1], "sleep"),
            protocol.Check(1, [1], "wake"),
        ):
            assert error_of(other, message) == EBADF, message
        assert error_of(other, protocol.Unregister(9, 1))
        assert error_of(other, protocol.Detach(9, 1)) == 0
        assert error_of(owner, protocol.Refresh(9, 1, 0)) == 0
        other.send(protocol.encode(protocol.Declined(1, "not asked")))
        assert error_of(other, protocol.Listen(2)) == 0


def sleep_of(place: Survivor, path: Path, flags: int, uid: int) -> bool:
    """Attaches a file as a user, sleeps, and ends: whether the file was parked while that slept."""

    def attack() -> bool:
        with client(place) as made, opened(path, flags) as fd:
            attached(made, 1, fd)
            assert error_of(made, protocol.Check(9, [1], "sleep")) == 0
            assert error_of(made, protocol.Sleep(9, 1)) == 0
            was_parked = parked(path)
            assert error_of(made, protocol.Wake(9, 1)) == 0
            assert error_of(made, protocol.Sleep(9, 1)) == 0
            assert error_of(made, protocol.Detach(9, 1)) == 0
            return was_parked

    found: bool = in_child(attack, uid=uid, gid=uid)
    return found


def test_a_reader_that_sleeps_does_not_move_the_file_of_another_user(place: Survivor, file: Path) -> None:
    """It was moved at its owner's charge, and the reader could take the memory of the device."""
    os.chown(file, OTHER, OTHER)
    assert not sleep_of(place, file, os.O_RDONLY, NOBODY)
    assert not parked(file)
    assert sleep_of(place, file, os.O_RDONLY, OTHER)  # its owner's
    file.chmod(0o666)
    assert sleep_of(place, file, os.O_RDWR, NOBODY)  # who could as well empty it
    file.chmod(0o644)

    def sleep_beside_a_reader() -> None:
        with client(place) as reader, opened(file) as fd:
            attached(reader, 1, fd)
            assert not parked(file)
        wait_until(lambda: parked(file), 10, "the file to go with the reader, since its owner's program sleeps")

    with client(place) as owner, opened(file, os.O_RDWR) as fd:
        attached(owner, 1, fd)
        assert error_of(owner, protocol.Sleep(9, 1)) == 0
        assert parked(file)
        as_nobody(sleep_beside_a_reader)


def test_a_private_copy_is_refused_what_it_cannot_do_and_costs_no_other_lease(place: Survivor, file: Path) -> None:
    """After a takeover such a request ended the connection, with all that the client had."""
    small = place.device / "small"
    small.write_bytes(b"small")
    with client(place) as made, opened(small, os.O_RDONLY) as copied, opened(file, os.O_RDWR) as shared:
        assert attached(made, 1, copied)["private"]
        attached(made, 2, shared, "r+")
        numbers = itertools.count(3)
        for _ in range(2):
            for message in (
                protocol.Wake(next(numbers), 1),
                protocol.Sleep(next(numbers), 1),
                protocol.Refresh(next(numbers), 1, 0),
                protocol.Check(next(numbers), [2, 1], "wake"),
                protocol.Check(next(numbers), [2, 1], "sleep"),
            ):
                assert error_of(made, message) == EOPNOTSUPP, message
            assert error_of(made, protocol.Refresh(next(numbers), 2, 0)) == 0
            place.kill()
        assert error_of(made, protocol.Detach(next(numbers), 1)) == 0
    small.unlink()


def test_clients_that_end_while_their_requests_wait_leave_nothing(own: Mounter) -> None:
    """A request that waited when its client ended kept its descriptors, and the file, for ever."""
    mounted = own("--host-memory", "16M")
    path = mounted.device / "nobodys/file"
    path.write_bytes(noise(SIZE))
    os.chown(path, NOBODY, NOBODY)
    before = Snapshot.of(mounted.pid).descriptors

    def attack() -> None:
        def connect() -> Attacker:
            made = Attacker(socket_path(mounted.path))
            assert made.greet()
            return made

        listener = connect()
        with opened(path, os.O_RDWR) as fd:
            attached(listener, 1, fd)
            assert error_of(listener, protocol.Listen(2)) == 0
            waiting = [connect() for _ in range(30)]
            memory = os.memfd_create("memory")
            os.ftruncate(memory, mmap.PAGESIZE)
            for number, made in enumerate(waiting):
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                messages: list[tuple[protocol.ClientMessage, list[int]]] = [
                    (protocol.Park(1, [os.fstat(fd).st_ino], 3600.0), []),
                    (protocol.Attach(2, "r+"), [fd]),
                    (protocol.Copy(3, "store"), [os.open("/dev/null", os.O_WRONLY), fd]),
                    (protocol.Revoke(4) if number == 29 else protocol.Attach(4, "r"), [fd]),
                    (protocol.Register(5, "descriptor", 0, 2 * MIB), [fd, theirs.fileno()]),
                ]
                for message, descriptors in messages:
                    made.send(protocol.encode(message), descriptors)
                ours.close()
                theirs.close()
            for made in waiting:
                made.close()
        listener.close()

    as_nobody(attack)
    path.unlink()
    wait_until(lambda: Snapshot.of(mounted.pid).descriptors <= before, 10, "closed descriptors")
    wait_until(lambda: mounted.status()["devices"][0]["held_bytes"] == 0, 10, "released memory")
    assert mounted.alive()


def test_a_full_host_memory_refuses_a_reader_nothing(place: Survivor, file: Path) -> None:
    """What does not move needs no space."""
    filler = place.path / "host0/filler"
    filler.write_bytes(bytes(14 * MIB))
    try:
        assert not sleep_of(place, file, os.O_RDONLY, NOBODY)
        with client(place) as made, opened(file, os.O_RDWR) as fd:
            attached(made, 1, fd)
            for message in (protocol.Check(9, [1], "sleep"), protocol.Sleep(9, 1)):
                assert error_of(made, message) == ENOSPC
            assert errno_of(os.ftruncate, fd, 0) == EBUSY  # the lease is as it was
    finally:
        filler.unlink()
