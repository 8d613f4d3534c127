"""Standard streams that are closed, full or gone."""

import contextlib
import os
import socket
import subprocess
import sys
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


@pytest.mark.parametrize("words", [("status",), ("df",), ("stats",), ("doctor",), ("--help",), ("cp", "--help")])
def test_output_that_is_closed_is_a_failure(words: tuple[str, ...]) -> None:
    assert last_words(shell('exec "$@" >&-', *words)) == (1, "gpufs: standard output: Bad file descriptor")


@pytest.mark.parametrize("words", [("status",), ("df",), ("stats",), ("cp", "--help")])
def test_output_that_is_full_is_a_failure(words: tuple[str, ...]) -> None:
    assert last_words(shell('exec "$@" >/dev/full', *words)) == (1, "gpufs: standard output: No space left on device")


def test_a_log_that_nobody_reads_stops_nothing(mountpoint: Path, tmp_path: Path) -> None:
    """As after `gpufs mount --foreground 2>&1 | less`: lines are dropped and counted, and the mount goes on."""
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


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_mounting_with_closed_streams(mountpoint: Path, closed: str) -> None:
    """The first files that are opened must not take their numbers."""
    words = ("mount", mountpoint, "--driver", "host", "--memory", "64M")
    assert shell(f'exec "$@" {closed}', *words).returncode == 0
    (mountpoint / "gpu0/x").write_bytes(b"hello")
    assert (mountpoint / "gpu0/x").read_bytes() == b"hello"
    assert shell(f'exec "$@" {closed}', "umount", mountpoint).returncode == 0


INTERRUPTED = """
import builtins, os, signal, sys
real, late = builtins.__import__, sys.argv.pop(1)
def load(name, *rest):
    if name == late:
        builtins.__import__ = real
        os.kill(os.getpid(), signal.SIGINT)
    return real(name, *rest)
builtins.__import__ = load
from gpufs.cli import main
main()
"""


@pytest.mark.parametrize(
    ("words", "late", "code", "said"),
    [
        (("status",), "gpufs.cli._errors", -2, ""),
        (("status",), "click", 130, "gpufs: interrupted\n"),
        (("cp", "a", "b"), "gpufs.cli._copying", 130, "\ngpufs: interrupted\n"),
    ],
)
def test_interrupted_while_modules_are_loaded(words: tuple[str, ...], late: str, code: int, said: str) -> None:
    """Ctrl-C comes before there is anything to interrupt."""
    done = run(sys.executable, "-c", INTERRUPTED, late, *words, check=False)
    assert (done.returncode, done.stderr) == (code, said)


def test_interrupts_that_were_ignored_stay_so() -> None:
    script = "trap '' INT; exec \"$@\""
    done = run("sh", "-c", script, "sh", sys.executable, "-c", INTERRUPTED, "click", "status", check=False)
    assert (done.returncode, done.stderr) == (0, "")
