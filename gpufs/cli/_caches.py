"""`gpufs run --caches`: one directory for what the libraries of a program compile while it runs."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from gpufs.cli._output import Failure, user_name
from gpufs.config import numbers
from gpufs.syscalls import trusted

# Each variable, and its directory below that of a machine and its versions.
VARIABLES: Final = {
    "CUDA_CACHE_PATH": "cuda",
    "DG_JIT_CACHE_DIR": "deep_gemm",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "SGLANG_CACHE_DIR": "sglang",
    "SGLANG_JIT_CACHE_DIR": "sglang/jit",
    "TILELANG_CACHE_DIR": "tilelang",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TORCH_EXTENSIONS_DIR": "torch_extensions",
    "TRITON_CACHE_DIR": "triton",
    "TVM_FFI_CACHE_DIR": "tvm_ffi",
    "VLLM_CACHE_ROOT": "vllm",
}
# Compiled code of one version is not for another.
_PACKAGES: Final = ("torch", "triton", "vllm", "sglang", "flashinfer-python")
_PROBE: Final = """
import json, sys
from importlib.metadata import PackageNotFoundError, version
found = {"python": "%d.%d" % sys.version_info[:2]}
for name in sys.argv[1:]:
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        pass
print(json.dumps(found))
"""
_PROBE_SECONDS: Final = 30.0
_NVIDIA: Final = Path("/proc/driver/nvidia")
_AMD: Final = Path("/sys/class/kfd/kfd/topology/nodes")


def variables(directory: str, python: str | None, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that put a program's caches below a directory, without those that are set already.

    Makes the directory for this machine's GPUs, their driver, and the versions that the Python has.
    """
    parts = [*_hardware(), *(f"{name}-{version}" for name, version in _versions(python, environment).items())]
    key = "_".join(re.sub(r"[^A-Za-z0-9.+-]+", "-", part).strip("-") for part in parts if part)
    folder = os.path.join(_made(os.path.realpath(directory)), key)
    _made(folder)
    return {name: os.path.join(folder, place) for name, place in VARIABLES.items() if name not in environment}


def _made(path: str) -> str:
    """Make a directory, unless it is there, that only this user and root can change."""
    umask = os.umask(0o077)  # of its parents, too
    try:
        os.makedirs(path, exist_ok=True)
    finally:
        os.umask(umask)
    for place in (Path(path), *Path(path).parents):
        status = place.stat()
        others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        # In a directory above it, others must only be unable to exchange names.
        if place != Path(path) and status.st_mode & stat.S_ISVTX:
            others = 0
        if others or not trusted(status.st_uid):
            who = "other users may write to it" if others else f"it belongs to user {user_name(status.st_uid)}"
            remedy = f"chmod go-w {place}" if others else f"use a directory of user {user_name(os.geteuid())}"
            raise Failure(f"{place}: {who}, and programs would run code from {path}: {remedy}")
    return path


def _hardware() -> Iterator[str]:
    """Yield names of the GPUs and their driver, or of the processor if there is no GPU."""
    models = {_match(r"^Model:\s*(.+)$", file) for file in _NVIDIA.glob("gpus/*/information")} - {""}
    if models:
        yield from sorted(models)
        yield "driver-" + _match(r"Module.*?\s(\d+\.[\d.]+)", _NVIDIA / "version")
        return
    facts = [numbers(file) for file in _AMD.glob("*/properties")]
    targets = {one.get("gfx_target_version", 0) for one in facts if one.get("simd_count", 0)}  # 0: a processor
    if targets:
        yield from (f"gfx-{target}" for target in sorted(targets))
        yield "driver-" + (_match(r"(\S+)", Path("/sys/module/amdgpu/version")) or os.uname().release)
        return
    yield os.uname().machine
    for fact in ("model name", "cpu family", "model", "CPU part"):  # names alone may be those of several processors
        yield _match(rf"^{fact}\s*:\s*(.+)$", Path("/proc/cpuinfo"))


def _match(pattern: str, file: Path) -> str:
    try:
        found = re.search(pattern, file.read_text(errors="replace"), re.MULTILINE)
    except OSError:
        return ""
    return found[1] if found else ""


def _versions(python: str | None, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the versions of a Python and its packages; none if the Python is unknown or cannot say."""
    if python is None:
        return {}
    try:
        done = subprocess.run(
            [python, "-c", _PROBE, *_PACKAGES],
            env={**environment, "PYTHONSAFEPATH": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PROBE_SECONDS,
            check=True,
        )
        found: dict[str, str] = json.loads(done.stdout)
        return found
    except (OSError, ValueError, subprocess.SubprocessError):
        return {}
