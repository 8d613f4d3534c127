"""A mount survives its daemon: another one serves the same files, and no request is lost or done twice."""

from __future__ import annotations

import json
import mmap
import os
import random
import re
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from errno import EEXIST, EIO, ENOENT
from pathlib import Path
from typing import Any

import numpy
import pytest
from support import fake_gpu
from support.cli import gpufs, user_gpufs
from support.data import MIB
from support.hanging import HangingMount, held
from support.mounting import GPUFS, REPOSITORY
from support.processes import (
    NOBODY,
    PATIENCE,
    children_of,
    errno_of,
    has_ended,
    links_of,
    plain_user,
    run,
    wait_until,
)
from support.surviving import Survivor, failing_takeovers, mounted
from support.watchdog import mounted_at

import gpufs as gpufs_client
from gpufs import status
from gpufs.statistics import find


@pytest.fixture
def survivor(driver: str, tmp_path: Path) -> Iterator[Survivor]:
    with mounted(tmp_path / "mount", driver=driver) as made:
        yield made


@pytest.fixture(params=["host", "cuda"])
def of_each_driver(request: pytest.FixtureRequest, driver: str, tmp_path: Path) -> Iterator[Survivor]:
    """On the real driver of the run if it is a GPU's; otherwise on host memory, and over a fake library of CUDA."""
    environment = {}
    if driver not in ("host", request.param):
        pytest.skip(f"runs once on {driver}")
    if request.param == "cuda" and driver == "host":
        environment = fake_gpu.environment(tmp_path)
    with mounted(tmp_path / "mount", driver=request.param, environment=environment) as made:
        yield made


@pytest.mark.driver
def test_files_survive(of_each_driver: Survivor) -> None:
    """Names, contents, attributes, links, holes, open files, listings and limits are what they were."""
    survivor = of_each_driver
    device = survivor.device
    data = random.Random(0).randbytes(9 * MIB)
    (device / "large").write_bytes(data)
    (device / "small").write_bytes(b"small")
    (device / "directory" / "below").mkdir(parents=True)
    os.link(device / "small", device / "directory" / "link")
    os.symlink("../small", device / "directory" / "symlink")
    os.mkfifo(device / "fifo")
    os.setxattr(device / "small", "user.name", b"value")
    os.chmod(device / "small", 0o640)
    os.chown(device / "small", 12, 34)
    os.utime(device / "small", ns=(10**18, 2 * 10**18))
    with open(device / "sparse", "wb") as file:
        file.truncate(64 * MIB)
        file.seek(40 * MIB)
        file.write(b"data")
    gpufs("quota", "set", device / "directory", "64M")
    for number_of in range(500):
        (device / "directory" / f"{number_of}").touch()

    def facts() -> dict[str, object]:
        found: dict[str, object] = {}
        for folder, folders, files in os.walk(device):
            for name in [*folders, *files]:
                place = Path(folder, name)
                about = place.lstat()
                # Reading it sets the access time of a directory or link once.
                found[str(place)] = about[:7] + about[8:] + (about.st_blocks, about.st_mtime_ns, about.st_ctime_ns)
        return found

    before = facts()
    quotas = [quota for quota in survivor.report()["quotas"] if quota["limit_bytes"]]
    unlinked = open(device / "unlinked", "w+b", buffering=0)  # noqa: SIM115
    unlinked.write(b"before ")
    os.unlink(device / "unlinked")
    appending = open(device / "appended", "ab", buffering=0)  # noqa: SIM115
    appending.write(b"before ")
    listing = os.scandir(device / "directory")
    listed = [next(listing).name for _ in range(10)]

    for deaths, number in enumerate((signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV), 1):
        survivor.kill(number)
        unlinked.write(b"after ")
        assert os.pread(unlinked.fileno(), 100, 0) == b"before " + b"after " * deaths
        appending.write(b"after ")
        assert (device / "appended").read_bytes() == b"before " + b"after " * deaths
    listed += [entry.name for entry in listing]
    assert sorted(listed) == sorted(os.listdir(device / "directory"))
    os.unlink(device / "appended")
    assert facts() == before
    assert (device / "large").read_bytes() == data
    assert (device / "directory" / "symlink").read_bytes() == b"small"
    assert os.getxattr(device / "small", "user.name") == b"value"
    with open(device / "sparse", "rb") as sparse:
        assert os.lseek(sparse.fileno(), 0, os.SEEK_DATA) == 40 * MIB
        assert os.pread(sparse.fileno(), 8, 40 * MIB - 4) == bytes(4) + b"data"
    assert [quota for quota in survivor.report()["quotas"] if quota["limit_bytes"]] == quotas != []
    unlinked.close()
    appending.close()
    for name in ("large", "small", "sparse", "fifo"):
        os.unlink(device / name)
    subprocess.run(["rm", "-r", str(device / "directory")], check=True)
    wait_until(lambda: status(survivor.path).devices[0].used_bytes == 0, PATIENCE, "the memory to be free")


