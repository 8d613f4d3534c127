"""What the system itself does with files: run them, mount them, watch them, make them a root directory."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import signal
import stat
import struct
import subprocess
from collections.abc import Callable, Iterator
from errno import EAGAIN, EBUSY, EINVAL, EOPNOTSUPP, ESTALE, ETXTBSY, EWOULDBLOCK, EXDEV
from pathlib import Path
from typing import Any

import pytest
from support.data import MIB, noise
from support.processes import errno_of, in_child, run, wait_until

privileged = pytest.mark.skipif(os.geteuid() != 0, reason="mounts take root")
CLONE_NEWNS = 0x20000
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
RWF_NOWAIT = 8

libc = ctypes.CDLL(None, use_errno=True)


def checked(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def apart(action: Callable[[], Any]) -> Any:
    """What action returns in a child with mounts of its own."""

    def run_it() -> Any:
        checked(libc.unshare(CLONE_NEWNS))
        checked(libc.mount(None, b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None))
        return action()

    return in_child(run_it)


def bind(source: Path, target: Path) -> None:
    checked(libc.mount(os.fsencode(source), os.fsencode(target), None, ctypes.c_ulong(MS_BIND), None))


# ---- programs ----


@pytest.fixture
def program(root: Path) -> Path:
    path = root / "sleep"
    shutil.copy(shutil.which("sleep") or "/bin/sleep", path)
    return path


def test_programs_run(root: Path, program: Path) -> None:
    run(program, "0")
    script = root / "script"
    script.write_text(f"#!{program} 0\n")
    script.chmod(0o755)
    # The interpreter gets the script's name as one more number, which it cannot read.
    assert run(script, check=False).returncode == 1
    shell_script = root / "shell script"
    shell_script.write_text('#!/bin/sh\necho "$0 $1"\n')
    shell_script.chmod(0o755)
    assert run(shell_script, "said").stdout == f"{shell_script} said\n"
    fd = os.open(program, os.O_RDONLY)
    run(f"/proc/self/fd/{fd}", "0", pass_fds=[fd])
    os.close(fd)


def test_a_running_program_is_not_written_to(program: Path) -> None:
    with subprocess.Popen([program, "60"]) as running:
        try:
            for flags in (os.O_WRONLY, os.O_RDWR, os.O_RDWR | os.O_TRUNC):
                assert errno_of(os.open, program, flags) == ETXTBSY
            assert errno_of(os.truncate, program, 0) == ETXTBSY
            os.rename(program, program.with_name("moved"))
            shutil.copy(program.with_name("moved"), program)
            os.unlink(program.with_name("moved"))  # it goes on without a name
            assert running.poll() is None
        finally:
            running.kill()
    fd = os.open(program, os.O_WRONLY)
    assert errno_of(subprocess.run, [program, "0"], check=False) == ETXTBSY
    os.close(fd)
    run(program, "0")


# ---- mounts ----


@privileged
def test_bind_mounts(root: Path) -> None:
    for name in ("source", "target"):
        (root / name).mkdir()
    (root / "source/file").write_text("bound")
    (root / "over").touch()

    def use() -> tuple[str, str, int, int, int]:
        bind(root / "source", root / "target")
        bind(root / "source/file", root / "over")
        (root / "target/new").write_text("x")
        return (
            (root / "target/file").read_text(),
            (root / "over").read_text(),
            errno_of(os.rename, root / "target/file", root / "moved"),
            errno_of(os.link, root / "target/file", root / "linked"),
            errno_of(os.rmdir, root / "target"),
        )

    assert apart(use) == ("bound", "bound", EXDEV, EXDEV, EBUSY)
    assert (root / "source/new").read_text() == "x"
    assert os.listdir(root / "target") == []
    os.rmdir(root / "target")  # a mount in another namespace is no hindrance here


def mount_overlay(place: Path, **directories: Path) -> None:
    options = ",".join(f"{name}dir={path}" for name, path in directories.items())
    checked(libc.mount(b"none", os.fsencode(place), b"overlay", ctypes.c_ulong(0), options.encode()))


@privileged
def test_mounts_that_map_owners(root: Path, on_gpufs: bool) -> None:
    holder = subprocess.Popen(["unshare", "-U", "sh", "-c", "echo; exec sleep 60"], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        if not holder.stdout.readline():
            pytest.skip("no user namespaces here")
        for kind in ("uid_map", "gid_map"):
            Path(f"/proc/{holder.pid}/{kind}").write_text("0 1000 10")
        open_tree, mount_setattr, clone, idmap, empty_path = 428, 442, 1, 0x100000, 0x1000
        with open(f"/proc/{holder.pid}/ns/user", "rb") as owners:
            tree = libc.syscall(open_tree, -100, os.fsencode(root), clone | os.O_CLOEXEC)
            assert tree >= 0
            wanted = struct.pack("QQQQ", idmap, 0, 0, owners.fileno())
            ctypes.set_errno(0)
            libc.syscall(mount_setattr, tree, b"", empty_path, wanted, len(wanted))
            assert ctypes.get_errno() == (EINVAL if on_gpufs else 0)
            os.close(tree)
    finally:
        holder.kill()
        holder.wait()
        if holder.stdout is not None:
            holder.stdout.close()


@privileged
def test_overlays(root: Path, reference: Path) -> None:
    """Below a tmpfs, and above one: the upper directory holds copies, opaque directories and marks of removed names."""
    if "overlay" not in Path("/proc/filesystems").read_text():
        pytest.skip("no overlays here")

    def use(lower: Path, writable: Path) -> tuple[bool, bytes, list[str], list[str]]:
        place = reference / "place"
        upper, work = writable / "upper", writable / "work"
        for path in (place, upper, work, lower / "dir", lower / "gone"):
            path.mkdir(parents=True)
        (lower / "file").write_bytes(noise(3 * MIB))
        os.setxattr(lower / "file", "user.note", b"said")
        (lower / "dir/other").write_text("below")

        def inside() -> tuple[bool, bytes, list[str], list[str]]:
            mount_overlay(place, lower=lower, upper=upper, work=work)
            with open(place / "file", "r+b") as file:
                file.write(b"changed")
            os.link(place / "file", place / "linked")
            os.unlink(place / "dir/other")
            os.rmdir(place / "gone")
            (place / "gone").mkdir()  # hides what was below
            (place / "new").mkdir()
            os.rename(place / "new", place / "dir/new")
            copied = (place / "linked").read_bytes() == b"changed" + noise(3 * MIB)[7:]
            note, left = os.getxattr(place / "file", "user.note"), os.listdir(place / "dir")
            shown = sorted(os.listdir(place))
            checked(libc.umount(os.fsencode(place)))
            return copied, note, left, shown

        found: tuple[bool, bytes, list[str], list[str]] = apart(inside)
        assert (lower / "file").read_bytes() == noise(3 * MIB)
        assert stat.S_ISCHR(os.lstat(upper / "dir/other").st_mode)
        place.rmdir()
        return found

    wanted = (True, b"said", ["new"], ["dir", "file", "gone", "linked"])
    assert use(root / "lower", reference / "writable") == wanted

    def above() -> None:
        assert use(reference / "lower", root / "writable") == wanted

    # EINVAL: kernels that take every FUSE file system for one that may change behind an overlay's back.
    assert errno_of(above) in (0, EINVAL)


@privileged
def test_a_file_system_in_a_file(root: Path, reference: Path) -> None:
    if not all(map(shutil.which, ("mkfs.ext4", "losetup"))) or not Path("/dev/loop-control").exists():
        pytest.skip("no loop devices here")
    image, place = root / "image", reference / "place"
    place.mkdir()
    script = f"""truncate -s 64M {image}; mkfs.ext4 -q {image}
        for turn in 1 2; do
            mount -o loop {image} {place}
            if [ $turn = 1 ]; then head -c 9000000 /dev/urandom > {place}/file; fi
            sha256sum < {place}/file
            umount {place}
        done"""
    lines = run("unshare", "-m", "bash", "-euo", "pipefail", "-c", script).stdout.splitlines()
    assert len(lines) == 2
    assert lines[0] == lines[1]


@privileged
def test_as_a_root_directory(root: Path) -> None:
    (root / "inside").mkdir()
    (root / "file").write_text("here")

    def change() -> tuple[list[str], str, str]:
        os.chroot(root)
        os.chdir("/inside")
        return sorted(os.listdir("/")), Path("../../../file").read_text(), os.getcwd()

    assert in_child(change) == (["file", "inside"], "here", "/inside")

    def pivot() -> list[str]:
        bind(root, root)
        os.chdir(root)
        pivot_root = 155 if os.uname().machine == "x86_64" else 41
        checked(libc.syscall(pivot_root, b".", b"inside"))
        return sorted(os.listdir("/"))

    assert apart(pivot) == ["file", "inside"]


@privileged
def test_no_swap_and_no_quota(root: Path) -> None:
    swap = root / "swap"
    swap.write_bytes(bytes(8 * MIB))
    swap.chmod(0o600)
    if shutil.which("mkswap"):
        run("mkswap", str(swap))
    assert errno_of(lambda: checked(libc.swapon(os.fsencode(swap), 0))) == EINVAL
    fd = os.open(root, os.O_RDONLY)
    get_format, quotactl_fd = 0x800004 << 8, 443
    assert errno_of(lambda: checked(libc.syscall(quotactl_fd, fd, get_format, 0, ctypes.create_string_buffer(64)))) != 0
    os.close(fd)


# ---- being told ----


@pytest.fixture
def signals() -> Iterator[list[int]]:
    """The signals of a real-time number that come while the test runs."""
    got: list[int] = []
    number = signal.SIGRTMIN + 3
    before = signal.signal(number, lambda *_: got.append(1))
    yield got
    signal.signal(number, before)


def test_a_directory_tells_of_changes(root: Path, signals: list[int]) -> None:
    fd = os.open(root, os.O_RDONLY)
    f_setsig = 10
    fcntl.fcntl(fd, f_setsig, signal.SIGRTMIN + 3)
    fcntl.fcntl(fd, fcntl.F_NOTIFY, fcntl.DN_CREATE | fcntl.DN_DELETE | fcntl.DN_MULTISHOT)
    (root / "file").touch()
    wait_until(lambda: len(signals) == 1, 10, "a signal for the new name")
    (root / "file").unlink()
    wait_until(lambda: len(signals) == 2, 10, "a signal for the removed name")
    os.close(fd)


def test_a_lease_is_broken_by_who_opens(root: Path, signals: list[int]) -> None:
    (root / "file").write_bytes(b"x")
    fd = os.open(root / "file", os.O_RDWR)
    f_setsig = 10
    fcntl.fcntl(fd, f_setsig, signal.SIGRTMIN + 3)
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    assert fcntl.fcntl(fd, fcntl.F_GETLEASE) == fcntl.F_WRLCK
    assert errno_of(os.open, root / "file", os.O_RDONLY | os.O_NONBLOCK) == EWOULDBLOCK
    wait_until(lambda: signals, 10, "the holder is told")
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    os.close(os.open(root / "file", os.O_RDONLY | os.O_NONBLOCK))
    os.close(fd)


def test_a_lock_on_it_does_not_outlive_its_process(root: Path) -> None:
    (root / "file").touch()

    def take() -> None:
        fd = os.open(root / "file", os.O_RDWR)
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        take()
    os.waitpid(child, 0)
    with open(root / "file", "r+b") as file:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


# ---- other ways to move bytes ----


def test_pipes_and_pages(root: Path) -> None:
    """vmsplice(2), tee(2) and splice(2): from memory into a pipe, doubled, and into two files."""
    data = noise(40_000)
    memory = ctypes.create_string_buffer(data, len(data))
    pages = (ctypes.c_ulong * 2)(ctypes.addressof(memory), len(data))
    ends = [os.pipe() for _ in range(2)]
    targets = [os.open(root / name, os.O_RDWR | os.O_CREAT) for name in ("one", "two")]
    assert checked(libc.vmsplice(ends[0][1], pages, ctypes.c_ulong(1), 0)) == len(data)
    assert checked(libc.tee(ends[0][0], ends[1][1], ctypes.c_size_t(len(data)), 0)) == len(data)
    for (source, _), target in zip(ends, targets, strict=True):
        done = 0
        while done < len(data):
            done += os.splice(source, target, len(data) - done)
        assert os.pread(target, len(data) + 1, 0) == data
    for fd in [*targets, *(end for pair in ends for end in pair)]:
        os.close(fd)


def test_reads_that_must_not_wait(root: Path, on_gpufs: bool) -> None:
    """RWF_NOWAIT is a promise about the kernel's own cache, which FUSE does not give."""
    (root / "file").write_bytes(b"content")
    fd = os.open(root / "file", os.O_RDWR)
    buffer = bytearray(7)
    code = errno_of(os.preadv, fd, [buffer], 0, RWF_NOWAIT)
    assert code in ((EOPNOTSUPP,) if on_gpufs else (0, EAGAIN, EOPNOTSUPP))
    os.close(fd)


