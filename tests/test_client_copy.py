"""gpufs.client.copy and `gpufs cp` over a fake engine: a directory of /dev/shm is taken for the mount."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.copying import HOUR, MIB, FakeMount, wait_until
from support.processes import NOBODY, PATIENCE, in_child

from gpufs import client, mounting
from gpufs.cli import run
from gpufs.client import Cancellation, CopyError, CopyProgress, _find
from gpufs.client._outcome import size_text

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


def test_to_the_device_and_back(fake: FakeMount) -> None:
    content = os.urandom(BIG)
    source, target, back = fake.file("source", content), fake.folder / "target", fake.host / "back"
    there = client.copy(source, target)
    home = client.copy(target, back)
    assert target.read_bytes() == back.read_bytes() == content
    for result in (there, home):
        assert (result.bytes, result.method, result.paths) == (BIG, "transfer", {"fallback": BIG})
        assert result.refusals == ("file_system",)
        assert result.sha256 is None
    assert (there.source, there.destination) == (str(source), str(target))


def test_into_a_directory(fake: FakeMount) -> None:
    source = fake.file("source", bytes(BIG))
    assert client.copy(source, fake.folder).destination == str(fake.folder / "source")


def test_small_files_do_not_bother_the_daemon(fake: FakeMount) -> None:
    source = fake.file("source", b"1234")
    result = client.copy(source, fake.folder / "target")
    assert (result.method, result.paths) == ("mount", {"mount": 4})
    assert not fake.backend.requests
    assert client.copy(source, fake.folder / "target", fastpath="off").method == "transfer"


def test_an_empty_file(fake: FakeMount) -> None:
    result = client.copy(fake.file("source", b""), fake.folder / "target")
    assert (result.bytes, result.paths) == (0, {})
    assert (fake.folder / "target").read_bytes() == b""


def test_within_the_mount_by_the_kernel(fake: FakeMount) -> None:
    content = os.urandom(BIG)
    source = fake.file("source", content, fake.folder)
    result = client.copy(source, fake.folder / "target")
    assert (result.method, result.paths) == ("kernel", {"kernel": BIG})
    assert (fake.folder / "target").read_bytes() == content
    assert not fake.backend.requests


def test_within_the_host_is_refused_and_touches_nothing(fake: FakeMount) -> None:
    source, target = fake.file("source", bytes(BIG)), fake.file("target", b"precious")
    with pytest.raises(CopyError, match="use cp") as refused:
        client.copy(source, target)
    assert refused.value.errno == errno.EXDEV
    assert target.read_bytes() == b"precious"
    with pytest.raises(CopyError, match="use cp"):
        client.copy(source, fake.host / "new")
    assert not (fake.host / "new").exists()


def test_an_existing_destination_is_emptied_first(fake: FakeMount) -> None:
    source, target = fake.file("source", b"s" * BIG), fake.file("target", b"t" * 2 * BIG, fake.folder)
    client.copy(source, target)
    assert target.read_bytes() == b"s" * BIG


def test_modes_and_times(fake: FakeMount) -> None:
    source = fake.file("source", bytes(BIG))
    source.chmod(0o640)
    os.utime(source, ns=(10**18, 10**18 + 5))
    client.copy(source, fake.folder / "plain")
    client.copy(source, fake.folder / "kept", preserve=True)
    assert (fake.folder / "plain").stat().st_mode & 0o777 == 0o640
    assert (fake.folder / "plain").stat().st_mtime_ns != 10**18 + 5
    kept = (fake.folder / "kept").stat()
    assert (kept.st_mode & 0o7777, kept.st_mtime_ns, kept.st_uid) == (0o640, 10**18 + 5, os.getuid())


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


def test_fsync_asks_the_engine(fake: FakeMount) -> None:
    source = fake.file("source", bytes(BIG), fake.folder)
    client.copy(source, fake.host / "target", fsync=True)
    assert fake.backend.requests[0]["sync"] == "full"


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


def test_cancel(fake: FakeMount) -> None:
    fake.backend.delay = 0.02
    cancel = Cancellation()
    source = fake.hollow("source", HOUR)
    with fake.once(fake.backend.has_moved, cancel.cancel):
        with pytest.raises(CopyError) as failed:
            client.copy(source, fake.folder / "target", cancel=cancel, partial=True)
    assert failed.value.errno == errno.ECANCELED
    assert (fake.folder / "target").stat().st_size == failed.value.bytes_done > 0


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


def test_a_daemon_that_was_busy_once_is_asked_again(fake: FakeMount, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = fake.file("source", bytes(BIG)), str(fake.folder / "target")
    notices: list[str] = []
    with client.Copier(notice=notices.append) as copier:
        with monkeypatch.context() as patch:

            def busy(*_: object) -> None:
                raise OSError(errno.EBUSY, "too many connections")

            patch.setattr(_find, "connect", busy)
            assert copier.copy_file(str(source), target).method == "mount"
        wait_until(lambda: copier.copy_file(str(source), target).method == "transfer")
    assert len(notices) == 1


def test_an_interruption_of_the_verification_closes_nothing_that_is_read(
    fake: FakeMount, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The destination is read by another thread, which may need a while to notice."""
    source, target = fake.file("source", bytes(BIG)), fake.folder / "target"
    interrupted, checked = threading.Event(), threading.Event()
    read: list[os.stat_result | OSError] = []
    true_preadv = os.preadv

    def preadv(fd: int, *arguments: Any) -> int:
        if threading.current_thread() is not threading.main_thread() and source.exists():
            interrupted.wait(PATIENCE)
            try:
                read.append(os.fstat(fd))
            except OSError as error:
                read.append(error)
            checked.set()
        return true_preadv(fd, *arguments)

    def interrupt(progress: CopyProgress) -> None:
        if progress.phase == "verify":
            raise KeyboardInterrupt

    target.touch()
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", preadv)
        with pytest.raises(KeyboardInterrupt):
            client.copy(source, target, verify=True, progress=interrupt)
        interrupted.set()
        assert checked.wait(PATIENCE)
    (found,) = read
    assert isinstance(found, os.stat_result)
    assert os.path.samestat(found, target.stat())


