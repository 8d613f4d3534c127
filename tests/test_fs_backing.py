"""Directories of the host below backing/NAME."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.data import MIB, assert_same, directory, noise
from support.mounting import GPUFS, GpufsMount, Session
from support.processes import NOBODY, OTHER, as_nobody, errno_of, in_child, run

from gpufs import config
from gpufs.config import kinds

pytestmark = [pytest.mark.driver, pytest.mark.skipif(os.geteuid() != 0, reason="mounts for several users")]


@pytest.fixture(scope="module")
def host() -> Iterator[Path]:
    with directory("/var/tmp") as path:
        yield path


@pytest.fixture(scope="module")
def backed(session: Session, driver: str, host: Path) -> Iterator[GpufsMount]:
    words = ["--backing", f"data={host}", "--backing", f"fixed={host}:ro"]
    with GpufsMount(session, *words, driver=driver, allow_other=True) as mount:
        yield mount


@pytest.fixture
def both(backed: GpufsMount, host: Path) -> Iterator[tuple[Path, Path]]:
    """An empty directory, mode 777, as the mount shows it and as it is on the host."""
    name = Path(tempfile.mkdtemp(dir=host)).name
    (host / name).chmod(0o777)
    yield backed.path / "backing" / "data" / name, host / name
    shutil.rmtree(host / name)


def test_backing_directories_are_listed(backed: GpufsMount, host: Path) -> None:
    assert "backing" in os.listdir(backed.path)
    assert sorted(os.listdir(backed.path / "backing")) == ["data", "fixed"]
    shown, there = (backed.path / "backing" / "data").stat(), host.stat()
    assert (shown.st_mode, shown.st_uid, shown.st_nlink) == (there.st_mode, there.st_uid, there.st_nlink)
    assert errno_of(os.mkdir, backed.path / "backing" / "more") == errno.EPERM
    assert errno_of(os.rmdir, backed.path / "backing" / "data") != 0


def test_files_of_the_host_are_shown_with_their_attributes(both: tuple[Path, Path]) -> None:
    shown, there = both
    (there / "dir").mkdir()
    for n in range(300):
        (there / "dir" / f"file{n}").write_bytes(b"x" * n)
    (there / "link").symlink_to("dir/file7")
    os.mkfifo(there / "fifo")
    assert sorted(os.listdir(shown / "dir")) == sorted(os.listdir(there / "dir"))
    assert (shown / "link").read_bytes() == b"x" * 7
    for name in ("dir", "dir/file9", "link", "fifo"):
        ours, theirs = os.lstat(shown / name), os.lstat(there / name)
        for field in ("st_mode", "st_uid", "st_gid", "st_size", "st_blocks", "st_nlink", "st_mtime_ns", "st_ctime_ns"):
            assert getattr(ours, field) == getattr(theirs, field), (name, field)
    run("diff", "-r", shown / "dir", there / "dir")


def test_changes_reach_the_host(both: tuple[Path, Path]) -> None:
    shown, there = both
    (shown / "dir").mkdir(0o750)
    (shown / "dir" / "file").write_bytes(noise(3 * MIB))
    assert_same((there / "dir" / "file").read_bytes(), noise(3 * MIB))
    os.link(shown / "dir" / "file", shown / "second")
    assert (there / "second").stat().st_nlink == 2
    os.rename(shown / "dir" / "file", shown / "dir" / "moved")
    os.truncate(shown / "dir" / "moved", 100)
    assert (there / "dir" / "moved").stat().st_size == 100
    (shown / "second").chmod(0o640)
    os.utime(shown / "second", ns=(10**18, 10**18 + 7))
    status = (there / "second").stat()
    assert (stat.S_IMODE(status.st_mode), status.st_mtime_ns) == (0o640, 10**18 + 7)
    os.symlink("second", shown / "link")
    assert os.readlink(there / "link") == "second"
    os.unlink(shown / "second")
    os.unlink(shown / "dir" / "moved")
    os.rmdir(shown / "dir")
    assert os.listdir(there) == ["link"]


def test_links_that_lead_out_are_refused(both: tuple[Path, Path]) -> None:
    shown, there = both
    (there / "dir").mkdir()
    for name, target, good in (
        ("absolute", "/etc/passwd", False),
        ("out", "../../../etc/passwd", False),
        ("just-out", "../../x", False),
        ("beside", "dir/../dir", True),
        ("up", "../" + there.name + "/dir", True),
    ):
        os.symlink(target, there / name)
        assert errno_of(os.readlink, shown / name) == (0 if good else errno.ELOOP), name
        assert errno_of(os.stat, shown / name) == (0 if good else errno.ELOOP), name


def test_read_only(backed: GpufsMount, both: tuple[Path, Path]) -> None:
    _, there = both
    (there / "file").write_bytes(b"precious")
    fixed = backed.path / "backing" / "fixed" / there.name
    assert (fixed / "file").read_bytes() == b"precious"
    for action in (
        lambda: (fixed / "file").write_bytes(b"x"),
        lambda: os.open(fixed / "file", os.O_RDWR),
        lambda: os.truncate(fixed / "file", 0),
        lambda: (fixed / "new").touch(),
        lambda: os.mkdir(fixed / "dir"),
        lambda: os.unlink(fixed / "file"),
        lambda: os.rename(fixed / "file", fixed / "other"),
        lambda: os.chmod(fixed / "file", 0o777),
        lambda: os.symlink("x", fixed / "link"),
        lambda: os.link(fixed / "file", fixed / "second"),
        lambda: os.setxattr(fixed / "file", "user.x", b"y"),
    ):
        assert errno_of(action) == errno.EROFS
    assert os.listdir(there) == ["file"]


def test_the_daemon_acts_with_the_rights_of_the_caller(both: tuple[Path, Path]) -> None:
    shown, there = both
    (there / "secret").write_bytes(b"root's")
    (there / "secret").chmod(0o600)
    (there / "closed").mkdir(0o700)

    def act() -> list[int]:
        (shown / "his").write_bytes(b"1")
        (shown / "dir").mkdir()
        os.symlink("his", shown / "link")
        return [
            errno_of(os.open, shown / "secret", os.O_RDONLY),
            errno_of(os.open, shown / "secret", os.O_WRONLY),
            errno_of(os.listdir, shown / "closed"),
            errno_of(os.chmod, shown / "secret", 0o666),
            errno_of(os.chown, shown / "his", 0, 0),
        ]

    assert as_nobody(act) == [errno.EACCES, errno.EACCES, errno.EACCES, errno.EPERM, errno.EPERM]
    for name in ("his", "dir", "link"):
        assert os.lstat(there / name).st_uid == NOBODY
        assert os.lstat(there / name).st_gid == NOBODY
    assert (there / "secret").read_bytes() == b"root's"
    # A group that he has beside his own counts.
    (there / "group").mkdir()
    os.chown(there / "group", 0, OTHER)
    (there / "group").chmod(0o770)
    in_child(lambda: (shown / "group" / "x").touch(), uid=NOBODY, gid=NOBODY, groups=[OTHER])
    assert errno_of(as_nobody, lambda: (shown / "group" / "y").touch()) == errno.EACCES


def test_access_lists_of_the_host_are_obeyed(both: tuple[Path, Path]) -> None:
    """The mode bits alone would allow it, because the group's bits show the mask of the list."""
    if shutil.which("setfacl") is None:
        pytest.skip("setfacl is needed")
    shown, there = both
    (there / "file").write_bytes(b"listed")
    os.chown(there / "file", 0, NOBODY)
    (there / "file").chmod(0o600)
    run("setfacl", "-m", f"u:{OTHER}:rw", there / "file")
    assert as_nobody(lambda: errno_of(os.open, shown / "file", os.O_RDONLY)) == errno.EACCES


