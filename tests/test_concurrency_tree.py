"""Many processes on one tree of names: every operation has one winner, and the tree is whole afterwards."""

from __future__ import annotations

import os
import random
import shutil
import stat
from pathlib import Path

from support.mounting import GpufsMount, Mounter
from support.processes import start_children, wait_children, wait_until


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
    table = mounted.status()["statistics"]["table"]
    return table["inodes"], table["open_files"], table["orphans"], table["metadata_bytes"]


def test_racing_changes_of_names_leave_a_consistent_tree_and_nothing_in_the_tables(mount: Mounter) -> None:
    """Four processes do everything to the same few names; only the errors that such races allow come up."""
    mounted = mount("--entry-timeout", "0")
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
