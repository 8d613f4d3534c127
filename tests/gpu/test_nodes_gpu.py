"""Copies by NIXL between the memory of real GPUs, each with a daemon of its own, as between two machines."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from support.cli import gpufs
from support.data import GIB, MIB, assert_same, noise
from support.hosts import throttled_shell
from support.mounting import GPUFS, Mounter, Session

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_cuda"), pytest.mark.alone, pytest.mark.timeout(400)]

pytest.importorskip("nixl")

SIZE = 4 * GIB
BLOCK = 64 * MIB


def gibibytes(seconds: float) -> str:
    return f"{SIZE / GIB / seconds:.2f} GiB/s"


def transports(logs: Path) -> set[str]:
    """How UCX reads and writes the memory of the other side, from its tables (UCX_PROTO_INFO)."""
    found, operation = set(), ""
    for line in "\n".join(path.read_text(errors="replace") for path in logs.glob("ucx*")).splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 1:
            operation = cells[0] if cells[0].startswith("remote memory") else ""
        elif operation and len(cells) == 3 and cells[0] != "Range":
            found.add(f"{operation}: {cells[0]} {cells[1]}, {cells[2]}")
    return found


def print_copy_of_torch() -> None:
    """Print the rate of torch's copy between two GPUs, where there are two and torch has CUDA."""
    torch: Any = pytest.importorskip("torch")
    if torch.cuda.is_available() and torch.cuda.device_count() > 1:
        source = torch.empty(SIZE, dtype=torch.uint8, device="cuda:0")
        target = torch.empty(SIZE, dtype=torch.uint8, device="cuda:1")
        for _ in range(2):
            torch.cuda.synchronize(1)
            began = time.monotonic()
            target.copy_(source)
            torch.cuda.synchronize(1)
        print(f"torch, cuda:0 to cuda:1: {gibibytes(time.monotonic() - began)}")


def test_rates(session: Session, mount: Mounter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal bytes, whichever way is chosen. Prints the rates and what UCX uses, for docs/internals/measurements.md."""
    monkeypatch.setenv("UCX_PROTO_INFO", "y")
    monkeypatch.setenv("UCX_LOG_LEVEL", "info")
    monkeypatch.setenv("UCX_LOG_FILE", f"{tmp_path}/ucx-%p.log")
    monkeypatch.setenv("NIXL_LOG_LEVEL", "WARN")  # on standard error
    both = mount("--devices", "all")
    last = both.path / ("gpu1" if (both.path / "gpu1").exists() else "gpu0")
    with open(both.device / "m", "wb") as file:
        for seed in range(SIZE // BLOCK):
            file.write(noise(BLOCK, seed))
    with open(both.device / "m", "rb") as source, open(last / "copy", "wb") as target:
        began = time.monotonic()
        while os.copy_file_range(source.fileno(), target.fileno(), 1 << 30):
            pass
        print(f"\ncopy_file_range, gpu0 to {last.name}: {gibibytes(time.monotonic() - began)}")
    (last / "copy").unlink()
    print_copy_of_torch()
    (other,) = mount("--devices", last.name.removeprefix("gpu") + ",").path.glob("gpu*")
    words = ("-e", str(throttled_shell(session)), "--remote-gpufs", GPUFS[0], "--json")
    for options in [(), ("--verify",)]:
        done = gpufs("cp", *words, *options, both.device / "m", f"node:{other}/m")
        (copy,) = json.loads(done.stdout)["copies"]
        print(f"NIXL {options}: {gibibytes(copy['seconds'])} by {copy['paths']}\n{done.stderr}")
        with open(other / "m", "rb") as file:
            for seed in range(SIZE // BLOCK):
                assert_same(file.read(BLOCK), noise(BLOCK, seed))
        (other / "m").unlink()
    print("UCX:", *sorted(transports(tmp_path)), sep="\n  ")