def test_handles_outlive_names(root: Path) -> None:
    """name_to_handle_at(2) and open_by_handle_at(2), which takes root."""
    if os.geteuid() != 0:
        pytest.skip("open_by_handle_at takes root")
    (root / "dir").mkdir()
    (root / "dir/file").write_text("found")
    numbers = {"x86_64": (303, 304), "aarch64": (264, 265)}[os.uname().machine]

    def handle_of(path: Path) -> Any:
        handle = ctypes.create_string_buffer(struct.pack("Ii", 128, 0), 136)
        mount_id = ctypes.c_int()
        checked(libc.syscall(numbers[0], -100, os.fsencode(path), handle, ctypes.byref(mount_id), 0))
        return handle

    handles = [handle_of(root / "dir/file"), handle_of(root / "dir")]
    os.rename(root / "dir", root / "moved")
    base = os.open(root, os.O_RDONLY)
    file, directory = (checked(libc.syscall(numbers[1], base, handle, os.O_RDONLY)) for handle in handles)
    assert os.read(file, 100) == b"found"
    assert os.listdir(directory) == ["file"]
    assert os.path.samestat(os.stat(root / "moved"), os.fstat(directory))
    assert stat.S_ISREG(os.fstat(file).st_mode)
    for fd in (file, directory, base):
        os.close(fd)
    os.unlink(root / "moved/file")
    base = os.open(root, os.O_RDONLY)

    def again() -> None:
        os.close(checked(libc.syscall(numbers[1], base, handles[0], os.O_RDONLY)))

    try:
        # The kernel keeps the inode of a descriptor that is closed until that has been answered.
        wait_until(lambda: errno_of(again) == ESTALE, 10, "the handle of what is gone to be stale")
    finally:
        os.close(base)
