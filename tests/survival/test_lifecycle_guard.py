"""The keeper and the guard: a dead daemon's mount is unmounted, no other one, and nothing is left."""

from __future__ import annotations

import functools
import json
import os
import resource
import signal
import time
from collections.abc import Iterator
from errno import EIO
from pathlib import Path

import pytest
from support.data import MIB, noise
from support.mounting import GPUFS, REPOSITORY, GpufsMount, Mounter
from support.processes import PATIENCE, errno_of, in_child, links_of, run, session_processes, wait_until
from support.watchdog import mounted_at

from gpufs import config, mounting
from gpufs.daemon import environment

pytestmark = [pytest.mark.complains]


def guards(mounted: GpufsMount) -> list[int]:
    """The keeper of a mount, or the guard that it has become, whoever their parent is now."""
    found = session_processes(mounted.session.name)
    programs = ("gpufs-keeper", "guard.py")
    return [pid for pid, line in found.items() if str(mounted.path) in line and any(x in line for x in programs)]


def test_the_mount_of_a_killed_daemon_is_removed(mount: Mounter) -> None:
    mounted = mount()
    (mounted.device / "file").write_bytes(noise(MIB))
    fd = os.open(mounted.device / "file", os.O_RDONLY)
    try:
        mounted.signal(signal.SIGKILL)
        wait_until(lambda: not mounted.mounted(), 20, "the dead mount to go")
        assert errno_of(os.pread, fd, 1, 0) != 0
    finally:
        os.close(fd)
    assert os.listdir(mounted.path) == []
    wait_until(lambda: not guards(mounted), 20, "the guard to go")
    assert any("has died: its mount at" in line and str(mounted.path) in line for line in mounted.complaints())


@pytest.mark.parametrize("how", ["umount", "terminate", "interrupt", "lazy", "abort"])
def test_nothing_is_left_after_other_ends(mount: Mounter, how: str) -> None:
    mounted = mount()
    assert len(guards(mounted)) == 1
    if how == "umount":
        mounted.unmount()
    elif how in ("terminate", "interrupt"):
        (mounted.device / "file").write_bytes(noise(MIB))
        mounted.signal(signal.SIGTERM if how == "terminate" else signal.SIGINT)
        assert mounted.daemon.wait(PATIENCE) == 0
    elif how == "lazy":
        run("umount", "-l", mounted.path)
    else:
        entry = mounting.entry_of(str(mounted.path))
        assert entry is not None
        mounting.abort(entry)
    mounted.daemon.wait(PATIENCE)
    assert guards(mounted) == []
    assert not mounted.mounted()


def test_automatic_unmounting_can_be_turned_off(mount: Mounter) -> None:
    mounted = mount("--no-auto-unmount")
    assert guards(mounted) == []
    mounted.signal(signal.SIGKILL)
    mounted.daemon.wait(PATIENCE)
    time.sleep(0.5)
    assert mounted.mounted()
    assert run(*GPUFS, "mount", mounted.path, "--driver", "host", check=False).returncode == 1
    run(*GPUFS, "umount", mounted.path)
    assert not mounted.mounted()


def test_a_mount_that_hides_ours_stays(mount: Mounter) -> None:
    mounted = mount()
    (pid,) = guards(mounted)
    run("mount", "-t", "tmpfs", "later", mounted.path)
    try:
        mounted.signal(signal.SIGKILL)
        wait_until(lambda: pid not in guards(mounted), 20, "the guard to go")
        assert [kind for _, kind in mounted_at(str(mounted.path))] == ["fuse.gpufs", "tmpfs"]
    finally:
        run("umount", mounted.path)
    run(*GPUFS, "umount", mounted.path)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_later_mount_stays(mount: Mounter, number: signal.Signals) -> None:
    """A detached mount is still in use, and its daemon ends after another mount was made at the same place."""
    mounted = mount()
    (pid,) = guards(mounted)
    fd = os.open(mounted.device / "held", os.O_RDWR | os.O_CREAT)
    try:
        run("umount", "-l", mounted.path)
        (seen,) = (one for one in json.loads(run(*GPUFS, "status", "--json").stdout) if one["pid"] == mounted.pid)
        assert (seen["mountpoint"], seen["state"]) == (str(mounted.path), "detached")
        run(*GPUFS, "mount", mounted.path, "--driver", "host", "--memory", "64M")
        (mounted.device / "file").write_bytes(b"another's")
        mounted.signal(number)
        wait_until(lambda: pid not in guards(mounted), 20, "the guard to go")
        assert errno_of(os.pread, fd, 1, 0) != 0
        assert (mounted.device / "file").read_bytes() == b"another's"
    finally:
        os.close(fd)
    run(*GPUFS, "umount", mounted.path)


