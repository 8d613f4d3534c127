"""gpufs.copy() and `gpufs cp` on a real mount: results, failures, progress and interruption."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.copying import raw_connection, socket_path, transfers, wait_for_no_copies
from support.data import MIB, noise
from support.hanging import HangingMount
from support.mounting import GPUFS, GpufsMount, Mounter
from support.processes import PATIENCE, in_child, run, wait_until

from gpufs import client
from gpufs.client import Cancellation, Copier, CopyError, CopyProgress

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a slow server")
BIG = 3 * MIB + 5


def cp(*words: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return run(*GPUFS, "cp", *words, check=False, **options)


# ---- gpufs.copy() ----


def test_the_result_names_the_method_and_the_checksum(root: Path, host: Path) -> None:
    for size, fastpath, method in ((4, "auto", "mount"), (4, "off", "transfer"), (BIG, "auto", "transfer")):
        (host / "source").write_bytes(noise(size))
        result = client.copy(host / "source", root, fastpath=fastpath, verify=True)  # type: ignore[arg-type]
        assert (result.method, result.bytes, sum(result.paths.values())) == (method, size, size)
        assert result.sha256 == hashlib.sha256(noise(size)).hexdigest()
        assert (root / "source").read_bytes() == noise(size)


def test_verification_finds_a_difference(root: Path, host: Path) -> None:
    size = 256 * MIB
    with open(host / "source", "wb") as file:
        file.truncate(size)
    target = root / "target"

    def corrupt(progress: CopyProgress) -> None:
        if progress.phase == "verify":
            with open(target, "r+b") as file:
                file.seek(size - 5)
                file.write(b"wrong")

    def copy_often() -> None:  # a verification may be over before its first report
        for _ in range(20):
            client.copy(host / "source", target, verify=True, fastpath="off", progress=corrupt)

    with pytest.raises(CopyError) as failed:
        copy_often()
    assert failed.value.errno == errno.EIO


def test_a_copy_within_the_host_is_refused(host: Path) -> None:
    for name, content in (("source", noise(BIG)), ("target", b"precious")):
        (host / name).write_bytes(content)
    for name in ("target", "new"):
        with pytest.raises(CopyError) as refused:
            client.copy(host / "source", host / name)
        assert refused.value.errno == errno.EXDEV
    assert (host / "target").read_bytes() == b"precious"
    assert not (host / "new").exists()


@as_root
@pytest.mark.complains
def test_a_failed_copy_keeps_a_partial_file_only_if_asked_to(root: Path) -> None:
    good = 2 * MIB
    with HangingMount(size=16 * MIB, good=good, operations=(), failure=errno.EIO) as server:
        target = root / "target"
        with pytest.raises(CopyError) as failed:
            client.copy(server.file, target)
        assert (failed.value.errno, failed.value.bytes_done, failed.value.bytes_total) == (errno.EIO, 0, 16 * MIB)
        assert not target.exists()
        for existing in (False, True):
            with pytest.raises(CopyError) as failed:
                client.copy(server.file, target, partial=not existing)
            assert failed.value.bytes_done == target.stat().st_size < 16 * MIB


def test_without_its_service_a_mount_is_read_and_written(mount: Mounter, host: Path) -> None:
    own = mount()
    (host / "source").write_bytes(noise(BIG))
    os.unlink(socket_path(own.path))
    with pytest.warns(RuntimeWarning, match="copy service cannot be reached"):
        result = client.copy(host / "source", own.device / "target")
    assert (result.method, result.paths) == ("mount", {"mount": BIG})
    assert (own.device / "target").read_bytes() == noise(BIG)
    with pytest.raises(CopyError):
        client.copy(host / "source", own.device / "target", fastpath="require")


def test_a_refused_connection_is_tried_again_by_the_next_copy(mount: Mounter, host: Path) -> None:
    """A daemon takes a limited number of connections of one user. The notice names the line of the program."""
    own = mount()
    source, target = host / "source", own.device / "target"
    source.write_bytes(noise(BIG))
    notices: list[str] = []
    with ExitStack() as held, Copier(notice=notices.append) as copier:
        for _ in range(256):
            held.enter_context(raw_connection(own.path))
        assert copier.copy_file(str(source), str(target)).method == "mount"
        assert copier.copy_file(str(source), str(target)).method == "mount"
        assert len(notices) == 1
        with pytest.warns(RuntimeWarning, match="too many connections") as warned:
            client.copy(source, target)
        assert [warning.filename for warning in warned] == [__file__]
        held.close()
        wait_until(lambda: transfers(own)["connections"] == 0, 20, "the end of the connections")
        assert copier.copy_file(str(source), str(target)).method == "transfer"
    assert target.read_bytes() == noise(BIG)


@as_root
@pytest.mark.parametrize("error", [OSError, ValueError, KeyboardInterrupt])
def test_an_exception_of_the_progress_callback_ends_the_copy(
    mount: Mounter, slow: HangingMount, error: type[BaseException]
) -> None:
    own = mount("--io-workers", "1", "--io-chunk-bytes", "64K", memory=2048 * MIB)
    target = own.device / "target"
    for existing in (False, True):
        if existing:
            target.write_bytes(b"precious")

        def fail(progress: CopyProgress) -> None:
            if progress.moved:
                raise error(errno.EPIPE, "the window is closed")

        with pytest.raises(CopyError if error is OSError else error) as failed:
            client.copy(slow.file, target, progress=fail)
        assert transfers(own)["running"] == 0
        assert target.exists() == existing
        if isinstance(failed.value, CopyError):
            assert failed.value.errno == errno.EPIPE
            assert failed.value.bytes_done == (target.stat().st_size if existing else 0)


@pytest.mark.parametrize("wrong", [{"cancel": 5}, {"progress": 5}, {"fastpath": "perhaps"}, {"fastpath": []}])
def test_wrong_arguments_are_named_and_change_nothing(root: Path, host: Path, wrong: dict[str, Any]) -> None:
    (host / "source").write_bytes(noise(BIG))
    (root / "target").write_bytes(b"precious")
    with pytest.raises((TypeError, ValueError), match=next(iter(wrong))):
        client.copy(host / "source", root / "target", **wrong)
    cancel = Cancellation()
    cancel.cancel()
    with pytest.raises(CopyError) as cancelled:
        client.copy(host / "source", root / "target", cancel=cancel)
    assert cancelled.value.errno == errno.ECANCELED
    for names in (("", root / "target"), (host / "source", "")):
        with pytest.raises(CopyError) as refused:
            client.copy(*names)
        assert refused.value.errno == errno.ENOENT
    assert (root / "target").read_bytes() == b"precious"


def test_names_may_be_bytes(root: Path, host: Path) -> None:
    source = os.fsencode(host) + b"/caf\xe9"
    with open(source, "wb") as file:
        file.write(noise(MIB))
    for target in (str(root), os.fsencode(root), root):
        assert os.fsencode(client.copy(source, target).destination) == os.fsencode(root) + b"/caf\xe9"


def test_a_forked_child_has_connections_of_its_own(root: Path, host: Path) -> None:
    """Two processes on one connection would receive each other's messages."""
    source = str(host / "source")
    Path(source).write_bytes(noise(BIG))
    with Copier() as copier:
        copier.copy_file(source, str(root / "first"))
        assert in_child(lambda: copier.copy_file(source, str(root / "childs")).bytes) == BIG
        copier.copy_file(source, str(root / "parents"))
    for name in ("first", "childs", "parents"):
        assert (root / name).read_bytes() == noise(BIG)


