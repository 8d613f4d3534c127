"""Names are found and opened without the control plane; listings of a directory."""

from __future__ import annotations

import os
from errno import EACCES, ENOENT
from pathlib import Path

import pytest
from support import linux
from support.mounting import GpufsMount, Mounter
from support.processes import as_nobody, errno_of

_USERS = pytest.mark.skipif(os.geteuid() != 0, reason="acts as several users, which takes root")


def relayed(mounted: GpufsMount, operation: str) -> int:
    """How many of these requests the control plane has got."""
    found = mounted.status()["statistics"]["operations"].get(operation, {"relayed": 0})
    return int(found["relayed"])


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
