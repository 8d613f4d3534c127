"""gpufs.register: memory of a program as a file, on real mounts of host memory."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import itertools
import json
import mmap
import multiprocessing.shared_memory
import os
import random
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy
import numpy.typing
import pytest
import torch
from support.copying import answer, connection, greeted
from support.data import MIB, noise
from support.fastpath import file_system
from support.mounting import GPUFS, GpufsMount, Mounter
from support.processes import (
    NOBODY,
    PATIENCE,
    Snapshot,
    as_nobody,
    as_other,
    errno_of,
    has_ended,
    in_child,
    run,
    wait_until,
)

import gpufs
from gpufs import protocol

Bytes = numpy.typing.NDArray[numpy.uint8]


def shared_array(content: bytes) -> Bytes:
    """An array in shared memory of this program's (a memfd)."""
    fd = os.memfd_create("array")
    try:
        os.ftruncate(fd, len(content))
        array = numpy.frombuffer(mmap.mmap(fd, len(content)), dtype=numpy.uint8)
    finally:
        os.close(fd)
    array[:] = numpy.frombuffer(content, dtype=numpy.uint8)
    return array


def registrations(mount: GpufsMount) -> list[dict[str, Any]]:
    listed = json.loads((mount.path / ".gpufs" / "leases").read_text())["leases"]
    return [lease for lease in listed if lease["mode"] == "registered"]


class Exporter:
    """A forked child that registers its memory and then waits to be killed."""

    def __init__(self, path: Path, content: bytes, mode: int = 0o600) -> None:
        receive, send = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.close(receive)
                gpufs.register(shared_array(content), path, mode=mode)
                os.write(send, b"1")
                time.sleep(1000)
            finally:
                os._exit(1)
        os.close(send)
        with os.fdopen(receive, "rb") as pipe:
            if pipe.read(1) != b"1":
                self.kill()
                raise AssertionError("the child could not register its memory")

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


@pytest.fixture
def exporters() -> Iterator[Callable[..., Exporter]]:
    made: list[Exporter] = []

    def make(*arguments: Any, **named: Any) -> Exporter:
        made.append(Exporter(*arguments, **named))
        return made[-1]

    yield make
    for one in made:
        if not has_ended(one.pid):
            one.kill()


# ---- contents ----


def test_tools_read_the_array_and_see_its_changes(root: Path) -> None:
    array = shared_array(noise(3 * MIB + 5))[1001:-7]  # neither end at a page
    with gpufs.register(array, root / "live") as registration:
        assert registration.nbytes == array.nbytes == os.stat(root / "live").st_size
        expected = hashlib.sha256(array.tobytes()).hexdigest()
        assert run("sha256sum", root / "live").stdout.split()[0] == expected
        array[:4] = (0xDE, 0xAD, 0xBE, 0xEF)
        assert run("xxd", "-l", "4", "-p", root / "live").stdout.strip() == "deadbeef"
        array[-1] ^= 255
        assert (root / "live").read_bytes() == array.tobytes()


