"""Rows of the GPU benchmark for machines with two GPUs or more: copies between them, and loads onto several."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from run import Bench

COPY = "peers: torch, one GPU to another"


def measure_peers(
    bench: Bench, path: Path, mount: Path, size: int, command: Callable[..., object], gpufs: list[str]
) -> None:
    """Copies of ``size`` bytes, the size of the host's file ``path``. ``command`` runs one, ``gpufs`` starts ours."""
    devices = sorted(mount.glob("gpu[0-9]*"), key=lambda device: int(device.name[3:]))
    if len(devices) < 2:
        return
    if not bench.wants("peers: torch", "peers: cp", "peers: gpufs cp"):
        return
    bench.section("Between GPUs")
    measure_torch(bench, size)
    source, copy, other = devices[0] / "source", devices[1] / "copy", devices[1] / "other"
    command(*gpufs, "cp", path, source)
    remove = partial(copy.unlink, missing_ok=True)
    yardstick = "torch, one GPU to another"
    work = partial(command, "cp", source, copy)
    # Giving a peer access to the first large piece of memory of a GPU takes 9 ms.
    bench.measure("peers", "cp, to an empty GPU", size, work, prepare=remove, yardstick=yardstick)
    command("fallocate", "-l", "1GiB", other)
    bench.measure("peers", "cp, new file", size, work, prepare=remove, yardstick=yardstick)
    bench.measure("peers", "cp, existing file", size, work, yardstick=yardstick)

    def one_call() -> None:
        with open(source, "rb") as origin, open(copy, "r+b" if copy.exists() else "xb") as target:
            done = os.copy_file_range(origin.fileno(), target.fileno(), size, 0, 0)
        if done != size:
            raise OSError(f"copy_file_range copied {done} of {size} bytes")

    bench.measure("peers", "one copy_file_range, new file", size, one_call, prepare=remove, yardstick=yardstick)
    bench.measure("peers", "one copy_file_range", size, one_call, yardstick=yardstick)
    work = partial(command, *gpufs, "cp", source, copy)
    bench.measure("peers", "gpufs cp, new file", size, work, prepare=remove, yardstick=yardstick)
    remove()
    source.unlink()
    other.unlink()
    one = "gpufs cp to 1 GPU"
    for count in (1, 2, 4, 8):
        targets = devices[:count]
        if len(targets) < count:
            break
        name = one if count == 1 else f"gpufs cp to {count} GPUs, read once"
        words = [f"--target-directory={target}" for target in targets]

        def clear(targets: list[Path] = targets) -> None:
            for target in targets:
                (target / path.name).unlink(missing_ok=True)

        work = partial(command, *gpufs, "cp", path, *words)
        bench.measure("peers", name, size, work, prepare=clear, yardstick="" if count == 1 else one)
        clear()


def measure_torch(bench: Bench, size: int) -> None:
    """torch's copy from one GPU to another: the yardstick."""
    try:
        import torch
    except ImportError as error:
        bench.skip(f"{COPY}: {error}")
        return
    if torch.cuda.device_count() < 2:
        bench.skip(f"{COPY}: torch sees {torch.cuda.device_count()} GPUs")
        return
    tensors = [torch.zeros(size, dtype=torch.uint8, device=f"cuda:{number}") for number in (0, 1)]

    def copy() -> None:
        tensors[1].copy_(tensors[0])
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)

    copy()
    bench.measure("peers", COPY.removeprefix("peers: "), size, copy)
    tensors.clear()
    torch.cuda.empty_cache()
