"""Attaching on real mounts: what programs see through memory and through the mount, and how attachments end."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Callable
from errno import EBUSY, EINVAL, EISDIR, ENODATA, ENOENT, ENOSPC, ENOTCONN, EXDEV
from pathlib import Path
from typing import Any

import numpy
import pytest
from support.attaching import HOLD, kill_programs, leases, program, wait_for_leases
from support.cli import gpufs as command
from support.data import MIB, noise
from support.linux import FALLOC_KEEP_SIZE as KEEP_SIZE
from support.linux import FALLOC_PUNCH_HOLE as PUNCH_HOLE
from support.linux import FALLOC_ZERO_RANGE as ZERO_RANGE
from support.linux import fallocate
from support.mounting import GpufsMount, Mounter
from support.processes import PATIENCE, Snapshot, errno_of, run, wait_until

import gpufs
from gpufs import protocol

SIZE = 5 * MIB + 12345
pytestmark = pytest.mark.usefixtures("on_host_memory")


@pytest.fixture
def file(shared_mount: GpufsMount) -> Any:
    """A file with content on the shared mount. Nothing of it is attached at the end."""
    path = shared_mount.device / "attached"
    path.write_bytes(noise(SIZE))
    yield path
    gc.collect()
    wait_for_leases(shared_mount, 0)
    path.unlink(missing_ok=True)


# ---- what an array is ----


def test_an_attached_file_is_an_array_of_its_bytes(file: Path) -> None:
    with gpufs.attach(file) as array:
        assert (array.shape, array.dtype, array.nbytes, len(array)) == ((SIZE,), "uint8", SIZE, SIZE)
        assert (array.device, array.mode, array.private, array.path) == ("cpu", "r", False, str(file))
        assert array.address > 0
        assert str(file) in repr(array)
        assert numpy.array_equal(numpy.asarray(array), numpy.frombuffer(noise(SIZE), numpy.uint8))
        assert ctypes.string_at(array.address, 100) == noise(SIZE)[:100]
    assert array.closed
    assert str(file) in repr(array)
    with pytest.raises(ValueError, match="closed"):
        array.view("uint8")
    array.close()


def test_parts_and_views_show_the_same_memory(file: Path) -> None:
    with gpufs.attach(file, "r+") as array:
        words = array[: 4 * MIB].view("<u4", (1024, -1))
        expected = numpy.asarray(array)[: 4 * MIB].view(numpy.uint32).reshape(1024, -1)
        backwards = (slice(None, None, -1), (slice(9, 2, -3), ...), (..., slice(None, None, -5)), slice(0, 5, -1))
        parts = (3, -1, (5, 7), slice(10, 20), (slice(None, None, 3), slice(1, 9, 2)), (..., 4), (2, ...), ())
        for index in (*parts, *backwards):
            part: Any = words[index]
            assert part.shape == expected[index].shape
            assert numpy.array_equal(numpy.asarray(part), expected[index])
            assert part.tobytes() == expected[index].tobytes()
        with pytest.raises(BufferError):  # torch would end the program
            numpy.from_dlpack(words[::-1])
        numpy.asarray(words)[0, 0] = 0xDEADBEEF
        assert expected[0, 0] == 0xDEADBEEF
        assert words[0].view(numpy.uint8).shape == (4096,)
        assert words.view(shape=(-1,)).shape == (MIB,)
        assert words.view("bfloat16").nbytes == words.nbytes
        outside: list[Callable[[], object]] = [lambda: words[1024], lambda: words[0, 0, 0], lambda: words[..., ...]]
        for bad in outside:
            with pytest.raises(IndexError):
                bad()
        senseless: list[Callable[[], object]] = [
            lambda: words.view("float64", (5, -1)),
            lambda: words[:, ::2].view("uint8"),
            lambda: array[1:].view("uint16"),
            lambda: words.refresh(),
        ]
        for wrong in senseless:
            with pytest.raises(ValueError):
                wrong()
        with pytest.raises(TypeError):
            words.view("float33")


def test_elements_are_written_as_in_numpy(file: Path) -> None:
    with gpufs.attach(file, "r+") as array:
        words = array[: 4 * MIB].view("<u4", (1024, -1))
        expected = numpy.asarray(words).copy()
        row = numpy.arange(1024)
        assignments: tuple[tuple[Any, Any], ...] = (
            ((3, 4), 5),
            (slice(10, 20), row),
            ((..., 7), row[::-1]),
            ((slice(None, None, -2), 0), row[:512]),
            (0, words[1]),
            (slice(0, 0), 9),
        )
        for index, value in assignments:
            words[index] = value
            expected[index] = value
        assert file.read_bytes()[: 4 * MIB] == expected.tobytes()
        with pytest.raises(ValueError):
            words[0] = row[:7]
        with pytest.raises(IndexError):
            words[1024] = 1
        with pytest.raises(TypeError, match="torch"):
            array[:4].view("bfloat16")[0] = 1.5
    with gpufs.attach(file) as array, pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    assert file.read_bytes()[: 4 * MIB] == expected.tobytes()


@pytest.mark.parametrize("max_version", [None, (0, 8), (1, 0), (1, 1)])
def test_dlpack_of_every_version_is_the_same_memory(file: Path, max_version: tuple[int, int] | None) -> None:
    class Consumer:
        """As a library that understands only this version."""

        def __init__(self, array: Any) -> None:
            self.array = array

        def __dlpack_device__(self) -> Any:
            return self.array.__dlpack_device__()

        def __dlpack__(self, **_: Any) -> Any:
            return self.array.__dlpack__(max_version=max_version)

    with gpufs.attach(file, "r+") as array:
        part = array[: 2 * MIB].view("float32", (512, -1))[3:100, ::2]
        taken = numpy.from_dlpack(Consumer(part))
        assert (taken.shape, taken.strides) == (part.shape, part.strides)
        assert taken.dtype == numpy.float32
        assert taken.ctypes.data == part.address
        del taken
        unused = part.__dlpack__(max_version=max_version)
        del unused
        with pytest.raises(BufferError):
            part.__dlpack__(copy=True)
        with pytest.raises(BufferError):
            part.__dlpack__(dl_device=(2, 0))


def test_memory_of_mode_r_cannot_be_written(file: Path) -> None:
    with gpufs.attach(file) as array:
        assert not numpy.asarray(array).flags.writeable
        assert not numpy.from_dlpack(array).flags.writeable
        assert array.memoryview().readonly
        script = "import ctypes, gpufs, sys; a = gpufs.attach(sys.argv[1]); ctypes.memset(a.address, 0, 1)"
        done = run(sys.executable, "-c", script, file, check=False)
        assert done.returncode == -signal.SIGSEGV
    assert file.read_bytes() == noise(SIZE)


def test_numpy_names_what_it_cannot_represent(file: Path) -> None:
    with gpufs.attach(file) as array, pytest.raises(TypeError, match="bfloat16"):
        numpy.asarray(array[:100].view("bfloat16"))
    with gpufs.attach(file) as array:
        assert not hasattr(array, "__cuda_array_interface__")
        with pytest.raises(TypeError):
            pickle.dumps(array)


# ---- memory and mount ----


def test_memory_and_mount_see_each_others_changes(file: Path) -> None:
    with gpufs.attach(file, "r+") as array, open(file, "r+b", buffering=0) as opened:
        memory = numpy.asarray(array)
        memory[1000:2000] = 7
        assert os.pread(opened.fileno(), 1002, 999) == noise(SIZE)[999:1000] + b"\7" * 1000 + noise(SIZE)[2000:2001]
        os.pwrite(opened.fileno(), b"through the mount", 4 * MIB)
        assert bytes(memory[4 * MIB : 4 * MIB + 17]) == b"through the mount"
        memory[-1] = 99
    assert file.read_bytes()[-1] == 99


def test_two_programs_share_one_memory(file: Path) -> None:
    script = """
