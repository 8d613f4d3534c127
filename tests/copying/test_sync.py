"""`gpufs sync`: a directory becomes the copy of another, again and again."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from support.cli import fails_here, gpufs_here
from support.data import KIB, contents, noise

pytestmark = pytest.mark.driver


def sync(*words: object) -> tuple[int, int, list[str]]:
    """Runs the command; how many files it has copied and skipped, and what it has deleted."""
    summary = json.loads(gpufs_here("sync", "--json", *words).stdout)
    return summary["files"], summary["skipped"], summary["deleted"]


@pytest.fixture
def source(host: Path) -> Path:
    path = host / "source"
    (path / "deep/er").mkdir(parents=True)
    for number, name in enumerate(["one", "deep/two", "deep/er/three"]):
        (path / name).write_bytes(noise(number * 40 * KIB + 1))
    (path / "link").symlink_to("one")
    return path


def same(source: Path, copy: Path) -> bool:
    """Whether two directories have the same files, links, contents, modes and times."""
    found = [sorted(path.relative_to(top) for path in top.rglob("*")) for top in (source, copy)]
    assert found[0] == found[1]
    for name in found[0]:
        one, other = (source / name).lstat(), (copy / name).lstat()
        assert one.st_mode == other.st_mode, name
        assert one.st_mtime_ns == other.st_mtime_ns or not (source / name).is_file(), name
    return contents(source) == contents(copy)


def test_there_again_and_back(root: Path, host: Path, source: Path) -> None:
    copy, back = root / "copy", host / "back"
    assert sync(source, copy) == (3, 0, [])
    assert same(source, copy)
    assert sync(f"{source}/", f"{copy}/") == (0, 3, [])
    (source / "one").write_bytes(noise(7))
    (source / "four").touch()
    assert sync(source, copy) == (2, 2, [])
    assert sync(copy, back) == (4, 0, [])
    assert same(source, back)
    (root / "name").symlink_to("copy")
    assert sync("--delete", root / "name", back) == (0, 4, [])
    assert "ot a directory" in gpufs_here("sync", copy / "one", back, check=False).stderr


def test_delete(root: Path, source: Path) -> None:
    """What the source does not have goes, and what --exclude names stays. Kinds may change."""
    copy = root / "copy"
    sync(source, copy)
    shutil.rmtree(source / "deep/er")
    (source / "deep/er").write_bytes(b"a file now")
    (source / "one").unlink()
    (source / "one").mkdir()
    (copy / "more/of it").mkdir(parents=True)
    (copy / "more/of it/file").touch()
    (copy / "kept.log").touch()
    (copy / "has a log").mkdir()
    (copy / "has a log/kept.log").touch()
    outside = root / "outside"
    outside.write_bytes(b"!")
    (copy / "leads out").symlink_to(outside)
    words = ("--delete", "--exclude", "*.log", source, copy)
    before = contents(copy)
    planned = sync("--dry-run", *words)[2]
    assert contents(copy) == before
    deleted = sync(*words)[2]
    names = ["deep/er/", "deep/er/three", "leads out", "more/", "more/of it/", "more/of it/file", "one"]
    assert sorted(planned) == sorted(deleted) == [f"{copy}/{name}" for name in names]
    assert sorted(path.name for path in copy.iterdir()) == ["deep", "has a log", "kept.log", "link", "one"]
    assert (copy / "deep/er").read_bytes() == b"a file now"
    assert outside.read_bytes() == b"!"


@pytest.mark.parametrize("case", ["missing", "unreadable", "inside", "around", "root of a mount", "a file"])
def test_nothing_is_deleted(case: str, root: Path, host: Path, source: Path) -> None:
    """Where the source is not known, or the copy is more than its copy."""
    copy = root / "copy"
    sync(source, copy)
    (copy / "extra").touch()
    before = contents(root)
    if case == "unreadable":
        (source / "link").unlink()
        (source / "link").symlink_to("nowhere")
    ends = {
        "missing": (host / "none", copy),
        "unreadable": ("-L", source, copy),
        "inside": (copy, copy / "deep"),
        "around": (copy / "deep", copy),
        "root of a mount": (source, root.parents[1]),
        "a file": (source / "one", copy),
    }
    done = gpufs_here("sync", "--delete", *ends[case], check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert contents(root) == before


def test_checksum(root: Path, source: Path) -> None:
    """Contents decide: not times, which do not show each change."""
    copy = root / "copy"
    sync(source, copy)
    file = source / "deep/two"
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    file.write_bytes(noise(40 * KIB)[::-1] + b"x")
    os.utime(file, ns=times)
    os.utime(source / "one")
    assert sync(source, copy) == (1, 2, [])
    assert sync("--checksum", source, copy) == (1, 2, [])
    assert file.read_bytes() == (copy / "deep/two").read_bytes()
    os.utime(source / "one")
    assert sync("--checksum", source, copy) == (0, 3, [])
    assert "needs -u" in fails_here(2, "cp", "--checksum", file, copy)
