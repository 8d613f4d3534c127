"""scripts/setup: what it does about missing system packages, with stand-ins for apt-get and the list of packages."""

import os
import stat
import subprocess
from pathlib import Path

import pytest
from support.processes import NOBODY, run

SETUP = Path(__file__).resolve().parents[1] / "scripts/setup"


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A folder of programs that come first: apt-get notes its arguments and "installs" what makes the checks pass."""
    programs = tmp_path / "bin"
    programs.mkdir()
    apt = programs / "apt-get"
    apt.write_text(
        f'#!/bin/sh\necho "$@" >>{tmp_path}/calls\n[ "$1" = update ] && exit 0\n'
        f'for name in "$@"; do case "$name" in bad) exit 100 ;; *) touch {tmp_path}/has-"$name" ;; esac; done\n'
    )
    apt.chmod(0o755)
    return tmp_path


def setup(machine: Path, packages: list[str], **options: object) -> subprocess.CompletedProcess[str]:
    machine.joinpath("list").write_text(
        "# a comment\n\n" + "".join(f"{name} | test -e {machine}/has-{name} | for the test\n" for name in packages)
    )
    environment = {
        **os.environ,
        "PATH": f"{machine}/bin:{os.environ['PATH']}",
        "GPUFS_PACKAGE_LIST": str(machine / "list"),
    }
    return run(SETUP, "--system-only", check=False, env=environment, **options)  # type: ignore[arg-type]


def calls(machine: Path) -> list[str]:
    path = machine / "calls"
    return path.read_text().splitlines() if path.exists() else []


def test_missing_packages_are_installed_once(machine: Path) -> None:
    (machine / "has-b").touch()
    done = setup(machine, ["a", "b", "c"])
    assert done.returncode == 0, done
    assert "missing: a (for the test)" in done.stdout
    assert "missing: b" not in done.stdout
    assert [call.split()[0] for call in calls(machine)] == ["update", "install"]
    assert calls(machine)[1].split()[-2:] == ["a", "c"]
    again = setup(machine, ["a", "b", "c"])
    assert (again.returncode, again.stdout, len(calls(machine))) == (0, "", 2)


def test_failure_names_the_packages(machine: Path) -> None:
    done = setup(machine, ["bad"])
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "setup: apt-get could not install: bad"


def test_another_user_is_told_what_root_should_do(machine: Path) -> None:
    for folder in (machine, *machine.parents):
        if folder.stat().st_uid == 0 and not folder.stat().st_mode & stat.S_IXOTH:
            folder.chmod(folder.stat().st_mode | stat.S_IXOTH | stat.S_IROTH)
    python = {"PYTHON": "/usr/bin/python3"} if Path("/usr/bin/python3").exists() else {}
    os.environ.update(python)
    try:
        done = setup(machine, ["a"], user=NOBODY, group=NOBODY, extra_groups=[])
    finally:
        for name in python:
            del os.environ[name]
    assert done.returncode == 1
    assert "as root, run: apt-get install --no-install-recommends a" in done.stderr
    assert calls(machine) == []
