"""Directories of the host below backing/NAME."""

from __future__ import annotations

import errno
import functools
import os
import resource
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.data import directory
from support.mounting import GPUFS, GpufsMount, Session
from support.processes import NOBODY, OTHER, Snapshot, as_nobody, errno_of, in_child, run

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


@pytest.mark.parametrize("mode", [0o4644, 0o2644, 0o6644, 0o6755])
@pytest.mark.parametrize("groups", [(), (OTHER,)])
def test_changes_of_contents_clear_set_id_bits(both: tuple[Path, Path], mode: int, groups: tuple[int, ...]) -> None:
    """Root has opened the file. A set-gid bit without group execution stays if a member of the group writes."""
    shown, there = both
    (there / "source").write_bytes(b"source")
    stays = stat.S_ISGID if groups and not mode & stat.S_IXGRP else 0
    for n, change in enumerate(
        (
            lambda fd, source: os.write(fd, b"x"),
            lambda fd, source: os.ftruncate(fd, 3),
            lambda fd, source: os.posix_fallocate(fd, 0, 5),
            lambda fd, source: os.copy_file_range(source, fd, 3, 0, 0),
        )
    ):
        file = there / f"file{n}"
        file.touch()
        os.chown(file, 0, OTHER)
        file.chmod(mode)
        with open(shown / "source", "rb") as source, open(os.open(shown / file.name, os.O_WRONLY), "wb") as opened:
            act = functools.partial(change, opened.fileno(), source.fileno())
            in_child(act, uid=NOBODY, gid=NOBODY, groups=groups)
        assert stat.S_IMODE(file.stat().st_mode) == mode & (0o777 | stays), n


@pytest.mark.parametrize("groups", [(), (OTHER,)])
def test_copies_from_the_host_clear_set_gid(
    backed: GpufsMount, both: tuple[Path, Path], groups: tuple[int, ...]
) -> None:
    """As a write does: without group execution only for those outside of the group."""
    shown, there = both
    (there / "source").write_bytes(b"source")
    file = backed.device / f"target{len(groups)}"
    file.touch()
    os.chown(file, 0, OTHER)
    file.chmod(0o2644)
    with open(shown / "source", "rb") as source, open(file, "wb") as target:
        copy = functools.partial(os.copy_file_range, source.fileno(), target.fileno(), 3, 0, 0)
        in_child(copy, uid=NOBODY, gid=NOBODY, groups=groups)
    assert stat.S_IMODE(file.stat().st_mode) == (0o2644 if groups else 0o644)
    file.unlink()


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


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv(1)")
@pytest.mark.parametrize("capability", ["setuid", "setgid"])
def test_a_daemon_that_cannot_act_as_the_caller(session: Session, host: Path, capability: str) -> None:
    """What it would do as root for a plain user, it does not do."""
    path, place = session.scratch / f"without-{capability}", Path(tempfile.mkdtemp(dir=host))
    path.mkdir()
    place.chmod(0o777)
    words = ("mount", path, "--driver", "host", "--memory", "16M", "--allow-other", "--backing", f"data={place}")
    run("setpriv", f"--bounding-set=-{capability}", *GPUFS, *words, env={**os.environ, "GPUFS_CONFIG": "/dev/null"})
    try:
        shown = path / "backing" / "data" / "file"
        assert as_nobody(lambda: errno_of(os.open, shown, os.O_WRONLY | os.O_CREAT, 0o4755)) == errno.EPERM
        assert os.listdir(place) == []
        shown.write_bytes(b"x")  # by root
        assert as_nobody(lambda: errno_of(os.open, shown, os.O_RDONLY)) == errno.EPERM
    finally:
        run(*GPUFS, "umount", "--force", path)


FILES = 600
LIMIT = 512
WALK = """
import os, sys
seen = set()
for entry in os.scandir(sys.argv[1]):
    assert entry.stat(follow_symlinks=False).st_size == len(entry.name), entry
    os.getxattr(entry.path, "user.name") if entry.name[-2:] == "00" else None
    with open(entry.path) as file:
        assert file.read() == entry.name
    seen.add(entry.name)
assert len(seen) == int(sys.argv[2]), len(seen)
"""


@pytest.fixture(scope="module")
def crowd(session: Session, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One directory with more files than LIMIT."""
    path = tmp_path_factory.mktemp("crowd")
    for n in range(FILES):
        name = f"file{n:04}"
        (path / name).write_text(name)
        if name.endswith("00"):
            os.setxattr(path / name, "user.name", name.encode())
    return path


@pytest.fixture
def short(session: Session, driver: str, tmp_path: Path, crowd: Path) -> Iterator[tuple[Path, Path]]:
    """A mount of few descriptors: an empty directory as it shows it, and the crowd; `tmp_path` is it on the host."""
    words = ["--backing", f"data={tmp_path}", "--backing", f"crowd={crowd}"]
    with GpufsMount(session, *words, driver=driver, allow_other=True) as mount:
        resource.prlimit(mount.pid, resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
        assert Snapshot.of(mount.pid).descriptors < LIMIT // 2
        yield mount.path / "backing" / "data", mount.path / "backing" / "crowd"


@pytest.mark.slow
def test_more_files_than_descriptors(short: tuple[Path, Path], tmp_path: Path) -> None:
    shown, crowd = short
    (tmp_path / "kept").write_text("kept")
    with (shown / "kept").open("r+") as kept:
        os.unlink(shown / "kept")
        command = [sys.executable, "-c", WALK, str(crowd), str(FILES)]
        walkers = [subprocess.Popen(command) for _ in range(2)]
        run("cp", "-r", crowd, shown / "copy")
        assert [walker.wait() for walker in walkers] == [0, 0]
        assert kept.read() == "kept"
        assert os.fstat(kept.fileno()).st_nlink == 0
        os.ftruncate(kept.fileno(), 2)
        assert os.fstat(kept.fileno()).st_size == 2
    run("diff", "-r", crowd, tmp_path / "copy")
    run("rm", "-r", shown / "copy")
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_more_directories_than_descriptors(short: tuple[Path, Path], tmp_path: Path) -> None:
    shown, _ = short
    names = [f"d{n // 20}/e{n}/f" for n in range(600)]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(name)
    for _ in range(2):
        assert sorted(path.relative_to(shown).as_posix() for path in shown.rglob("f")) == sorted(names)
        assert all((shown / name).read_text() == name for name in names)
    shutil.rmtree(shown / "d0")
    assert not (tmp_path / "d0").exists()


@pytest.mark.slow
def test_descriptors_of_files_removed_on_the_host_are_closed(short: tuple[Path, Path], tmp_path: Path) -> None:
    """The daemon keeps a descriptor only while the kernel knows the name."""
    shown, _ = short
    for n in range(2 * LIMIT):
        name = f"file{n}"
        (tmp_path / name).write_text(name)
        assert (shown / name).read_text() == name
        (tmp_path / name).unlink()
    assert os.listdir(shown) == []
