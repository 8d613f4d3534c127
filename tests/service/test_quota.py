"""Limits on the memory of users and directories: what fails at a limit, who may set one, exact accounts."""

from __future__ import annotations

import itertools
import json
import mmap
import os
import pwd
import random
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack
from errno import EDQUOT, EXDEV
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import fake_gpu, linux
from support.cli import fails_here, gpufs, gpufs_here, user_gpufs
from support.data import KIB, MIB, assert_same, noise
from support.mounting import GpufsMount, Mounter
from support.processes import NOBODY, OTHER, as_nobody, as_other, errno_of, plain_user, run, wait_until
from support.surviving import mounted

import gpufs as library
from gpufs import attach as _attach  # noqa: F401 - a child that is nobody cannot load them
from gpufs import copy as _copy  # noqa: F401

pytestmark = [pytest.mark.skipif(os.geteuid() != 0, reason="acts as several users, which takes root")]
LIMIT = 16 * MIB


def quotas(mount: GpufsMount) -> dict[tuple[str, int | None], tuple[int, int | None]]:
    """What `gpufs quota list` shows: used and allowed bytes by path within the mount and user."""
    found = json.loads(gpufs_here("quota", "list", "--json", mount.path).stdout)
    return {
        (os.path.relpath(one["path"], mount.path), one["uid"]): (one["used_bytes"], one["limit_bytes"]) for one in found
    }


def used(mount: GpufsMount, path: str, uid: int | None) -> int:
    """The same, from the mount's status."""
    for one in mount.status()["quotas"]:
        if (one["path"], one["uid"]) == (path, uid):
            return int(one["used_bytes"])
    return 0


def held(*paths: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in paths)


@pytest.fixture
def limited(mount: Mounter) -> GpufsMount:
    """A mount where each plain user may hold 16 MiB on each of two devices."""
    return mount("--user-memory", str(LIMIT), devices=2, memory=128 * MIB, allow_other=True)


def filled(path: Path) -> Path:
    """A file that writes grow until they fail with EDQUOT."""
    with open(path, "wb", buffering=0) as file:
        data = memoryview(noise(LIMIT + MIB))
        done = 0
        code = 0
        while not code:
            try:
                done += file.write(data[done : done + 3 * MIB])
            except OSError as error:
                code = error.errno or -1
    assert (code, done) == (EDQUOT, LIMIT)
    assert path.stat().st_size == LIMIT
    assert path.read_bytes() == data[:LIMIT]
    return path


def at_the_limit(folder: Path, host: Path) -> dict[str, int]:
    """The errno of each way to take more memory."""
    fd = os.open(folder / "late", os.O_RDWR | os.O_CREAT)
    source = os.open(folder / "full", os.O_RDONLY)

    def attach() -> None:
        os.ftruncate(fd, 4 * MIB)
        library.attach(folder / "late", "r+")

    ways: dict[str, Callable[[], object]] = {
        "write": lambda: os.write(fd, b"x" * MIB),
        "small": lambda: os.write(fd, b"x"),
        "fallocate": lambda: os.posix_fallocate(fd, 0, 4 * MIB),
        "zero": lambda: linux.fallocate(fd, linux.FALLOC_ZERO_RANGE, 0, 4 * MIB),
        "copy_file_range": lambda: os.copy_file_range(source, fd, MIB, 0, 0),
        "load": lambda: library.copy(host, folder / "loaded"),
        "kernel": lambda: shutil.copyfile(host, folder / "copied"),
        "attach": attach,
    }
    found = {way: errno_of(act) for way, act in ways.items()}
    os.close(fd)
    os.close(source)
    return found


