"""Where a mount may be, and what names of places may look like.

Forbidden mountpoints are tried in a mount namespace, so that a failing check hides nothing from others.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
from support.cli import fails, gpufs, one_line
from support.mounting import GPUFS, Mounter
from support.processes import run

CONTROL = "a\nb\tc\x1b[31m"
SHOWN = "a\\nb\\tc\\x1b[31m"


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
def test_an_empty_name_is_refused(command: str, tmp_path: Path) -> None:
    assert fails(2, command, "", cwd=tmp_path) == "an empty name is given where a directory belongs"


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
        for words in (("status",), ("status", path), ("df", path), ("stats", path)):
            said = gpufs(*words).stdout
            assert f"{tmp_path}/{SHOWN}" in said
            assert "\x1b" not in said
        (device,) = json.loads(gpufs("df", "--json", path).stdout)
        assert device["mountpoint"] == str(path)
    finally:
        gpufs("umount", path)
