"""The build backend that pip calls: scikit-build-core, after a check that the system's libraries are there.

Without the check a missing library shows as hundreds of lines of CMake, or of the compiler.
"""

import functools
import inspect
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from scikit_build_core import build

_LIST: Final = Path(__file__).with_name("system-packages")
# pip brings CMake and Ninja where they are missing.
_NEEDED: Final = ("g++", "python3-dev")

Options = dict[str, Any] | None

get_requires_for_build_sdist = build.get_requires_for_build_sdist
build_sdist = build.build_sdist


def _missing() -> list[tuple[str, str]]:
    """The Debian packages that are missing, each with what it is for."""
    found = []
    for line in _LIST.read_text(encoding="utf-8").splitlines():
        package, *rest = (part.strip() for part in line.split(" | "))
        if package not in _NEEDED or (package == "g++" and "CXX" in os.environ):
            continue
        command = ["sh", "-c", rest[0]]
        if subprocess.run(command, env={**os.environ, "PYTHON": sys.executable}, capture_output=True).returncode != 0:
            found.append((package, rest[1]))
    return found


def _check(options: Options) -> None:
    """Ends the process with one line if a library is missing."""
    if (options or {}).get("wheel.cmake") == "false":
        return
    missing = _missing()
    if missing:
        names = " ".join(package for package, _ in missing)
        reasons = ", ".join(f"{package} ({purpose})" for package, purpose in missing)
        remedy = "as root: apt-get install" if shutil.which("apt-get") else "install the equivalents of Debian's"
        sys.exit(f"gpufs cannot be built, this is missing: {reasons}. {remedy} {names}")


def _checked(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The hook, after the check. Which hook comes first depends on whether pip isolates the build."""
    parameters = inspect.signature(hook)

    @functools.wraps(hook)
    def checked(*arguments: Any, **named: Any) -> Any:
        _check(parameters.bind(*arguments, **named).arguments.get("config_settings"))
        return hook(*arguments, **named)

    return checked


get_requires_for_build_wheel = _checked(build.get_requires_for_build_wheel)
get_requires_for_build_editable = _checked(build.get_requires_for_build_editable)
prepare_metadata_for_build_wheel = _checked(build.prepare_metadata_for_build_wheel)
prepare_metadata_for_build_editable = _checked(build.prepare_metadata_for_build_editable)
build_wheel = _checked(build.build_wheel)
build_editable = _checked(build.build_editable)
