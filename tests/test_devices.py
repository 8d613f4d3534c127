"""Several devices in one mount: whole copies from one to the other, and what counts them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress

import pytest
from support.data import MIB, assert_same, noise
from support.mounting import GpufsMount, Mounter
from support.processes import run

pytestmark = pytest.mark.driver


@pytest.fixture
def two(mount: Mounter) -> Iterator[GpufsMount]:
    one = mount(devices=2, memory=192 * MIB)
    if not (one.path / "gpu1").is_dir():
        pytest.skip("one device only")
    yield one
    assert not one.complaints()
    one.unmount()


def test_holes_stay_holes(two: GpufsMount) -> None:
    first, second = two.path / "gpu0" / "file", two.path / "gpu1" / "file"
    with open(first, "wb") as file:
        file.truncate(32 * MIB)
        os.pwrite(file.fileno(), b"data", 20 * MIB)
    run("cp", first, second)
    assert_same(second.read_bytes(), first.read_bytes())
    assert second.stat().st_blocks * 512 <= 4 * MIB


def test_a_full_destination_is_enospc(two: GpufsMount) -> None:
    """Only that device is full. The copy has the bytes that fit."""
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
