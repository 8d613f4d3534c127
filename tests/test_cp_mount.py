"""`gpufs cp` and the copy service on real mounts."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.copying import opened
from support.data import GIB, MIB, assert_same, noise, sha256
from support.fastpath import skip_without_fastpath
from support.hanging import HangingMount
from support.mounting import GPUFS, GpufsMount, Mounter
from support.processes import NOBODY, PATIENCE, Snapshot, as_nobody, errno_of, run, wait_until

from gpufs import client, protocol
from gpufs.client import _find
from gpufs.client._connection import Connection
from gpufs.protocol import Copy, Hello, Result

pytestmark = pytest.mark.driver

GPUFS_CP = (*GPUFS, "cp")
READ, WRITE, BOTH = os.O_RDONLY, os.O_WRONLY, os.O_RDWR


@pytest.fixture
def host() -> Iterator[Path]:
    """An empty directory, mode 777, on a disk."""
    path = Path(tempfile.mkdtemp(prefix="gpufs-client-", dir="/var/tmp"))
    path.chmod(0o777)
    yield path
    shutil.rmtree(path)


def cp(*words: str | Path, check: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
    return run(*GPUFS_CP, *words, check=check, **options)


def transfers(mount: GpufsMount) -> dict[str, Any]:
    status: dict[str, Any] = json.loads((mount.path / ".gpufs" / "status").read_text())
    counters: dict[str, Any] = status["transfers"]
    return counters


def connect(path: Path) -> Connection:
    """As any client: from a file on the mount."""
    device = os.stat(path).st_dev
    return Connection(_find.connect(device, _find.mounts_by_device()[device]))


def started(mount: GpufsMount, child: subprocess.Popen[Any]) -> None:
    """Waits until the daemon copies for the child (or the child has ended: it was too fast)."""
    wait_until(lambda: transfers(mount)["running"] or child.poll() is not None, 20, "the start of the copy")


def idle(mount: GpufsMount, seconds: float = 10) -> None:
    wait_until(lambda: transfers(mount)["running"] == 0, seconds, "the end of all copies")


# ---- copies ----


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 128 << 10, (128 << 10) + 1, MIB, 2 * MIB, 5 * MIB + 7, 33 * MIB])
def test_there_and_back(root: Path, host: Path, size: int) -> None:
    content = noise(size, size)
    (host / "source").write_bytes(content)
    there = client.copy(host / "source", root / "file", fastpath="off")
    assert (root / "file").stat().st_size == size
    assert_same((root / "file").read_bytes(), content, "on the device")
    back = client.copy(root / "file", host / "back", fastpath="off")
    assert_same((host / "back").read_bytes(), content, "back on the host")
    for result in (there, back):
        assert result.bytes == size
        assert sum(result.paths.values()) == size
        assert result.method == "transfer"


def test_any_source_file_system(root: Path, host: Path, reference: Path) -> None:
    content = noise(9 * MIB + 1)
    for folder in (host, reference):
        (folder / "source").write_bytes(content)
        client.copy(folder / "source", root / "file", verify=True)
        client.copy(root / "file", folder / "back", verify=True, fsync=True)
        assert_same((folder / "back").read_bytes(), content)


def test_the_attributes_are_right_at_once(root: Path, host: Path) -> None:
    """Though the kernel had older ones in its cache, and whoever asks."""
    (host / "source").write_bytes(noise(7 * MIB))
    target = root / "file"
    target.write_bytes(b"old contents")
    os.utime(target, (1, 1))
    before = time.time()
    for _ in range(20):
        target.write_bytes(b"old contents")
        assert target.stat().st_size == 12
        client.copy(host / "source", target)
        assert run("stat", "-c", "%s", target).stdout.strip() == str(7 * MIB)
        status = target.stat()
        assert status.st_blocks * 512 >= 7 * MIB
        assert before - 1 <= status.st_mtime <= time.time() + 1
        assert before - 1 <= status.st_ctime <= time.time() + 1


def test_a_longer_destination_is_emptied_first(root: Path, host: Path) -> None:
    (host / "source").write_bytes(noise(MIB))
    (root / "file").write_bytes(noise(5 * MIB, 1))
    client.copy(host / "source", root / "file")
    assert_same((root / "file").read_bytes(), noise(MIB))


def test_who_has_the_file_open_sees_the_copy(root: Path, host: Path) -> None:
    (host / "source").write_bytes(noise(3 * MIB))
    target = root / "file"
    with open(target, "wb+", buffering=0) as file:
        file.write(b"x" * 100)
        client.copy(host / "source", target)
        assert os.fstat(file.fileno()).st_size == 3 * MIB
        assert_same(os.pread(file.fileno(), 3 * MIB, 0), noise(3 * MIB))


def test_offsets(root: Path, host: Path) -> None:
    content = noise(4 * MIB)
    (host / "source").write_bytes(content)
    (root / "file").write_bytes(b"z" * 6 * MIB)
    with opened(host / "source") as source, opened(root / "file", WRITE) as target, connect(root) as daemon:
        result = daemon.copy("load", source, target, host_offset=12345, offset=MIB + 3, size=2 * MIB + 1)
    assert (result.error, result.done) == (0, 2 * MIB + 1)
    expected = bytearray(b"z" * 6 * MIB)
    expected[MIB + 3 : 3 * MIB + 4] = content[12345 : 12345 + 2 * MIB + 1]
    assert_same((root / "file").read_bytes(), bytes(expected))


def test_into_a_file_past_its_end(root: Path, host: Path) -> None:
    (host / "source").write_bytes(b"12345")
    (root / "file").write_bytes(b"abc")
    with opened(host / "source") as source, opened(root / "file", WRITE) as target, connect(root) as daemon:
        assert daemon.copy("load", source, target, offset=10).done == 5
    assert (root / "file").read_bytes() == b"abc" + bytes(7) + b"12345"


def test_between_devices_by_the_kernel(shared_mount: GpufsMount, root: Path) -> None:
    content = noise(11 * MIB + 5)
    (root / "file").write_bytes(content)
    other = shared_mount.path / "gpu1" / f"other-{os.getpid()}"
    if not other.parent.is_dir():
        pytest.skip("one device only")
    try:
        result = client.copy(root / "file", other, verify=True)
        assert (result.method, result.paths) == ("kernel", {"kernel": len(content)})
        assert_same(other.read_bytes(), content)
    finally:
        other.unlink(missing_ok=True)


def test_control_files_can_be_copied_out(shared_mount: GpufsMount, host: Path) -> None:
    client.copy(shared_mount.path / ".gpufs" / "version", host / "version")
    assert (host / "version").read_text() == (shared_mount.path / ".gpufs" / "version").read_text()


def test_files_below_backing_are_copied_as_files(mount: Mounter, host: Path) -> None:
    """Neither end is on a device: there is nothing that the daemon could do, and nothing is refused for that."""
    content = noise(MIB + 5)
    with tempfile.TemporaryDirectory(dir="/var/tmp") as shown:
        one = mount("--backing", f"data={shown}")
        there = one.path / "backing" / "data"
        (host / "source").write_bytes(content)
        assert client.copy(host / "source", there / "file", verify=True).method == "mount"
        assert client.copy(there / "file", host / "back", verify=True).method == "mount"
        assert_same((Path(shown) / "file").read_bytes(), content)
        assert_same((host / "back").read_bytes(), content)
        cp("-r", one.path / "backing", host / "tree")
        assert_same((host / "tree" / "data" / "file").read_bytes(), content)
        with pytest.raises(client.CopyError) as refused:
            client.copy(host / "source", there / "file", fastpath="require")
        assert refused.value.errno == errno.EINVAL


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("losetup"), reason="makes a loop device")
def test_onto_a_disk_and_back(root: Path, host: Path) -> None:
    """The disk is larger than what is copied onto it: that alone is compared."""
    content = noise(MIB + 5)
    (root / "file").write_bytes(content)
    (host / "image").write_bytes(noise(3 * MIB, 1))
    made = run("losetup", "--find", "--show", host / "image", check=False)
    if made.returncode:
        pytest.skip(f"no loop devices: {made.stderr.strip()}")
    disk = Path(made.stdout.strip())
    try:
        assert client.copy(root / "file", disk, verify=True, fsync=True).sha256 == sha256(root / "file")
        assert client.copy(disk, root / "back", verify=True).bytes == 3 * MIB
        assert_same((root / "back").read_bytes(), content + noise(3 * MIB, 1)[MIB + 5 :])
        (root / "larger").write_bytes(noise(4 * MIB))
        with pytest.raises(client.CopyError) as full:
            client.copy(root / "larger", disk)
        assert (full.value.errno, full.value.bytes_done) == (errno.ENOSPC, 3 * MIB)
    finally:
        run("losetup", "--detach", disk)


def test_sparse_files_stay_sparse(root: Path, host: Path) -> None:
    with open(root / "file", "wb") as file:
        file.truncate(64 * MIB)
        os.pwrite(file.fileno(), b"data", 40 * MIB)
    client.copy(root / "file", host / "back")
    assert (host / "back").stat().st_size == 64 * MIB
    assert (host / "back").stat().st_blocks * 512 < 32 * MIB
    assert_same((host / "back").read_bytes(), (root / "file").read_bytes())


def test_an_unlinked_file_can_be_loaded_and_its_memory_goes(shared_mount: GpufsMount, root: Path, host: Path) -> None:
    (host / "source").write_bytes(noise(8 * MIB))
    with opened(host / "source") as source, connect(root) as daemon:
        with opened(root / "file", BOTH | os.O_CREAT) as target:
            (root / "file").unlink()
            assert daemon.copy("load", source, target).done == 8 * MIB
            assert_same(os.pread(target, 8 * MIB, 0), noise(8 * MIB))
        status = json.loads((shared_mount.path / ".gpufs" / "status").read_text())
        held = status["devices"][0]["held_bytes"]

        def freed() -> bool:
            status = json.loads((shared_mount.path / ".gpufs" / "status").read_text())
            return bool(status["devices"][0]["held_bytes"] <= max(held - 8 * MIB, 0)) or held < 8 * MIB

        wait_until(freed, 10, "the memory of an unlinked file")


def test_the_counters_tell_which_path_served(shared_mount: GpufsMount, root: Path, reference: Path) -> None:
    before = transfers(shared_mount)
    (reference / "source").write_bytes(noise(6 * MIB))
    result = client.copy(reference / "source", root / "file")  # tmpfs has no O_DIRECT that helps
    after = transfers(shared_mount)
    assert after["completed"] == before["completed"] + 1
    assert after["loaded_bytes"] - before["loaded_bytes"] == 6 * MIB
    for path, count in result.paths.items():
        assert after["path_bytes"][path] - before["path_bytes"].get(path, 0) == count
    assert sum(result.paths.values()) == 6 * MIB


def test_fastpath_on_demand(root: Path, host: Path, reference: Path, driver: str) -> None:
    """Aligned requests on a disk by the fastpath alone, at most a unit beside it for others, tmpfs refused."""
    skip_without_fastpath(host, driver)
    for size in (4 * MIB, 4 * MIB + 777):
        (host / "source").write_bytes(noise(size))
        load = client.copy(host / "source", root / "file", fastpath="require")
        store = client.copy(root / "file", host / "back", fastpath="require")
        for result in (load, store):
            assert result.paths["fastpath"] == 4 * MIB
            assert result.paths.get("fallback", 0) == size - 4 * MIB
        assert_same((host / "back").read_bytes(), noise(size))
    (reference / "source").write_bytes(noise(4 * MIB))
    done = cp("--fastpath", "require", reference / "source", root / "file", check=False)
    assert done.returncode == 1
    assert "file_system" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_memory_of_a_removed_file_is_waited_for(mount: Mounter, host: Path) -> None:
    small = mount("--keep-freed", "0", memory=96 * MIB)
    (host / "source").write_bytes(noise(64 * MIB))
    with client.Copier() as copier:
        for _ in range(8):
            assert copier.copy_file(str(host / "source"), str(small.device / "file")).bytes == 64 * MIB
            (small.device / "file").unlink()


def test_a_full_device(mount: Mounter, host: Path) -> None:
    small = mount(memory=32 * MIB)
    (host / "source").write_bytes(noise(48 * MIB))
    (small.device / "there").write_bytes(b"precious")
    for name in ("file", "there"):
        done = cp(host / "source", small.device / name, check=False)
        assert done.returncode == 1
        assert len(done.stderr.splitlines()) == 1
        assert "No space left on device: needs 48.0 MiB, " in done.stderr
        assert f" free on {small.device.name}" in done.stderr
    assert not (small.device / "file").exists()
    assert (small.device / "there").read_bytes() == b"precious"
    (host / "source").write_bytes(noise(20 * MIB))
    wait_until(lambda: cp(host / "source", small.device / "f", check=False).returncode == 0, 10, "memory given back")


def test_room_that_files_held_until_just_now(mount: Mounter, host: Path) -> None:
    """Their memory goes back a moment after rm has ended; a copy waits for it, as a write does."""
    small = mount(memory=64 * MIB)
    (host / "source").write_bytes(noise(60 * MIB))
    for _ in range(20):
        cp(host / "source", small.device / "file")
        (small.device / "file").unlink()


def test_a_full_disk(root: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="gpufs-client-", dir="/tmp") as folder:
        run("mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", folder)
        try:
            (root / "file").write_bytes(noise(40 * MIB))
            done = cp(root / "file", f"{folder}/copy", check=False)
            assert done.returncode == 1
            assert "No space left on device" in done.stderr
            assert os.listdir(folder) == []
            done = cp("--partial", root / "file", f"{folder}/copy", check=False)
            assert done.returncode == 1
            size = os.stat(f"{folder}/copy").st_size
            assert f"{size} of {40 * MIB} bytes are kept" in done.stderr
            assert_same(Path(folder, "copy").read_bytes(), noise(40 * MIB)[:size])
        finally:
            run("umount", folder)  # at once: the daemon holds nothing of it any more


# ---- the command ----


def test_recursive_with_verification(root: Path, host: Path) -> None:
    tree = host / "tree"
    for n in range(40):
        folder = tree / f"d{n % 5}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"f{n}").write_bytes(noise(n * n * 3001, n))
    (tree / "d0" / "link").symlink_to("f0")
    done = cp("-rp", "-j", "8", "--verify", "--json", tree, root)
    summary = json.loads(done.stdout)
    assert summary["files"] == 40
    assert not summary["errors"]
    assert {len(copy["sha256"]) for copy in summary["copies"]} == {64}
    run("diff", "-r", "--no-dereference", tree, root / "tree")
    cp("-rp", "--fsync", root / "tree", host / "back")
    run("diff", "-r", "--no-dereference", tree, host / "back")
    assert (host / "back" / "d3" / "f3").stat().st_mtime_ns == (tree / "d3" / "f3").stat().st_mtime_ns


def test_found_from_anywhere(shared_mount: GpufsMount, root: Path, host: Path) -> None:
    """By a relative path, through a symbolic link and through a bind mount of the mount and of a directory in it."""
    (host / "source").write_bytes(noise(MIB))
    (host / "link").symlink_to(root)
    (host / "bind").mkdir()
    done = json.loads(cp("--json", host / "source", "file", cwd=root).stdout)
    assert done["methods"] == {"transfer": 1}
    assert json.loads(cp("--json", host / "source", host / "link").stdout)["methods"] == {"transfer": 1}
    for what in (shared_mount.path, root):
        run("mount", "--bind", what, host / "bind")
        try:
            target = host / "bind" / root.relative_to(what) / "bound"
            assert json.loads(cp("--json", host / "source", target).stdout)["methods"] == {"transfer": 1}
            assert_same(target.read_bytes(), noise(MIB))
        finally:
            run("umount", host / "bind")


def test_interrupted(mount: Mounter, host: Path) -> None:
    """Ctrl-C: it ends soon, and --partial keeps what was copied."""
    big = mount(memory=2 * GIB, environment={"GPUFS_IO_WORKERS": "1", "GPUFS_IO_CHUNK_BYTES": "64K"})
    size = 3 * GIB // 2
    with open(host / "source", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)
    command = [*GPUFS_CP, "--json", "--partial", "--fastpath", "off", str(host / "source"), str(big.device / "file")]
    for pause in (0.15, 0.05, 0.01, *[0] * 40):  # a busy machine may let us send the signal too late
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started(big, child)
        time.sleep(pause)
        child.send_signal(signal.SIGINT)
        output, errors = child.communicate(timeout=PATIENCE)
        if child.returncode != 0 and (big.device / "file").stat().st_size < size:
            break
    assert child.returncode == -signal.SIGINT, errors
    (error,) = json.loads(output)["errors"]
    assert (big.device / "file").stat().st_size == error["bytes_done"] < size
    assert f"interrupted: {error['bytes_done']} of {size} bytes are kept" in errors
    idle(big)
    (big.device / "file").unlink()


def test_a_killed_client_leaves_nothing(shared_mount: GpufsMount, root: Path, host: Path) -> None:
    size = 200 * MIB
    with open(host / "source", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)
    (root / "warm").write_bytes(b"x")
    before = Snapshot.of(shared_mount.pid)
    for pause in (0.0, 0.02, 0.05):
        command = [*GPUFS_CP, "--fastpath", "off", str(host / "source"), str(root / "file")]
        child = subprocess.Popen(command)
        started(shared_mount, child)
        time.sleep(pause)
        child.kill()
        child.wait(PATIENCE)
        idle(shared_mount)
        assert (root / "file").stat().st_size <= size
        (root / "file").unlink(missing_ok=True)
    wait_until(lambda: Snapshot.of(shared_mount.pid).descriptors <= before.descriptors + 2, 10, "closed descriptors")


def test_umount_after_a_copy_is_not_busy(mount: Mounter, host: Path) -> None:
    (host / "source").write_bytes(noise(2 * MIB))
    for _ in range(5):
        own = mount()
        cp(host / "source", own.device / "file")
        own.unmount()


def test_umount_with_a_copy_under_way(mount: Mounter, host: Path) -> None:
    """Plainly it is refused; SIGTERM to the daemon cancels the copy, tells its client, and unmounts."""
    own = mount(memory=2 * GIB)
    with open(host / "source", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, GIB)
    with opened(host / "source") as source, opened(own.device / "file", WRITE | os.O_CREAT) as target:
        daemon = connect(own.path)
        results: list[Any] = []

        def copy() -> None:
            for _ in range(200):
                try:
                    result = daemon.copy("load", source, target, fastpath="off")
                except OSError as error:
                    results.append(error)
                    return
                results.append(result)
                if result.error:
                    return

        thread = threading.Thread(target=copy)
        thread.start()
        wait_until(lambda: transfers(own)["running"], 20, "the start of the copy")
        refused = subprocess.run(["umount", own.path], capture_output=True, check=False)
        assert refused.returncode == 32
        own.signal(signal.SIGTERM)
        thread.join(60)
        assert not thread.is_alive()
        daemon.close()
        last = results[-1]
        if isinstance(last, Result):
            assert last.error == errno.ECANCELED
        else:
            assert last.errno in (errno.ESHUTDOWN, errno.EPIPE, errno.ECONNRESET)
    own.wait_ended(30)


@pytest.mark.complains
def test_the_daemon_is_killed_in_the_middle(mount: Mounter, host: Path) -> None:
    """SIGKILL while it holds the descriptors of copies: nobody hangs, the client fails with one line."""
    own = mount(memory=2 * GIB)
    with open(host / "source", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, GIB)
    command = [*GPUFS_CP, "--fastpath", "off", str(host / "source"), str(own.device / "file")]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    started(own, child)
    own.signal(signal.SIGKILL)
    _, errors = child.communicate(timeout=PATIENCE)
    if child.returncode:
        assert len(errors.splitlines()) == 1
        assert errors.startswith("gpufs cp: ")
    own.daemon.wait(PATIENCE)
    late = cp(host / "source", own.device / "file", check=False)
    assert late.returncode == 1
    assert len(late.stderr.splitlines()) == 1
    own.rescue()


def test_a_mount_that_comes_later_is_noticed(mount: Mounter, host: Path) -> None:
    """By a program that keeps its Copier."""
    (host / "source").write_bytes(noise(2 * MIB))
    first = mount()
    with client.Copier() as copier:
        assert copier.copy_file(str(host / "source"), str(first.device / "file")).method == "transfer"
        second = mount()
        first.unmount()
        assert copier.copy_file(str(host / "source"), str(second.device / "file")).method == "transfer"
        assert copier.copy_file(str(second.device / "file"), str(host / "back")).method == "transfer"
    assert_same((host / "back").read_bytes(), noise(2 * MIB))


def test_a_name_may_hold_anything(root: Path, host: Path) -> None:
    folder = root / "a:b\nc\\040 \udcff"
    folder.mkdir()
    (host / "source").write_bytes(noise(MIB))
    cp(host / "source", folder / "\x1b[1m: -")
    cp(folder / "\x1b[1m: -", host / "back")
    assert_same((host / "back").read_bytes(), noise(MIB))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_ends_an_open_that_is_not_answered(root: Path, host: Path, number: signal.Signals) -> None:
    """As by a file's server that hangs: here others wait until a lease on the destination has been given back."""
    (root / "source").write_bytes(noise(MIB))
    (host / "target").write_bytes(b"before")
    lease = os.open(host / "target", os.O_RDWR)
    try:
        fcntl.fcntl(lease, fcntl.F_SETSIG, signal.SIGURG)  # which is ignored, and not SIGIO, which would end us
        fcntl.fcntl(lease, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        command = [*GPUFS_CP, str(root / "source"), str(host / "target")]
        child = subprocess.Popen(command, stderr=subprocess.PIPE)
        inode = f":{os.fstat(lease).st_ino} "
        wait_until(
            lambda: any(inode in x and "BREAKING" in x for x in Path("/proc/locks").read_text().splitlines()),
            20,
            "the destination to be opened",
        )
        child.send_signal(number)
        child.send_signal(number)  # the second one ends it at once
        child.communicate(timeout=PATIENCE)
        assert child.returncode == -number
    finally:
        os.close(lease)
    assert (host / "target").read_bytes() == b"before"


# ---- rights: a root daemon and a plain user ----

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="acts as another user, which takes root")


