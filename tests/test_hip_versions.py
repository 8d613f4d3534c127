"""Versions of AMD's runtime that lack functions: a mount does without them, or says in one line what is missing."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support.mounting import GPUFS
from support.processes import PATIENCE, run

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


def test_operations_of_a_version_that_cannot_call_the_host(tmp_path: Path) -> None:
    program = """
        import ctypes, errno, sys
        from gpufs import engine

        def refused(error, text, call):
            try:
                call()
            except engine.EngineError as said:
                assert said.errno == error and text in str(said), said
            else:
                raise AssertionError(text)

        with engine.Engine("hip") as gpu, engine.BackingFile.open(gpu, sys.argv[1]) as file, engine.Batch(gpu) as batch:
            stream, buffer = engine.Stream(gpu), engine.Buffer(gpu)
            refused(errno.EOPNOTSUPP, "hipLaunchHostFunc", lambda: file.read_async(buffer, 5, stream=stream))
            refused(errno.EOPNOTSUPP, "hipLaunchHostFunc", lambda: stream.call(print))
            refused(errno.EINVAL, "say which device", lambda: engine.Stream(gpu, stream.handle))
            refused(errno.EINVAL, "say which device", lambda: file.read_async(buffer, 5, stream=stream.handle))
            assert engine.Stream(gpu, stream.handle, device=1).device == 1
            size = ctypes.c_int64(7)
            assert file.read_async(buffer, size, 3).result(60) == 7 and buffer.read_bytes(0, 99) == b"3456789"
            batch.submit([engine.Operation("load", file, buffer, 2, 0, 7)])
            assert [result.bytes for result in batch.wait(timeout=200)] == [2]
            assert stream.outstanding == 0
            stream.synchronize()
    """
    source = tmp_path / "source"
    source.write_bytes(b"0123456789")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), source],
        env=over("rocm5"),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