def test_writes_through_the_file_change_the_array(root: Path) -> None:
    array = shared_array(bytes(2 * MIB))
    with gpufs.register(array, root / "live"):
        run("dd", f"of={root / 'live'}", "conv=notrunc", "bs=1k", "seek=3", input="seen", text=True)
        assert array[3072:3076].tobytes() == b"seen"
        with open(root / "live", "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
            mapped[MIB : MIB + 6] = b"mapped"
            mapped.flush()
            assert array[MIB : MIB + 6].tobytes() == b"mapped"


def test_copies_to_and_from_other_files(root: Path, tmp_path: Path) -> None:
    content = noise(5 * MIB + 3)
    array = shared_array(content)
    with gpufs.register(array, root / "live"):
        run(*GPUFS, "cp", root / "live", tmp_path / "disk")
        assert (tmp_path / "disk").read_bytes() == content
        run("cp", root / "live", root / "copy")  # inside the mount, by copy_file_range
        assert (root / "copy").read_bytes() == content
        (root / "other").write_bytes(content[::-1])
        with open(root / "other", "rb") as source, open(root / "live", "r+b") as target:
            left = len(content)
            while left:
                left -= os.copy_file_range(source.fileno(), target.fileno(), left)
        assert array.tobytes() == content[::-1]
        gpufs.copy(root / "live", tmp_path / "disk")
        assert (tmp_path / "disk").read_bytes() == content[::-1]


def test_cp_overwrites_registered_memory(root: Path, tmp_path: Path) -> None:
    """All of it, also where the source has holes; a source of another size changes nothing."""
    size = 5 * MIB + 3
    array = shared_array(noise(size))
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(size)
        file.seek(2 * MIB)
        file.write(b"data")
    run("cp", "--sparse=always", tmp_path / "sparse", root / "sparse")
    (tmp_path / "short").write_bytes(b"short")
    (tmp_path / "long").write_bytes(bytes(size + 1))
    wanted = (tmp_path / "sparse").read_bytes()
    with gpufs.register(array, root / "live"):
        for source in (tmp_path / "sparse", root / "sparse"):
            array[:] = 7
            run(*GPUFS, "cp", source, root / "live")
            assert array.tobytes() == wanted, source
        array[:] = 7
        run(*GPUFS, "cp", "-", root / "live", input=wanted, text=False, errors=None)
        assert array.tobytes() == wanted
        array[:] = 7
        for name in ("short", "long"):
            with pytest.raises(gpufs.CopyError) as refused:
                gpufs.copy(tmp_path / name, root / "live")
            assert refused.value.errno == errno.EPERM
        assert (array == 7).all()


def test_the_size_is_fixed(root: Path) -> None:
    array = shared_array(noise(MIB))
    path = root / "live"
    with gpufs.register(array, path), open(path, "r+b", buffering=0) as file:
        for change in (
            lambda: os.truncate(path, 5),
            lambda: os.ftruncate(file.fileno(), 2 * MIB),
            lambda: open(path, "wb"),  # noqa: SIM115
            lambda: os.posix_fallocate(file.fileno(), 0, 2 * MIB),
            lambda: os.pwrite(file.fileno(), b"x", MIB),
        ):
            assert errno_of(change) == errno.EPERM
        with open(path, "ab", buffering=0) as appending:
            assert errno_of(appending.write, b"x") == errno.EPERM
        assert os.pwrite(file.fileno(), b"1234", MIB - 2) == 2  # up to the end
        assert array[-2:].tobytes() == b"12"
        assert os.stat(path).st_size == array.nbytes == MIB
        assert os.stat(path).st_blocks * 512 >= MIB


@pytest.mark.parametrize("kind", ["address", "dlpack", "slice", "read-only"])
def test_kinds_of_memory(root: Path, kind: str) -> None:
    content = noise(MIB)
    view = shared_array(content)
    if kind == "address":
        registration = gpufs.register(view.ctypes.data, root / "live", size=MIB)
    elif kind == "dlpack":

        class Other:
            def __dlpack__(self) -> object:
                return view.__dlpack__()

            def __dlpack_device__(self) -> tuple[int, int]:
                return view.__dlpack_device__()

        registration = gpufs.register(Other(), root / "live")
    elif kind == "slice":
        parts = shared_array(bytes(5000) + content)[5000:].view(numpy.float32).reshape(64, -1)
        registration = gpufs.register(parts[:], root / "live")
    else:
        view.flags.writeable = False
        registration = gpufs.register(view, root / "live")
        assert errno_of((root / "live").write_bytes, b"") == errno.EPERM
        with open(root / "live", "r+b", buffering=0) as file:
            assert errno_of(file.write, b"x") == errno.EPERM
    with registration:
        assert (root / "live").read_bytes() == content


def test_memory_of_multiprocessing(root: Path) -> None:
    def show() -> bool:
        memory = multiprocessing.shared_memory.SharedMemory(create=True, size=MIB)
        try:
            array: Bytes = numpy.ndarray(MIB, dtype=numpy.uint8, buffer=memory.buf)
            array[:] = numpy.frombuffer(noise(MIB), dtype=numpy.uint8)
            with gpufs.register(array, root / "live"):
                return (root / "live").read_bytes() == noise(MIB)
        finally:
            memory.unlink()

    assert in_child(show)  # its helper process ends with it


# ---- what cannot be registered ----


def test_memory_that_cannot_be_shared(root: Path) -> None:
    private = numpy.zeros(MIB, dtype=numpy.uint8)
    for array, text in (
        (private, "private"),
        (numpy.frombuffer(mmap.mmap(-1, MIB, flags=mmap.MAP_PRIVATE), dtype=numpy.uint8), "private"),
    ):
        with pytest.raises(OSError, match=text) as refused:
            gpufs.register(array, root / "live")
        assert refused.value.errno == errno.EINVAL
        assert "SharedMemory" in str(refused.value)  # the remedy
        assert refused.value.filename == str(root / "live")
    shared = shared_array(bytes(MIB))
    with pytest.raises(ValueError, match="contiguous"):
        gpufs.register(shared[::2], root / "live")
    with pytest.raises(ValueError, match="empty"):
        gpufs.register(shared[:0], root / "live")
    with pytest.raises(TypeError):
        gpufs.register("text", root / "live")
    with pytest.raises(TypeError):
        gpufs.register(shared.ctypes.data, root / "live")
    with pytest.raises(TypeError):
        gpufs.register(shared, root / "live", size=5)
    assert errno_of(gpufs.register, 4096, root / "live", size=5) == errno.EFAULT
    with open("/proc/self/exe", "rb") as file:
        program = numpy.frombuffer(mmap.mmap(file.fileno(), 4096, prot=mmap.PROT_READ), dtype=numpy.uint8)
        assert errno_of(gpufs.register, program, root / "live") == errno.EINVAL
    assert not list(root.iterdir())


def test_places_where_nothing_can_be_registered(root: Path, tmp_path: Path, shared_mount: GpufsMount) -> None:
    array = shared_array(noise(MIB))
    (root / "there").write_bytes(b"precious")
    assert errno_of(gpufs.register, array, root / "there") == errno.EEXIST
    assert (root / "there").read_bytes() == b"precious"
    assert errno_of(gpufs.register, array, tmp_path / "disk") == errno.EXDEV
    assert errno_of(gpufs.register, array, root / "missing" / "file") == errno.ENOENT
    assert errno_of(gpufs.register, array, shared_mount.path / "file") in (errno.EPERM, errno.EACCES)
    assert not list(tmp_path.iterdir())


# ---- the end ----


def test_the_reason_of_a_failure_is_told_although_the_file_has_gone(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = root / "file"

    def refuse(*_: object) -> int:
        path.unlink()
        raise OSError(errno.ENOSPC, "no more")

    monkeypatch.setattr("gpufs.client._connection.Connection.register", refuse)
    assert errno_of(gpufs.register, shared_array(bytes(4096)), path) == errno.ENOSPC


def assert_stale(file: int, mapped: mmap.mmap) -> None:
    """Neither old nor foreign bytes through what was opened before."""
    for call in (
        lambda: os.pread(file, 10, 0),
        lambda: os.pwrite(file, b"x", 0),
        lambda: os.lseek(file, 0, os.SEEK_DATA),
        lambda: os.ftruncate(file, 0),
        lambda: os.posix_fallocate(file, 0, 10),
        lambda: os.sendfile(os.memfd_create("to"), file, 0, 10),
    ):
        assert errno_of(call) == errno.ESTALE

    def killed_by_mapping() -> None:
        if os.fork() == 0:
            signal.signal(signal.SIGBUS, signal.SIG_DFL)
            _ = mapped[0]
            os._exit(0)
        assert os.WTERMSIG(os.wait()[1]) == signal.SIGBUS

    in_child(killed_by_mapping)


def test_after_close_open_files_are_stale(root: Path) -> None:
    array = shared_array(noise(MIB))
    registration = gpufs.register(array, root / "live")
    (root / "folder").mkdir()
    for number in range(500):
        os.link(root / "live", root / "folder" / str(number))
    os.rename(root / "live", root / "moved")
    with open(root / "moved", "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        assert mapped[:100] == array[:100].tobytes()
        registration.close()
        assert registration.closed
        assert list(root.rglob("*")) == [root / "folder"]
        assert_stale(file.fileno(), mapped)
        registration.close()
    gpufs.register(array, root / "live").close()  # the name is free again
    (root / "folder").rmdir()


def test_after_sigkill_open_files_are_stale(root: Path, exporters: Callable[..., Exporter]) -> None:
    content = noise(MIB)
    exporter = exporters(root / "live", content)
    with open(root / "live", "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        assert mapped[:100] == os.pread(file.fileno(), 100, 0) == content[:100]
        exporter.kill()
        wait_until(lambda: not list(root.iterdir()), 10, "the end of the name")
        wait_until(lambda: errno_of(os.pread, file.fileno(), 1, 0) == errno.ESTALE, 10, "the end of the contents")
        assert_stale(file.fileno(), mapped)


def test_unlinked_and_replaced_files_stay_registered(root: Path) -> None:
    array = shared_array(noise(MIB))
    (root / "other").write_bytes(b"other")
    with gpufs.register(array, root / "live") as registration, open(root / "live", "rb") as file:
        os.replace(root / "other", root / "live")
        array[:3] = (7, 8, 9)
        assert os.pread(file.fileno(), 3, 0) == bytes((7, 8, 9))
        registration.close()
        assert errno_of(os.pread, file.fileno(), 3, 0) == errno.ESTALE
    assert (root / "live").read_bytes() == b"other"  # another file


def test_a_forked_child_does_not_keep_the_registration(root: Path, exporters: Callable[..., Exporter]) -> None:
    receive, send = os.pipe()
    parent = os.fork()
    if parent == 0:
        try:
            array = shared_array(noise(MIB))
            gpufs.register(array, root / "live")
            child = os.fork()
            if child == 0:
                os.close(send)
                time.sleep(1000)
            os.write(send, str(child).encode())
            time.sleep(1000)
        finally:
            os._exit(1)
    os.close(send)
    with os.fdopen(receive, "rb") as pipe:
        child = int(os.read(pipe.fileno(), 20))
    try:
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
        wait_until(lambda: not list(root.iterdir()), 10, "the end of the name")
    finally:
        os.kill(child, signal.SIGKILL)


def test_killed_exporters(root: Path, shared_mount: GpufsMount, exporters: Callable[..., Exporter]) -> None:
    """A reader gets the bytes of the file that it has opened, or an error, whenever the exporter dies."""
    chance = random.Random(1)
    before = Snapshot.of(shared_mount.pid)
    size = 8 * MIB
    whole = 0
    for number in range(12):
        content = bytes((number + 1,)) * size
        path = root / f"live{number}"
        exporter = exporters(path, content)
        file = os.open(path, os.O_RDONLY)
        delay = chance.uniform(0, 0.004)
        killer = threading.Timer(delay, exporter.kill)
        killer.start()
        try:
            got = 0
            while got < size:
                part = os.pread(file, MIB, got)
                assert part == content[got : got + len(part)]
                assert part, "the end of the file came early"
                got += len(part)
            whole += 1
        except OSError as error:
            assert error.errno == errno.ESTALE  # noqa: PT017
        finally:
            killer.join()
            os.close(file)
    wait_until(lambda: not list(root.iterdir()), 10, "the end of the names")
    wait_until(lambda: not registrations(shared_mount), 10, "the end of the registrations")
    wait_until(lambda: Snapshot.of(shared_mount.pid).memfds <= before.memfds, 10, "closed memory")
    wait_until(lambda: Snapshot.of(shared_mount.pid).descriptors <= before.descriptors + 2, 10, "closed descriptors")


def test_memory_that_is_cut_off(root: Path, shared_mount: GpufsMount) -> None:
    """A program that truncates what it shares harms itself alone: its file is stale, and the daemon lives."""
    for kept in (0, 4096, MIB):
        fd = os.memfd_create("cut")
        try:
            os.ftruncate(fd, 2 * MIB)
            with mmap.mmap(fd, 2 * MIB) as mapped:
                mapped[:] = noise(2 * MIB)
                address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
                with gpufs.register(address, root / "live", size=2 * MIB), open(root / "live", "r+b", 0) as file:
                    stop = threading.Event()

                    def use(read: bool, file: Any = file, stop: threading.Event = stop) -> None:
                        while not stop.is_set():
                            try:
                                os.pread(file.fileno(), MIB, MIB - 5) if read else os.pwrite(file.fileno(), b"x", MIB)
                            except OSError as error:
                                assert error.errno == errno.ESTALE  # noqa: PT017

                    threads = [threading.Thread(target=use, args=(read,)) for read in (True, False, True)]
                    for thread in threads:
                        thread.start()
                    for _ in range(20):
                        os.ftruncate(fd, kept)
                        os.ftruncate(fd, 2 * MIB)
                    os.ftruncate(fd, kept)
                    stop.set()
                    for thread in threads:
                        thread.join()
                    assert errno_of(os.pread, file.fileno(), 10, 0) == errno.ESTALE
                    assert errno_of(os.pwrite, file.fileno(), b"x", 0) == errno.ESTALE
                    assert run(*GPUFS, "cp", root / "live", "/dev/null", check=False).returncode != 0
                assert not list(root.iterdir())
        finally:
            os.close(fd)
    assert shared_mount.alive()
    (root / "file").write_bytes(b"works")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGBUS])
def test_the_mount_ends_while_memory_is_registered(mount: Mounter, number: signal.Signals) -> None:
    mounted = mount(memory=64 * MIB)
    array = shared_array(noise(MIB))
    registration = gpufs.register(array, mounted.device / "live")
    mounted.signal(number)
    wait_until(lambda: not mounted.alive(), 10, "the end of the daemon")
    registration.close()
    assert array.tobytes() == noise(MIB)


# ---- users ----


@pytest.mark.skipif(os.geteuid() != 0, reason="acts as several users, which takes root")
def test_the_mode_decides_who_reads_and_writes(root: Path, exporters: Callable[..., Exporter]) -> None:
    exporters(root / "private", noise(MIB))
    exporters(root / "public", noise(MIB), mode=0o644)
    assert as_nobody(lambda: errno_of(open, root / "private", "rb")) == errno.EACCES
    assert as_nobody((root / "public").read_bytes) == noise(MIB)
    assert as_nobody(lambda: errno_of(open, root / "public", "r+b")) == errno.EACCES


@pytest.mark.skipif(os.geteuid() != 0, reason="acts as several users, which takes root")
def test_only_those_who_may_create_the_file_register(root: Path) -> None:
    (root / "mine").mkdir(mode=0o755)

    def attempt() -> int:
        return errno_of(gpufs.register, shared_array(noise(MIB)), root / "mine" / "live")

    assert as_nobody(attempt) == errno.EACCES

    def register_and_read() -> bytes:
        with gpufs.register(shared_array(noise(MIB)), root / "theirs"):
            assert os.stat(root / "theirs").st_uid == NOBODY
            return (root / "theirs").read_bytes()

    assert as_nobody(register_and_read) == noise(MIB)


@pytest.mark.skipif(os.geteuid() != 0, reason="acts as several users, which takes root")
def test_requests_that_are_forged(root: Path, tmp_path: Path, shared_mount: GpufsMount) -> None:
    """Descriptors and numbers that are not what a client says are refused, and change nothing."""
    root.chmod(0o777)
    (tmp_path / "disk").write_bytes(bytes(MIB))
    disk = os.open(tmp_path / "disk", os.O_RDWR)
    (root / "victim").touch()
    (root / "victim").chmod(0o666)
    (root / "full").write_bytes(b"full")
    (root / "full").chmod(0o666)
    os.mknod(root / "made", 0o666)
    (root / "made").chmod(0o666)
    memory = os.memfd_create("memory")
    os.ftruncate(memory, MIB)
    numbers = itertools.count(1)

    def ask(file: int, fd: int | None, **fields: Any) -> int:
        values: dict[str, Any] = {"kind": "file", "offset": 0, "size": MIB, **fields}
        with greeted(shared_mount.path) as sock:
            protocol.send(sock, protocol.Register(next(numbers), **values), [file] if fd is None else [file, fd])
            failed: int = answer(sock).error
            if not failed:
                assert os.fstat(file).st_size == values["size"]
            return failed

    def attack() -> None:
        device = os.open(root / "a", os.O_RDWR | os.O_CREAT | os.O_EXCL)
        read_only = os.open(f"/proc/self/fd/{memory}", os.O_RDONLY)
        foreign = os.open(root / "a", os.O_RDONLY)
        for fd, fields in (
            (os.open("/dev/null", os.O_RDWR), {}),
            (os.open("/dev/zero", os.O_RDWR), {}),
            (disk, {}),
            (os.open("/proc/self/status", os.O_RDONLY), {"writable": False}),
            (os.pipe()[0], {"writable": False}),
            (os.open("/", os.O_RDONLY), {"writable": False}),
            (device, {}),
            (foreign, {"writable": False}),
            (memory, {"size": MIB + 1}),
            (memory, {"offset": 1}),
            (memory, {"offset": (1 << 63) - 1, "size": (1 << 63) - 1}),
            (memory, {"size": (1 << 63) - 1}),
            (read_only, {}),
            (memory, {"kind": "descriptor"}),
            (memory, {"handle": bytes(64)}),
            (None, {"kind": "ipc", "handle": bytes(64)}),
        ):
            assert ask(device, fd, **fields) != 0, (fd, fields)
        assert os.fstat(device).st_size == 0
        # Files that the client has not just created itself.
        for name in ("victim", "full", "made"):
            assert ask(os.open(root / name, os.O_RDWR), memory) == errno.EBUSY
        assert ask(disk, memory) != 0
        assert ask(os.open(root / "a", os.O_RDONLY), memory) == errno.EBADF
        assert ask(os.open(root / "a", os.O_PATH), memory) == errno.EBADF
        assert ask(os.open(root, os.O_RDONLY), memory) != 0
        assert ask(os.open(shared_mount.path / ".gpufs" / "version", os.O_RDONLY), memory) != 0
        assert ask(device, memory) == 0
        os.close(device)
        second = os.open(root / "b", os.O_RDWR | os.O_CREAT | os.O_EXCL)
        os.open(root / "b", os.O_WRONLY)  # another writer
        assert ask(second, memory) == errno.EBUSY

    as_other(attack)
    assert (root / "full").read_bytes() == b"full"
    assert (root / "victim").stat().st_size == 0
    os.close(memory)
    os.close(disk)
    assert shared_mount.alive()


def test_sockets_of_pieces_that_are_forged(root: Path, shared_mount: GpufsMount) -> None:
    """The socket in which a client passes on memory of a GPU: the daemon does not wait for it, and keeps nothing."""
    good = protocol.encode(protocol.Pieces(1, [0], [2 * MIB]))
    before = Snapshot.of(shared_mount.pid)
    memory = os.memfd_create("memory")
    os.ftruncate(memory, 2 * MIB)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, memory.to_bytes(4, sys.byteorder))]
    cases: list[tuple[list[tuple[bytes, list[Any]]], int, bool]] = [
        ([(good, rights)], socket.SOCK_SEQPACKET, False),
        ([(good, rights)], socket.SOCK_STREAM, True),
        ([(good, [])], socket.SOCK_SEQPACKET, True),
        ([(b"x" * 100, rights)], socket.SOCK_SEQPACKET, True),
        ([(good, rights)] * 1025, socket.SOCK_SEQPACKET, True),
        ([(good, rights), (good, rights)], socket.SOCK_SEQPACKET, True),
        ([], socket.SOCK_SEQPACKET, True),
        ([(protocol.encode(protocol.Pieces(1, [], [])), [])], socket.SOCK_SEQPACKET, True),
    ]
    with open(root / "file", "xb") as file, greeted(shared_mount.path) as sock:
        for number, (packets, kind, ended) in enumerate(cases, 1):
            ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
            ours.setblocking(False)
            with ours, theirs:
                with suppress(BlockingIOError):
                    for data, ancillary in packets:
                        ours.sendmsg([data], ancillary)
                if ended:
                    ours.close()
                request = protocol.Register(number, "descriptor", 0, 2 * MIB)
                protocol.send(sock, request, [file.fileno(), theirs.fileno()])
                assert answer(sock).error, (number, packets[:2])
        for number in range(100, 120):  # not even a socket
            protocol.send(sock, protocol.Register(number, "descriptor", 0, 2 * MIB), [file.fileno(), memory])
            assert answer(sock).error == errno.EINVAL
    os.close(memory)
    assert (root / "file").stat().st_size == 0
    wait_until(lambda: Snapshot.of(shared_mount.pid).descriptors <= before.descriptors + 1, 10, "closed descriptors")


