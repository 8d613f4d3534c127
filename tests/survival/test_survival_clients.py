"""What clients have of a mount survives its daemon: leases go on, and no client waits for ever."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EBUSY, EPERM, ESTALE
from pathlib import Path
from typing import Any

import pytest
from support.attaching import Attacker
from support.cli import gpufs
from support.copying import socket_path
from support.data import MIB
from support.mounting import GPUFS
from support.processes import PATIENCE, errno_of, wait_until
from support.surviving import Survivor, mounted

from gpufs import attach, protocol, status

# Attaches the file for writing; each line of its input is Python that it runs, and it prints the result.
_PROGRAM = """
import sys, gpufs, numpy
array = gpufs.attach(sys.argv[1], "r+")
view = numpy.asarray(array)
print("ready", flush=True)
for line in sys.stdin:
    try:
        exec(line)
        print("done", flush=True)
    except OSError as failure:
        print(failure, flush=True)
"""


class Program:
    """A program that has a file attached."""

    def __init__(self, path: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, os.fspath(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.line() == "ready"

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def send(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def run(self, text: str) -> None:
        self.send(text)
        assert self.line() == "done"


@contextmanager
def attached(path: Path) -> Iterator[Program]:
    program = Program(path)
    try:
        yield program
    finally:
        program.process.kill()
        program.process.communicate()


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "mount") as made:
        yield made.path


@pytest.fixture
def file(mount: Path) -> Path:
    path = mount / "gpu0" / "file"
    path.write_bytes(bytes(4 * MIB))
    return path


def kill(mount: Path, number: signal.Signals = signal.SIGKILL) -> None:
    """Kills the daemon, and waits until another one answers."""
    Survivor(mount).kill(number)


def leases(mount: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((mount / ".gpufs" / "leases").read_bytes())["leases"]
    return found


def test_lease_survives(mount: Path, file: Path) -> None:
    """Both ends see what is written, the file cannot be cut off, and the end of the lease is noticed."""
    with attached(file) as program:
        (before,) = leases(mount)
        for round_number in range(1, 3):
            kill(mount)
            assert leases(mount) == [before]
            program.run(f"view[0] = {round_number}")
            assert file.read_bytes()[0] == round_number
            with open(file, "r+b", buffering=0) as opened:
                opened.seek(1)
                opened.write(b"x")
                assert errno_of(opened.truncate, 0) == EBUSY
            program.run('assert view[1] == ord("x")')
        with open(file, "ab") as appending:
            appending.write(bytes(MIB))
        program.run("second = gpufs.attach(sys.argv[1], 'r+')")
        assert len(leases(mount)) == 2
        program.run("second.close()")
        program.run("del view; array.close()")
        wait_until(lambda: not leases(mount), PATIENCE, "the end of the lease")
        os.truncate(file, 0)


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_lease_on_a_file_that_has_grown(mount: Path, file: Path, mode: str) -> None:
    """It covers what it covered before, and what has grown stays a hole, also where the device could not fill it."""
    with attached(file) as program:
        program.run(f"del view; array.close(); array = gpufs.attach(sys.argv[1], {mode!r})")
        wait_until(lambda: [lease["mode"] for lease in leases(mount)] == [mode], PATIENCE, "the lease")
        os.truncate(file, 6 * MIB)
        if mode == "r+":
            program.run("array = array.refresh()")
        held = 6 * MIB if mode == "r+" else 4 * MIB
        os.truncate(file, 1 << 40)
        before = leases(mount)
        assert [lease["bytes"] for lease in before] == [held]
        blocks = file.stat().st_blocks
        kill(mount)
        assert leases(mount) == before
        assert file.stat().st_blocks == blocks
        with open(file, "r+b", buffering=0) as opened:
            assert errno_of(opened.truncate, held - 1) == EBUSY
        os.truncate(file, held)
        program.run("array.close()")
        wait_until(lambda: not leases(mount), PATIENCE, "the end of the lease")
        os.truncate(file, 0)


def test_program_that_dies_after_the_daemon(mount: Path, file: Path) -> None:
    """Its leases end, whether a daemon runs then or not."""
    with attached(file), attached(file) as second:
        assert len(leases(mount)) == 2
        former = int(status(mount).pid or 0)
        os.kill(former, signal.SIGKILL)
        second.process.kill()
        wait_until(lambda: len(leases(mount)) == 1, PATIENCE, "the end of one lease")
    wait_until(lambda: not leases(mount), PATIENCE, "the end of the other")
    os.truncate(file, 0)


def test_requests_while_no_daemon_runs(mount: Path, file: Path) -> None:
    """They are answered by the next daemon, once."""
    with attached(file) as program:
        os.kill(int(status(mount).pid or 0), signal.SIGKILL)
        program.run("second = gpufs.attach(sys.argv[1], 'r+')")
        assert len(leases(mount)) == 2
        os.kill(int(status(mount).pid or 0), signal.SIGKILL)
        program.run("second.close()")
        wait_until(lambda: len(leases(mount)) == 1, PATIENCE, "the end of the lease")


def test_copy_in_progress(mount: Path, tmp_path: Path) -> None:
    """It ends, with a failure or without, and can be made again."""
    source, target = tmp_path / "source", mount / "gpu0" / "target"
    source.write_bytes(os.urandom(MIB) * 200)
    copying = subprocess.Popen([*GPUFS, "cp", source, target], stderr=subprocess.PIPE, text=True)
    time.sleep(0.3)
    kill(mount)
    _, said = copying.communicate(timeout=PATIENCE)
    if copying.returncode:  # one line that says why
        assert said.startswith("gpufs cp: "), said
        assert said.endswith("the daemon of the mount has ended\n"), said
        assert said.count("\n") == 1, said
    gpufs("cp", source, target)
    assert target.read_bytes() == source.read_bytes()


def test_requests_at_random_moments(mount: Path, file: Path) -> None:
    """A daemon that dies in the middle of requests loses none, and no lease is left over."""
    with attached(file) as program:
        for _ in range(2):
            program.send("for _ in range(300): gpufs.attach(sys.argv[1], 'r+').close()")
            time.sleep(0.1)
            kill(mount)
            assert program.line() == "done"
        assert len(leases(mount)) == 1


def test_each_request_is_answered_once(mount: Path, file: Path) -> None:
    """The next daemon gets a request twice that was in the socket's queue: the client cannot know that it was."""
    with Attacker(socket_path(mount)) as client, open(file, "r+b") as opened:
        assert client.greet()
        client.ask(protocol.Attach(2, "r+"), [opened.fileno()])
        former = int(status(mount).pid or 0)
        os.kill(former, signal.SIGKILL)
        wait_until(lambda: not os.path.exists(f"/proc/{former}/fdinfo/0"), PATIENCE, "the daemon's end")
        client.send(protocol.encode(protocol.Check(5, [2], "wake")))
        assert client.receive()[0]["type"] == "replaced"
        for number in (4, 5, 6):
            client.send(protocol.encode(protocol.Check(number, [2], "wake")))
        assert [client.receive()[0] for _ in range(3)] == [
            {"type": "done", "id": number, "error": 0, "message": ""} for number in (5, 4, 6)
        ]


