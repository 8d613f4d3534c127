"""Directories below backing/ with more files than the daemon has descriptors."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.mounting import GpufsMount, Session
from support.processes import Snapshot, run

pytestmark = [pytest.mark.driver, pytest.mark.skipif(os.geteuid() != 0, reason="mounts for several users")]

FILES = 600
LIMIT = 512
WALK = """
import os, sys
seen = set()
for entry in os.scandir(sys.argv[1]):
    assert entry.stat(follow_symlinks=False).st_size == len(entry.name), entry
    os.getxattr(entry.path, "user.name") if entry.name[-2:] == "00" else None
    with open(entry.path) as file:
        assert file.read() == entry.name
    seen.add(entry.name)
assert len(seen) == int(sys.argv[2]), len(seen)
"""


@pytest.fixture(scope="module")
def crowd(session: Session, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One directory with more files than LIMIT."""
    path = tmp_path_factory.mktemp("crowd")
    for n in range(FILES):
        name = f"file{n:04}"
        (path / name).write_text(name)
        if name.endswith("00"):
            os.setxattr(path / name, "user.name", name.encode())
    return path


@pytest.fixture
def short(session: Session, driver: str, tmp_path: Path, crowd: Path) -> Iterator[tuple[Path, Path]]:
    """A mount of few descriptors: an empty directory as it shows it, and the crowd; `tmp_path` is it on the host."""
    words = ["--backing", f"data={tmp_path}", "--backing", f"crowd={crowd}"]
    with GpufsMount(session, *words, driver=driver, allow_other=True) as mount:
        resource.prlimit(mount.pid, resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
        assert Snapshot.of(mount.pid).descriptors < LIMIT // 2
        yield mount.path / "backing" / "data", mount.path / "backing" / "crowd"


def test_more_files_than_descriptors(short: tuple[Path, Path], tmp_path: Path) -> None:
    shown, crowd = short
    (tmp_path / "kept").write_text("kept")
    with (shown / "kept").open("r+") as kept:
        os.unlink(shown / "kept")
        command = [sys.executable, "-c", WALK, str(crowd), str(FILES)]
        walkers = [subprocess.Popen(command) for _ in range(2)]
        run("cp", "-r", crowd, shown / "copy")
        assert [walker.wait() for walker in walkers] == [0, 0]
        assert kept.read() == "kept"
        assert os.fstat(kept.fileno()).st_nlink == 0
        os.ftruncate(kept.fileno(), 2)
        assert os.fstat(kept.fileno()).st_size == 2
    run("diff", "-r", crowd, tmp_path / "copy")
    run("rm", "-r", shown / "copy")
    assert os.listdir(tmp_path) == []


def test_more_directories_than_descriptors(short: tuple[Path, Path], tmp_path: Path) -> None:
    shown, _ = short
    names = [f"d{n // 20}/e{n}/f" for n in range(600)]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(name)
    for _ in range(2):
        assert sorted(path.relative_to(shown).as_posix() for path in shown.rglob("f")) == sorted(names)
        assert all((shown / name).read_text() == name for name in names)
    shutil.rmtree(shown / "d0")
    assert not (tmp_path / "d0").exists()


def test_descriptors_of_files_removed_on_the_host_are_closed(short: tuple[Path, Path], tmp_path: Path) -> None:
    """The daemon keeps a descriptor only while the kernel knows the name."""
    shown, _ = short
    for n in range(2 * LIMIT):
        name = f"file{n}"
        (tmp_path / name).write_text(name)
        assert (shown / name).read_text() == name
        (tmp_path / name).unlink()
    assert os.listdir(shown) == []
