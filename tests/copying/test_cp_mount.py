"""`gpufs cp` and the copy service on real mounts."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import stat
import subprocess
import tempfile
from pathlib import Path
from typing import Any, cast

import pytest
from support.copying import BOTH, READ, WRITE, connection, opened, transfers, wait_for_no_copies
from support.data import GIB, MIB, assert_same, noise
from support.hanging import HangingMount
from support.mounting import GPUFS, GpufsMount, Mounter
from support.processes import PATIENCE, as_nobody, errno_of, run, wait_until

from gpufs import client
from gpufs.protocol import Direction

pytestmark = pytest.mark.driver

GPUFS_CP = (*GPUFS, "cp")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a slow server, or acts as another user")


def cp(*words: str | Path, check: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
    return run(*GPUFS_CP, *words, check=check, **options)


# ---- copies ----


@pytest.mark.parametrize("size", [0, 1, 4096, (128 << 10) + 1, 5 * MIB + 7])
def test_a_file_of_any_size_is_copied_there_and_back(root: Path, host: Path, size: int) -> None:
    content = noise(size, size)
    (host / "source").write_bytes(content)
    (root / "file").write_bytes(b"old contents")
    assert (root / "file").stat().st_size == 12  # which the kernel keeps
    there = client.copy(host / "source", root / "file", fastpath="off")
    assert (root / "file").stat().st_size == size
    assert_same((root / "file").read_bytes(), content, "on the device")
    back = client.copy(root / "file", host / "back", fastpath="off")
    assert_same((host / "back").read_bytes(), content, "back on the host")
    for result in (there, back):
        assert result.bytes == size
        assert sum(result.paths.values()) == size
        assert result.method == "transfer"


def test_files_below_backing_are_copied_as_files(mount: Mounter, host: Path) -> None:
    """Neither file is on a device, so the client reads and writes them itself."""
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


# ---- the command ----


def test_a_mount_is_found_through_links_and_bind_mounts(shared_mount: GpufsMount, root: Path, host: Path) -> None:
    """The path may be relative, or lead through a symbolic link or a bind mount."""
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


@as_root
@pytest.mark.complains
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_end_of_the_daemon_ends_a_copy(mount: Mounter, host: Path, number: signal.Signals) -> None:
    """umount(8) is refused. A signal to the daemon ends the copy and the mount, and the client says why in one line."""
    own = mount(memory=2 * GIB)
    with HangingMount(operations=(), good=GIB, delay=0.005) as slow:
        command = [*GPUFS_CP, str(slow.file), str(own.device / "file")]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        wait_until(lambda: transfers(own)["running"] or child.poll() is not None, 20, "the start of the copy")
        assert run("umount", own.path, check=False).returncode == 32
        own.signal(number)
        _, errors = child.communicate(timeout=PATIENCE)
        assert (child.returncode, len(errors.splitlines())) == (1, 1), errors
        assert errors.startswith("gpufs cp: ")
    assert own.daemon.wait(PATIENCE) == (0 if number == signal.SIGTERM else -number)
    wait_until(lambda: not own.mounted(), 20, "the end of the mount")
    (host / "source").write_bytes(b"late")
    late = cp(host / "source", own.device / "file", check=False)
    assert (late.returncode, len(late.stderr.splitlines())) == (1, 1)


# ---- rights: a root daemon and a plain user ----


def ask(root: Path, direction: str, host_fd: int, mount_fd: int) -> tuple[int, int]:
    with connection(root.parent.parent) as daemon:
        result = daemon.copy(cast(Direction, direction), host_fd, mount_fd)
    return result.error, result.done


@as_root
def test_a_plain_user_can_copy_only_what_that_user_may_open(root: Path, host: Path) -> None:
    """The user passes every kind of descriptor of root's files. The daemon never gets more access from one."""
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
def test_a_copy_clears_set_id_bits(root: Path, host: Path) -> None:
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


# ---- wrong and hostile ----


def test_only_files_of_the_host_and_of_this_mount_are_copied(mount: Mounter, root: Path, host: Path) -> None:
    other = mount()
    for path in (root / "file", root / "second", host / "file", other.device / "file"):
        path.write_bytes(b"precious")
    os.mkfifo(root / "fifo")
    (root / "dir").mkdir()
    pipe, socks = os.pipe(), socket.socketpair()
    with (
        os.fdopen(pipe[0], "rb") as read_end,
        os.fdopen(pipe[1], "wb"),
        socks[0] as sock,
        socks[1],
        opened(Path("/dev/zero")) as zero,
        opened(Path("/proc/self/status")) as status,
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
        for special in (zero, status, read_end.fileno(), sock.fileno()):
            assert ask(root, "load", special, ours) == (errno.EINVAL, 0)
    with opened(root.parent.parent / ".gpufs" / "version") as control, opened(host / "file", WRITE) as hosts:
        assert ask(root, "store", hosts, control) == (errno.EINVAL, 0)
    for path in (root / "file", root / "second", host / "file", other.device / "file"):
        assert path.read_bytes() == b"precious"


@as_root
@pytest.mark.complains
@pytest.mark.parametrize("operations", [("read",), ("statfs",)], ids=lambda names: names[0])
def test_a_hung_network_mount_does_not_block_other_copies(
    shared_mount: GpufsMount, root: Path, host: Path, operations: tuple[str, ...]
) -> None:
    """Other copies finish, its own clients can be interrupted, and nothing is left."""
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
        wait_for_no_copies(shared_mount)
        assert (root / "hung").stat().st_size == 0