def test_a_user_at_the_limit_and_another_one(limited: GpufsMount, host: Path) -> None:
    gpu = limited.device
    payload = host / "payload"
    payload.write_bytes(noise(4 * MIB))
    payload.chmod(0o644)
    as_nobody(lambda: filled(gpu / "full"))
    found = as_nobody(lambda: at_the_limit(gpu, payload))
    assert found == dict.fromkeys(found, EDQUOT)
    assert used(limited, "gpu0", NOBODY) == LIMIT
    assert not (gpu / "loaded").exists()
    assert_same((gpu / "full").read_bytes(), noise(LIMIT + MIB)[:LIMIT])
    # memory that exists can be changed
    as_nobody(lambda: os.pwrite(os.open(gpu / "full", os.O_WRONLY), b"changed", 5 * MIB))

    def another() -> int:
        library.copy(payload, gpu / "theirs")
        return errno_of(os.posix_fallocate, os.open(gpu / "more", os.O_CREAT | os.O_WRONLY), 0, 12 * MIB)

    assert as_other(another) == 0
    assert as_nobody(lambda: errno_of(Path(gpu.parent / "gpu1" / "full").write_bytes, bytes(LIMIT))) == 0
    (gpu / "roots").write_bytes(bytes(2 * LIMIT))
    # removing gives the memory back, at once
    for _ in range(2):
        as_nobody((gpu / "full").unlink)
        as_nobody(lambda: filled(gpu / "full"))
    as_nobody((gpu / "full").unlink)
    as_nobody(lambda: library.copy(payload, gpu / "loaded"))
    assert quotas(limited) == {
        ("gpu0", 0): (2 * LIMIT, None),
        ("gpu0", NOBODY): (held(gpu / "loaded", gpu / "late"), LIMIT),
        ("gpu0", OTHER): (LIMIT, LIMIT),
        ("gpu1", NOBODY): (LIMIT, LIMIT),
    }


def test_fallocate_beyond_the_limit_takes_nothing(mount: Mounter) -> None:
    own = mount("--user-memory", "1200M", memory=2048 * MIB, allow_other=True)

    def allocate() -> tuple[int, int]:
        fd = os.open(own.device / "large", os.O_CREAT | os.O_WRONLY)
        return errno_of(os.posix_fallocate, fd, 0, 1400 * MIB), os.fstat(fd).st_blocks

    assert as_nobody(allocate) == (EDQUOT, 0)


def test_limits_of_single_users(limited: GpufsMount) -> None:
    gpu, root = limited.device, limited.path
    gpufs_here("quota", "set", root, "--user", NOBODY, "4M")
    gpufs_here("quota", "set", gpu, "-u", "nobody", "6M")
    assert {key: limit for key, (_, limit) in quotas(limited).items()} == {
        ("gpu0", NOBODY): 6 * MIB,
        ("gpu1", NOBODY): 4 * MIB,
    }
    assert as_nobody(lambda: errno_of((gpu / "a").write_bytes, bytes(7 * MIB))) == EDQUOT
    assert held(gpu / "a") == 6 * MIB
    gpufs_here("quota", "set", gpu, "--user", NOBODY, "none")
    as_nobody(lambda: (gpu / "b").write_bytes(bytes(20 * MIB)))
    gpufs_here("quota", "remove", gpu, "--user", NOBODY)
    assert quotas(limited)["gpu0", NOBODY] == (26 * MIB, LIMIT)
    as_nobody((gpu / "b").unlink)
    as_nobody(lambda: (gpu / "b").write_bytes(bytes(10 * MIB)))
    gpufs_here("quota", "set", root, "--user", 0, "1M")
    assert errno_of((gpu / "roots").write_bytes, bytes(3 * MIB)) == EDQUOT


def test_limits_that_a_mount_begins_with(open_directory: Path) -> None:
    """They come from the configuration file, and the next daemon keeps those that were changed since."""
    file = open_directory / "gpufs.toml"
    file.write_text(f'user_memory = "16M"\nuser_limits = ["nobody=4M", "{OTHER}=none"]\n')
    with mounted(open_directory / "mnt", "--config", str(file), "--allow-other") as mount:
        mount.device.chmod(0o777)

        def limit(user: int) -> int | None:
            lines = json.loads(gpufs_here("quota", "list", "--json", mount.path).stdout)
            return next((line["limit_bytes"] for line in lines if line["uid"] == user), None)

        paths = [mount.device / name for name in ("a", "b")]
        assert limit(NOBODY) == 4 * MIB
        assert as_nobody(lambda: errno_of(paths[0].write_bytes, bytes(5 * MIB))) == EDQUOT
        as_other(lambda: paths[1].write_bytes(bytes(20 * MIB)))
        gpufs_here("quota", "set", mount.path, "--user", NOBODY, "6M")
        mount.kill()
        assert limit(NOBODY) == 6 * MIB
        assert as_nobody(lambda: errno_of(paths[0].write_bytes, bytes(7 * MIB))) == EDQUOT


