"""Files that begin elsewhere in their memory, so that what follows a header is aligned: their bytes stay the same."""

from __future__ import annotations

import hashlib
import mmap
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from errno import EBUSY
from pathlib import Path

import pytest
from support.attaching import Attacker, wait_for_leases
from support.cli import gpufs as command
from support.data import KIB, MIB, noise
from support.linux import FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE, fallocate
from support.mounting import GpufsMount, Mounter
from support.processes import PATIENCE, wait_until
from support.surviving import mounted

import gpufs
from gpufs import protocol
from gpufs.syscalls import close_all

pytestmark = pytest.mark.driver

SIZES = (1, 5000, 64 * KIB, 2 * MIB - 100, 2 * MIB, 5 * MIB + 12345)


@pytest.fixture
def file(shared_mount: GpufsMount) -> Iterator[Path]:
    path = shared_mount.device / "placed"
    yield path
    wait_for_leases(shared_mount, 0)
    path.unlink(missing_ok=True)


def placement_of(path: Path, wanted: int) -> int:
    with gpufs.attach(path, placement=wanted) as array:
        assert array.tobytes() == path.read_bytes()
        return array.address % 256


def _copied(path: Path, content: bytes, source: Path) -> None:
    command("cp", source, path)


def _by_cp(path: Path, content: bytes, source: Path) -> None:
    subprocess.run(["cp", source, path], check=True)


def _in_parts(path: Path, content: bytes, source: Path) -> None:
    parts = [*range(0, len(content), 300_000)]
    random.Random(1).shuffle(parts)
    with path.open("wb") as file:
        for part in parts:
            os.pwrite(file.fileno(), content[part : part + 300_000], part)


def _by_a_mapping(path: Path, content: bytes, source: Path) -> None:
    with path.open("w+b") as file:
        os.truncate(file.fileno(), len(content))
        with mmap.mmap(file.fileno(), len(content)) as mapped:
            mapped[:] = content


def _by_a_program(path: Path, content: bytes, source: Path) -> None:
    path.write_bytes(bytes(len(content)))
    with gpufs.attach(path, "r+", placement=136) as array:
        import numpy

        numpy.asarray(array)[:] = numpy.frombuffer(content, numpy.uint8)


@pytest.mark.parametrize("way", [_copied, _by_cp, _in_parts, _by_a_mapping, _by_a_program])
def test_a_file_moves_however_it_came(
    way: Callable[[Path, bytes, Path], None], file: Path, host: Path, driver: str
) -> None:
    if driver != "host" and way is _by_a_program:
        pytest.skip("writes to attached memory with the CPU")
    for size in SIZES:
        content = noise(size)
        (host / "source").write_bytes(content)
        way(file, content, host / "source")
        for placement in (248, 8, 0, 131):
            assert placement_of(file, placement) == placement
        assert file.stat().st_size == size
        file.unlink()


def test_a_placed_file_is_a_file_as_any_other(file: Path, host: Path) -> None:
    """Each operation does to it what it does to a file of the host."""
    twin = host / "twin"
    for path in (file, twin):
        path.write_bytes(noise(5 * MIB))
    assert placement_of(file, 72) == 72
    operations: list[Callable[[int], object]] = [
        lambda fd: os.pwrite(fd, noise(3 * MIB), 4 * MIB - 100),
        lambda fd: fallocate(fd, FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE, MIB, 3 * MIB),
        lambda fd: os.pwrite(fd, b"in the hole", 2 * MIB - 5),
        lambda fd: os.truncate(fd, 6 * MIB - 70),
        lambda fd: os.truncate(fd, 9 * MIB),
        lambda fd: fallocate(fd, FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE, 0, 2 * MIB + 1),
        lambda fd: fallocate(fd, 0, 0, 10 * MIB),
        lambda fd: os.truncate(fd, 0),
        lambda fd: os.pwrite(fd, b"again", 10),
    ]
    for operation in operations:
        for path in (file, twin):
            with path.open("r+b") as opened:
                operation(opened.fileno())
        assert file.read_bytes() == twin.read_bytes()
        assert placement_of_copy(file, host) == hashlib.sha256(twin.read_bytes()).hexdigest()
    with file.open("rb") as opened:
        assert os.lseek(opened.fileno(), 0, os.SEEK_DATA) == 0


def placement_of_copy(file: Path, host: Path) -> str:
    """The digest of a copy within the device, by the daemon."""
    other = file.with_name("other")
    command("cp", file, other)
    try:
        return hashlib.sha256(other.read_bytes()).hexdigest()
    finally:
        other.unlink()


def test_a_copy_within_the_device_is_placed_as_its_source(file: Path) -> None:
    file.write_bytes(noise(5 * MIB))
    other = file.with_name("other")
    with gpufs.attach(file, placement=40):
        with file.open("rb") as source, other.open("wb") as target:
            assert os.copy_file_range(source.fileno(), target.fileno(), 5 * MIB) == 5 * MIB
        with gpufs.attach(other) as array:
            assert array.address % 256 == 40
            assert array.tobytes() == noise(5 * MIB)
    other.unlink()