import gpufs, numpy, sys
memory = numpy.asarray(gpufs.attach(sys.argv[1], "r+"))
print("ready", flush=True)
for line in sys.stdin:
    place, value = map(int, line.split())
    seen = int(memory[place])
    memory[place] = value
    print(seen, flush=True)
"""
    with gpufs.attach(file, "r+") as array, program(script, file) as other:
        memory = numpy.asarray(array)
        assert other.stdin is not None
        assert other.stdout is not None
        for place in (0, 1, 3 * MIB, SIZE - 1):
            memory[place] = 11
            other.stdin.write(f"{place} 22\n")
            other.stdin.flush()
            assert other.stdout.readline() == "11\n"
            assert memory[place] == 22
    assert file.read_bytes()[SIZE - 1] == 22


def test_a_mapping_sees_changes_once_its_page_is_dropped(file: Path) -> None:
    """As other changes: docs/contract.md, Coherence."""
    import mmap

    with open(file, "r+b") as opened, mmap.mmap(opened.fileno(), 0) as mapped, gpufs.attach(file, "r+") as array:
        memory = numpy.asarray(array)
        mapped[5] = 50
        mapped.flush()
        assert memory[5] == 50
        memory[6] = 60
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert file.read_bytes()[6] == 60


def test_times_change_when_a_writer_comes_and_goes(file: Path) -> None:
    os.utime(file, ns=(1, 1))
    gpufs.attach(file).close()
    assert file.stat().st_mtime_ns == 1
    array = gpufs.attach(file, "r+")
    wait_until(lambda: file.stat().st_mtime_ns > 1, 20, "a new time")
    os.utime(file, ns=(1, 1))
    array.close()
    wait_until(lambda: file.stat().st_mtime_ns > 1, 20, "a new time")


# ---- growth and holes ----


def test_growth_is_seen_after_refresh(file: Path) -> None:
    with gpufs.attach(file) as array:
        before = numpy.asarray(array)
        with open(file, "ab") as opened:
            opened.write(noise(7 * MIB))
        assert array.nbytes == SIZE
        address = array.address
        assert array.refresh() is array
        assert (array.nbytes, array.address) == (SIZE + 7 * MIB, address)
        assert numpy.array_equal(numpy.asarray(array), numpy.fromfile(file, numpy.uint8))
        assert before.nbytes == SIZE
        array.refresh()
        assert array.nbytes == SIZE + 7 * MIB


def test_an_empty_file_can_be_attached_and_grows(file: Path) -> None:
    file.write_bytes(b"")
    with gpufs.attach(file, "r+") as array:
        assert (array.shape, array.nbytes, len(array)) == ((0,), 0, 0)
        assert numpy.asarray(array).size == 0
        file.write_bytes(b"grown")
        assert bytes(array.refresh().memoryview()) == b"grown"


def test_a_file_that_outgrows_the_reserved_addresses_must_be_attached_again(file: Path) -> None:
    with gpufs.attach(file, reserve=SIZE) as array:
        with open(file, "ab") as opened:
            opened.write(bytes(9 * MIB))
        with pytest.raises(OSError, match="attach it again"):
            array.refresh()
        assert bytes(array.memoryview()) == noise(SIZE)
    with gpufs.attach(file) as array:
        assert array.nbytes == SIZE + 9 * MIB
    with pytest.raises(ValueError, match="reserve"):
        gpufs.attach(file, reserve=10)


def test_holes_are_allocated_for_writers_and_refused_for_readers(file: Path) -> None:
    os.truncate(file, 20 * MIB)
    with pytest.raises(OSError, match="fallocate") as refused:
        gpufs.attach(file)
    assert refused.value.errno == ENODATA
    with gpufs.attach(file, "r+") as array:
        assert file.stat().st_blocks * 512 >= 20 * MIB
        memory = numpy.asarray(array)
        assert not memory[SIZE:].any()
        memory[-1] = 1
    assert file.read_bytes()[-1] == 1
    gpufs.attach(file).close()
    del memory
    os.truncate(file, 0)
    os.truncate(file, 1 << 40)
    assert errno_of(gpufs.attach, file, "r+") == ENOSPC
    assert file.stat().st_blocks == 0


def test_attributes_are_right_as_soon_as_a_call_has_returned(file: Path, tmp_path: Path) -> None:
    """The kernel caches attributes for a second, and has to be told before the client is."""
    source = tmp_path / "source"
    source.write_bytes(bytes(2 * MIB))
    for _ in range(10):
        os.truncate(file, 0)
        os.truncate(file, 20 * MIB)
        gpufs.attach(file, "r+").close()
        assert file.stat().st_blocks * 512 >= 20 * MIB
        os.truncate(file, 0)
        gpufs.copy(source, file)
        assert file.stat().st_size == 2 * MIB


def test_a_small_file_is_attached(file: Path) -> None:
    neighbour = file.with_name("neighbour")
    neighbour.write_bytes(b"next to it")
    file.write_bytes(b"small")
    with gpufs.attach(file, "r+") as array:
        assert bytes(array.memoryview()) == b"small"
        numpy.asarray(array)[0] = ord("S")
        assert file.read_bytes() == b"Small"
        # No other file's bytes are in the memory that came with it.
        assert b"next to it" not in ctypes.string_at(array.address, 64 << 10)
    neighbour.unlink()


# ---- rules while a file is attached ----


@pytest.mark.complains  # about each refusal, which names the holder
def test_attached_memory_cannot_be_cut_off(file: Path, shared_mount: GpufsMount) -> None:
    with gpufs.attach(file), open(file, "r+b") as opened:
        assert errno_of(os.truncate, file, SIZE - 1) == EBUSY
        assert errno_of(os.ftruncate, opened.fileno(), 2 * MIB) == EBUSY
        assert errno_of(os.truncate, file, 0) == EBUSY
        assert errno_of(os.open, file, os.O_RDWR | os.O_TRUNC) == EBUSY
        assert errno_of(os.open, file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) == EBUSY
        assert errno_of(fallocate, opened.fileno(), PUNCH_HOLE | KEEP_SIZE, 0, 2 * MIB) == EBUSY
        assert errno_of(fallocate, opened.fileno(), PUNCH_HOLE | KEEP_SIZE, MIB, 5) == EBUSY
        assert file.read_bytes() == noise(SIZE)
        os.truncate(file, SIZE)
        os.truncate(file, SIZE + MIB)
        os.truncate(file, SIZE)
        opened.seek(0)
        opened.write(b"contents may change")
        opened.flush()
        fallocate(opened.fileno(), ZERO_RANGE | KEEP_SIZE, 0, 10)
        assert file.read_bytes()[:20] == bytes(10) + b"ay change" + noise(SIZE)[19:20]
        wait_until(lambda: f"PID {os.getpid()} " in shared_mount.log.read_text(), 20, "the holder in the log")
    os.truncate(file, 0)
    assert file.stat().st_size == 0


def test_memory_outlives_the_names_of_its_file(file: Path, shared_mount: GpufsMount) -> None:
    free = os.statvfs(file).f_bavail
    with gpufs.attach(file, "r+") as array:
        os.unlink(file)
        numpy.asarray(array)[:3] = 5
        assert bytes(array.memoryview()) == b"\5\5\5" + noise(SIZE)[3:]
        file.write_bytes(b"another")
        assert bytes(array.memoryview()[:3]) == b"\5\5\5"
    wait_until(lambda: os.statvfs(file).f_bavail >= free, 10, "the memory to be free")
    new = file.with_name("new")
    new.write_bytes(b"new contents")
    file.write_bytes(noise(SIZE))
    with gpufs.attach(file) as array:
        os.rename(new, file)
        assert bytes(array.memoryview()) == noise(SIZE)
        with gpufs.attach(file) as other:
            assert bytes(other.memoryview()) == b"new contents"


@pytest.mark.complains  # about each refusal, which names the holder
def test_the_last_user_ends_the_lease(file: Path, shared_mount: GpufsMount) -> None:
    users: list[Callable[[gpufs.DeviceArray], object]] = [
        lambda array: array[5:],
        lambda array: array.view("uint8", (-1, 5)),
        numpy.asarray,
        numpy.from_dlpack,
        lambda array: array.memoryview(),
        lambda array: array.__dlpack__(),
        lambda array: numpy.asarray(array)[10:20][::2],
    ]
    for use in users:
        array = gpufs.attach(file)
        user = use(array)
        array.close()
        assert errno_of(os.truncate, file, 0) == EBUSY
        del user
        gc.collect()
        wait_for_leases(shared_mount, 0)
    os.truncate(file, 0)


def test_a_forked_child_neither_ends_nor_keeps_leases(file: Path, shared_mount: GpufsMount) -> None:
    script = """
