"""Programs that attach files: killed ones, and hostile ones that talk to the daemon directly."""

from __future__ import annotations

import contextlib
import gc
import json
import mmap
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec

from gpufs import protocol
from support.cli import user_gpufs
from support.copying import socket_path
from support.data import MIB
from support.mounting import REPOSITORY, GpufsMount
from support.processes import NOBODY, PATIENCE, run, start_children, wait_children, wait_until

FIRST_USER = 61000  # users of whom nobody else on this machine makes use
_CAN_HAVE = 253  # descriptors of one message


def leases(mount: GpufsMount) -> list[dict[str, Any]]:
    """The mount's leases, as it reports them."""
    found: list[dict[str, Any]] = json.loads((mount.path / ".gpufs/leases").read_text())["leases"]
    return found


def wait_for_leases(mount: GpufsMount, count: int) -> None:
    gc.collect()  # tracebacks of failures that tests expected may keep arrays of this process
    wait_until(lambda: len(leases(mount)) == count, 10, f"{count} leases")


@contextlib.contextmanager
def program(script: str, *arguments: object, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A Python program with the given script. It has printed its first line, and ends with the block."""
    words = [sys.executable, "-c", script, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    everything: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
    process = subprocess.Popen(words, **everything | options)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, "the program ended before it was ready"
        yield process
    finally:
        process.kill()
        with process:
            pass


# Attaches argv[1] in mode argv[2], and waits.
HOLD = """
import gpufs, sys
array = gpufs.attach(sys.argv[1], sys.argv[2])
print(array.nbytes, flush=True)
sys.stdin.read()
"""

# For each number on standard input: starts a process that attaches files of argv[1] and registers memory there until it
# is killed, and prints its PID. The number makes its choices. Started once: most of a process's start are imports.
RESTLESS = """
import itertools, mmap, os, random, signal, sys
import numpy
import gpufs, gpufs.engine
gpufs.attach
folder = sys.argv[1]

def attach(chooser, held):
    path = os.path.join(folder, f"file{chooser.randrange(4)}")
    with open(path, "ab") as file:
        if file.tell() < 24 << 20:
            file.write(bytes(chooser.randrange(1, 3 << 20)))
    array = gpufs.attach(path, chooser.choice(("r", "r+")))
    if array.mode == "r+":
        numpy.asarray(array)[:: 4096] = chooser.randrange(256)
    held.append(chooser.choice((array, array[10:], numpy.asarray(array), array.refresh())))

def register(chooser, held):
    fd = os.memfd_create("registered")
    os.ftruncate(fd, chooser.randrange(1, 6 << 20))
    memory = mmap.mmap(fd, 0)
    os.close(fd)
    path = os.path.join(folder, f"live-{os.getpid()}-{next(numbers)}")
    registration = gpufs.register(numpy.frombuffer(memory, dtype=numpy.uint8), path)
    with open(path, "r+b", 0) as file:
        file.write(bytes(chooser.randrange(1, 6 << 20)))
        file.read()
    if chooser.random() < 0.5:
        held.append(registration)
    else:
        registration.close()

numbers = itertools.count()

def restless(chooser):
    held = []
    while True:
        chooser.choice((attach, register))(chooser, held)
        if len(held) > 5:
            held.pop(chooser.randrange(len(held)))

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print("ready", flush=True)
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        restless(random.Random(int(line)))
    print(child, flush=True)
"""


def kill_programs(directory: Path, cycles: int, seed: int) -> None:
    """Starts programs that use files of the directory, two at a time, and kills each with SIGKILL at some point.

    AssertionError if memory that they registered stays a file.
    """
    chooser = random.Random(seed)
    with program(RESTLESS, directory) as starter:
        assert starter.stdin is not None
        assert starter.stdout is not None
        running: list[int] = []

        def kill(process: int) -> None:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                raise AssertionError(f"program {process} failed before it was killed (seed {seed})") from None

        for cycle in range(cycles):
            starter.stdin.write(f"{seed * cycles + cycle}\n")
            starter.stdin.flush()
            running.append(int(starter.stdout.readline()))
            time.sleep(chooser.random() * 0.2)
            if len(running) > 1 or cycle == cycles - 1:
                kill(running.pop(chooser.randrange(len(running))))
        for process in running:
            kill(process)

    def sizes() -> list[int]:
        with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
            return [entry.stat().st_size for entry in entries if entry.name.startswith("live-")]
        return [1]  # one of them has gone in between

    # A program that is killed in register(), before the daemon has the memory, leaves an empty file.
    wait_until(lambda: not any(sizes()), 10, "the end of the names of registered memory")


def run_as_nobody(script: str, *arguments: object) -> str:
    """Runs a Python program as nobody. A child of this process could not attach: it has used the engine."""
    command, environment = user_gpufs({"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"})
    identity: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": [], "cwd": "/"}
    return run(command[0], "-c", script, *map(str, arguments), env=environment, **identity).stdout


class Attacker:
    """A client that sends what it likes to the daemon of a mount."""

    def __init__(self, path: str) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(PATIENCE)
        self.sock.connect(path)

    def greet(self) -> bool:
        """Whether the daemon speaks to this client."""
        self.send(protocol.encode(protocol.Hello([1], "attacker")))
        answer, _ = self.receive()
        return answer is not None and answer["type"] == "welcome"

    def send(self, data: bytes, descriptors: list[int] | None = None) -> None:
        socket.send_fds(self.sock, [data], descriptors or [])

    def receive(self) -> tuple[Any, list[int]]:
        """The next message as a map, None at the end, and its descriptors."""
        data, descriptors, _, _ = socket.recv_fds(self.sock, 1 << 16, _CAN_HAVE)
        return (msgspec.msgpack.decode(data) if data else None), descriptors

    def ask(self, message: protocol.ClientMessage, descriptors: list[int] | None = None) -> tuple[Any, list[int]]:
        """The answer to a message, and the descriptors that came with all of it."""
        self.send(protocol.encode(message), descriptors)
        answer, received = self.receive()
        left = answer["pieces"] if answer is not None and answer["type"] == "attached" else 0
        while left:
            _, more = self.receive()
            left -= len(more)
            received += more
        return answer, received

    def close(self) -> None:
        self.sock.close()

    def __enter__(self) -> Attacker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def grants_write(fd: int) -> bool:
    """Whether the holder of a descriptor of memory can write to it in any way."""
    for attempt in (
        lambda: os.pwrite(fd, b"x", 0),
        lambda: mmap.mmap(fd, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE).close(),
        lambda: os.ftruncate(fd, 0),
        lambda: os.close(os.open(f"/proc/self/fd/{fd}", os.O_RDWR)),
        lambda: os.fchmod(fd, 0o777),
    ):
        try:
            attempt()
        except (OSError, ValueError):
            continue
        return True
    return False


class Fuzzer:
    """One user's attack: messages of all kinds and forms, with all kinds of descriptors.

    ``mount`` has ``secret`` (not the user's to read), ``public`` (to read, larger than a granule) and ``own``. All
    memory of ``secret`` consists of SECRET. AssertionError if the user gets memory of it, or memory of ``public`` that
    it can write to. Descriptors that the daemon has sent are passed back to it.
    """

    SECRET = b"\xd7"

    def __init__(self, mount: Path, seed: int) -> None:
        self.mount = mount
        self.path = socket_path(mount)
        self.chooser = random.Random(seed)

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
        return {
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
        """A message, and how many descriptors belong to it."""
        chooser = self.chooser
        number = chooser.choice((1, 2, 3, chooser.randrange(1, 1 << 32)))
        kind = chooser.random()
        if kind < 0.4:
            return {"type": "attach", "id": number, "mode": chooser.choice(("r", "r+"))}, 1
        if kind < 0.6:
            shared = chooser.choices(get_args(protocol.ShareKind), (8, 1, 1))[0]
            offset, size = chooser.choice((0, 1, 4096, 1 << 62)), chooser.choice((1, 5000, 4 * MIB, 1 << 62))
            handle = chooser.randbytes(protocol.HANDLE_BYTES) if shared == "ipc" else b""
            register = protocol.Register(number, shared, offset, size, True, "", handle)
            return msgspec.to_builtins(register, builtin_types=(bytes,)), 1 if shared == "ipc" else 2
        if kind < 0.65:
            return {"type": "unregister", "id": number}, 0
        if kind < 0.75:
            start = chooser.choice((0, 2 * MIB, chooser.randrange(1 << 63)))
            return {"type": "refresh", "id": number, "start": start}, 0
        if kind < 0.85:
            return {"type": "detach", "id": number}, 0
        copy = protocol.Copy(number, chooser.choice(("load", "store")))
        return msgspec.to_builtins(copy), 2

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
    return directory


def fuzz(mount: Path, seconds: float, seed: int, *, users: int = 2) -> None:
    """Attacks by several users at once, each for a few seconds: a user with too many bad connections is locked out."""
    deadline = time.monotonic() + seconds
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
    directory = mount / "gpu0/attacked"
    assert (directory / "secret").read_bytes() == Fuzzer.SECRET * 4 * MIB
    assert (directory / "public").read_bytes() == b"p" * 4 * MIB
    assert (directory / "small").read_bytes() == b"p" * 5000
