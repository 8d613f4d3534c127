"""gpufs.mount(): mounts that belong to a program, and what is left of them when it fails or dies."""

import json
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from support.mounting import GPUFS, REPOSITORY
from support.processes import PATIENCE, PATIENT, has_ended, run, wait_until
from support.watchdog import mounted_at

import gpufs

SMALL: dict[str, Any] = {"driver": "host", "memory": 64 << 20}


@pytest.fixture(autouse=True)
def no_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUFS_CONFIG", "/dev/null")


def test_a_mount_lasts_as_long_as_its_block(mountpoint: Path) -> None:
    with gpufs.mount(mountpoint, driver="host", devices=2, memory="64M", log_level="warning") as mount:
        assert mount.path == mountpoint
        assert mount.driver == "host"
        assert [device.path for device in mount.devices] == [mountpoint / "gpu0", mountpoint / "gpu1"]
        assert {device.total_bytes for device in mount.devices} == {64 << 20}
        (mount.devices[1].path / "file").write_bytes(b"data")
        assert (mountpoint / "gpu1/file").read_bytes() == b"data"
    assert not mounted_at(str(mountpoint))
    mount.unmount()  # again: without effect


def test_an_exception_in_the_block_unmounts(mountpoint: Path) -> None:
    with pytest.raises(ZeroDivisionError), gpufs.mount(mountpoint, **SMALL):
        _ = 1 // 0
    assert not mounted_at(str(mountpoint))


def test_files_that_are_open_outlive_the_block(mountpoint: Path) -> None:
    with gpufs.mount(mountpoint, **SMALL) as mount, open(mountpoint / "gpu0/file", "wb+", buffering=0) as file:
        with pytest.raises(OSError, match="in use"):
            mount.unmount()
        mount.unmount(detach=True)
        assert not mounted_at(str(mountpoint))
        file.write(b"still here")
        assert os.pread(file.fileno(), 100, 0) == b"still here"


def test_a_daemon_that_outlives_its_detached_mount_is_reaped(mountpoint: Path) -> None:
    with gpufs.mount(mountpoint, **SMALL) as mount:
        with open(mountpoint / "gpu0/file", "wb+", buffering=0) as file:
            daemon = json.loads((mountpoint / ".gpufs/status").read_text())["pid"]
            mount.unmount(detach=True)
            mount.unmount(detach=True)
            file.write(b"still here")
    wait_until(lambda: not Path(f"/proc/{daemon}").exists(), 30, "the end of the daemon, also as a zombie")


def test_wrong_arguments_and_failures_leave_nothing(mountpoint: Path, tmp_path: Path) -> None:
    bad: list[dict[str, Any]] = [{"memory": "lots"}, {"devices": "GPU-"}, {"devices": ["GPU-4f3e"], "driver": "host"}]
    for wrong in bad:
        with pytest.raises(ValueError, match=next(iter(wrong))):
            gpufs.mount(mountpoint, **wrong)
    for unknown in ("memroy", "foreground", "umount_timeout"):
        nothing: dict[str, Any] = {unknown: "1"}
        with pytest.raises(TypeError, match=unknown):
            gpufs.mount(mountpoint, **nothing)
    with pytest.raises(FileNotFoundError):
        gpufs.mount(tmp_path / "none", **SMALL)
    with pytest.raises(TimeoutError):
        gpufs.mount(mountpoint, mount_timeout=0.1, **SMALL)
    assert not mounted_at(str(mountpoint))
    with gpufs.mount(mountpoint, **SMALL), pytest.raises(OSError, match="already"):
        gpufs.mount(mountpoint, **SMALL)


