"""The daemon is killed while `gpufs mount` starts it: there is a mount that works, or none and nothing is left."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
from support.cli import gpufs
from support.data import MIB
from support.mounting import GPUFS
from support.processes import PATIENCE, wait_until
from support.watchdog import mounted_at


def processes_of(path: Path) -> dict[int, str]:
    """The processes whose command names the path: daemon, keeper and guard, and the command itself."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if os.fsencode(path) in words:
                found[int(folder.name)] = words[0].decode() + " " + b" ".join(words[1:4]).decode()
    return found


def daemon_of(path: Path) -> int:
    return next((pid for pid, words in processes_of(path).items() if "gpufs.daemon" in words), 0)


@pytest.mark.parametrize("rounds", [4, pytest.param(40, marks=pytest.mark.slow)])
def test_a_death_while_it_is_mounted(tmp_path: Path, rounds: int) -> None:
    chance = random.Random(time.time_ns())
    for number in range(rounds):
        path = tmp_path / f"mount{number}"
        path.mkdir()
        words = ["mount", str(path), "--driver", "host", "--memory", "64M", "--devices", "1"]
        with subprocess.Popen(
            [*GPUFS, *words], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        ) as command:
            try:
                daemon = wait_until(lambda: daemon_of(path), PATIENCE, "the daemon")  # noqa: B023
                time.sleep(chance.uniform(0, 0.5))
                with suppress(ProcessLookupError):
                    os.kill(daemon, signal.SIGKILL)
                _, said = command.communicate(timeout=PATIENCE)
                if command.returncode == 0:
                    (path / "gpu0/file").write_bytes(bytes(MIB))
                    assert (path / "gpu0/file").read_bytes() == bytes(MIB)
                else:
                    assert said.strip()
                    assert not mounted_at(str(path)), said
            finally:
                command.kill()
                gpufs("umount", "--force", path, check=False)
        wait_until(lambda: not processes_of(path), PATIENCE, "the mount's processes to end")  # noqa: B023


def test_a_restart_while_it_is_mounted(tmp_path: Path) -> None:
    """The daemon left before it had told `gpufs mount` that the mount works, which ended it then."""
    words = ["mount", str(tmp_path), "--driver", "host", "--memory", "64M", "--devices", "1"]
    with subprocess.Popen([*GPUFS, *words], stderr=subprocess.PIPE, text=True) as command:
        try:
            wait_until((tmp_path / "gpu0").exists, PATIENCE, "the mount")
            former = wait_until(lambda: daemon_of(tmp_path), PATIENCE, "the daemon")
            os.kill(former, signal.SIGUSR2)
            _, said = command.communicate(timeout=PATIENCE)
            assert command.returncode == 0, said
            wait_until(lambda: daemon_of(tmp_path) not in (0, former), PATIENCE, "another daemon")
            (tmp_path / "gpu0/file").write_bytes(b"1")
        finally:
            command.kill()
            gpufs("umount", "--force", tmp_path, check=False)