@pytest.mark.complains
def test_memory_in_use_does_not_move(file: Path) -> None:
    file.write_bytes(noise(5 * MIB))
    with gpufs.attach(file, "r+", placement=16) as first:
        assert placement_of(file, 32) == 16
        assert first.tobytes() == noise(5 * MIB)
        with file.open("ab") as growing:
            growing.write(noise(4 * MIB))
        first.refresh()
        assert (first.address % 256, first.nbytes) == (16, 9 * MIB)
        assert first.tobytes() == file.read_bytes()
        with pytest.raises(OSError) as refused:
            os.truncate(file, MIB)
        assert refused.value.errno == EBUSY
    assert placement_of(file, 32) == 32


def test_who_may_only_read_moves_a_file_once(file: Path, shared_mount: GpufsMount, driver: str) -> None:
    """Each move makes all others wait."""
    file.write_bytes(noise(5 * MIB))
    with Attacker((shared_mount.path / ".gpufs" / "socket").read_text().strip()) as client:
        client.greet()
        found = []
        for number, (flags, wanted) in enumerate(((os.O_RDONLY, 8), (os.O_RDONLY, 16), (os.O_RDWR, 24)), 1):
            fd = os.open(file, flags)
            answer, received = client.ask(protocol.Attach(number, "r", wanted), [fd])
            close_all([fd, *received])
            found.append((answer["private"], answer["placement"]))
            client.ask(protocol.Detach(number, number))
    reader = (driver != "host", 8)
    second = (True, 16) if reader[0] else (False, 8)  # a private copy is the reader's own
    assert found == [reader, second, (False, 24)]


@pytest.mark.parametrize("wrong", [-8, 256, 3.5, "8"])
def test_other_numbers_are_no_placements(wrong: int, file: Path) -> None:
    file.write_bytes(b"content")
    with pytest.raises(ValueError, match="256"):
        gpufs.attach(file, placement=wrong)


def test_a_full_device_keeps_a_file_where_it_is(mount: Mounter) -> None:
    """A move needs at most one granule more; without it the file is used as it lies."""
    made = mount(devices=1, memory="16M")
    file = made.device / "file"
    file.write_bytes(noise(4 * MIB))
    for name, size in (("most", 10 * MIB), ("rest", 2 * MIB)):
        with (made.device / name).open("wb") as other:
            fallocate(other.fileno(), 0, 0, size)
    assert placement_of(file, 8) == 0
    (made.device / "rest").unlink()
    wait_until(lambda: os.statvfs(made.device).f_bavail > 0, PATIENCE, "a free granule")
    assert placement_of(file, 8) == 8
    assert os.statvfs(made.device).f_bavail == 0
    assert placement_of(file, 16) == 16  # its last granule has space for the move


def test_readers_and_writers_never_see_a_move(file: Path) -> None:
    size = 24 * MIB
    content = bytearray(noise(size))
    file.write_bytes(content)
    stop = threading.Event()
    failures: list[str] = []

    def use(number: int) -> None:
        chooser = random.Random(number)
        own = range(number * size // 3, (number + 1) * size // 3 - 100_000)  # nobody else writes there
        with file.open("r+b", buffering=0) as opened, mmap.mmap(opened.fileno(), size) as mapped:
            while not stop.is_set():
                start = chooser.choice(own)
                data = chooser.randbytes(chooser.randrange(1, 100_000))
                if chooser.random() < 0.3:
                    mapped[start : start + len(data)] = data
                else:
                    os.pwrite(opened.fileno(), data, start)
                content[start : start + len(data)] = data
                start = chooser.choice(own)
                if os.pread(opened.fileno(), 100_000, start) != content[start : start + 100_000]:
                    failures.append(f"other bytes at {start}")
                    return

    users = [threading.Thread(target=use, args=(number,)) for number in range(3)]
    for user in users:
        user.start()
    moved = 0
    try:
        deadline = time.monotonic() + 1.5
        while time.monotonic() < deadline or moved < 10:
            with gpufs.attach(file, placement=random.randrange(256)) as array:
                moved += array.address % 256 != 0
    finally:
        stop.set()
        for user in users:
            user.join()
    assert not failures
    assert file.read_bytes() == content


_MOVER = """
import sys, gpufs
while True:
    for placement in (8, 248, 0, 128):
        try:
            gpufs.attach(sys.argv[1], placement=placement).close()
        except OSError as error:
            print(error, file=sys.stderr)
"""


def test_a_daemon_that_dies_while_it_moves_a_file_loses_nothing(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    kills = 50 if request.config.getoption("--slow") else 2
    content = noise(60 * MIB + 123)
    chooser = random.Random(7)
    with mounted(tmp_path / "mount") as mount:
        file = mount.device / "file"
        file.write_bytes(content)
        free = os.statvfs(mount.device).f_bavail
        with subprocess.Popen([sys.executable, "-c", _MOVER, str(file)]) as mover:
            try:
                for _ in range(kills):
                    time.sleep(0.2 + chooser.random() / 2)
                    mount.kill(signal.SIGKILL)
                    assert file.read_bytes() == content
            finally:
                mover.kill()
        wait_until(lambda: os.statvfs(mount.device).f_bavail == free, PATIENCE, "all memory of the moves is free")
        assert file.stat().st_blocks * 512 < len(content) + 4 * MIB
