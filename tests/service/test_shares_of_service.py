"""What one plain user can take of the control plane and the daemon's service: the others go on working."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.attaching import Attacker, leases
from support.bystanders import assert_unharmed
from support.cli import gpufs
from support.copying import socket_path
from support.data import MIB, noise
from support.hanging import HangingMount
from support.mounting import GpufsMount, Mounter
from support.processes import NOBODY, OTHER, as_nobody, errno_of, in_child, wait_until

from gpufs import protocol

pytestmark = [pytest.mark.skipif(os.geteuid() != 0, reason="acts as several users, which takes root")]
Ready = Callable[[], None]


def threads_and_descriptors(mounted: GpufsMount) -> tuple[int, int]:
    """How many the daemon has, without the threads of the engine."""
    process = Path(f"/proc/{mounted.pid}")
    names = []
    for thread in (process / "task").iterdir():
        with contextlib.suppress(OSError):
            names.append((thread / "comm").read_text())
    return sum(not name.startswith("gpufs-") for name in names), len(os.listdir(process / "fd"))


def connected(mounted: GpufsMount) -> Attacker:
    client = Attacker(socket_path(mounted.path))
    assert client.greet()
    return client


def touch_until_refused(folder: Path) -> int:
    """Creates files until that fails; the errno."""
    for number in itertools.count():
        if code := errno_of((folder / str(number)).touch):
            return code
    raise AssertionError


def test_closes_that_hang_are_few(own: Mounter) -> None:
    mounted = own()
    threads, descriptors = threads_and_descriptors(mounted)

    with HangingMount(operations=("flush",)) as hanging:

        def attack(ready: Ready) -> None:
            if os.fork():
                return  # the end of a process that has the file open hangs, too: nobody waits for that one
            fd = os.open(hanging.file, os.O_RDONLY)
            messages: list[protocol.ClientMessage] = [
                protocol.Register(1, "file", 0, 4096),
                protocol.Copy(1, "load"),
                protocol.Attach(1, "r"),
            ]
            left = time.monotonic() + 5
            for message in itertools.cycle(messages):  # each on a new connection, for as long as they are read
                client = connected(mounted)
                client.sock.settimeout(0.5)
                try:
                    for _ in range(200):
                        client.ask(message, [fd] * (1 if isinstance(message, protocol.Attach) else 2))
                except TimeoutError:
                    break
                except ConnectionError:
                    pass
                if time.monotonic() > left:
                    break
            ready()
            signal.pause()

        assert_unharmed(mounted, attack)
        now_threads, now_descriptors = threads_and_descriptors(mounted)
        assert now_threads < threads + 50
        assert now_descriptors < descriptors + 3000
    wait_until(lambda: threads_and_descriptors(mounted)[1] < descriptors + 10, 10, "the descriptors to be closed")


def test_pieces_of_memory_whose_close_hangs(own: Mounter) -> None:
    """A file of a server that does not answer comes as a piece of memory: it is refused, and delays no unmount."""
    mounted = own()
    answered = mounted.path.with_name("answered")
    descriptors = threads_and_descriptors(mounted)[1]
    with HangingMount(operations=("flush",)) as hanging:
        child = os.fork()
        if not child:  # its end hangs, too
            with contextlib.suppress(OSError):
                piece = os.open(hanging.file, os.O_RDONLY)
                file = os.open(mounted.device / "file", os.O_WRONLY | os.O_CREAT)
                for number in range(4):
                    client = connected(mounted)
                    client.sock.settimeout(2)
                    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                    protocol.send_pieces(ours, 0, [(piece, 2 * MIB)] * 250)
                    ours.close()
                    request = protocol.Register(1, "descriptor", 0, 2 * MIB)
                    with contextlib.suppress(TimeoutError):
                        error = client.ask(request, [file, theirs.fileno()])[0]["error"]
                        if not number:
                            answered.write_text(str(error))
            answered.with_suffix(".all").touch()
            signal.pause()
        try:
            wait_until(answered.with_suffix(".all").exists, 30, "the requests")
            assert answered.read_text() == str(errno.EINVAL)
            assert threads_and_descriptors(mounted)[1] < descriptors + 2 * 250
            began = time.monotonic()
            done = gpufs("umount", "--force", mounted.path, check=False)
            assert (done.returncode, mounted.mounted()) == (0, False), done.stderr
            assert time.monotonic() - began < 20
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_forced_unmount_does_not_wait_for_closes_that_hang(own: Mounter) -> None:
    """The kernel cannot end a thread that waits for the answer of another file system."""
    mounted = own()
    asked = mounted.path.with_name("asked")
    with HangingMount(operations=("flush",)) as hanging:
        child = os.fork()
        if not child:  # its end hangs, too
            fd = os.open(hanging.file, os.O_RDONLY)
            client = connected(mounted)
            client.sock.settimeout(1)
            with contextlib.suppress(OSError):
                for number in range(8):
                    client.ask(protocol.Register(number, "file", 0, 4096), [fd, fd])
            asked.touch()
            signal.pause()
        try:
            wait_until(asked.exists, 10, "the requests")
            began = time.monotonic()
            done = gpufs("umount", "--force", mounted.path, check=False)
            assert (done.returncode, mounted.mounted()) == (0, False), done.stderr
            assert time.monotonic() - began < 20
        finally:
            os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    mounted.daemon.wait(10)


def test_requests_without_a_pause(own: Mounter) -> None:
    mounted = own()
    folder, control = mounted.device / "nobodys", mounted.path / ".gpufs"

    def attach_and_detach() -> None:
        fd = os.open(folder / "attached", os.O_RDWR | os.O_CREAT)
        with connected(mounted) as client:
            while True:
                client.ask(protocol.Attach(1, "r+"), [fd])
                client.ask(protocol.Detach(9, 1))

    def read_control_files() -> None:
        while True:
            for name in ("activity", "status", "metrics"):
                (control / name).read_bytes()

    def register_with_links() -> None:
        memory = os.memfd_create("memory")
        os.ftruncate(memory, 4096)
        for number in itertools.count():
            path = folder / f"registered{number}"
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            with connected(mounted) as client:
                client.ask(protocol.Register(1, "file", 0, 4096), [fd, memory])
                for link in range(300):
                    os.link(path, f"{path}-{link}")
            os.close(fd)

    def attack(ready: Ready) -> None:
        for work, count in ((attach_and_detach, 50), (read_control_files, 2), (register_with_links, 1)):
            for _ in range(count):
                threading.Thread(target=work, daemon=True).start()
        time.sleep(0.2)
        ready()

    assert_unharmed(mounted, attack)


def test_the_end_of_many_leases(own: Mounter) -> None:
    mounted = own()
    threads, _ = threads_and_descriptors(mounted)

    def attack(ready: Ready) -> None:
        fd = os.open(mounted.device / "nobodys/empty", os.O_RDWR | os.O_CREAT)
        clients = [connected(mounted) for _ in range(2)]
        for client in clients:
            for number in range(1, 400):
                client.ask(protocol.Attach(number, "r+"), [fd])
        ready()
        for client in clients:
            client.close()

    assert_unharmed(mounted, attack)
    wait_until(lambda: not leases(mounted), 10, "the end of all leases")
    assert threads_and_descriptors(mounted)[0] < threads + 30


@pytest.mark.slow
@pytest.mark.parametrize("own", ["host"], indirect=True)
def test_many_leases_of_one_file_end_in_a_moment(own: Mounter) -> None:
    """Each end looked at all leases, so that a forced unmount took seconds: twice as many take about twice as long."""

    def seconds(count: int) -> float:
        mounted = own()
        with open(mounted.device / "nobodys/file", "wb") as file, contextlib.ExitStack() as stack:
            file.write(noise(2 * MIB))
            file.flush()
            fd = os.open(file.name, os.O_RDWR)
            for number in range(count):
                if number % 4000 == 0:
                    client = stack.enter_context(connected(mounted))
                answer, received = client.ask(protocol.Attach(number % 4000 + 1, "r"), [fd])
                assert not answer["error"]
                for one in received:
                    os.close(one)
            os.close(fd)
            file.close()
            began = time.monotonic()
            stack.close()
            wait_until(lambda: not leases(mounted), 30, "the end of all leases")
            return time.monotonic() - began

    assert seconds(16_000) < 8 * seconds(4000) + 1


def test_names_of_one_user_leave_space_for_those_of_others(own: Mounter) -> None:
    mounted = own("--metadata", "4M")
    folder = mounted.device / "nobodys"

    def fill(ready: Ready) -> None:
        assert touch_until_refused(folder) == errno.ENOSPC
        assert os.statvfs(folder).f_favail == 0
        ready()

    assert_unharmed(mounted, fill)
    # What is given to a user counts as the user's.
    (mounted.device / "given").touch()
    os.chown(mounted.device / "given", NOBODY, NOBODY)
    for path in folder.iterdir():
        path.unlink()
    wait_until(lambda: as_nobody(lambda: errno_of((folder / "again").touch)) == 0, 10, "space for a name")


def test_listings_share_the_names(own: Mounter) -> None:
    mounted = own()
    folder = mounted.device / "nobodys"
    for number in range(5000):
        (folder / str(number)).touch()

    def resident() -> int:
        fields = Path(f"/proc/{mounted.pid}/statm").read_text().split()
        return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")

    before = resident()

    def list_often() -> int:
        streams = [os.scandir(folder) for _ in range(900)]
        for stream in streams:
            next(stream)
        return resident() - before

    assert as_nobody(list_often) < 16 * MIB


def test_a_listing_during_changes(own: Mounter) -> None:
    """Every name that stays is listed once, others at most once, and the listing ends."""
    folder = own().device / "nobodys"
    for number in range(1000):
        (folder / str(number)).touch()
    found = []
    with os.scandir(folder) as stream, os.scandir(folder) as other:
        next(other)
        for count, entry in enumerate(stream):
            found.append(entry.name)
            (folder / f"new{count}").touch()
            if count % 2:
                (folder / str(999 - count // 2)).unlink(missing_ok=True)
                (folder / f"new{count}").rename(folder / str(count // 2))
    assert len(found) == len(set(found))
    assert {str(number) for number in range(400)} <= set(found)


def private_copies(mounted: GpufsMount, files: list[Path]) -> tuple[list[int], dict[str, int]]:
    """The errno of attaching each file for reading as nobody, and what nobody's quotas count on each device then."""

    def attach_all() -> tuple[list[int], dict[str, int]]:
        with connected(mounted) as client:
            errors = []
            for number, path in enumerate(files, 1):
                fd = os.open(path, os.O_RDONLY)
                answer, received = client.ask(protocol.Attach(number, "r"), [fd])
                errors.append(answer["error"])
                assert answer["error"] or answer["private"]
                for one in (fd, *received):
                    os.close(one)
            quotas = mounted.status()["quotas"]
        return errors, {quota["path"]: quota["used_bytes"] for quota in quotas if quota["uid"] == NOBODY}

    found: tuple[list[int], dict[str, int]] = as_nobody(attach_all)
    return found


