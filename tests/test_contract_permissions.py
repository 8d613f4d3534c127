"""Permissions: mode bits for plain users, umask, set-id bits, sticky and set-gid directories, ownership."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from errno import EACCES, EPERM
from pathlib import Path

import pytest
from support import linux
from support.processes import NOBODY, OTHER, as_nobody, as_other, errno_of, in_child, run

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="acts as several users, which takes root")


def mode(path: Path) -> int:
    return stat.S_IMODE(os.lstat(path).st_mode)


def test_mode_bits_decide_for_plain_users(root: Path) -> None:
    file = root / "file"
    file.write_bytes(b"secret")
    for bits, may_read, may_write in (
        (0o600, False, False),
        (0o604, True, False),
        (0o602, False, True),
        (0o606, True, True),
    ):
        file.chmod(bits)
        assert as_nobody(lambda: errno_of(os.open, file, os.O_RDONLY)) == (0 if may_read else EACCES)
        assert as_nobody(lambda: errno_of(os.open, file, os.O_WRONLY)) == (0 if may_write else EACCES)
        assert as_nobody(lambda: os.access(file, os.R_OK)) == may_read
        assert as_nobody(lambda: os.access(file, os.W_OK)) == may_write
        assert as_nobody(lambda: errno_of(os.truncate, file, 6)) == (0 if may_write else EACCES)


def test_owners_are_changed_by_those_who_may(root: Path) -> None:
    file = root / "file"
    file.touch()
    os.chown(file, NOBODY, 1234)
    assert (file.stat().st_uid, file.stat().st_gid) == (NOBODY, 1234)
    os.chown(file, -1, 77)
    assert (file.stat().st_uid, file.stat().st_gid) == (NOBODY, 77)
    os.chown(file, -1, -1)
    assert as_nobody(lambda: errno_of(os.chown, file, OTHER, -1)) == EPERM
    assert as_nobody(lambda: errno_of(os.chown, file, -1, OTHER)) == EPERM
    assert as_nobody(lambda: errno_of(os.chown, file, -1, NOBODY)) == 0  # a group of one's own
    assert in_child(lambda: errno_of(os.chown, file, -1, 88), uid=NOBODY, gid=NOBODY, groups=[88]) == 0
    assert file.stat().st_gid == 88
    assert as_other(lambda: errno_of(os.chown, file, OTHER, -1)) == EPERM
    (root / "link").symlink_to("file")
    os.lchown(root / "link", 5, 6)
    assert (os.lstat(root / "link").st_uid, file.stat().st_uid) == (5, NOBODY)


def test_set_gid_without_group_execution_stays_for_members_of_the_group(root: Path) -> None:
    file = root / "file"
    actions: dict[str, Callable[[], object]] = {
        "write": lambda: os.write(os.open(file, os.O_WRONLY), b"x"),
        "truncate": lambda: os.truncate(file, 3),
        "fallocate": lambda: linux.fallocate(os.open(file, os.O_WRONLY), 0, 0, 9000),
    }
    file.touch()
    os.chown(file, OTHER, OTHER)
    for name, action in actions.items():
        for groups, left in (([OTHER], 0o2767), ([], 0o767)):
            file.write_bytes(b"content")
            file.chmod(0o2767)
            in_child(action, uid=NOBODY, gid=NOBODY, groups=groups)
            assert mode(file) == left, (name, groups)


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


def test_a_new_owner_clears_set_id_bits(root: Path) -> None:
    file = root / "file"
    file.touch()
    for bits, left in ((0o6755, 0o755), (0o2745, 0o2745), (0o4711, 0o711)):
        os.chown(file, 0, 0)
        file.chmod(bits)
        os.chown(file, NOBODY, NOBODY)
        assert mode(file) == left, oct(bits)


def test_files_inherit_the_group_of_a_set_gid_directory(root: Path) -> None:
    shared = root / "shared"
    shared.mkdir()
    os.chown(shared, 0, 4321)
    shared.chmod(0o2777)

    def make() -> None:
        (shared / "file").touch()
        (shared / "dir").mkdir(0o755)
        os.symlink("x", shared / "link")

    as_nobody(make)
    assert (shared / "file").stat().st_gid == 4321
    assert (shared / "dir").stat().st_gid == 4321
    assert os.lstat(shared / "link").st_gid == 4321
    assert mode(shared / "dir") & 0o2000
    assert not mode(shared / "file") & 0o2000
    as_nobody(lambda: (shared / "dir" / "deeper").mkdir())
    assert (shared / "dir" / "deeper").stat().st_gid == 4321
    as_nobody(lambda: os.close(os.open(shared / "program", os.O_CREAT | os.O_WRONLY, 0o2755)))
    assert mode(shared / "program") == 0o755  # not a member of the group: no set-gid program


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