def test_a_user_has_a_limited_number_of_registrations(mount: Mounter) -> None:
    """It depends on the descriptors that the daemon may have."""
    own = mount()
    root = own.device
    resource.prlimit(own.pid, resource.RLIMIT_NOFILE, (2048, 2048))
    array = shared_array(bytes(4096))
    with ExitStack() as held:
        refused = 0
        for number in range(400):
            try:
                held.enter_context(gpufs.register(array, root / str(number)))
            except OSError as error:
                assert error.errno == errno.EBUSY  # noqa: PT017
                refused = number
                break
        assert 64 <= refused < 400
    gpufs.register(array, root / "again").close()


def test_registrations_are_listed(root: Path, shared_mount: GpufsMount) -> None:
    assert not registrations(shared_mount)
    with gpufs.register(shared_array(bytes(5000)), root / "live"):
        (listed,) = registrations(shared_mount)
        assert json.loads((shared_mount.path / ".gpufs" / "status").read_text())["leases"] == [listed]
        assert (listed["bytes"], listed["pid"], listed["uid"]) == (5000, os.getpid(), os.geteuid())
        assert listed["path"] == str(root / "live")
        assert str(root / "live") in run(*GPUFS, "leases", shared_mount.path).stdout
    assert not registrations(shared_mount)


