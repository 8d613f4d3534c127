"""A daemon that once had many files is as small again when they are gone."""

import os
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.mounting import GpufsMount
from support.processes import run, wait_until

from gpufs.daemon.heap import Shrinking

FILES = 9600


@pytest.mark.parametrize(
    ("gone", "due"),
    [
        ([7, 7, 7], [False, False, False]),
        ([7, 1006, 1006, 1006], [False, False, False, False]),  # too few
        ([7, 1007, 1007, 1007], [False, False, True, False]),  # once, when no more are going
        ([7, 5000, 9000, 9500, 9500], [False, False, False, True, False]),
        ([0, 600, 1200, 1800, 2400], [False, False, True, False, True]),  # some always go
    ],
)
def test_memory_is_given_back_once_many_files_have_gone(gone: list[int], due: list[bool]) -> None:
    now = iter([gone[0], *gone])
    spare = Shrinking(lambda: next(now))
    assert [spare.due() for _ in gone] == due


def anonymous_bytes(pid: int) -> int:
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


def test_free_memory_between_used_is_given_back() -> None:
    program = """
import ctypes, sys
from pathlib import Path
from gpufs.daemon.heap import release

def mebibytes():
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) >> 10

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
blocks = [libc.malloc(4000) for _ in range(20_000)]
for block in blocks:
    ctypes.memset(block, 1, 4000)
for number, block in enumerate(blocks):
    if number % 100:
        libc.free(ctypes.c_void_p(block))
kept = mebibytes()
release()
print(kept, mebibytes())
"""
    kept, left = map(int, run(sys.executable, "-c", program).stdout.split())
    assert kept > 70, "what malloc does not return by itself"
    assert left < kept - 50


def test_daemon_shrinks_when_its_files_have_gone(mount: Callable[..., GpufsMount]) -> None:
    mounted = mount()
    folders = [mounted.device / f"many{number}" for number in range(8)]

    def make(folder: Path) -> None:
        folder.mkdir()
        for number in range(FILES // len(folders)):
            os.close(os.open(folder / str(number), os.O_CREAT | os.O_WRONLY))

    before = anonymous_bytes(mounted.pid)
    with ThreadPoolExecutor(len(folders)) as threads:
        list(threads.map(make, folders))
        full = anonymous_bytes(mounted.pid)
        assert full > before + FILES * 256, "what comes back is what files take"
        list(threads.map(shutil.rmtree, folders))
    most = full  # removing takes memory too, at first

    def given_back() -> bool:
        nonlocal most
        now = anonymous_bytes(mounted.pid)
        most = max(most, now)
        return now <= most - (most - before) // 5

    wait_until(given_back, 30, f"the daemon to give back a part of what it has grown, of {before} to {full} bytes")
