"""A Python that plain users can run.

That of .venv may lie below root's home, where nobody else can go. Then the system's own of the same version runs with
the packages of .venv.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import sysconfig

import pytest

from support.mounting import REPOSITORY
from support.processes import NOBODY, PATIENCE

_PROBE = "import cffi, click, pyfuse3, sys; print(sys.version_info[:2])"


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
