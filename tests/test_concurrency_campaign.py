"""Load from programs made for it, for a moment: stress-ng, rsync of many files, processes that check each other.

The long form, with more programs, are the campaigns below tests/campaigns.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from campaigns.stamps import four_stampers
from support.data import MIB, noise
from support.mounting import GpufsMount
from support.processes import Snapshot, run, wait_until


def available(names: str) -> list[str]:
    """Those stressors that the installed stress-ng has."""
    known = run("stress-ng", "--stressors").stdout.split()
    return [name for name in names.split() if name in known]


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


def stress(root: Path, names: list[str], seconds: int, workers: int) -> None:
    """Each stressor in its turn; stress-ng says what failed, and --verify makes it look at its data."""
    sizes = {
        "hdd": "32m",
        "fallocate": "64m",
        "iomix": "32m",
        "copy-file": "128m",
        "sync-file": "32m",
        "readahead": "32m",
    }
    complaints = []
    for name in names:
        words = ["--temp-path", str(root), "--timeout", f"{max(1, seconds // len(names))}s", f"--{name}", str(workers)]
        if name in sizes:
            words += [f"--{name}-bytes", sizes[name]]
        done = run("stress-ng", "--verify", *words, check=False, timeout=seconds + 200, cwd=root)
        text = done.stdout + done.stderr
        bad = any(word in text for word in (" fail:", "unsuccessful", " error:"))
        if bad or done.returncode not in (0, 4):  # 4: not supported here
            complaints.append(f"{name}: exit {done.returncode}\n{text[-2000:]}")
    assert not complaints, "\n".join(complaints)


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("steady")
def test_stressors_for_a_moment(root: Path) -> None:
    names = available("copy-file dentry dir fallocate flock hdd iomix link lockf punch rename seek symlink xattr utime")
    stress(root, names, len(names), 2)


def test_four_processes_see_what_was_written(root: Path) -> None:
    four_stampers(root, 400)