import gpufs, os, sys, time
array = gpufs.attach(sys.argv[1])
if os.fork() == 0:
    array.close()
    del array
    try:
        gpufs.attach(sys.argv[1])
    except OSError as error:
        print(error, flush=True)
    sys.stdin.read()
    os._exit(0)
sys.stdin.read()
"""
    with program(script, file) as parent:
        wait_for_leases(shared_mount, 1)
        assert [lease["pid"] for lease in leases(shared_mount)] == [parent.pid]
        parent.send_signal(signal.SIGKILL)
        wait_for_leases(shared_mount, 0)
        assert parent.stdin is not None  # which the child still reads


# ---- what cannot be attached ----


def test_what_cannot_be_attached(file: Path, shared_mount: GpufsMount, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"x")
    fifo = file.with_name("fifo")
    os.mkfifo(fifo)
    for path, error in (
        (file.with_name("missing"), ENOENT),
        (outside, EXDEV),
        (file.parent, EISDIR),
        (fifo, EINVAL),
        (shared_mount.path / ".gpufs/status", EINVAL),
    ):
        with pytest.raises(OSError) as refused:
            gpufs.attach(path)
        assert (refused.value.errno, refused.value.filename) == (error, str(path))
    fifo.unlink()
    with pytest.raises(ValueError, match="mode"):
        gpufs.attach(file, "w")  # type: ignore[arg-type]


# ---- ends ----


def test_programs_that_are_killed_leak_nothing(mount: Mounter) -> None:
    """1,000 of them in the campaign `attached`."""
    mounted = mount(memory=512 * MIB)
    (mounted.device / "small").write_bytes(b"in a slab, whose descriptor the daemon keeps")
    kill_programs(mounted.device, 5, 1)
    wait_for_leases(mounted, 0)
    before = Snapshot.of(mounted.pid)
    kill_programs(mounted.device, 12, 2)
    wait_for_leases(mounted, 0)
    for path in mounted.device.iterdir():
        path.unlink()

    def settled() -> bool:
        now = Snapshot.of(mounted.pid)
        free = os.statvfs(mounted.device)
        memory_is_free = now.memfds <= 1 and free.f_bfree == free.f_blocks
        return memory_is_free and now.descriptors <= before.descriptors and now.threads <= before.threads + 8

    wait_until(settled, 40, "descriptors, memory and, after ten idle seconds, threads to be released")
    assert not mounted.complaints()


@pytest.mark.complains
def test_memory_works_after_the_daemon_was_killed(mount: Mounter) -> None:
    mounted = mount()
    path = mounted.device / "file"
    path.write_bytes(noise(SIZE))
    array, reader = gpufs.attach(path, "r+"), gpufs.attach(path)
    mounted.signal(signal.SIGKILL)
    wait_until(lambda: not mounted.mounted(), 20, "the dead mount to be removed")
    memory = numpy.asarray(array)
    memory[0] = memory[1]
    assert bytes(reader.memoryview()) == noise(SIZE)[1:2] + noise(SIZE)[1:]
    with pytest.raises(OSError, match="daemon") as refused:
        array.refresh()
    assert (refused.value.errno, refused.value.filename) == (ENOTCONN, str(path))
    array.close()
    reader.close()
    assert memory[0] == memory[1]


@pytest.mark.complains
def test_a_dead_mount_is_named(mount: Mounter) -> None:
    mounted = mount("--no-auto-unmount")
    path = mounted.device / "file"
    path.write_bytes(noise(SIZE))
    with gpufs.attach(path):
        mounted.signal(signal.SIGKILL)
        mounted.daemon.wait()
        with pytest.raises(OSError, match="gpufs umount") as refused:
            gpufs.attach(path)
        assert refused.value.errno == ENOTCONN


# ---- daemons that lie ----


def lie(listener: socket.socket, sizes: list[int]) -> None:
    """Answers each request for memory with a piece of 2 MiB, and a size that a file with that memory cannot have."""
    while sizes:
        sock, _ = listener.accept()
        with sock:
            while data := sock.recv(1 << 16):
                request = protocol.decode_client(data)
                if isinstance(request, protocol.Hello):
                    protocol.send(sock, protocol.Welcome(1, "", 16, "host"))
                elif isinstance(request, protocol.Detach):
                    protocol.send(sock, protocol.Done(request.id))
                elif isinstance(request, protocol.Attach | protocol.Refresh):
                    pieces = int(isinstance(request, protocol.Attach))
                    answer = protocol.Attached(request.id, driver="host", size=sizes.pop(0), pieces=pieces)
                    protocol.send(sock, answer)
                    if pieces:
                        memory = os.memfd_create("memory")
                        os.ftruncate(memory, 2 * MIB)
                        protocol.send(sock, protocol.Pieces(request.id, [0], [2 * MIB]), [memory])
                        os.close(memory)


@pytest.mark.skipif(os.geteuid() != 0, reason="puts another socket in the place of the daemon's, which takes root")
def test_sizes_that_the_daemon_invents_are_refused(file: Path, shared_mount: GpufsMount, tmp_path: Path) -> None:
    """Another user's daemon must not make a program use addresses where something else is."""
    file.with_name("another").write_text(str(tmp_path / "socket"))
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(tmp_path / "socket"))
    listener.listen()
    listener.settimeout(PATIENCE)
    daemon = threading.Thread(target=lie, args=(listener, [4 * MIB, 2 * MIB, 1 << 40]))
    daemon.start()
    script = f"""
import gpufs, sys
path = sys.argv[1]
try:
    raise SystemExit(f"accepted {{gpufs.attach(path)!r}}")
except OSError:
    pass
with gpufs.attach(path, reserve={4 * MIB}) as array:
    try:
        raise SystemExit(f"accepted {{array.refresh()!r}}")
    except OSError:
        assert array.nbytes == {2 * MIB}
"""
    run("mount", "--bind", file.with_name("another"), shared_mount.path / ".gpufs/socket")
    try:
        run(sys.executable, "-c", script, file)
    finally:
        run("umount", shared_mount.path / ".gpufs/socket")
        daemon.join()
        listener.close()
    file.with_name("another").unlink()


