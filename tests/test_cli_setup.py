"""scripts/setup and pip install: what they do about missing system packages."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import run

ROOT = Path(__file__).resolve().parents[1]
SETUP = ROOT / "scripts/setup"


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A directory with a stand-in for apt-get, which records its arguments and makes the checks pass."""
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


def test_pip_names_missing_packages_in_one_line(tmp_path: Path) -> None:
    """On a machine without compiler and libfuse, where pip would otherwise show what CMake prints."""
    (tmp_path / "sh").symlink_to("/bin/sh")
    environment = {name: value for name, value in os.environ.items() if name != "CXX"} | {"PATH": str(tmp_path)}
    words = ["wheel", "--no-build-isolation", "--no-deps", "--no-input", "-w", str(tmp_path / "wheels"), str(ROOT)]
    done = run(sys.executable, "-m", "pip", *words, env=environment, check=False)
    assert done.returncode != 0
    (line,) = [line for line in (done.stdout + done.stderr).splitlines() if "libfuse3-dev" in line]
    assert {"g++", "pkg-config"} <= set(line.split())
    assert len((done.stdout + done.stderr).splitlines()) < 30


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


def test_a_failed_installation_names_the_packages(machine: Path) -> None:
    done = setup(machine, ["bad"])
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "setup: apt-get could not install: bad"