def ask(root: Path, direction: str, host_fd: int, mount_fd: int) -> tuple[int, int]:
    with connect(root) as daemon:
        result = daemon.copy(direction, host_fd, mount_fd)
    return result.error, result.done


@as_root
def test_a_plain_user_copies_his_own(root: Path, host: Path) -> None:
    content = noise(MIB)
    (host / "source").write_bytes(content)

    def copy() -> list[str]:
        there = client.copy(host / "source", root / "his")
        back = client.copy(root / "his", host / "back")
        return [there.method, back.method]

    assert as_nobody(copy) == ["transfer", "transfer"]
    assert_same((root / "his").read_bytes(), content)
    assert_same((host / "back").read_bytes(), content)
    assert (root / "his").stat().st_uid == (host / "back").stat().st_uid == NOBODY


@as_root
def test_a_plain_user_gets_nothing_that_he_may_not_open(root: Path, host: Path) -> None:
    """Each descriptor that he can get of root's files, by every way: the daemon widens none of them."""
    for folder in (host, root):
        for name, mode in (("secret", 0o600), ("readable", 0o644), ("writable", 0o622), ("his", 0o666)):
            (folder / name).write_bytes(name.encode() * 40_000)
            (folder / name).chmod(mode)

    def attack() -> list[str]:
        wrong = []
        for flags in (READ, WRITE, BOTH):
            for folder in (host, root):
                if errno_of(os.open, folder / "secret", flags) != errno.EACCES:
                    wrong.append(f"opened {folder}/secret")
        attempts = [
            # direction, host's file, its flags, mount's file, its flags, expected
            ("load", "secret", os.O_PATH, "his", WRITE, errno.EBADF),
            ("store", "secret", os.O_PATH, "his", READ, errno.EBADF),
            ("load", "his", READ, "secret", os.O_PATH, errno.EBADF),
            ("store", "his", WRITE, "secret", os.O_PATH, errno.EBADF),
            ("store", "readable", READ, "his", READ, errno.EBADF),
            ("load", "writable", WRITE, "his", WRITE, errno.EBADF),
            ("load", "his", READ, "readable", READ, errno.EBADF),
            ("store", "his", WRITE, "writable", WRITE, errno.EBADF),
            ("store", "his", WRITE | os.O_APPEND, "his", READ, errno.EBADF),
        ]
        for direction, ours, our_flags, there, their_flags, expected in attempts:
            with opened(host / ours, our_flags) as host_fd, opened(root / there, their_flags) as mount_fd:
                found = ask(root, direction, host_fd, mount_fd)
            if found != (expected, 0):
                wrong.append(f"{direction} {ours} {there}: {found}")
        # What the kernel lets him open may be copied.
        for direction, ours, our_flags, there, their_flags in (
            ("load", "readable", READ, "his", WRITE),
            ("store", "writable", WRITE, "his", READ),
            ("load", "his", READ, "writable", WRITE),
            ("store", "his", WRITE, "readable", READ),
        ):
            with opened(host / ours, our_flags) as host_fd, opened(root / there, their_flags) as mount_fd:
                error, done = ask(root, direction, host_fd, mount_fd)
            if error or not done:
                wrong.append(f"{direction} {ours} {there}: {error}")
        return wrong

    assert as_nobody(attack) == []
    for folder in (host, root):
        assert (folder / "secret").read_bytes() == b"secret" * 40_000
    for folder in (host, root):
        assert b"secret" not in (folder / "his").read_bytes()