class Worker(threading.Thread):
    """Changes names and files in a directory of its own, and knows what each call must return."""

    def __init__(self, directory: Path, seed: int, end: threading.Event) -> None:
        super().__init__()
        self.directory = directory
        self.random = random.Random(seed)
        self.end = end
        self.files: dict[str, list[bytearray]] = {}  # of each name, in a list that its links share
        self.failure: BaseException | None = None
        self.calls = 0

    def run(self) -> None:
        try:
            self.directory.mkdir()
            while not self.end.is_set():
                self.step()
                self.calls += 1
            self.check()
        except (OSError, AssertionError) as failure:
            self.failure = failure

    def some_name(self) -> str:
        return f"{self.random.randrange(30)}"

    def step(self) -> None:
        name, other = self.some_name(), self.some_name()
        path, target = self.directory / name, self.directory / other
        match self.random.randrange(9):
            case 0 | 1:
                self.expect(EEXIST if name in self.files else 0, lambda: os.close(self.create(path)))
                self.files.setdefault(name, [bytearray()])
            case 2:
                self.expect(0 if name in self.files else ENOENT, lambda: os.unlink(path))
                self.files.pop(name, None)
            case 3:
                self.expect(0 if name in self.files else ENOENT, lambda: os.rename(path, target))
                if name in self.files and self.files[name] is not self.files.get(other):
                    self.files[other] = self.files.pop(name)
            case 4:
                missing = ENOENT if name not in self.files else EEXIST if other in self.files else 0
                self.expect(missing, lambda: os.link(path, target))
                if not missing:
                    self.files[other] = self.files[name]
            case 5 | 6 if name in self.files:
                data = self.random.randbytes(self.random.choice([10, 1000, 100_000, 3_000_000]))
                with open(path, "ab", buffering=0) as file:
                    assert file.write(data) == len(data)
                self.files[name][0] += data
            case 7 if name in self.files:
                size = self.random.randrange(len(self.files[name][0]) + 1)
                os.truncate(path, size)
                del self.files[name][0][size:]
            case 8 if name in self.files:
                assert path.read_bytes() == self.files[name][0], path
                assert path.stat().st_nlink == sum(each is self.files[name] for each in self.files.values())
            case _:
                assert sorted(os.listdir(self.directory)) == sorted(self.files)

    @staticmethod
    def create(path: Path) -> int:
        return os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)

    @staticmethod
    def expect(error: int, call: Callable[[], object]) -> None:
        outcome = 0
        try:
            call()
        except OSError as failure:
            outcome = failure.errno or 0
        assert outcome == error

    def check(self) -> None:
        assert sorted(os.listdir(self.directory)) == sorted(self.files)
        for name, (contents,) in self.files.items():
            assert (self.directory / name).read_bytes() == contents


def _work_while_it_dies(survivor: Survivor, deaths: int, seed: int) -> None:
    end = threading.Event()
    workers = [Worker(survivor.device / f"worker-{number}", seed + number, end) for number in range(4)]
    for worker in workers:
        worker.start()
    pauses = random.Random(seed)
    try:
        for _ in range(deaths):
            time.sleep(pauses.random() * 0.3)
            survivor.kill()
    finally:
        end.set()
        for worker in workers:
            worker.join(PATIENCE)
    for worker in workers:
        assert not worker.is_alive()
        if worker.failure is not None:
            raise worker.failure
        assert worker.calls > deaths
    for worker in workers:
        worker.check()
        subprocess.run(["rm", "-r", str(worker.directory)], check=True)
    wait_until(lambda: status(survivor.path).devices[0].used_bytes == 0, PATIENCE, "the memory to be free")


