"""What the system itself does with files: run them, put overlays over them, mount images, keep handles."""

from __future__ import annotations

import ctypes
import os
import shutil
import stat
import struct
from errno import ESTALE
from pathlib import Path
from typing import Any

import pytest
from support.data import MIB, noise
from support.processes import errno_of, run, wait_until

privileged = pytest.mark.skipif(os.geteuid() != 0, reason="mounts take root")

libc = ctypes.CDLL(None, use_errno=True)


def checked(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


# ---- programs ----


@pytest.fixture
def program(root: Path) -> Path:
    path = root / "sleep"
    shutil.copy(shutil.which("sleep") or "/bin/sleep", path)
    return path


def test_programs_and_scripts_run(root: Path, program: Path) -> None:
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


# ---- mounts ----


@privileged
def test_overlays_work_below_and_above(root: Path, reference: Path) -> None:
    """Below a tmpfs, and above one: the upper directory holds copies, opaque directories and marks of removed names."""
    if "overlay" not in Path("/proc/filesystems").read_text():
        pytest.skip("no overlays here")
    for lower, writable in ((root, reference), (reference, root)):
        place, below, upper = reference / "place", lower / "lower", writable / "upper"
        for path in (place, upper, writable / "work", below / "dir", below / "gone"):
            path.mkdir(parents=True)
        (below / "file").write_bytes(noise(3 * MIB))
        os.setxattr(below / "file", "user.note", b"said")
        (below / "dir/other").write_text("below")
        options = f"lowerdir={below},upperdir={upper},workdir={writable}/work"
        script = f"""mount -t overlay none {place} -o {options} || exit 9
            cd {place}
            printf changed | dd of=file conv=notrunc status=none
            ln file linked; rm dir/other; rmdir gone; mkdir gone new; mv new dir/new
            tail -c +8 linked | cmp - <(tail -c +8 {below}/file); head -c 7 linked
            getfattr --only-values -n user.note file
            echo $(ls dir) $(ls)"""
        done = run("unshare", "-m", "bash", "-euo", "pipefail", "-c", script, check=False)
        if done.returncode == 9 and writable == root:
            break  # kernels that take every FUSE file system for one that may change behind an overlay's back
        assert (done.stdout, done.stderr) == ("changedsaidnew dir file gone linked\n", ""), done
        assert (below / "file").read_bytes() == noise(3 * MIB)
        assert stat.S_ISCHR(os.lstat(upper / "dir/other").st_mode)
        place.rmdir()
        run("rm", "-r", below, upper, writable / "work")


@privileged
def test_a_loop_device_works(root: Path, reference: Path) -> None:
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


# ---- file handles ----


def test_file_handles_outlive_names(root: Path) -> None:
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
