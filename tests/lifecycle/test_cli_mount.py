"""gpufs mount and umount: daemons that start, fail to start, hang or have died."""

import json
import os
import re
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.cli import gpufs
from support.processes import has_ended, run, stop_process, wait_until
from support.watchdog import mounted_at

from gpufs import cli, launching
from gpufs.cli import _mounts


def mount_it(mountpoint: Path, *options: str) -> int:
    gpufs("mount", mountpoint, "--driver", "host", "--memory", "64M", *options)
    (pid,) = _mounts.daemons(str(mountpoint))
    return pid


def test_mount_and_umount(mountpoint: Path) -> None:
    pid = mount_it(mountpoint, "--devices", "2")
    assert sorted(os.listdir(mountpoint)) == [".gpufs", "README", "gpu0", "gpu1"]
    assert os.getsid(pid) != os.getsid(0)
    assert os.readlink(f"/proc/{pid}/cwd") == "/"
    for fd in (0, 1, 2):
        assert os.readlink(f"/proc/{pid}/fd/{fd}") == "/dev/null"
    (mountpoint / "gpu0/x").write_bytes(b"hello")
    assert (mountpoint / "gpu0/x").read_bytes() == b"hello"
    gpufs("umount", mountpoint)
    assert not mounted_at(str(mountpoint))
    assert has_ended(pid)
    assert os.listdir(mountpoint) == []


def test_a_mountpoint_may_have_any_name(tmp_path: Path) -> None:
    """Blanks, newlines and backslashes, which mountinfo escapes; carriage returns and invalid UTF-8, which stay."""
    path = os.fsencode(tmp_path) + b"/a b\tc\\134\n#\r\v\f\x1c\xc2\x85\xe2\x80\xa8\xff"
    os.mkdir(path)
    try:
        gpufs("mount", os.fsdecode(path), "--driver", "host", "--memory", "64M")
        listed = json.loads(gpufs("status", "--json").stdout)
        assert os.fsdecode(path) in [status["mountpoint"] for status in listed]
        gpufs("status")
        (tmp_path / "source").write_bytes(bytes(300_000))
        copied = gpufs("cp", "--json", tmp_path / "source", os.fsdecode(path) + "/gpu0/copy")
        assert json.loads(copied.stdout)["methods"] == {"transfer": 1}
        for name in (b"status", b"stats", b"metrics"):
            with open(path + b"/.gpufs/" + name, encoding="utf-8") as file:
                assert file.read()
    finally:
        gpufs("umount", os.fsdecode(path))


def test_unmounting_a_busy_mount_names_its_users(mountpoint: Path) -> None:
    mount_it(mountpoint)
    with open(mountpoint / "gpu0/x", "w"):
        done = gpufs("umount", mountpoint, check=False)
        assert done.returncode == 1
        assert done.stderr.startswith(f"gpufs: {mountpoint}: in use by ")
        assert f"({os.getpid()})" in done.stderr
        assert len(done.stderr.splitlines()) == 1
    gpufs("umount", mountpoint)


def test_a_question_that_was_given_up_keeps_no_mount_busy(mountpoint: Path) -> None:
    """The process that asks for the leases is killed when it takes too long, and may have a file open for a moment."""
    script = "from gpufs.cli import umount; umount._LEASES_TIMEOUT = 0.004; umount.umount({!r}, {})"
    options = "force=False, lazy=False, timeout=60"
    for _ in range(2):
        mount_it(mountpoint)
        run(sys.executable, "-c", script.format(str(mountpoint), options))
        assert not mounted_at(str(mountpoint))


def test_a_lazy_unmount_keeps_open_files_working(mountpoint: Path) -> None:
    pid = mount_it(mountpoint)
    with open(mountpoint / "gpu0/x", "wb+", buffering=0) as file:
        gpufs("umount", "--lazy", mountpoint)
        assert not mounted_at(str(mountpoint))
        file.write(b"still here")
        assert os.pread(file.fileno(), 100, 0) == b"still here"
    wait_until(lambda: has_ended(pid), 30, "the end of the mount's process")


def test_a_dead_mount_is_listed_and_can_be_unmounted(mountpoint: Path) -> None:
    pid = mount_it(mountpoint, "--no-auto-unmount", "--no-survive")
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: has_ended(pid), 10, "the end of the killed process")
    done = gpufs("mount", mountpoint, "--driver", "host", check=False)
    assert done.returncode == 1
    assert f"gpufs umount {mountpoint}" in done.stderr
    (status,) = [s for s in json.loads(gpufs("status", "--json").stdout) if s["mountpoint"] == str(mountpoint)]
    assert status["state"] == "dead"
    gpufs("umount", mountpoint)
    assert not mounted_at(str(mountpoint))
    mount_it(mountpoint)
    gpufs("umount", mountpoint)


