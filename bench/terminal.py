"""Draws `gpufs top` on a busy mount of host memory as an SVG, as a terminal shows it.

python -m bench.terminal PICTURE.svg [MOUNTPOINT]     It takes 2.5 GiB of memory for some seconds.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from bench.looks import LIGHT, with_look
from bench.report import REPOSITORY

_GPUFS = str(REPOSITORY / ".venv" / "bin" / "gpufs")
_ATTACH = "import gpufs, sys, time; array = gpufs.attach(sys.argv[1]); print('attached', flush=True); time.sleep(600)"
_READ = "import sys\nwhile True:\n    with open(sys.argv[1], 'rb') as file:\n        while file.read(1 << 20): pass"


def _fill(path: Path, mebibytes: int) -> None:
    block = os.urandom(1 << 20)
    with open(path, "wb") as file:
        for _ in range(mebibytes):
            file.write(block)


def busy_picture(mountpoint: Path, scratch: Path) -> str:
    """Return what `gpufs top` prints while a copy runs, a program reads and another one has a file attached."""
    source = scratch / "model.safetensors"
    _fill(source, 1200)
    with ExitStack() as ends:
        mount = [_GPUFS, "mount", str(mountpoint), "--driver", "host", "--devices", "2", "--memory", "2G"]
        subprocess.run(mount, check=True)
        ends.callback(subprocess.run, [_GPUFS, "umount", "--force", str(mountpoint)], check=True)

        def start(*words: object) -> subprocess.Popen[str]:
            process = subprocess.Popen(list(map(str, words)), stdout=subprocess.PIPE, text=True)
            ends.callback(process.wait)
            ends.callback(process.kill)
            return process

        _fill(mountpoint / "gpu1" / "embeddings", 512)
        _fill(mountpoint / "gpu1" / "activations", 256)
        attached = start(sys.executable, "-c", _ATTACH, mountpoint / "gpu1" / "embeddings")
        assert attached.stdout is not None
        attached.stdout.readline()
        start(sys.executable, "-c", _READ, mountpoint / "gpu1" / "activations")
        start(_GPUFS, "cp", source, mountpoint / "gpu0" / source.name)
        time.sleep(0.3)
        top = [_GPUFS, "top", "--once", "--interval", "0.5", str(mountpoint)]
        return subprocess.run(top, check=True, capture_output=True, text=True).stdout


def draw(text: str, command: str, picture: Path) -> None:
    """Write ``picture``: a terminal as wide as the text."""
    lines = [f"$ {command}", *text.splitlines()]
    with open(os.devnull, "w") as nothing:
        console = Console(record=True, width=max(map(len, lines)) + 1, file=nothing)
        for line in lines:
            console.print(line, markup=False, highlight=False, no_wrap=True)
    svg = console.export_svg(title=command, unique_id="gpufs-top")
    svg = re.sub(r"\s*@font-face \{.*?\n    \}", "", svg, flags=re.DOTALL)  # pages load no fonts
    picture.write_text(with_look(svg, "light", LIGHT))


if __name__ == "__main__":
    place = Path(sys.argv[2]) if len(sys.argv) > 2 else Path("/mnt/gpufs")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        draw(busy_picture(place, Path(folder)), "gpufs top", Path(sys.argv[1]))