@as_root
def test_set_id_bits_go_with_a_copy(root: Path, host: Path) -> None:
    for folder in (host, root):
        (folder / "program").write_bytes(noise(MIB))
        (folder / "program").chmod(0o6777)
        (folder / "input").write_bytes(noise(MIB, 1))
        (folder / "input").chmod(0o666)

    def copy() -> list[tuple[int, int]]:
        with opened(host / "input") as host_fd, opened(root / "program", WRITE) as mount_fd:
            load = ask(root, "load", host_fd, mount_fd)
        with opened(host / "program", WRITE) as host_fd, opened(root / "input") as mount_fd:
            return [load, ask(root, "store", host_fd, mount_fd)]

    assert as_nobody(copy) == [(0, MIB), (0, MIB)]
    for folder in (host, root):
        assert stat.S_IMODE((folder / "program").stat().st_mode) == 0o777


@as_root
def test_a_private_mounts_socket_is_closed_to_others(mount: Mounter) -> None:
    own = mount()
    path = (own.path / ".gpufs" / "socket").read_text().strip()
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600

    def connect_as_nobody() -> int:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            return errno_of(sock.connect, path)

    assert as_nobody(connect_as_nobody) == errno.EACCES
    own.unmount()
    assert not os.path.exists(path)


# ---- wrong and hostile ----


