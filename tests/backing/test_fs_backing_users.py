"""Directories of the host below backing/, with a user who means harm: others and the mount go on."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.hanging import HangingMount
from support.mounting import GpufsMount, Mounter
from support.processes import NOBODY, as_nobody, errno_of, in_child, run, start_children, wait_children, wait_until

pytestmark = [pytest.mark.driver, pytest.mark.skipif(os.geteuid() != 0, reason="mounts for several users")]

MANY = 150  # more than a user has threads


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
def test_a_hung_server_blocks_no_other_calls(mount: Mounter, host: Path, operation: str) -> None:
    (host / "file").write_bytes(b"still read")
    with HangingMount(operations=[operation]) as hung:
        mounted = mount("--backing", f"hung={hung.path}", "--backing", f"data={host}", allow_other=True)
        shown = mounted.path / "backing"

        def ask(index: int) -> None:
            if operation == "lookup":
                os.stat(shown / "hung" / f"name{index}")
            else:
                os.open(shown / "hung" / "file", os.O_RDONLY)

        with many_threads(ask):
            wait_until(lambda: mounted.gauge("requests_relayed") >= MANY, 60, "all requests")
            (mounted.device / "new").write_bytes(b"x")
            assert as_nobody(lambda: (shown / "data" / "file").read_bytes()) == b"still read"
            assert sorted(os.listdir(shown)) == ["data", "hung"]
            (mounted.device / "new").unlink()
        # Its process is gone although the server has not answered, and nothing uses the mount any more.
        run("umount", mounted.path)
        hung.release()
        mounted.wait_ended()


def under_way(mount: GpufsMount) -> int:
    """Requests that native threads serve, or that wait for one."""
    gauges = mount.stats()["gauges"]
    return int(gauges["requests_running"] + gauges["requests_queued"])


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


@pytest.mark.parametrize(
    "operation", ["read", *(pytest.param(each, marks=pytest.mark.slow) for each in ("write", "fsync", "fallocate"))]
)
def test_a_killed_process_does_not_wait_for_a_server(mount: Mounter, host: Path, operation: str) -> None:
    """There are more of them than threads for one share, and their files are closed behind what hangs; the answers
    that come later are for nobody.
    """
    (host / "file").write_bytes(b"still read")
    with HangingMount(operations=[operation]) as hung:
        mounted = mount("--backing", f"hung={hung.path}", "--backing", f"data={host}", allow_other=True)
        shown = mounted.path / "backing"
        flags = os.O_RDONLY if operation == "read" else os.O_RDWR
        count = 12

        def start(index: int) -> None:
            use(os.open(shown / "hung" / "file", flags), operation)

        children = start_children(count, start)
        try:
            wait_until(lambda: mounted.gauge("backing_open_files") == count, 60, "all openings")
            wait_until(lambda: under_way(mounted) > 0 and hung.waiting() > 0, 60, "a request that hangs")
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
        wait_until(lambda: under_way(mounted) == 0 and hung.waiting() == 0, 60, "late answers")
        wait_until(lambda: mounted.gauge("backing_open_files") == 0, 60, "files to be closed")
        with open(shown / "hung" / "file", "rb", buffering=0) as file:
            assert os.pread(file.fileno(), 5, 1 << 21) == bytes(5)
        assert (mounted.count("replies_lost"), mounted.count("replies_missing")) == (0, 0)
        assert not mounted.complaints()
        mounted.unmount()


def test_a_handled_signal_does_not_end_a_write(mount: Mounter) -> None:
    with HangingMount(operations=["write"]) as hung:
        mounted = mount("--backing", f"hung={hung.path}")

        def write(index: int) -> None:
            signal.signal(signal.SIGUSR1, lambda *_: None)
            libc = ctypes.CDLL(None, use_errno=True)  # os.pwrite() would try again by itself
            file = os.open(mounted.path / "backing" / "hung" / "file", os.O_WRONLY)
            assert libc.pwrite(file, b"x" * 4096, 4096, 0) == 4096, os.strerror(ctypes.get_errno())

        children = start_children(1, write)
        wait_until(lambda: hung.waiting() > 0, 60, "a write that hangs")

        def is_noticed() -> bool:
            os.kill(children[0], signal.SIGUSR1)  # again, because the first may come before write(2)
            time.sleep(0.05)
            return mounted.count("interrupts") > 0

        wait_until(is_noticed, 60, "the signal's notice")
        time.sleep(2.2)  # looks whether the process is being killed come every second
        hung.resume()
        wait_children(children)
        mounted.unmount()


def test_calls_of_one_user_are_bounded(mount: Mounter, host: Path) -> None:
    """Further calls of that user fail with EBUSY at once. Root is not limited."""
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
            assert in_child(lambda: errno_of_soon(name)) == 0  # root waits for the server
            assert (mounted.path / "gpu0").is_dir()
        run("umount", mounted.path)
        hung.release()
        mounted.wait_ended()


def errno_of_soon(path: Path) -> int:
    """What stat(2) fails with at once; 0 where it waits."""
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(errno_of(os.stat, path)), daemon=True)
    thread.start()
    thread.join(0.2)
    return found[0] if found else 0


def test_a_lease_delays_only_openings_of_its_file(mount: Mounter, host: Path) -> None:
    mounted = mount("--backing", f"data={host}", allow_other=True)
    shown = mounted.path / "backing" / "data"
    file = host / "file"
    file.write_bytes(b"leased")
    os.chown(file, NOBODY, NOBODY)
    (host / "other").write_bytes(b"other")
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)  # which asks for the lease
    holder = os.open(file, os.O_RDWR)
    try:
        fcntl.fcntl(holder, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        assert errno_of(os.open, shown / "file", os.O_RDONLY | os.O_NONBLOCK) == errno.EAGAIN
        with many_threads(lambda index: os.open(shown / "file", os.O_WRONLY)):
            wait_until(lambda: mounted.gauge("requests_relayed") >= MANY, 60, "all requests")
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


# ---- symbolic links ----


def test_a_link_that_a_move_makes_lead_out_is_not_followed(mount: Mounter, host: Path) -> None:
    """A link nine levels down leads to the top of the share: moved up it leads out, whoever moves it or a directory."""
    mounted = mount("--backing", f"data={host}", allow_other=True)
    shown, deep = mounted.path / "backing" / "data", "/".join("123456789")
    (host / deep).mkdir(parents=True)
    (host / "top").write_bytes(b"top")
    for name in ("link", "second", "third"):
        os.symlink("../" * 9 + "top", host / deep / name)
        assert (shown / deep / name).read_bytes() == b"top"
    os.rename(shown / deep / "link", shown / "link")
    assert errno_of(os.readlink, shown / "link") == errno_of(os.stat, shown / "link") == errno.ELOOP
    os.rename(shown / "link", shown / deep / "back")
    assert (shown / deep / "back").read_bytes() == b"top"
    os.link(shown / deep / "back", shown / "linked", follow_symlinks=False)
    for path in (shown / deep / "back", shown / "linked"):  # of several names, of which one is higher up
        assert errno_of(os.stat, path) == errno.ELOOP
    os.rename(host / deep / "second", host / "second")
    assert errno_of(os.readlink, shown / "second") == errno.ELOOP
    os.rename(host / "1/2", host / "up")
    assert errno_of(os.stat, shown / "up/3/4/5/6/7/8/9/third") == errno.ELOOP
