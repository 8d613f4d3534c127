"""Runs a campaign on its own mount and checks that the daemon leaks nothing.

After a campaign its files are removed, and the daemon must hold what it held before: descriptors, threads, inodes, open
files and device memory exactly, its own memory up to what the allocators keep. Both measurements follow the same
warm-up, so that threads started on demand do not count as leaks.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from support.data import GIB, MIB
from support.mounting import GpufsMount, Session
from support.processes import Snapshot, run, wait_until

# Memory that the interpreter and malloc may keep. A tree of 50,000 files takes more.
RESIDENT_SLACK = 48 * MIB
SETTLE_SECONDS = 30.0


class Missing(Exception):
    """A program that the campaign needs is not installed, or this machine does not allow what it does."""


@dataclass(frozen=True)
class Place:
    """Where a campaign works: ``root`` on the mount, ``host`` on tmpfs, both empty; ``quick``: about ten seconds."""

    root: Path
    host: Path
    quick: bool


Campaign = Callable[[Place], str]


def need(*programs: str) -> None:
    """Missing unless all of these programs are installed."""
    for program in programs:
        if shutil.which(program) is None:
            raise Missing(f"{program} is not installed")


@dataclass(frozen=True)
class Held:
    """What a daemon holds."""

    descriptors: int
    threads: int
    inodes: int
    open_files: int
    device_bytes: int
    anonymous_bytes: int

    @classmethod
    def of(cls, mount: GpufsMount) -> Held:
        status = mount.status()
        process = Snapshot.of(mount.pid)
        gauges = mount.stats()["gauges"]
        return cls(
            descriptors=process.descriptors,
            threads=process.threads,
            inodes=gauges["inodes"],
            open_files=gauges["open_files"],
            device_bytes=sum(device["total_bytes"] - device["free_bytes"] for device in status["devices"]),
            anonymous_bytes=_anonymous_bytes(mount.pid),
        )

    def lost_since(self, before: Held) -> dict[str, tuple[int, int]]:
        """What is held now and was not before: name -> (before, now)."""
        lost = {}
        for name in ("descriptors", "threads", "inodes", "open_files", "device_bytes"):
            old, new = getattr(before, name), getattr(self, name)
            if new > old:
                lost[name] = (old, new)
        if self.anonymous_bytes > before.anonymous_bytes + RESIDENT_SLACK:
            lost["anonymous_bytes"] = (before.anonymous_bytes, self.anonymous_bytes)
        return lost

    def __str__(self) -> str:
        return (
            f"{self.descriptors} descriptors, {self.threads} threads, {self.inodes} inodes, "
            f"{self.device_bytes >> 20} MiB of the device, {self.anonymous_bytes >> 20} MiB of its own"
        )


def _anonymous_bytes(pid: int) -> int:
    """Resident memory of the process itself; the host driver's devices are shared memory and not counted."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


def _warm(root: Path) -> None:
    """Every kind of operation from many threads at once, until the daemon has started what it starts on demand."""

    def work(number: int) -> None:
        path = root / f"warm{number}"
        for _ in range(20):
            with open(path, "w+b", buffering=0) as file, open(f"{path}-copy", "wb", buffering=0) as copy:
                file.write(bytes(3 * MIB))
                os.posix_fallocate(file.fileno(), 0, 4 * MIB)
                os.copy_file_range(file.fileno(), copy.fileno(), 4 * MIB, 0, 0)
                os.pread(file.fileno(), 2 * MIB, 0)
            os.listdir(root)
        Path(f"{path}-small").write_bytes(b"in a slab, of which the daemon keeps one")
        os.unlink(f"{path}-small")
        os.unlink(path)
        os.unlink(f"{path}-copy")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _forget_names() -> None:
    """Makes the kernel drop the inodes that nobody uses, which otherwise waits until memory is short."""
    os.sync()
    if os.geteuid() == 0:
        Path("/proc/sys/vm/drop_caches").write_text("2\n")


def run_campaign(session: Session, name: str, campaign: Campaign, *, quick: bool) -> bool:
    """Runs one campaign on a mount of its own and prints its line. True unless something is wrong."""
    begin = time.monotonic()
    host = Path(tempfile.mkdtemp(prefix=f"gpufs-campaign-{name}-", dir="/dev/shm"))
    try:
        shared = os.geteuid() == 0
        with GpufsMount(session, "--host-memory", "64M", memory=_memory(), allow_other=shared) as mount:
            root = mount.device / name
            root.mkdir()
            _warm(root)
            before = _settled(mount, lambda held: held.device_bytes == 0 and held.open_files == 0)
            detail = campaign(Place(root, host, quick))
            for entry in os.scandir(root):
                run("rm", "-rf", entry.path, timeout=600)
            # The log says that it left out a user's lines: not a complaint.
            complaints = [one for one in mount.complaints() if "gpufs.daemon.logs" not in one]
            if complaints:
                raise AssertionError("the daemon logged:\n" + "\n".join(complaints[:20]))
            after = _settled(mount, lambda held: not held.lost_since(before))
        lost = after.lost_since(before)
        if lost:
            raise AssertionError(f"the daemon holds more than before: {lost}")
    except Missing as reason:
        print(f"campaign {name}: skipped: {reason}", flush=True)
        return True
    except (AssertionError, OSError, subprocess.SubprocessError) as error:
        notes = "\n".join(getattr(error, "__notes__", []))
        print(f"campaign {name}: FAILED after {time.monotonic() - begin:.0f} s: {error}\n{notes}", flush=True)
        return False
    finally:
        shutil.rmtree(host, ignore_errors=True)
    seconds = time.monotonic() - begin
    print(f"campaign {name}: good in {seconds:.0f} s: {detail}\n  before: {before}\n  after:  {after}", flush=True)
    return True


def _settled(mount: GpufsMount, settled: Callable[[Held], bool]) -> Held:
    """What the daemon holds once freed memory has been returned, or after a time-out."""

    def is_settled() -> bool:
        _forget_names()
        return settled(Held.of(mount))

    try:
        wait_until(is_settled, SETTLE_SECONDS, "the daemon to settle")
    except AssertionError:
        pass  # the caller names what it still holds
    return Held.of(mount)


def _memory() -> int:
    """Bytes of the simulated device: a third of what the machine has free, 6 GiB at most."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    spare = int(fields["MemAvailable"].split()[0]) * 1024
    return max(GIB, min(6 * GIB, spare // 3)) // (2 * MIB) * 2 * MIB