def test_chown_moves_what_is_charged(limited: GpufsMount) -> None:
    path = limited.device / "file"
    path.write_bytes(bytes(20 * MIB))
    os.chown(path, NOBODY, -1)  # beyond the limit, since root asks for it
    assert quotas(limited) == {("gpu0", NOBODY): (20 * MIB, LIMIT)}
    path.chmod(0o666)
    with open(path, "ab") as file:  # the file's owner pays, whoever writes
        assert errno_of(os.posix_fallocate, file.fileno(), 20 * MIB, MIB) == EDQUOT
    os.chown(path, OTHER, -1)
    assert quotas(limited) == {("gpu0", OTHER): (20 * MIB, LIMIT), ("gpu0", NOBODY): (0, LIMIT)}


def test_memory_is_charged_until_it_is_free(limited: GpufsMount) -> None:
    path = limited.device / "file"
    path.write_bytes(bytes(4 * MIB))
    with open(path, "rb") as file:
        path.unlink()
        assert used(limited, "gpu0", 0) == 4 * MIB
        assert file.read(1) == b"\0"
    wait_until(lambda: used(limited, "gpu0", 0) == 0, 30, "the memory of the removed file")
    path.write_bytes(bytes(4 * MIB))
    array = library.attach(path)
    path.unlink()
    fd = os.open(limited.device, os.O_RDONLY)
    os.close(fd)
    assert used(limited, "gpu0", 0) == 4 * MIB
    array.close()
    wait_until(lambda: used(limited, "gpu0", 0) == 0, 30, "the memory of the lease")


def test_registered_memory_is_charged(limited: GpufsMount) -> None:
    """On the host driver, where an access allocates what its program has not allocated."""
    fd = os.memfd_create("shared")
    os.ftruncate(fd, 4 * MIB)
    array = np.frombuffer(mmap.mmap(fd, 4 * MIB), np.uint8)
    os.close(fd)
    with library.register(array, limited.device / "array"):
        assert used(limited, "gpu0", 0) == 4 * MIB
        os.chown(limited.device / "array", NOBODY, -1)
        assert (used(limited, "gpu0", 0), used(limited, "gpu0", NOBODY)) == (0, 4 * MIB)
    assert used(limited, "gpu0", NOBODY) == 0


# ---- directories ----


def test_a_directory_with_a_limit(limited: GpufsMount) -> None:
    gpu = limited.device
    folder = gpu / "alice"
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "deep" / "before").write_bytes(bytes(4 * MIB))
    (gpu / "outside").write_bytes(bytes(4 * MIB))
    gpufs_here("quota", "set", folder, "10M")
    limited.wait_for_log(str(folder))
    assert quotas(limited)["gpu0/alice", None] == (4 * MIB, 10 * MIB)
    (folder / "deep" / "er" / "after").write_bytes(bytes(4 * MIB))
    assert errno_of((folder / "last").write_bytes, bytes(4 * MIB)) == EDQUOT
    assert quotas(limited)["gpu0/alice", None] == (10 * MIB, 10 * MIB)
    assert held(folder / "last") == 2 * MIB
    for inside in (folder, folder / "deep" / "er", folder / "last"):
        found = os.statvfs(inside)
        assert (found.f_blocks * found.f_frsize, found.f_bavail) == (10 * MIB, 0)
    found = os.statvfs(gpu)
    assert found.f_blocks * found.f_frsize == 128 * MIB
    # a file cannot leave by a new name
    assert errno_of(os.rename, folder / "last", gpu / "last") == EXDEV
    assert errno_of(os.rename, gpu / "outside", folder / "outside") == EXDEV
    assert errno_of(os.link, folder / "last", gpu / "last") == EXDEV
    assert errno_of(os.link, gpu / "outside", folder / "outside") == EXDEV
    unnamed = os.open(folder, os.O_TMPFILE | os.O_WRONLY)
    assert errno_of(os.write, unnamed, b"x") == EDQUOT
    assert errno_of(linux.link_descriptor, unnamed, gpu / "named") == EXDEV
    os.close(unnamed)
    run("mv", folder / "last", gpu / "last")
    os.rename(folder / "deep" / "before", folder / "before")
    os.link(folder / "before", folder / "deep" / "again")
    assert quotas(limited)["gpu0/alice", None] == (8 * MIB, 10 * MIB)
    # the directory itself keeps its limit under another name, and its limit can be changed
    os.rename(folder, gpu / "bob")
    gpufs_here("quota", "set", gpu / "bob", "12M")
    assert quotas(limited)["gpu0/bob", None] == (8 * MIB, 12 * MIB)
    gpufs_here("quota", "remove", gpu / "bob")
    assert ("gpu0/bob", None) not in quotas(limited)
    (gpu / "bob" / "large").write_bytes(bytes(16 * MIB))
    os.rename(gpu / "bob" / "large", gpu / "large")


