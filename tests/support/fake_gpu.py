"""Mounts over the native tests' fake libraries of CUDA, with planned failures of its calls, and of HIP."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from support.mounting import REPOSITORY

_LIBRARY = REPOSITORY / "build/cmake/native/tests/fake_cuda/libgpufs_fake_cuda.so"
OUT_OF_MEMORY, ILLEGAL_ADDRESS = 2, 700
ALWAYS = 1 << 30


def plan(symbol: str, n: int, code: int, times: int = 1) -> str:
    """The n-th call of a function and `times` - 1 after it fail with a CUresult."""
    return f"{symbol}:{n}:{code}:{times}"


def environment(folder: Path, *plans: str, devices: int = 1) -> dict[str, str]:
    """The environment of a mount with --driver cuda; `folder` gets the library under the vendor's name."""
    if not _LIBRARY.exists():
        pytest.skip("the native tests are not built")
    library = folder / "libcuda.so.1"
    if not library.exists():
        shutil.copy(_LIBRARY, library)
    return {
        "LD_LIBRARY_PATH": str(folder),
        "FAKE_CUDA_DEVICES": str(devices),
        "FAKE_CUDA_FAULTS": ",".join(plans),
    }


def hip(version: str = "rocm7", **more: str) -> dict[str, str]:
    """The environment of a mount with --driver hip: AMD's runtime of that version, and variables for the fake."""
    folder = REPOSITORY / "build/cmake/native/tests/fake_hip" / version
    if not folder.is_dir():
        pytest.skip("the native tests are not built")
    return {"LD_LIBRARY_PATH": str(folder), **more}
