"""The programs in examples/, each on a mount of its own, and short runs of the benchmarks."""

from __future__ import annotations

import json
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support.data import MIB
from support.mounting import REPOSITORY, Mounter
from support.processes import run

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def run_example(name: str, *arguments: str | Path) -> str:
    return run(sys.executable, EXAMPLES / name, *arguments).stdout


def test_restart(mount: Mounter) -> None:
    """A program that starts again loads nothing: only the header of the file is read."""
    device = mount(memory=256 * MIB).device
    lines = run_example("restart.py", device, "2").splitlines()
    assert len(lines) == 3
    found = re.search(r"(\d+) bytes of (\d+)", lines[-1])
    assert found is not None
    assert int(found[1]) < 2 * 16_384  # two starts
    assert int(found[2]) == (device / "small-model.safetensors").stat().st_size > 10 * MIB


@pytest.mark.slow
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


@pytest.mark.slow
def test_without_arguments_they_say_how_to_use_them() -> None:
    for name in ("restart.py", "serve.py", "two_programs.py", "transformers_model.py"):
        if name != "transformers_model.py" or find_spec("transformers"):
            done = run(sys.executable, EXAMPLES / name, check=False)
            assert done.returncode != 0
            assert f"Usage: python examples/{name}" in done.stderr
            assert "Traceback" not in done.stderr


def bench(module: str, words: str, output: Path) -> tuple[dict[str, Any], str, str]:
    """Runs a benchmark: its document, and what it prints and complains."""
    command = [sys.executable, "-m", module, *words.split(), "--json", str(output)]
    done = run(*command, cwd=REPOSITORY)
    return json.loads(output.read_text()), done.stdout, done.stderr


@pytest.mark.slow
def test_a_short_run_of_everything(tmp_path: Path) -> None:
    kinds = ["read", "rewrite", "fresh", "open", "map", "create", "unlink", "numpy.memmap"]
    words = "--trace-rounds 1 --rounds 1 --seconds 0.02 --blocks 1M --streams 1 --file-bytes 4M --load-bytes 4M"
    words += f" --operations {','.join(kinds)}"
    mounts = Path("/proc/self/mountinfo").read_text(errors="replace").count("gpufs-bench-")
    document, said, complaints = bench("bench", words, tmp_path / "out.json")
    systems = {result["system"] for result in document["results"]}
    peers = {"pyfuse3"} if find_spec("pyfuse3") else set()
    assert systems == {"gpufs", "tmpfs"} | peers
    cases = {(result["system"], result["operation"]) for result in document["results"]}
    moves, more = {"read", "rewrite", "fresh", "open"}, {"map", "create", "unlink"}
    for peer in peers:
        assert {operation for system, operation in cases if system == peer} == moves
        assert f"gpufs/{peer}" in said
    for system in systems - peers:
        assert {operation for name, operation in cases if name == system} == moves | more | {"numpy.memmap"}
    assert sum(result["operation"] == "read" for result in document["results"]) == len(systems)
    assert all(min(result["bytes_per_second"]) > 0 for result in document["results"])
    assert document["machine"]["cpus"] == len(os.sched_getaffinity(0))
    assert {state: len(values) for state, values in document["trace_seconds_per_read"].items()} == {"off": 1, "on": 1}
    drawn = find_spec("matplotlib") is not None
    assert (tmp_path / "out.png").exists() == drawn
    assert drawn or "no picture" in complaints
    assert "while it is recorded" in said
    assert Path("/proc/self/mountinfo").read_text(errors="replace").count("gpufs-bench-") <= mounts


@pytest.mark.slow
def test_a_short_run_of_submissions(tmp_path: Path) -> None:
    words = "--rounds 1 --operations 128 --threads 1"
    document, _, _ = bench("bench.submissions", words, tmp_path / "out.json")
    results = document["results"]
    assert {(result["system"], result["threads"]) for result in results} == {
        (system, 1) for system in ("none", "stream", "batch")
    }
    assert all(result["operations_per_second"][0] > 0 for result in results)
