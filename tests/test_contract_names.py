"""Names and the tree: any name, links, renames of every kind, removal, directories that change while they are read."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from errno import (
    EEXIST,
    EINVAL,
    ELOOP,
    ENAMETOOLONG,
    ENOENT,
    EXDEV,
)
from pathlib import Path
from typing import Any

import pytest
from support.linux import DirectoryStream
from support.processes import errno_of, shell, start_children, wait_children


def names(path: Path) -> list[str]:
    return sorted(os.listdir(path))


# ---- names ----


def test_any_byte_in_a_name(root: Path) -> None:
    base = os.fsencode(root)
    wanted = [bytes([byte]) for byte in range(1, 256) if byte not in b"/."]
    wanted += [b"...", b". .", b"new\nline", b"\xff\xfe", "größe".encode(), b"-rf", b"a" * 255, b"\x80" * 255]
    for name in wanted:
        with open(base + b"/" + name, "wb") as file:
            file.write(name)
    assert sorted(os.listdir(base)) == sorted(wanted)
    for name in wanted:
        with open(base + b"/" + name, "rb") as file:
            assert file.read() == name


def test_a_name_has_at_most_255_bytes(root: Path) -> None:
    fits, long = root / ("n" * 255), root / ("n" * 256)
    fits.touch()
    operations: list[Callable[[Path], Any]] = [
        lambda p: os.open(p, os.O_CREAT | os.O_WRONLY),
        os.mkdir,
        os.stat,
        os.unlink,
        os.rmdir,
        os.mkfifo,
        lambda p: os.symlink("x", p),
        lambda p: os.link(fits, p),
        lambda p: os.rename(fits, p),
        lambda p: os.rename(p, fits),
    ]
    for operation in operations:
        assert errno_of(operation, long) == ENAMETOOLONG
        assert errno_of(operation, root / ("n" * 1500)) == ENAMETOOLONG
    assert os.pathconf(root, "PC_NAME_MAX") == 255
    assert os.statvfs(root).f_namemax == 255
    assert names(root) == ["n" * 255]


# ---- hard links ----


def test_hard_links_are_one_file(root: Path) -> None:
    (root / "dir").mkdir()
    (root / "one").write_bytes(b"content")
    os.link(root / "one", root / "two")
    os.link(root / "two", root / "dir" / "three")
    found = [os.stat(root / name) for name in ("one", "two", "dir/three")]
    assert len({x.st_ino for x in found}) == 1
    assert [x.st_nlink for x in found] == [3, 3, 3]
    (root / "two").write_bytes(b"changed through two")
    assert (root / "dir" / "three").read_bytes() == b"changed through two"
    os.chmod(root / "one", 0o600)
    assert stat.S_IMODE(os.stat(root / "two").st_mode) == 0o600
    os.unlink(root / "one")
    assert os.stat(root / "two").st_nlink == 2
    os.unlink(root / "two")
    assert (root / "dir" / "three").read_bytes() == b"changed through two"
    assert os.stat(root / "dir" / "three").st_nlink == 1


# ---- symbolic links ----


def test_symbolic_links_hold_any_target(root: Path) -> None:
    (root / "dir").mkdir()
    (root / "dir" / "file").write_bytes(b"target")
    targets = ["file", "../dir/file", str(root / "dir" / "file"), "nowhere", "t" * 4095, "with space\n", "./././file"]
    for number, target in enumerate(targets):
        link = root / "dir" / f"link{number}"
        link.symlink_to(target)
        assert os.readlink(link) == target
        assert os.lstat(link).st_size == len(target)
        assert stat.S_ISLNK(os.lstat(link).st_mode)
        assert stat.S_IMODE(os.lstat(link).st_mode) == 0o777
    for number in (0, 1, 2, 6):
        assert (root / "dir" / f"link{number}").read_bytes() == b"target"
    os.symlink(b"\xff\xfe", os.fsencode(root / "bytes"))
    assert os.readlink(os.fsencode(root / "bytes")) == b"\xff\xfe"
    (root / "todir").symlink_to("dir")
    assert names(root / "todir") == names(root / "dir")
    (root / "loop1").symlink_to("loop2")
    (root / "loop2").symlink_to("loop1")
    assert errno_of(os.stat, root / "loop1") == ELOOP
    assert errno_of(os.symlink, "", root / "empty") == ENOENT
    assert errno_of(os.symlink, "t" * 4096, root / "long") == ENAMETOOLONG
    assert errno_of(os.symlink, "x", root / "dir") == EEXIST
    assert errno_of(os.readlink, root / "dir") == EINVAL
    os.unlink(root / "todir")
    assert (root / "dir" / "file").exists()


# ---- rename ----


def test_rename_replaces_a_file(root: Path) -> None:
    (root / "new").write_bytes(b"new")
    (root / "old").write_bytes(b"old")
    os.link(root / "old", root / "other")
    held = os.open(root / "old", os.O_RDWR)
    os.rename(root / "new", root / "old")
    assert (root / "old").read_bytes() == b"new"
    assert os.pread(held, 10, 0) == b"old"
    assert os.fstat(held).st_nlink == 1
    os.unlink(root / "other")
    assert os.fstat(held).st_nlink == 0
    os.pwrite(held, b"still", 0)
    assert os.pread(held, 10, 0) == b"still"
    os.close(held)
    assert names(root) == ["old"]


def test_rename_to_another_device_is_exdev(root: Path, on_gpufs: bool, request: pytest.FixtureRequest) -> None:
    (root / "file").touch()
    assert errno_of(os.rename, root / "file", "/proc/x") == EXDEV
    if on_gpufs:  # memory does not change its device by a change of name
        other = request.getfixturevalue("shared_mount").path / "gpu1"
        if other.exists():
            (root / "dir").mkdir()
            assert errno_of(os.rename, root / "file", other / "file") == EXDEV
            assert errno_of(os.rename, root / "dir", other / "dir") == EXDEV
            assert errno_of(os.link, root / "file", other / "file") == EXDEV


def test_rename_is_atomic_for_readers(root: Path) -> None:
    """A name that is replaced again and again always exists and shows one of its contents."""
    (root / "name").write_bytes(bytes([65]) * 5000)
    stop = root / "stop"

    def replace(index: int) -> None:
        for number in range(300):
            fresh = root / f"fresh{index}"
            fresh.write_bytes(bytes([65 + number % 26]) * 5000)
            os.rename(fresh, root / "name")
        if index == 0:
            stop.touch()

    def look(_: int) -> None:
        while not stop.exists():
            content = (root / "name").read_bytes()
            assert len(content) == 5000
            assert len(set(content)) == 1

    wait_children(start_children(2, replace) + start_children(2, look))
    assert names(root) == ["name", "stop"]


# ---- directories ----


def test_an_open_removed_directory_is_empty(root: Path) -> None:
    (root / "dir").mkdir()
    fd = os.open(root / "dir", os.O_RDONLY)
    (root / "dir").rmdir()
    assert os.fstat(fd).st_nlink == 0
    assert errno_of(os.open, "x", os.O_CREAT | os.O_WRONLY, dir_fd=fd) == ENOENT
    assert errno_of(os.mkdir, "x", dir_fd=fd) == ENOENT
    assert os.listdir(fd) == []
    (root / "dir").mkdir()
    assert os.fstat(fd).st_ino != (root / "dir").stat().st_ino
    os.close(fd)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", [10_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_a_directory_holds_many_entries(root: Path, count: int) -> None:
    fd = os.open(root, os.O_RDONLY)
    for number in range(count):
        os.mknod(f"entry-{number:06d}", 0o600 | stat.S_IFREG, dir_fd=fd)
    assert len(set(os.listdir(root))) == count
    for number in (0, 1, 500, count - 1):
        assert os.stat(f"entry-{number:06d}", dir_fd=fd).st_size == 0
    assert errno_of(os.stat, f"entry-{count:06d}", dir_fd=fd) == ENOENT
    for number in range(0, count, 2):
        os.unlink(f"entry-{number:06d}", dir_fd=fd)
    left = os.listdir(root)
    assert len(left) == count // 2
    assert all(int(x[6:]) % 2 for x in left)
    for name in left:
        os.unlink(name, dir_fd=fd)
    assert os.listdir(root) == []
    os.close(fd)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("depth", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_a_tree_may_be_deeper_than_any_path(root: Path, depth: int) -> None:
    """Only descriptors reach the bottom: no path is long enough."""
    fd = os.open(root, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=fd)
        below = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
    top = os.open(root, os.O_RDONLY)
    # Moving its top below its bottom is refused, however far apart they are.
    assert errno_of(os.rename, "d", "into", src_dir_fd=top, dst_dir_fd=fd) == EINVAL
    os.rename("d", "moved", src_dir_fd=top, dst_dir_fd=top)
    assert os.listdir(fd) == ["file"]
    os.close(fd)
    os.close(top)
    assert int(shell(f"find {root}/moved -printf x | wc -c", timeout=600).stdout) == depth + 1
    shell(f"rm -r {root}/moved", timeout=600)
    assert os.listdir(root) == []


def test_a_listing_has_every_remaining_name_once(root: Path) -> None:
    """Names that exist during the whole listing appear exactly once, while others are added and removed."""
    stays = {b"stays-%04d" % i for i in range(3000)}
    for name in stays:
        os.mknod(os.fsencode(root) + b"/" + name)
    for round_ in range(5):
        seen: list[bytes] = []
        with DirectoryStream(root) as stream:
            step = 0
            while (entry := stream.read()) is not None:
                seen.append(entry)
                step += 1
                if step % 50 == 0:
                    (root / f"new-{round_}-{step}").touch()
                if step % 70 == 0:
                    (root / f"new-{round_}-{step - step % 50}").unlink(missing_ok=True)
        for name in stays:
            assert seen.count(name) == 1
        assert len(seen) == len(set(seen))


@pytest.mark.parametrize("change", ["rename", "replace", "add"])
def test_a_listing_ends_while_names_are_added(root: Path, change: str) -> None:
    count = 400
    for number in range(count):
        os.mknod(root / f"entry{number}")
    seen: list[bytes] = []
    with DirectoryStream(root) as stream:
        while (name := stream.read()) is not None and len(seen) <= 2 * count:
            if name in (b".", b".."):
                continue
            path = os.fsencode(root) + b"/" + name
            if change == "rename":
                os.rename(path, root / "elsewhere")
                os.rename(root / "elsewhere", path)
            elif change == "replace":
                os.unlink(path)
                os.mknod(path)
            else:
                os.mknod(root / f"new{len(seen)}")
            seen.append(name)
    assert sorted(seen) == sorted(b"entry%d" % number for number in range(count))
    assert len(names(root)) == (2 * count if change == "add" else count)


def test_directory_positions_stay_valid(root: Path) -> None:
    for number in range(700):
        os.mknod(root / f"entry{number}")
    with DirectoryStream(root) as stream:
        order, positions = [], []
        while True:
            positions.append(stream.tell())
            name = stream.read()
            if name is None:
                break
            order.append(name)
        assert len(order) == 702
        for index in (0, 1, 2, 77, 350, 701):
            stream.seek(positions[index])
            assert stream.read() == order[index]
        stream.rewind()
        assert stream.read() == order[0]
        (root / "late").touch()
        stream.rewind()
        again = []
        while (name := stream.read()) is not None:
            again.append(name)
        assert b"late" in again
        assert len(again) == 703
