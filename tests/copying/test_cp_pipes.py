"""`gpufs cp` from standard input and to standard output."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest
from support.cli import gpufs
from support.data import MIB, assert_same, noise
from support.mounting import GPUFS, GpufsMount, Mounter
from support.processes import PATIENCE, run, shell, wait_until


@pytest.mark.parametrize("size", [0, 1, 9 * MIB + 5])
def test_bytes_pass_through_pipes(root: Path, host: Path, size: int) -> None:
    (host / "source").write_bytes(noise(size))
    command = f"cat {host}/source | {GPUFS[0]} cp - {root}/file && {GPUFS[0]} cp {root}/file - | cat > {host}/back"
    shell(command)
    assert_same((root / "file").read_bytes(), noise(size))
    assert_same((host / "back").read_bytes(), noise(size))


def test_short_reads_are_put_together(root: Path) -> None:
    done = shell(f"(echo one; sleep 0.2; echo two; sleep 0.2; printf three) | {GPUFS[0]} cp --json - {root}/file")
    assert (root / "file").read_text() == "one\ntwo\nthree"
    assert json.loads(done.stdout)["bytes"] == len("one\ntwo\nthree")
    assert (root / "file").stat().st_mode & 0o777 == 0o644


def test_a_file_can_be_standard_input_or_output(root: Path, host: Path) -> None:
    (host / "source").write_bytes(b"head" + noise(MIB))
    with open(host / "source", "rb", buffering=0) as source:
        source.seek(4)
        gpufs("cp", "-", root / "file", stdin=source)
    assert_same((root / "file").read_bytes(), noise(MIB))
    shell(f"(printf head; {GPUFS[0]} cp {root}/file -) > {host}/back")
    assert (host / "back").read_bytes() == (host / "source").read_bytes()
    with open(root / "file", "rb") as itself:
        assert gpufs("cp", "-", root / "file", check=False, stdin=itself).returncode == 1
    assert_same((root / "file").read_bytes(), noise(MIB))


def test_an_existing_file_is_replaced(root: Path) -> None:
    (root / "file").write_bytes(noise(3 * MIB))
    gpufs("cp", "-", root / "file", input="short")
    assert (root / "file").read_text() == "short"


def test_a_reader_that_ends_early(root: Path) -> None:
    (root / "file").write_bytes(noise(5 * MIB))
    done = run("bash", "-c", f"{GPUFS[0]} cp {root}/file - | head -c 10 >/dev/null; echo ${{PIPESTATUS[0]}}")
    assert (done.stdout, done.stderr) == ("1\n", "")


def test_failures_of_standard_streams(root: Path) -> None:
    (root / "file").write_bytes(noise(MIB))
    assert run("bash", "-c", f"{GPUFS[0]} cp {root}/file - > /dev/full", check=False).returncode == 1
    assert run("bash", "-c", f"{GPUFS[0]} cp {root}/file - >&-", check=False).returncode == 1
    assert run("bash", "-c", f"{GPUFS[0]} cp - {root}/new <&-", check=False).returncode == 1
    assert not (root / "new").exists()


def test_a_full_device(mount: Mounter) -> None:
    small = mount(memory=32 * MIB)
    (small.device / "there").write_bytes(b"precious")
    for name, options, kept in (("new", "", False), ("new", "--partial", True)):
        script = f"head -c {48 * MIB} /dev/zero | {GPUFS[0]} cp {options} - {small.device}/{name}"
        done = run("bash", "-c", script, check=False)
        assert done.returncode == 1
        assert "No space left on device" in done.stderr
        assert "gpu0" in done.stderr
        assert (small.device / name).exists() == kept
    assert 0 < (small.device / "new").stat().st_size < 32 * MIB


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("options", [(), ("--partial",)], ids=str)
def test_a_signal_ends_a_copy_that_waits(root: Path, number: signal.Signals, options: tuple[str, ...]) -> None:
    command = [*GPUFS, "cp", *options, "-", str(root / "file")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=False) as child:
        assert child.stdin is not None
        child.stdin.write(noise(4 * MIB))
        child.stdin.flush()
        wait_until((root / "file").exists, PATIENCE, "the start of the copy")
        wait_until(lambda: (root / "file").stat().st_size == 4 * MIB, PATIENCE, "the first bytes")
        began = time.monotonic()
        child.send_signal(number)
        assert child.wait(PATIENCE) == -number
        assert time.monotonic() - began < PATIENCE / 2
    assert (root / "file").exists() == bool(options)


def test_memory_is_bounded(root: Path) -> None:
    """It does not grow with the size of the input."""
    peak = "import resource; print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"

    def used(size: int) -> int:
        script = f"import subprocess; subprocess.run(['{GPUFS[0]}', 'cp', '-', '{root}/file'], check=True)\n{peak}"
        return int(shell(f'head -c {size} /dev/zero | {GPUFS[0].removesuffix("gpufs")}python -c "{script}"').stdout)

    assert used(160 * MIB) < used(MIB) + (32 * MIB >> 10)


@pytest.mark.parametrize(
    "words",
    [
        ("-", "-"),
        ("-", "a", "b"),
        ("-r", "-", "a"),
        ("--preserve", "-", "a"),
        ("--verify", "a", "-"),
        ("--json", "a", "-"),
        ("--fastpath", "require", "-", "a"),
    ],
    ids=" ".join,
)
def test_what_a_pipe_cannot_do(host: Path, words: tuple[str, ...]) -> None:
    (host / "a").write_bytes(b"precious")
    done = gpufs("cp", *words, cwd=host, input="words", check=False)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert (host / "a").read_bytes() == b"precious"


def test_neither_end_on_a_mount(shared_mount: GpufsMount, host: Path) -> None:
    (host / "a").write_bytes(b"precious")
    for words in (("-", "a"), ("a", "-"), ("-", shared_mount.path / "file")):
        done = gpufs("cp", *words, cwd=host, input="words", check=False)
        assert (done.returncode, done.stdout) == (1, "")
    assert (host / "a").read_bytes() == b"precious"
    (host / "-").write_bytes(b"named so")
    gpufs("cp", "./-", shared_mount.device / "named", cwd=host)
    assert (shared_mount.device / "named").read_bytes() == b"named so"
    (shared_mount.device / "named").unlink()