# ---- commands ----


def test_gpufs_leases(file: Path, shared_mount: GpufsMount) -> None:
    assert json.loads(command("leases", "--json", shared_mount.path).stdout) == []
    assert "nothing" in command("leases", shared_mount.path).stdout
    with program(HOLD, file, "r+") as holder:
        (lease,) = json.loads(command("leases", "--json", shared_mount.path).stdout)
        assert lease["path"] == str(file)
        assert (lease["pid"], lease["mode"], lease["bytes"]) == (holder.pid, "r+", SIZE)
        assert lease["program"].startswith("python")
        assert lease["age_seconds"] >= 0
        assert lease["mountpoint"] == str(shared_mount.path)
        text = command("leases", shared_mount.path).stdout
        assert str(holder.pid) in text
        assert str(file) in text


def test_gpufs_leases_follows_names(file: Path, shared_mount: GpufsMount) -> None:
    def shown() -> tuple[str, str]:
        (lease,) = json.loads(command("leases", "--json", shared_mount.path).stdout)
        text = command("leases", shared_mount.path).stdout
        assert lease["path"] in text
        assert (f"({lease['state']})" in text) == (lease["state"] != "present")
        return lease["path"], lease["state"]

    other = file.with_name("other")
    with program(HOLD, file, "r"):
        assert shown() == (str(file), "present")
        file.rename(other)
        file.write_bytes(b"another file")
        assert shown() == (str(other), "present")
        file.rename(other)
        assert shown()[1] == "removed"
        (other.with_name("third")).write_bytes(b"a third file")
        (other.with_name("third")).rename(file)
        assert shown() == (str(file), "replaced")
        file.unlink()
        assert shown() == (str(file), "removed")
        file.write_bytes(b"")
        other.unlink()


