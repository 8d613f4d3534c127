"""File systems for tests, and whether the fastpath serves them."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.data import MIB
from support.processes import run

_IMAGE_BYTES = 256 * MIB


def file_systems(path: Path) -> set[str]:
    """The types of the mounts on the path's device."""
    device = os.stat(path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with open("/proc/self/mountinfo", errors="surrogateescape", newline="\n") as mounts:
        return {line.split(" - ")[1].split()[0] for line in mounts if line.split()[2] == number}


@contextlib.contextmanager
def file_system(kind: str) -> Iterator[Path]:
    """A directory on a fresh file system in an image file. Skips the test where none can be mounted (root, loop)."""
    if os.geteuid() != 0:
        pytest.skip("only root mounts a file system")
    with tempfile.TemporaryDirectory(prefix="gpufs-image-", dir="/var/tmp") as folder:
        image, there = Path(folder) / "image", Path(folder) / "mounted"
        there.mkdir()
        image.write_bytes(b"")
        os.truncate(image, _IMAGE_BYTES)
        run(f"mkfs.{kind}", "-q", image)
        mounted = run("mount", "-t", kind, "-o", "loop", image, there, check=False)
        if mounted.returncode:
            pytest.skip(f"no {kind} can be mounted here: {mounted.stderr.strip()}")
        try:
            yield there
        finally:
            run("umount", "--lazy", there)


@contextlib.contextmanager
def fast_disk() -> Iterator[Path]:
    """A directory on a file system that the fastpath takes: below /var/tmp, or on an image where that is on another."""
    with contextlib.ExitStack() as stack:
        base = Path("/var/tmp")
        if not file_systems(base) & {"ext4", "xfs"}:
            base = stack.enter_context(file_system("ext4"))
        yield Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpufs-vendor-", dir=base)))
