"""The quick form of two campaigns: stress-ng, and processes that check each other's writes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from campaigns.harness import Place
from campaigns.stamps import four_stampers
from campaigns.stressors import stress_ng
from support.data import MIB, noise
from support.mounting import GpufsMount
from support.processes import Snapshot, run, wait_until


@pytest.fixture
def steady(request: pytest.FixtureRequest, on_gpufs: bool, root: Path) -> Iterator[None]:
    """Afterwards the daemon holds what it held before: descriptors, memory files, threads, and about as much memory."""
    if not on_gpufs:
        yield
        return
    mount: GpufsMount = request.getfixturevalue("shared_mount")
    (root / "warm").write_bytes(noise(4 * MIB))
    os.unlink(root / "warm")
    before = Snapshot.of(mount.pid)
    yield
    for name in os.listdir(root):
        run("rm", "-rf", root / name)

    def back() -> bool:
        now = Snapshot.of(mount.pid)
        return now.descriptors <= before.descriptors + 2 and now.memfds <= before.memfds + 1

    wait_until(back, 30, f"the daemon's descriptors to come back to {before}: {Snapshot.of(mount.pid)}")
    now = Snapshot.of(mount.pid)
    assert now.threads <= before.threads + 10, (before, now)
    assert now.resident_bytes <= before.resident_bytes + 150 * MIB, (before, now)


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("steady")
def test_stressors_for_a_moment(root: Path) -> None:
    stress_ng(Place(root, root, quick=True))


def test_four_processes_see_what_was_written(root: Path) -> None:
    four_stampers(root, 400)