def test_descriptors_of_the_wrong_place(mount: Mounter, root: Path, host: Path) -> None:
    other = mount()
    for path in (root / "file", root / "second", host / "file", other.device / "file"):
        path.write_bytes(b"precious")
    os.mkfifo(root / "fifo")
    (root / "dir").mkdir()
    with (
        opened(root / "file", BOTH) as ours,
        opened(root / "second", BOTH) as second,
        opened(host / "file", BOTH) as hosts,
        opened(other.device / "file", BOTH) as others,
        opened(root / "fifo", BOTH) as fifo,
        opened(root / "dir", READ | os.O_DIRECTORY) as directory,
    ):
        assert ask(root, "load", hosts, others) == (errno.EXDEV, 0)
        assert ask(root, "load", hosts, hosts) == (errno.EXDEV, 0)
        assert ask(root, "load", ours, second) == (errno.EDEADLK, 0)
        assert ask(root, "load", others, ours) == (errno.EDEADLK, 0)
        assert ask(root, "load", hosts, fifo)[0] == errno.EINVAL
        assert ask(root, "store", hosts, directory)[0] == errno.EISDIR
    with opened(root.parent.parent / ".gpufs" / "version") as control, opened(host / "file", WRITE) as hosts:
        assert ask(root, "store", hosts, control) == (errno.EINVAL, 0)
    for path in (root / "file", root / "second", host / "file", other.device / "file"):
        assert path.read_bytes() == b"precious"


