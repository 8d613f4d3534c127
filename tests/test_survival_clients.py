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
from errno import EBUSY
from pathlib import Path
from typing import Any

import pytest
from support.cli import gpufs
from support.data import MIB
from support.mounting import GPUFS
from support.processes import PATIENCE, errno_of, wait_until

from gpufs import status

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
    path = tmp_path / "mount"
    path.mkdir()
    gpufs("mount", path, "--driver", "host", "--memory", "512M", "--devices", "1", "--log-file", tmp_path / "log")
    try:
        yield path
    finally:
        gpufs("umount", "--force", path)


def kill(mount: Path) -> None:
    """Kills the daemon, and waits until another one answers."""
    former = status(mount).pid
    os.kill(int(former or 0), signal.SIGKILL)
    wait_until(lambda: status(mount).pid != former, PATIENCE, "another daemon")


def leases(mount: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((mount / ".gpufs" / "leases").read_bytes())["leases"]
    return found


def test_lease_survives(mount: Path) -> None:
    """Both ends see what is written, the file cannot be cut off, and the end of the lease is noticed."""
    file = mount / "gpu0" / "file"
    file.write_bytes(bytes(4 * MIB))
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


def test_program_that_dies_after_the_daemon(mount: Path) -> None:
    """Its leases end, whether a daemon runs then or not."""
    file = mount / "gpu0" / "file"
    file.write_bytes(bytes(4 * MIB))
    with attached(file), attached(file) as second:
        assert len(leases(mount)) == 2
        former = int(status(mount).pid or 0)
        os.kill(former, signal.SIGKILL)
        second.process.kill()
        wait_until(lambda: len(leases(mount)) == 1, PATIENCE, "the end of one lease")
    wait_until(lambda: not leases(mount), PATIENCE, "the end of the other")
    os.truncate(file, 0)


def test_requests_while_no_daemon_runs(mount: Path) -> None:
    """They are answered by the next daemon, once."""
    file = mount / "gpu0" / "file"
    file.write_bytes(bytes(4 * MIB))
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


def test_requests_at_random_moments(mount: Path) -> None:
    """A daemon that dies in the middle of requests loses none, and no lease is left over."""
    file = mount / "gpu0" / "file"
    file.write_bytes(bytes(4 * MIB))
    with attached(file) as program:
        for _ in range(2):
            program.send("for _ in range(300): gpufs.attach(sys.argv[1], 'r+').close()")
            time.sleep(0.1)
            kill(mount)
            assert program.line() == "done"
        assert len(leases(mount)) == 1