@pytest.mark.parametrize("own", ["cuda"], indirect=True)
def test_private_copies_count_on_their_device(own: Mounter) -> None:
    mounted = own("--user-memory", "4M", memory=16 * MIB, devices=3)
    files = [mounted.path / f"gpu{device}/file" for device in range(3)]
    for path in files:
        path.write_bytes(noise(3 * MIB))
    errors, used = private_copies(mounted, files)
    assert errors == [0, 0, 0]
    assert used == {f"gpu{device}": 4 * MIB for device in range(3)}
    errors, used = private_copies(mounted, [files[0], files[0]])
    assert errors == [0, errno.EDQUOT]
    assert used["gpu0"] == 4 * MIB
    wait_until(lambda: not leases(mounted), 10, "the end of all leases")
    assert private_copies(mounted, files[:1])[0] == [0]


@pytest.mark.parametrize("own", ["cuda"], indirect=True)
def test_a_private_copy_of_a_file_that_grows_costs_what_it_takes(own: Mounter) -> None:
    mounted = own(memory=64 * MIB)
    path = mounted.device / "nobodys/file"
    path.write_bytes(noise(2 * MIB))
    os.chmod(path, 0o644)
    done = threading.Event()

    def resize() -> None:
        with open(path, "r+b", buffering=0) as file:
            while not done.is_set():
                os.posix_fallocate(file.fileno(), 0, 8 * MIB)
                os.ftruncate(file.fileno(), 2 * MIB)

    resizing = threading.Thread(target=resize)
    resizing.start()
    try:
        errors, used = private_copies(mounted, [path] * 30)
    finally:
        done.set()
        resizing.join()
    assert 0 in errors
    # Half of the device, at most.
    assert used.get("gpu0", 0) <= 32 * MIB


