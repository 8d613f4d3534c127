"""Mount options, and mounts in namespaces: minimal containers, what daemons leave, and who keeps them."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from errno import EACCES, ELOOP, EROFS
from pathlib import Path

import pytest
from support.mounting import GPUFS, REPOSITORY, Mounter
from support.processes import (
    SESSION_VARIABLE,
    errno_of,
    other_namespace,
    run,
    session_processes,
    wait_until,
)

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="mount(2) takes root"),
]


def flags_of(path: Path) -> set[str]:
    """The flags of the uppermost mount at a path, as the kernel lists them."""
    lines = [line.split() for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()]
    return set([fields[5] for fields in lines if fields[4] == str(path)][-1].split(","))


def test_read_only_is_read_only(mount: Mounter, tmp_path: Path) -> None:
    (tmp_path / "shown").write_bytes(b"shown")
    mounted = mount("-o", "ro", "--backing", f"data={tmp_path}")
    assert "ro" in flags_of(mounted.path)
    file = mounted.device / "file"
    shown = mounted.path / "backing/data/shown"
    for action in (
        lambda: file.write_bytes(b"x"),
        lambda: file.mkdir(),
        lambda: file.symlink_to("x"),
        lambda: os.mkfifo(file),
        lambda: os.chmod(mounted.device, 0o700),
        lambda: os.setxattr(mounted.device, "user.x", b"y"),
        lambda: os.utime(mounted.device),
        lambda: os.rmdir(mounted.device),
        lambda: shown.write_bytes(b"x"),
        lambda: shown.unlink(),
    ):
        assert errno_of(action) == EROFS
    assert shown.read_bytes() == b"shown"
    assert (mounted.path / ".gpufs/version").read_text()
    mounted.unmount()
    assert (tmp_path / "shown").read_bytes() == b"shown"


def test_mount_options_take_effect(mount: Mounter) -> None:
    mounted = mount("-o", "noexec,noatime,nodiratime,sync,rw,nosymfollow")
    assert flags_of(mounted.path) >= {"rw", "nosuid", "nodev", "noexec", "noatime"}
    program = mounted.device / "program"
    program.write_text("#!/bin/sh\ntrue\n")
    program.chmod(0o755)
    assert errno_of(subprocess.run, [program], check=False) == EACCES
    (mounted.device / "link").symlink_to("program")
    assert os.readlink(mounted.device / "link") == "program"
    assert errno_of((mounted.device / "link").read_bytes) == ELOOP
    mounted.unmount()


def test_the_kernel_reads_ahead_as_far_as_the_knob_says(mount: Mounter) -> None:
    for options, expected in (((), "4096"), (("--read-ahead", "512K"), "512")):
        mounted = mount(*options)
        number = mounted.device.stat().st_dev
        file = Path(f"/sys/class/bdi/{os.major(number)}:{os.minor(number)}/read_ahead_kb")
        wait_until(lambda: file.read_text().strip() == expected, 10, "the knob's effect")  # noqa: B023 - runs at once
        mounted.unmount()


def atime_moves(path: Path, access: Callable[[], object], *, behind: bool) -> bool:
    """Whether reading sets the access time, where it lies behind the last change or ahead of everything."""
    os.utime(path, ns=(1 if behind else 1 << 62, 2), follow_symlinks=False)
    before = os.lstat(path).st_atime_ns
    access()
    return os.lstat(path).st_atime_ns != before


@pytest.mark.parametrize(
    ("options", "file_moves", "directory_moves"),
    [
        ("relatime", (True, False), (True, False)),
        ("strictatime", (True, True), (True, True)),
        ("noatime", (False, False), (False, False)),
        ("strictatime,nodiratime", (True, True), (False, False)),
    ],
)
def test_access_times_follow_the_options(
    mount: Mounter, options: str, file_moves: tuple[bool, bool], directory_moves: tuple[bool, bool]
) -> None:
    mounted = mount("-o", options)
    file, link, directory = (mounted.device / name for name in ("file", "link", "directory"))
    file.write_bytes(b"content")
    link.symlink_to("file")
    directory.mkdir()
    for behind, wanted in ((True, file_moves[0]), (False, file_moves[1])):
        assert atime_moves(file, file.read_bytes, behind=behind) == wanted
        assert atime_moves(link, lambda: os.readlink(link), behind=behind) == wanted
    for behind, wanted in ((True, directory_moves[0]), (False, directory_moves[1])):
        assert atime_moves(directory, lambda: os.listdir(directory), behind=behind) == wanted
    mounted.unmount()


def test_a_read_only_mount_sets_no_access_times(mount: Mounter) -> None:
    """Either the mountpoint or the whole file system is read-only."""
    mounted = mount("-o", "strictatime")
    file = mounted.device / "file"
    file.write_bytes(b"content")

    def atime_of_a_read() -> bool:
        before = file.stat().st_atime_ns
        file.read_bytes()
        return file.stat().st_atime_ns != before

    assert atime_of_a_read()
    for steps in (("remount,ro,bind",), ("remount,ro",), ("remount,ro", "remount,rw,bind")):
        for options in steps:
            run("mount", "-i", "-o", options, mounted.path)
        wait_until(lambda: not atime_of_a_read(), 60, "the daemon to follow")
        assert not any(atime_of_a_read() for _ in range(5))
        for options in ("remount,rw", "remount,rw,bind,strictatime"):
            run("mount", "-i", "-o", options, mounted.path)
        wait_until(atime_of_a_read, 60, "the daemon to follow")
    mounted.unmount()


def test_gpufs_mounts_in_a_minimal_container(tmp_path: Path) -> None:
    """A root file system of its own, namespaces of its own, /dev with fuse and null, /proc; no /sys, no /run, no /etc.

    The programs are those of this machine, read-only.
    """
    root = tmp_path / "root"
    places = {Path(sys.prefix), Path(sys.base_prefix), REPOSITORY, Path("/usr")}
    script = f"""
        root={root}
        mkdir $root
        mount -t tmpfs none $root
        mkdir -p $root/dev $root/proc $root/tmp $root/mnt/gpu
        touch $root/dev/fuse $root/dev/null
        mount --bind /dev/fuse $root/dev/fuse
        mount --bind /dev/null $root/dev/null
        mount -t proc none $root/proc
        for place in {" ".join(map(str, sorted(places)))}; do
            mkdir -p $root$place
            mount --bind -o ro $place $root$place
        done
        for name in bin sbin lib lib64; do
            if [ -L /$name ]; then cp -a /$name $root/$name
            elif [ -d /$name ]; then mkdir $root/$name; mount --bind /$name $root/$name; fi
        done
        mkdir $root/old
        pivot_root $root $root/old
        cd /
        umount -l /old
        export PYTHONPATH={REPOSITORY}
        {" ".join(GPUFS)} mount /mnt/gpu --driver host --memory 32M
        echo inside >/mnt/gpu/gpu0/file
        cat /mnt/gpu/gpu0/file
        {" ".join(GPUFS)} umount /mnt/gpu
        {" ".join(GPUFS)} mount /mnt/gpu --driver host --memory 32M --no-survive
        kill -9 $(ls -d /proc/[0-9]* | while read p; do grep -qzx gpufs.daemon $p/cmdline && echo ${{p#/proc/}}; done)
        for i in $(seq 600); do grep -q " /mnt/gpu " /proc/mounts || break; sleep 0.1; done
        grep " /mnt/gpu " /proc/mounts || echo clean
    """
    if not shutil.which("pivot_root"):
        pytest.skip("no pivot_root here")
    done = run(
        "unshare", "--mount", "--pid", "--fork", "--ipc", "--uts", "bash", "-euo", "pipefail", "-c", script, check=False
    )
    assert done.returncode == 0, done
    assert done.stdout.splitlines() == ["inside", "clean"], done.stderr


def fails_with_one_line(*words: object) -> str:
    done = run(*GPUFS, *map(str, words), check=False)
    assert done.returncode == 1, done
    assert done.stdout == ""
    return done.stderr


def test_a_missing_fuse_device_is_reported(mountpoint: Path) -> None:
    """In a mount namespace of its own, where /dev is empty."""
    script = 'mount -t tmpfs none /dev && mknod /dev/null c 1 3 && exec "$@"'
    command = ["unshare", "-m", "sh", "-c", script, "sh", *GPUFS, "mount", str(mountpoint), "--driver", "host"]
    done = run(*command, check=False)
    assert done.returncode == 1
    assert "/dev/fuse is missing" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_runtime_directory_whose_name_is_taken(tmp_path: Path) -> None:
    """Any user can create directories in /tmp. Later mounts of the same user share the directory with another name."""
    script = """
        checkout="$1"
        shift
        mount -t tmpfs none /run
        touch /run/gpufs
        mkdir /run/checkout
        mount --bind "$checkout" /run/checkout
        mount -t tmpfs none /tmp
        mkdir -p "$checkout" # it may lie below /tmp
        mount --bind /run/checkout "$checkout"
        mkdir /tmp/gpufs-0 /tmp/m /tmp/n
        chown nobody /tmp/gpufs-0
        for place in m n; do
            "$@" mount /tmp/$place --driver host --memory 64M
            head -c 3000000 /dev/urandom >/tmp/$place/gpu0/file
            "$@" cp /tmp/$place/gpu0/file /tmp/copy
            cmp /tmp/$place/gpu0/file /tmp/copy
            "$@" stats /tmp/$place >/dev/null
        done
        ls -d /tmp/gpufs-0-*
        "$@" umount /tmp/m /tmp/n
    """
    done = run(
        "unshare",
        "-m",
        "-p",
        "-f",
        "--mount-proc",
        "sh",
        "-euc",
        script,
        "sh",
        REPOSITORY,
        *GPUFS,
        cwd="/",
        check=False,
    )
    assert (done.returncode, done.stderr, len(done.stdout.splitlines())) == (0, "", 1), done


@pytest.mark.parametrize("what", ["full", "unmounted"])
def test_a_runtime_directory_that_cannot_be_used(tmp_path: Path, what: str) -> None:
    """A mount and its copies work without /run, which only other commands read."""
    before = "head -c 1M /dev/zero >/run/zeros || true" if what == "full" else "true"
    after = "umount -l /run" if what == "unmounted" else "true"
    script = f"""
        mount -t tmpfs -o size=64k none /run
        mkdir /run/gpufs
        {before}
        cd {tmp_path}
        mkdir m
        "$@" mount m --driver host --memory 64M
        {after}
        head -c 3000000 /dev/urandom >m/gpu0/file
        "$@" cp m/gpu0/file copy
        cmp m/gpu0/file copy
        "$@" stats m >/dev/null
        "$@" umount m
        ! pgrep -f "gpufs.daemon .*{tmp_path}/m$"
    """
    done = run("unshare", "-m", "-p", "-f", "--mount-proc", "sh", "-euc", script, "sh", *GPUFS, cwd="/", check=False)
    assert (done.returncode, done.stdout) == (0, ""), done
    lines = [line for line in done.stderr.splitlines() if not line.startswith("head: ")]
    assert all("copying through the mount instead" in line for line in lines)
    assert bool(lines) == (what == "unmounted")


# ---- what stays of a mount ----


def pids_of(mounted: Path) -> list[int]:
    found = session_processes(os.environ[SESSION_VARIABLE])
    return [pid for pid, line in found.items() if "gpufs.daemon" in line and str(mounted) in line]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A mountpoint for the command, cleaned up afterwards."""
    path = tmp_path / "mnt"
    path.mkdir()
    yield path
    run(*GPUFS, "umount", "--force", path, check=False)
    for pid in pids_of(path):
        os.kill(pid, signal.SIGKILL)


def mount_at(path: Path) -> int:
    """Mounts in the background; the daemon's process ID."""
    before = pids_of(path)
    run(*GPUFS, "mount", path, "--driver", "host", "--memory", "64M")
    (pid,) = set(pids_of(path)) - set(before)
    return pid


def test_an_unused_copy_in_another_namespace_does_not_keep_the_mount(place: Path) -> None:
    """As each service or container that starts beside the mount makes one."""
    mount_at(place)
    (place / "gpu0/file").write_bytes(b"x")
    with other_namespace("true"):
        run(*GPUFS, "umount", place)
        assert not pids_of(place)


# The first process of a namespace is not always the one that uses the mount.
_TAIL = "tail -f {}/gpu0/file >/dev/null & trap 'kill $!' EXIT"


@pytest.mark.parametrize("use", ["cd {}/gpu0", "mount --bind {} {}/../bound", _TAIL])
def test_umount_names_the_programs_that_use_a_copy_of_the_mount(place: Path, use: str) -> None:
    """A copy in another mount namespace that is in use there keeps the daemon alive."""
    pid = mount_at(place)
    (place / "gpu0/file").write_bytes(b"x")
    (place.parent / "bound").mkdir()
    with other_namespace(use.format(place, place)) as shell:
        for _ in range(2):
            text = fails_with_one_line("umount", place, "--umount-timeout", "500")  # longer than the test may take
            assert ("by tail (" if use == _TAIL else f"sh ({shell.pid})") in text
            assert "--force ends the mount" in text
        # A new mount at the same place is independent of it.
        mount_at(place)
        run(*GPUFS, "umount", place)
        assert pids_of(place) == [pid]
        (remedy,) = re.findall("nsenter .*(?= ends one use)", text)
        run(*shlex.split(remedy))
        run(*GPUFS, "umount", "--force", place)
        wait_until(lambda: not pids_of(place), 10, "the end of the daemon")