@pytest.mark.driver
def test_no_call_is_lost_or_done_twice(of_each_driver: Survivor) -> None:
    """Programs that change names and files all the time see no error while the daemon is killed again and again."""
    _work_while_it_dies(of_each_driver, 3, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("seed", range(100, 600, 100))
def test_no_call_is_lost_or_done_twice_for_long(of_each_driver: Survivor, seed: int) -> None:
    _work_while_it_dies(of_each_driver, 100, seed)


@pytest.mark.driver
def test_what_removed_files_held_is_not_seen_again(of_each_driver: Survivor) -> None:
    """Also not where memory was taken and free when the daemon died: beside small files, and within a large file."""
    device = of_each_driver.device
    sizes = (300, 5_000, 20_000, 100_000, 3 * MIB)
    for round_number in range(2):
        for size in sizes:
            (device / f"removed-{size}").write_bytes(b"x" * size)
        (device / "small").write_bytes(b"small")
        with open(device / "large", "wb", buffering=0) as large:
            large.write(b"x" * 9 * MIB)
            large.truncate(2 * MIB if round_number else 3 * MIB)
        for size in sizes:
            os.unlink(device / f"removed-{size}")
        of_each_driver.kill()
        for size in sizes:
            with open(device / f"new-{size}", "w+b", buffering=0) as file:
                os.pwrite(file.fileno(), b"end", size - 3)
                assert os.pread(file.fileno(), size, 0) == bytes(size - 3) + b"end"
        with open(device / "large", "r+b", buffering=0) as large:
            end = large.seek(0, os.SEEK_END)
            os.pwrite(large.fileno(), b"end", 9 * MIB)
            assert os.pread(large.fileno(), 9 * MIB - end, end) == bytes(9 * MIB - end)
        for name in os.listdir(device):
            os.unlink(device / name)


@pytest.mark.driver
def test_reads_of_holes_that_a_death_interrupts(survivor: Survivor) -> None:
    path = survivor.device / "holes"
    path.touch()
    os.truncate(path, 4 * MIB)
    end = threading.Event()
    found = set()

    def read() -> None:
        memory = bytearray(4 * MIB)
        with open(path, "rb", buffering=0) as file:
            while not end.is_set():
                try:
                    found.add(os.preadv(file.fileno(), [memory], 0))
                except OSError as error:
                    found.add(-(error.errno or 0))

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    try:
        for _ in range(2):
            time.sleep(0.1)
            survivor.kill()
    finally:
        end.set()
        for reader in readers:
            reader.join()
    assert found == {4 * MIB}


@pytest.mark.driver
def test_keeper_dies(of_each_driver: Survivor) -> None:
    """The daemon starts another keeper, and survives with it; if both die, the mount ends and can be unmounted."""
    (of_each_driver.device / "file").write_bytes(b"contents" * 1_000_000)
    (former,) = of_each_driver.keepers()
    os.kill(former, signal.SIGKILL)
    wait_until(lambda: of_each_driver.keepers() not in ([], [former]), PATIENCE, "another keeper")
    of_each_driver.kill()
    assert (of_each_driver.device / "file").read_bytes() == b"contents" * 1_000_000


def test_keeper_that_is_stalled(survivor: Survivor) -> None:
    """Another one takes its place, which gets everything."""
    contents = b"contents" * 20_000
    (former,) = survivor.keepers()
    os.kill(former, signal.SIGSTOP)
    (survivor.device / "file").write_bytes(contents)

    def change_files() -> bool:  # whose descriptors it does not take, nor that they are to be closed
        for _ in range(50):
            (survivor.device / "other").write_bytes(contents)
            os.unlink(survivor.device / "other")
        return former not in survivor.keepers()

    wait_until(change_files, PATIENCE, "the end of the keeper")
    wait_until(lambda: survivor.report()["survives"], PATIENCE, "that the mount survives")
    survivor.kill()
    assert (survivor.device / "file").read_bytes() == contents
    os.unlink(survivor.device / "file")
    wait_until(lambda: status(survivor.path).devices[0].used_bytes == 0, PATIENCE, "the memory to be free")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system that does not answer")
@pytest.mark.parametrize("survives", [True, False])
def test_daemon_that_cannot_end(tmp_path: Path, survives: bool) -> None:
    """It copies from a file whose server does not answer. Another one takes over, or the guard ends the mount."""
    options = () if survives else ("--no-survive",)
    with HangingMount(size=8 * MIB) as hanging, mounted(tmp_path / "mount", *options) as mount:
        (mount.device / "file").write_bytes(b"contents")
        former = mount.pid
        words = [*GPUFS, "cp", str(hanging.file), str(mount.device / "copy")]
        with subprocess.Popen(words, stderr=subprocess.DEVNULL) as copying:
            wait_until(hanging.hanging, PATIENCE, "the copy")
            os.kill(former, signal.SIGKILL)
            if survives:
                mount.await_another(former)
                assert (mount.device / "file").read_bytes() == b"contents"
            else:
                wait_until(lambda: not mounted_at(str(mount.path)), PATIENCE, "the end of the mount")
            assert not has_ended(former) or os.listdir(f"/proc/{former}/task") != [str(former)]  # it waits still
            hanging.release()
            assert copying.wait(PATIENCE) != 0
        if not survives:
            gpufs("mount", mount.path, "--driver", "host", "--memory", "64M")  # the place is free


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system that does not answer")
def test_who_holds_a_directory_delays_nobody_elsewhere(survivor: Survivor) -> None:
    """Not even what ends in that directory, nor a takeover."""
    place, other = survivor.device / "held", survivor.device / "other"
    for directory in (place, other):
        directory.mkdir()
    (place / "file").write_bytes(bytes(4 * MIB))
    memory = os.memfd_create("memory")
    os.ftruncate(memory, MIB)
    array = numpy.frombuffer(mmap.mmap(memory, MIB), numpy.uint8)
    os.close(memory)
    opened = open(place / "file", "r+b", buffering=0)  # noqa: SIM115
    ending = gpufs_client.register(array, place / "registered")
    with opened, held(place):
        began = time.monotonic()
        for number in range(2):
            assert opened.write(b"bytes") == 5
            (other / "file").write_bytes(bytes(MIB))
            with gpufs_client.attach(other / "file", "r+"):
                pass
            gpufs("cp", "/bin/sh", other / "copy")
            with gpufs_client.register(array, other / "registered") as made:
                assert made.nbytes == MIB
            if number == 0:
                ending.close()
                survivor.kill()
        gpufs("restart", survivor.path)
        assert time.monotonic() - began < PATIENCE / 2
    assert os.listdir(place) == ["file"]


def test_the_systemd_unit_removes_a_dead_mount(survivor: Survivor) -> None:
    """Also one that somebody has just looked at, whose attributes the kernel still knows; and no other."""
    unit = (REPOSITORY / "mount_helpers/gpufs@.service").read_text()
    (line,) = re.findall(r"^ExecStopPost=-(.*)$", unit, re.MULTILINE)
    line = line.replace("@GPUFS@", shlex.join(GPUFS)).replace("$$", "$").replace("%f", str(survivor.path))
    command = shlex.split(line)
    run(*command)
    assert mounted_at(str(survivor.path))
    processes = [*survivor.keepers(), survivor.pid]
    survivor.path.stat()
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for process in processes:
            os.kill(process, number)
    wait_until(lambda: all(map(has_ended, processes)), PATIENCE, "the end of the mount's processes")
    run(*command)
    gpufs("mount", survivor.path, "--driver", "host", "--memory", "64M")  # the place is free


def test_sigterm_while_a_daemon_starts(survivor: Survivor) -> None:
    """It ends the mount, as it does later."""
    (keeper,) = survivor.keepers()
    former = survivor.pid
    os.kill(former, signal.SIGKILL)
    (starting,) = wait_until(lambda: set(children_of(keeper)) - {former}, PATIENCE, "another daemon")
    os.kill(starting, signal.SIGTERM)
    wait_until(lambda: not survivor.keepers() and has_ended(starting), PATIENCE, "the end of the mount")
    gpufs("mount", survivor.path, "--driver", "host", "--memory", "64M")  # the place is free


def test_mount_that_is_only_elsewhere(survivor: Survivor, tmp_path: Path) -> None:
    """A bind mount of it survives, and so does a detached mount that is in use."""
    (survivor.device / "file").write_bytes(b"contents")
    bound = Survivor(tmp_path / "bound")
    bound.path.mkdir()
    run("mount", "--bind", survivor.path, bound.path)
    gpufs("umount", "--lazy", survivor.path)
    former = bound.pid
    try:
        os.kill(former, signal.SIGKILL)
        bound.await_another(former)
        assert (bound.device / "file").read_bytes() == b"contents"
        with open(bound.device / "file", "rb", buffering=0) as file:
            former = bound.pid
            run("umount", "--lazy", bound.path)
            os.kill(former, signal.SIGKILL)
            assert file.read() == b"contents"
    finally:
        run("umount", "--lazy", bound.path, check=False)
    wait_until(lambda: not survivor.keepers(), PATIENCE, "the end of the mount")
    gpufs("mount", survivor.path, "--driver", "host", "--memory", "64M")  # the place is free


def test_restart_while_the_mount_ends(survivor: Survivor) -> None:
    """SIGTERM has come first: no other daemon takes over."""
    former = survivor.pid
    with open(survivor.device / "file", "wb"):  # so the mount ends only after half a second
        os.kill(former, signal.SIGTERM)
        log = survivor.path.with_name("log")
        wait_until(lambda: "SIGTERM: the mount ends" in log.read_text(), PATIENCE, "the signal")
        os.kill(former, signal.SIGUSR2)
        wait_until(lambda: not survivor.keepers() and has_ended(former), PATIENCE, "the end of the mount")
    gpufs("mount", survivor.path, "--driver", "host", "--memory", "64M")  # the place is free


def test_counters_of_dead_daemons_are_removed(survivor: Survivor) -> None:
    for _ in range(2):
        survivor.kill()
    device = os.stat(survivor.path).st_dev
    assert len(find(f"{os.major(device)}:{os.minor(device)}", os.geteuid())) == 1


@pytest.mark.driver
def test_restart(survivor: Survivor) -> None:
    """`gpufs restart` continues a mount in a new daemon; `gpufs status` says beforehand whether that is possible."""
    (survivor.device / "file").write_bytes(b"contents" * 100_000)
    open_file = open(survivor.device / "file", "rb", buffering=0)  # noqa: SIM115
    assert survivor.report()["survives"]
    for _ in range(2):
        former = survivor.pid
        gpufs("restart", survivor.path)
        assert survivor.pid not in (0, former)
    assert os.pread(open_file.fileno(), 8, 8 * 99_999) == b"contents"
    open_file.close()


def test_deaths_are_counted_whoever_keeps_the_mount(survivor: Survivor) -> None:
    """The mount shows how many daemons died, and when and of what the last one did. A restart does not count."""
    (survivor.device / "file").write_bytes(b"contents")
    first = survivor.report()
    assert first["deaths"]["count"] == 0
    survivor.kill()
    (keeper,) = survivor.keepers()
    os.kill(keeper, signal.SIGKILL)
    wait_until(lambda: survivor.keepers() not in ([], [keeper]), PATIENCE, "another keeper")
    wait_until(lambda: survivor.report()["survives"], PATIENCE, "that the mount survives")
    survivor.kill(signal.SIGSEGV)
    gpufs("restart", survivor.path)
    now = survivor.report()
    assert (now["deaths"]["count"], now["started"]) == (2, first["started"])
    assert now["uptime"] >= now["deaths"]["last"] - now["started"] >= 0
    if os.uname().release.split(".") >= ["6", "15"]:
        assert "11" in now["deaths"]["cause"]
    assert "deaths" in gpufs("status", survivor.path).stdout
    assert f'gpufs_deaths_total{{mountpoint="{survivor.path}"}} 2.0' in gpufs("metrics", survivor.path).stdout


def test_restart_during_a_takeover(survivor: Survivor) -> None:
    """The daemon that has answered dies before it is asked: the next one is."""
    for round_number in range(3):
        (keeper,) = survivor.keepers()
        os.kill(keeper, signal.SIGUSR1)  # forgets the deaths
        former = survivor.pid
        with subprocess.Popen([*GPUFS, "restart", survivor.path], stderr=subprocess.PIPE, text=True) as child:
            time.sleep(0.1 + 0.1 * round_number)
            with suppress(ProcessLookupError):
                os.kill(former, signal.SIGKILL)
            _, errors = child.communicate(timeout=PATIENCE)
        assert (child.returncode, errors) == (0, "")


def test_restart_refuses(tmp_path: Path) -> None:
    """What would end a mount is refused, with the reason, and the mount goes on."""
    with mounted(tmp_path / "mount", "--no-survive") as mount:
        former = mount.pid
        assert not mount.report()["survives"]
        done = gpufs("restart", mount.path, check=False)
        assert done.returncode == 1
        assert "survive" in done.stderr
        assert mount.pid == former
    assert gpufs("restart", tmp_path, check=False).returncode == 1
    assert gpufs("restart", check=False).returncode == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="acts as several users, which takes root")
