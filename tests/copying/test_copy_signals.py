"""Copies that take long, by cp from and to backing/ and by `gpufs cp`: signals end them within a second."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.data import MIB, noise
from support.hanging import HangingMount
from support.mounting import GPUFS, GpufsMount, Session
from support.processes import PATIENCE, Snapshot, run, wait_until

pytestmark = [pytest.mark.driver, pytest.mark.skipif(os.geteuid() != 0, reason="mounts a server")]

BLOCK = 8 * MIB
BUFFER = 32 * BLOCK  # to the disk in small pieces: half a second or more
LONG = BUFFER + 256 * MIB  # from the server, which takes twenty seconds for it; fits beside the buffer
# One thread and small pieces, past the cache.
SLOW = {"GPUFS_IO_WORKERS": "1", "GPUFS_IO_CHUNK_BYTES": "64K", "GPUFS_IO_FASTPATH": "off"}
PROGRAMS = ("cp", "gpufs cp")


@dataclass(frozen=True)
class World:
    """A mount that copies slowly: a full buffer, a slow server, and a directory on a disk."""

    mount: GpufsMount
    server: Path
    disk: Path
    descriptors: int  # of the daemon before all tests

    @property
    def buffer(self) -> Path:
        return self.mount.device / "buffer"

    def command(self, program: str, source: Path, target: Path) -> list[str]:
        """`cp` is given the host's files below backing/, `gpufs cp` as they are."""
        if program == "gpufs cp":
            return [*GPUFS, "cp", "--partial", str(source), str(target)]
        shown = self.mount.path / "backing"
        words = ["cp"]
        for path in (source, target):
            for name, there in (("server", self.server), ("disk", self.disk)):
                if path.is_relative_to(there):
                    path = shown / name / path.relative_to(there)
            words.append(str(path))
        return words

    def status(self) -> dict[str, Any]:
        return self.mount.status()

    def moving(self) -> bool:
        return self.mount.gauge("transfers_active") > 0

    def at_rest(self) -> bool:
        """Nothing moves, and of what was cancelled the destinations have got their sizes."""
        return not self.moving() and not self.status()["transfers"]["running"]

    def held(self) -> int:
        return int(self.status()["devices"][0]["held_bytes"])


@pytest.fixture(scope="module")
def world(session: Session, driver: str) -> Iterator[World]:
    disk = Path(tempfile.mkdtemp(prefix="gpufs-client-", dir="/var/tmp"))
    try:
        with HangingMount(size=LONG, good=LONG, operations=(), delay=0.005) as server:
            words = ["--backing", f"server={server.path}", "--backing", f"disk={disk}"]
            with GpufsMount(session, *words, driver=driver, memory=3 * BUFFER, environment=SLOW) as mount:
                with open(mount.device / "buffer", "wb", buffering=0) as buffer:
                    for _ in range(BUFFER // BLOCK):
                        buffer.write(noise(BLOCK))
                yield World(mount, server.path, disk, Snapshot.of(mount.pid).descriptors)
                # A slow server's thread may be left behind, where its read takes longer than a cancellation waits; and
                # the log may count how often that was said.
                expected = ("was left behind by threads", "the line before came")
                assert not [line for line in mount.complaints() if not any(text in line for text in expected)]
    finally:
        shutil.rmtree(disk)


@pytest.fixture
def calm(world: World) -> Iterator[World]:
    """Everything that the copy held is released, and the mount goes on."""
    empty = world.held()
    yield world
    wait_until(world.at_rest, 10, "the end of the copy")
    for path in (world.mount.device / "copy", world.mount.path / "backing" / "disk" / "copy"):
        path.unlink(missing_ok=True)
    wait_until(lambda: world.held() <= empty, 10, "the memory of the copy")
    # A few for names that the kernel still knows, and for what the first use made; no more with every test.
    wait_until(lambda: Snapshot.of(world.mount.pid).descriptors <= world.descriptors + 8, 10, "closed descriptors")
    assert world.mount.gauge("bounce_used_bytes") == 0
    assert world.mount.count("replies_missing") == 0
    (world.disk / "small").write_bytes(noise(MIB))
    run(*world.command("cp", world.disk / "small", world.mount.device / "small"))
    assert (world.mount.device / "small").read_bytes() == noise(MIB)
    (world.mount.device / "small").unlink()


def started(world: World, command: list[str]) -> subprocess.Popen[str]:
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: world.moving() or child.poll() is not None, 20, "the start of the copy")
    time.sleep(0.2)
    return child


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda x: x.name)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_signal_ends_a_copy(calm: World, program: str, number: signal.Signals) -> None:
    target = calm.mount.device / "copy"
    child = started(calm, calm.command(program, calm.server / "file", target))
    child.send_signal(number)
    _, errors = child.communicate(timeout=PATIENCE)
    assert child.returncode == -number, errors
    # The daemon may still be about to notice that its client is dead.
    wait_until(calm.at_rest, 10, "the end of the copy")
    size = target.stat().st_size
    assert size < LONG
    assert target.read_bytes() == bytes(size)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_stopped_copy_continues(calm: World, program: str) -> None:
    """SIGSTOP interrupts the waiting in the kernel, as any signal does, but no data is lost."""
    target = calm.disk / "copy"
    child = started(calm, calm.command(program, calm.buffer, target))
    for _ in range(2):
        child.send_signal(signal.SIGSTOP)
        if program == "cp":  # what the daemon copies for the other goes on
            wait_until(lambda: not calm.moving(), 10, "the end of the request")
        time.sleep(0.1)
        child.send_signal(signal.SIGCONT)
        time.sleep(0.1)
    _, errors = child.communicate(timeout=PATIENCE)
    assert child.returncode == 0, errors
    block = noise(BLOCK)
    assert target.stat().st_size == BUFFER
    with open(target, "rb", buffering=0) as file:
        for offset in range(0, BUFFER, BLOCK):
            assert file.read(BLOCK) == block, f"from {offset} on"
