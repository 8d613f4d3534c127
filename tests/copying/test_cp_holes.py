"""Copies of files with holes, against a plain model: the bytes, and the granules of memory that may be held."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support import linux
from support.data import GIB, GRANULE, KIB, MIB, directory, noise
from support.mounting import GPUFS, GpufsMount, Session
from support.processes import run

from gpufs import client

pytestmark = [pytest.mark.driver, pytest.mark.skipif(os.geteuid() != 0, reason="mounts for several users")]

CP = (*GPUFS, "cp")
PAGE = 4 * KIB


@dataclass
class Model:
    """A file as its size and its runs of data, which do not overlap."""

    size: int
    runs: dict[int, bytes] = field(default_factory=dict)

    def write(self, path: Path) -> Path:
        with open(path, "wb") as file:
            file.truncate(self.size)
            for offset, data in self.runs.items():
                file.seek(offset)
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
        return path

    def granules(self) -> int:
        """Bytes of memory that the data needs, in whole granules. Pages that it shares with a hole are data."""
        numbers: set[int] = set()
        for offset, data in self.runs.items():
            start = offset // PAGE * PAGE
            end = min(self.size, -(-(offset + len(data)) // PAGE) * PAGE)
            numbers.update(range(start // GRANULE, -(-end // GRANULE)))
        return len(numbers) * GRANULE

    def check(self, path: Path) -> None:
        """Its size, its bytes, and zeros in its holes: those that are not holes of the file as well are read."""
        with open(path, "rb", buffering=0) as file:
            assert os.fstat(file.fileno()).st_size == self.size
            position = 0
            for offset, data in [*sorted(self.runs.items()), (self.size, b"")]:
                self._zeros(file.fileno(), position, offset)
                assert os.pread(file.fileno(), len(data), offset) == data, offset
                position = offset + len(data)

    @staticmethod
    def _zeros(fd: int, start: int, end: int) -> None:
        while start < end:
            found = linux.find_data(fd, start)
            if found is None or found >= end:
                return
            stop = min(os.lseek(fd, found, os.SEEK_HOLE), end)
            for place in range(found, stop, 4 * MIB):
                part = os.pread(fd, min(4 * MIB, stop - place), place)
                assert part.count(0) == len(part), f"no zeros in the hole after {place}"
            start = stop


def random_model(seed: int) -> Model:
    chance = random.Random(seed)
    size = chance.choice([1, PAGE, 100 * KIB, GRANULE - 1, GRANULE, 9 * MIB + 5, 70 * MIB, 300 * MIB + 77])
    model = Model(size)
    position = 0
    for number in range(chance.randrange(9)):
        position += chance.choice([0, 1, PAGE, 100 * KIB, GRANULE, 3 * GRANULE, 30 * MIB])
        count = min(chance.choice([1, PAGE, 64 * KIB, GRANULE, 3 * MIB + 1]), size - position)
        if count <= 0:
            break
        model.runs[position] = noise(count, seed + number).replace(b"\0", b"\1")
        position += count
    return model


@pytest.fixture(scope="module")
def places(session: Session, driver: str) -> Iterator[tuple[GpufsMount, Path, Path]]:
    with directory("/var/tmp") as disk, directory("/dev/shm") as memory:
        words = ["--backing", f"disk={disk}", "--backing", f"memory={memory}"]
        with GpufsMount(session, *words, driver=driver, memory=256 * MIB, devices=2) as mount:
            yield mount, disk, memory


@pytest.fixture(params=["disk", "memory"])
def host(request: pytest.FixtureRequest, places: tuple[GpufsMount, Path, Path]) -> Iterator[Path]:
    """A directory of the host; both its files and the mount's go with the test."""
    mount, *hosts = places
    mount.complaints(wait=False)
    yield hosts[request.param == "memory"]
    for folder in (mount.device, *hosts):
        for path in folder.iterdir():
            path.unlink()
    assert not mount.complaints(wait=False)


def shown(mount: GpufsMount, path: Path) -> Path:
    """A file of the host as the mount shows it."""
    name = "memory" if path.is_relative_to("/dev/shm") else "disk"
    return mount.path / "backing" / name / path.name


def held(path: Path) -> int:
    return path.stat().st_blocks * 512


@pytest.mark.parametrize("seed", range(5))
def test_holes_survive_copies_in_all_directions(places: tuple[GpufsMount, Path, Path], host: Path, seed: int) -> None:
    model, device = random_model(seed), places[0].device
    source = model.write(host / f"source{seed}")  # the mount may show the old file of a name for a second
    loaded = client.copy(source, device / "loaded", verify=seed % 3 == 0)
    between = client.copy(device / "loaded", device / "between")
    stored = client.copy(device / "between", host / "stored")
    run("cp", "--sparse=auto", shown(places[0], source), device / "by-cp")
    client.copy(shown(places[0], source), device / "by-kernel")
    for path in (device / "loaded", device / "between", device / "by-cp", device / "by-kernel"):
        model.check(path)
        if model.size > 128 * KIB:  # smaller ones share memory
            assert held(path) <= model.granules(), path
    model.check(host / "stored")
    assert held(host / "stored") <= model.granules() + MIB
    for result in (loaded, between, stored):
        assert result.bytes == model.size
        assert sum(result.paths.values()) == model.size
    data = sum(map(len, model.runs.values()))
    assert loaded.bytes - loaded.paths.get("hole", 0) <= max(model.granules(), data)


@pytest.mark.parametrize("way", ["gpufs-cp", "cp"])
def test_a_large_sparse_file_needs_little_memory(places: tuple[GpufsMount, Path, Path], host: Path, way: str) -> None:
    model, copy = Model(10 * GIB, {5 * GIB + 12345: noise(3 * MIB)}), places[0].device / "file"
    source = model.write(host / way)
    if way == "cp":
        run("cp", shown(places[0], source), copy)
    else:
        summary = json.loads(run(*CP, "--json", "--fsync", source, copy).stdout)
        assert summary["bytes"] == 10 * GIB
        assert summary["paths"]["hole"] >= 10 * GIB - 6 * MIB
        assert sum(summary["paths"].values()) == 10 * GIB
    model.check(copy)
    assert 4 * MIB <= held(copy) <= 6 * MIB
    run(*CP, "--fsync", copy, host / "back")
    model.check(host / "back")
    assert held(host / "back") <= 7 * MIB
