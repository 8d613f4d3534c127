"""How a mount ends: cleanly, busy, by force, and when its daemon is killed. Nothing hangs, nothing is left."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import random
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from errno import ECONNABORTED, EIO, ENODEV, ENOTCONN
from pathlib import Path

import pytest
from support import linux
from support.copying import socket_path
from support.data import GRANULE, KIB, MIB, noise
from support.mounting import GPUFS, GpufsMount, Mounter
from support.processes import (
    PATIENCE,
    SESSION_VARIABLE,
    ChildKilled,
    Snapshot,
    errno_of,
    in_child,
    links_of,
    run,
    session_processes,
    wait_until,
)

pytestmark = [pytest.mark.driver]
LOST = {ENOTCONN, EIO, ECONNABORTED, ENODEV}


# ---- the daemon dies ----


def test_the_daemon_is_killed_under_a_mapping(mount: Mounter) -> None:
    mounted = mount(memory=256 * MIB)
    (mounted.device / "file").write_bytes(noise(20 * MIB))
    fd = os.open(mounted.device / "file", os.O_RDWR)

    def touch() -> None:
        with mmap.mmap(fd, 20 * MIB) as area:
            mounted.signal(signal.SIGKILL)
            for page in range(0, 20 * MIB, mmap.PAGESIZE):
                area[page]

    with pytest.raises(ChildKilled) as caught:
        in_child(touch)
    assert caught.value.number == signal.SIGBUS
    mounted.daemon.wait(PATIENCE)
    assert errno_of(os.pread, fd, 1, 0) in LOST
    assert errno_of(os.fsync, fd) in LOST | {0}
    assert errno_of(os.close, fd) in LOST | {0}


def test_the_directory_of_the_socket(mount: Mounter) -> None:
    """It goes with the mount, and what a killed daemon has left with the start of another one."""
    mounted = mount()
    folder = Path(socket_path(mounted.path)).parent
    assert os.listdir(folder) == ["socket"]
    held = os.open(folder, os.O_PATH)  # no other file gets its inode number
    mounted.unmount()
    with contextlib.suppress(FileNotFoundError):  # another mount may have got the device number, and with it the name
        assert not os.path.samestat(folder.stat(), os.fstat(held)), "left behind"
    os.close(held)
    dead = mount("--no-auto-unmount", "--no-survive")
    folder = Path(socket_path(dead.path)).parent
    dead.signal(signal.SIGKILL)
    dead.daemon.wait(PATIENCE)
    mount()
    assert os.listdir(folder) == ["socket"]  # another daemon may just be about to take over
    for counters in folder.parent.glob(f"*-{folder.name}.stats"):
        counters.unlink()
    os.utime(folder, (0, 0))
    mount()
    assert not folder.exists()


# ---- the daemon hangs ----


def test_clients_of_a_stopped_daemon_wait_and_can_be_killed(mount: Mounter) -> None:
    """Clients continue when the daemon continues; killed ones end at once."""
    mounted = mount(memory=1 << 30)
    (mounted.device / "file").write_bytes(noise(8 * MIB))
    mounted.signal(signal.SIGSTOP)
    try:
        reader = subprocess.Popen(["cksum", str(mounted.device / "file")], stdout=subprocess.PIPE)
        victim = subprocess.Popen(["cksum", str(mounted.device / "file")], stdout=subprocess.PIPE)
        time.sleep(0.3)
        assert reader.poll() is None
        victim.kill()
        assert victim.wait(PATIENCE) == -signal.SIGKILL
    finally:
        mounted.signal(signal.SIGCONT)
    assert victim.stdout is not None
    victim.stdout.close()
    text, _ = reader.communicate(timeout=PATIENCE)
    expected = run("cksum", mounted.device / "file").stdout
    assert text.decode() == expected
    mounted.unmount()


# ---- clients that are interrupted ----


def test_frequent_signals_do_not_disturb_reads_and_writes(mount: Mounter) -> None:
    """A process that handles a signal every millisecond still reads and writes correct data."""
    mounted = mount(memory=1 << 30)

    def work() -> int:
        hits = 0

        def count(*_: object) -> None:
            nonlocal hits
            hits += 1

        signal.signal(signal.SIGALRM, count)
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        number = 0
        while number < 8 or hits < 200:
            data = noise(3 * MIB + number, number)
            path = mounted.device / f"file{number % 3}"
            path.write_bytes(data)
            assert path.read_bytes() == data
            number += 1
        signal.setitimer(signal.ITIMER_REAL, 0)
        return hits

    assert in_child(work) > 100
    mounted.unmount()


def test_calls_and_faults_that_wait_for_others_go_on_after_a_signal(mount: Mounter) -> None:
    """Another thread changes the memory of the file all the time. As on tmpfs no signal shows: no EINTR, no SIGBUS."""
    mounted = mount(memory=64 * MIB)
    size = 32 * MIB

    def work() -> set[tuple[str, int]]:
        libc = ctypes.CDLL(None, use_errno=True)
        for function in (libc.pread, libc.pwrite):
            function.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64)
            function.restype = ctypes.c_ssize_t
        fd = os.open(mounted.device / "file", os.O_RDWR | os.O_CREAT)
        os.ftruncate(fd, size)
        end = threading.Event()

        def change() -> None:
            while not end.is_set():
                linux.fallocate(fd, linux.FALLOC_PUNCH_HOLE | linux.FALLOC_KEEP_SIZE, 0, size)
                linux.fallocate(fd, 0, 0, size)
                linux.fallocate(fd, linux.FALLOC_PUNCH_HOLE | linux.FALLOC_KEEP_SIZE, 0, size)
                time.sleep(0.002)

        others = [threading.Thread(target=change) for _ in range(2)]
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})  # for those threads
        for other in others:
            other.start()
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.siginterrupt(signal.SIGALRM, False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        found = set()
        chance = random.Random(1)
        zeros = os.open("/dev/zero", os.O_RDONLY)
        memory = ctypes.create_string_buffer(64 * KIB)
        area = mmap.mmap(fd, size)
        start = ctypes.addressof(ctypes.c_char.from_buffer(area))
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            at = chance.randrange(size // GRANULE) * GRANULE
            if libc.pread(zeros, start + at, 64, 0) < 0:  # EFAULT instead of SIGBUS
                found.add(("touch", ctypes.get_errno()))
            if libc.pwrite(fd, memory, len(memory), at) < 0:
                found.add(("write", ctypes.get_errno()))
            if libc.pread(fd, memory, len(memory), at) < 0:
                found.add(("read", ctypes.get_errno()))
        signal.setitimer(signal.ITIMER_REAL, 0)
        end.set()
        for other in others:
            other.join()
        return found

    assert in_child(work) == set()
    mounted.unmount()


# ---- nothing is left ----


def work_on(mounted: GpufsMount, round_: int) -> None:
    """A bit of everything, all of it removed again."""
    base = mounted.device / f"round{round_}"
    base.mkdir()
    for number in range(5):
        (base / f"small{number}").write_bytes(noise(1000, number))
    (base / "large").write_bytes(noise(5 * MIB, round_))
    os.link(base / "large", base / "hard")
    os.symlink("large", base / "soft")
    os.setxattr(base / "large", "user.x", b"y")
    with open(base / "large", "r+b") as file, mmap.mmap(file.fileno(), 0) as area:
        area[MIB] = 7
        area.flush()
        os.unlink(base / "hard")
    run("cp", base / "large", base / "copy")
    assert (base / "copy").stat().st_size == 5 * MIB
    os.rename(base / "copy", base / "small0")
    run("rm", "-r", base)


def test_a_mount_holds_no_more_after_work_than_before(mount: Mounter, driver: str) -> None:
    mounted = mount(memory=256 * MIB)
    for round_ in range(5):
        work_on(mounted, round_)
    empty = os.statvfs(mounted.device)
    wait_until(lambda: Snapshot.of(mounted.pid).memfds <= 2, 10, "the memory files of removed files to be closed")
    before = Snapshot.of(mounted.pid)
    for round_ in range(15):
        work_on(mounted, round_)
    # Pools start their threads as they are needed, four readers and four workers at most; a leak would be one a round.
    wait_until(
        lambda: (
            (now := Snapshot.of(mounted.pid)).memfds <= 2
            and now.descriptors <= before.descriptors + 4
            and now.threads <= before.threads + 8
        ),
        40,
        f"descriptors and, after ten idle seconds, threads to go: {before.kinds} -> {Snapshot.of(mounted.pid).kinds}",
    )
    after = Snapshot.of(mounted.pid)
    assert after.resident_bytes <= before.resident_bytes + 12 * MIB, (before, after)

    def given_back() -> bool:  # which runs behind the last close
        free = os.statvfs(mounted.device)
        return (
            free.f_bfree == free.f_blocks
            if driver == "host"
            else free.f_bfree + 64 * MIB // free.f_frsize > empty.f_bfree
        )

    # A GPU's own runtime takes some of its memory, and more of it with its first use.
    wait_until(given_back, 10, "the memory of removed files to come back")
    mounted.unmount()


def test_a_daemon_holds_nothing_of_its_starter(mount: Mounter, tmp_path: Path) -> None:
    """Neither the daemon nor its guard inherits descriptors of the shell that mounted."""
    with open(tmp_path / "held", "w") as held:
        os.set_inheritable(held.fileno(), True)
        mountpoint = tmp_path / "mnt"
        mountpoint.mkdir()
        run(*GPUFS, "mount", mountpoint, "--driver", "host", "--memory", "64M", close_fds=False)
        try:
            pids = [p for p, line in session_processes(os.environ[SESSION_VARIABLE]).items() if str(mountpoint) in line]
            assert len(pids) == 2  # the daemon and its guard
            links = [link for pid in pids for link in links_of(pid).values()]
            assert not [link for link in links if str(tmp_path) in link]
        finally:
            run(*GPUFS, "umount", mountpoint)


@pytest.mark.slow
def test_mounts_that_come_and_go_leave_each_other_alone(mount: Mounter) -> None:
    """The kernel gives the numbers of a mount that has gone to the next one, which was unmounted in its place."""

    def come_and_go(_: int) -> None:
        for _ in range(50):
            mounted = mount(memory=64 * MIB)
            mounted.signal(signal.SIGTERM)
            mounted.wait_ended()

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(come_and_go, range(6)))