@pytest.mark.complains
def test_memory_that_a_copy_uses_stays_allocated(root: Path, shared_mount: GpufsMount) -> None:
    """However often the program asks: what it allocates there next must not become a part of the copy."""
    registration = gpufs.register(shared_array(noise(16 * MIB)), root / "live")
    with file_system("ext4") as disk, open(disk / "copy", "wb") as copy, open(root / "live", "rb") as live:
        copy.write(bytes(16 * MIB))
        copy.flush()
        os.fsync(copy.fileno())
        begun = threading.Event()

        def store() -> None:
            with connection(shared_mount.path) as client:
                descriptors = copy.fileno(), live.fileno()
                client.copy("store", *descriptors, interval=0.02, progress=lambda _: begun.set())

        copying = threading.Thread(target=store)
        run("fsfreeze", "--freeze", disk)  # writing to it waits
        try:
            copying.start()
            assert begun.wait(PATIENCE)
            time.sleep(0.5)
            assert errno_of(registration.close) == errno.ETIMEDOUT
            assert not registration.closed
            closing = threading.Thread(target=registration.close)
            closing.start()
            closing.join(1)
            assert closing.is_alive()
        finally:
            run("fsfreeze", "--unfreeze", disk)
        closing.join()
        copying.join()
    assert registration.closed


