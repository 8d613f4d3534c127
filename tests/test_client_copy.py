"""gpufs.client.copy and `gpufs cp` over a fake engine: a directory of /dev/shm is taken for the mount."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.copying import HOUR, MIB, FakeMount
from support.processes import PATIENCE

from gpufs import client, mounting
from gpufs.cli import run
from gpufs.client import CopyError, CopyProgress, _find

BIG = 3 * MIB + 5


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeMount]:
    mount = FakeMount()
    monkeypatch.setattr(mounting, "listed", lambda: [mount.entry()])
    yield mount
    mount.close()


@pytest.fixture
def cp(fake: FakeMount, capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs `gpufs cp` here; exit code, output, errors."""

    def call(*words: str | Path) -> tuple[int, str, str]:
        capfd.readouterr()
        code = run(["cp", *map(str, words)])
        output, errors = capfd.readouterr()
        return code, output, errors

    return call


# ---- copy() ----


def test_small_files_do_not_bother_the_daemon(fake: FakeMount) -> None:
    source = fake.file("source", b"1234")
    result = client.copy(source, fake.folder / "target")
    assert (result.method, result.paths) == ("mount", {"mount": 4})
    assert not fake.backend.requests
    assert client.copy(source, fake.folder / "target", fastpath="off").method == "transfer"


def test_within_the_host_is_refused_and_touches_nothing(fake: FakeMount) -> None:
    source, target = fake.file("source", bytes(BIG)), fake.file("target", b"precious")
    with pytest.raises(CopyError, match="use cp") as refused:
        client.copy(source, target)
    assert refused.value.errno == errno.EXDEV
    assert target.read_bytes() == b"precious"
    with pytest.raises(CopyError, match="use cp"):
        client.copy(source, fake.host / "new")
    assert not (fake.host / "new").exists()