def test_limits_of_directories_end_with_them_and_do_not_nest(limited: GpufsMount) -> None:
    gpu = limited.device
    (gpu / "a" / "b" / "c").mkdir(parents=True)
    gpufs_here("quota", "set", gpu / "a" / "b", "4M")
    for directory in (gpu, gpu / "a", gpu / "a" / "b" / "c"):
        assert "nested" in fails_here(1, "quota", "set", directory, "4M")
    (gpu / "other").mkdir()
    gpufs_here("quota", "set", gpu / "other", "4M")
    assert errno_of(os.rename, gpu / "a", gpu / "other" / "a") == EXDEV
    shutil.rmtree(gpu / "a")
    (gpu / "other").rmdir()
    assert quotas(limited) == {}
    gpufs_here("quota", "set", gpu, "2M")
    assert errno_of((gpu / "file").write_bytes, bytes(3 * MIB)) == EDQUOT


def test_a_copy_into_a_limited_directory_is_refused_with_figures(limited: GpufsMount, host: Path) -> None:
    folder = limited.device / "small"
    folder.mkdir()
    gpufs_here("quota", "set", folder, "3M")
    (host / "file").write_bytes(noise(4 * MIB))
    done = gpufs_here("cp", host / "file", folder / "file", check=False)
    assert (done.returncode, "4.0 MiB" in done.stderr, "3.0 MiB" in done.stderr) == (1, True, True), done
    assert list(folder.iterdir()) == []
    assert quotas(limited)["gpu0/small", None] == (0, 3 * MIB)
    (folder / "sparse").touch()
    os.truncate(folder / "sparse", 4 * MIB)
    with pytest.raises(library.QuotaExceeded, match="gpu0/small"):
        library.attach(folder / "sparse", "r+")


def test_a_users_limit_names_the_user(limited: GpufsMount, host: Path) -> None:
    limited.device.chmod(0o777)
    source = host / "source"
    source.write_bytes(noise(2 * LIMIT))
    path = limited.device / "sparse"

    def texts() -> list[str]:
        path.touch()
        os.truncate(path, 2 * LIMIT)
        with pytest.raises(library.QuotaExceeded) as attached:
            library.attach(path, "r+")
        with pytest.raises(library.QuotaExceeded) as copied:
            library.copy(source, path)
        return [str(attached.value), str(copied.value)]

    for text in as_nobody(texts):
        assert f"user {pwd.getpwuid(NOBODY).pw_name} on gpu0" in text


# ---- who sets and sees them ----


def test_only_root_and_the_owner_set_limits(limited: GpufsMount, tmp_path: Path) -> None:
    folder = limited.device / "nobodys"
    as_nobody(folder.mkdir)
    command, environment = user_gpufs({"HOME": "/", "PATH": os.environ["PATH"]})
    as_user: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": [], "env": environment, "cwd": "/"}
    for words in ((str(folder), "1G"), (str(limited.path), "1G", "--user", str(NOBODY))):
        done = run(*command, "quota", "set", *words, check=False, **as_user)
        assert (done.returncode, "only root" in done.stderr) == (1, True), done
    gpufs_here("quota", "set", folder, "4M")
    (limited.device / "roots").write_bytes(bytes(4 * MIB))
    as_other(lambda: (limited.device / "others").write_bytes(bytes(4 * MIB)))
    as_nobody(lambda: (folder / "file").write_bytes(bytes(2 * MIB)))
    done = run(*command, "quota", "list", "--json", limited.path, **as_user)
    assert {(one["path"], one["uid"], one["used_bytes"]) for one in json.loads(done.stdout)} == {
        (str(limited.device), NOBODY, 2 * MIB),
        (str(folder), None, 2 * MIB),
    }