def test_a_keeper_that_was_killed_is_replaced(mount: Mounter) -> None:
    mounted = mount()

    def another(former: int) -> bool:
        return bool(set(guards(mounted)) - {former})

    for _ in range(2):
        (before,) = guards(mounted)
        os.kill(before, signal.SIGKILL)
        wait_until(functools.partial(another, before), 20, "another keeper")
    mounted.signal(signal.SIGKILL)
    wait_until(lambda: not mounted.mounted() and not guards(mounted), 20, "the dead mount to go")
    assert any("keeper has ended" in line for line in mounted.complaints())


@pytest.fixture
def surviving(mount: Mounter, tmp_path: Path) -> GpufsMount:
    """A mount whose daemon hands everything to its keeper, but the next daemon cannot take it over."""
    (tmp_path / "sitecustomize.py").write_text(
        "from gpufs.daemon import startup, takeover\n"
        "def begin(*arguments): raise startup.StartFailure(5, 'planned failure')\n"
        "takeover.obstacle, takeover.begin = lambda *values: None, begin\n"
    )
    return mount(environment={"PYTHONPATH": f"{tmp_path}:{REPOSITORY}"})


def test_a_mount_that_cannot_be_taken_over_fails_until_it_is_unmounted(surviving: GpufsMount) -> None:
    (pid,) = guards(surviving)
    wait_until(lambda: "/dev/fuse" in links_of(pid).values(), 20, "the connection in the keeper")
    surviving.signal(signal.SIGKILL)
    wait_until(lambda: errno_of(lambda: os.listdir(surviving.path)) == EIO, 20, "errors")
    assert guards(surviving) == [pid]
    run("umount", surviving.path)
    wait_until(lambda: not guards(surviving), 20, "the keeper to end")


@pytest.mark.parametrize("how", ["umount", "terminate", "lazy", "abort"])
def test_nothing_is_left_of_a_surviving_mount_that_ends(surviving: GpufsMount, how: str) -> None:
    fd = os.open(surviving.device / "held", os.O_RDWR | os.O_CREAT)
    try:
        if how == "umount":
            os.close(fd)
            surviving.unmount()
            fd = -1
        elif how == "terminate":
            surviving.signal(signal.SIGTERM)
        elif how == "lazy":
            run("umount", "-l", surviving.path)
            os.close(fd)
            fd = -1
        else:
            entry = mounting.entry_of(str(surviving.path))
            assert entry is not None
            mounting.abort(entry)
        surviving.wait_ended()
        assert guards(surviving) == []
        assert fd < 0 or errno_of(os.pread, fd, 1, 0) != 0
    finally:
        if fd >= 0:
            os.close(fd)


# ---- memory that is short ----


def test_other_processes_are_killed_first_when_memory_is_short(mount: Mounter) -> None:
    mounted = mount()
    score = Path("/proc/self/oom_score_adj")
    expected = int(score.read_text())
    if not config.is_memory_limited() and not in_child(lambda: errno_of(score.write_text, "-900")):
        expected = min(expected, -900)  # this machine lets root lower it
    for pid in (mounted.pid, *guards(mounted)):
        assert int(Path(f"/proc/{pid}/oom_score_adj").read_text()) == expected
    mounted.unmount()


@pytest.mark.parametrize(
    ("before", "limit", "after"), [("0\n", "max", "-900"), ("0\n", "4096", "0\n"), ("-950\n", "max", "-950\n")]
)
def test_only_a_priority_that_nobody_has_chosen_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, limit: str, after: str
) -> None:
    files = {"proc/self/cgroup": "0::/a\n", "proc/self/oom_score_adj": before, "sys/fs/cgroup/a/memory.max": limit}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    environment.spare_from_oom_killer(tmp_path)
    assert (tmp_path / "proc/self/oom_score_adj").read_text() == after


# ---- core files ----


def mappings(pid: int) -> Iterator[tuple[str, set[str]]]:
    """The head line and the flags of each mapping of a process."""
    head = ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if line.startswith("VmFlags:"):
            yield head, set(line.split()[1:])
        elif not line.split()[0].endswith(":"):
            head = line


def core_limit(pid: int) -> tuple[int, int]:
    return resource.prlimit(pid, resource.RLIMIT_CORE)


def test_no_core_file_has_the_devices_memory(mount: Mounter) -> None:
    mounted = mount("--core-dumps")
    (mounted.device / "file").write_bytes(noise(8 * MIB))
    assert core_limit(mounted.pid)[0] == core_limit(os.getpid())[1]
    found = list(mappings(mounted.pid))
    buffers = [flags for head, flags in found if "memfd:gpufs-buffer" in head]
    assert buffers
    assert all("dd" in flags for flags in buffers)
    mounted.unmount()


def test_no_core_file_by_default(mount: Mounter) -> None:
    mounted = mount()
    assert core_limit(mounted.pid)[0] == 0
    mounted.unmount()