def test_restart_all(tmp_path: Path) -> None:
    """All mounts of a user, and no others; a mount of root's is refused by name."""
    with mounted(tmp_path / "mount", "--allow-other") as roots, plain_user() as environment:
        tmp_path.chmod(0o711)
        command, environment = user_gpufs(environment)

        def as_user(*words: str) -> subprocess.CompletedProcess[str]:
            return run(*command, *words, env=environment, user=NOBODY, group=NOBODY, cwd="/", check=False)

        places = [Path(environment["HOME"], name) for name in ("first", "second", "third")]
        try:
            for place in places:
                place.mkdir()
                os.chown(place, NOBODY, NOBODY)
                more = ["--no-survive"] if place.name == "third" else []
                done = as_user("mount", str(place), "--driver", "host", "--memory", "16M", *more)
                assert done.returncode == 0, done
            before = {place: status_as_user(as_user, place)["pid"] for place in places}
            former = roots.pid
            done = as_user("restart", str(roots.path))
            assert done.returncode == 1
            assert str(roots.path) in done.stderr
            done = as_user("restart", "--all")
            assert done.returncode == 0, done
            after = {place: status_as_user(as_user, place)["pid"] for place in places}
            assert [before[place] == after[place] for place in places] == [False, False, True]
            assert str(places[2]) in done.stderr
            assert roots.pid == former
        finally:
            as_user("umount", "--all", "--force")


