"""Directories below backing/ with more in them than the daemon has descriptors, and what inodes keep meanwhile."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.mounting import GpufsMount, Session
from support.processes import Snapshot, errno_of, run

from gpufs.fs import host_inodes

pytestmark = [pytest.mark.driver, pytest.mark.skipif(os.geteuid() != 0, reason="mounts for several users")]

FILES = 1000
LIMIT = 256
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


def walk(crowd: Path) -> None:
    """Looks at all: whatever the kernel knew before has no descriptor afterwards, unless it is in use."""
    assert len([entry.stat() for entry in os.scandir(crowd)]) == FILES


def test_several_walk_at_once(short: tuple[Path, Path], tmp_path: Path) -> None:
    shown, crowd = short
    (tmp_path / "kept").write_text("kept")
    with (shown / "kept").open("r+") as kept:
        os.unlink(shown / "kept")
        command = [sys.executable, "-c", WALK, str(crowd), str(FILES)]
        walkers = [subprocess.Popen(command) for _ in range(2)]
        run("cp", "-r", crowd, shown / "copy")
        run("tar", "-cf", "/dev/null", "-C", crowd, ".")
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
    names = [f"d{n // 20}/e{n}/f" for n in range(400)]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(name)
    for _ in range(2):
        assert sorted(path.relative_to(shown).as_posix() for path in shown.rglob("f")) == sorted(names)
        assert all((shown / name).read_text() == name for name in names)
    shutil.rmtree(shown / "d0")
    assert not (tmp_path / "d0").exists()


def test_what_lost_its_name_stays(short: tuple[Path, Path], tmp_path: Path) -> None:
    """O_PATH descriptors, of which the daemon hears nothing, keep an inode through the changes of this mount."""
    shown, crowd = short
    for name in ("removed", "moved", "over", "second", "first"):
        (tmp_path / name).write_text(name)
    os.link(tmp_path / "first", tmp_path / "linked")
    (tmp_path / "gone").mkdir()
    names = ("removed", "moved", "over", "second", "first", "gone")
    held = {name: os.open(shown / name, os.O_PATH) for name in names}
    try:
        walk(crowd)
        os.unlink(shown / "removed")
        os.rename(shown / "moved", shown / "over")
        os.unlink(shown / "first")
        os.rmdir(shown / "gone")
        walk(crowd)
        links = {name: os.fstat(fd).st_nlink for name, fd in held.items()}
        assert links == {"removed": 0, "moved": 1, "over": 0, "second": 1, "first": 1, "gone": 0}
        assert Path(f"/proc/self/fd/{held['moved']}").read_text() == "moved"
        assert (shown / "linked").read_text() == "first"
    finally:
        for fd in held.values():
            os.close(fd)


def test_a_directory_that_moves(short: tuple[Path, Path], tmp_path: Path) -> None:
    """A program stays in its directory, also where that and one above it get other names meanwhile."""
    shown, crowd = short
    (tmp_path / "a" / "b" / "c").mkdir(parents=True)
    (tmp_path / "a" / "b" / "c" / "file").write_text("text")
    inside = os.open(shown / "a" / "b" / "c", os.O_PATH)
    try:
        walk(crowd)
        os.rename(shown / "a" / "b", shown / "d")
        os.rename(shown / "a", shown / "e")
        walk(crowd)
        for _ in range(2):
            assert os.listdir(f"/proc/self/fd/{inside}") == ["file"]
            fd = os.open("file", os.O_RDONLY, dir_fd=inside)
            assert os.read(fd, 10) == b"text"
            os.close(fd)
            os.mkdir("new", dir_fd=inside)
            assert (tmp_path / "d" / "c" / "new").is_dir()
            os.rmdir("new", dir_fd=inside)
            walk(crowd)
    finally:
        os.close(inside)


def test_changes_on_the_host(short: tuple[Path, Path], tmp_path: Path) -> None:
    """Names are looked up anew; who has a descriptor without a name (O_PATH) of what moved there meanwhile, ESTALE."""
    shown, crowd = short
    for name in ("moved", "replaced", "removed", "becomes"):
        (tmp_path / name).write_text(name)
    held = {name: os.open(shown / name, os.O_PATH) for name in ("moved", "replaced")}
    try:
        assert (shown / "becomes").stat().st_size == 7
        walk(crowd)
        os.rename(tmp_path / "moved", tmp_path / "to")
        os.unlink(tmp_path / "replaced")
        (tmp_path / "replaced").write_text("by another")
        os.unlink(tmp_path / "removed")
        os.unlink(tmp_path / "becomes")
        (tmp_path / "becomes").mkdir()
        assert errno_of(os.open, shown / "moved", os.O_RDONLY) == errno.ENOENT
        assert errno_of(os.open, f"/proc/self/fd/{held['moved']}", os.O_RDONLY) == errno.ESTALE
        assert (shown / "to").read_text() == "moved"
        assert (shown / "replaced").read_text() == "by another"
        assert errno_of(os.open, shown / "removed", os.O_RDONLY) == errno.ENOENT
        fd = os.open(shown / "becomes", os.O_RDONLY)
        assert os.listdir(fd) == []
        os.close(fd)
        assert os.fstat(held["moved"]).st_size == 5  # somebody has asked for it by its new name
        assert errno_of(os.open, f"/proc/self/fd/{held['replaced']}", os.O_RDONLY) == errno.ESTALE
    finally:
        for fd in held.values():
            os.close(fd)


def test_what_is_removed_on_the_host(short: tuple[Path, Path], tmp_path: Path) -> None:
    """It is not found by its name any more, and keeps its descriptor no longer than the kernel its name."""
    shown, _ = short
    for n in range(2 * LIMIT):
        name = f"file{n}"
        (tmp_path / name).write_text(name)
        assert (shown / name).read_text() == name
        (tmp_path / name).unlink()
    assert os.listdir(shown) == []


def test_many_open_files(short: tuple[Path, Path]) -> None:
    """They leave fewer descriptors for inodes that nobody uses, not none for others."""
    _, crowd = short
    names = [f"file{n:04}" for n in range(24)]
    files = [(crowd / name).open() for name in names]
    try:
        walk(crowd)
        assert [file.read() for file in files] == names
    finally:
        for file in files:
            file.close()


def test_the_kernel_is_asked_to_forget_very_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once each, and no directory nor what is in use."""
    monkeypatch.setattr(host_inodes, "_MANY", 4)
    asked: list[bytes] = []
    share = host_inodes.Backing("data", str(tmp_path), read_only=False)
    inodes = host_inodes.HostInodes({}, 0, lambda: 0, lambda parent, name: asked.append(name))

    def meet(name: str) -> host_inodes.BackingNode:
        fd, found = host_inodes.look_up(top, name.encode())
        node = inodes.meet(fd, found, share, None)
        inodes.set_entry(node, (1, name.encode()))
        return node

    (tmp_path / "directory").mkdir()
    (tmp_path / "used").touch()
    for n in range(100):
        (tmp_path / f"file{n}").touch()
    top = os.open(tmp_path, os.O_PATH)
    try:
        meet("directory")
        meet("used").users = 1
        for n in range(100):
            meet(f"file{n}")
    finally:
        inodes.close()
        os.close(top)
    assert len(asked) > 50
    assert len(set(asked)) == len(asked)
    assert set(asked) <= {f"file{n}".encode() for n in range(100)}
