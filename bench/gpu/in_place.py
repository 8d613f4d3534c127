"""Rows of the GPU benchmark for memory used in place: attach, and tensors of a model that is already on the mount."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from libcuda import GIB

if TYPE_CHECKING:
    from run import Bench


def measure_attach(bench: Bench, directory: Path, sizes: tuple[int, ...] = (4 * GIB, 64 * GIB)) -> None:
    """``gpufs.attach`` of files whose memory exists; directory: a device's on the mount."""
    import gpufs

    bench.section("In place")
    for size in sizes:
        name = f"attach, {size // GIB} GiB"
        system = os.statvfs(directory)
        if not bench.wants(f"in place: {name}"):
            continue
        if system.f_bavail * system.f_frsize < size:
            bench.skip(f"in place: {name}: the device has {system.f_bavail * system.f_frsize // GIB} GiB free")
            continue
        file = directory / "attached"
        with open(file, "wb") as out:
            os.posix_fallocate(out.fileno(), 0, size)

        def attach(file: Path = file) -> None:
            gpufs.attach(file, mode="r+").close()

        bench.measure("in place", name, size, attach)
        file.unlink()


def measure_tensors(bench: Bench, model: Path, directory: Path, load: Callable[[Path, Path], object]) -> None:
    """Tensors of a safetensors file: in place from the mount, and by safetensors from the page cache.

    ``load(model, file)`` copies the file of the host to the mount.
    """
    rows = ("gpufs.torch.load_file", "safetensors.torch.load_file")
    if not bench.wants(*(f"in place: {row}" for row in rows)):
        return
    try:
        import safetensors.torch
        import torch

        import gpufs.torch
    except ImportError as error:
        bench.skip(f"in place: tensors: {error}")
        return
    file = directory / "in-place.safetensors"
    load(model, file)
    size = file.stat().st_size
    torch.zeros(1, device="cuda")  # the context is not part of what is measured

    def in_place() -> None:
        tensors = gpufs.torch.load_file(file)
        torch.cuda.synchronize()
        del tensors

    def by_copy() -> None:
        tensors = safetensors.torch.load_file(str(model), device="cuda")
        torch.cuda.synchronize()
        del tensors

    bench.measure("in place", rows[1], size, by_copy)
    bench.measure("in place", rows[0], size, in_place, yardstick=rows[1])
    expected = safetensors.torch.load_file(str(model), device="cuda")
    found = gpufs.torch.load_file(file)
    same = expected.keys() == found.keys() and all(torch.equal(expected[name], found[name]) for name in expected)
    print(f"  the tensors in place {'equal' if same else 'DIFFER FROM'} those of safetensors")
    if not same:
        bench.skip("in place: THE TENSORS DIFFER FROM THOSE OF SAFETENSORS")
    del expected, found
    torch.cuda.empty_cache()
    file.unlink()
