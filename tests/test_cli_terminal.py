"""What is printed on a terminal: narrow ones, and those that want no colours."""

import fcntl
import os
import re
import struct
import subprocess
import termios
from pathlib import Path

from support.mounting import GPUFS, GpufsMount


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
        assert process.wait(60) == 0, said
        return said.decode(errors="replace").replace("\r\n", "\n")
    finally:
        os.close(master)
        if terminal >= 0:
            os.close(terminal)


def test_tables_stay_readable_on_narrow_terminals(shared_mount: GpufsMount) -> None:
    for words in (("status",), ("df", shared_mount.path)):
        lines = on_terminal(20, *words).splitlines()
        assert any(str(shared_mount.path) in line for line in lines)  # whole, for the terminal to wrap
        assert lines[0].split()[0] in ("MOUNTPOINT", "DEVICE")


def test_colours_only_where_they_are_wanted() -> None:
    colour = re.compile(r"\x1b\[[0-9;]*3[0-7]m")
    assert colour.search(on_terminal(200, "doctor", NO_COLOR="", TERM="xterm"))
    assert not colour.search(on_terminal(200, "doctor", NO_COLOR="1", TERM="xterm"))


def test_the_bar_ends_as_the_copy_did(shared_mount: GpufsMount, tmp_path: Path) -> None:
    source = tmp_path / "file"
    source.write_bytes(bytes(8 << 20))
    copy = shared_mount.device / "copy"
    said = on_terminal(120, "cp", source, copy, TERM="xterm")
    copy.unlink()
    assert "8.0/8.0 MiB" in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", said).splitlines()[-1]
