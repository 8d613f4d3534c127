"""Standard streams that are closed, full or gone."""

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.mounting import GPUFS, GpufsMount
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


@pytest.mark.parametrize(("where", "why"), [(">&-", "Bad file descriptor"), (">/dev/full", "No space left on device")])
def test_a_trace_that_cannot_be_written_is_not_told_of(shared_mount: GpufsMount, where: str, why: str) -> None:
    done = shell(f'exec "$@" {where}', "trace", shared_mount.path, "-o", "-", "--duration", "0.1")
    assert (done.returncode, done.stderr) == (1, f"gpufs: standard output: {why}\n")


def test_a_log_that_cannot_be_written_costs_its_lines_alone(mountpoint: Path) -> None:
    words = ("mount", mountpoint, "--driver", "host", "--memory", "64M", "--foreground", "--log-file", "/dev/full")
    process = subprocess.Popen([*GPUFS, *map(str, words)], stderr=subprocess.PIPE, text=True)
    wait_until(lambda: (mountpoint / ".gpufs/version").exists() or process.poll() is not None, 60, "the mount")
    (mountpoint / "gpu0/x").write_bytes(b"hello")
    assert shell('exec "$@"', "umount", mountpoint).returncode == 0
    assert process.communicate(timeout=PATIENCE)[1] == ""
    assert process.returncode == 0


def test_remarks_that_nobody_reads_do_not_end_a_mount_in_the_foreground(mountpoint: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    words = ("mount", mountpoint, "--memory", "64M", "--foreground")  # it says that there is no GPU
    process = subprocess.Popen([*GPUFS, *map(str, words)], stderr=writer)
    os.close(writer)
    wait_until(lambda: (mountpoint / ".gpufs/version").exists() or process.poll() is not None, 60, "the mount")
    assert process.poll() is None
    assert shell('exec "$@"', "umount", mountpoint).returncode == 0
    assert process.wait(PATIENCE) == 0


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


def test_a_mount_whose_log_nobody_reads_ends(mountpoint: Path) -> None:
    reader, writer = os.pipe()
    filler = os.open(f"/proc/self/fd/{writer}", os.O_WRONLY | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(filler, b"x" * 4096)
    words = ("mount", mountpoint, "--driver", "host", "--memory", "64M", "--foreground")
    process = subprocess.Popen([*GPUFS, *map(str, words)], stderr=writer)
    try:
        wait_until(lambda: (mountpoint / ".gpufs/version").exists() or process.poll() is not None, 60, "the mount")
        assert shell('exec "$@"', "umount", mountpoint).returncode == 0
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
        process.wait()
        for fd in (reader, writer, filler):
            os.close(fd)


def test_a_log_has_names_of_any_bytes(tmp_path: Path) -> None:
    script = (
        "import sys, logging; from gpufs.daemon.logs import Log; log = Log(sys.argv[1], 'info', foreground=False);"
        "logging.getLogger('x').warning('%s: gone', sys.argv[2]); log.close()"
    )
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0"}
    run(sys.executable, "-c", script, tmp_path / "log", os.fsdecode(b"n\xff\xc3\xa9"), env=environment)
    assert (tmp_path / "log").read_bytes().endswith(b"WARNING x: n\xff\xc3\xa9: gone\n")


def test_messages_never_go_where_output_belongs(tmp_path: Path) -> None:
    done = shell('exec "$@" 2>&-', "status", tmp_path / "none")
    assert (done.returncode, done.stdout) == (1, "")
    assert shell('exec "$@" <&- >&- 2>&-', "status", tmp_path / "none").returncode == 1


def test_messages_that_cannot_be_written_do_not_change_the_exit_code() -> None:
    assert shell('exec "$@" 2>/dev/full', "nonsense").returncode == 2


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_mounting_with_closed_streams(mountpoint: Path, closed: str) -> None:
    """The first files that are opened must not take their numbers."""
    words = ("mount", mountpoint, "--driver", "host", "--memory", "64M")
    assert shell(f'exec "$@" {closed}', *words).returncode == 0
    (mountpoint / "gpu0/x").write_bytes(b"hello")
    assert (mountpoint / "gpu0/x").read_bytes() == b"hello"
    assert shell(f'exec "$@" {closed}', "umount", mountpoint).returncode == 0


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_copying_with_closed_streams(shared_mount: GpufsMount, tmp_path: Path, closed: str) -> None:
    source, copy = tmp_path / "source", shared_mount.device / "copy"
    source.write_bytes(b"contents" * 100_000)
    try:
        assert shell(f'exec "$@" {closed}', "cp", source, copy).returncode == 0
        assert copy.read_bytes() == source.read_bytes()
        assert shell(f'exec "$@" {closed}', "cp", tmp_path / "none", copy).returncode == 1
    finally:
        copy.unlink()


def test_copies_are_made_where_the_list_of_them_cannot_be_written(shared_mount: GpufsMount, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(name.encode() * 300_000)
    target = shared_mount.device / "copies"
    target.mkdir()
    done = shell('exec "$@" >/dev/full', "cp", "-v", tmp_path / "a", tmp_path / "b", target)
    assert (done.returncode, done.stderr) == (1, "gpufs: standard output: No space left on device\n")
    for name in ("a", "b"):
        assert (target / name).read_bytes() == (tmp_path / name).read_bytes()
        (target / name).unlink()
    target.rmdir()


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
