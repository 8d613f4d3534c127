"""What goes wrong around a mount: who dies in the middle of something, and what runs out. Nothing hangs or is lost."""

from __future__ import annotations

import json
import mmap
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from errno import EMFILE, ENFILE
from pathlib import Path
from typing import Any

import pytest
from support.data import MIB, assert_same, noise, read_all
from support.mounting import GPUFS, GpufsMount, Mounter
from support.processes import (
    NOBODY,
    PATIENCE,
    Snapshot,
    errno_of,
    in_child,
    plain_user,
    run,
    session_processes,
    wait_until,
)
from support.users import user_gpufs

from gpufs import mounting
from gpufs.client._connection import Connection

pytestmark = [pytest.mark.complains]
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="makes mount namespaces, which takes root")

# Programs that never end by themselves, each a way to use a mount; {m}: the device's directory, {h}: one of the host.
PROGRAMS = {
    "dd": "while :; do dd if=/dev/zero of={m}/dd bs=1M count=64 status=none; done",
    "cp": "while :; do cp {m}/source {m}/cp; cp {m}/source {h}/cp; cp {h}/source {m}/cp; done",
    "gpufs-cp": "while :; do {gpufs} cp {m}/source {h}/out; {gpufs} cp {h}/source {m}/in; done",
    "readdir": "while :; do ls -lR {m} >/dev/null; done",
    "names": "while :; do mkdir {m}/a; touch {m}/a/f; mv {m}/a/f {m}/a/g; ln {m}/a/g {m}/h; rm -rf {m}/a {m}/h; done",
    "mmap": "exec {python} -c '"
    'import mmap; f = open("{m}/mapped", "w+b"); f.truncate(16 << 20); area = mmap.mmap(f.fileno(), 0)\n'
    "while True:\n for at in range(0, 16 << 20, 4096): area[at] = at >> 12 & 255\n area.flush()'",
}


