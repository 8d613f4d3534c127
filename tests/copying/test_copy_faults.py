"""What goes wrong under a copy, as programs see it: cp from and to backing/, and `gpufs cp`.

The same faults at the engine's own interface, and more of them: native/tests/io_faults_test.cc.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support import fake_gpu
from support.data import KIB, MIB, assert_same, noise
from support.fake_gpu import ALWAYS, ILLEGAL_ADDRESS, OUT_OF_MEMORY
from support.hanging import HangingMount
from support.mounting import GPUFS, GpufsMount, Mounter
from support.processes import Snapshot, run, wait_until

PROGRAMS = ("cp", "gpufs cp")
SIZE = 8 * MIB + 777
CHUNK = 256 * KIB
ONE_THREAD = {"GPUFS_IO_WORKERS": "1", "GPUFS_IO_CHUNK_BYTES": "256K"}

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="backing directories of another user")


def copy(program: str, mount: GpufsMount, there: Path, name: str, source: str, target: str) -> Any:
    """Copies between a file of `there`, shown as backing/NAME, and a buffer, one of which is called "buffer"."""
    host = mount.path / "backing" / name if program == "cp" else there
    words = [str((mount.device if path == "buffer" else host) / path) for path in (source, target)]
    return run(*(["cp"] if program == "cp" else [*GPUFS, "cp", "--json", "--partial"]), *words, check=False)


def expect_failure(done: subprocess.CompletedProcess[str], program: str, error: int, target: Path, size: int) -> None:
    """The program says what was wrong, once, and the target has the bytes that were copied."""
    assert done.returncode == 1, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert target.stat().st_size == size, done.stderr
    if program == "cp":
        assert os.strerror(error) in done.stderr
    else:  # in the daemon's words, which say more
        (failure,) = json.loads(done.stdout)["errors"]
        assert (failure["errno"], failure["bytes_done"]) == (error, size)


def expect_nothing_left(mount: GpufsMount, before: Snapshot) -> None:
    wait_until(lambda: mount.gauge("transfers_active") == 0, 10, "the end of the copy")
    assert mount.gauge("bounce_used_bytes") == 0
    assert mount.count("replies_missing") == 0
    assert mount.status()["transfers"]["running"] == 0
    # The first copy makes threads of pools and a lane; names that the kernel knows have a descriptor each.
    wait_until(lambda: Snapshot.of(mount.pid).descriptors <= before.descriptors + 4, 10, "closed descriptors")


@root_only
@pytest.mark.driver
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_source_that_fails_in_the_middle_ends_the_copy(mount: Mounter, program: str) -> None:
    good = 5 * MIB + 384 * KIB  # in whole reads of the kernel's
    with HangingMount(size=16 * MIB, good=good, operations=(), failure=errno.EIO) as server:
        one = mount("--backing", f"server={server.path}", environment=ONE_THREAD)
        before = Snapshot.of(one.pid)
        for _ in range(3):
            done = copy(program, one, server.path, "server", "file", "buffer")
            expect_failure(done, program, errno.EIO, one.device / "buffer", good)
            assert (one.device / "buffer").read_bytes() == bytes(good)
        expect_nothing_left(one, before)
        (one.device / "buffer").unlink()
        wait_until(lambda: one.status()["devices"][0]["held_bytes"] == 0, 10, "the memory of the copy")
        one.unmount()


@root_only
@pytest.mark.complains
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_gpu_that_fails_in_the_middle_ends_the_copy(mount: Mounter, tmp_path: Path, host: Path, program: str) -> None:
    """Its context is lost: it shows in the status, and the other GPU works."""
    plan = fake_gpu.plan("cuMemcpyDtoHAsync_v2", 4, ILLEGAL_ADDRESS)
    environment = fake_gpu.environment(tmp_path, plan, devices=2) | ONE_THREAD
    one = mount("--backing", f"disk={host}", driver="cuda", environment=environment)
    (one.device / "buffer").write_bytes(noise(SIZE))
    before = Snapshot.of(one.pid)
    done = copy(program, one, host, "disk", "buffer", "file")
    copied = (host / "file").stat().st_size  # of several copies under way nobody knows which of them were done
    expect_failure(done, program, errno.EIO, host / "file", copied)
    assert copied <= 3 * CHUNK
    assert_same((host / "file").read_bytes(), noise(SIZE)[:copied])
    expect_nothing_left(one, before)
    assert "700" in one.status()["devices"][0]["health"]
    other = one.path / "gpu1" / "file"
    other.write_bytes(noise(MIB))
    assert other.read_bytes() == noise(MIB)
    (one.device / "buffer").unlink()
    one.unmount()


@root_only
@pytest.mark.complains
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_device_that_becomes_full_ends_the_copy(mount: Mounter, tmp_path: Path, host: Path, program: str) -> None:
    """The driver reports it in the middle of a copy. Once memory is free again, copies work."""
    plan = fake_gpu.plan("cuMemCreate", 2, OUT_OF_MEMORY, ALWAYS)
    one = mount("--backing", f"disk={host}", driver="cuda", environment=fake_gpu.environment(tmp_path, plan))
    (host / "file").write_bytes(noise(SIZE))
    before = Snapshot.of(one.pid)
    (one.device / "other").write_bytes(bytes(2 * MIB))
    done = copy(program, one, host, "disk", "file", "buffer")
    expect_failure(done, program, errno.ENOSPC, one.device / "buffer", (one.device / "buffer").stat().st_size)
    assert_same((one.device / "buffer").read_bytes(), noise(SIZE)[: (one.device / "buffer").stat().st_size])
    expect_nothing_left(one, before)
    for path in ("other", "buffer"):
        (one.device / path).unlink()
    wait_until(lambda: one.status()["devices"][0]["held_bytes"] == 0, 10, "the memory of both")
    one.unmount()
