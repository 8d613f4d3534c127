"""How the command line helps: short help, suggestions for mistyped words, all mounts at once."""

import os
import sys
from pathlib import Path

import pytest
from support.cli import fails, gpufs
from support.mounting import GPUFS
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
    assert {"--io-workers", "--reader-threads"} <= set(every) - set(few)


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
    assert meant in fails(2, *words)


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