def test_garbage_and_floods_do_not_hurt_the_mount(shared_mount: GpufsMount, root: Path, host: Path) -> None:
    (root / "file").write_bytes(b"1234")
    (host / "file").write_bytes(b"1234")
    path = (shared_mount.path / ".gpufs" / "socket").read_text().strip()
    before = Snapshot.of(shared_mount.pid)
    with opened(root / "file", BOTH) as ours, opened(host / "file", BOTH) as hosts:

        def attack(number: int) -> None:
            for turn in range(30):
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
                    try:
                        sock.settimeout(2)
                        sock.connect(path)
                        kind = (number + turn) % 4
                        if kind == 0:
                            sock.send(os.urandom(1000))
                            continue
                        protocol.send(sock, Hello([1], "hostile"))
                        if kind == 1:
                            socket.send_fds(sock, [b"\x81\xa4type"], [ours, hosts] * 60)
                        elif kind == 2:
                            for id_ in range(1, 17):
                                protocol.send(sock, Copy(id_, "load"), (hosts, ours))
                        else:
                            protocol.send(sock, Copy(1, "load"), (hosts, ours))
                            sock.send(protocol.encode(Copy(2, "load"))[:20])
                    except OSError:
                        pass

        threads = [threading.Thread(target=attack, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            assert (root / "file").read_bytes()[:0] == b""  # the mount answers all the while
            time.sleep(0.01)
    idle(shared_mount)
    wait_until(lambda: transfers(shared_mount)["connections"] == 0, 20, "the end of all connections")
    wait_until(lambda: Snapshot.of(shared_mount.pid).descriptors <= before.descriptors + 2, 10, "closed descriptors")
    (host / "good").write_bytes(noise(MIB))
    assert client.copy(host / "good", root / "good").method == "transfer"


@as_root
@pytest.mark.complains
@pytest.mark.parametrize("operations", [("read",), ("statfs",)], ids=lambda names: names[0])
def test_a_hung_network_mount_takes_its_clients_share_alone(
    shared_mount: GpufsMount, root: Path, host: Path, operations: tuple[str, ...]
) -> None:
    """Others copy as ever; the client itself can be interrupted; nothing is left."""
    (host / "source").write_bytes(noise(4 * MIB))
    with HangingMount(operations=operations) as hung:
        words = [*GPUFS_CP, "--partial", "--fastpath", "off", str(hung.file), str(root / "hung")]
        children = [subprocess.Popen(words, stderr=subprocess.PIPE, text=True) for _ in range(3)]
        wait_until(lambda: transfers(shared_mount)["running"] == 3, 20, "three hung copies")
        for _ in range(5):
            client.copy(host / "source", root / "file", fastpath="off")
        assert transfers(shared_mount)["running"] == 3  # none of which has been waited for
        assert_same((root / "file").read_bytes(), noise(4 * MIB))
        children[2].kill()
        children[2].communicate(timeout=PATIENCE)
        for child in children[:2]:
            child.send_signal(signal.SIGINT)
            _, errors = child.communicate(timeout=PATIENCE)
            assert child.returncode == -signal.SIGINT
            assert "interrupted" in errors
        idle(shared_mount)
        assert (root / "hung").stat().st_size == 0


@as_root
def test_a_file_system_without_statfs(root: Path, host: Path) -> None:
    """A FUSE server need not answer STATFS."""
    with HangingMount(size=3 * MIB, good=3 * MIB, operations=(), lacking=("statfs",)) as server:
        with pytest.raises(OSError) as refused:
            os.statvfs(server.file)
        assert refused.value.errno == errno.ENOSYS
        done = json.loads(cp("--json", server.file, root / "file").stdout)
    assert done["methods"] == {"transfer": 1}
    assert (root / "file").read_bytes() == bytes(3 * MIB)


def test_many_clients_at_once(root: Path, host: Path) -> None:
    contents = [noise(300_000 + n * 4096, n) for n in range(12)]
    for n, content in enumerate(contents):
        (host / f"s{n}").write_bytes(content)
    words = [sys.executable, "-c", "import sys, gpufs.client as c; c.copy(*sys.argv[1:])"]
    children = [subprocess.Popen([*words, str(host / f"s{n}"), str(root / f"t{n}")]) for n in range(12)]
    assert [child.wait(PATIENCE) for child in children] == [0] * 12
    for n, content in enumerate(contents):
        assert sha256(root / f"t{n}") == sha256(host / f"s{n}")
        assert (root / f"t{n}").stat().st_size == len(content)
