"""Programs that go through a mapping: a root mount's daemon reads ahead of them, and nobody else notices."""

from __future__ import annotations

import mmap
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.data import MIB, assert_same, noise, read_all
from support.mounting import GpufsMount, Mounter
from support.processes import wait_until

SIZE = 80 * MIB + 12345
# Goes through a mapping of sys.argv[1] up to a share of it, again and again if asked to.
SCAN = """
import mmap, os, sys
file = os.open(sys.argv[1], os.O_RDONLY)
size = os.fstat(file).st_size
while True:
    with mmap.mmap(file, size, prot=mmap.PROT_READ) as area:
        for at in range(0, int(size * float(sys.argv[2])), mmap.PAGESIZE):
            area[at]
    if len(sys.argv) < 4:
        break
    print("passed", flush=True)
"""


def scan_command(path: Path, share: float, *more: str) -> list[str]:
    return [sys.executable, "-S", "-c", SCAN, str(path), str(share), *more]


@contextmanager
def mapped(path: Path) -> Iterator[mmap.mmap]:
    with open(path, "rb") as stream, mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ) as area:
        yield area


def scanned(area: mmap.mmap) -> bytes:
    """All of it, from front to back; a single large copy may go backwards."""
    return b"".join(area[at : at + MIB] for at in range(0, len(area), MIB))


def read_ahead(mounted: GpufsMount) -> int:
    return mounted.count("read_ahead_bytes")


def test_a_scan_is_read_ahead_and_random_places_are_not(mount: Mounter) -> None:
    mounted = mount()
    content, path = noise(SIZE, 1), mounted.device / "file"
    path.write_bytes(content)
    places = [place * MIB for place in (0, 40, 10, 50, 20, 60, 30, 70)]
    with mapped(path) as area:
        for at in places:
            assert area[at] == content[at]
    assert read_ahead(mounted) == 0
    with mapped(path) as area:
        assert_same(scanned(area), content)
    assert read_ahead(mounted) > SIZE // 2
    wait_until(lambda: mounted.gauge("open_files") == 0, 10, "all files to be closed")
    mounted.unmount()


@pytest.mark.slow
def test_the_knob_turns_it_off(mount: Mounter) -> None:
    mounted = mount("--read-ahead", "0")
    content, path = noise(SIZE, 2), mounted.device / "file"
    path.write_bytes(content)
    with mapped(path) as area:
        assert_same(scanned(area), content)
    assert read_ahead(mounted) == 0
    mounted.unmount()


@pytest.mark.slow
def test_what_is_written_beside_a_scan_stays(mount: Mounter) -> None:
    mounted = mount()
    path = mounted.device / "file"
    path.write_bytes(noise(SIZE, 1))
    done = threading.Event()

    def scan() -> None:
        while not done.is_set():
            subprocess.run(scan_command(path, 1), check=True)

    scanning = threading.Thread(target=scan)
    scanning.start()
    try:
        for number in range(2, 8):
            content = noise(SIZE, number)
            with open(path, "r+b", buffering=0) as stream:
                for at in range(0, SIZE, MIB):
                    stream.seek(at)
                    stream.write(content[at : at + MIB])
            assert_same(read_all(path), content)
            with mapped(path) as area:
                assert_same(scanned(area), content)
    finally:
        done.set()
        scanning.join()
    mounted.unmount()


def test_an_unmount_right_after_a_scan_ends_the_daemon(mount: Mounter) -> None:
    for share in (0.3, 0.6):
        mounted = mount()
        path = mounted.device / "file"
        path.write_bytes(noise(SIZE, 1))
        subprocess.run(scan_command(path, share), check=True)
        mounted.unmount(5)


@pytest.mark.complains
def test_a_daemon_that_is_killed_meanwhile_goes(mount: Mounter) -> None:
    mounted = mount()
    path = mounted.device / "file"
    path.write_bytes(noise(SIZE, 1))
    programs = [subprocess.Popen(scan_command(path, 1, "again"), stdout=subprocess.PIPE) for _ in range(2)]
    try:
        for program in programs:
            assert program.stdout is not None
            program.stdout.readline()
        mounted.signal(signal.SIGKILL)
        assert mounted.daemon.wait(30) == -signal.SIGKILL
        wait_until(lambda: not mounted.mounted(), 30, "the guard to take the mount away")
    finally:
        for program in programs:
            program.kill()
            program.communicate()
