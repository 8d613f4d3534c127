"""Attacks of several users at once: messages of all kinds and forms, with all kinds of descriptors."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import time
from pathlib import Path
from typing import Any, Final, get_args

import msgspec

from gpufs import protocol
from gpufs.service import rights
from support.attaching import FIRST_USER, Attacker, grants_write
from support.bystanders import watched
from support.copying import socket_path
from support.data import MIB
from support.processes import PATIENCE, start_children, wait_children

KINDS: Final = tuple(rights.TABLE)
# How often a message is sent; others once. A second hello ends the connection.
_WEIGHTS: Final[dict[type[protocol.ClientMessage], float]] = {
    protocol.Hello: 0.1,
    protocol.Attach: 8,
    protocol.Register: 3,
    protocol.Sleep: 2,
    protocol.Wake: 2,
}


class Fuzzer:
    """One user's attack: messages of all kinds and forms, with all kinds of descriptors.

    ``mount`` has ``secret`` (not the user's to read), ``public`` (to read, larger than a granule), ``own`` (to write)
    and a directory ``all``, where the user makes a file that it owns. All memory of ``secret`` consists of SECRET.
    AssertionError if the user gets memory of it, or memory of ``public`` that it can write to. Descriptors that the
    daemon has sent are passed back to it.
    """

    SECRET = b"\xd7"

    def __init__(self, mount: Path, seed: int) -> None:
        self.mount = mount
        self.path = socket_path(mount)
        self.chooser = random.Random(seed)
        self.inodes: list[int] = []

    def run(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        with contextlib.ExitStack() as held:
            pool = self._descriptors(held)
            while time.monotonic() < deadline:
                if "sent" in pool:
                    os.close(pool.pop("sent"))
                try:
                    with Attacker(self.path) as attacker:
                        if self.chooser.random() < 0.9 and not attacker.greet():
                            return  # the user is locked out for a while
                        self._attack(attacker, pool, deadline)
                except (ConnectionError, TimeoutError):
                    continue  # the daemon has ended the connection

    def _descriptors(self, held: contextlib.ExitStack) -> dict[str, int]:
        def opened(path: Path | str, flags: int) -> int:
            fd = os.open(path, flags | os.O_CLOEXEC)
            held.callback(os.close, fd)
            return fd

        device = self.mount / "gpu0/attacked"
        reader, writer = os.pipe()
        ours, theirs = socket.socketpair()
        memory = os.memfd_create("forged")
        os.ftruncate(memory, 4 * MIB)
        for fd in (reader, writer, memory):
            held.callback(os.close, fd)
        held.callback(ours.close)
        held.callback(theirs.close)
        theirs_path = device / f"all/{os.getuid()}"
        theirs_path.write_bytes(bytes(4 * MIB))
        self.inodes = [(device / name).stat().st_ino for name in ("secret", "public", "own", theirs_path)]
        return {
            "theirs": opened(theirs_path, os.O_RDWR),
            "theirs by path": opened(theirs_path, os.O_PATH),
            "secret by path": opened(device / "secret", os.O_PATH),
            "public": opened(device / "public", os.O_RDONLY),
            "public by path": opened(device / "public", os.O_PATH),
            "own": opened(device / "own", os.O_RDWR),
            "own to read": opened(device / "own", os.O_RDONLY),
            "own to write": opened(device / "own", os.O_WRONLY),
            "own to append": opened(device / "own", os.O_RDWR | os.O_APPEND),
            "small": opened(device / "small", os.O_RDONLY),
            "directory": opened(device, os.O_RDONLY),
            "control file": opened(self.mount / ".gpufs/status", os.O_RDONLY),
            "pipe": reader,
            "pipe to write": writer,
            "socket": ours.fileno(),
            "memfd": memory,
            "null": opened("/dev/null", os.O_RDWR),
            "another file system": opened("/proc/self/status", os.O_RDONLY),
        }

    def _attack(self, attacker: Attacker, pool: dict[str, int], deadline: float) -> None:
        chooser = self.chooser
        earlier: list[tuple[bytes, list[int]]] = []
        for _ in range(chooser.randrange(1, 40)):
            if time.monotonic() > deadline:
                return
            if earlier and chooser.random() < 0.2:  # a replay
                data, descriptors = chooser.choice(earlier)
            else:
                message, count = self._message()
                if chooser.random() < 0.05:
                    count = chooser.randrange(4)
                names = [chooser.choice(list(pool)) for _ in range(count)]
                descriptors = [pool[name] for name in names]
                data = self._spoiled(message)
                earlier.append((data, descriptors))
            attacker.send(data, descriptors)
            if chooser.random() < 0.7:
                attacker.sock.settimeout(0.05)
                with contextlib.suppress(TimeoutError):
                    while True:
                        answer, received = attacker.receive()
                        self._judge(received, pool)
                        if answer is None:
                            return
                        attacker.sock.settimeout(0.001)
                attacker.sock.settimeout(PATIENCE)

    def _message(self) -> tuple[dict[str, Any], int]:
        """A message of any kind, and how many descriptors belong to it."""
        chooser = self.chooser
        kind = chooser.choices(KINDS, [_WEIGHTS.get(kind, 1) for kind in KINDS])[0]
        message = kind(**{name: self._value(kind, name) for name in kind.__struct_fields__})
        if isinstance(message, protocol.Register):
            message.handle = chooser.randbytes(protocol.HANDLE_BYTES) if message.kind == "ipc" else b""
            return msgspec.to_builtins(message, builtin_types=(bytes,)), 1 if message.kind == "ipc" else 2
        return msgspec.to_builtins(message), rights.TABLE[kind].descriptors[0]

    def _value(self, kind: type[protocol.ClientMessage], name: str) -> Any:
        """What a field of a message may have."""
        chooser = self.chooser
        number = chooser.choice((1, 2, 3, chooser.randrange(1, 1 << 32)))
        inodes = chooser.choices((*self.inodes, 1, 2, 1 << 40), k=chooser.choice((1, 2, 5, protocol.MAX_FILES)))
        values: dict[str, tuple[Any, ...]] = {
            "id": (number,),
            "lease": (number,),
            "registration": (number,),
            "question": (number,),
            "leases": ([number], [1, 2, 3], list(range(1, protocol.MAX_FILES + 1))),
            "inodes": (inodes,),
            "wait": (0.0, 0.05, 0.3, 3600.0),
            "what": ("sleep", "wake"),
            "mode": ("r", "r+", "c"),
            "placement": (None, 0, 8, 255),
            "start": (0, 2 * MIB, chooser.randrange(1 << 63)),
            "kind": tuple(chooser.choices(get_args(protocol.ShareKind), (8, 1, 1))),
            "offset": (0, 1, 4096, 1 << 62),
            "host_offset": (0, 1, 4096, 1 << 62),
            "size": (1, 5000, 4 * MIB, 1 << 62),
            "direction": ("load", "store"),
            "fastpath": (None, "off", "require"),
            "sync": ("none", "full"),
            "progress": (0.0, 0.01),
            "uid": (None, 0, os.getuid()),
            "limit": (protocol.NO_LIMIT, protocol.DEFAULT_LIMIT, 0, MIB),
            "writable": (True, False),
            "pci_address": ("", "0000:01:00.0"),
            "handle": (b"",),
            "versions": ([1],),
            "program": ("attacker",),
            "message": ("", "x" * protocol.MAX_TEXT),
        }
        return chooser.choice(values[name])

    def _spoiled(self, message: dict[str, Any]) -> bytes:
        """The packet, now and then with a wrong field, or damaged."""
        chooser = self.chooser
        if chooser.random() < 0.02:
            message[chooser.choice(list(message))] = chooser.choice((None, -1, "", "x" * 5000, [], {}, 1 << 63, True))
        packet = bytearray(msgspec.msgpack.encode(message))
        if chooser.random() < 0.02:
            packet[chooser.randrange(len(packet))] = chooser.randrange(256)
        if chooser.random() < 0.01:
            del packet[chooser.randrange(len(packet)) :]
        return bytes(packet)

    def _judge(self, received: list[int], pool: dict[str, int]) -> None:
        """Fails if these descriptors give what the user may not have."""
        try:
            for fd in received:
                size = min(os.fstat(fd).st_size, 4 * MIB)
                if not size:
                    continue
                content = os.pread(fd, size, 0)
                assert self.SECRET * 4096 not in content, "the memory of a file that the user may not read"
                grants_write(fd)  # to the user's own file, or to a copy
                self._check_unchanged(pool)
        finally:
            for fd in received:
                if "sent" in pool:
                    os.close(fd)
                else:
                    pool["sent"] = fd

    def _check_unchanged(self, pool: dict[str, int]) -> None:
        for name in ("public", "small"):
            left = os.pread(pool[name], 1, 0)
            assert left == b"p", f"write access to {name}, which the user may only read"


def prepare_fuzz(mount: Path) -> Path:
    """The files that the attackers find."""
    directory = mount / "gpu0/attacked"
    directory.mkdir()
    directory.chmod(0o755)
    for name, content, mode in (
        ("secret", Fuzzer.SECRET * 4 * MIB, 0o600),
        ("public", b"p" * 4 * MIB, 0o644),
        ("small", b"p" * 5000, 0o644),
        ("own", bytes(4 * MIB), 0o666),
    ):
        (directory / name).write_bytes(content)
        (directory / name).chmod(mode)
    (directory / "all").mkdir()
    (directory / "all").chmod(0o1777)
    return directory


def fuzz(mount: Path, seconds: float, seed: int, *, users: int = 2) -> float:
    """Attacks by several users at once, each for a few seconds: a user with too many bad connections is locked out.

    Fails if another user waits for more than a second in between. Returns the longest wait.
    """
    deadline = time.monotonic() + seconds
    with watched(mount, 1.0) as took:
        _attack_until(deadline, mount, seed, users)
    directory = mount / "gpu0/attacked"
    assert (directory / "secret").read_bytes() == Fuzzer.SECRET * 4 * MIB
    assert (directory / "public").read_bytes() == b"p" * 4 * MIB
    assert (directory / "small").read_bytes() == b"p" * 5000
    for name in ("secret", "public"):
        assert int(os.getxattr(directory / name, "user.gpufs.parked_bytes")) == 0, f"{name} was moved by others"
    return max(took.values())


def _attack_until(deadline: float, mount: Path, seed: int, users: int) -> None:
    turn = 0
    while (left := deadline - time.monotonic()) > 0:

        def attack(index: int, turn: int = turn, left: float = left) -> None:
            user = FIRST_USER + (turn * users + index) % 1000
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            Fuzzer(mount, seed * 1_000_000 + turn * users + index).run(min(left, 3.0))

        wait_children(start_children(users, attack))
        turn += 1
        for path in (mount / "gpu0/attacked/all").iterdir():
            path.unlink()
