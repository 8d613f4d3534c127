"""Faults around a mount: clients and daemons are killed, resources run out. Nothing hangs or is lost."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EMFILE, ENFILE
from pathlib import Path

import pytest
from support.data import MIB, assert_same, noise, read_all
from support.mounting import GPUFS, GpufsMount, Mounter
from support.processes import (
    NOBODY,
    PATIENCE,
    SESSION_VARIABLE,
    Snapshot,
    errno_of,
    in_child,
    run,
    session_processes,
    wait_until,
)

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
    """What the mount holds, as it reports it."""
    status = mounted.status()
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


@pytest.mark.parametrize("rounds", [1, pytest.param(40, marks=pytest.mark.slow)])
def test_killed_clients_leave_nothing_held(mount: Mounter, reference: Path, rounds: int) -> None:
    host, mounted = reference, mount(memory=512 * MIB)
    (host / "source").write_bytes(noise(40 * MIB))
    before: Snapshot | None = None
    for round_ in range(rounds):
        for name in PROGRAMS:
            shutil.copy(host / "source", mounted.device / "source")
            with running(name, mounted, host):
                time.sleep(0.3 + 0.037 * (round_ % 11))
            assert_same(read_all(mounted.device / "source"), noise(40 * MIB))
            empty(mounted.device)
        wait_until(lambda: is_empty(mounted), 20, "all memory to be released")
        if before is None:
            before = Snapshot.of(mounted.pid)
    assert before is not None
    limit = before.descriptors + 2
    wait_until(lambda: Snapshot.of(mounted.pid).descriptors <= limit, 20, "closed descriptors")
    mounted.unmount()


@pytest.mark.parametrize("stopped", [False, True])
def test_a_killed_daemon_ends_all_its_clients(mount: Mounter, reference: Path, stopped: bool) -> None:
    """Every program gets an error or a signal and can be killed."""
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


def test_a_daemon_without_free_descriptors_keeps_its_files(mount: Mounter, reference: Path) -> None:
    """Buffers of the host driver and clients of the copy service need descriptors."""
    mounted = mount(memory=512 * MIB)
    (reference / "source").write_bytes(noise(4 * MIB))
    (mounted.device / "small").write_bytes(b"small")
    (mounted.device / "kept").write_bytes(noise(4 * MIB))
    numbers = max(map(int, os.listdir(f"/proc/{mounted.pid}/fd"))) + 1
    with limited(mounted.pid, resource.RLIMIT_NOFILE, numbers + 3):
        failed = [errno_of((mounted.device / f"file{n}").write_bytes, noise(4 * MIB)) for n in range(12)]
        assert {EMFILE, ENFILE} & set(failed)
        assert set(failed) <= {0, EMFILE, ENFILE}
        # Mounts of others, which cannot be inspected now, must not matter.
        (reference / "other").mkdir()
        for _ in range(3):
            run("mount", "-t", "tmpfs", "tmpfs", reference / "other")
            run("umount", reference / "other")
        assert_same(read_all(mounted.device / "kept"), noise(4 * MIB))
        # Without its service a copy goes through the mount, or fails as cp would.
        run(*GPUFS, "cp", mounted.device / "kept", reference / "out")
        assert_same((reference / "out").read_bytes(), noise(4 * MIB))
    empty(mounted.device)
    wait_until(lambda: is_empty(mounted), 20, "all memory to be released")
    run(*GPUFS, "cp", reference / "source", mounted.device / "again")
    mounted.unmount()


def test_a_daemon_without_descriptors_ends_cleanly(mount: Mounter) -> None:
    mounted = mount()
    resource.prlimit(mounted.pid, resource.RLIMIT_NOFILE, (3, 3))
    mounted.signal(signal.SIGTERM)
    assert mounted.daemon.wait(PATIENCE) == 0
    assert not mounted.mounted()


def test_a_full_disk_of_the_log_does_not_end_the_mount(mount: Mounter, reference: Path) -> None:
    """The mount goes on without its log."""
    full = reference / "full"
    full.mkdir()
    run("mount", "-t", "tmpfs", "-o", "size=4k", "none", full)
    try:
        mounted = mount("--log-level", "debug", "--log-file", str(full / "log"))
        number = 0
        while (full / "log").stat().st_size < 4096 or number < 3:
            number += 1
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
    mounted.log.write_text("")  # these warnings are expected


@pytest.mark.parametrize("what", ["full", "read-only", "removed", "unmounted"])
@AS_ROOT
def test_a_runtime_directory_that_cannot_be_used(tmp_path: Path, what: str) -> None:
    """A mount and its copies work without /run, which only other commands read."""
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


# ---- what stays of a mount ----


def pids_of(mounted: Path) -> list[int]:
    found = session_processes(os.environ[SESSION_VARIABLE])
    return [pid for pid, line in found.items() if "gpufs.daemon" in line and str(mounted) in line]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A mountpoint for the command, cleaned up afterwards."""
    path = tmp_path / "mnt"
    path.mkdir()
    yield path
    run(*GPUFS, "umount", "--force", path, check=False)
    for pid in pids_of(path):
        os.kill(pid, signal.SIGKILL)


def mount_at(path: Path) -> int:
    """Mounts in the background; the daemon's process ID."""
    before = pids_of(path)
    run(*GPUFS, "mount", path, "--driver", "host", "--memory", "64M")
    (pid,) = set(pids_of(path)) - set(before)
    return pid


@AS_ROOT
def test_umount_names_a_daemon_that_does_not_end(place: Path) -> None:
    """A copy of the mount in another mount namespace keeps the daemon alive."""
    pid = mount_at(place)
    keeper = subprocess.Popen(["unshare", "-m", "--propagation", "private", "sleep", "100"])
    try:
        wait_until(lambda: Path(f"/proc/{keeper.pid}/comm").read_text() == "sleep\n", 20, "the namespace")
        text = fails_with_one_line("umount", place, "--umount-timeout", "1")
        assert f"({pid})" in text
        assert "--force ends it" in text
        text = fails_with_one_line("umount", place, "--umount-timeout", "1")
        assert f"({pid})" in text
        # A new mount at the same place is independent of it.
        mount_at(place)
        run(*GPUFS, "umount", place)
        assert pids_of(place) == [pid]
        run(*GPUFS, "umount", "--force", place)
        assert pids_of(place) == []
    finally:
        keeper.kill()
        keeper.wait()


# ---- many ----