def test_root_may_use_what_a_user_may_not(own: Mounter) -> None:
    """The reserve is root's alone: two users together leave it."""
    mounted = own("--metadata", "4M")
    for uid in (NOBODY, OTHER):
        folder = mounted.device / f"of{uid}"
        folder.mkdir()
        os.chown(folder, uid, uid)
        assert in_child(functools.partial(touch_until_refused, folder), uid=uid, gid=uid) == errno.ENOSPC
    for number in range(50):
        (mounted.device / f"root{number}").touch()


def test_open_files_of_the_host_leave_descriptors_to_others(mount: Mounter, host: Path) -> None:
    host.chmod(0o755)
    (host / "file").write_bytes(b"content")
    mounted = mount("--backing", f"host={host}", allow_other=True)
    resource.prlimit(mounted.pid, resource.RLIMIT_NOFILE, (1600, 1600))
    shown = mounted.path / "backing/host"

    def attack(ready: Ready) -> None:
        opened: list[int] = []
        while not (code := errno_of(lambda: opened.append(os.open(shown / "file", os.O_RDONLY)))):
            pass
        assert code == errno.EMFILE
        assert 50 < len(opened) < 300  # before this process has too many
        assert errno_of(os.open, shown, os.O_RDONLY | os.O_DIRECTORY) == errno.EMFILE
        os.close(opened.pop())
        wait_until(lambda: errno_of(os.listdir, shown) == 0, 10, "the descriptor of a closed directory")
        ready()

    assert_unharmed(mounted, attack)
    with contextlib.ExitStack() as files:
        for _ in range(150):
            assert files.enter_context(open(shown / "file", "rb")).read() == b"content"
