"""Copies by NIXL between the memory of real GPUs, each with a daemon of its own, as between two machines."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest
from support.cli import gpufs
from support.data import GIB, MIB, assert_same, noise
from support.mounting import GPUFS, Mounter, Session
from test_nodes import throttled_shell

pytestmark = [pytest.mark.gpu, pytest.mark.alone, pytest.mark.timeout(300)]

SIZE = 4 * GIB
BLOCK = 64 * MIB


@pytest.fixture(autouse=True)
def _only_on_a_gpu(driver: str) -> None:
    if driver != "cuda":
        pytest.skip("needs --driver cuda")
    pytest.importorskip("nixl")


def gibibytes(seconds: float) -> str:
    return f"{SIZE / GIB / seconds:.2f} GiB/s"


def transports(logs: Path) -> set[str]:
    """The lines of UCX that say how it moves memory."""
    text = "\n".join(path.read_text(errors="replace") for path in logs.glob("ucx*"))
    lines = [re.sub(r"^.*\| *", "", line.rstrip(" |")) for line in text.splitlines() if "/" in line and "|" in line]
    return {line for line in lines if re.search(r"cuda_|tcp|sysv|posix|cma|rc_|dc_|ud_", line)}


def test_rates(session: Session, mount: Mounter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal bytes, whichever way is chosen. Prints the rates and what UCX uses, for docs/internals/measurements.md."""
    monkeypatch.setenv("UCX_PROTO_INFO", "y")
    monkeypatch.setenv("UCX_LOG_LEVEL", "info")
    monkeypatch.setenv("UCX_LOG_FILE", f"{tmp_path}/ucx-%p.log")
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
    (other,) = mount("--devices", last.name.removeprefix("gpu")).path.glob("gpu*")
    words = ("-e", str(throttled_shell(session)), "--remote-gpufs", GPUFS[0], "--json")
    for options in [(), ("--verify",)]:
        (copy,) = json.loads(gpufs("cp", *words, *options, both.device / "m", f"node:{other}/m").stdout)["copies"]
        print(f"NIXL {options}: {gibibytes(copy['seconds'])} by {copy['paths']}")
        with open(other / "m", "rb") as file:
            for seed in range(SIZE // BLOCK):
                assert_same(file.read(BLOCK), noise(BLOCK, seed))
        (other / "m").unlink()
    print("UCX:", *sorted(transports(tmp_path)), sep="\n  ")