def test_umount_sums_up_the_files_of_a_program(mount: Mounter) -> None:
    mounted = mount()
    for number in range(12):
        (mounted.device / str(number)).write_bytes(bytes(MIB))
    script = """
import gpufs, sys
arrays = [gpufs.attach(f"{sys.argv[1]}/{number}", "r") for number in range(12)]
print("ready", flush=True)
sys.stdin.read()
"""
    with program(script, mounted.device) as holder:
        done = command("umount", mounted.path)
        (line,) = done.stderr.splitlines()
        assert f"({holder.pid}), 12.0 MiB of 12 files" in line
        mounted.wait_ended()


def test_umount_names_the_programs_and_goes_on(mount: Mounter) -> None:
    mounted = mount()
    path = mounted.device / "file"
    path.write_bytes(noise(SIZE))
    with program(HOLD, path, "r") as holder:
        done = command("umount", mounted.path)
        assert f"({holder.pid})" in done.stderr
        assert str(path) in done.stderr
        mounted.wait_ended()
        assert holder.poll() is None


def test_attaching_starts_no_thread_and_leaves_no_descriptor(file: Path) -> None:
    script = """
import gpufs, os, sys
def held():
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
gpufs.attach(sys.argv[1]).close()
before = held()
for _ in range(50):
    with gpufs.attach(sys.argv[1], "r+") as array:
        array.refresh()
assert held() == before, (before, held())
print(before)
"""
    run(sys.executable, "-c", script, file)
