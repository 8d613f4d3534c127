"""A daemon for which each allocation of what it does fails in turn: it says ENOMEM, keeps nothing, and goes on."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
from collections.abc import Callable
from errno import ENOMEM, ENOSPC
from pathlib import Path

import pytest
from support.data import MIB, assert_same, noise, read_all
from support.failing_memory import FailingMemory
from support.mounting import GpufsMount, Mounter
from support.processes import errno_of, wait_until

from gpufs import client

# A copy that finds no service says so, and goes through the mount.
pytestmark = [pytest.mark.complains, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


@pytest.fixture
def memory(tmp_path: Path) -> FailingMemory:
    return FailingMemory(tmp_path / "order")


def held(mounted: GpufsMount) -> dict[str, int]:
    status = json.loads((mounted.path / ".gpufs/status").read_text())
    table = status["statistics"]["table"]
    return {
        "inodes": table["inodes"],
        "open files": table["open_files"],
        "orphans": table["orphans"],
        "bytes": sum(device["held_bytes"] for device in status["devices"]),
        "copies": status["transfers"]["running"] + status["transfers"]["connections"],
        "pool": status["statistics"]["pool"]["queued"] + status["statistics"]["pool"]["running"],
    }


def remove(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISDIR(path.lstat().st_mode):
            shutil.rmtree(path)
        else:
            path.unlink()


def write_over(path: Path) -> None:
    with open(path, "r+b") as file:
        file.write(noise(MIB, 1))


def copy_range(path: Path) -> None:
    with open(path.with_name("source"), "rb") as source, open(path, "wb") as target:
        left = 5 * MIB
        while left:
            left -= os.copy_file_range(source.fileno(), target.fileno(), left)


def read(path: Path) -> None:
    assert_same(read_all(path.with_name("source")), noise(5 * MIB))


def status(path: Path) -> None:
    json.loads((path.parents[1] / ".gpufs/status").read_text())


def metrics(path: Path) -> None:
    assert (path.parents[1] / ".gpufs/metrics").read_text().endswith("\n")


def allocate(path: Path) -> None:
    with open(path, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, 5 * MIB)


def truncate(path: Path) -> None:
    os.truncate(path.with_name("kept"), 2 * MIB)
    os.truncate(path.with_name("kept"), 3 * MIB)


def attributes(path: Path) -> None:
    os.setxattr(path.with_name("kept"), b"user.some", b"x" * 3000)
    assert os.getxattr(path.with_name("kept"), b"user.some") == b"x" * 3000
    assert "user.some" in os.listxattr(path.with_name("kept"))
    os.removexattr(path.with_name("kept"), b"user.some")


def listing(path: Path) -> None:
    assert {"kept", "source"} <= set(os.listdir(path.parent))
    for entry in os.scandir(path.parent):
        entry.stat()
    os.statvfs(path.parent)


def rename(path: Path) -> None:
    os.rename(path.with_name("kept"), path.with_name("moved"))
    os.rename(path.with_name("moved"), path.with_name("kept"))


def on_host(device: Path) -> Path:
    """A file of the host, beside the mount."""
    return device.parent.with_name(device.parent.name + ".host")


def load(path: Path) -> None:
    client.copy(on_host(path.parent), path)
    assert_same(read_all(path), noise(5 * MIB))


def store(path: Path) -> None:
    client.copy(path.with_name("source"), on_host(path.parent))
    assert_same(on_host(path.parent).read_bytes(), noise(5 * MIB))


# What a client does with a name that is not there before, and may be there afterwards.
ACTIONS: dict[str, Callable[[Path], object]] = {
    "create": lambda path: path.write_bytes(b"small"),
    "write": lambda path: path.write_bytes(noise(5 * MIB)),
    "write over": lambda path: write_over(path.with_name("kept")),
    "read": read,
    "copy_file_range": copy_range,
    "fallocate": allocate,
    "truncate": truncate,
    "mkdir": os.mkdir,
    "symlink": lambda path: os.symlink("target" * 100, path),
    "link": lambda path: os.link(path.with_name("kept"), path),
    "mkfifo": os.mkfifo,
    "rename": rename,
    "attributes": attributes,
    "listing": listing,
    "status": status,
    "metrics": metrics,
    "load": load,
    "store": store,
}


def settle(mounted: GpufsMount) -> dict[str, int]:
    """What it holds once what was begun has ended."""
    wait_until(lambda: not held(mounted)["pool"] and not held(mounted)["copies"], 20, "the pools to be empty")
    wait_until(lambda: not held(mounted)["orphans"] and not held(mounted)["open files"], 20, "closed files")
    return held(mounted)


def walk(mounted: GpufsMount, memory: FailingMemory, action: Callable[[Path], object], fail: int) -> int:
    """The action, once for each of its allocations, which fails; how many it were."""
    path = mounted.device / "made"
    for number in range(100_000):
        with memory.failing(number, fail):
            error = errno_of(action, path)
            seen = memory.seen
        assert error in (0, ENOMEM, ENOSPC), f"allocation {number}: errno {error}"
        assert mounted.daemon.poll() is None, f"allocation {number}"
        remove(path)
        if not (mounted.device / "kept").exists():
            os.rename(mounted.device / "moved", mounted.device / "kept")
        if seen <= number:
            return number
    raise AssertionError("no end")


@pytest.fixture
def mounted(mount: Mounter, memory: FailingMemory) -> GpufsMount:
    mounted = mount(memory=512 * MIB, environment=memory.environment)
    (mounted.device / "source").write_bytes(noise(5 * MIB))
    (mounted.device / "kept").write_bytes(noise(3 * MIB))
    on_host(mounted.device).write_bytes(noise(5 * MIB))
    return mounted


@pytest.mark.parametrize("fail", [1, 1000000])
@pytest.mark.parametrize("name", ACTIONS)
def test_each_allocation_fails(mounted: GpufsMount, memory: FailingMemory, name: str, fail: int) -> None:
    first = held(mounted)["bytes"]
    ACTIONS[name](mounted.device / "made")
    remove(mounted.device / "made")
    # Memory comes back a little later than the name goes; small files may have begun a slab.
    wait_until(lambda: held(mounted)["bytes"] <= first + 2 * MIB, 20, "the memory of the first run")
    before = settle(mounted)
    count = walk(mounted, memory, ACTIONS[name], fail)
    assert count > 0
    wait_until(lambda: held(mounted)["bytes"] <= before["bytes"], 20, "the memory of all runs")
    assert settle(mounted) | {"bytes": 0} == before | {"bytes": 0}
    ACTIONS[name](mounted.device / "made")
    assert_same(read_all(mounted.device / "source"), noise(5 * MIB))
    words = [line for line in mounted.complaints() if "Traceback" in line or "EIO" in line]
    assert not words
    mounted.unmount()
