"""The programs in examples/, each on a mount of its own."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from support.data import MIB
from support.mounting import Mounter
from support.processes import run

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def run_example(name: str, *arguments: str | Path) -> str:
    return run(sys.executable, EXAMPLES / name, *arguments).stdout


def test_restart(mount: Mounter) -> None:
    """A program that starts again loads nothing: not one byte is read from the file."""
    device = mount(memory=256 * MIB).device
    lines = run_example("restart.py", device, "2").splitlines()
    assert len(lines) == 3
    found = re.search(r"(\d+) bytes of (\d+)", lines[-1])
    assert found is not None
    assert int(found[1]) == 0
    assert int(found[2]) == (device / "small-model.safetensors").stat().st_size > 10 * MIB


def test_transformers(mount: Mounter) -> None:
    device = mount(memory=256 * MIB).device
    path = EXAMPLES / "transformers_model.py"
    twice = f"import runpy\nfor _ in range(2): runpy.run_path({str(path)!r}, run_name='__main__')"
    lines = run(sys.executable, "-c", twice, device).stdout.splitlines()  # in one process: importing takes longest
    published, _, first, _, second = lines
    assert published.startswith("published")
    assert first == second


def test_two_programs(mount: Mounter) -> None:
    assert "both programs gave the same answer" in run_example("two_programs.py", mount(memory=256 * MIB).device)
