"""The real libamdhip64 of this machine, where it has no GPU for it: it loads, and is said to find no device.

Any version that the loader finds; GPUFS_REAL_HIP names a directory that holds one (a package that was only unpacked).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from support.mounting import GPUFS
from support.processes import run

NAMES = [f"libamdhip64.so.{version}" for version in (7, 6, 5)]


def _clean() -> dict[str, str]:
    """An environment without the tests' own libraries."""
    own = ("LD_LIBRARY_PATH", "LD_PRELOAD")
    words = {name: value for name, value in os.environ.items() if name not in own}
    if "GPUFS_REAL_HIP" in os.environ:
        words["LD_LIBRARY_PATH"] = os.environ["GPUFS_REAL_HIP"]
    return words


@pytest.fixture
def library() -> str:
    """Its name, as a program of its own finds it."""
    script = f"import ctypes\nfor name in {NAMES}:\n try:\n  ctypes.CDLL(name)\n  print(name)\n except OSError: pass"
    found = run(sys.executable, "-c", script, env=_clean()).stdout.split()
    if not found:
        pytest.skip("no libamdhip64 is installed here")
    if os.path.exists("/dev/kfd"):
        pytest.skip("there may be a GPU for it")
    return found[0]


def no_device(library: str) -> str:
    reason = "there is no /dev/kfd: the kernel's amdgpu driver is not loaded"
    return f"hip is not available: no device: {library} shows none ({reason})"


def test_doctor_says_that_there_is_no_device(library: str) -> None:
    done = run(*GPUFS, "doctor", "--json", env=_clean(), check=False)
    said = json.loads(done.stdout)
    (found,) = [one for one in said["findings"] if (one["group"], one["name"]) == ("drivers", "hip")]
    assert found["state"] == "note"
    assert found["text"] == f"no AMD GPUs: {no_device(library)}"
    assert found["advice"]
    # It is no problem: host memory serves.
    assert done.returncode == (0 if said["ok"] else 1)
    assert "hip" not in [one["name"] for one in said["findings"] if one["state"] == "problem"]


def test_a_mount_is_refused_in_one_line(library: str, tmp_path: Path) -> None:
    for more in ([], ["--foreground"]):
        done = run(*GPUFS, "mount", tmp_path, "--driver", "hip", *more, env=_clean(), check=False)
        assert done.returncode == 1
        assert done.stdout == ""
        assert done.stderr == f"gpufs: {no_device(library)}; gpufs doctor says what to do\n"
        assert not os.path.ismount(tmp_path)


def test_without_a_choice_the_mount_is_of_host_memory(library: str, tmp_path: Path) -> None:
    run(*GPUFS, "mount", tmp_path, "--memory", "64M", env=_clean())
    try:
        status = json.loads((tmp_path / ".gpufs" / "status").read_text())
        assert status["driver"] == "host"
    finally:
        run(*GPUFS, "umount", tmp_path)