def test_the_owner_of_a_mount_sets_limits(mount: Mounter) -> None:
    with plain_user() as environment:
        command, environment = user_gpufs(environment)
        own = mount("--user-memory", "4M", user=(command, environment))
        as_user: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": [], "env": environment, "cwd": "/"}

        def set_by_owner() -> None:
            run(*command, "quota", "set", own.device, "--user", str(NOBODY), "8M", **as_user)

        as_nobody(lambda: (own.device / "free").write_bytes(bytes(6 * MIB)))  # the default is not for the owner
        set_by_owner()
        assert as_nobody(lambda: errno_of((own.device / "more").write_bytes, bytes(4 * MIB))) == EDQUOT
        own.unmount()


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["gpu0/file", "4M"], 1),
        ([".gpufs", "4M"], 1),
        (["gpu0/deep", "4M", "--user", "0"], 1),
        (["gpu0", "much"], 2),
        (["gpu0", "9999999T"], 2),
        (["gpu0", "4M", "--user", "no such user"], 2),
        (["missing", "4M"], 1),
    ],
)
def test_wrong_arguments(shared_mount: GpufsMount, words: list[str], code: int) -> None:
    file, deep = shared_mount.device / "file", shared_mount.device / "deep"
    file.touch()
    deep.mkdir()
    done = gpufs_here("quota", "set", shared_mount.path / words[0], *words[1:], check=False)
    file.unlink()
    deep.rmdir()
    assert done.returncode == code, done
    assert done.stderr


def test_df_and_status_show_limits(limited: GpufsMount) -> None:
    folder = limited.device / "folder"
    folder.mkdir()
    gpufs_here("quota", "set", folder, "4M")
    as_nobody(lambda: (limited.device / "file").write_bytes(bytes(2 * MIB)))
    (here, there) = json.loads(gpufs_here("df", "--json", limited.path).stdout)
    assert {(one["uid"], one["used_bytes"], one["limit_bytes"]) for one in here["quotas"]} == {
        (NOBODY, 2 * MIB, LIMIT),
        (None, 0, 4 * MIB),
    }
    assert there["quotas"] == []
    for command in ("df", "status"):
        text = gpufs(command, limited.path).stdout
        assert str(folder) in text
        assert "nobody" in text


# ---- the books ----


