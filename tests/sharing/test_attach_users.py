"""Who may attach: the daemon gives memory only to programs that the kernel let open the file for it."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EACCES, EBADF, EBUSY, EINVAL, EISDIR, ESTALE, EXDEV
from pathlib import Path
from typing import Any, cast

import pytest
from support.attaching import Attacker, grants_write, leases, run_as_nobody, wait_for_leases
from support.cli import user_gpufs
from support.copying import socket_path
from support.data import MIB, noise
from support.fuzzing import fuzz, prepare_fuzz
from support.linux import FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE, fallocate
from support.mounting import GpufsMount, Mounter
from support.processes import NOBODY, OTHER, Snapshot, as_nobody, errno_of, wait_until

import gpufs
from gpufs.modes import Mode
from gpufs.protocol import Attach, Detach, Refresh

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="acts as several users, which takes root"),
    pytest.mark.usefixtures("on_host_memory"),
]
SIZE = 4 * MIB


@pytest.fixture
def folder(shared_mount: GpufsMount) -> Iterator[Path]:
    path = shared_mount.device / "users"
    path.mkdir()
    path.chmod(0o777)
    yield path
    wait_for_leases(shared_mount, 0)
    for file in path.iterdir():
        file.unlink()
    path.rmdir()


def file_of(folder: Path, mode: int, size: int = SIZE) -> Path:
    path = folder / f"file{mode:o}"
    path.write_bytes(noise(size))
    path.chmod(mode)
    return path


@contextmanager
def descriptor(path: Path | str, flags: int) -> Iterator[int]:
    fd = os.open(path, flags)
    try:
        yield fd
    finally:
        os.close(fd)


def refusal(mount: GpufsMount, path: Path | str, flags: int, mode: str) -> int:
    """The errno with which the daemon answers a descriptor; 0 if it gives memory."""
    with Attacker(socket_path(mount.path)) as client, descriptor(path, flags) as fd:
        client.greet()
        answer, received = client.ask(Attach(1, cast(Mode, mode)), [fd])
        for one in received:
            os.close(one)
        assert bool(received) is not bool(answer["error"])
        error: int = answer["error"]
        return error


# ---- what gpufs.attach does ----

# Prints for each file and mode of argv: the errno, or whether the array is private and what its bytes add up to.
READ = """
import gpufs, sys
for path, mode in zip(sys.argv[1::2], sys.argv[2::2]):
    try:
        with gpufs.attach(path, mode) as array:
            print(array.private, sum(array.memoryview()))
            if mode == "r+":
                array.memoryview()[0] = 200
    except OSError as error:
        print(error.errno)
"""


def test_permissions_are_those_of_the_file(folder: Path) -> None:
    hidden, shown, open_to_all = (file_of(folder, mode) for mode in (0o600, 0o644, 0o666))
    total = f"False {sum(noise(SIZE))}"
    asked = (hidden, "r", hidden, "r+", shown, "r+", shown, "r", open_to_all, "r", open_to_all, "r+")
    said = run_as_nobody(READ, *asked).splitlines()
    assert said == [str(EACCES)] * 3 + [total] * 3
    assert (open_to_all.read_bytes()[0], shown.read_bytes()) == (200, noise(SIZE))


def test_a_reader_sees_changes_but_cannot_make_them(folder: Path, shared_mount: GpufsMount) -> None:
    path = file_of(folder, 0o644)
    with gpufs.attach(path, "r+") as writer:

        def attack() -> list[bool]:
            with Attacker(socket_path(shared_mount.path)) as client, descriptor(path, os.O_RDONLY) as fd:
                client.greet()
                _, received = client.ask(Attach(1, "r"), [fd])
                return [grants_write(one) for one in received]

        assert as_nobody(attack) == [False]
        view = writer.memoryview()
        view[:] = bytes(SIZE)
        view[7] = 200
        assert run_as_nobody(READ, path, "r") == "False 200\n"
        del view
    assert sum(path.read_bytes()) == 200


def test_a_small_file_of_others_is_a_private_copy(folder: Path, shared_mount: GpufsMount) -> None:
    """A reader cannot move every small file of a mount to a granule of its own."""
    path = file_of(folder, 0o644, 1000)
    blocks = path.stat().st_blocks
    assert run_as_nobody(READ, path, "r") == f"True {sum(noise(1000))}\n"
    assert path.stat().st_blocks == blocks
    script = """
import gpufs, sys
with gpufs.attach(sys.argv[1]) as array:
    print(open(sys.argv[2]).read().count('"private": true'))
    try:
        array.refresh()
    except OSError as error:
        print("private copy" in str(error))
