"""Where the fastpath is to be expected."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpufs import engine


def file_systems(path: Path) -> set[str]:
    """The types of the mounts on the path's device."""
    device = os.stat(path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with open("/proc/self/mountinfo", errors="surrogateescape", newline="\n") as mounts:
        return {line.split(" - ")[1].split()[0] for line in mounts if line.split()[2] == number}


def skip_without_fastpath(path: Path, driver: str) -> None:
    """Skips the test where the driver has no fastpath here, or the path's file system is not for it."""
    refusals = engine.fastpath_probe(driver)
    if refusals:
        pytest.skip(f"the fastpath of {driver} refuses: {', '.join(refusals)}")
    if not file_systems(path) & {"ext4", "xfs"}:
        pytest.skip(f"no file system for the fastpath at {path}: {file_systems(path)}")