class Books:
    """Random operations by several owners in three directories, of which some have a limit for a while."""

    def __init__(self, mount: GpufsMount, seed: int) -> None:
        self.random = random.Random(seed)
        self.mount = mount
        self.gpu = mount.device
        self.named: list[Path] = []
        self.removed: list[tuple[int, str]] = []  # descriptors of files without names, and their directories
        self.limited: set[str] = set()
        self.numbers = itertools.count()
        for name in "abc":
            (self.gpu / name).mkdir()

    def new_name(self) -> Path:
        return self.gpu / self.random.choice("abc") / f"f{next(self.numbers)}"

    def step(self) -> None:
        choose = self.random
        if len(self.named) < 3 or choose.random() < 0.15:
            self.named.append(path := self.new_name())
            path.touch()
            os.chown(path, choose.choice([0, NOBODY, OTHER]), -1)
            return
        path = choose.choice(self.named)
        with open(path, "r+b", buffering=0) as file:
            try:
                self.change(path, file.fileno())
            except OSError as error:
                if error.errno != EDQUOT:
                    raise

    def change(self, path: Path, fd: int) -> None:
        choose = self.random
        at, size = choose.choice([0, 100, 60 * KIB, MIB, 3 * MIB]), choose.choice([1, 512, 5000, 70 * KIB, 3 * MIB])
        match choose.randrange(11):
            case 0 | 1 | 2:
                os.pwrite(fd, noise(size, at), at)
            case 3:
                os.ftruncate(fd, at)
            case 4:
                linux.fallocate(fd, linux.FALLOC_PUNCH_HOLE | linux.FALLOC_KEEP_SIZE, at, size)
            case 5:
                linux.fallocate(fd, choose.choice([0, linux.FALLOC_KEEP_SIZE]), at, size)
            case 6:
                os.fchown(fd, choose.choice([0, NOBODY, OTHER]), -1)
            case 7:
                path.unlink()
                self.named.remove(path)
                if choose.random() < 0.5:
                    self.removed.append((os.dup(fd), path.parent.name))
            case 8:
                if self.removed:
                    os.close(self.removed.pop()[0])
            case 9:
                new = self.new_name()
                crosses = path.parent != new.parent and {path.parent.name, new.parent.name} & self.limited
                assert errno_of(os.rename, path, new) == (EXDEV if crosses else 0)
                if not crosses:
                    self.named[self.named.index(path)] = new
            case _:
                with open(choose.choice(self.named), "rb") as other:
                    if not os.path.samestat(os.fstat(other.fileno()), os.fstat(fd)):
                        os.copy_file_range(other.fileno(), fd, size, 0, at)

    def limit(self, folder: str, limit: str | None) -> None:
        if limit is None:
            gpufs_here("quota", "remove", self.gpu / folder)
            self.limited.discard(folder)
        else:
            gpufs_here("quota", "set", self.gpu / folder, limit)
            self.limited.add(folder)

    def expected(self) -> dict[tuple[str, int | None], int]:
        sums: dict[tuple[str, int | None], int] = {}
        files = [(os.stat(path), path.parent.name) for path in self.named]
        for found, folder in files + [(os.fstat(fd), folder) for fd, folder in self.removed]:
            keys: list[tuple[str, int | None]] = [("gpu0", found.st_uid)]
            keys += [(f"gpu0/{folder}", None)] * (folder in self.limited)
            for key in keys:
                sums[key] = sums.get(key, 0) + found.st_blocks * 512
        return {key: size for key, size in sums.items() if size}

    def shown(self) -> dict[tuple[str, int | None], int]:
        found = self.mount.status()["quotas"]
        return {(one["path"], one["uid"]): one["used_bytes"] for one in found if one["used_bytes"]}

    def check(self) -> None:
        """Memory of removed files is released a little later."""
        deadline = time.monotonic() + 60
        while (shown := self.shown()) != (expected := self.expected()) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert shown == expected


@pytest.mark.parametrize("seed", range(2))
def test_the_books_are_exact(limited: GpufsMount, seed: int) -> None:
    """After random operations each account is the sum of st_blocks of its files."""
    books = Books(limited, seed)
    limits = {0: ("a", "8M"), 60: ("b", "20M"), 100: ("a", "3M"), 150: ("a", None), 200: ("b", "3M"), 220: ("a", "8M")}
    for number in range(260):
        if number in limits:
            books.limit(*limits[number])
        books.step()
        if number % 10 == 0:
            books.check()
    for path in books.named:
        path.unlink()
    for fd, _ in books.removed:
        os.close(fd)
    books.named.clear()
    books.removed.clear()
    books.check()


def test_preallocated_memory_on_a_gpu(mount: Mounter, tmp_path: Path) -> None:
    """Two growing files of a user reach the limit together, although each preallocates; the books show both."""
    environment = fake_gpu.environment(tmp_path)
    own = mount("--user-memory", "64M", driver="cuda", memory=512 * MIB, allow_other=True, environment=environment)

    def grow() -> tuple[int, int, int]:
        with ExitStack() as stack:
            fds = [os.open(own.device / name, os.O_CREAT | os.O_WRONLY) for name in "ab"]
            for fd in fds:
                stack.callback(os.close, fd)
            done, code = 0, 0
            while not code:
                try:
                    done += os.write(fds[done // MIB % 2], bytes(MIB))
                except OSError as error:
                    code = error.errno or -1
            return code, done, sum(os.fstat(fd).st_blocks * 512 for fd in fds)

    assert as_nobody(grow) == (EDQUOT, 64 * MIB, 64 * MIB)
    assert used(own, "gpu0", NOBODY) == 64 * MIB