def status_as_user(as_user: Callable[..., subprocess.CompletedProcess[str]], place: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(as_user("status", "--json", str(place)).stdout)
    return found


def test_restart_by_a_version_with_another_journal(tmp_path: Path) -> None:
    """A stand-in for such a version. The mount goes on in the daemon that it has."""
    (tmp_path / "sitecustomize.py").write_text("import gpufs.engine\ngpufs.engine.journal_format = lambda: 1000\n")
    with mounted(tmp_path / "mount") as mount:
        (mount.device / "file").write_bytes(b"contents")
        former = mount.pid
        path = os.pathsep.join([os.fspath(tmp_path), os.environ.get("PYTHONPATH", "")])
        done = gpufs("restart", mount.path, check=False, env={**os.environ, "PYTHONPATH": path})
        assert done.returncode == 1
        assert "1000" in done.stderr
        assert done.stderr.count("\n") == 1
        assert mount.pid == former
        assert (mount.device / "file").read_bytes() == b"contents"


def test_the_size_of_a_device_stays(tmp_path: Path) -> None:
    """By default it follows from the memory that is free at the beginning, of which the files take some."""
    with mounted(tmp_path / "mount", memory=None) as mount:
        size = os.statvfs(mount.device).f_blocks
        with open(mount.device / "file", "wb") as file:
            os.posix_fallocate(file.fileno(), 0, 256 * MIB)
        mount.kill()
        assert os.statvfs(mount.device).f_blocks == size
        mount.kill()
        assert os.statvfs(mount.device).f_blocks == size
        assert os.stat(mount.device / "file").st_blocks == 256 * MIB // 512


# What goes wrong in a daemon that takes over; FAILURES has what some of them call.
FAULTS = {
    "the keeper's descriptors": "gpufs.daemon.takeover.begin = too_many",
    "the engine": "gpufs.engine.Engine.__init__ = too_many",
    "the mount": "gpufs.engine.Mount.__init__ = too_many",
    "its start": "gpufs.engine.Mount.start = too_many",
    "the event loop": "trio.run = too_many",
    "no memory": "trio.run = no_memory",
    "the loop of requests": "gpufs.fs.connection.RequestLoop.serve = fails",
    "threads": "gpufs.threads.run = fails",
    "a crash": "trio.run = lambda *_: os.abort()",
    "an exit": "trio.run = lambda *_: os._exit(3)",
}
IN_SHORT = ("the mount", "no memory", "threads", "a crash")
FAILURES = """
import trio, gpufs.daemon.takeover, gpufs.engine, gpufs.fs.connection, gpufs.threads

def too_many(*_, **__):
    raise OSError(24, "Too many open files, as planned")

def no_memory(*_, **__):
    raise MemoryError

async def fails(*_, **__):
    raise RuntimeError("as planned")

"""


@pytest.mark.parametrize(
    "fault",
    [fault if fault in IN_SHORT else pytest.param(fault, marks=pytest.mark.slow) for fault in FAULTS],
)
def test_a_takeover_that_fails(tmp_path: Path, fault: str) -> None:
    """Whatever fails before the first answer, nothing is lost: `gpufs restart` works once the cause is gone."""
    environment, broken = failing_takeovers(tmp_path, FAILURES + FAULTS[fault])
    with mounted(tmp_path / "mount", environment=environment) as mount:
        (mount.device / "file").write_bytes(b"contents" * 100_000)
        (keeper,) = mount.keepers()
        former = mount.pid
        broken.touch()
        os.kill(former, signal.SIGKILL)
        wait_until(lambda: keeper_state(keeper).startswith("2\n"), PATIENCE, "a second death")
        if fault == "threads":  # the longest one: in the third pause
            wait_until(lambda: errno_of(lambda: os.listdir(mount.device)) == EIO, PATIENCE, "errors")
            done = gpufs("status", "--check", mount.path, check=False)
            assert done.returncode != 0
            assert "gpufs restart" in done.stdout + done.stderr
        broken.unlink()
        gpufs("restart", mount.path)
        assert mount.pid not in (0, former)
        assert (mount.device / "file").read_bytes() == b"contents" * 100_000
        assert mount.keepers() == [keeper]


def keeper_state(keeper: int) -> str:
    for fd, link in links_of(keeper).items():
        if link.startswith("/memfd:gpufs-keeper-state"):
            return Path(f"/proc/{keeper}/fd/{fd}").read_text()
    raise AssertionError


def test_calls_fail_only_while_no_daemon_can_be_started(survivor: Survivor) -> None:
    """Daemons that have answered are replaced at once, however many die: programs wait, and see no error."""
    (survivor.device / "file").write_bytes(b"contents" * 100_000)
    with open(survivor.device / "file", "rb", buffering=0) as file:
        for _ in range(5):
            former = survivor.pid
            os.kill(former, signal.SIGKILL)
            assert os.pread(file.fileno(), 8, 0) == b"contents"
            survivor.await_another(former)


def test_context_that_fails(tmp_path: Path) -> None:
    """As after an Xid: another daemon has a new context, and the same memory. Only that GPU's calls fail in between."""
    plan = fake_gpu.plan("cuMemcpyDtoHAsync_v2", 6, fake_gpu.ILLEGAL_ADDRESS)  # in each process
    environment = fake_gpu.environment(tmp_path, plan, devices=2)
    data, other = random.Random(0).randbytes(MIB), random.Random(1).randbytes(MIB)
    with mounted(tmp_path / "mount", driver="cuda", environment=environment) as mount:
        former = mount.pid
        (mount.device / "file").write_bytes(data)
        (mount.path / "gpu1" / "file").write_bytes(other)
        with open(mount.device / "file", "rb", buffering=0) as file:
            for _ in range(6):
                error = errno_of(os.pread, file.fileno(), 4096, 0)
            assert error == EIO
            mount.await_another(former)
            assert os.pread(file.fileno(), MIB, 0) == data
        assert (mount.path / "gpu1" / "file").read_bytes() == other
        assert [device["health"] for device in mount.report()["devices"]] == ["good", "good"]
        assert mount.report()["survives"]
