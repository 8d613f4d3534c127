"""Two programs with the same model: the device holds one copy of the weights.

Usage: python examples/two_programs.py DIRECTORY     a directory of a mount, for example /mnt/gpufs/gpu0
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from small_model import SmallModel

import gpufs.torch

SERVE = Path(__file__).with_name("serve.py")


def used_bytes(directory: Path) -> int:
    """Returns how much memory of the device is in use, as `df` shows it."""
    numbers = os.statvfs(directory)
    return (numbers.f_blocks - numbers.f_bfree) * numbers.f_frsize


def main(directory: Path) -> None:
    path = directory / "small-model.safetensors"
    torch.manual_seed(1)
    gpufs.torch.publish(SmallModel(), path)
    before = used_bytes(directory)
    print(f"the file has {path.stat().st_size} bytes; {before} bytes of the device are in use")
    programs = [
        subprocess.Popen([sys.executable, SERVE, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for program in programs:
        assert program.stdout is not None
        print(f"process {program.pid}: {program.stdout.readline().strip()}")
    print(f"with both programs: {used_bytes(directory)} bytes of the device are in use")
    assert used_bytes(directory) == before, "the weights are there more than once"
    answers = {program.communicate("Who else is here?\n")[0] for program in programs}
    assert len(answers) == 1, f"the answers differ: {answers}"
    print("both programs gave the same answer")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
