"""Loads tensors from a file again and again, as a program of a user does, and prints how fast: "BYTES SECONDS".

    python bench/loads.py make DIRECTORY BYTES                  makes tensors.safetensors and tensors.pt there
    python bench/loads.py KIND DIRECTORY SECONDS DEVICE         KIND: safetensors, torch.load, numpy.memmap

safetensors: `safetensors.torch.load_file` of all tensors to DEVICE (cpu or cuda). torch.load: with mmap=True. Both are
followed by a sum of each tensor there, because on a CPU both only map the file. numpy.memmap: the largest byte of the
file. Imports, the first pass, and freeing what a pass has left in the kernel's cache are not counted.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

TENSORS = 8


def make(directory: Path, size: int) -> None:
    """Two files with the same tensors, of `size` bytes together."""
    import torch
    from safetensors.torch import save_file

    each = size // TENSORS // 4096
    tensors = {f"layer{index}": torch.rand(each, 1024) for index in range(TENSORS)}
    # Written elsewhere first: save_file replaces its target by a rename, which is not what is measured here.
    for name, save in (("tensors.safetensors", save_file), ("tensors.pt", torch.save)):
        made = Path("/dev/shm") / f"gpufs-bench-{os.getpid()}"
        try:
            save(tensors, made)
            with open(made, "rb") as source, open(directory / name, "wb") as target:
                while block := source.read(1 << 20):
                    target.write(block)
        finally:
            made.unlink(missing_ok=True)


def loader(kind: str, directory: Path, device: str) -> Callable[[], int]:
    """The function that loads all once and returns how many bytes it was."""
    if kind == "numpy.memmap":
        import numpy as np

        def scan() -> int:
            array = np.memmap(directory / "tensors.safetensors", dtype=np.uint8, mode="r")
            array.max()
            return int(array.nbytes)

        return scan
    import torch
    from safetensors.torch import load_file

    def load() -> int:
        if kind == "safetensors":
            tensors = load_file(directory / "tensors.safetensors", device=device)
        else:
            tensors = torch.load(directory / "tensors.pt", mmap=True)
        for tensor in tensors.values():
            tensor.to(device).sum().item()
        return sum(tensor.nbytes for tensor in tensors.values())

    return load


def forget(directory: Path) -> None:
    """Frees what the kernel has cached of the files: the next open on a gpufs mount does so, and would be timed."""
    for path in directory.glob("tensors.*"):
        path.open("rb").close()


def main(words: list[str]) -> None:
    kind, directory = words[0], Path(words[1])
    if kind == "make":
        make(directory, int(words[2]))
        return
    seconds, work = float(words[2]), loader(kind, directory, words[3])
    work()
    moved, taken = 0, 0.0
    while taken < seconds:
        forget(directory)
        began = time.perf_counter()
        moved += work()
        taken += time.perf_counter() - began
    print(moved, taken)


if __name__ == "__main__":
    main(sys.argv[1:])
