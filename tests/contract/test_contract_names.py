"""Names and the tree: any name, links, renames of every kind, removal, directories that change while they are read."""

from __future__ import annotations

import os
import stat
from errno import (
    EINVAL,
    ENOENT,
    EXDEV,
)
from pathlib import Path

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


# ---- rename ----


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


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", [4_000, pytest.param(100_000, marks=pytest.mark.slow)])
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
    with DirectoryStream(root) as stream, DirectoryStream(root) as other:
        order, positions = [], []
        while True:
            positions.append(stream.tell())
            name = stream.read()
            if name is None:
                break
            order.append(name)
            assert other.read() == name  # of a listing with its own position
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
