"""The build backend that pip calls: scikit-build-core, after a check that the system's libraries are there.

Without the check a missing library shows as hundreds of lines of CMake, or of the compiler.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from scikit_build_core import build

_LIST: Final = Path(__file__).with_name("system-packages")
# pip brings CMake and Ninja where they are missing. libfuse is for pyfuse3, which pip compiles next.
_NEEDED: Final = ("g++", "pkg-config", "libfuse3-dev", "python3-dev")

Options = dict[str, Any] | None

prepare_metadata_for_build_wheel = build.prepare_metadata_for_build_wheel
prepare_metadata_for_build_editable = build.prepare_metadata_for_build_editable
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


def get_requires_for_build_wheel(config_settings: Options = None) -> list[str]:
    """The first hook that pip calls."""
    _check(config_settings)
    return list(build.get_requires_for_build_wheel(config_settings))


def get_requires_for_build_editable(config_settings: Options = None) -> list[str]:
    """As for a wheel."""
    _check(config_settings)
    return list(build.get_requires_for_build_editable(config_settings))


def build_wheel(wheel_directory: str, config_settings: Options = None, metadata_directory: str | None = None) -> str:
    """Builds the wheel; without build isolation this is the first hook."""
    _check(config_settings)
    return str(build.build_wheel(wheel_directory, config_settings, metadata_directory))


def build_editable(wheel_directory: str, config_settings: Options = None, metadata_directory: str | None = None) -> str:
    """Builds the wheel of an editable installation."""
    _check(config_settings)
    return str(build.build_editable(wheel_directory, config_settings, metadata_directory))