def test_what_the_daemon_has_no_buffer_for_is_read_and_written(
    fake: FakeMount, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.backend.refuse_start = OSError(errno.EINVAL, "the file on the mount holds no device memory")
    content = os.urandom(BIG)
    result = client.copy(fake.file("source", content), fake.folder / "target")
    assert result.method == "mount"
    assert (fake.folder / "target").read_bytes() == content


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


def test_many_threads_share_a_copier(fake: FakeMount) -> None:
    contents = [os.urandom(MIB // 2 + n) for n in range(24)]
    sources = [fake.file(f"s{n}", content) for n, content in enumerate(contents)]
    with client.Copier() as copier:

        def work(part: int) -> None:
            for n in range(part, len(sources), 4):
                copier.copy_file(str(sources[n]), str(fake.folder / f"t{n}"))

        threads = [threading.Thread(target=work, args=(part,)) for part in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert fake.service.statistics()["accepted"] <= 4
    assert [(fake.folder / f"t{n}").read_bytes() for n in range(24)] == contents


def test_a_connection_that_the_daemon_ended_is_not_used_again(fake: FakeMount) -> None:
    source = fake.file("source", bytes(BIG))
    with client.Copier() as copier:
        copier.copy_file(str(source), str(fake.folder / "one"))
        (connection,) = copier._idle[fake.device]
        connection._sock.send(b"nonsense")
        wait_until(lambda: not connection.usable())
        assert copier.copy_file(str(source), str(fake.folder / "two")).method == "transfer"


def test_who_may_have_descriptors() -> None:
    """A daemon of another user could keep them and write to our files whenever it likes."""
    assert _find._trusted(0)
    assert _find._trusted(os.geteuid())
    assert not _find._trusted(12345)


# ---- gpufs cp ----


def test_cp_starts_without_what_it_does_not_need() -> None:
    program = "import sys; from gpufs.cli import run; run(['cp', '/nonexistent', '/tmp']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    slow = {"rich", "numpy", "cffi", "trio", "pyfuse3", "asyncio", "hashlib", "gpufs.engine", "gpufs.config"}
    assert not slow & set(done.stdout.split())


def test_cp_one_file(fake: FakeMount, cp: Any) -> None:
    content = os.urandom(BIG)
    source = fake.file("source", content)
    assert cp(source, fake.folder / "target") == (0, "", "")
    assert (fake.folder / "target").read_bytes() == content
    assert cp(source, fake.folder) == (0, "", "")
    assert (fake.folder / "source").read_bytes() == content


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


def test_cp_recursive(fake: FakeMount, cp: Any) -> None:
    tree = fake.host / "tree"
    (tree / "deep" / "er").mkdir(parents=True)
    (tree / "empty").mkdir()
    for n in range(20):
        fake.file(f"f{n}", os.urandom(n * 50_000), tree if n % 2 else tree / "deep" / "er")
    (tree / "link").symlink_to("deep/er/f2")
    (tree / "nowhere").symlink_to("/does/not/exist")
    (tree / "deep" / "er").chmod(0o550)
    assert cp("-r", "-j", "3", tree, fake.folder / "copy") == (0, "", "")
    assert shutil.which("diff")
    subprocess.run(["diff", "-r", "--no-dereference", tree, fake.folder / "copy"], check=True)
    assert (fake.folder / "copy" / "deep" / "er").stat().st_mode & 0o777 == 0o550
    # Once more: now the directory exists, so the copy goes below it; and back to the host.
    assert cp("-rp", tree, fake.folder / "copy") == (0, "", "")
    assert cp("-rp", f"{fake.folder}/copy/tree/", fake.host / "back") == (0, "", "")
    subprocess.run(["diff", "-r", "--no-dereference", tree, fake.host / "back"], check=True)
    for name in ("deep", "deep/er", "deep/er/f2", "f3"):
        ours, theirs = (fake.host / "back" / name).stat(), (tree / name).stat()
        assert (ours.st_mode, ours.st_mtime_ns) == (theirs.st_mode, theirs.st_mtime_ns)
    for folder in (tree, fake.folder / "copy", fake.folder / "copy" / "tree", fake.host / "back"):
        (folder / "deep" / "er").chmod(0o755)


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
    """With what to do instead."""
    code, output, errors = cp(*words)
    assert (code, output) == (2, "")
    assert errors.startswith("gpufs: there is no option -")
    assert "from backing/ of a mount it is as fast" in errors
    assert ("--verify" in errors) == ("--verifi" in words)


def test_cp_no_clobber_and_verbose(fake: FakeMount, cp: Any) -> None:
    source, target = fake.file("source", bytes(BIG)), fake.file("target", b"precious", fake.folder)
    assert cp("-n", source, target) == (0, "", "")
    assert target.read_bytes() == b"precious"
    code, output, _ = cp("-v", source, target)
    assert code == 0
    assert output.startswith(f"{source} -> {target}: {size_text(BIG)}, ")
    assert output.endswith(f"/s (fallback {size_text(BIG)})\n")
    code, output, errors = cp("-v", "--json", source, target)
    assert (code, json.loads(output)["bytes"]) == (0, BIG)  # JSON stands alone
    assert errors.startswith(f"{source} -> {target}: ")


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


@pytest.mark.parametrize("to_device", [True, False])
def test_cp_interrupted(fake: FakeMount, to_device: bool) -> None:
    """Ctrl-C: it ends soon, by the signal, and --partial keeps what was copied."""
    fake.backend.delay = 0.02
    fake.backend.sparse_tail = True
    size = HOUR
    source = fake.hollow("source", size, None if to_device else fake.folder)
    target = (fake.folder if to_device else fake.host) / "target"
    words = [sys.executable, "-c", CHILD, fake.entry().device, str(fake.folder), "--json", "--partial"]
    words += [str(source), str(target)]
    child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_until(fake.backend.has_moved)
    child.send_signal(signal.SIGINT)
    output, errors = child.communicate(timeout=PATIENCE)
    assert child.returncode == -signal.SIGINT
    summary = json.loads(output)
    assert summary["interrupted"]
    (error,) = summary["errors"]
    done = error["bytes_done"]
    assert 0 < done < size
    assert target.stat().st_size == done
    assert errors == f"gpufs cp: {source} -> {target}: interrupted: {done} of {size} bytes are kept\n"
    wait_until(fake.quiet)


def test_cp_ignores_nothing_of_an_interrupt_between_files(fake: FakeMount) -> None:
    """With many files under way and queued the command still ends."""
    fake.backend.delay = 0.02
    tree = fake.host / "tree"
    tree.mkdir()
    for n in range(50):
        fake.hollow(f"f{n}", HOUR, tree)
    words = [sys.executable, "-c", CHILD, fake.entry().device, str(fake.folder), "-r", str(tree), str(fake.folder)]
    child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: len(fake.backend.requests) >= 2)
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=PATIENCE)
    assert child.returncode == -signal.SIGTERM
    assert len(list((fake.folder / "tree").iterdir())) < 50
    wait_until(fake.quiet)


def test_a_destination_that_may_be_written_but_not_read(fake: FakeMount) -> None:
    source, target = fake.file("source", bytes(BIG), fake.folder), fake.file("target", b"old")
    target.chmod(0o222)

    def store() -> str:
        with client.Copier() as copier:
            return copier.copy_file(str(source), str(target), progress=None).method

    # The service is the test's own user's: root's daemon, so that nobody may use it.
    os.chmod(fake.socket, 0o666)
    assert in_child(store, uid=NOBODY, gid=NOBODY) == "transfer"
    assert target.read_bytes() == bytes(BIG)


HUNG = """
import os, sys, time
from gpufs.cli import _copying
from gpufs.client import Copier
class Clock:
    monotonic = time.monotonic
    def sleep(seconds):
        os.write(1, b"its queue is full\\n")
        time.sleep(seconds)
def hang(*arguments, **named):
    os.write(1, b"a copy hangs\\n")
    time.sleep(3600)
Copier.copy_entry = hang
_copying.time, _copying._QUEUED_FILES, _copying._INTERRUPT_SECONDS = Clock, 1, 0.1
"""


def test_cp_ends_where_files_hang_and_more_are_queued_than_it_remembers(fake: FakeMount) -> None:
    tree = fake.host / "tree"
    tree.mkdir()
    for n in range(20):
        (tree / f"f{n}").touch()
    program = HUNG + CHILD
    words = [sys.executable, "-c", program, fake.entry().device, str(fake.folder), "-r", str(tree), str(fake.folder)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        expected = {"a copy hangs\n", "its queue is full\n"}  # in either order; a copy that has not begun never does
        while expected and (line := child.stdout.readline()):
            expected.discard(line)
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=PATIENCE)
    assert child.returncode == -signal.SIGINT
    assert errors == "gpufs cp: a copy does not end: its file system does not answer\n"


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


def test_cp_makes_do_with_the_threads_that_it_gets(fake: FakeMount, cp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (fake.host / "tree").mkdir()
    for n in range(5):
        fake.file(f"tree/file{n}", b"content")
    start, left = threading.Thread.start, [1]

    def scarce(thread: threading.Thread) -> None:
        if not left:
            raise RuntimeError("can't start new thread")
        left.pop()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", scarce)
    words = ["-r", "-j", "4", fake.host / "tree", fake.folder / "tree"]
    assert cp(*words) == (0, "", "")
    assert sorted(os.listdir(fake.folder / "tree")) == [f"file{n}" for n in range(5)]
    code, _, errors = cp(*words)
    assert (code, errors) == (1, "gpufs: cp: no thread can be started (ulimit -u)\n")