# ---- gpufs cp ----


def test_the_json_summary_lists_copies_and_errors(root: Path, host: Path) -> None:
    (host / "a").write_bytes(noise(BIG))
    (host / "b").write_bytes(b"small")
    done = cp("--json", "--fastpath", "off", "--progress", host / "a", host / "missing", host / "b", root)
    summary = json.loads(done.stdout)
    assert (done.returncode, summary["files"], summary["bytes"], summary["interrupted"]) == (1, 2, BIG + 5, False)
    assert summary["paths"] == {"fallback": BIG + 5}
    assert {copy["destination"] for copy in summary["copies"]} == {str(root / "a"), str(root / "b")}
    (error,) = summary["errors"]
    assert (error["name"], error["source"]) == ("ENOENT", str(host / "missing"))
    assert str(host / "missing") in done.stderr


def test_gpufs_cp_refuses_what_it_cannot_do(root: Path, host: Path) -> None:
    """Every refusal is one line that names the file, and changes nothing."""
    (host / "folder").mkdir()
    for path, content in ((host / "file", b"1"), (host / "folder/file", b"2"), (root / "there", b"3")):
        path.write_bytes(content)
    (root / "d").mkdir()
    os.mkfifo(host / "fifo")
    file, other, there = host / "file", host / "folder/file", root / "there"
    cases: list[tuple[list[str | Path], Path]] = [
        ([host / "folder", root], host / "folder"),
        ([file, other, root / "no"], root / "no"),
        ([file, other, there], there),
        ([file, host / "x"], file),
        (["-r", host / "folder", host / "x"], host / "folder"),
        ([there, there], there),
        ([file, root / "no/where"], root / "no/where"),
        ([host / "fifo", root], host / "fifo"),
        (["-r", host / "folder", there], there),
        (["-r", root / "d", root / "d/e"], root / "d"),
    ]
    for words, named in cases:
        done = cp(*words)
        assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, "", 1), words
        assert str(named) in done.stderr
    assert {path.name for path in root.iterdir()} == {"d", "there"}
    assert there.read_bytes() == b"3"
    done = cp(file, other, root)  # two sources for one name
    assert (done.returncode, (root / "file").read_bytes()) == (1, b"1")


@pytest.mark.parametrize("words", [["a"], ["-f", "a", "b"], ["-rd", "a", "b"], ["--verifi", "a"]])
def test_other_options_are_wrong_usage(words: list[str]) -> None:
    done = cp(*words)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)


@as_root
@pytest.mark.complains
def test_an_interrupt_that_the_shell_ignores_does_nothing(shared_mount: GpufsMount, root: Path) -> None:
    """Shells start background jobs with SIGINT ignored."""
    with HangingMount(size=16 * MIB, operations=(), good=16 * MIB, delay=0.02) as server:
        words = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", *GPUFS, "cp", str(server.file), str(root / "copy")]
        with subprocess.Popen(words, stderr=subprocess.PIPE) as child:
            wait_until(lambda: transfers(shared_mount)["running"] or child.poll() is not None, 20, "the copy's start")
            child.send_signal(signal.SIGINT)
            child.communicate(timeout=PATIENCE)
        assert child.returncode == 0
        wait_for_no_copies(shared_mount)
        assert (root / "copy").exists()


def test_calls_without_a_thread_fail_as_others_do(root: Path, host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    (host / "tree").mkdir()
    file = host / "tree" / "file"
    file.write_bytes(noise(3 * MIB))
    calls: list[Callable[[], object]] = [
        lambda: client.copy(file, root / "verified", verify=True),
        lambda: client.copy_tree(host / "tree", root / "tree"),
    ]
    for call in calls:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refused)
            with pytest.raises(OSError, match="thread") as failure:
                call()
        assert failure.value.errno == errno.EAGAIN
        call()
    assert (root / "tree/file").read_bytes() == (root / "verified").read_bytes() == noise(3 * MIB)
