"""Mounts in mount namespaces of their own: what their daemons leave, and who keeps them."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.mounting import GPUFS
from support.processes import (
    SESSION_VARIABLE,
    run,
    session_processes,
    wait_until,
)

pytestmark = [pytest.mark.complains]
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="makes mount namespaces, which takes root")


def fails_with_one_line(*words: object) -> str:
    done = run(*GPUFS, *map(str, words), check=False)
    assert done.returncode == 1, done
    assert done.stdout == ""
    return done.stderr


@AS_ROOT
def test_a_missing_fuse_device_is_reported(mountpoint: Path) -> None:
    """In a mount namespace of its own, where /dev is empty."""
    script = 'mount -t tmpfs none /dev && mknod /dev/null c 1 3 && exec "$@"'
    command = ["unshare", "-m", "sh", "-c", script, "sh", *GPUFS, "mount", str(mountpoint), "--driver", "host"]
    done = run(*command, check=False)
    assert done.returncode == 1
    assert "/dev/fuse is missing" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("what", ["full", "unmounted"])
@AS_ROOT
def test_a_runtime_directory_that_cannot_be_used(tmp_path: Path, what: str) -> None:
    """A mount and its copies work without /run, which only other commands read."""
    before = "head -c 1M /dev/zero >/run/zeros || true" if what == "full" else "true"
    after = "umount -l /run" if what == "unmounted" else "true"
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
    assert bool(lines) == (what == "unmounted")


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
