"""The control plane's loops where memory runs out, and its threads."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pyfuse3
import pytest
from support.processes import PATIENCE

from gpufs import engine
from gpufs.daemon import loop, threads


async def test_a_worker_without_memory_waits(monkeypatch: pytest.MonkeyPatch, autojump_clock: object) -> None:
    """What pyfuse3 would end for, and the mount with it."""
    ran: list[tuple[object, ...]] = []

    async def worker(*arguments: object) -> None:
        ran.append(arguments)
        if len(ran) < 3:
            raise OSError(errno.ENOMEM, "fuse_session_receive_buf failed")

    async def main(**_: object) -> None:
        await getattr(pyfuse3, loop._WORKER)("nursery", 1, 99)

    monkeypatch.setattr(pyfuse3, loop._WORKER, worker)
    monkeypatch.setattr(pyfuse3, "main", main)
    await loop.serve()
    assert ran == [("nursery", 1, 99)] * 3


async def test_a_worker_that_fails_otherwise_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def worker() -> None:
        raise OSError(errno.EIO, "fuse_session_receive_buf failed")

    monkeypatch.setattr(pyfuse3, loop._WORKER, worker)
    monkeypatch.setattr(pyfuse3, "main", lambda **_: getattr(pyfuse3, loop._WORKER)())
    with pytest.raises(OSError, match="receive_buf") as caught:
        await loop.serve()
    assert caught.value.errno == errno.EIO


def test_pyfuse3_has_such_a_worker() -> None:
    """Of another version's there would be nothing to make patient."""
    assert callable(getattr(pyfuse3, loop._WORKER))


@pytest.mark.parametrize("failure", [MemoryError(), OSError(errno.ENOMEM, "no thread")])
async def test_what_the_mount_can_do_without_is_tried_again(failure: Exception, autojump_clock: object) -> None:
    left = [failure, failure]

    async def task(number: int) -> None:
        assert number == 7
        if left:
            raise left.pop()

    await loop.keep(task, 7)
    assert not left


async def test_a_thread_without_room_for_its_own_variables_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    monkeypatch.setattr(engine, "prepare_thread", lambda: False)
    with pytest.raises(OSError, match="no memory for a thread") as caught:
        await threads.run(lambda: ran.append(1))
    assert caught.value.errno == errno.ENOMEM
    assert not ran
    monkeypatch.undo()
    assert engine.prepare_thread()
    assert await threads.run(lambda: 5) == 5


# Takes all memory that there is, in blocks of the reserve's sizes, and works with it; then gives it back.
HUNGRY = """
import resource
from gpufs import engine
assert engine.set_memory_aside()
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used, resource.RLIM_INFINITY))
taken = []
try:
    for _ in range(1000):
        taken.append(bytearray(1 << 20))
except MemoryError:
    pass
ordinary = len(taken)
blocks = [bytes([number % 256]) * 65569 for number in range(30)]  # 64 KiB, as trio's loop takes to wake up
words = {str(number): [number] for number in range(3000)}
assert all(set(block) == {number % 256} for number, block in enumerate(blocks))
assert words["2999"] == [2999]
del blocks, words
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
again = [bytearray(1 << 20) for _ in range(20)]
try:
    engine.set_memory_aside()
except OSError as failure:
    print(ordinary, failure.errno)
"""


def test_an_interpreter_lives_of_what_was_set_aside() -> None:
    done = subprocess.run([sys.executable, "-c", HUNGRY], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    ordinary, again = map(int, done.stdout.split())
    assert ordinary < 1000
    assert again == errno.EBUSY


@pytest.mark.parametrize("options", [{"PYTHONMALLOC": "debug"}, {"PYTHONDEVMODE": "1"}])
def test_other_allocators_are_left_alone(options: dict[str, str]) -> None:
    script = "from gpufs import engine; raise SystemExit(engine.set_memory_aside())"
    done = subprocess.run([sys.executable, "-c", script], env=os.environ | options, timeout=PATIENCE, check=False)
    assert done.returncode == 0
