"""Directories of the host below backing/, with a user who means harm: others and the mount go on."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import json
import os
import signal
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.hanging import HangingMount
from support.mounting import Mounter
from support.processes import NOBODY, as_nobody, errno_of, run, start_children, wait_children, wait_until

pytestmark = [pytest.mark.driver, pytest.mark.skipif(os.geteuid() != 0, reason="mounts for several users")]

MANY = 150  # more than pyfuse3 serves at a time by itself


@pytest.fixture
def there() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="gpufs-client-", dir="/var/tmp") as name:
        os.chmod(name, 0o777)
        yield Path(name)


@contextlib.contextmanager
def many_threads(action: Callable[[int], object]) -> Iterator[int]:
    """A process of nobody whose MANY threads call action(index) and wait in it; killed at the end, if not before."""
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            for index in range(MANY):
                threading.Thread(target=action, args=(index,), daemon=True).start()
            signal.pause()
        finally:
            os._exit(1)
    try:
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        wait_until(lambda: gone(child), 60, "the end of a killed process")


def gone(child: int) -> bool:
    try:
        return os.waitpid(child, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return True


@pytest.mark.parametrize("operation", ["lookup", "open"])
def test_a_server_that_hangs_stops_nobody_else(mount: Mounter, there: Path, operation: str) -> None:
    (there / "file").write_bytes(b"still read")
    with HangingMount(operations=[operation]) as hung:
        mounted = mount("--backing", f"hung={hung.path}", "--backing", f"data={there}", allow_other=True)
        shown = mounted.path / "backing"

        def ask(index: int) -> None:
            if operation == "lookup":
                os.stat(shown / "hung" / f"name{index}")
            else:
                os.open(shown / "hung" / "file", os.O_RDONLY)

        with many_threads(ask):
            wait_until(lambda: status_pending(mounted.path) >= MANY, 60, "all requests")
            (mounted.device / "new").write_bytes(b"x")
            assert as_nobody(lambda: (shown / "data" / "file").read_bytes()) == b"still read"
            assert sorted(os.listdir(shown)) == ["data", "hung"]
            (mounted.device / "new").unlink()
        # Its process is gone although the server has not answered, and nothing uses the mount any more.
        run("umount", mounted.path)
        hung.release()
        mounted.wait_ended()


def status_pending(path: Path) -> int:
    pending: int = json.loads((path / ".gpufs" / "status").read_text())["statistics"]["control_plane"]["pending"]
    return pending


def statistics_of(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / ".gpufs" / "status").read_text())["statistics"]
    return found


def under_way(path: Path) -> int:
    """Requests that native threads serve, or that wait for one."""
    pool = statistics_of(path)["pool"]
    return int(pool["running"] + pool["queued"])


def use(file: int, operation: str) -> None:
    match operation:
        case "read":
            os.pread(file, 4096, 1 << 20)
        case "write":
            os.pwrite(file, b"x" * 4096, 1 << 20)
        case "fsync":
            os.fsync(file)
        case _:
            os.posix_fallocate(file, 1 << 20, 4096)


@pytest.mark.parametrize("operation", ["read", "write", "fsync", "fallocate"])
def test_a_killed_process_waits_for_no_server(mount: Mounter, there: Path, operation: str) -> None:
    """There are more of them than threads for one share, and their files are closed behind what hangs; the answers
    that come later are for nobody.
    """
    (there / "file").write_bytes(b"still read")
    with HangingMount(operations=[operation]) as hung:
        mounted = mount("--backing", f"hung={hung.path}", "--backing", f"data={there}", allow_other=True)
        shown = mounted.path / "backing"
        flags = os.O_RDONLY if operation == "read" else os.O_RDWR
        count = 12

        def start(index: int) -> None:
            use(os.open(shown / "hung" / "file", flags), operation)

        children = start_children(count, start)
        try:
            wait_until(lambda: statistics_of(mounted.path)["backing"]["open_files"] == count, 60, "all openings")
            wait_until(lambda: under_way(mounted.path) > 0 and hung.waiting() > 0, 60, "a request that hangs")
            for child in children:
                os.kill(child, signal.SIGKILL)
            for child in children:
                wait_until(functools.partial(gone, child), 60, "the end of a killed process")
            assert hung.waiting() > 0
            assert (shown / "data" / "file").read_bytes() == b"still read"
            (mounted.device / "new").write_bytes(b"x")
            (mounted.device / "new").unlink()
        finally:
            hung.resume()
        wait_until(lambda: under_way(mounted.path) == 0 and hung.waiting() == 0, 60, "late answers")
        wait_until(lambda: statistics_of(mounted.path)["backing"]["open_files"] == 0, 60, "files to be closed")
        with open(shown / "hung" / "file", "rb", buffering=0) as file:
            assert os.pread(file.fileno(), 5, 1 << 21) == bytes(5)
        replies = statistics_of(mounted.path)["replies"]
        assert (replies["lost"], replies["unanswered"]) == (0, 0)
        assert not mounted.complaints()
        mounted.unmount()


def test_a_process_that_ends_by_itself_waits_for_no_server(mount: Mounter) -> None:
    """The kernel closes its files then, which asks the server, where more reads wait than threads serve one share."""
    with HangingMount(operations=["read"]) as hung:
        mounted = mount("--backing", f"hung={hung.path}")
        shown = mounted.path / "backing" / "hung" / "file"

        def end_when_told(index: int) -> None:
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
            os.open(shown, os.O_RDWR)
            signal.sigwait([signal.SIGUSR1])

        (ends,) = start_children(1, end_when_told)
        wait_until(lambda: statistics_of(mounted.path)["backing"]["open_files"] == 1, 60, "the opening")
        readers = start_children(12, lambda _: use(os.open(shown, os.O_RDONLY), "read"))
        try:
            wait_until(lambda: statistics_of(mounted.path)["pool"]["queued"] > 0, 60, "reads that wait for a thread")
            os.kill(ends, signal.SIGUSR1)
            wait_until(lambda: gone(ends), 60, "the end of a process that ends by itself")
            assert hung.waiting() > 0
        finally:
            hung.resume()
        wait_children(readers)
        mounted.unmount()


def test_a_signal_that_is_handled_ends_no_call_on_bytes(mount: Mounter) -> None:
    with HangingMount(operations=["write"]) as hung:
        mounted = mount("--backing", f"hung={hung.path}")

        def write(index: int) -> None:
            signal.signal(signal.SIGUSR1, lambda *_: None)
            libc = ctypes.CDLL(None, use_errno=True)  # os.pwrite() would try again by itself
            file = os.open(mounted.path / "backing" / "hung" / "file", os.O_WRONLY)
            assert libc.pwrite(file, b"x" * 4096, 4096, 0) == 4096, os.strerror(ctypes.get_errno())

        children = start_children(1, write)
        wait_until(lambda: hung.waiting() > 0, 60, "a write that hangs")
        os.kill(children[0], signal.SIGUSR1)
        wait_until(lambda: statistics_of(mounted.path)["interrupts"]["received"] > 0, 60, "the signal's notice")
        time.sleep(3)  # looks whether the process is being killed come every second
        hung.resume()
        wait_children(children)
        mounted.unmount()


def test_calls_of_one_user_are_bounded(mount: Mounter, there: Path) -> None:
    """Beyond some number they fail at once: that user alone sees it."""
    with HangingMount(operations=["lookup"]) as hung:
        mounted = mount("--backing", f"hung={hung.path}", allow_other=True)

        def ask(index: int) -> None:
            with contextlib.ExitStack() as stack:
                for more in range(12):
                    thread = threading.Thread(
                        target=errno_of, args=(os.stat, mounted.path / "backing" / "hung" / f"{index}-{more}")
                    )
                    thread.start()
                    stack.callback(thread.join)

        with many_threads(ask):
            name = mounted.path / "backing" / "hung" / "one-more"

            def refused() -> bool:
                return bool(as_nobody(lambda: errno_of_soon(name)) == errno.EBUSY)

            wait_until(refused, 120, "the bound")
            assert (mounted.path / "gpu0").is_dir()
        run("umount", mounted.path)
        hung.release()
        mounted.wait_ended()


def errno_of_soon(path: Path) -> int:
    """What stat(2) fails with at once; 0 where it waits."""
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(errno_of(os.stat, path)), daemon=True)
    thread.start()
    thread.join(1)
    return found[0] if found else 0


def test_a_lease_delays_those_alone_who_open_its_file(mount: Mounter, there: Path) -> None:
    mounted = mount("--backing", f"data={there}", allow_other=True)
    shown = mounted.path / "backing" / "data"
    file = there / "file"
    file.write_bytes(b"leased")
    os.chown(file, NOBODY, NOBODY)
    (there / "other").write_bytes(b"other")
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)  # which asks for the lease
    holder = os.open(file, os.O_RDWR)
    try:
        fcntl.fcntl(holder, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        assert errno_of(os.open, shown / "file", os.O_RDONLY | os.O_NONBLOCK) == errno.EAGAIN
        with many_threads(lambda index: os.open(shown / "file", os.O_WRONLY)):
            wait_until(lambda: status_pending(mounted.path) >= MANY, 60, "all requests")
            assert as_nobody(lambda: (shown / "other").read_bytes()) == b"other"
            (shown / "new").write_bytes(b"in the same directory")
        opened: list[int] = []
        opener = threading.Thread(target=lambda: opened.append(os.open(shown / "file", os.O_RDONLY)))
        opener.start()
        fcntl.fcntl(holder, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    finally:
        os.close(holder)
        signal.signal(signal.SIGIO, before)
    opener.join(60)
    assert os.read(opened[0], 100) == b"leased"
    assert not fcntl.fcntl(opened[0], fcntl.F_GETFL) & os.O_NONBLOCK
    os.close(opened[0])


def test_a_fifo_that_takes_the_place_of_a_missing_file(mount: Mounter, there: Path) -> None:
    """Opened with O_CREAT it is the kernel's own FIFO, as anywhere, and holds up nobody but its client."""
    mounted = mount("--backing", f"data={there}", "--entry-timeout", "60", allow_other=True)
    shown = mounted.path / "backing" / "data"
    assert errno_of(os.stat, shown / "name") == errno.ENOENT  # which the kernel keeps
    os.mkfifo(there / "name")
    assert errno_of(os.open, shown / "name", os.O_CREAT | os.O_WRONLY | os.O_NONBLOCK) == errno.ENXIO
    assert errno_of(os.stat, shown / "second") == errno.ENOENT
    os.mkfifo(there / "second", 0o666)
    os.chmod(there / "second", 0o666)
    with many_threads(lambda index: os.open(shown / "second", os.O_CREAT | os.O_WRONLY)):
        wait_until(lambda: errno_of(os.lstat, shown / "second") == 0, 60, "the kernel to find the FIFO")
        assert stat.S_ISFIFO(os.lstat(shown / "second").st_mode)
        (shown / "new").write_bytes(b"x")
    mounted.unmount()