def test_a_program_that_does_not_keep_the_registration(root: Path) -> None:
    """The file stays until the program ends."""
    script = (
        "import gc, mmap, numpy, os, sys, gpufs\n"
        "fd = os.memfd_create('x'); os.ftruncate(fd, 4096)\n"
        "def show():\n"
        "    array = numpy.frombuffer(mmap.mmap(fd, 4096), dtype=numpy.uint8); array[:] = 7\n"
        "    gpufs.register(array, sys.argv[1])\n"
        "show(); gc.collect(); print(open(sys.argv[1], 'rb').read() == bytes([7]) * 4096)\n"
    )
    assert run(sys.executable, "-c", script, root / "live").stdout.strip() == "True"
    wait_until(lambda: not list(root.iterdir()), 10, "the end of the name")


# ---- modules ----


class Model(torch.nn.Module):
    """With tied tensors and an empty one."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(2, 3) for _ in range(layers)])
        self.norm = torch.nn.BatchNorm1d(3)
        self.head = self.layers[0]
        self.register_buffer("empty", torch.empty(0))


@pytest.mark.parametrize(("layers", "there"), [(3, True), (140, False)], ids=["small", "hundreds of tensors"])
def test_a_module_is_a_directory_of_its_tensors(root: Path, layers: int, there: bool) -> None:
    """``there``: whether the directory exists."""
    model: Any = Model(layers).share_memory()
    named = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    del named["empty"]
    if there:
        (root / "live").mkdir()
    with gpufs.register(model, root / "live") as registered:
        assert set(os.listdir(root / "live")) == set(registered.tensors) == set(named)
        assert registered.nbytes == sum(tensor.nbytes for tensor in {*named.values()})
        for name, tensor in named.items():
            assert (root / "live" / name).read_bytes() == tensor.detach().numpy().tobytes()
        with torch.no_grad():
            model.head.weight[1, 1] = 7
        for name in ("head.weight", "layers.0.weight"):
            assert numpy.fromfile(root / "live" / name, numpy.float32)[3] == 7
    assert registered.closed
    registered.close()
    assert (root / "live").exists() == there
    assert not there or not os.listdir(root / "live")


def test_a_module_that_cannot_be_registered_leaves_nothing(root: Path, tmp_path: Path) -> None:
    model: Any = Model(2).share_memory()
    model.norm.register_buffer("turned", torch.zeros(3, 2).T.share_memory_())  # type: ignore[no-untyped-call]
    with pytest.raises(ValueError, match=r"norm\.turned"):
        gpufs.register(model, root / "live")
    del model.norm.turned
    model.norm.register_buffer("private", torch.zeros(3))
    with pytest.raises(OSError, match=r"norm\.private"):
        gpufs.register(model, root / "live")
    with pytest.raises(gpufs.NotOnMount):
        gpufs.register(model, tmp_path / "live")
    with pytest.raises(FileNotFoundError):
        gpufs.register(model, root / "none" / "live")
    with pytest.raises(TypeError):
        gpufs.register(model, root / "live", size=5)
    assert not os.listdir(root)
    assert not os.listdir(tmp_path)
