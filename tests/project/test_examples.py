"""The programs in examples/, each on a mount of its own, and short runs of the benchmarks."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from errno import ENOSPC
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support.data import MIB, noise
from support.mounting import REPOSITORY, Mounter, Session
from support.processes import errno_of, run, wait_until
from support.watchdog import mounted_at, rescue

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run_example(name: str, *arguments: str | Path) -> str:
    return run(sys.executable, EXAMPLES / name, *arguments).stdout


@pytest.mark.slow
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


@pytest.mark.slow
def test_two_programs(mount: Mounter) -> None:
    assert "both programs gave the same answer" in run_example("two_programs.py", mount(memory=256 * MIB).device)


@pytest.mark.skipif(find_spec("pyfuse3") is None, reason="pyfuse3 is not installed: scripts/setup bench installs it")
def test_own_filesystem(tmp_path: Path, session: Session) -> None:
    """The example's files are the engine's buffers: a full device, holes and unlinked files behave as on a mount."""
    mountpoint = tmp_path / "mnt"
    mountpoint.mkdir()
    command: list[str | Path] = [sys.executable, EXAMPLES / "own_filesystem.py", mountpoint]
    program = subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True)
    session.tell(do="mount", path=str(mountpoint), group=program.pid)
    try:
        wait_until(lambda: mounted_at(str(mountpoint)) or program.poll() is not None, 20, "the mount")
        path = mountpoint / "weights"
        data = noise(3 * MIB + 5)
        path.write_bytes(data)
        with open(path, "r+b", buffering=0) as file:
            os.ftruncate(file.fileno(), 200 * MIB)  # a hole, which takes no memory
            assert os.fstat(file.fileno()).st_blocks * 512 <= 4 * MIB
            assert os.pread(file.fileno(), len(data) + 10, 0) == data + bytes(10)
            os.rename(path, mountpoint / "renamed")
            assert os.listdir(mountpoint) == ["renamed"]
            (mountpoint / "renamed").unlink()
            assert os.pread(file.fileno(), 5, 3 * MIB) == data[-5:]
        with open(mountpoint / "large", "wb", buffering=0) as file:
            assert errno_of(lambda: [file.write(bytes(MIB)) for _ in range(257)]) == ENOSPC
        assert 240 * MIB < (mountpoint / "large").stat().st_size <= 256 * MIB
        os.kill(program.pid, signal.SIGINT)
        _, complaints = program.communicate(timeout=30)
        assert (program.returncode, complaints) == (0, b"")
        assert not mounted_at(str(mountpoint))
    finally:
        rescue(str(mountpoint), program.pid)
        program.communicate()
        session.tell(do="gone", path=str(mountpoint))


@pytest.mark.slow
def test_without_arguments_they_say_how_to_use_them() -> None:
    needed = {"transformers_model.py": "transformers", "own_filesystem.py": "pyfuse3"}
    for name in ("restart.py", "serve.py", "two_programs.py", *needed):
        if name not in needed or find_spec(needed[name]):
            done = run(sys.executable, EXAMPLES / name, check=False)
            assert done.returncode != 0
            assert f"Usage: python examples/{name}" in done.stderr
            assert "Traceback" not in done.stderr


def bench(module: str, words: str, output: Path) -> tuple[dict[str, Any], str, str]:
    """Runs a benchmark: its document, and what it prints and complains."""
    command: list[str | Path] = [sys.executable, "-m", module, *words.split(), "--json", str(output)]
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
