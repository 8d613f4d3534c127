"""Runs the gpufs command, also as a plain user, and checks its failures."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpufs.cli import run_command_line
from support.mounting import GPUFS, REPOSITORY
from support.processes import NOBODY, PATIENCE, run
from support.watchdog import mounted_at, rescue


def gpufs(*arguments: object, check: bool = True, **options: object) -> subprocess.CompletedProcess[str]:
    """Runs the command to its end; with check, a failure shows its output."""
    words = [word if isinstance(word, (str, os.PathLike)) else str(word) for word in arguments]
    return run(*GPUFS, *words, check=check, **options)  # type: ignore[arg-type]


def inspected(*words: str | Path) -> Any:
    """What `gpufs inspect` prints as JSON."""
    return json.loads(gpufs_here("inspect", "--json", *words).stdout)


def one_line(done: subprocess.CompletedProcess[str], code: int) -> str:
    """The single line of a failed command, which has printed nothing else."""
    lines = done.stderr.splitlines()
    assert (done.returncode, done.stdout, len(lines)) == (code, "", 1), done
    name, _, text = lines[0].partition(": ")
    assert re.fullmatch("gpufs( [a-z]+)?", name), done
    return text


def gpufs_here(*arguments: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    """As gpufs(), in this process, which has loaded the modules: starting a program takes most of a command's time."""
    words = [os.fspath(word) if isinstance(word, os.PathLike) else str(word) for word in arguments]
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        code = run_command_line(words)
    assert not (check and code), (words, output.getvalue(), errors.getvalue())
    return subprocess.CompletedProcess(words, code, output.getvalue(), errors.getvalue())


def fails_here(code: int, *arguments: object) -> str:
    """As fails(), in this process."""
    return one_line(gpufs_here(*arguments, check=False), code)


def fails(code: int, *arguments: object, **options: object) -> str:
    """Runs a command that must fail with this code; its single line."""
    return one_line(gpufs(*arguments, check=False, **options), code)


def refused(*words: object, **options: object) -> str:
    """Run a copy that must fail with exit code 1; its single line."""
    return f"gpufs cp: {fails(1, 'cp', *words, **options)}"


def refused_here(*words: object) -> str:
    """As refused(), in this process."""
    return f"gpufs cp: {fails_here(1, 'cp', *words)}"


@pytest.fixture
def mountpoint(tmp_path: Path) -> Iterator[Path]:
    """An empty directory, on which nothing may be mounted at the end."""
    path = tmp_path / "mnt"
    path.mkdir()
    yield path
    if mounted_at(str(path)):
        rescue(str(path), None)
        raise AssertionError("something was left mounted")


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory that every user can enter."""
    path = Path(tempfile.mkdtemp(prefix="gpufs-tests-", dir="/tmp"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


# ---- a Python that plain users can run ----

# That of .venv may lie below root's home, where nobody else can go. Then the system's own of the same version runs with
# the packages of .venv.
_PROBE = "import cffi, click, sys; print(sys.version_info[:2])"


def _runs(program: str, environment: dict[str, str]) -> bool:
    try:
        done = subprocess.run(
            [program, "-c", _PROBE],
            env=environment,
            user=NOBODY,
            group=NOBODY,
            extra_groups=[],
            cwd="/",
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    except OSError:
        return False
    return done.returncode == 0 and done.stdout.strip() == str(sys.version_info[:2])


@functools.cache
def _python() -> tuple[str, str]:
    packages = sysconfig.get_path("purelib")
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    candidates = [(sys.executable, str(REPOSITORY))]
    candidates += [
        (path, f"{REPOSITORY}:{packages}")
        for path in (shutil.which(version, path="/usr/local/bin:/usr/bin:/bin"),)
        if path is not None
    ]
    for program, path in candidates:
        if _runs(program, {"PYTHONPATH": path, "PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"}):
            return program, path
    raise AssertionError(f"no Python {version} that user {NOBODY} can run: tried {candidates}")


def user_gpufs(environment: dict[str, str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """The gpufs command for user nobody, and the environment (see processes.plain_user) completed for it."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    program, path = _python()
    # What scripts/test-fakes has set.
    fakes = {
        name: value
        for name, value in os.environ.items()
        if name in ("LD_LIBRARY_PATH", "LD_PRELOAD") or name.startswith("FAKE_")
    }
    return (program, "-m", "gpufs"), {**fakes, **environment, "PYTHONPATH": path}
