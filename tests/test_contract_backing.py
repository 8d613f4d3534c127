"""Below backing/ the host's file system answers: the same calls there and in the directory itself say the same."""

from __future__ import annotations

import errno
import functools
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import linux
from support.linux import kernel_version
from support.mounting import GpufsMount, Session
from support.processes import NOBODY, OTHER, as_nobody, errno_of, in_child

pytestmark = [pytest.mark.driver, pytest.mark.skipif(os.geteuid() != 0, reason="acts as several users")]


class Places:
    """Two empty directories of mode 777, made alike: one below backing/, one of the host beside it."""

    def __init__(self, shown: Path, there: Path) -> None:
        self.both = (shown, there)

    def agree(self, act: Callable[[Path], Any]) -> Any:
        """What act says of each, which must be the same."""
        shown, there = (act(place) for place in self.both)
        assert shown == there, f"below backing/ {shown}, on the host {there}"
        return shown


@pytest.fixture(scope="module")
def host() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="gpufs-tests-", dir="/dev/shm"))
    path.chmod(0o777)
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def backed(session: Session, driver: str, host: Path) -> Iterator[GpufsMount]:
    with GpufsMount(session, "--backing", f"data={host}", driver=driver, allow_other=True) as mount:
        yield mount


@pytest.fixture
def places(backed: GpufsMount, host: Path) -> Iterator[Places]:
    names = [Path(tempfile.mkdtemp(dir=host)).name for _ in range(2)]
    for name in names:
        (host / name).chmod(0o777)
    yield Places(backed.path / "backing" / "data" / names[0], host / names[1])
    for name in names:
        shutil.rmtree(host / name)


def test_unnamed_files(places: Places) -> None:
    if kernel_version() < (6, 2):
        pytest.skip("FUSE has no request for it before Linux 6.2")

    def act(place: Path) -> list[Any]:
        seen: list[Any] = []
        fd = os.open(place, os.O_TMPFILE | os.O_RDWR, 0o640)
        seen += [os.write(fd, b"unnamed"), os.fstat(fd).st_nlink]
        seen += [stat.filemode(os.fstat(fd).st_mode), os.listdir(place)]
        linux.link_descriptor(fd, place / "named")
        seen += [os.fstat(fd).st_nlink, (place / "named").read_bytes()]
        os.unlink(place / "named")
        seen += [errno_of(linux.link_descriptor, fd, place / "late"), os.pread(fd, 100, 0)]
        os.close(fd)
        fd = os.open(place, os.O_TMPFILE | os.O_WRONLY | os.O_EXCL, 0o600)
        seen += [os.write(fd, b"x"), errno_of(linux.link_descriptor, fd, place / "named")]
        os.close(fd)
        (place / "closed").mkdir(0o755)
        return [*seen, as_nobody(lambda: errno_of(os.open, place / "closed", os.O_TMPFILE | os.O_RDWR, 0o600))]

    found = places.agree(act)
    assert found[:6] == [7, 0, "-rw-r-----", [], 1, b"unnamed"]
    assert found[-1] == errno.EACCES


def test_a_directory_read_again_from_its_beginning(places: Places) -> None:
    """rewinddir(3) shows what has come and gone since opendir(3)."""

    def act(place: Path) -> list[list[str]]:
        for n in range(300):
            (place / f"old{n}").touch()
        fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
        seen = [sorted(os.listdir(fd))]  # of a duplicate, whose position is this one's
        for n in range(0, 300, 2):
            (place / f"old{n}").unlink()
        for n in range(300):
            (place / f"new{n}").touch()
        seen.append(sorted(os.listdir(fd)))
        os.fsync(fd)
        os.close(fd)
        return seen

    assert [len(names) for names in places.agree(act)] == [300, 450]


def test_creating_and_replacing_attributes(places: Places) -> None:
    def act(place: Path) -> list[int]:
        file = place / "file"
        file.touch()
        os.chown(file, NOBODY, NOBODY)
        file.chmod(0o200)  # whoever sets need not be able to look

        def errors() -> list[int]:
            create, replace = os.XATTR_CREATE, os.XATTR_REPLACE
            steps = (("a", replace), ("a", create), ("a", create), ("a", replace), ("b", create | replace))
            return [errno_of(os.setxattr, file, f"user.{name}", b"1", flags) for name, flags in (*steps, ("a", 0))]

        found: list[int] = as_nobody(errors)
        return found

    assert places.agree(act) == [errno.ENODATA, 0, errno.EEXIST, 0, errno.ENODATA, 0]


