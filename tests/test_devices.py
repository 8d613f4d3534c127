"""Several devices in one mount: whole copies from one to the other, and what counts them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from support.data import MIB, assert_same, noise
from support.mounting import GpufsMount, Mounter
from support.processes import run, wait_until

pytestmark = pytest.mark.driver

SIZE = 40 * MIB + 777


@pytest.fixture
def two(mount: Mounter) -> Iterator[GpufsMount]:
    one = mount(devices=2, memory=192 * MIB)
    if not (one.path / "gpu1").is_dir():
        pytest.skip("one device only")
    yield one
    assert not one.complaints()
    one.unmount()


def counted(mount: GpufsMount, device: int, flow: str) -> dict[str, Any]:
    """Copies between files in device memory, at one of the ends."""
    stats = json.loads((mount.path / ".gpufs" / "stats").read_text())
    found: dict[str, Any] = stats["devices"][device]["backends"]["device_copy"][flow]
    return found


def used(mount: GpufsMount, device: int) -> int:
    held: int = json.loads((mount.path / ".gpufs" / "status").read_text())["devices"][device]["held_bytes"]
    return held


def test_there_and_back(two: GpufsMount) -> None:
    """By plain cp: the engine moves the bytes, each device counts its end, and memory is where the file is."""
    first, second = two.path / "gpu0" / "file", two.path / "gpu1" / "file"
    first.write_bytes(noise(SIZE))
    assert used(two, 1) == 0
    run("cp", first, second)
    assert_same(second.read_bytes(), noise(SIZE))
    assert counted(two, 0, "out")["bytes"] == counted(two, 1, "in")["bytes"] == SIZE
    assert counted(two, 0, "in")["bytes"] == counted(two, 1, "out")["bytes"] == 0
    assert used(two, 1) >= SIZE

    with open(second, "r+b", buffering=0) as file:
        os.pwrite(file.fileno(), b"changed", 20 * MIB)
    run("cp", second, first)
    changed = noise(SIZE)[: 20 * MIB] + b"changed" + noise(SIZE)[20 * MIB + 7 :]
    assert_same(first.read_bytes(), changed)
    assert counted(two, 1, "out")["bytes"] == counted(two, 0, "in")["bytes"] == SIZE
    assert counted(two, 0, "out")["errors"] == counted(two, 1, "in")["errors"] == 0
    for path in (first, second):
        path.unlink()
    wait_until(lambda: used(two, 0) == used(two, 1) == 0, 10, "the memory of removed files to come back")


def test_holes_stay_holes(two: GpufsMount) -> None:
    first, second = two.path / "gpu0" / "file", two.path / "gpu1" / "file"
    with open(first, "wb") as file:
        file.truncate(32 * MIB)
        os.pwrite(file.fileno(), b"data", 20 * MIB)
    run("cp", first, second)
    assert_same(second.read_bytes(), first.read_bytes())
    assert second.stat().st_blocks * 512 <= 4 * MIB


def test_a_full_destination(two: GpufsMount) -> None:
    """ENOSPC of that device alone, and no more of the file than there was room for."""
    first, second = two.path / "gpu0" / "file", two.path / "gpu1" / "file"
    first.write_bytes(noise(64 * MIB))
    with open(two.path / "gpu1" / "filler", "wb") as filler:
        os.posix_fallocate(filler.fileno(), 0, 160 * MIB)
    done = run("cp", first, second, check=False)
    assert done.returncode == 1
    assert "No space left on device" in done.stderr
    assert_same(second.read_bytes(), noise(64 * MIB)[: second.stat().st_size])
    assert second.stat().st_size <= 32 * MIB
    run("cp", first, two.path / "gpu0" / "copy")
    with suppress(FileNotFoundError):
        second.unlink()
    (two.path / "gpu1" / "filler").unlink()
    run("cp", first, second)
    assert_same(second.read_bytes(), noise(64 * MIB))
