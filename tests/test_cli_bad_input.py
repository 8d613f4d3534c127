"""Wrong input of every kind: one clear line on standard error, the right exit code, nothing left behind."""

import os
import subprocess
from pathlib import Path

import pytest
from support.cli import fails
from support.mounting import GPUFS, GpufsMount, Mounter
from support.processes import NOBODY, plain_user, run
from support.users import user_gpufs

from gpufs import cli


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nonsense"], "No such option"),
        (["nonsense"], "No such command"),
        (["mount"], "Missing argument 'MOUNTPOINT'"),
        (["mount", "a", "b"], "unexpected extra argument"),
        (["mount", "--memory"], "requires an argument"),
        (["umount"], "Missing argument 'MOUNTPOINT...'"),
        (["status", "--bogus"], "No such option"),
    ],
)
def test_wrong_command_lines(arguments: list[str], words: str) -> None:
    line = fails(2, *arguments)
    assert words in line
    named = f"{arguments[0]} " if arguments[0] in ("mount", "umount", "status") else ""
    assert f"(see gpufs {named}--help)" in line


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("--memory", "lots", "a size such as"),
        ("--memory", "0", "from 2M"),
        ("--memory", "-1", "from 2M"),
        ("--devices", "0x2", "a whole number from 0 to 64"),
        ("--driver", "vulkan", "one of auto, cuda, hip, host"),
        ("--log-level", "chatty", "one of debug, info"),
        ("--driver", "pigeon", "one of auto"),
        ("--mount-timeout", "0", "a time such as"),
    ],
)
def test_values_that_are_not_allowed(mountpoint: Path, option: str, value: str, allowed: str) -> None:
    line = fails(2, "mount", mountpoint, option, value)
    name = option.removeprefix("--").replace("-", "_")
    assert line.startswith(f"{name}: {value!r} ({option}) is not allowed: ")
    assert allowed in line


def test_more_memory_than_the_machine_has(mountpoint: Path) -> None:
    line = fails(2, "mount", mountpoint, "--driver", "host", "--memory", "8T", "--devices", "3")
    assert line.startswith("memory: 3 x 8T is more than this machine has: ")
    if not Path("/dev/nvidiactl").exists():
        assert "more than this machine has" in fails(1, "mount", mountpoint, "--memory", "8T")


@pytest.mark.parametrize("command", ["mount", "umount", "status"])
@pytest.mark.parametrize("kind", ["missing", "file"])
def test_mountpoints_that_cannot_be(tmp_path: Path, command: str, kind: str) -> None:
    path = tmp_path / kind
    if kind == "file":
        path.touch()
    assert fails(1, command, path).startswith(f"{path}: ")


def test_mounted_already(mount: Mounter, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(path := mount().path)
    for name in (path, link):
        assert fails(1, "mount", name, "--driver", "host").startswith(f"{name}: ")


def user_fails(*arguments: str) -> str:
    """As fails(1, ...), for a plain user who may use /dev/fuse."""
    with plain_user() as environment:
        command, environment = user_gpufs(environment)
        done = run(
            *command, *arguments, check=False, user=NOBODY, group=NOBODY, extra_groups=[], env=environment, cwd="/"
        )
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, "", 1), done
    return done.stderr.removeprefix("gpufs: ").rstrip("\n")


def test_mountpoint_of_another_user() -> None:
    assert user_fails("mount", "/var", "--driver", "host").startswith("/var: Permission denied")


def mount_as_user_in_namespace(setting: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Runs gpufs mount as a plain user, in a new mount namespace after root has run `setting` there."""
    with plain_user() as environment:
        command, environment = user_gpufs(environment)
        script = f'{setting} && exec setpriv --reuid {NOBODY} --regid {NOBODY} --clear-groups "$@"'
        place = Path(environment["HOME"], "mnt")
        place.mkdir()
        os.chown(place, NOBODY, NOBODY)
        words = ["unshare", "-m", "sh", "-c", script, "sh", *command, "mount", str(place), "--driver", "host", *options]
        return run(*words, check=False, env=environment, cwd="/")


def test_no_right_to_use_dev_fuse() -> None:
    """In a mount namespace where only root may open it."""
    setting = "mount -t tmpfs none /dev && mknod -m 666 /dev/null c 1 3 && mknod -m 600 /dev/fuse c 10 229"
    done = mount_as_user_in_namespace(setting)
    assert done.returncode == 1
    assert "/dev/fuse: Permission denied" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_no_dev_fuse(mountpoint: Path) -> None:
    """In a mount namespace of its own, where /dev is empty."""
    script = 'mount -t tmpfs none /dev && mknod /dev/null c 1 3 && exec "$@"'
    command = ["unshare", "-m", "sh", "-c", script, "sh", *GPUFS, "mount", str(mountpoint), "--driver", "host"]
    done = run(*command, check=False)
    assert done.returncode == 1
    assert "/dev/fuse is missing" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("driver", ["cuda", "hip"])
def test_driver_that_is_not_here(mountpoint: Path, driver: str) -> None:
    if Path("/dev/nvidiactl" if driver == "cuda" else "/dev/kfd").exists():
        pytest.skip("this machine has such a GPU")
    line = fails(1, "mount", mountpoint, "--driver", driver)
    assert "not available" in line
    assert line.endswith("; gpufs doctor says what to do")
    assert driver in line


def test_unmounting_what_is_not_ours(tmp_path: Path) -> None:
    for command, path in (("umount", "/proc"), ("df", tmp_path)):
        assert fails(1, command, path) == f"{path}: no gpufs is mounted there (gpufs status lists those that are)"


def test_a_directory_of_a_mount(shared_mount: GpufsMount) -> None:
    for command, path in (("status", shared_mount.device), ("umount", shared_mount.path / ".gpufs"), ("stats", "gpu1")):
        inside = shared_mount.path / path
        assert f"the mount at {shared_mount.path}:" in fails(1, command, inside)


def test_no_traceback_ever(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A bug of ours is one line; the traceback is for those who ask for it."""

    def broken(*_: object) -> None:
        raise KeyError("surprise")

    from gpufs.cli import _status

    monkeypatch.setattr(_status, "collect", broken)
    assert cli.run(["status"]) == 1
    error = capsys.readouterr().err
    assert error == "gpufs: internal error: KeyError: 'surprise' (GPUFS_LOG_LEVEL=debug shows more)\n"
    monkeypatch.setenv("GPUFS_LOG_LEVEL", "debug")
    assert cli.run(["status"]) == 1
    assert "Traceback" in capsys.readouterr().err
