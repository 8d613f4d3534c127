"""Old versions of AMD's runtime: a mount works without optional functions, and names required ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.mounting import GPUFS
from support.processes import run

REPOSITORY = Path(__file__).parent.parent
FAKES = REPOSITORY / "build/cmake/native/tests/fake_hip"


def over(version: str) -> dict[str, str]:
    """An environment in which the fake library of that version is found."""
    if not (FAKES / version).is_dir():
        pytest.skip("the fake libraries are not built (scripts/build gpufs_tests)")
    found = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    return {**found, "LD_LIBRARY_PATH": str(FAKES / version), "FAKE_HIP_DEVICES": "2"}


def test_an_old_version_moves_every_byte(tmp_path: Path) -> None:
    """Without virtual memory management, copies between devices, or any fastpath."""
    mountpoint, source, back = tmp_path / "mnt", tmp_path / "source", tmp_path / "back"
    mountpoint.mkdir()
    source.write_bytes(os.urandom(1 << 20) * 9 + b"end")
    run(*GPUFS, "mount", mountpoint, "--driver", "hip", env=over("rocm5"))
    try:
        run(*GPUFS, "cp", source, mountpoint / "gpu0/a")
        run("cp", mountpoint / "gpu0/a", mountpoint / "gpu1/b")
        run(*GPUFS, "cp", mountpoint / "gpu1/b", back)
        run("cmp", source, back)
        run("cmp", source, mountpoint / "gpu0/a")
    finally:
        run(*GPUFS, "umount", mountpoint)


def test_what_is_required_is_named(tmp_path: Path) -> None:
    failed = run(*GPUFS, "mount", tmp_path, "--driver", "hip", env=over("rocm4"), check=False)
    assert failed.returncode == 1
    missing = "libamdhip64.so.5 lacks hipHostRegister"
    assert failed.stderr == f"gpufs: hip is not available: {missing}; gpufs doctor says what to do\n"
    assert not os.path.ismount(tmp_path)
    said = run(*GPUFS, "doctor", env=over("rocm4"), check=False).stdout
    assert f"{missing}\n          -> install a newer version" in said
