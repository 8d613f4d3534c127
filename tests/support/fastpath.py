"""Where the fastpath is to be expected, and the vendors' fakes by which it is tested without a GPU."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gpufs import engine
from support.mounting import REPOSITORY, GpufsMount

BUILT = next(iter(REPOSITORY.glob("build/cmake/**/fake_kernel/libgpufs_fake_kernel.so")), Path("/")).parents[1]


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


@dataclass(frozen=True)
class Call:
    """A line of the records that the vendors' fakes write: what was called, on which file, and with which numbers."""

    name: str
    path: str
    bytes: int
    offset: int
    rest: tuple[int, ...]


@dataclass(frozen=True)
class VendorMount:
    """A mount over a vendor's fake, with a directory of the host below backing/there."""

    mount: GpufsMount
    there: Path
    records: Path

    @property
    def shown(self) -> Path:
        return self.mount.path / "backing" / "there"

    def calls(self) -> list[Call]:
        """The fake's records, in order."""
        lines = self.records.read_text().splitlines() if self.records.exists() else []
        fields = [line.split() for line in lines]
        return [Call(f[0], f[1], int(f[2]), int(f[3]), tuple(map(int, f[4:]))) for f in fields]

    def counters(self, direction: str) -> dict[str, Any]:
        """Those of the first device's transfers, "load" or "store"."""
        status = json.loads((self.mount.path / ".gpufs" / "status").read_text())
        found: dict[str, Any] = status["io"]["devices"][0][direction]
        return found


def kernel_shows(root: Path, *paths: str) -> dict[str, str]:
    """The environment in which programs see files of these absolute paths, whatever the kernel here has."""
    for path in paths:
        there = root / path.lstrip("/")
        there.parent.mkdir(parents=True, exist_ok=True)
        there.touch()
    return {
        "LD_PRELOAD": str(BUILT / "fake_kernel" / "libgpufs_fake_kernel.so"),
        "FAKE_KERNEL_ROOT": str(root),
    }


def copy_range(source: Path, target: Path, count: int, at: int = 0) -> int:
    """copy_file_range(2) at one offset in both, until nothing comes any more."""
    with open(source, "rb") as reader, open(os.open(target, os.O_WRONLY | os.O_CREAT, 0o644), "wb") as writer:
        done = 0
        while done < count:
            part = os.copy_file_range(reader.fileno(), writer.fileno(), count - done, at + done, at + done)
            if part == 0:
                break
            done += part
        return done
