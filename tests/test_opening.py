"""Names are found and opened without the control plane, and nothing is left of files that are gone."""

from __future__ import annotations

import os
import signal
from errno import EACCES, ENOENT
from pathlib import Path

import pytest
from support import linux
from support.data import MIB
from support.mounting import GpufsMount, Mounter
from support.processes import as_nobody, errno_of, start_children, wait_children, wait_until

_USERS = pytest.mark.skipif(os.geteuid() != 0, reason="acts as several users, which takes root")


def relayed(mounted: GpufsMount, operation: str) -> int:
    """How many of these requests the control plane has got."""
    found = mounted.status()["statistics"]["operations"].get(operation, {"relayed": 0})
    return int(found["relayed"])


def in_table(mounted: GpufsMount) -> tuple[int, int, int, int]:
    """Inodes, open files, removed files that still have memory, and bytes of names and attributes."""
    table = mounted.status()["statistics"]["table"]
    return table["inodes"], table["open_files"], table["orphans"], table["metadata_bytes"]


def test_the_control_plane_hears_of_no_lookup_and_no_open(mount: Mounter) -> None:
    mounted = mount("--entry-timeout", "0")
    file = mounted.device / "file"
    file.write_bytes(b"content")
    counted = ("lookup", "open", "opendir", "releasedir", "flush", "release", "getattr", "forget")
    before = {operation: relayed(mounted, operation) for operation in counted}
    for number in range(200):
        assert file.read_bytes() == b"content"
        assert errno_of(os.stat, mounted.device / f"missing{number}") == ENOENT
        os.close(os.open(mounted.device, os.O_RDONLY | os.O_DIRECTORY))
    for operation in counted:  # the control plane opens the status itself
        assert relayed(mounted, operation) - before[operation] <= 20, operation
    mounted.close()


@_USERS
def test_a_mode_counts_from_the_next_open_on(root: Path) -> None:
    file = root / "file"
    file.write_bytes(b"content")
    file.chmod(0o644)
    assert as_nobody(lambda: errno_of(os.open, file, os.O_RDONLY)) == 0
    file.chmod(0o600)
    assert as_nobody(lambda: errno_of(os.open, file, os.O_RDONLY)) == EACCES
    root.chmod(0o700)
    assert as_nobody(lambda: errno_of(os.stat, file)) == EACCES
    assert as_nobody(lambda: errno_of(os.open, root, os.O_RDONLY)) == EACCES
    root.chmod(0o755)


def test_two_listings_of_a_directory_do_not_disturb_each_other(root: Path) -> None:
    wanted = sorted(b"entry%d" % number for number in range(900))
    for name in wanted:
        os.mknod(os.fsencode(root) + b"/" + name)
    found: list[list[bytes]] = [[], []]
    with linux.DirectoryStream(root) as one, linux.DirectoryStream(root) as other:
        for _ in range(300):
            found[0].append(one.read() or b"")
        while (entry := other.read()) is not None:
            found[1].append(entry)
        (root / "late").touch()
        other.rewind()
        assert other.read() is not None
        while (entry := one.read()) is not None:
            found[0].append(entry)
    for each in found:
        assert sorted(set(each) - {b".", b"..", b"late"}) == wanted
        assert len(each) == len(set(each))


def test_a_directory_that_was_never_read_can_be_synchronized(root: Path) -> None:
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(fd)
    os.mkdir("below", dir_fd=fd)
    assert os.listdir(fd) == ["below"]
    os.close(fd)


def test_racing_processes_leave_nothing_in_the_tables(mount: Mounter) -> None:
    """Create, open, link, rename, unlink and list the same names; at the end all inodes and handles are gone."""
    mounted = mount("--entry-timeout", "0")
    place = mounted.device
    before = in_table(mounted)

    def storm(index: int) -> None:
        for step in range(250):
            name, other = place / f"n{(step + index) % 5}", place / f"n{(step * 3 + index) % 5}"
            try:
                match step % 6:
                    case 0:
                        name.write_bytes(b"x" * 100)
                    case 1:
                        assert name.read_bytes() in (b"", b"x" * 100)
                    case 2:
                        os.rename(name, other)
                    case 3:
                        os.link(name, other)
                    case 4:
                        with name.open("rb") as file:
                            name.unlink()
                            assert file.read(100) in (b"", b"x" * 100)
                    case 5:
                        for entry in os.scandir(place):
                            entry.stat()
            except (FileNotFoundError, FileExistsError):
                pass

    wait_children(start_children(4, storm))
    for name in os.listdir(place):
        os.unlink(place / name)
    assert os.listdir(place) == []
    wait_until(lambda: in_table(mounted) == before, 30, "inodes, handles and their memory to be gone")
    mounted.close()


def test_files_of_a_killed_program_are_closed(mount: Mounter) -> None:
    mounted = mount()
    before = in_table(mounted)
    free = os.statvfs(mounted.device).f_bfree
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            for number in range(300):
                os.open(mounted.device / f"kept{number}", os.O_CREAT | os.O_RDWR)
                os.open(mounted.device, os.O_RDONLY | os.O_DIRECTORY)
            fd = os.open(mounted.device / "removed", os.O_CREAT | os.O_RDWR)
            os.write(fd, bytes(4 * MIB))
            os.unlink(mounted.device / "removed")
            os.write(tell, b"x")
            signal.pause()
        finally:
            os._exit(1)
    os.close(tell)
    assert os.read(ready, 1) == b"x"
    os.close(ready)
    assert in_table(mounted)[1] == before[1] + 301
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    wait_until(lambda: in_table(mounted)[1] == before[1], 30, "the files to be closed")
    for number in range(300):
        os.unlink(mounted.device / f"kept{number}")
    wait_until(lambda: in_table(mounted) == before, 30, "inodes and handles to be gone")
    wait_until(lambda: os.statvfs(mounted.device).f_bfree == free, 30, "the memory of the removed file")
    mounted.close()
