"""The benchmark runs from begin to end and leaves nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from support.mounting import REPOSITORY


def test_a_short_run_of_everything(tmp_path: Path) -> None:
    kinds = ["read", "rewrite", "fresh", "open", "map", "create", "unlink", "numpy.memmap"]
    words = "--trace-rounds 1 --rounds 1 --seconds 0.02 --blocks 1M --streams 1 --file-bytes 4M --load-bytes 4M"
    words += f" --operations {','.join(kinds)}"
    mounts = Path("/proc/self/mountinfo").read_text(errors="replace").count("gpufs-bench-")
    done = subprocess.run(
        [sys.executable, "-m", "bench", *words.split(), "--json", str(tmp_path / "out.json")],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((tmp_path / "out.json").read_text())
    systems = {result["system"] for result in document["results"]}
    assert systems == {"gpufs", "tmpfs", "pyfuse3"}
    cases = {(result["system"], result["operation"]) for result in document["results"]}
    moves, more = {"read", "rewrite", "fresh", "open"}, {"map", "create", "unlink"}
    assert {operation for system, operation in cases if system == "pyfuse3"} == moves
    for system in systems - {"pyfuse3"}:
        assert {operation for name, operation in cases if name == system} == moves | more | {"numpy.memmap"}
    assert sum(result["operation"] == "read" for result in document["results"]) == 3
    assert all(min(result["bytes_per_second"]) > 0 for result in document["results"])
    assert document["machine"]["cpus"] == len(os.sched_getaffinity(0))
    assert "gpufs/pyfuse3" in done.stdout
    assert {state: len(values) for state, values in document["trace_seconds_per_read"].items()} == {"off": 1, "on": 1}
    drawn = find_spec("matplotlib") is not None
    assert (tmp_path / "out.png").exists() == drawn
    assert drawn or "no picture" in done.stderr
    assert "while it is recorded" in done.stdout
    assert Path("/proc/self/mountinfo").read_text(errors="replace").count("gpufs-bench-") <= mounts


def test_a_short_run_of_submissions(tmp_path: Path) -> None:
    words = "--rounds 1 --operations 128 --threads 1 --json"
    done = subprocess.run(
        [sys.executable, "-m", "bench.submissions", *words.split(), str(tmp_path / "out.json")],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert {(result["system"], result["threads"]) for result in results} == {
        (system, 1) for system in ("none", "stream", "batch")
    }
    assert all(result["operations_per_second"][0] > 0 for result in results)
