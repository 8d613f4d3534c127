"""Wrong input of every kind: one clear line on standard error, the right exit code, nothing left behind."""

import os
import tempfile
from pathlib import Path

import pytest
from support.cli import fails, fails_here, gpufs, user_gpufs
from support.mounting import Mounter
from support.processes import NOBODY, plain_user, run


@pytest.mark.parametrize(
    ("code", "line"),
    [
        (2, "--nonsense"),
        (2, "nonsense"),
        (2, "mount"),
        (2, "mount a b"),
        (2, "mount --memory"),
        (2, "umount"),
        (2, "status --bogus"),
        (1, "stats /nonexistent"),
        (1, "stats /"),
        (1, "top --once /nonexistent"),
        (2, "top --interval 0"),
        (2, "top --interval nan"),
        (1, "ls /"),
        (2, "metrics --listen nowhere"),
        (2, "metrics --listen ..:9400"),
        (2, f"metrics --listen {'a' * 70}:9400"),
        (1, "metrics --listen 192.0.2.1:9400"),
        (1, "trace /nonexistent -o x"),
        (1, "trace / -o x"),
        (2, "trace /"),
        (2, "trace / -o x --duration 0"),
        (2, "trace / -o x --duration nan"),
    ],
)
def test_wrong_command_lines_are_reported_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    fails_here(code, *line.split())
    assert not list(tmp_path.iterdir())


def test_a_value_that_is_not_allowed_is_named(mountpoint: Path) -> None:
    assert fails_here(2, "mount", mountpoint, "--memory", "lots").startswith(
        "memory: 'lots' (--memory) is not allowed: "
    )


def test_more_memory_than_the_machine_has_is_refused(mountpoint: Path) -> None:
    line = fails(2, "mount", mountpoint, "--driver", "host", "--memory", "8T", "--devices", "3")
    assert line.startswith("memory: 3 x ")
    assert "more than this machine has" in line
    if not Path("/dev/nvidiactl").exists():
        assert "more than this machine has" in fails(1, "mount", mountpoint, "--memory", "8T")


@pytest.mark.parametrize("command", ["mount", "umount", "status"])
@pytest.mark.parametrize("kind", ["missing", "file"])
def test_a_missing_mountpoint_or_a_file_is_refused(tmp_path: Path, command: str, kind: str) -> None:
    path = tmp_path / kind
    if kind == "file":
        path.touch()
    assert fails_here(1, command, path).startswith(f"{path}: ")


def test_a_directory_with_files_is_refused(mountpoint: Path) -> None:
    """Unless an option allows it. mount(8) mounts everything everywhere."""
    (mountpoint / "file").touch()
    words = (mountpoint, "--driver", "host", "--memory", "64M")
    assert "--allow-non-empty" in fails(1, "mount", *words)
    gpufs("mount", *words, "--allow-non-empty")
    gpufs("umount", mountpoint)
    gpufs("mount-helper", "gpufs", mountpoint, "-o", "driver=host,memory=64M")
    gpufs("umount", mountpoint)
    assert (mountpoint / "file").exists()


def test_a_second_mount_at_one_place_is_refused(mount: Mounter, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(path := mount().path)
    for name in (path, link):
        assert fails(1, "mount", name, "--driver", "host").startswith(f"{name}: ")


def user_fails(*arguments: str) -> str:
    """The single error line of a command that a plain user with access to /dev/fuse runs."""
    with plain_user() as environment:
        command, environment = user_gpufs(environment)
        done = run(
            *command, *arguments, check=False, user=NOBODY, group=NOBODY, extra_groups=[], env=environment, cwd="/"
        )
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, "", 1), done
    return done.stderr.removeprefix("gpufs: ").rstrip("\n")


def test_a_plain_user_cannot_mount_on_a_directory_of_root() -> None:
    assert user_fails("mount", "/opt", "--driver", "host").startswith("/opt: Permission denied")


@pytest.mark.parametrize("driver", ["cuda", "hip"])
def test_a_missing_driver_is_reported(mountpoint: Path, driver: str) -> None:
    if Path("/dev/nvidiactl" if driver == "cuda" else "/dev/kfd").exists():
        pytest.skip("this machine has such a GPU")
    line = fails(1, "mount", mountpoint, "--driver", driver)
    assert "not available" in line
    assert line.endswith("; gpufs doctor says what to do")
    assert driver in line


def test_only_gpufs_mounts_are_unmounted(tmp_path: Path) -> None:
    for command, path in (("umount", "/proc"), ("df", tmp_path)):
        assert fails_here(1, command, path) == f"{path}: no gpufs is mounted there (gpufs status lists those that are)"


def test_a_file_that_may_not_be_read_is_named() -> None:
    with tempfile.NamedTemporaryFile() as file:  # in a directory that a plain user may search
        os.chmod(file.name, 0)
        for words in (["inspect", file.name], ["trace", file.name, "-o", "-"]):
            assert user_fails(*words) == f"{file.name}: Permission denied"


def test_a_save_that_may_not_be_read_is_not_called_anything_else() -> None:
    with tempfile.TemporaryDirectory() as save:  # of mode 0700
        line = user_fails("restore", "--verify", save)
    assert line == f"gpufs restore: {save}/manifest.jsonl: Permission denied"
