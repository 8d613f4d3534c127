"""A stalled disk or a full device holds up only the calls that need it."""

import errno
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest
from support.copying import opened
from support.data import noise
from support.linux import fallocate
from support.mounting import GpufsMount, Mounter
from support.processes import run, wait_until

MIB = 1 << 20
PATIENCE = 60
COPIES = 12
STALLED = 8  # of these, as many as the mount has threads for
BOTH = os.O_RDWR | os.O_CREAT

needs_a_disk = pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, ("mkfs.ext4", "losetup", "fsfreeze"))),
    reason="makes a file system in a loop device",
)


class Background:
    """A call on a thread of its own."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.failure: OSError | None = None
        self._call = call
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._call()
        except OSError as error:
            self.failure = error

    def over(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, what: str) -> None:
        self._thread.join(PATIENCE)
        assert self.over(), f"{what}: no answer"
        if self.failure is not None:
            raise self.failure


@contextmanager
def disk(folder: Path) -> Iterator[Path]:
    image, place = folder / "image", folder / "disk"
    place.mkdir()
    with open(image, "wb") as file:
        file.truncate(128 * MIB)
    run("mkfs.ext4", "-q", image)
    mounted = run("mount", "-o", "loop", image, place, check=False)
    if mounted.returncode:
        pytest.skip(f"no loop devices: {mounted.stderr.strip()}")
    try:
        yield place
    finally:
        wait_until(lambda: run("umount", place, check=False).returncode == 0, PATIENCE, "the disk is not used")


@contextmanager
def frozen(place: Path) -> Iterator[None]:
    """Freezes the file system. It thaws also if this process is killed, or after five minutes."""
    script = 'fsfreeze -f "$0" && echo frozen; read -t 300; fsfreeze -u "$0"'
    with subprocess.Popen(
        ["bash", "-c", script, str(place)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as keeper:
        assert keeper.stdin is not None
        assert keeper.stdout is not None
        try:
            assert keeper.stdout.readline() == b"frozen\n"
            yield
        finally:
            keeper.stdin.close()
            keeper.wait(PATIENCE)


def blocked_threads(pid: int) -> int:
    """Threads in an uninterruptible sleep."""
    states = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            states.append((task / "stat").read_text().rpartition(")")[2].split()[0])
        except (FileNotFoundError, ProcessLookupError):
            continue
    return states.count("D")


def use(file: Path) -> None:
    """Calls that must not wait for the disk."""
    assert file.stat().st_size == 0
    with opened(file, os.O_RDWR) as fd:
        fallocate(fd, 0, 0, 3 * MIB)
        assert os.pwrite(fd, b"written", 5 * MIB) == 7
        assert os.pread(fd, 10, 5 * MIB) == b"written"
        os.ftruncate(fd, 8 * MIB)
        os.ftruncate(fd, 1000)
        os.ftruncate(fd, 0)


@needs_a_disk
@pytest.mark.parametrize("size", [100_000, 3 * MIB])
def test_a_stalled_disk_holds_up_only_what_needs_it(mount: Mounter, tmp_path: Path, size: int) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "source").write_bytes(noise(4 * MIB))
    with ExitStack() as stack:
        place = stack.enter_context(disk(tmp_path))
        options = ("--attribute-timeout", "0", "--io-workers", str(STALLED))
        backing = ("--backing", f"disk={place}", "--backing", f"other={other}")
        one: GpufsMount = stack.enter_context(mount(*options, *backing, devices=2))
        first, second = one.path / "gpu0", one.path / "gpu1"
        sources, targets = [], []
        for number in range(COPIES):
            (first / f"source{number}").write_bytes(noise(size, number))
            sources.append(stack.enter_context(opened(first / f"source{number}", os.O_RDWR)))
            targets.append(stack.enter_context(opened(one.path / "backing/disk" / str(number), BOTH)))
        for file in (first / "idle", second / "idle", second / "loaded"):
            file.touch()
        load_from = stack.enter_context(opened(one.path / "backing/other/source"))
        load_to = stack.enter_context(opened(second / "loaded", os.O_RDWR))

        with frozen(place):
            copies = [
                Background(partial(os.copy_file_range, source, target, size, 0, 0))
                for source, target in zip(sources, targets, strict=True)
            ]
            wait_until(lambda: blocked_threads(one.pid) >= STALLED, PATIENCE, "the copies to stall")
            emptied = [Background(partial(os.ftruncate, source, 0)) for source in sources]
            time.sleep(0.5)  # until the mount has the requests, which nothing else shows

            Background(lambda: use(second / "idle")).wait("another device")
            Background(lambda: use(first / "idle")).wait("another file of the device")
            Background(lambda: (one.path / ".gpufs/status").read_text()).wait("the status")
            Background(lambda: os.copy_file_range(load_from, load_to, 4 * MIB, 0, 0)).wait("a copy from another disk")
            Background(lambda: (one.path / "backing/other/source").read_bytes()).wait("a file of another disk")
            assert blocked_threads(one.pid) >= STALLED, "the disk is not frozen"
        for call in (*copies, *emptied):
            call.wait("after the thaw")
        assert (second / "loaded").read_bytes() == noise(4 * MIB)
        assert all(os.fstat(source).st_size == 0 for source in sources)
        assert not one.complaints()


def fill(fd: int) -> None:
    """Allocates all memory of the file's device."""
    step = 2 * MIB
    for offset in range(0, 1 << 40, step):
        try:
            fallocate(fd, 0, offset, step)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            return


def test_writers_that_wait_for_memory_hold_up_no_others(mount: Mounter) -> None:
    with mount(devices=2, memory=32 * MIB) as one:
        first, second = one.path / "gpu0", one.path / "gpu1"
        with ExitStack() as stack:
            writers = [stack.enter_context(opened(first / f"new{number}", BOTH)) for number in range(12)]
            busy = stack.enter_context(opened(second / "file", BOTH))

            def waits() -> int:
                status = json.loads((one.path / ".gpufs/status").read_text())
                return int(status["statistics"]["workers"]["space_waits"])

            def waits_more(before: int) -> bool:
                return waits() >= before + 4

            # A writer waits for some seconds at most: on a busy machine they may be over too soon.
            for _ in range(5):
                before = waits()
                old = first / "old"
                with opened(old, BOTH) as fd:
                    fill(fd)
                with opened(old, os.O_PATH):  # so that its memory is free soon, but not yet
                    old.unlink()
                    waiting = [Background(partial(os.pwrite, fd, noise(MIB), 0)) for fd in writers]
                    wait_until(partial(waits_more, before), PATIENCE, "writers that wait")
                    fallocate(busy, 0, 0, 8 * MIB)
                    os.ftruncate(busy, 8 * MIB)
                    os.ftruncate(busy, 0)
                    in_time = not any(call.over() for call in waiting)
                for call in waiting:
                    try:
                        call.wait("a writer")
                    except OSError as error:
                        if error.errno != errno.ENOSPC:
                            raise
                if in_time:
                    break
            assert in_time, "no fallocate was done while others waited"
            assert all(call.failure is None for call in waiting)
            for fd in writers:
                assert os.pread(fd, MIB, 0) == noise(MIB)
