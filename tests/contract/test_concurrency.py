"""Many processes on one file, and on one tree of names: nothing is lost, torn that Linux promises whole, or hangs."""

from __future__ import annotations

import os
import random
import shutil
import stat
import time
from pathlib import Path

import pytest
from support.data import GRANULE, MIB, assert_same, consists_of, noise, read_all
from support.mounting import GpufsMount, Mounter
from support.processes import PATIENCE, start_children, wait_children, wait_until

pytestmark = pytest.mark.driver


@pytest.mark.parametrize("block", [3000, 4096, 60_000, MIB])
@pytest.mark.parametrize("grown", [False, True])
def test_writers_of_different_ranges_do_not_disturb_each_other(root: Path, block: int, grown: bool) -> None:
    """Block i belongs to writer i mod 6. Grown: the file starts empty, so that every write may grow it."""
    writers, rounds = 6, max(3, min(24, 12 * MIB // 6 // block))
    size = writers * rounds * block
    file = root / "file"
    file.touch()
    if not grown:
        os.truncate(file, size)

    def write(index: int) -> None:
        fd = os.open(file, os.O_WRONLY)
        order = list(range(rounds))
        random.Random(index).shuffle(order)
        for number in order:
            assert os.pwrite(fd, noise(block, number * writers + index), (number * writers + index) * block) == block
        os.close(fd)

    wait_children(start_children(writers, write))
    assert file.stat().st_size == size
    with open(file, "rb", buffering=0) as stream:
        for number in range(writers * rounds):
            assert_same(stream.read(block), noise(block, number), f"block {number}")


def test_a_write_is_seen_by_all_once_it_has_returned(root: Path) -> None:
    """Processes pass a token through pipes. Each one reads what the one before has written."""
    (root / "file").write_bytes(bytes(3 * GRANULE))
    count, rounds = 4, 60
    pipes = [os.pipe() for _ in range(count)]

    def work(index: int) -> None:
        fd = os.open(root / "file", os.O_RDWR)
        for number in range(rounds):
            if (index, number) != (0, 0):
                os.read(pipes[index][0], 1)
                turn = number * count + index - 1
                at = turn * 54_321 % (2 * GRANULE)
                assert os.pread(fd, 100_000, at) == noise(100_000, turn)
            turn = number * count + index
            os.pwrite(fd, noise(100_000, turn), turn * 54_321 % (2 * GRANULE))
            os.write(pipes[(index + 1) % count][1], b"x")

    wait_children(start_children(count, work))
    for pair in pipes:
        for fd in pair:
            os.close(fd)


def test_a_reader_of_a_growing_file_sees_no_zeros(root: Path) -> None:
    """A reader that follows a growing file never sees zeros where data is coming, and never sees it shrink."""
    (root / "log").touch()
    total = 6 * MIB

    def append(_: int) -> None:
        fd = os.open(root / "log", os.O_WRONLY | os.O_APPEND)
        done = 0
        while done < total:
            done += os.write(fd, b"x" * min(total - done, 1 + done * 7919 % 150_000))

    def follow(_: int) -> None:
        fd = os.open(root / "log", os.O_RDONLY)
        at = 0
        deadline = time.monotonic() + PATIENCE
        while at < total:
            assert time.monotonic() < deadline
            assert os.fstat(fd).st_size >= at
            data = os.pread(fd, 300_000, at)
            assert data.count(b"x") == len(data)
            at += len(data)

    wait_children(start_children(1, append) + start_children(3, follow))


def test_truncation_during_reads_and_writes_leaves_only_data_and_zeros(root: Path) -> None:
    file = root / "file"
    file.write_bytes(b"x" * 5 * MIB)
    stop = root / "stop"

    def cut(_: int) -> None:
        fd = os.open(file, os.O_RDWR)
        chance = random.Random(1)
        for _ in range(200):
            os.ftruncate(fd, chance.randrange(5 * MIB))
            os.ftruncate(fd, 5 * MIB)
        stop.touch()

    def write(index: int) -> None:
        fd = os.open(file, os.O_WRONLY)
        chance = random.Random(index)
        while not stop.exists():
            at = chance.randrange(4 * MIB)
            assert os.pwrite(fd, b"x" * 300_000, at) == 300_000

    def read(index: int) -> None:
        fd = os.open(file, os.O_RDONLY)
        while not stop.exists():
            assert consists_of(os.pread(fd, 6 * MIB, 0), b"\0x")

    wait_children(start_children(1, cut) + start_children(2, write) + start_children(2, read))
    assert consists_of(read_all(file), b"\0x")


def test_copies_in_opposite_directions_do_not_deadlock(root: Path) -> None:
    """Two files copied into each other at once, and into themselves: no order of locks may deadlock."""
    (root / "a").write_bytes(b"x" * 6 * MIB)
    (root / "b").write_bytes(b"x" * 6 * MIB)

    def copy(index: int) -> None:
        names = ("a", "b") if index % 2 else ("b", "a")
        source, target = (os.open(root / name, os.O_RDWR) for name in names)
        for _ in range(60):
            os.copy_file_range(source, target, 6 * MIB, 0, 0)
            os.copy_file_range(source, source, 2 * MIB, 0, 3 * MIB)
            os.ftruncate(target, 6 * MIB)

    wait_children(start_children(4, copy))
    assert consists_of(read_all(root / "a"), b"x")


def check_tree(root: Path) -> int:
    """Walks the tree: listings agree with lookups, link counts with what is there. Returns the number of names."""
    count = 0
    inodes: dict[int, list[os.stat_result]] = {}
    for folder, folders, files in os.walk(root):
        found = os.lstat(folder)
        assert found.st_nlink == 2 + sum(not os.path.islink(os.path.join(folder, x)) for x in folders)
        for name in folders + files:
            count += 1
            entry = os.lstat(os.path.join(folder, name))
            if stat.S_ISREG(entry.st_mode):
                inodes.setdefault(entry.st_ino, []).append(entry)
    for entries in inodes.values():
        assert {x.st_nlink for x in entries} == {len(entries)}
    return count


def in_table(mounted: GpufsMount) -> tuple[int, int, int, int]:
    """Inodes, open files, removed files that still have memory, and bytes of names and attributes."""
    gauges = mounted.stats()["gauges"]
    return gauges["inodes"], gauges["open_files"], gauges["removed_files"], gauges["metadata_bytes"]


def test_racing_changes_of_names_leave_a_consistent_tree_and_nothing_in_the_tables(mount: Mounter) -> None:
    """Four processes do everything to the same few names; only the errors that such races allow come up."""
    mounted = mount()
    place = mounted.device
    before = in_table(mounted)
    folders = [place / "one", place / "two", place / "one" / "three"]
    for folder in folders:
        folder.mkdir()

    def storm(index: int) -> None:
        chance = random.Random(index)
        allowed = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError)
        for step in range(500):
            here, there = (chance.choice(folders) / f"n{chance.randrange(6)}" for _ in range(2))
            try:
                match step % 10:
                    case 0 | 1:
                        here.write_bytes(b"x" * chance.randrange(5000))
                    case 2:
                        os.mkdir(here)
                    case 3:
                        os.rename(here, there)
                    case 4:
                        with here.open("rb") as file:
                            here.unlink()
                            assert not file.read().strip(b"x")
                    case 5:
                        os.link(here, there)
                    case 6:
                        os.symlink("somewhere", here)
                    case 7:
                        os.rmdir(here)
                    case 8:
                        assert not here.read_bytes().strip(b"x")
                    case 9:
                        with os.scandir(here.parent) as entries:
                            for entry in entries:
                                entry.stat(follow_symlinks=False)
            except allowed:
                pass
            except OSError as error:
                if error.errno not in (1, 22, 39, 17, 18):  # EPERM link of a directory, EINVAL, ENOTEMPTY
                    raise

    wait_children(start_children(4, storm))
    check_tree(place)
    for folder in folders[:2]:
        shutil.rmtree(folder)
    wait_until(lambda: in_table(mounted) == before, 30, "inodes, handles and their memory to be gone")
    mounted.close()


def test_racing_renames_never_make_a_directory_its_own_ancestor(root: Path) -> None:
    """No race of renames may make a directory its own ancestor, or lose one."""
    for number in range(6):
        (root / f"d{number}").mkdir()

    def move(index: int) -> None:
        chance = random.Random(index)
        for _ in range(300):
            paths = [Path(folder) for folder, _, _ in os.walk(root)][1:]
            if len(paths) < 2:
                continue
            source, target = chance.sample(paths, 2)
            try:
                os.rename(source, (target if chance.random() < 0.6 else root) / source.name)
            except OSError as error:
                assert error.errno in (2, 20, 22, 39, 17)  # noqa: PT017 - a race allows each of these

    wait_children(start_children(4, move))
    found = sorted(Path(folder).name for folder, _, _ in os.walk(root))[:-1]
    assert sorted(x for x in found if x.startswith("d")) == [f"d{n}" for n in range(6)]
    check_tree(root)