def test_who_may_set_times(places: Places) -> None:
    """Who may write to a file may set both times to the present, and nothing else."""

    def act(place: Path) -> list[int]:
        codes = []
        for mode in (0o666, 0o644):
            file = place / f"file{mode:o}"
            file.touch()
            file.chmod(mode)
            os.utime(file, (1000, 1000))
            codes += [
                as_nobody(functools.partial(errno_of, os.utime, file)),
                as_nobody(functools.partial(errno_of, os.utime, file, (5, 5))),
                as_nobody(functools.partial(errno_of, os.utime, file, (5, 6))),
            ]
            codes.append(int(os.stat(file).st_mtime > 1000))
        return codes

    assert places.agree(act) == [0, errno.EPERM, errno.EPERM, 1, errno.EACCES, errno.EPERM, errno.EPERM, 0]


@pytest.mark.parametrize("mode", [0o4777, 0o2777, 0o6777, 0o2767, 0o6666])
def test_changes_of_contents_take_set_id_bits(places: Places, mode: int) -> None:
    def write(fd: int, source: int) -> None:
        os.write(fd, b"x")

    def cut(fd: int, source: int) -> None:
        os.ftruncate(fd, 2)

    def allocate(fd: int, source: int) -> None:
        os.posix_fallocate(fd, 0, 3)

    def copy(fd: int, source: int) -> None:
        os.copy_file_range(source, fd, 3, 0, 0)

    def act(place: Path) -> list[str]:
        modes = []
        (place / "source").write_bytes(b"source")
        source = os.open(place / "source", os.O_RDONLY)
        for change in (write, cut, allocate, copy):
            file = place / change.__name__
            file.write_bytes(b"contents")
            os.chown(file, OTHER, OTHER)
            file.chmod(mode)

            def changed(file: Path = file, change: Callable[[int, int], None] = change) -> None:
                fd = os.open(file, os.O_RDWR)
                change(fd, source)
                os.close(fd)

            in_child(changed, uid=NOBODY, gid=NOBODY)
            modes.append(oct(os.stat(file).st_mode & 0o7777))
        os.close(source)
        return modes

    # Before Linux 6.2 allocation and copies left a set-gid bit without execution for the group where it was.
    found = places.agree(act) if kernel_version() >= (6, 2) else act(places.both[0])
    assert found == [oct(mode & 0o777)] * 4


@pytest.mark.parametrize("mode", [0o4644, 0o2644, 0o6644, 0o6755])
@pytest.mark.parametrize("groups", [(), (OTHER,)])
def test_who_changes_contents_takes_set_id_bits(places: Places, mode: int, groups: tuple[int, ...]) -> None:
    """By a descriptor that root has opened. A set-gid bit without execution for the group stays with those of it."""
    changes: list[Callable[[int, int], Any]] = [
        lambda fd, source: os.write(fd, b"x"),
        lambda fd, source: os.ftruncate(fd, 3),
        lambda fd, source: os.posix_fallocate(fd, 0, 5),
        lambda fd, source: os.copy_file_range(source, fd, 3, 0, 0),
    ]

    def act(place: Path) -> list[str]:
        modes = []
        (place / "source").write_bytes(b"source")
        source = os.open(place / "source", os.O_RDONLY)
        for n, change in enumerate(changes):
            file = place / f"file{n}"
            file.touch()
            os.chown(file, 0, OTHER)
            file.chmod(mode)
            fd = os.open(file, os.O_WRONLY)
            in_child(functools.partial(change, fd, source), uid=NOBODY, gid=NOBODY, groups=groups)
            os.close(fd)
            modes.append(oct(os.stat(file).st_mode & 0o7777))
        os.close(source)
        return modes

    stays = stat.S_ISGID if groups and not mode & stat.S_IXGRP else 0
    # Before Linux 6.2 allocation and copies left a set-gid bit without execution for the group where it was.
    found = places.agree(act) if kernel_version() >= (6, 2) else act(places.both[0])
    assert found == [oct(mode & (0o777 | stays))] * 4
