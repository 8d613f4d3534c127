"""A program that answers questions with a model whose weights are in a file of a mount.

Usage: python examples/serve.py FILE

The first program publishes the model as FILE. All others attach it: they load nothing and share its memory. The program
prints how long attaching took, then for each line of its input one line with an answer.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from small_model import SmallModel, an_empty_model

import gpufs.torch


def main(path: Path) -> None:
    if not path.exists():
        torch.manual_seed(1)
        gpufs.torch.publish(SmallModel(), path)
    model = an_empty_model()
    begin = time.perf_counter()
    gpufs.torch.attach_module(model, path)
    print(f"ready: the weights were attached in {1000 * (time.perf_counter() - begin):.1f} ms", flush=True)
    for line in sys.stdin.buffer:
        print(model.continue_text(line.rstrip(b"\n"), 8), flush=True)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
