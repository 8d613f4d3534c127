"""Mounts whose requests come through io_uring: data, names, waiting requests, and their ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.data import MIB, noise
from support.mounting import GPUFS, GpufsMount, Mounter
from support.processes import run, wait_until

SWITCH = Path("/sys/module/fuse/parameters/enable_uring")

pytestmark = [
    pytest.mark.skipif(
        os.geteuid() != 0 or not SWITCH.exists(), reason="needs root, and a kernel with FUSE over io_uring"
    ),
]


@pytest.fixture
def switch() -> Iterator[Path]:
    """The kernel's switch, on, and as it was afterwards."""
    before = SWITCH.read_text().strip()
    SWITCH.write_text("Y")
    yield SWITCH
    SWITCH.write_text(before)


@pytest.fixture
def ringed(switch: Path, mount: Mounter) -> GpufsMount:
    mounted = mount("--transport", "uring", memory=256 * MIB)
    assert "io_uring" in run(*GPUFS, "status", mounted.path).stdout
    return mounted


def test_without_the_switch_mounting_fails_with_the_remedy(switch: Path, tmp_path: Path) -> None:
    switch.write_text("N")
    words = [*GPUFS, "mount", str(tmp_path), "--driver", "host", "--memory", "64M", "--transport", "uring"]
    done = run(*words, check=False)
    assert done.returncode == 1
    assert str(switch) in done.stderr
    assert not os.path.ismount(tmp_path)


@pytest.mark.parametrize("value", ["Y", "N"])
def test_auto_uses_it_where_the_kernel_allows_it(switch: Path, mount: Mounter, value: str) -> None:
    switch.write_text(value)
    mounted = mount(memory=64 * MIB)
    status = json.loads(run(*GPUFS, "status", "--json", mounted.path).stdout)
    shown = run(*GPUFS, "status", mounted.path).stdout
    if value == "Y":
        assert status["transport"] == "io_uring"
        assert str(switch) not in shown
    else:
        assert status["transport"] == "device"
        assert str(switch) in shown
    (mounted.device / "file").write_bytes(noise(MIB))
    assert (mounted.device / "file").read_bytes() == noise(MIB)


def test_requests_that_wait_do_not_delay_others(ringed: GpufsMount) -> None:
    """Many calls wait for the control plane at once, more than there are entries from the start."""
    ringed.signal(signal.SIGSTOP)  # no thread answers, so all of these wait in the kernel
    waiting = [
        subprocess.Popen(["stat", ringed.device / f"absent{number}"], stderr=subprocess.DEVNULL) for number in range(40)
    ]
    ringed.signal(signal.SIGCONT)
    for process in waiting:
        assert process.wait(60) == 1
    (ringed.device / "file").write_bytes(b"works")
    assert (ringed.device / "file").read_bytes() == b"works"


def test_the_switch_may_be_turned_off_while_mounted(ringed: GpufsMount, switch: Path) -> None:
    switch.write_text("N")
    content = noise(3 * MIB)
    (ringed.device / "file").write_bytes(content)
    assert (ringed.device / "file").read_bytes() == content
    ringed.unmount()


def test_an_idle_mount_uses_no_cpu(ringed: GpufsMount) -> None:
    def ticks() -> int:
        fields = Path(f"/proc/{ringed.pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    (ringed.device / "file").write_bytes(b"x")

    def is_still() -> bool:
        before = ticks()
        time.sleep(1)
        return ticks() - before <= 1

    wait_until(is_still, 30, "the mount to become idle")