"""
    assert run_as_nobody(script, path, shared_mount.path / ".gpufs/leases").split() == ["1", "True"]


def test_private_copies_of_one_user_do_not_fill_the_device(mount: Mounter) -> None:
    mounted = mount(memory=64 * MIB, allow_other=True)
    path = mounted.device / "small"
    path.write_bytes(noise(1000))
    script = """
import gpufs, os, sys
held = []
try:
    for _ in range(200):
        held.append(gpufs.attach(sys.argv[1]))
except OSError:
    pass
free = os.statvfs(sys.argv[1])
print(len(held), free.f_bavail * free.f_frsize)
"""
    count, free = map(int, run_as_nobody(script, path).split())
    assert 0 < count < 200
    assert free >= 16 * MIB


def test_users_see_their_own_leases(folder: Path, shared_mount: GpufsMount) -> None:
    path = file_of(folder, 0o644)
    script = """
import gpufs, json, sys
def seen():
    return len(json.load(open(sys.argv[2]))["leases"])
before = seen()
with gpufs.attach(sys.argv[1]):
    print(before, seen())
"""
    with gpufs.attach(path):
        assert run_as_nobody(script, path, shared_mount.path / ".gpufs/leases").split() == ["0", "1"]
        assert len(leases(shared_mount)) == 1


# ---- what the daemon does ----


def test_descriptors_that_do_not_give_the_rights_are_refused(folder: Path, shared_mount: GpufsMount) -> None:
    path = file_of(folder, 0o666)
    for flags, mode, error in (
        (os.O_RDWR, "r", 0),
        (os.O_RDWR, "r+", 0),
        (os.O_RDONLY, "r", 0),
        (os.O_RDONLY, "r+", EBADF),
        (os.O_WRONLY, "r", EBADF),
        (os.O_WRONLY, "r+", EBADF),
        (os.O_PATH, "r", EBADF),
        (os.O_PATH, "r+", EBADF),
        (os.O_RDWR | os.O_APPEND, "r", 0),
        (os.O_RDWR | os.O_APPEND, "r+", EBADF),
    ):
        assert refusal(shared_mount, path, flags, mode) == error, (flags, mode)


def test_files_of_other_kinds_and_places_are_refused(
    folder: Path, shared_mount: GpufsMount, mount: Mounter, tmp_path: Path
) -> None:
    host = tmp_path / "host"
    host.write_bytes(bytes(3 * MIB))
    other = mount("--backing", f"data={tmp_path}", allow_other=True)
    (other.device / "file").write_bytes(bytes(3 * MIB))
    for path, error in (
        (other.device / "file", EXDEV),
        (host, EXDEV),
        (folder, EISDIR),
        (shared_mount.path / ".gpufs/status", EINVAL),
        (shared_mount.path / ".gpufs/trace", EINVAL),
        ("/proc/self/mem", EXDEV),
        ("/dev/zero", EXDEV),
    ):
        assert refusal(shared_mount, path, os.O_RDONLY, "r") == error, path
    assert refusal(other, other.path / "backing/data/host", os.O_RDWR, "r+") == EINVAL
    memory = os.memfd_create("forged")
    reader, writer = os.pipe()
    try:
        os.ftruncate(memory, SIZE)
        for fd in (memory, reader, writer):
            assert refusal(shared_mount, f"/proc/self/fd/{fd}", os.O_RDONLY, "r") == EXDEV or fd == writer
    finally:
        for fd in (memory, reader, writer):
            os.close(fd)


@pytest.mark.parametrize(
    ("message", "count"),
    [*((Attach(1, "r"), count) for count in (0, 2, 100)), (Refresh(9, 1, 0), 1), (Detach(9, 1), 1)],
    ids=repr,
)
def test_messages_with_other_descriptors_end_the_connection(shared_mount: GpufsMount, message: Any, count: int) -> None:
    """The daemon answers the closing of these descriptors itself."""
    path = shared_mount.path / ".gpufs/status"
    with Attacker(socket_path(shared_mount.path)) as client, descriptor(path, os.O_RDONLY) as fd:
        client.greet()
        answer, received = client.ask(message, [fd] * count)
        assert (answer["type"], received) == ("goodbye", [])
    assert (shared_mount.path / ".gpufs/version").read_text()


def test_requests_for_what_is_not_attached_give_nothing(folder: Path, shared_mount: GpufsMount) -> None:
    path = file_of(folder, 0o666)
    with gpufs.attach(path), Attacker(socket_path(shared_mount.path)) as client, descriptor(path, os.O_RDWR) as fd:
        client.greet()
        for number in (1, 2, 1 << 31):
            answer, received = client.ask(Refresh(number, number, 0))
            assert (answer["error"], received) == (EBADF, [])
            assert client.ask(Detach(number, number))[0] == {"type": "done", "id": number, "error": 0, "message": ""}
        _, received = client.ask(Attach(7, "r+"), [fd])
        assert len(received) == 1
        for one in received:
            os.close(one)
        answer, _ = client.ask(Attach(7, "r+"), [fd])  # its number is in use
        assert answer["type"] == "goodbye"
        assert len(leases(shared_mount)) <= 2


@pytest.mark.complains
def test_refusals_of_a_user_do_not_fill_the_log(folder: Path, shared_mount: GpufsMount) -> None:
    shared_mount.complaints()

    def attack() -> None:
        path = folder / "own"
        path.write_bytes(bytes(SIZE))
        with Attacker(socket_path(shared_mount.path)) as client, descriptor(path, os.O_RDWR) as fd:
            client.greet()
            for one in client.ask(Attach(1, "r"), [fd])[1]:
                os.close(one)
            for size in range(200):
                assert errno_of(os.truncate, path, size) == EBUSY
                assert errno_of(fallocate, fd, FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE, 2 * MIB, 2 * MIB + size) == EBUSY

    as_nobody(attack)
    lines = [line for line in shared_mount.complaints() if "leased" in line]
    assert 0 < len(lines) < 100


@pytest.mark.complains
def test_names_do_not_forge_lines_of_the_log(folder: Path, shared_mount: GpufsMount) -> None:
    shared_mount.complaints()

    def attack() -> None:
        ctypes.CDLL(None).prctl(15, b"\x1b[31mred\nx", 0, 0, 0)  # PR_SET_NAME
        path = folder / "a\n2026-01-01 00:00:00.000 ERROR gpufs.daemon: out of memory \x1b[31m"
        path.write_bytes(bytes(SIZE))
        with Attacker(socket_path(shared_mount.path)) as client, descriptor(path, os.O_RDWR) as fd:
            client.greet()
            for one in client.ask(Attach(1, "r+"), [fd])[1]:
                os.close(one)
            assert errno_of(os.ftruncate, fd, 0) == EBUSY

    as_nobody(attack)
    shared_mount.complaints()  # waits for all lines
    log = shared_mount.log.read_text()
    assert "out of memory" in log
    assert "\n2026-01-01" not in log
    assert "\x1b" not in log


def test_no_message_gives_memory_that_the_user_may_not_have(mount: Mounter) -> None:
    """Seconds of what the campaign `fuzz` does for minutes."""
    mounted = mount("--host-memory", "64M", memory=512 * MIB, allow_other=True)
    prepare_fuzz(mounted.path)
    before = Snapshot.of(mounted.pid)
    fuzz(mounted.path, 4, random.Random(2026).randrange(1000))
    wait_for_leases(mounted, 0)
    assert mounted.alive()
    wait_until(lambda: Snapshot.of(mounted.pid).descriptors <= before.descriptors + 1, 10, "closed descriptors")
    assert not [line for line in mounted.complaints() if "Traceback" in line or "ERROR" in line]
    with gpufs.attach(mounted.device / "attacked/secret") as array:
        assert array.nbytes == 4 * MIB


@pytest.mark.complains
def test_the_owner_of_a_file_ends_its_leases(folder: Path) -> None:
    path = file_of(folder, 0o644)
    os.chown(path, OTHER, OTHER)
    before = path.read_bytes()
    command, environment = user_gpufs({"PATH": os.environ["PATH"]})

    def revoke(uid: int) -> str:
        words = [*command, "leases", "--revoke", str(path)]
        identity: dict[str, Any] = {"user": uid, "group": uid, "extra_groups": [], "env": environment, "cwd": "/"}
        done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=60, **identity)
        return str(done.stderr)

    with Attacker(socket_path(folder.parent.parent)) as reader, open(path, "rb") as file:
        assert reader.greet()
        answer, (memory,) = reader.ask(Attach(1, "r"), [file.fileno()])
        assert not answer["private"]
        with mmap.mmap(memory, SIZE, prot=mmap.PROT_READ) as mapping:
            os.close(memory)
            assert errno_of(path.write_bytes, b"new") == EBUSY
            assert "owner" in revoke(NOBODY)
            assert errno_of(path.write_bytes, b"new") == EBUSY
            assert revoke(OTHER) == ""
            path.write_bytes(bytes(SIZE))
            assert mapping[:] == before  # the reader keeps the memory that the file had
            assert reader.ask(Refresh(9, 1, 0))[0]["error"] == ESTALE
            assert reader.ask(Detach(9, 1))[0]["error"] == 0
        answer, received = reader.ask(Attach(1, "r"), [file.fileno()])
        assert answer["error"] == 0
        os.close(*received)