@pytest.mark.parametrize("fate", ["unmounted", "dead", "hanging", "detached"])
def test_status_names_the_command_that_helps(mountpoint: Path, monkeypatch: pytest.MonkeyPatch, fate: str) -> None:
    """Whatever has become of a mount: the command works as it is printed."""
    monkeypatch.setenv("GPUFS_DRIVER", "host")
    monkeypatch.setenv("GPUFS_MEMORY", "64M")
    options = [] if fate in ("hanging", "detached") else ["--no-survive"]
    pid = mount_it(mountpoint, *options, *(["--no-auto-unmount"] if fate == "dead" else []))
    with ExitStack() as held:
        if fate == "detached":
            held.enter_context(open(mountpoint / "gpu0/x", "w"))
            run("umount", "-l", mountpoint)
        elif fate == "hanging":
            stop_process(pid)
        else:
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: has_ended(pid), 10, "the end of the killed process")
            wait_until(lambda: bool(mounted_at(str(mountpoint))) == (fate == "dead"), 10, "the guard")
        done = gpufs("status", "--check", mountpoint, "--status-timeout", "500ms", check=False)
        assert done.returncode == 1
        shown = re.search(rf"gpufs (umount --force|umount|mount) {re.escape(str(mountpoint))}", done.stderr)
        assert shown is not None, done.stderr
        gpufs(*shown[0].split()[1:])
        assert bool(mounted_at(str(mountpoint))) == (fate == "unmounted")
        if fate == "unmounted":
            gpufs("umount", mountpoint)
        wait_until(lambda: has_ended(pid), 10, "the end of the daemon")


def test_a_hanging_mount_does_not_block_commands(mountpoint: Path) -> None:
    pid = mount_it(mountpoint)
    stop_process(pid)
    try:
        done = gpufs("status", "--json", "--status-timeout", "500ms")
        (status,) = [s for s in json.loads(done.stdout) if s["mountpoint"] == str(mountpoint)]
        assert (status["state"], status["pid"]) == ("no answer", pid)
        done = gpufs("status", mountpoint, "--status-timeout", "500ms", check=False)
        assert done.returncode == 1
        assert "no answer within 0.5 seconds" in done.stderr
        gpufs("umount", "--force", mountpoint)
    finally:
        if not has_ended(pid):
            os.kill(pid, signal.SIGKILL)
    assert has_ended(pid)
    assert not mounted_at(str(mountpoint))


# ---- processes that do not come up: stand-ins for the real one ----


def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: str) -> None:
    script = tmp_path / "stand_in.py"
    script.write_text(f"import json, os, sys, time, signal\nfd = int(sys.argv[2])\n{body}\n")
    monkeypatch.setattr(launching, "DAEMON", (sys.executable, str(script)))


def launch_fails(mountpoint: Path, capfd: pytest.CaptureFixture[str], *options: str) -> str:
    assert cli.run_command_line(["mount", str(mountpoint), "--driver", "host", "--memory", "64M", *options]) == 1
    output = capfd.readouterr()
    assert output.out == ""
    assert len(output.err.splitlines()) == 1
    return output.err.removeprefix("gpufs: ").rstrip("\n")


def left_over(tmp_path: Path) -> list[str]:
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if os.fsencode(tmp_path / "stand_in.py") in command:
            found.append(pid)
    return found


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("sys.exit(3)", "the daemon ended without an answer (exit code 3)"),
        ("signal.signal(15, signal.SIG_IGN); os.fork(); time.sleep(1000)", "did not come up within 1 seconds"),
        ("os.kill(os.getpid(), 11)", "the daemon ended without an answer (SIGSEGV)"),
        ("raise RuntimeError('boom')", "(exit code 1): RuntimeError: boom"),
        ("os.write(fd, json.dumps({'error': 28, 'message': 'no room'}).encode() + b'\\n')", "no room"),
    ],
)
def test_a_failed_start_is_reported_in_one_line(
    body: str,
    words: str,
    mountpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    stand_in(monkeypatch, tmp_path, body)
    timeout = "1s" if "sleep" in body else "60s"
    assert words in launch_fails(mountpoint, capfd, "--mount-timeout", timeout)
    wait_until(lambda: not left_over(tmp_path), 10, "the end of all processes")
