"""What a command or a first call loads. Time is not measured here: a module that is loaded is what takes it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from support.data import MIB, noise
from support.mounting import GpufsMount
from support.processes import PATIENCE

# What no command needs that copies or answers a question.
HEAVY = {"asyncio", "concurrent.futures", "logging", "multiprocessing", "numpy", "subprocess", "trio", "gpufs.engine"}
# What `gpufs cp` does without, too.
NOT_OF_CP = HEAVY | {"json", "gpufs.statistics"}

COMMAND = """
import sys
sys.argv = ["gpufs", *sys.argv[1:]]
from gpufs.cli import main
try:
    main()
finally:
    print(*sys.modules, sep="\\n", file=sys.stderr)
"""


def loaded_by(*words: object) -> set[str]:
    """Run a command; return the modules that it has loaded."""
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *map(str, words)], capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    return set(done.stderr.splitlines())


@pytest.mark.parametrize(
    ("size", "unneeded"),
    [(MIB, set()), (1000, {"msgspec", "socket"})],
    ids=["by the daemon", "small"],
)
def test_cp_loads_nothing_that_it_does_not_need(root: Path, host: Path, size: int, unneeded: set[str]) -> None:
    (host / "source").write_bytes(noise(size))
    loaded = loaded_by("cp", "-p", host / "source", root / "file")
    assert (root / "file").stat().st_size == size
    assert not loaded & (NOT_OF_CP | unneeded)


@pytest.mark.parametrize("command", ["--version", "ls", "status", "df"])
def test_questions_load_no_engine(shared_mount: GpufsMount, command: str) -> None:
    # Lines about other mounts do not count: the statistics of those that do not answer are read.
    words = [command] if command == "--version" else [command, shared_mount.path]
    assert not loaded_by(*words) & (HEAVY | {"msgspec", "pathlib", "gpufs.copying", "gpufs.statistics"})


def test_the_first_load_file_of_a_program_loads_no_modules(root: Path) -> None:
    """They belong to the import: a program that is about to load weights has imported what it needs."""
    path = root / "weights.safetensors"
    path.write_bytes(safetensors.torch.save({"a": torch.arange(100.0)}))
    script = """
import sys
import torch
import gpufs.torch
before = set(sys.modules)
assert gpufs.torch.load_file(sys.argv[1])["a"][7] == 7
print(*sorted(set(sys.modules) - before))
print(*sorted(name for name in sys.modules if name.startswith("gpufs.")))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, os.fspath(path)], capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    later, ours = done.stdout.splitlines()
    assert later == ""
    assert not {"gpufs.config", "gpufs.formats.table", "gpufs.copying"} & set(ours.split())
