"""Shared mappings of files with holes: where their memory comes from, and what happens when there is none."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from errno import ENOSPC
from pathlib import Path

import numpy as np
import pytest
from support.data import MIB
from support.mounting import GpufsMount, Mounter
from support.processes import NOBODY, ChildKilled, errno_of, in_child

pytestmark = [pytest.mark.driver, pytest.mark.skipif(os.geteuid() != 0, reason="acts as several users")]
ROOM = 20 * MIB  # for the files below


@pytest.fixture(params=["device", "quota"])
def full(request: pytest.FixtureRequest, mount: Mounter, cached: bool) -> Iterator[tuple[Path, Callable[[], object]]]:
    """A directory where ROOM bytes are left for nobody, and what makes more room."""
    if cached:
        pytest.skip("this kernel's reads of mappings look like calls of read(2)")
    if request.param == "device":
        mounted = mount(memory=64 * MIB, allow_other=True)
        filler = mounted.device / "filler"
        filler.write_bytes(bytes(64 * MIB - ROOM))
        more: Callable[[], object] = filler.unlink
    else:
        mounted = mount("--user-memory", str(ROOM), memory=256 * MIB, allow_other=True)
        more = lambda: os.chown(mounted.device / "file", 0, 0)  # noqa: E731
    mounted.device.chmod(0o777)
    yield mounted.device, more
    mounted.unmount()


def fill(path: Path, size: int) -> None:
    """Stores ones everywhere, as numpy's users do."""
    array = np.memmap(path, np.uint8, "w+" if not path.exists() else "r+", shape=(size,))
    array[:] = 1
    array.flush()


def allocated(path: Path) -> int:
    return path.stat().st_blocks * 512


def test_a_store_without_memory_is_a_sigbus(full: tuple[Path, Callable[[], object]]) -> None:
    """Nothing of what was stored before is lost, and no later call fails for it."""
    place, more = full
    file, size = place / "file", 32 * MIB
    with pytest.raises(ChildKilled, match="SIGBUS"):
        in_child(lambda: fill(file, size), uid=NOBODY, gid=NOBODY)
    for _ in range(2):
        found = np.fromfile(file, np.uint8)
        stored = int(found.sum())
        assert ROOM - 8 * MIB <= stored <= ROOM  # the kernel's reading ahead takes some
        assert found[:stored].all()
    more()
    in_child(lambda: fill(file, size), uid=0)
    assert np.fromfile(file, np.uint8).all()


def test_only_mappings_of_files_open_for_writing_take_memory(mount: Mounter, cached: bool) -> None:
    """A user who may only read a sparse file cannot make it larger."""
    if cached:
        pytest.skip("this kernel's reads of mappings look like calls of read(2)")
    mounted = mount(memory=64 * MIB)
    file = mounted.device / "file"
    file.touch()
    os.truncate(file, 48 * MIB)
    with open(file, "r+b", buffering=0) as stream:
        while stream.read(MIB):
            pass
    with open(file, "rb", buffering=0) as stream, mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ) as area:
        assert not any(area[::4096])
    assert allocated(file) == 0
    with open(file, "r+b", buffering=0) as stream, mmap.mmap(stream.fileno(), 0) as area:
        area[40 * MIB] = 1
        assert 0 < allocated(file) <= 12 * MIB
    mounted.unmount()


def test_lost_stores_are_reported(mount: Mounter, cached: bool) -> None:
    """A page that a reader's mapping has cached needs no memory until it is written back."""
    if cached:
        pytest.skip("this kernel's reads of mappings look like calls of read(2)")
    mounted = mount(memory=64 * MIB)
    file = mounted.device / "named"
    file.touch()
    os.truncate(file, 2 * MIB)
    with open(file, "r+b") as stream, mmap.mmap(stream.fileno(), 0) as area:
        with open(file, "rb") as reader, mmap.mmap(reader.fileno(), 0, prot=mmap.PROT_READ) as shown:
            assert shown[0] == 0
        fill_device(mounted)
        area[0] = 1
        assert errno_of(area.flush) == ENOSPC
    mounted.wait_for_log('"named"')
    mounted.unmount()


def fill_device(mounted: GpufsMount) -> None:
    with open(mounted.device / "filler", "wb", buffering=0) as filler:
        while errno_of(filler.write, bytes(MIB)) != ENOSPC:
            pass
