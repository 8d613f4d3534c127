"""Runs the gpufs command and checks its failures."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.mounting import GPUFS
from support.processes import run
from support.watchdog import mounted_at, rescue


def gpufs(*arguments: object, check: bool = True, **options: object) -> subprocess.CompletedProcess[str]:
    """Runs the command to its end; with check, a failure shows its output."""
    words = [word if isinstance(word, (str, os.PathLike)) else str(word) for word in arguments]
    return run(*GPUFS, *words, check=check, **options)  # type: ignore[arg-type]


def one_line(done: subprocess.CompletedProcess[str], code: int) -> str:
    """The single line of a failed command, which has printed nothing else."""
    lines = done.stderr.splitlines()
    assert (done.returncode, done.stdout, len(lines)) == (code, "", 1), done
    assert lines[0].startswith("gpufs: ")
    return lines[0].removeprefix("gpufs: ")


def fails(code: int, *arguments: object, **options: object) -> str:
    """Runs a command that must fail with this code; its single line."""
    return one_line(gpufs(*arguments, check=False, **options), code)


@pytest.fixture
def mountpoint(tmp_path: Path) -> Iterator[Path]:
    """An empty directory, on which nothing may be mounted at the end."""
    path = tmp_path / "mnt"
    path.mkdir()
    yield path
    if mounted_at(str(path)):
        rescue(str(path), None)
        raise AssertionError("something was left mounted")
