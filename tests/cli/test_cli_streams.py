"""Standard streams that are closed, full or gone."""

import contextlib
import os
import socket
import subprocess
from pathlib import Path

import pytest
from support.mounting import GPUFS
from support.processes import PATIENCE, run, wait_until


def shell(script: str, *words: object, **options: object) -> subprocess.CompletedProcess[str]:
    """A script in which "$@" is the gpufs command."""
    return run("sh", "-c", script, "sh", *GPUFS, *map(str, words), check=False, **options)  # type: ignore[arg-type]


def last_words(done: subprocess.CompletedProcess[str]) -> tuple[int, str]:
    """The exit code and the last line of complaint. Lines before it may be about mounts that other tests have made."""
    return done.returncode, done.stderr.splitlines()[-1]


@pytest.mark.parametrize("words", [("status",), ("cp", "--help")])
def test_closed_standard_output_is_a_failure(words: tuple[str, ...]) -> None:
    assert last_words(shell('exec "$@" >&-', *words)) == (1, "gpufs: standard output: Bad file descriptor")


@pytest.mark.parametrize("words", [("status",), ("cp", "--help")])
def test_full_standard_output_is_a_failure(words: tuple[str, ...]) -> None:
    assert last_words(shell('exec "$@" >/dev/full', *words)) == (1, "gpufs: standard output: No space left on device")


@pytest.mark.parametrize(("words", "code"), [((), 2), (("cp",), 2), (("df", "/nowhere"), 1), (("run", "nowhere"), 127)])
def test_full_standard_error_leaves_the_exit_code(words: tuple[str, ...], code: int) -> None:
    assert shell('exec "$@" 2>/dev/full', *words).returncode == code


@pytest.mark.slow
def test_a_log_pipe_that_is_full_does_not_block_the_mount(mountpoint: Path, tmp_path: Path) -> None:
    """The daemon drops lines and counts them, for example after `gpufs mount --foreground 2>&1 | less`."""
    reader, writer = os.pipe()
    words = ("mount", mountpoint, "--driver", "host", "--memory", "64M", "--foreground")
    process = subprocess.Popen([*GPUFS, *map(str, words)], stderr=writer)
    try:
        wait_until(lambda: (mountpoint / ".gpufs/version").exists() or process.poll() is not None, 60, "the mount")
        filler = os.open(f"/proc/self/fd/{writer}", os.O_WRONLY | os.O_NONBLOCK)  # non-blocking for this test alone
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(filler, b"x" * 4096)
        os.close(filler)
        path = (mountpoint / ".gpufs/socket").read_text().strip()
        for _ in range(10_000):  # each is a line of some hundred bytes; the queue has a MiB
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
                sock.connect(path)
                sock.send(b"garbage")
        (tmp_path / "source").write_bytes(os.urandom(1 << 20))
        run(*GPUFS, "cp", tmp_path / "source", mountpoint / "gpu0/x")
        os.rename(mountpoint / "gpu0/x", mountpoint / "gpu0/y")
        os.set_blocking(reader, False)
        text = bytearray()

        def counted() -> bool:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:  # one more line
                sock.connect(path)
                sock.send(b"garbage")
            with contextlib.suppress(BlockingIOError):
                while True:
                    text.extend(os.read(reader, 1 << 20))
            return b" lines dropped" in text

        wait_until(counted, 60, "the count of dropped lines")
        os.set_blocking(reader, True)
        assert shell('exec "$@"', "umount", mountpoint).returncode == 0
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
        process.wait()
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_mounting_works_with_closed_standard_streams(mountpoint: Path, closed: str) -> None:
    """Files that the daemon opens must not get the numbers of the standard streams."""
    words = ("mount", mountpoint, "--driver", "host", "--memory", "64M")
    assert shell(f'exec "$@" {closed}', *words).returncode == 0
    (mountpoint / "gpu0/x").write_bytes(b"hello")
    assert (mountpoint / "gpu0/x").read_bytes() == b"hello"
    assert shell(f'exec "$@" {closed}', "umount", mountpoint).returncode == 0
