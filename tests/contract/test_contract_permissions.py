"""Permissions: mode bits for plain users, umask, set-id bits, sticky and set-gid directories, ownership."""

from __future__ import annotations

import functools
import os
import stat
from collections.abc import Callable
from errno import EACCES, EPERM
from pathlib import Path

import pytest
from support import linux
from support.processes import NOBODY, OTHER, as_nobody, errno_of, run

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="acts as several users, which takes root")


def mode(path: Path) -> int:
    return stat.S_IMODE(os.lstat(path).st_mode)


def test_cleared_set_id_bits_are_visible_at_once(root: Path) -> None:
    """The kernel must not show a cached mode."""
    file = root / "file"

    def shown() -> int:
        return int(run("stat", "-c", "%a", file).stdout, 8)

    actions: dict[str, Callable[[], object]] = {
        "write": lambda: os.pwrite(os.open(file, os.O_WRONLY), b"x", 5),
        "fallocate": lambda: linux.fallocate(os.open(file, os.O_WRONLY), 0, 0, 9000),
        "punch": lambda: linux.fallocate(
            os.open(file, os.O_RDWR), linux.FALLOC_PUNCH_HOLE | linux.FALLOC_KEEP_SIZE, 0, 4096
        ),
        "truncate": lambda: os.truncate(file, 1),
        "O_TRUNC": lambda: os.open(file, os.O_WRONLY | os.O_TRUNC),
    }
    for name, action in actions.items():
        for bits in (0o4777, 0o6777, 0o2767):
            file.write_bytes(b"x" * 5000)
            file.chmod(bits)
            assert shown() == bits
            as_nobody(action)
            assert shown() == bits & 0o777, (name, oct(bits))
    file.chmod(0o6777)
    file.write_bytes(b"root may")
    assert shown() == 0o6777


def test_root_of_a_user_namespace_clears_set_gid(root: Path) -> None:
    """Every user can have all capabilities there."""
    if as_nobody(lambda: run("unshare", "-Ur", "true", check=False).returncode):
        pytest.skip("users may not create user namespaces")
    file = root / "file"
    for command in (["truncate", "-s", "1"], ["fallocate", "-l", "9000"]):
        file.write_bytes(b"x" * 5000)
        os.chown(file, NOBODY, OTHER)
        file.chmod(0o2666)
        as_nobody(functools.partial(run, "unshare", "-Ur", *command, str(file)))
        assert mode(file) == 0o666, command


def test_device_nodes_cannot_be_opened(root: Path, on_gpufs: bool) -> None:
    os.mknod(root / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    os.mknod(root / "disk", stat.S_IFBLK | 0o600, os.makedev(7, 200))
    found = os.stat(root / "null")
    assert stat.S_ISCHR(found.st_mode)
    assert found.st_rdev == os.makedev(1, 3)
    assert os.stat(root / "disk").st_rdev == os.makedev(7, 200)
    assert stat.S_ISBLK(os.stat(root / "disk").st_mode)
    assert as_nobody(lambda: errno_of(os.mknod, root / "mine", stat.S_IFCHR | 0o666, os.makedev(1, 3))) == EPERM
    # A mount that anybody's daemon may answer is nodev: the node is shown, and cannot be opened.
    assert errno_of(os.open, root / "null", os.O_WRONLY) == (EACCES if on_gpufs else 0)


def test_set_id_programs_have_no_effect(root: Path, on_gpufs: bool) -> None:
    """The mount is nosuid, because the daemon chooses the owners of its files."""
    program = root / "id"
    program.write_bytes(Path("/usr/bin/id").read_bytes())
    program.chmod(0o4755)
    found = as_nobody(lambda: run(program, "-u").stdout.strip())
    assert found == (str(NOBODY) if on_gpufs else "0")