@contextmanager
def running(name: str, mounted: GpufsMount, host: Path) -> Iterator[subprocess.Popen[bytes]]:
    """One of PROGRAMS in a process group of its own, which is gone afterwards."""
    script = PROGRAMS[name].format(m=mounted.device, h=host, gpufs=" ".join(GPUFS), python=sys.executable)
    process = subprocess.Popen(
        ["sh", "-c", script], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        kill(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kills the whole group and waits until none of it is left."""

    def gone() -> bool:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return True
        process.poll()
        return False

    wait_until(gone, 30, "the killed processes to go")
    process.wait(PATIENCE)


def held(mounted: GpufsMount) -> dict[str, int]:
    """What the mount holds, by its own words."""
    status = json.loads((mounted.path / ".gpufs/status").read_text())
    table = status["statistics"]["table"]
    return {
        "open files": table["open_files"],
        "orphans": table["orphans"],
        "bytes": sum(device["held_bytes"] for device in status["devices"]),
        "copies": status["transfers"]["running"],
    }


def is_empty(mounted: GpufsMount) -> bool:
    return not any(held(mounted).values())


def empty(directory: Path) -> None:
    for entry in os.scandir(directory):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)


def clients_are_killed(mount: Mounter, host: Path, rounds: int) -> None:
    mounted = mount(memory=512 * MIB)
    (host / "source").write_bytes(noise(40 * MIB))
    before: Snapshot | None = None
    for round_ in range(rounds):
        for name in PROGRAMS:
            shutil.copy(host / "source", mounted.device / "source")
            with running(name, mounted, host):
                time.sleep(0.3 + 0.037 * (round_ % 11))
            assert_same(read_all(mounted.device / "source"), noise(40 * MIB))
            empty(mounted.device)
        wait_until(lambda: is_empty(mounted), 20, "all of it to be given back")
        if before is None:
            before = Snapshot.of(mounted.pid)
    assert before is not None
    limit = before.descriptors + 2
    wait_until(lambda: Snapshot.of(mounted.pid).descriptors <= limit, 20, "closed descriptors")
    mounted.unmount()


def test_clients_are_killed(mount: Mounter, reference: Path) -> None:
    clients_are_killed(mount, reference, 1)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_clients_are_killed_again_and_again(mount: Mounter, reference: Path) -> None:
    clients_are_killed(mount, reference, 40)


@pytest.mark.parametrize("stopped", [False, True])
def test_the_daemon_is_killed_under_all_of_them(mount: Mounter, reference: Path, stopped: bool) -> None:
    """Whatever a program does in that moment, it gets an error or a signal, and can be ended."""
    mounted = mount(memory=512 * MIB)
    (reference / "source").write_bytes(noise(40 * MIB))
    shutil.copy(reference / "source", mounted.device / "source")
    running_now = [running(name, mounted, reference) for name in PROGRAMS]
    processes = [one.__enter__() for one in running_now]
    try:
        time.sleep(1)
        if stopped:
            mounted.signal(signal.SIGSTOP)
            time.sleep(0.3)
        mounted.signal(signal.SIGKILL)
        assert mounted.daemon.wait(PATIENCE) == -signal.SIGKILL
        wait_until(lambda: not mounted.mounted(), 30, "the guard to take the mount away")
        # The one that only maps is ended by SIGBUS, or by the error of its flush.
        mapping = processes[list(PROGRAMS).index("mmap")]
        assert mapping.wait(PATIENCE) != 0
    finally:
        for one in running_now:
            one.__exit__(None, None, None)
    assert os.listdir(mounted.path) == []


# ---- what runs out ----


@contextmanager
def limited(pid: int, what: int, most: int) -> Iterator[None]:
    """A soft limit of a process, for a while."""
    before = resource.prlimit(pid, what)
    resource.prlimit(pid, what, (most, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, what, before)


def fails_with_one_line(*words: object) -> str:
    done = run(*GPUFS, *map(str, words), check=False)
    assert done.returncode == 1, done
    assert done.stdout == ""
    return done.stderr


def test_no_descriptors_for_the_daemon(mount: Mounter, reference: Path) -> None:
    """Buffers of the host driver and clients of the copy service need some."""
    mounted = mount(memory=512 * MIB)
    (reference / "source").write_bytes(noise(4 * MIB))
    (mounted.device / "small").write_bytes(b"small")
    (mounted.device / "kept").write_bytes(noise(4 * MIB))
    numbers = max(map(int, os.listdir(f"/proc/{mounted.pid}/fd"))) + 1
    with limited(mounted.pid, resource.RLIMIT_NOFILE, numbers + 3):
        failed = [errno_of((mounted.device / f"file{n}").write_bytes, noise(4 * MIB)) for n in range(30)]
        assert {EMFILE, ENFILE} & set(failed)
        assert set(failed) <= {0, EMFILE, ENFILE}
        # What others mount meanwhile is nothing to fail for, though it cannot be looked at.
        (reference / "other").mkdir()
        for _ in range(3):
            run("mount", "-t", "tmpfs", "tmpfs", reference / "other")
            run("umount", reference / "other")
        assert_same(read_all(mounted.device / "kept"), noise(4 * MIB))
        # Without its service a copy goes through the mount, or fails as cp would.
        run(*GPUFS, "cp", mounted.device / "kept", reference / "out")
        assert_same((reference / "out").read_bytes(), noise(4 * MIB))
    empty(mounted.device)
    wait_until(lambda: is_empty(mounted), 20, "all of it to be given back")
    run(*GPUFS, "cp", reference / "source", mounted.device / "again")
    mounted.unmount()


def test_the_end_without_descriptors(mount: Mounter) -> None:
    mounted = mount()
    resource.prlimit(mounted.pid, resource.RLIMIT_NOFILE, (3, 3))
    mounted.signal(signal.SIGTERM)
    assert mounted.daemon.wait(PATIENCE) == 0
    assert not mounted.mounted()


def test_no_room_on_the_disk_of_the_log(mount: Mounter, reference: Path) -> None:
    """The mount is worth more than its log."""
    full = reference / "full"
    full.mkdir()
    run("mount", "-t", "tmpfs", "-o", "size=4k", "none", full)
    try:
        mounted = mount("--log-level", "debug", "--log-file", str(full / "log"))
        for number in range(50):
            (mounted.device / "file").write_bytes(noise(MIB, number))
            run(*GPUFS, "cp", mounted.device / "file", reference / "out")
        assert (full / "log").stat().st_size == 4096
        mounted.unmount()
    finally:
        run("umount", "-l", full)


@AS_ROOT
def test_a_user_cannot_fill_the_log(mount: Mounter, reference: Path) -> None:
    mounted = mount(allow_other=True)
    path = (mounted.path / ".gpufs/socket").read_text().strip()

    def ask(times: int) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.connect(path)
        null = os.open(os.devnull, os.O_RDWR)
        with Connection(sock) as connection:
            for _ in range(times):
                assert connection.copy("load", null, null).error != 0

    in_child(lambda: ask(400), uid=NOBODY, gid=NOBODY)
    assert mounted.log.read_text().count(f"of user {NOBODY}") < 200

    def counted() -> bool:
        ask(1)
        return f" more lines about user {NOBODY} left out" in mounted.log.read_text()

    wait_until(counted, 30, "what was left out to be counted")
    mounted.log.write_text("")  # none of it is a failure of the mount's


@pytest.mark.parametrize("options", ["size=4k,nr_inodes=2", "ro"])
@AS_ROOT
def test_a_temporary_directory_that_is_full_or_read_only(tmp_path: Path, options: str) -> None:
    script = f"""
        cd {tmp_path}
        mkdir m tmp
        mount -t tmpfs -o {options} none tmp
        "$@" mount m --driver host --memory 64M
        echo works >m/gpu0/file
        cat m/gpu0/file
        "$@" umount m
    """
    environment = {**os.environ, "TMPDIR": f"{tmp_path}/tmp"}
    done = run("unshare", "-m", "sh", "-euc", script, "sh", *GPUFS, cwd="/", env=environment)
    assert (done.stdout, done.stderr) == ("works\n", "")


@pytest.mark.parametrize("what", ["full", "read-only", "removed", "unmounted"])
@AS_ROOT
def test_a_runtime_directory_that_cannot_be_used(tmp_path: Path, what: str) -> None:
    """What is below /run serves those who look in from outside: the mount does without it, and so does a copy."""
    before = {
        "full": "head -c 1M /dev/zero >/run/zeros || true",
        "read-only": "mount -o remount,ro /run",
    }.get(what, "true")
    after = {"removed": "rm -r /run/gpufs", "unmounted": "umount -l /run"}.get(what, "true")
    script = f"""
        mount -t tmpfs -o size=64k none /run
        mkdir /run/gpufs
        {before}
        cd {tmp_path}
        mkdir m
        "$@" mount m --driver host --memory 64M
        {after}
        head -c 3000000 /dev/urandom >m/gpu0/file
        "$@" cp m/gpu0/file copy
        cmp m/gpu0/file copy
        "$@" stats m >/dev/null
        "$@" umount m
        ! pgrep -f "gpufs.daemon .*{tmp_path}/m$"
    """
    done = run("unshare", "-m", "-p", "-f", "--mount-proc", "sh", "-euc", script, "sh", *GPUFS, cwd="/", check=False)
    assert (done.returncode, done.stdout) == (0, ""), done
    lines = [line for line in done.stderr.splitlines() if not line.startswith("head: ")]
    assert all("copying through the mount instead" in line for line in lines)
    assert bool(lines) == (what in ("removed", "unmounted"))


def test_a_runtime_directory_of_a_plain_user_goes(mount: Mounter) -> None:
    """As at his logout, when systemd removes it beneath a mount that stays."""
    with plain_user() as environment:
        user = user_gpufs(environment)
        mounted = mount(user=user)
        runtime = Path(environment["XDG_RUNTIME_DIR"]) / "gpufs"
        wait_until(lambda: list(runtime.glob("*.socket")), 20, "the socket")
        shutil.rmtree(runtime)

        def use() -> None:
            (mounted.device / "file").write_bytes(noise(MIB))
            assert_same(read_all(mounted.device / "file"), noise(MIB))

        in_child(use, uid=NOBODY, gid=NOBODY)
        mounted.unmount()


# ---- what stays of a mount ----


def pids_of(mounted: Path) -> list[int]:
    found = session_processes(os.environ["GPUFS_TEST_SESSION"])
    return [pid for pid, line in found.items() if "gpufs.daemon" in line and str(mounted) in line]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A directory to mount at by the command; what was left there is gone afterwards."""
    path = tmp_path / "mnt"
    path.mkdir()
    yield path
    run(*GPUFS, "umount", "--force", path, check=False)
    for pid in pids_of(path):
        os.kill(pid, signal.SIGKILL)


def mount_at(path: Path) -> int:
    """Mounts in the background; the number of the daemon."""
    before = pids_of(path)
    run(*GPUFS, "mount", path, "--driver", "host", "--memory", "64M")
    (pid,) = set(pids_of(path)) - set(before)
    return pid


@AS_ROOT
def test_umount_tells_of_another_namespace(place: Path) -> None:
    """A copy of the mount in another mount namespace keeps it alive, and its daemon with it."""
    pid = mount_at(place)
    keeper = subprocess.Popen(["unshare", "-m", "--propagation", "private", "sleep", "100"])
    try:
        wait_until(lambda: Path(f"/proc/{keeper.pid}/comm").read_text() == "sleep\n", 20, "the namespace")
        text = fails_with_one_line("umount", place, "--umount-timeout", "1")
        assert f"its process ({pid}) has not ended" in text
        assert f"also at {place} in the mount namespace of sleep ({keeper.pid})" in text
        assert "--force ends it" in text
        text = fails_with_one_line("umount", place, "--umount-timeout", "1")
        assert f"no gpufs is mounted there any more, but its process ({pid}) serves one" in text
        # Another one at the same place has nothing to do with it.
        mount_at(place)
        run(*GPUFS, "umount", place)
        assert pids_of(place) == [pid]
        run(*GPUFS, "umount", "--force", place)
        assert pids_of(place) == []
    finally:
        keeper.kill()
        keeper.wait()


def test_umount_tells_of_other_places(place: Path, tmp_path: Path) -> None:
    pid = mount_at(place)
    other = tmp_path / "other"
    other.mkdir()
    run("mount", "--bind", place / "gpu0", other)
    try:
        text = fails_with_one_line("umount", place, "--umount-timeout", "1")
        assert f"for the mount is also at {other} (--force ends it)" in text
        (other / "file").write_bytes(b"lives")
    finally:
        run("umount", other)
    wait_until(lambda: pid not in pids_of(place), 20, "the daemon to end")


def test_a_mount_that_is_still_in_use_does_not_delay_the_next(place: Path) -> None:
    first = mount_at(place)
    with open(place / "gpu0/held", "wb"):
        run(*GPUFS, "umount", "--lazy", place)
        second = mount_at(place)
        (place / "gpu0/file").write_bytes(b"x")
        run(*GPUFS, "umount", place, "--umount-timeout", "1000", timeout=200)  # not for the first one's end
        assert pids_of(place) == [first]
        assert second != first
    wait_until(lambda: not pids_of(place), 20, "the first daemon to end")


def test_sockets_of_killed_daemons_are_swept(place: Path) -> None:
    pid = mount_at(place)
    entry = mounting.entry_of(str(place))
    assert entry is not None
    path = Path((place / ".gpufs/socket").read_text().rstrip("\n"))
    fresh = path.with_name("1-0-1.socket")
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not mounting.entry_of(str(place)), 20, "the guard to take the mount away")
    assert path.exists()
    old = time.time() - 3600
    os.utime(path, (old, old))
    path.with_name("unrelated").touch()
    os.close(os.open(fresh, os.O_CREAT | os.O_WRONLY))  # a file of such a name is none of ours
    os.utime(fresh, (old, old))
    try:
        living = mount_at(place)
        assert not path.exists()
        assert fresh.exists()
        socket = Path((place / ".gpufs/socket").read_text().rstrip("\n"))
        os.utime(socket, (old, old))
        next_place = place.with_name("next")
        next_place.mkdir()
        mount_at(next_place)
        assert socket.exists()  # somebody listens
        run(*GPUFS, "umount", next_place)
        assert pids_of(place) == [living]
    finally:
        fresh.unlink()
        path.with_name("unrelated").unlink()


# ---- many ----


def mount_together(tmp_path: Path, count: int, together: int = 4) -> None:
    """So many at once, each with a file of its own; ended together, too, and nothing is left of them."""
    places = [tmp_path / f"m{number}" for number in range(count)]

    def at_once(action: Callable[[Path], list[Any]]) -> None:
        for first in range(0, count, together):
            started = [subprocess.Popen([*GPUFS, *map(str, action(path))]) for path in places[first : first + together]]
            assert [process.wait(120) for process in started] == [0] * len(started)

    before = {path.name for path in Path("/run/gpufs").glob("*")}  # of earlier processes, maybe of the same numbers
    for path in places:
        path.mkdir()
    try:
        at_once(lambda path: ["mount", path, "--driver", "host", "--memory", "64M"])
        for number, path in enumerate(places):
            (path / "gpu0/file").write_bytes(noise(MIB, number))
        for number, path in enumerate(places):
            assert_same(read_all(path / "gpu0/file"), noise(MIB, number))
        pids = pids_of(tmp_path)
        assert len(pids) == count
        table = run(*GPUFS, "status").stdout
        assert all(str(path) in table for path in places)
        at_once(lambda path: ["umount", path])
    finally:
        for path in places:
            if mounting.entry_of(str(path)):
                run(*GPUFS, "umount", "--force", path, check=False)
    left = session_processes(os.environ["GPUFS_TEST_SESSION"])
    assert not [line for line in left.values() if str(tmp_path) in line]
    files = {path.name for path in Path("/run/gpufs").glob("*")} - before
    assert not [name for name in files for pid in pids if name.startswith(f"{pid}-")]


def test_a_dozen_mounts_at_once(tmp_path: Path) -> None:
    mount_together(tmp_path, 12)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_hundred_mounts_at_once(tmp_path: Path) -> None:
    mount_together(tmp_path, 200)


def test_a_mapping_outlives_its_daemon_in_peace(mount: Mounter) -> None:
    """The process that holds it can close it and go on: only touching what was not there yet is fatal."""
    mounted = mount()
    (mounted.device / "file").write_bytes(noise(MIB))
    with open(mounted.device / "file", "r+b") as file:
        area = mmap.mmap(file.fileno(), 0)
        assert area[:10] == noise(MIB)[:10]
        mounted.signal(signal.SIGKILL)
        mounted.daemon.wait(PATIENCE)
        area.close()


@AS_ROOT
def test_a_daemon_that_ends_late_leaves_the_next_mount_alone(mount: Mounter) -> None:
    """The kernel gives the numbers of a mount that is gone to the next one."""
    first = mount()
    was = mounting.entry_of(str(first.path))
    first.signal(signal.SIGSTOP)
    run("umount", "-l", first.path)
    second = mount()
    now = mounting.entry_of(str(second.path))
    assert was is not None
    assert now is not None
    first.signal(signal.SIGCONT)
    first.wait_ended()
    assert mounting.entry_of(str(second.path)) == now, was.identity == now.identity
    (second.device / "file").write_bytes(b"x")
    second.unmount()
