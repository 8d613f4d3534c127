"""How the command line helps: short help, suggestions, all mounts at once, places where a mount may not be."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.cli import fails, fails_here, gpufs, one_line
from support.mounting import GPUFS, Mounter
from support.processes import run

from gpufs import __version__

SMALL = ("--driver", "host", "--memory", "64M")


def options(text: str) -> list[str]:
    return [line.split()[0].rstrip(",") for line in text.splitlines() if line.startswith("  -")]


def test_help_shows_everyday_options_and_help_all_the_others() -> None:
    few, every = (options(gpufs("mount", word).stdout) for word in ("--help", "--help-all"))
    assert {"-o", "--driver", "--devices", "--memory", "--allow-other", "--help-all"} <= set(few)
    assert len(few) <= 14
    assert set(few) < set(every)
    assert {"--io-workers", "--io-chunk-bytes"} <= set(every) - set(few)


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["mout", "x"], "mount"),
        (["unmount", "x"], "umount"),
        (["mount", "--drivr", "host", "x"], "--driver"),
        (["mount", "-o", "devices=0,2", "x"], "devices=0:2"),
    ],
)
def test_mistyped_words_get_a_suggestion(words: list[str], meant: str) -> None:
    assert meant in fails_here(2, *words)


def test_the_version() -> None:
    assert gpufs("-V").stdout == gpufs("--version").stdout
    assert __version__ in gpufs("-V").stdout


def test_unknown_variables_are_reported_by_mount_alone(mountpoint: Path) -> None:
    wrong = os.environ | {"GPUFS_MEMROY": "1G", "GPUFS_CONFIG": "/dev/null"}
    done = gpufs("mount", mountpoint, *SMALL, env=wrong)
    others = [gpufs(command, mountpoint, env=wrong) for command in ("df", "status", "umount")]
    (line,) = done.stderr.splitlines()
    assert "GPUFS_MEMROY" in line
    assert "GPUFS_MEMORY" in line
    assert [one.stderr for one in others] == ["", "", ""]


@pytest.mark.skipif(os.geteuid() != 0, reason="namespaces take root")
def test_umount_all(tmp_path: Path) -> None:
    """Every mount, one inside another too. In a namespace of its own, which has only the mounts of this test."""
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    clean = (
        "from gpufs import mounting\n"
        "while found := mounting.mounts(): mounting.unmount(found[-1].mountpoint, lazy=True)"
    )
    program = " ".join(GPUFS)
    script = f"""
        set -e
        {sys.executable} -c '{clean}'
        {program} mount {tmp_path}/first {" ".join(SMALL)}
        mkdir {tmp_path}/first/gpu0/inner
        {program} mount {tmp_path}/first/gpu0/inner {" ".join(SMALL)}
        {program} mount {tmp_path}/second {" ".join(SMALL)}
        {program} umount -a
        {program} status
        {program} umount --all
    """
    namespaces = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
    done = run(*namespaces, "sh", "-c", script)
    assert done.stdout == "no gpufs is mounted\n"
    assert fails(2, "umount")
    assert fails(2, "umount", "--all", tmp_path / "first")


CONTROL = "a\nb\tc\x1b[31m\u202ed\U000e0041"
SHOWN = "a\\nb\\tc\\x1b[31m\\u202ed\\U000e0041"


def alone(*words: str) -> subprocess.CompletedProcess[str]:
    """Runs gpufs in new mount and process namespaces. Its mounts are invisible outside and end with it."""
    namespaces = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
    return run(*namespaces, *GPUFS, *words, check=False)


@pytest.mark.parametrize("place", ["/", "/proc", "/usr", "/tmp", "/home"])
def test_system_directories_are_refused_as_mountpoints(place: str) -> None:
    line = one_line(alone("mount", place, "--driver", "host", "--memory", "64M"), 1)
    assert line.startswith(f"{place}: a mount there would hide ")
    assert line.endswith("mount on a directory of your own")


def test_the_directory_of_gpufs_itself_is_refused_as_mountpoint(tmp_path: Path) -> None:
    """A mount over the directory that gpufs runs from would cut off the commands that end it."""
    import gpufs as package

    place = os.path.realpath(Path(package.__file__).parent.parent)
    assert "would hide" in one_line(alone("mount", place, "--driver", "host", "--memory", "64M"), 1)


@pytest.mark.parametrize("command", ["mount", "status"])
def test_an_empty_name_is_refused(command: str) -> None:
    assert fails_here(2, command, "") == "an empty name is given where a directory belongs"


def test_one_wrong_name_does_not_keep_other_mounts_from_being_unmounted(mount: Mounter, tmp_path: Path) -> None:
    first, last = mount(memory="64M"), mount(memory="64M")
    none = tmp_path / "none"
    assert fails(1, "umount", first.path, none, last.path) == f"{none}: there is no such directory"
    listed = [status["mountpoint"] for status in json.loads(gpufs("status", "--json").stdout)]
    assert str(first.path) not in listed
    assert str(last.path) not in listed


def test_control_characters_in_names_are_escaped(tmp_path: Path) -> None:
    """Directory names cannot break lines or control the terminal."""
    path = tmp_path / CONTROL
    assert fails(1, "status", path) == f"{tmp_path}/{SHOWN}: there is no such directory"
    path.mkdir()
    gpufs("mount", path, "--driver", "host", "--memory", "64M")
    try:
        for name in ("new", "old"):
            (path / "gpu0" / name).write_bytes(b"version")
        replaced = ("replace", path / "gpu0" / "new", path / "gpu0" / "old")
        for words in (("status",), ("status", path), ("df", path), ("stats", path), ("restart", path), replaced):
            said = gpufs(*words).stdout
            assert f"{tmp_path}/{SHOWN}" in said
            assert "\x1b" not in said
        (device,) = json.loads(gpufs("df", "--json", path).stdout)
        assert device["mountpoint"] == str(path)
    finally:
        gpufs("umount", path)
