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
from typing import Any

import msgspec

from gpufs import protocol
from support.cli import user_gpufs
from support.mounting import REPOSITORY, GpufsMount
from support.processes import NOBODY, PATIENCE, run, wait_until

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
        while answer is not None and answer["type"] == "replaced":
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