def test_rename_and_link_to_a_device_are_exdev(backed: GpufsMount, both: tuple[Path, Path]) -> None:
    shown, there = both
    (there / "file").write_bytes(b"1")
    (backed.device / "buffer").write_bytes(b"2")
    other = backed.path / "backing" / "fixed" / there.name
    assert errno_of(os.rename, shown / "file", backed.device / "x") == errno.EXDEV
    assert errno_of(os.rename, backed.device / "buffer", shown / "x") == errno.EXDEV
    assert errno_of(os.link, backed.device / "buffer", shown / "x") == errno.EXDEV
    assert errno_of(os.rename, other / "file", shown / "x") in (errno.EXDEV, errno.EROFS)
    (backed.device / "buffer").unlink()


def test_the_mount_inside_itself_is_refused(backed: GpufsMount, both: tuple[Path, Path]) -> None:
    shown, there = both
    (there / "inner").mkdir()
    run("mount", "--bind", backed.path, there / "inner")
    try:
        assert errno_of(os.listdir, shown / "inner") == errno.EDEADLK
        assert errno_of(os.stat, shown / "inner" / "gpu0") == errno.EDEADLK
        assert isinstance(os.listdir(shown), list)
    finally:
        run("umount", there / "inner")


def test_opening_what_was_just_removed_on_the_host(both: tuple[Path, Path]) -> None:
    """The kernel still knows the name for a while. Nothing is written into a removed file."""
    shown, there = both
    for index, flags in enumerate((os.O_WRONLY, os.O_RDONLY, os.O_WRONLY | os.O_TRUNC)):
        (there / f"{index}").write_bytes(b"old")
        assert (shown / f"{index}").read_bytes() == b"old"
        with open(there / f"{index}", "rb") as kept:
            (there / f"{index}").unlink()
            assert errno_of(os.open, shown / f"{index}", flags) == errno.ENOENT
            assert kept.read() == b"old"
    for index in range(5):
        (there / "again").write_bytes(b"old")
        assert (shown / "again").read_bytes() == b"old"
        (there / "again").unlink()
        (shown / "again").write_bytes(b"new" * index)
        assert (there / "again").read_bytes() == b"new" * index


def test_a_removed_open_file_can_be_reopened(both: tuple[Path, Path]) -> None:
    shown, there = both
    (there / "file").write_bytes(b"data")
    with open(shown / "file", "rb") as opened:
        (there / "file").unlink()
        for _ in range(3):
            assert Path(f"/proc/self/fd/{opened.fileno()}").read_bytes() == b"data"


def test_any_path_can_be_shown(session: Session, driver: str, tmp_path: Path) -> None:
    name = "both\\,"
    words = [f"first={tmp_path / name}", f"second={tmp_path}:ro"]
    assert config.load({"backing": kinds.join_backings(words)}, {})["backing"] == [
        ("first", str(tmp_path / name), False),
        ("second", str(tmp_path), True),
    ]
    (tmp_path / name).mkdir()
    (tmp_path / name / "file").write_bytes(b"there")
    with GpufsMount(session, "--backing", words[0], "--backing", words[1], driver=driver) as mount:
        assert (mount.path / "backing" / "first" / "file").read_bytes() == b"there"
        assert name in os.listdir(mount.path / "backing" / "second")


def test_a_missing_backing_directory_is_reported(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    done = run(*GPUFS, "mount", tmp_path / "m", "--driver", "host", "--backing", "x=/no/such", check=False)
    assert done.returncode == 1
    assert "/no/such" in done.stderr
    assert not os.path.ismount(tmp_path / "m")
