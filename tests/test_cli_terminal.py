"""What is printed on a terminal: narrow ones, and those that want no colours."""

import fcntl
import os
import select
import signal
import struct
import subprocess
import termios
from pathlib import Path

import pytest
from support.mounting import GPUFS, GpufsMount
from support.processes import PATIENCE


def on_terminal(columns: int, *words: str | Path, **environment: str) -> str:
    """What gpufs prints on a terminal of so many columns."""
    master, terminal = os.openpty()
    try:
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
        process = subprocess.Popen(
            [*GPUFS, *words], stdin=terminal, stdout=terminal, stderr=terminal, env={**os.environ, **environment}
        )
        os.close(terminal)
        terminal = -1
        said = b""
        while True:
            try:
                part = os.read(master, 1 << 16)
            except OSError:  # EIO: the other end is closed
                break
            if not part:
                break
            said += part
        assert process.wait(PATIENCE) == 0, said
        return said.decode(errors="replace").replace("\r\n", "\n")
    finally:
        os.close(master)
        if terminal >= 0:
            os.close(terminal)


def _read_until(master: int, wanted: bytes) -> None:
    said = b""
    while wanted not in said:
        assert select.select([master], [], [], PATIENCE)[0], said
        said += os.read(master, 1 << 16)


def test_tables_stay_readable_on_narrow_terminals(shared_mount: GpufsMount) -> None:
    for words in (("status",), ("df", shared_mount.path)):
        lines = on_terminal(20, *words).splitlines()
        assert any(str(shared_mount.path) in line for line in lines)  # whole, for the terminal to wrap
        assert lines[0].split()[0] in ("MOUNTPOINT", "DEVICE")


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
        _read_until(master, str(shared_mount.device)[:19].encode())
        assert termios.tcgetattr(terminal) != before
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 24, 200, 0, 0))
        process.send_signal(signal.SIGWINCH)
        _read_until(master, b"HEALTH")
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
