"""Programs at work notice nothing of a daemon that is killed or restarted, or of a keeper that is killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.at_work import PROGRAMS
from support.cli import gpufs
from support.mounting import REPOSITORY
from support.processes import PATIENCE, wait_until
from support.surviving import Survivor, mounted

from gpufs import status

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="one program has a mount namespace of its own")


@contextmanager
def at_work(mount: Survivor, folder: Path, **environment: str) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """All of support.at_work, each in a directory of the mount. At the end they must have seen nothing wrong."""
    stop, place = folder / "stop", folder / "bound"
    place.mkdir()
    path = os.pathsep.join([str(REPOSITORY / "tests"), str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    variables = {**os.environ, "PYTHONPATH": path, "BIND_PLACE": str(place), **environment}
    running = {}
    try:
        for name in PROGRAMS:
            directory = mount.device / name
            directory.mkdir()
            words = [sys.executable, "-m", "support.at_work", name, str(directory), str(stop)]
            if name == "look":
                words = ["unshare", "--mount", *words]
            running[name] = subprocess.Popen(
                words, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        yield running
        stop.touch()
        for name, program in running.items():
            said, _ = program.communicate(timeout=PATIENCE)
            assert program.returncode == 0, f"{name}: {said}"
            assert int(said.split()[0]) > 0, name
    finally:
        for program in running.values():
            program.kill()
            program.communicate()


def _kill_at_random(tmp_path: Path, rounds: int, seed: int, **environment: str) -> None:
    chance = random.Random(seed)
    with mounted(tmp_path / "mount", "--memory", "3G") as mount:
        with at_work(mount, tmp_path, **environment) as running:
            time.sleep(0.5)
            for number in range(rounds):
                time.sleep(chance.random() * 0.5)
                if number % 5 == 4:
                    gpufs("restart", mount.path)
                elif number % 2:
                    (keeper,) = mount.keepers()
                    os.kill(keeper, signal.SIGKILL)
                    wait_until(lambda former=keeper: mount.keepers() not in ([], [former]), PATIENCE, "a keeper")  # type: ignore[misc]
                else:
                    mount.kill()
                failed = [name for name, program in running.items() if program.poll() is not None]
                assert not failed, [running[name].communicate()[0] for name in failed]
        for name in PROGRAMS:
            subprocess.run(["rm", "-r", str(mount.device / name)], check=True)
        wait_until(lambda: status(mount.path).devices[0].used_bytes == 0, PATIENCE, "the memory to be free")


def test_programs_notice_nothing(tmp_path: Path) -> None:
    _kill_at_random(tmp_path, 3, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("seed", [100, 200])
def test_programs_notice_nothing_for_long(tmp_path: Path, seed: int) -> None:
    _kill_at_random(tmp_path, 220, seed, FILE_BYTES=str(1 << 30))
