"""The benchmark runs from begin to end and leaves nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from support.mounting import REPOSITORY


def test_a_short_run_of_everything(tmp_path: Path) -> None:
    words = "--trace-rounds 2 --rounds 1 --seconds 0.02 --blocks 4K,1M --streams 1,2 --file-bytes 4M --threads --json"
    mounts = Path("/proc/self/mountinfo").read_text(errors="replace").count("gpufs-bench-")
    done = subprocess.run(
        [sys.executable, "-m", "bench", *words.split(), str(tmp_path / "out.json")],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((tmp_path / "out.json").read_text())
    systems = {result["system"] for result in document["results"]}
    assert {"gpufs", "tmpfs", "pyfuse3"} < systems
    assert len(systems) == 5
    assert len(document["results"]) == 5 * 3 * 2 * 2
    assert all(min(result["bytes_per_second"]) > 0 for result in document["results"])
    assert document["machine"]["cpus"] == len(os.sched_getaffinity(0))
    assert "gpufs/pyfuse3" in done.stdout
    assert {state: len(values) for state, values in document["trace_seconds_per_read"].items()} == {"off": 2, "on": 2}
    assert "while it is recorded" in done.stdout
    assert Path("/proc/self/mountinfo").read_text(errors="replace").count("gpufs-bench-") <= mounts


def test_a_short_run_of_submissions(tmp_path: Path) -> None:
    words = "--rounds 1 --operations 128 --threads 1,4 --json"
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
        (system, threads) for system in ("none", "stream", "batch") for threads in (1, 4)
    }
    assert all(result["operations_per_second"][0] > 0 for result in results)
