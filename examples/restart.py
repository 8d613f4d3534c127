"""Kills a program ten times and starts it again: the weights stay where they are. Of the file only the header is
read, which says what is where.

Usage: python examples/restart.py DIRECTORY [STARTS]     a directory of a mount, for example /mnt/gpufs/gpu0
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SERVE = Path(__file__).with_name("serve.py")


def bytes_read(path: Path) -> int:
    """Returns how many bytes of the file were read through the mount."""
    return int(os.getxattr(path, "user.gpufs.bytes_read"))


def main(directory: Path, starts: int) -> None:
    path = directory / "small-model.safetensors"
    answers = set()
    for start in range(1, starts + 1):
        program = subprocess.Popen(
            [sys.executable, SERVE, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert program.stdin is not None
        assert program.stdout is not None
        print(f"start {start}: {program.stdout.readline().strip()}")
        print("Where are the weights?", file=program.stdin, flush=True)
        answers.add(program.stdout.readline())
        program.kill()
        program.communicate()
    assert len(answers) == 1, f"the answers differ: {answers}"
    print(f"{starts} equal answers; {bytes_read(path)} bytes of {path.stat().st_size} were read through the mount")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 10)
