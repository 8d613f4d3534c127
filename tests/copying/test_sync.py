"""`gpufs sync`: a directory becomes the copy of another, again and again."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cli import fails_here, gpufs_here, user_gpufs
from support.cli import gpufs as gpufs_command
from support.data import KIB, MIB, contents, noise
from support.mounting import Mounter
from support.processes import NOBODY, PATIENCE, plain_user, run, wait_until

import gpufs

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


def test_the_source_is_a_directory_also_by_a_link(root: Path, host: Path, source: Path) -> None:
    (root / "name").symlink_to(source)
    assert sync(root / "name", root / "copy") == (3, 0, [])
    assert same(source, root / "copy")
    assert sync(f"{source}/", f"{root}/copy/") == (0, 3, [])
    assert "ot a directory" in gpufs_here("sync", root / "copy/one", host / "back", check=False).stderr


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


# ---- whether a copy is the same ----


def test_a_change_right_after_a_copy_is_seen(root: Path, host: Path) -> None:
    """Of files that were written at this moment, the time may stay the same with the next write."""
    (host / "source").mkdir()
    for number in range(20):
        (host / "source/model").write_bytes(b"%03d" % number)
        gpufs.copy_tree(host / "source", root / "copy", update=True)
        assert (root / "copy/model").read_bytes() == b"%03d" % number


def test_a_mode_alone_is_passed_on(root: Path, source: Path) -> None:
    copy = root / "copy"
    sync(source, copy)
    (source / "one").chmod(0o640)
    (source / "deep").chmod(0o750)
    before = (copy / "one").stat().st_ino
    assert sync(source, copy) == (0, 3, [])
    assert same(source, copy)
    assert (copy / "one").stat().st_ino == before


@pytest.mark.parametrize("writes", ["source", "copy"])
def test_a_file_that_a_program_writes_in_memory_is_copied(root: Path, writes: str) -> None:
    """Its time changes when the program ends."""
    (root / "source").mkdir()
    (root / "source/model").write_bytes(noise(3 * MIB))
    assert sync(root / "source", root / "copy")[0] == 1
    with gpufs.attach(root / writes / "model", "r+") as array:
        array.torch()[:3].copy_(torch.tensor(list(b"new"), dtype=torch.uint8))
        assert sync(root / "source", root / "copy")[0] == 1
        assert (root / "source/model").read_bytes() == (root / "copy/model").read_bytes()


# ---- existing files are replaced ----


@pytest.mark.complains
def test_a_model_in_use_is_replaced(root: Path, host: Path) -> None:
    """The program keeps the version that it has. `gpufs cp` says who has it."""
    (host / "source").mkdir()
    (host / "source/model").write_bytes(noise(3 * MIB))
    sync(host / "source", root / "copy")
    with gpufs.attach(root / "copy/model") as array:
        (host / "source/model").write_bytes(noise(3 * MIB)[::-1])
        text = fails_here(1, "cp", host / "source/model", root / "copy")
        assert f"({os.getpid()})" in text
        assert "gpufs sync" in text
        assert "gpufs replace" in text
        assert sync(host / "source", root / "copy")[0] == 1
        assert array.tobytes() == noise(3 * MIB)
    assert (root / "copy/model").read_bytes() == noise(3 * MIB)[::-1]


@pytest.mark.skipif(os.geteuid() != 0, reason="runs as another user")
def test_a_link_to_a_directory_becomes_the_directory(root: Path, host: Path) -> None:
    """Also if it leads to files that are the same."""
    source, copy = host / "source", root / "copy"
    (source / "d").mkdir(parents=True)
    (source / "d/file").write_bytes(b"content")
    assert sync(source / "d", root / "other") == (1, 0, [])
    copy.mkdir()
    (copy / "d").symlink_to("../other")
    assert sync(source, copy) == (1, 0, [])
    assert same(source, copy)


def test_files_and_directories_without_write_permission(root: Path) -> None:
    with plain_user() as environment:
        command, environment = user_gpufs(environment)
        user: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": [], "env": environment}
        top, copy = Path(environment["HOME"]), root / "copy"
        root.chmod(0o777)
        for number in (1, 2):
            script = f"mkdir -p s/d; chmod 755 s/d; rm -f s/f s/d/*; echo {number} > s/f; echo {number} > s/d/f{number}"
            run("sh", "-c", f"{script}; chmod 444 s/f s/d/*; chmod 555 s/d", cwd=top, **user)
            run(*command, "sync", "--delete", top / "s", copy, **user)
            assert same(top / "s", copy)


def test_what_another_version_keeps(root: Path, source: Path) -> None:
    copy = root / "copy"
    sync(source, copy)
    gpufs_here("pin", copy / "one")
    (source / "one").write_bytes(b"other")
    assert sync(source, copy)[0] == 1
    assert os.listxattr(copy / "one") == ["user.gpufs-pinned"]


def test_space_for_two_versions(mount: Mounter, host: Path) -> None:
    """One file after the other is replaced where that fits; else nothing is, unless files are overwritten."""
    mounted, source = mount(memory=32 * MIB), host / "source"
    source.mkdir()
    copy = mounted.device / "copy"
    for name, size, words, code in (
        ("one", 20, (), 0),
        ("one", 20, (), 1),
        ("one", 20, ("--inplace",), 0),
        ("parts", 10, ("--delete",), 0),
        ("parts", 10, (), 0),
    ):
        parts = ["one"] if name == "one" else ["part1", "part2"]
        before = contents(copy) if copy.exists() else {}
        for path in source.iterdir():
            path.unlink()
        for part in parts:
            (source / part).write_bytes(os.urandom(MIB) * size)
        done = gpufs_here("sync", *words, source, copy, check=False)
        assert done.returncode == code, done
        assert contents(copy) == (before if code else contents(source))
        assert ("--inplace" in done.stderr) == bool(code)


def test_an_old_version_that_may_be_parked_makes_space(mount: Mounter, host: Path) -> None:
    mounted, source = mount("--host-memory=64M", "--evict", memory=32 * MIB), host / "source"
    source.mkdir()
    for seed in (1, 2):
        (source / "model").write_bytes(noise(20 * MIB)[:: 3 - 2 * seed])
        gpufs_here("sync", source, mounted.device / "copy")
        assert contents(mounted.device / "copy") == contents(source)


# ---- which files ----


def test_a_pattern_that_matches_nothing_is_reported(root: Path, source: Path) -> None:
    sync(source, root / "copy")
    done = gpufs_here("sync", "--delete", "--exclude", "logs", "--exclude", "deep/", source, root / "copy")
    assert "logs" in done.stderr
    assert "deep" not in done.stderr


def test_parts_of_downloads_stay(root: Path, source: Path) -> None:
    """--partial goes on with them."""
    copy = root / "copy"
    sync(source, copy)
    for name in (".one.gpufs-part", ".gone.gpufs-part"):
        (copy / name).touch()
    assert sync("--delete", source, copy)[2] == [f"{copy}/.gone.gpufs-part"]


# ---- what it prints and leaves ----


def test_lines_do_not_mix(root: Path, host: Path) -> None:
    (host / "many").mkdir()
    for number in range(300):
        (host / f"many/{number}").touch()
    for words in (("-n",), ("-v",)):
        lines = gpufs_command("sync", "-j16", *words, host / "many", root / "copy").stdout.splitlines()
        assert sorted(line.partition(" -> ")[0] for line in lines) == sorted(map(str, (host / "many").iterdir()))


def test_a_cancelled_copy_leaves_nothing_open(root: Path, host: Path) -> None:
    for number in range(60):
        (host / f"source/{number}").mkdir(parents=True)
        (host / f"source/{number}/file").write_bytes(noise(MIB))

    def opened() -> list[str]:
        links = [os.path.join("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd")]
        targets = [os.readlink(link) for link in links if os.path.islink(link)]
        return [target for target in targets if target.startswith((str(host), str(root)))]

    for _ in range(3):
        _copy_and_cancel(host / "source", root / "copy")
    wait_until(lambda: not opened(), PATIENCE, "the end of the copy")


def _copy_and_cancel(source: Path, copy: Path) -> None:
    stop = gpufs.Cancellation()
    with pytest.raises(gpufs.CopyError):
        gpufs.copy_tree(source, copy, jobs=1, cancel=stop, progress=lambda _: stop.cancel())
