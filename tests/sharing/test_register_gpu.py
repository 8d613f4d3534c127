"""gpufs.register of memory on a GPU, by the vendors' handles, over the fakes of their libraries."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from support.cli import user_gpufs
from support.data import MIB, noise
from support.mounting import GPUFS, REPOSITORY, GpufsMount
from support.processes import NOBODY, errno_of, plain_user, run, wait_until
from support.surviving import mounted

pytestmark = pytest.mark.driver


class Program:
    """support/fake_program.py as a process."""

    def __init__(
        self, driver: str, path: Path, size: int, offset: int, kind: str, environment: dict[str, str] | None
    ) -> None:
        """With an environment of support.processes.plain_user, as nobody."""
        user = None
        program = sys.executable
        if environment is None:
            environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        else:
            user = NOBODY
            (program, *_), environment = user_gpufs(environment)
        environment["PYTHONPATH"] += f":{REPOSITORY / 'tests'}"
        words = [program, "-m", "support.fake_program", driver, str(path), str(size), str(offset), kind]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True, env=environment, user=user, cwd="/")
        self.answer = self._line()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, text: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()
        return self._line()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


@pytest.fixture
def program(driver: str) -> Iterator[Callable[..., Program]]:
    if driver == "host" or "FAKE_CUDA_DEVICES" not in os.environ:
        pytest.skip("needs a fake GPU (scripts/test-fakes): its memory is also the host's")
    made: list[Program] = []

    def start(path: Path, offset: int = 0, kind: str = "plain", user: dict[str, str] | None = None) -> Program:
        made.append(Program(driver, path, 4 * MIB, offset, kind, user))
        return made[-1]

    yield start
    for one in made:
        one.close()


@pytest.mark.parametrize("kind", ["plain", "virtual", "pieces"])
def test_a_part_of_an_allocation_is_a_file(
    root: Path, tmp_path: Path, program: Callable[..., Program], kind: str, driver: str
) -> None:
    offset = MIB + 512
    running = program(root / "live", offset=offset, kind=kind)
    # With plain memory the mount has no ranges of addresses to open that of others in.
    if kind != "plain" and driver == "hip" and os.environ.get("GPUFS_HIP_MEMORY") != "virtual":
        assert running.answer.startswith(str(errno.EOPNOTSUPP))
        assert not list(root.iterdir())
        return
    assert running.answer == "ready"
    content = noise(4 * MIB)[offset:]
    assert hashlib.sha256((root / "live").read_bytes()).digest() == hashlib.sha256(content).digest()
    assert running.ask("write 1000 abcdef") == "done"
    with open(root / "live", "r+b", buffering=0) as file:
        assert os.pread(file.fileno(), 3, 1000) == bytes.fromhex("abcdef")
        assert os.pwrite(file.fileno(), b"seen", 77) == 4
        assert running.ask("read 77 4") == b"seen".hex()
        assert errno_of(os.ftruncate, file.fileno(), 0) == errno.EPERM
        expected = (root / "live").read_bytes()
        run(*GPUFS, "cp", root / "live", tmp_path / "copy")
        assert (tmp_path / "copy").read_bytes() == expected
        run("cp", root / "live", root / "copy")
        assert (root / "copy").read_bytes() == expected
        assert running.ask("close") == "done"
        assert errno_of(os.pread, file.fileno(), 1, 0) == errno.ESTALE
    assert not (root / "live").exists()


def test_the_program_is_killed(root: Path, program: Callable[..., Program]) -> None:
    for _ in range(3):
        running = program(root / "live")
        assert running.answer == "ready"
        with open(root / "live", "rb", buffering=0) as file:
            assert file.read(100) == noise(4 * MIB)[:100]
            running.kill()
            wait_until(lambda: not list(root.iterdir()), 10, "the end of the name")
            ended = partial(lambda fd: errno_of(os.pread, fd, 1, 0) == errno.ESTALE, file.fileno())
            wait_until(ended, 10, "the end of the contents")


@pytest.mark.parametrize("kind", ["plain", "virtual", "pieces"])
def test_the_daemon_is_killed(tmp_path: Path, program: Callable[..., Program], kind: str, driver: str) -> None:
    """Another one has the same memory for the file; for the next ones it is still there."""
    with mounted(tmp_path / "mount", driver=driver) as mount:
        running = program(mount.device / "live", offset=MIB, kind=kind)
        if running.answer != "ready" or not mount.report()["survives"]:
            assert driver == "hip"
            return
        with open(mount.device / "live", "r+b", buffering=0) as file:
            for value in range(1, 4):
                mount.kill()
                assert running.ask(f"write 1000 {value:02x}") == "done"
                assert os.pread(file.fileno(), 1, 1000) == bytes([value])
                assert os.pwrite(file.fileno(), bytes([value]), 2000) == 1
                assert running.ask("read 2000 1") == f"{value:02x}"
            assert os.pread(file.fileno(), 1000, 0) == noise(4 * MIB)[MIB : MIB + 1000]
        assert running.ask("close") == "done"
        assert not (mount.device / "live").exists()


def test_pinned_memory_is_refused(root: Path, program: Callable[..., Program]) -> None:
    assert program(root / "live", kind="pinned").answer.startswith(str(errno.EINVAL))
    assert not list(root.iterdir())


def test_the_directory_of_another_gpu(shared_mount: GpufsMount, program: Callable[..., Program]) -> None:
    answer = program(shared_mount.path / "gpu1" / "live").answer
    assert answer.startswith(str(errno.EXDEV))
    assert "gpu0" in answer  # where it would have to be
    assert not (shared_mount.path / "gpu1" / "live").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="acts as several users, which takes root")
def test_handles_of_other_users_are_refused(root: Path, program: Callable[..., Program]) -> None:
    with plain_user() as environment:
        answer = program(root / "live", user=environment).answer
    assert answer.startswith(str(errno.EPERM))
    assert not list(root.iterdir())