def test_death_while_a_client_asks_for_the_socket(mount: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The descriptor that it reads the socket's path from ends with the daemon; the client asks again."""
    read = os.read

    def read_later(fd: int, size: int) -> bytes:
        monkeypatch.setattr(os, "read", read)
        assert os.readlink(f"/proc/self/fd/{fd}") == os.fspath(mount / ".gpufs" / "socket")
        kill(mount)
        return read(fd, size)

    monkeypatch.setattr(os, "read", read_later)
    attach(file, "r+").close()


def test_status_at_random_moments(mount: Path) -> None:
    """The commands that ask the mount itself report no error when its daemon dies between open and read."""
    script = "from gpufs.cli import _mounts; from gpufs.client import _daemons; import sys\n"
    script += "entry = _mounts.mounted_at(sys.argv[1])\n"
    script += "for _ in range(500): _daemons.control_file(entry, 'status')"
    asking = [subprocess.Popen([sys.executable, "-c", script, mount]) for _ in range(3)]
    for _ in range(2):
        time.sleep(0.2)
        kill(mount)
    assert [each.wait(PATIENCE) for each in asking] == [0, 0, 0]


# Registers memory whose bytes are all 7 as the file that its argument names, beside the attached one.
_REGISTER = """
from multiprocessing.shared_memory import SharedMemory; import os
shared = SharedMemory(create=True, size=3 << 20); own = numpy.frombuffer(shared.buf, numpy.uint8)
own[:] = 7; registration = gpufs.register(own, os.path.dirname(sys.argv[1]) + "/registered")
"""
_RELEASE = "shared.unlink()"


def test_registration_survives(mount: Path, file: Path) -> None:
    """Its file, links and open descriptors still show the program's memory; its end is noticed."""
    file, registered = mount / "gpu0" / "file", mount / "gpu0" / "registered"
    file.write_bytes(bytes(4 * MIB))
    with attached(file) as program:
        program.run("; ".join(_REGISTER.strip().splitlines()))
        os.link(registered, mount / "gpu0" / "link")
        before = leases(mount)
        about = registered.stat()
        with open(registered, "r+b", buffering=0) as opened:
            for value in (1, 2):
                kill(mount)
                assert leases(mount) == before
                assert registered.stat() == about
                assert opened.read() == bytes([value - 1 or 7]) + bytes([7]) * (3 * MIB - 1)
                opened.seek(0)
                opened.write(bytes([value]))
                program.run(f"assert own[0] == {value}")
                opened.seek(0)
                about = registered.stat()
            assert errno_of(os.truncate, registered, 0) == EPERM
            os.kill(int(status(mount).pid or 0), signal.SIGKILL)
            program.run("registration.close()")  # answered by the next daemon
            assert errno_of(opened.read, 1) == ESTALE
        assert os.listdir(mount / "gpu0") == ["file"]
        program.run(_RELEASE)


def test_registration_whose_memory_is_lost(mount: Path, file: Path) -> None:
    """Its file is removed, as at its end, and not left behind as an empty one. Others stay."""
    with attached(file) as program:
        program.run("; ".join([*_REGISTER.strip().splitlines(), _RELEASE]))
        program.run("memory = os.memfd_create('memory'); os.ftruncate(memory, 8192); import mmap")
        program.run("lost = numpy.frombuffer(mmap.mmap(memory, 8192), numpy.uint8)")
        program.run("second = gpufs.register(lost, os.path.dirname(sys.argv[1]) + '/lost')")
        program.run("os.ftruncate(memory, 0)")
        for _ in range(2):
            kill(mount)
            assert sorted(os.listdir(mount / "gpu0")) == ["file", "registered"]
            assert [lease["mode"] for lease in leases(mount)].count("registered") == 1
        program.run("second.close()")
        program.run("gpufs.register(own, os.path.dirname(sys.argv[1]) + '/lost')")
        assert (mount / "gpu0" / "lost").read_bytes() == (mount / "gpu0" / "registered").read_bytes()


def test_program_that_registers_and_dies_with_the_daemon(mount: Path, file: Path) -> None:
    with attached(file) as program:
        program.run("; ".join([*_REGISTER.strip().splitlines(), _RELEASE]))
        os.kill(int(status(mount).pid or 0), signal.SIGKILL)
    wait_until(lambda: os.listdir(mount / "gpu0") == ["file"], PATIENCE, "the end of the registration")


def test_registrations_at_random_moments(mount: Path, file: Path) -> None:
    """No file is left over, and none is empty."""
    with attached(file) as program:
        program.run("; ".join(_REGISTER.strip().splitlines()))
        program.run(
            'exec(\'def again():\\n with gpufs.register(own, os.path.dirname(sys.argv[1]) + "/more") as made:'
            '\\n  assert open(made.path, "rb").read(1) == bytes([7])\')'
        )
        for _ in range(2):
            program.send("[again() for _ in range(100)]")
            time.sleep(0.1)
            kill(mount)
            assert program.line() == "done"
        assert sorted(os.listdir(mount / "gpu0")) == ["file", "registered"]
        assert (mount / "gpu0" / "registered").read_bytes() == bytes([7]) * (3 * MIB)
        program.run(f"registration.close(); {_RELEASE}")


def test_failure_of_the_daemons_own_code(tmp_path: Path) -> None:
    """An exception anywhere in its Python code is like any other death: leases and registrations stay."""
    (tmp_path / "sitecustomize.py").write_text(
        "import signal\ndef fail(*_): raise RuntimeError('a failure')\nsignal.signal(signal.SIGVTALRM, fail)\n"
    )
    with mounted(tmp_path / "mount", environment={"PYTHONPATH": os.fspath(tmp_path)}) as made:
        path = made.path
        file = path / "gpu0" / "file"
        file.write_bytes(bytes(4 * MIB))
        with attached(file) as program:
            program.run("; ".join([*_REGISTER.strip().splitlines(), _RELEASE]))
            before = leases(path)
            for _ in range(2):
                kill(path, signal.SIGVTALRM)
                assert leases(path) == before
                assert errno_of(os.truncate, file, 0) == EBUSY
                assert (path / "gpu0" / "registered").read_bytes() == bytes([7]) * (3 * MIB)
            program.run("registration.close(); del view; array.close()")
        assert "a failure" in (tmp_path / "log").read_text()


def test_failure_of_what_accepts_clients(tmp_path: Path) -> None:
    failing = tmp_path / "failing"
    (tmp_path / "sitecustomize.py").write_text(f"""
import os, socket
accept = socket.socket.accept
def fail_once(self):
    if os.path.exists({str(failing)!r}):
        os.unlink({str(failing)!r})
        raise OSError(5, "a failure")
    return accept(self)
socket.socket.accept = fail_once
""")
    with mounted(tmp_path / "mount", environment={"PYTHONPATH": os.fspath(tmp_path)}) as made:
        file = made.device / "file"
        file.write_bytes(bytes(4 * MIB))
        with attached(file):
            former, before = made.pid, leases(made.path)
            failing.touch()
            with attached(file):
                assert made.pid != former
            wait_until(lambda: leases(made.path) == before, PATIENCE, "the end of the second lease")
            assert errno_of(os.truncate, file, 0) == EBUSY


@pytest.mark.slow
def test_a_stopped_keeper_stalls_no_other_client(mount: Path) -> None:
    """It reads nothing, and the first lease of each connection is sent to it until its socket is full."""
    file = mount / "gpu0" / "file"
    file.write_bytes(bytes(4096))
    (keeper,) = Survivor(mount).keepers()
    os.kill(keeper, signal.SIGSTOP)
    children, longest = [], 0.0
    for _ in range(330):
        child = os.fork()
        if child == 0:
            try:
                attach(file)
            finally:
                os._exit(0)
        children.append(child)
        began = time.monotonic()
        (mount / ".gpufs" / "status").read_bytes()
        longest = max(longest, time.monotonic() - began)
    for child in children:
        os.waitpid(child, 0)
    assert longest < 3
