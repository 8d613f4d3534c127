"""The daemon under a service manager: readiness, watchdog and end by sd_notify, the unit, and the log."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from errno import EAGAIN
from pathlib import Path

import pytest
from support.mounting import GPUFS, Mounter
from support.processes import PATIENCE, errno_of, links_of, run, wait_until

ROOT = Path(__file__).resolve().parents[2]

# Runs a command as systemd runs that of a service.
AS_SERVICE = 'SYSTEMD_EXEC_PID=$$ exec "$0" "$@"'


class Manager:
    """The receiving end of sd_notify."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self.socket.settimeout(PATIENCE)

    def next(self, *, but: str = "WATCHDOG") -> dict[str, str]:
        """The next message, other than those that begin with ``but``."""
        while True:
            fields = dict(line.split("=", 1) for line in self.socket.recv(4096).decode().splitlines())
            if but not in fields:
                return fields


@pytest.fixture(params=["file", "abstract"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "notify") if request.param == "file" else f"@gpufs-test-{os.getpid()}"


@pytest.fixture
def manager(address: str) -> Iterator[Manager]:
    manager = Manager(address)
    yield manager
    manager.socket.close()


def test_ready_and_stop(mount: Mounter, manager: Manager, address: str) -> None:
    mounted = mount(environment={"NOTIFY_SOCKET": address})
    ready = manager.next()
    assert (ready["READY"], ready["MAINPID"]) == ("1", str(mounted.pid))
    assert str(mounted.path) in ready["STATUS"]
    mounted.signal(signal.SIGTERM)
    assert manager.next()["STOPPING"] == "1"
    mounted.wait_ended()


def test_the_watchdog_is_fed(mount: Mounter, tmp_path: Path) -> None:
    address = str(tmp_path / "notify")
    manager = Manager(address)
    mounted = mount(environment={"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "200000"})
    for _ in range(5):
        while "WATCHDOG" not in manager.next(but="READY"):
            pass
    mounted.unmount()
    manager.socket.close()


def test_a_manager_that_does_not_read_stops_nothing(mount: Mounter, tmp_path: Path) -> None:
    """The manager's queue becomes full, and the mount continues."""
    address = str(tmp_path / "notify")
    manager = Manager(address)
    mounted = mount(environment={"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "2000"})
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as full:
        full.setblocking(False)
        full.connect(address)
        wait_until(lambda: errno_of(full.send, b"WATCHDOG=1") == EAGAIN, 20, "the queue to be full")
    for number in range(20):
        (mounted.device / str(number)).mkdir()
        time.sleep(0.002)
    mounted.unmount()
    manager.socket.close()


def test_a_mount_whose_name_is_not_utf8_stays(manager: Manager, address: str, tmp_path: Path) -> None:
    """The service manager takes UTF-8 alone; a name with a line break must not become an assignment of its own."""
    place = os.path.join(os.fsencode(tmp_path), b"caf\xe9\nMAINPID=1")
    os.mkdir(place)
    environment = {**os.environ, "NOTIFY_SOCKET": address, "WATCHDOG_USEC": "200000"}
    words: list[str | bytes] = [*GPUFS, "mount", place, "--driver", "host", "--memory", "64M", "--no-survive"]
    subprocess.run(["sh", "-c", AS_SERVICE, *words], env=environment, check=True)
    try:
        ready = manager.next()
        assert ready["READY"] == "1"
        assert ready["MAINPID"] != "1"
        for _ in range(3):
            assert "WATCHDOG" in manager.next(but="READY")
        with open(os.path.join(place, b"gpu0/file"), "wb") as file:
            file.write(b"kept")
    finally:
        subprocess.run([*GPUFS, "umount", place], check=True)


@pytest.mark.parametrize("option", ["--survive", "--no-survive"])
def test_a_mount_that_survives_has_no_main_process(
    option: str, manager: Manager, address: str, mountpoint: Path
) -> None:
    """systemd would end the service, and the keeper with it, when its main process dies."""
    environment = {**os.environ, "NOTIFY_SOCKET": address}
    words = [*GPUFS, "mount", os.fspath(mountpoint), "--driver", "host", "--memory", "64M", option]
    subprocess.run(["sh", "-c", AS_SERVICE, *words], env=environment, check=True)
    try:
        assert ("MAINPID" in manager.next()) == (option == "--no-survive")
    finally:
        run(*GPUFS, "umount", mountpoint)


def test_a_mount_within_another_service_reports_nothing(manager: Manager, address: str, mountpoint: Path) -> None:
    environment = {**os.environ, "NOTIFY_SOCKET": address, "SYSTEMD_EXEC_PID": "1"}
    words = [*GPUFS, "mount", os.fspath(mountpoint), "--driver", "host", "--memory", "64M"]
    subprocess.run(words, env=environment, check=True)
    run(*GPUFS, "umount", mountpoint)
    manager.socket.setblocking(False)
    assert errno_of(manager.socket.recv, 1) == EAGAIN


# Every Python process of the mount runs it as it starts.
FAULT = """
import itertools
import gpufs.engine

calls = itertools.count(1)

def fail(engine):
    call = next(calls)
    if call < 4:
        raise ValueError("a fault")
    if call == 4:
        raise MemoryError

gpufs.engine.Engine.statistics_publish = fail
"""


@pytest.mark.complains
def test_statistics_that_cannot_be_published_do_not_end_the_mount(mount: Mounter, tmp_path: Path) -> None:
    """Each failure is logged once, however often it repeats, and the files stay."""
    (tmp_path / "sitecustomize.py").write_text(FAULT)
    mounted = mount(environment={"PYTHONPATH": f"{tmp_path}:{ROOT}"})
    (mounted.device / "file").write_bytes(b"kept")
    mounted.wait_for_log("MemoryError")
    assert (mounted.device / "file").read_bytes() == b"kept"
    failures = [line for line in mounted.complaints() if "publishing statistics has failed" in line]
    assert len(failures) == 2
    mounted.unmount()


@pytest.mark.parametrize("where", ["journal", "elsewhere", "file"])
def test_a_mount_by_systemd_logs_to_the_journal(where: str, mountpoint: Path, tmp_path: Path) -> None:
    """Mounts as mount(8) does for a line of fstab: in the background, with the journal as standard error."""
    journal, log = tmp_path / "journal", tmp_path / "log"
    words = [*GPUFS, "mount", str(mountpoint), "--driver", "host", "--memory", "64M"]
    with open(journal, "wb") as stream:
        found = os.fstat(stream.fileno())
        name = f"{found.st_dev}:{found.st_ino + (where == 'elsewhere')}"
        if where == "file":
            words += ["--log-file", str(log)]
        subprocess.run(words, stderr=stream, env={**os.environ, "JOURNAL_STREAM": name}, check=True)
    run(*GPUFS, "umount", mountpoint)
    lines = journal.read_text().splitlines()
    if where == "journal":
        assert any(str(mountpoint) in line for line in lines), lines
        assert [line for line in lines if not re.match("<[2-7]>gpufs[.a-z]*: ", line)] == []
    else:
        assert lines == []
        assert log.exists() == (where == "file")


def test_the_systemd_unit_is_valid(tmp_path: Path) -> None:
    if not shutil.which("systemd-analyze"):
        pytest.skip("no systemd-analyze here")
    text = (ROOT / "mount_helpers/gpufs@.service").read_text().replace("@GPUFS@", "/bin/true")
    unit = tmp_path / "gpufs@mnt-some\\x20place.service"
    unit.write_text(text)
    done = run("systemd-analyze", "verify", "--man=no", unit, check=False)
    assert (done.returncode, [line for line in done.stderr.splitlines() if "gpufs@" in line]) == (0, [])


def test_the_systemd_unit_gives_up_what_a_mount_does_not_need(tmp_path: Path) -> None:
    """The score is 9.6 without restrictions; 2.2 of it are settings that would hide the mount from everybody else."""
    if not shutil.which("systemd-analyze"):
        pytest.skip("no systemd-analyze here")
    unit = tmp_path / "gpufs@.service"
    unit.write_text((ROOT / "mount_helpers/gpufs@.service").read_text().replace("@GPUFS@", "/bin/true"))
    run("systemd-analyze", "security", "--no-pager", "--offline=true", "--threshold=52", unit)


def test_a_rotated_log_is_left(mount: Mounter) -> None:
    """logrotate renames the file. Later lines go into a new file."""
    mounted = mount("--log-level", "debug")
    old = mounted.log.with_suffix(".1")
    mounted.log.rename(old)
    before = old.read_text()
    mounted.signal(signal.SIGHUP)  # changes nothing
    (mounted.path.parent / "source").write_bytes(bytes(1 << 20))
    run(*GPUFS, "cp", mounted.path.parent / "source", mounted.device / "file")
    wait_until(lambda: mounted.log.exists() and mounted.log.read_text(), 20, "the new log file")
    links = set(links_of(mounted.pid).values())
    assert str(old) not in links
    assert str(mounted.log) in links
    mounted.unmount()
    assert old.read_text() == before
    assert "has ended" in mounted.log.read_text()
