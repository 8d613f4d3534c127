"""What is printed on a terminal, and when its size changes."""

import fcntl
import os
import select
import signal
import struct
import subprocess
import termios

import pytest
from support.mounting import GPUFS, GpufsMount, Mounter
from support.processes import PATIENCE, children_of, wait_until


def _read_until(master: int, wanted: bytes) -> bytes:
    said = b""
    while wanted not in said:
        assert select.select([master], [], [], PATIENCE)[0], said
        said += os.read(master, 1 << 16)
    return said


@pytest.mark.parametrize(("sent", "code"), [("q", 0), ("SIGTERM", 128 + signal.SIGTERM)])
def test_top_draws_at_once_and_restores_the_terminal(shared_mount: GpufsMount, sent: str, code: int) -> None:
    """Also after the terminal's size has changed."""
    master, terminal = os.openpty()
    words = [*GPUFS, "top", str(shared_mount.path), "--interval", "3600"]
    before = termios.tcgetattr(terminal)
    process = None
    try:
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 24, 20, 0, 0))
        # Without COLUMNS and LINES, which xdist's workers have: curses would believe them instead of the terminal.
        environment = {**os.environ, "TERM": "xterm"}
        for name in ("COLUMNS", "LINES"):
            environment.pop(name, None)
        process = subprocess.Popen(words, stdin=terminal, stdout=terminal, stderr=terminal, env=environment)
        _read_until(master, b"DEVICE")
        assert termios.tcgetattr(terminal) != before
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 24, 200, 0, 0))
        process.send_signal(signal.SIGWINCH)
        assert b"quits" in _read_until(master, b"HEALTH")
        if sent == "q":
            os.write(master, b"q")
        else:
            process.send_signal(signal.SIGTERM)
        _read_until(master, b"\x1b[?1049l")  # back from the alternate screen
        assert process.wait(PATIENCE) == code
        assert termios.tcgetattr(terminal) == before
    finally:
        if process is not None and process.poll() is None:
            process.kill()
            process.wait(PATIENCE)
        os.close(master)
        os.close(terminal)


def test_top_keeps_no_ended_process_of_a_mount_that_does_not_answer(mount: Mounter) -> None:
    stopped = mount()
    master, terminal = os.openpty()
    words = [*GPUFS, "top", str(stopped.path), "--interval", "0.1", "--status-timeout", "0.1"]
    stopped.signal(signal.SIGSTOP)
    process = subprocess.Popen(
        words, stdin=terminal, stdout=terminal, stderr=terminal, env={**os.environ, "TERM": "xterm"}
    )
    started: set[int] = set()
    try:

        def asked() -> bool:
            while select.select([master], [], [], 0)[0]:
                os.read(master, 1 << 16)
            started.update(children_of(process.pid))
            return len(started) > 8

        wait_until(asked, 20, "pictures")
        assert len(children_of(process.pid)) <= 2  # the one that asks, and the last one
    finally:
        stopped.signal(signal.SIGCONT)
        process.kill()
        process.wait(PATIENCE)
        os.close(master)
        os.close(terminal)
