"""Kills the daemon of a mount at random moments, while programs work there that must notice nothing."""

from __future__ import annotations

import mmap
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import numpy

import gpufs as gpufs_client
from gpufs import status
from support.at_work import PROGRAMS, at_work
from support.cli import gpufs
from support.hanging import held
from support.processes import PATIENCE, children_of, wait_until
from support.surviving import Survivor, mounted


def _seconds_until_an_answer(mount: Survivor, keeper: int, since: float) -> float:
    """How long after ``since`` a new call is answered, without the keeper's pauses. AssertionError if it never is."""
    name = mount.device / f"no-{since}"  # of which the kernel knows nothing
    asking = subprocess.Popen(["stat", name], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while True:
        try:
            asking.wait(0.05)
            return time.monotonic() - since
        except subprocess.TimeoutExpired:
            assert time.monotonic() - since < PATIENCE, "the mount hangs"
            os.kill(keeper, signal.SIGUSR1)  # forgets the deaths, and ends the pause after them


def _kill_some(mount: Survivor, chance: random.Random) -> float:
    """Kill the daemon, and in one of three times the next one too, before or soon after its first answer.

    Returns how long calls wait after the last death.
    """
    (keeper,) = mount.keepers()
    dead: set[int] = set()

    def kill() -> float:
        living = wait_until(lambda: {*children_of(keeper), mount.pid} - dead - {0}, PATIENCE, "a daemon")
        for pid in living:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        dead.update(living)
        return time.monotonic()

    died = kill()
    if chance.random() < 1 / 3:
        os.kill(keeper, signal.SIGUSR1)
        time.sleep(chance.random() * 0.6)
        died = kill()
    return _seconds_until_an_answer(mount, keeper, died)


@contextmanager
def _holding(directory: Path) -> Iterator[None]:
    """A user holds a directory's lock all the time, where a program has registered memory until the end."""
    directory.mkdir()
    memory = os.memfd_create("memory")
    os.ftruncate(memory, 1 << 20)
    view = numpy.frombuffer(mmap.mmap(memory, 1 << 20), numpy.uint8)
    os.close(memory)
    with gpufs_client.register(view, directory / "file") as registered, held(directory):
        yield
        began = time.monotonic()
        registered.close()
        assert time.monotonic() - began < 10
    assert not os.listdir(directory)
    directory.rmdir()


def kill_at_random(
    folder: Path,
    rounds: int,
    seed: int,
    names: Sequence[str] = tuple(PROGRAMS),
    *,
    memory: str = "3G",
    hold: bool = False,
    **environment: str,
) -> list[float]:
    """Kill daemons and keepers, and restart, while programs work, which must notice nothing.

    names: as for at_work(). memory: of the device; what does not fit is evicted. hold: a user holds a directory of the
    mount all the time. Returns how long calls waited after the deaths of daemons.
    """
    chance = random.Random(seed)
    waits = []
    with mounted(folder / "mount", "--evict", "--host-memory", "256M", memory=memory) as mount:
        holding = _holding(mount.device / "held") if hold else nullcontext()
        with at_work(mount.device, folder, names, **environment) as running, holding:
            time.sleep(0.5)
            for number in range(rounds):
                time.sleep(chance.random() * 0.5)
                if number % 5 == 1:
                    (keeper,) = mount.keepers()
                    os.kill(keeper, signal.SIGKILL)
                    wait_until(lambda former=keeper: mount.keepers() not in ([], [former]), PATIENCE, "a keeper")  # type: ignore[misc]
                elif number % 5 == 2:
                    gpufs("restart", mount.path)
                else:
                    waits.append(_kill_some(mount, chance))
                failed = [name for name, program in running.items() if program.poll() is not None]
                assert not failed, [running[name].communicate()[0] for name in failed]
        for name in names:
            subprocess.run(["rm", "-r", str(mount.device / name)], check=True)
        wait_until(lambda: status(mount.path).devices[0].used_bytes == 0, PATIENCE, "the memory to be free")
    return waits
