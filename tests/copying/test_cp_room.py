"""`gpufs cp` with too little space: it is refused before anything is created, and --partial keeps what fits."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cli import gpufs, gpufs_here
from support.data import MIB, assert_same, noise
from support.mounting import GpufsMount, Session
from support.processes import run

from gpufs.client import CopyError, copy

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")


@pytest.fixture(scope="module")
def _small(session: Session, driver: str) -> Iterator[GpufsMount]:
    with GpufsMount(session, driver=driver, memory=32 * MIB) as mount:
        yield mount


@pytest.fixture
def small(_small: GpufsMount) -> Iterator[GpufsMount]:
    yield _small
    _small.empty()


@pytest.fixture
def small_disk() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="gpufs-client-", dir="/tmp") as folder:
        run("mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", folder)
        try:
            yield Path(folder)
        finally:
            run("umount", folder)


@pytest.fixture
def tree(host: Path) -> Path:
    """Three files of 20 MiB in two directories: two do not fit where one does."""
    path = host / "tree"
    (path / "below").mkdir(parents=True)
    for name in ("one", "below/two", "below/three"):
        (path / name).write_bytes(noise(20 * MIB))
    return path


def refused(needed: str, free_on: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
    done = gpufs_here("cp", *words, check=False)
    assert done.returncode == 1
    assert f"needs {needed}, " in done.stderr
    assert f" free on {free_on}" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    return done


def test_small_files_take_whole_granules(small: GpufsMount, host: Path) -> None:
    """What the device would hold is counted, not bytes: 20 files of 150 KiB take 40 MiB, and 400 of 20 KiB 12.5."""
    for folder, count, size in (("medium", 20, 150), ("small", 400, 20)):
        (host / folder).mkdir()
        for number in range(count):
            (host / folder / str(number)).write_bytes(noise(size << 10))
    done = refused("40.0 MiB", "gpu0", "-r", host / "medium", small.device)
    assert "2.0 MiB" in done.stderr
    assert os.listdir(small.device) == []
    gpufs_here("cp", "-r", host / "small", small.device)
    assert len(os.listdir(small.device / "small")) == 400
    gpufs_here("save", small.device / "small", host / "saved")
    (small.device / "full").write_bytes(noise(16 * MIB))
    done = gpufs_here("restore", host / "saved", small.device / "again", check=False)
    assert done.returncode == 1
    assert "needs 12.5 MiB" in done.stderr
    assert not (small.device / "again").exists() or os.listdir(small.device / "again") == []


def test_the_limit_of_a_directory_is_named(small: GpufsMount, tree: Path) -> None:
    (small.device / "limited").mkdir()
    gpufs_here("quota", "set", small.device / "limited", "16M")
    done = gpufs_here("cp", tree / "one", small.device / "limited", check=False)
    assert "needs 20.0 MiB, 16.0 MiB free within a directory's limit on gpu0" in done.stderr
    (small.device / "limited").rmdir()


def test_more_than_the_device_has_is_refused_at_once(
    small: GpufsMount, host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No removed file could give the memory back, so nothing waits for that."""
    (host / "large").write_bytes(noise(40 * MIB))
    waits: list[float] = []
    monkeypatch.setattr("time.sleep", waits.append)
    with pytest.raises(CopyError, match=r"needs 40.0 MiB"):
        copy(host / "large", small.device / "large")
    assert waits == []


def test_partial_copies_what_fits(small: GpufsMount, tree: Path) -> None:
    done = gpufs_here("cp", "-r", "-j1", "--partial", "--json", tree, small.device, check=False)
    assert done.returncode == 1
    assert json.loads(done.stdout)["files"] == 1
    assert_same((small.device / "tree" / "one").read_bytes(), noise(20 * MIB))
    errors = json.loads(done.stdout)["errors"]
    assert len(errors) == 2
    for error in errors:
        kept = Path(error["destination"])
        assert_same(kept.read_bytes(), noise(20 * MIB)[: error["bytes_done"]])


def test_files_that_are_overwritten_make_space(small: GpufsMount, host: Path) -> None:
    (host / "tree").mkdir()
    (host / "tree" / "file").write_bytes(noise(24 * MIB))
    for _ in range(3):
        gpufs_here("cp", "-r", host / "tree", small.device)
    gpufs_here("cp", "-r", "-n", host / "tree", small.device)  # copies nothing
    assert_same((small.device / "tree" / "file").read_bytes(), noise(24 * MIB))


def test_a_disk_that_is_too_small(root: Path, small_disk: Path) -> None:
    for name in ("one", "two"):
        (root / name).write_bytes(noise(10 * MIB))
    refused("20.0 MiB", str(small_disk), root / "one", root / "two", small_disk)
    refused("20.0 MiB", str(small_disk), "-r", root, small_disk)
    (root / "two").write_bytes(noise(20 * MIB))
    refused("20.0 MiB", str(small_disk), root / "two", small_disk)
    assert os.listdir(small_disk) == []
    gpufs_here("cp", root / "one", small_disk)


def test_a_destination_that_is_a_mountpoint(small: GpufsMount, root: Path, host: Path, small_disk: Path) -> None:
    """The space behind it counts, not that of the directory above it, which is on another file system."""
    (root / "model").mkdir()
    (root / "model" / "file").write_bytes(noise(20 * MIB))
    refused("20.0 MiB", str(small_disk), "-rT", root / "model", small_disk)
    assert os.listdir(small_disk) == []
    larger = small_disk / "model"
    larger.mkdir()
    run("mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", larger)
    try:
        gpufs_here("sync", root / "model", larger)
        gpufs_here("cp", "-r", root / "model", small_disk)
        assert_same((larger / "file").read_bytes(), noise(20 * MIB))
    finally:
        run("umount", larger)
    (host / "tree" / "gpu0").mkdir(parents=True)
    (host / "tree" / "gpu0" / "file").write_bytes(b"of a mount")
    gpufs_here("cp", "-rT", host / "tree", small.path)
    assert (small.device / "file").read_bytes() == b"of a mount"


def test_the_root_of_a_mount_says_where_files_go(shared_mount: GpufsMount, host: Path) -> None:
    text = (shared_mount.path / "README").read_text()
    assert len(text) == (shared_mount.path / "README").stat().st_size
    for name in os.listdir(shared_mount.path):
        assert (f"{name}/" in text) == name.startswith(("gpu", "backing"))
    (host / "file").write_bytes(b"words")
    for words in (("file", shared_mount.path), ("-r", ".", shared_mount.path / "gpu9")):
        done = gpufs("cp", *words, cwd=host, check=False)
        assert done.returncode == 1
        assert "README" in done.stderr
