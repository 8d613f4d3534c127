"""The measured systems, as context managers: entering mounts one, leaving always unmounts it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

MIB = 1 << 20
GPUFS = (sys.executable, "-m", "gpufs")


class System:
    """A directory to measure in, under a name for the table."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self.directory = directory

    def files(self, count: int, size: int) -> list[Path]:
        """Files with `size` bytes of data each; creates those that are missing."""
        paths = [self.directory / f"bench{index}" for index in range(count)]
        block = os.urandom(MIB)
        for path in paths:
            if not path.exists() or path.stat().st_size != size:
                with open(path, "wb", buffering=0) as file:
                    for _ in range(size // MIB):
                        file.write(block)
        return paths

    def remove_files(self) -> None:
        """Removes them, so that the next ones use other memory."""
        for path in self.directory.glob("bench*"):
            path.unlink()


@contextlib.contextmanager
def tmpfs() -> Iterator[System]:
    """The kernel's own file system in memory."""
    path = Path(tempfile.mkdtemp(prefix="gpufs-bench-", dir="/dev/shm"))
    try:
        yield System("tmpfs", path)
    finally:
        shutil.rmtree(path)


def _mountpoint() -> Path:
    return Path(tempfile.mkdtemp(prefix="gpufs-bench-"))


def _clean_up(path: Path) -> None:
    if os.path.ismount(path):
        tool = ["umount", "-l"] if os.geteuid() == 0 else ["fusermount3", "-u", "-z"]
        subprocess.run([*tool, str(path)], check=False, timeout=30)
    with contextlib.suppress(OSError):
        path.rmdir()


@contextlib.contextmanager
def gpufs(name: str, memory: int, *options: str, driver: str = "host") -> Iterator[System]:
    """A mount with one device of `memory` bytes (host driver)."""
    path = _mountpoint()
    words = ["--driver", driver, *(["--memory", str(memory)] if driver == "host" else []), *options]
    subprocess.run([*GPUFS, "mount", str(path), *words], check=True, timeout=120)
    try:
        yield System(name, path / "gpu0")
    finally:
        subprocess.run([*GPUFS, "umount", "--force", str(path)], check=False, timeout=60)
        _clean_up(path)


@contextlib.contextmanager
def recording(mounted: System) -> Iterator[None]:
    """Records the mount with `gpufs trace` for as long as the context is open."""
    mountpoint = mounted.directory.parent
    with tempfile.TemporaryDirectory(prefix="gpufs-bench-") as folder:
        words = [*GPUFS, "trace", str(mountpoint), "-o", f"{folder}/trace.json"]
        recorder = subprocess.Popen(words, stderr=subprocess.PIPE)
        try:
            deadline = time.monotonic() + 30
            while not _has_open(recorder.pid, str(mountpoint / ".gpufs/trace")):
                if recorder.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError("the recording did not begin")
                time.sleep(0.01)
            yield
        finally:
            recorder.send_signal(signal.SIGINT)
            recorder.communicate(timeout=60)


def _has_open(process: int, path: str) -> bool:
    """Whether a process has a file open; does not open it, since that would start a recording."""
    with contextlib.suppress(OSError):
        return any(os.readlink(link) == path for link in Path(f"/proc/{process}/fd").iterdir())
    return False


@contextlib.contextmanager
def peer(limit: int) -> Iterator[System]:
    """The plain pyfuse3 file system; `limit` is the largest size of a file in bytes."""
    path = _mountpoint()
    words = [sys.executable, "-m", "bench.peer_pyfuse3", str(path), str(limit)]
    process = subprocess.Popen(words, start_new_session=True, cwd=Path(__file__).parents[1])
    try:
        deadline = time.monotonic() + 30
        while not os.path.ismount(path):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the pyfuse3 peer did not come up")
            time.sleep(0.02)
        yield System("pyfuse3", path)
    finally:
        _clean_up(path)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