# ---- symbolic links ----


@pytest.fixture
def linked(mount: Mounter, there: Path) -> tuple[Path, Path]:
    """A share as the mount shows it and as it is, with a link nine levels down that leads to its top."""
    mounted = mount("--backing", f"data={there}", allow_other=True)
    deep = there / "/".join("123456789")
    deep.mkdir(parents=True)
    (there / "top").write_bytes(b"top")
    os.symlink("../" * 9 + "top", deep / "link")
    shown = mounted.path / "backing" / "data"
    assert (shown / "1/2/3/4/5/6/7/8/9/link").read_bytes() == b"top"
    return shown, there


def test_a_link_that_was_moved_up_leads_out(linked: tuple[Path, Path]) -> None:
    shown, _ = linked
    os.rename(shown / "1/2/3/4/5/6/7/8/9/link", shown / "link")
    assert errno_of(os.readlink, shown / "link") == errno.ELOOP
    assert errno_of(os.stat, shown / "link") == errno.ELOOP
    os.rename(shown / "link", shown / "1/2/3/4/5/6/7/8/9/back")
    assert (shown / "1/2/3/4/5/6/7/8/9/back").read_bytes() == b"top"


def run_exchange(one: Path, other: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.renameat2(-100, os.fsencode(one), -100, os.fsencode(other), 2) == 0, os.strerror(ctypes.get_errno())


def test_a_link_that_was_moved_on_the_host_leads_out(linked: tuple[Path, Path]) -> None:
    shown, there = linked
    os.rename(there / "1/2/3/4/5/6/7/8/9/link", there / "link")
    assert errno_of(os.readlink, shown / "link") == errno.ELOOP
    os.symlink("../" * 9 + "top", there / "1/2/3/4/5/6/7/8/9/second")
    assert (shown / "1/2/3/4/5/6/7/8/9/second").read_bytes() == b"top"
    os.rename(there / "1/2", there / "up")
    assert errno_of(os.stat, shown / "up/3/4/5/6/7/8/9/second") == errno.ELOOP


def test_a_link_of_several_names_that_leads_up_is_not_followed(linked: tuple[Path, Path]) -> None:
    shown, _ = linked
    deep = "1/2/3/4/5/6/7/8/9/link"
    os.link(shown / deep, shown / "second", follow_symlinks=False)
    for name in (deep, "second"):
        assert errno_of(os.stat, shown / name) == errno.ELOOP