def test_a_start_without_temporary_files_leaves_no_descriptor(
    mountpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        with pytest.raises(FileNotFoundError):
            gpufs.mount(mountpoint, **SMALL)
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_warnings_that_are_errors_leave_nothing(mountpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUFS_MEMROY", "1G")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="GPUFS_MEMORY"):
            gpufs.mount(mountpoint, **SMALL)
    assert not mounted_at(str(mountpoint))
    with pytest.warns(UserWarning, match="GPUFS_MEMROY"), gpufs.mount(mountpoint, **SMALL):
        pass


PROGRAM = """
import os, sys, time, gpufs
with gpufs.mount(sys.argv[1], driver="host", memory="64M") as mount:
    if os.fork() == 0:
        sys.exit()  # leaves the block, too
    os.wait()
    assert os.path.ismount(mount.path)
    print(mount._process.pid, flush=True)
    time.sleep(1000)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_mount_ends_with_the_program(number: signal.Signals, mountpoint: Path) -> None:
    """Whatever ends it, and also while another program has a file open."""
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, mountpoint],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | PATIENT,
    )
    assert program.stdout is not None
    daemon = int(program.stdout.readline())
    with open(mountpoint / "gpu0/file", "wb"):
        program.send_signal(number)
        program.wait(PATIENCE)
        wait_until(lambda: not mounted_at(str(mountpoint)), 30, "the end of the mount")
    wait_until(lambda: has_ended(daemon), 30, "the end of the daemon")
    program.stdout.close()


def test_an_interrupted_start_leaves_nothing(mountpoint: Path) -> None:
    """SIGINT and SIGKILL at several moments of the start."""
    script = "import sys, gpufs; print(flush=True); gpufs.mount(sys.argv[1], driver='host', memory='64M').unmount()"
    for number, delay in ((signal.SIGINT, 0.1), (signal.SIGKILL, 0.1), (signal.SIGINT, 0.3), (signal.SIGKILL, 0.5)):
        program = subprocess.Popen(
            [sys.executable, "-c", script, mountpoint],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | PATIENT,
        )
        assert program.stdout is not None
        program.stdout.readline()
        try:
            program.wait(delay)
        except subprocess.TimeoutExpired:
            program.send_signal(number)
        program.wait(PATIENCE)
        program.stdout.close()
        wait_until(
            lambda: not mounted_at(str(mountpoint)) and not serving(mountpoint),
            30,
            "the end of the mount and its daemon",
        )


def serving(mountpoint: Path) -> list[str]:
    """The daemons of a mountpoint."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"gpufs.daemon" in words and os.fsencode(mountpoint) in words:
            found.append(pid)
    return found


def test_programs_see_what_the_commands_print(mountpoint: Path, tmp_path: Path) -> None:
    with gpufs.mount(mountpoint, devices=2, **SMALL) as mount:
        (mountpoint / "gpu1/file").write_bytes(bytes(3 << 20))
        found = gpufs.status(mountpoint)
        assert (found.path, found.state, found.error, found.driver) == (mountpoint, "ok", None, "host")
        assert [device.path for device in found.devices] == [device.path for device in mount.devices]
        assert [device.files for device in found.devices] == [0, 1]
        assert found.devices[1].used_bytes >= 3 << 20
        assert all(device.used_bytes + device.free_bytes == device.total_bytes for device in found.devices)
        assert found.free_bytes == sum(device.free_bytes for device in found.devices) > 0
        several = gpufs.mounts(timeout=20)
        assert mountpoint in [one.path for one in several]
        assert len(str(several).splitlines()) == len(several)
        assert str(mountpoint) in str(several)
    for path in (mountpoint, tmp_path / "missing"):
        with pytest.raises(gpufs.NotOnMount, match=str(path)):
            gpufs.status(path)


def test_modules_in_the_working_directory_are_not_run(tmp_path: Path) -> None:
    """It may be a directory of another user."""
    for name in ("json", "gpufs", "importlib"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    code = f"import sys; sys.path.remove(''); sys.path.insert(0, {str(REPOSITORY)!r}); import gpufs; gpufs.mounts()"
    run(sys.executable, "-c", code, cwd=tmp_path)
    run(*GPUFS, "run", sys.executable, "-P", "-c", "pass", cwd=tmp_path)
    assert not (tmp_path / "ran").exists()


def test_many_files_are_copied_from_python(mountpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"blob")
    sources = [tmp_path / str(number) for number in range(20)]
    for source in sources:
        source.symlink_to("blob")  # as in the cache of a hub
    with gpufs.mount(mountpoint, **SMALL):
        device = mountpoint / "gpu0"
        results = gpufs.copy_files(sources, device)
        assert [result.bytes for result in results] == [4] * 20
        assert {(device / source.name).read_bytes() for source in sources} == {b"blob"}
        assert not any((device / source.name).is_symlink() for source in sources)
        with pytest.raises(ExceptionGroup) as caught:
            gpufs.copy_files([tmp_path / "none", sources[0]], device)
        (error,) = caught.value.exceptions
        assert isinstance(error, gpufs.CopyError)
        with pytest.raises(gpufs.CopyError):
            gpufs.copy_files(sources, device / "none")
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "0").write_bytes(b"other")
        with pytest.raises(ExceptionGroup):
            gpufs.copy_files([sources[0], tmp_path / "other" / "0"], device)
        assert (device / "0").read_bytes() == b"blob"
