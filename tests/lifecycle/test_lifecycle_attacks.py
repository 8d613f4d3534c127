"""Faults around a mount: clients and daemons are killed, resources run out. Nothing hangs or is lost."""

from __future__ import annotations

import os
import resource
import shutil
import signal
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
    Snapshot,
    errno_of,
    run,
    wait_until,
)

import gpufs

pytestmark = [pytest.mark.complains]

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
    status, gauges = mounted.status(), mounted.stats()["gauges"]
    return {
        "open files": gauges["open_files"],
        "removed files": gauges["removed_files"],
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


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [1, 40])
def test_killed_clients_leave_nothing_held(mount: Mounter, reference: Path, rounds: int) -> None:
    host, mounted = reference, mount(memory=512 * MIB)
    content = noise(8 * MIB)
    (host / "source").write_bytes(content)
    before: Snapshot | None = None
    for round_ in range(rounds):
        for name in PROGRAMS:
            shutil.copy(host / "source", mounted.device / "source")
            with running(name, mounted, host):
                time.sleep(0.3 + 0.037 * (round_ % 11))
            assert_same(read_all(mounted.device / "source"), content)
            empty(mounted.device)
        wait_until(lambda: is_empty(mounted), 20, "all memory to be released")
        if before is None:
            before = Snapshot.of(mounted.pid)
    assert before is not None
    limit = before.descriptors + 2
    wait_until(lambda: Snapshot.of(mounted.pid).descriptors <= limit, 20, "closed descriptors")
    mounted.unmount()


def test_a_killed_daemon_ends_all_its_clients(mount: Mounter, reference: Path) -> None:
    """Every program gets an error or a signal and can be killed, also if the daemon had been stopped before."""
    mounted = mount(memory=512 * MIB)
    (reference / "source").write_bytes(noise(40 * MIB))
    shutil.copy(reference / "source", mounted.device / "source")
    running_now = [running(name, mounted, reference) for name in PROGRAMS]
    processes = [one.__enter__() for one in running_now]
    try:
        time.sleep(0.5)
        mounted.signal(signal.SIGSTOP)
        time.sleep(0.1)
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
            gpufs.copy(mounted.device / "file", reference / "out")
        assert (full / "log").stat().st_size == 4096
        mounted.unmount()
    finally:
        run("umount", "-l", full)


@pytest.mark.skipif(os.geteuid() != 0, reason="acts as another user, which takes root")
@pytest.mark.parametrize("swapped", ["file", "directory", "hard link"])
def test_no_user_redirects_the_log_of_roots_mount(mount: Mounter, tmp_path: Path, swapped: str) -> None:
    """A user may replace what is in his directories by links. The log and the guard then write nowhere else."""
    victim = tmp_path / "secret" / "log"
    victim.parent.mkdir()
    victim.write_text("before\n")
    home = tmp_path / "home"
    (home / "logs").mkdir(parents=True)
    for path in (home, home / "logs"):
        os.chown(path, NOBODY, NOBODY)
    log = home / "logs" / "log"

    def swap() -> None:
        if swapped == "directory":
            log.parent.rename(home / "old")
            log.parent.symlink_to(victim.parent)
        else:
            log.unlink(missing_ok=True)
            if swapped == "file":
                log.symlink_to(victim)
            else:  # the kernel can be told to let users do that (fs.protected_hardlinks)
                os.link(victim, log)
        if swapped != "hard link":
            os.chown(log.parent if swapped == "directory" else log, NOBODY, NOBODY, follow_symlinks=False)

    mounted = mount("--log-file", str(log), "--log-level", "debug")
    assert log.read_text()
    swap()
    (tmp_path / "source").write_bytes(noise(MIB))
    run(*GPUFS, "cp", tmp_path / "source", mounted.device / "file")  # is logged
    mounted.signal(signal.SIGKILL)  # the guard logs that
    assert mounted.daemon.wait(PATIENCE) == -signal.SIGKILL
    wait_until(lambda: not mounted.mounted(), PATIENCE, "the guard to unmount")
    assert victim.read_text() == "before\n"
    done = run(*GPUFS, "mount", mounted.path, "--driver", "host", "--memory", "64M", "--log-file", log, check=False)
    if done.returncode == 0:
        run(*GPUFS, "umount", mounted.path)
    assert (done.returncode, len(done.stderr.splitlines()), victim.read_text()) == (1, 1, "before\n"), done