def test_verify(fake: FakeMount, monkeypatch: pytest.MonkeyPatch) -> None:
    content = os.urandom(BIG)
    source, target = fake.file("source", content), fake.folder / "target"
    phases: set[str] = set()
    result = client.copy(source, target, verify=True, progress=lambda progress: phases.add(progress.phase))
    import hashlib

    assert result.sha256 == hashlib.sha256(content).hexdigest()

    def corrupt(ino: int) -> None:
        with open(target, "r+b") as file:
            file.seek(BIG // 2)
            file.write(b"?????")

    monkeypatch.setattr(fake.backend, "written", corrupt)
    with pytest.raises(CopyError, match="the copy differs") as failed:
        client.copy(source, target, verify=True)
    assert failed.value.errno == errno.EIO


def test_progress(fake: FakeMount) -> None:
    fake.backend.delay = 0.05
    seen: list[CopyProgress] = []

    def see(progress: CopyProgress) -> None:
        seen.append(progress)
        if len(seen) == 3:
            fake.backend.delay = 0

    client.copy(fake.hollow("source", 400 * MIB), fake.folder / "target", progress=see)
    assert len(seen) >= 3
    assert seen[-1].total == 400 * MIB
    assert all(progress.phase == "copy" for progress in seen)


@pytest.mark.parametrize("to_device", [True, False])
def test_a_failure_leaves_what_was_copied(fake: FakeMount, to_device: bool) -> None:
    fake.backend.fail_at = (2 * MIB, errno.ENOSPC)
    source = fake.file("source", bytes(BIG), None if to_device else fake.folder)
    target = (fake.folder if to_device else fake.host) / "target"
    with pytest.raises(CopyError) as failed:
        client.copy(source, target, partial=True)
    error = failed.value
    assert (error.errno, error.bytes_done, error.bytes_total) == (errno.ENOSPC, 2 * MIB, BIG)
    assert error.filename == str(target)
    assert str(error) == f"{target}: planned ({2 * MIB} of {BIG} bytes are kept)"
    assert target.stat().st_size == 2 * MIB
    with pytest.raises(CopyError) as failed:
        client.copy(source, target)
    assert failed.value.bytes_done == target.stat().st_size == 2 * MIB
    assert "the old content is gone" in str(failed.value)


@pytest.mark.parametrize("to_device", [True, False])
def test_a_failure_leaves_no_new_file(fake: FakeMount, to_device: bool) -> None:
    fake.backend.fail_at = (2 * MIB, errno.EIO)
    source = fake.file("source", bytes(BIG), None if to_device else fake.folder)
    target = (fake.folder if to_device else fake.host) / "target"
    with pytest.raises(CopyError) as failed:
        client.copy(source, target)
    assert (failed.value.bytes_done, failed.value.bytes_total) == (0, BIG)
    assert not target.exists()


def test_a_failure_of_the_device(fake: FakeMount) -> None:
    fake.backend.fail_at = (0, errno.EIO)
    source, target = fake.file("source", bytes(BIG)), fake.folder / "target"
    with pytest.raises(CopyError) as failed:
        client.copy(source, target)
    assert failed.value.device_code == 77
    assert str(failed.value) == f"{source} -> {target}: planned (device code 77)"


@pytest.mark.parametrize("problem", ["stopped", "no file", "a stranger"])
def test_without_a_daemon_the_mount_serves(fake: FakeMount, monkeypatch: pytest.MonkeyPatch, problem: str) -> None:
    if problem == "stopped":
        fake.stop()
    elif problem == "no file":
        (fake.folder / ".gpufs" / "socket").unlink()
    else:
        monkeypatch.setattr(_find, "_trusted", lambda uid: False)
    content = os.urandom(BIG)
    source = fake.file("source", content)
    with pytest.warns(RuntimeWarning, match="copy service cannot be reached"):
        result = client.copy(source, fake.folder / "target")
    assert (result.method, result.paths) == ("mount", {"mount": BIG})
    assert (fake.folder / "target").read_bytes() == content
    with pytest.raises(CopyError):
        client.copy(source, fake.folder / "target", fastpath="require")


@pytest.mark.parametrize("error", [OSError, ValueError, KeyboardInterrupt])
def test_an_exception_of_the_progress_ends_the_copy(fake: FakeMount, error: type[BaseException]) -> None:
    """When it arrives the daemon has stopped: the destination holds what the exception says, and stays so."""
    fake.backend.delay = 0.02
    fake.backend.sparse_tail = True
    source, target = fake.hollow("source", HOUR, fake.folder), fake.host / "target"
    for existing in (False, True):
        if existing:
            target.write_bytes(b"precious")

        def fail(progress: CopyProgress) -> None:
            if progress.moved:
                raise error(errno.EPIPE, "the window is closed")

        with pytest.raises(CopyError if error is OSError else error) as failed:
            client.copy(source, target, progress=fail)
        assert fake.quiet()
        assert target.exists() == existing
        if isinstance(failed.value, CopyError):
            assert failed.value.errno == errno.EPIPE
            assert failed.value.bytes_done == (target.stat().st_size if existing else 0)
        if existing:
            assert 0 < target.stat().st_size < HOUR


@pytest.mark.parametrize("code", [errno.ENOTCONN, errno.ECONNABORTED])
def test_a_mount_that_has_died_is_called_dead(fake: FakeMount, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def dead(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pwrite", dead)
    with pytest.raises(CopyError, match="the daemon of the gpufs mount has died") as failed:
        client.copy(fake.file("source", b"small"), fake.folder)
    assert failed.value.errno == code


# ---- gpufs cp ----


def test_cp_starts_without_what_it_does_not_need() -> None:
    program = "import sys; from gpufs.cli import run; run(['cp', '/nonexistent', '/tmp']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    slow = {"rich", "numpy", "cffi", "trio", "pyfuse3", "asyncio", "hashlib", "gpufs.engine", "gpufs.config"}
    assert not slow & set(done.stdout.split())


def test_cp_json(fake: FakeMount, cp: Any) -> None:
    fake.file("a", bytes(BIG))
    fake.file("b", b"small")
    code, output, errors = cp("--json", fake.host / "a", fake.host / "b", fake.host / "missing", fake.folder)
    summary = json.loads(output)
    assert code == 1
    assert (summary["files"], summary["bytes"]) == (2, BIG + 5)
    assert summary["paths"] == {"fallback": BIG, "mount": 5}
    assert summary["methods"] == {"transfer": 1, "mount": 1}
    assert not summary["interrupted"]
    assert {copy["destination"] for copy in summary["copies"]} == {str(fake.folder / "a"), str(fake.folder / "b")}
    (error,) = summary["errors"]
    assert (error["name"], error["source"]) == ("ENOENT", str(fake.host / "missing"))
    assert errors == f"gpufs cp: {fake.host}/missing: No such file or directory\n"


def test_cp_says_what_is_wrong(fake: FakeMount, cp: Any) -> None:
    file, folder = fake.file("file", b"1"), fake.host / "folder"
    folder.mkdir()
    other = fake.file("file", b"2", folder)
    there = fake.file("there", b"3", fake.folder)
    (fake.folder / "d").mkdir()
    os.mkfifo(fake.host / "fifo")
    m, h = fake.folder, fake.host
    cases: list[tuple[tuple[Any, ...], int, str]] = [
        ((folder, m), 1, f"gpufs cp: {folder}: is a directory (-r copies it)\n"),
        ((file, other, m / "no"), 1, f"gpufs: cp: {m}/no: is not a directory, and there are 2 sources for it\n"),
        ((file, other, there), 1, f"gpufs: cp: {there}: is not a directory, and there are 2 sources for it\n"),
        ((file, h / "x"), 1, f"gpufs cp: {file} -> {h}/x: neither of them is on a gpufs mount: use cp\n"),
        (("-r", folder, h / "x"), 1, f"gpufs cp: {folder} -> {h}/x: neither of them is on a gpufs mount: use cp\n"),
        ((there, there), 1, f"gpufs cp: {there}: is the same file as the source\n"),
        ((file, m / "no" / "where"), 1, f"gpufs cp: {m}/no/where: No such file or directory\n"),
        ((h / "fifo", m), 1, f"gpufs cp: {h}/fifo: neither a regular file nor a block device: use cp\n"),
        (("-r", folder, there), 1, f"gpufs cp: {there}: a file cannot be overwritten with a directory\n"),
        (("-r", m / "d", m / "d" / "e"), 1, f"gpufs cp: {m}/d -> {m}/d/e: a directory cannot be copied into itself\n"),
        ((file, other, m), 1, f"gpufs cp: {other} -> {m}/file: another source of this command has been copied there\n"),
        ((file,), 2, "gpufs: Missing argument 'DEST'. (see gpufs cp --help)\n"),
    ]
    for words, code, text in cases:
        found = cp(*words)
        if code == 2:
            assert found[0] == 2
        else:
            assert found == (code, "", text), words
    assert sorted(path.name for path in fake.folder.iterdir()) == [".gpufs", "d", "file", "there"]
    assert there.read_bytes() == b"3"


@pytest.mark.parametrize(
    "words", [("-f", "a", "b"), ("-rL", "a", "b"), ("--remove-destination", "a", "b"), ("--verifi", "a")]
)
def test_cp_refuses_other_options_of_cp(words: tuple[str, ...], cp: Any) -> None:
    code, output, errors = cp(*words)
    assert (code, output) == (2, "")
    assert len(errors.splitlines()) == 1
    assert ("--verify" in errors) == ("--verifi" in words)


def test_cp_goes_on_after_a_failure(fake: FakeMount, cp: Any) -> None:
    fake.backend.fail_at = (MIB, errno.EIO)
    big, small = fake.file("big", bytes(BIG)), fake.file("small", b"1")
    code, _, errors = cp(big, small, fake.folder)
    assert code == 1
    assert errors == f"gpufs cp: {big} -> {fake.folder}/big: planned (device code 77)\n"
    assert (fake.folder / "small").read_bytes() == b"1"


def test_cp_progress_bar(fake: FakeMount, cp: Any) -> None:
    fake.backend.delay = 0.05
    source = fake.hollow("source", 12 * MIB)
    code, output, errors = cp("--progress", source, fake.folder)
    assert (code, output) == (0, "")
    assert "source" in errors


CHILD = """
import sys, os
from gpufs import mounting
number, folder = sys.argv[1:3]
mount = mounting.MountEntry(folder, "/", number, "gpufs", "rw", mounting.FILESYSTEM_TYPE, 1, frozenset())
mounting.listed = lambda: [mount]
from gpufs.cli import run
sys.exit(run(["cp", *sys.argv[3:]]))
"""


IN_THE_BACKGROUND = """
import signal, sys
from gpufs.client import Copier, CopyError
def copy_file(*arguments, **named):
    print("it copies", flush=True)
    sys.stdin.readline()
    raise CopyError(5, "", "planned")
Copier.copy_entry = copy_file
signal.signal(signal.SIGINT, signal.SIG_IGN)
"""


def test_cp_leaves_an_interruption_ignored_that_its_starter_ignores(fake: FakeMount) -> None:
    """As shells do for what runs in the background."""
    source = fake.file("source", b"content")
    program = IN_THE_BACKGROUND + CHILD
    words = [sys.executable, "-c", program, fake.entry().device, str(fake.folder), str(source), str(fake.folder)]
    with subprocess.Popen(words, stdin=-1, stdout=-1, stderr=-1, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "it copies\n"
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate("\n", timeout=PATIENCE)
    assert (child.returncode, errors) == (1, "gpufs cp: planned: Input/output error\n")
