"""Plain users: mounting through fusermount3, and access by other users."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from errno import EACCES, EROFS
from pathlib import Path
from typing import Any

import pytest
from support.cli import user_gpufs
from support.data import MIB, assert_same, noise
from support.mounting import GPUFS, Mounter
from support.processes import (
    NOBODY,
    OTHER,
    PATIENCE,
    SESSION_VARIABLE,
    as_nobody,
    as_other,
    errno_of,
    other_namespace,
    plain_user,
    run,
    session_processes,
    start_children,
    wait_until,
)
from support.watchdog import mounted_at, rescue

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="acts as several users, which takes root"),
]
AS_NOBODY: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []}


User = tuple[Sequence[str], Mapping[str, str]]


@pytest.fixture(scope="module")
def user() -> Iterator[User]:
    """The gpufs command and the environment of nobody."""
    with plain_user() as environment:
        yield user_gpufs(environment | {SESSION_VARIABLE: os.environ[SESSION_VARIABLE]})


@pytest.fixture
def mountpoint(user: User, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A directory of nobody's, and not mounted at the end."""
    path = Path(user[1]["HOME"]) / request.node.name
    path.mkdir()
    os.chown(path, NOBODY, NOBODY)
    yield path
    if mounted_at(str(path)):
        rescue(str(path), None)
        raise AssertionError("something was left mounted")


def gpufs(user: User, *words: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    return run(*user[0], *map(str, words), check=check, env=user[1], cwd="/", **AS_NOBODY)


def test_a_user_unmounts_beside_a_mount_namespace_of_others(user: User, mountpoint: Path) -> None:
    """The namespace has a copy of the mount, which the user cannot see."""
    gpufs(user, "mount", mountpoint, "--driver", "host", "--memory", "64M")
    with other_namespace("true"):
        gpufs(user, "umount", mountpoint)
        commands = session_processes(os.environ[SESSION_VARIABLE]).values()
        assert not [command for command in commands if str(mountpoint) in command]


@pytest.mark.driver
def test_a_plain_user_mounts_uses_and_unmounts(mount: Mounter, user: User) -> None:
    mounted = mount(user=user, memory=128 * MIB)

    def use() -> None:
        wait_until(lambda: os.path.isdir(mounted.device), 10, "the mount to answer")
        (mounted.device / "file").write_bytes(noise(5 * MIB))
        assert_same((mounted.device / "file").read_bytes(), noise(5 * MIB))
        (mounted.device / "dir").mkdir()
        os.rename(mounted.device / "file", mounted.device / "dir" / "moved")
        assert (mounted.device / "dir" / "moved").stat().st_uid == NOBODY
        assert (mounted.path / ".gpufs" / "version").read_text()

    as_nobody(use)
    # nobody else, root included, before allow_other
    assert as_other(lambda: errno_of(os.stat, mounted.device)) == EACCES
    assert as_other(lambda: errno_of(os.listdir, mounted.path)) == EACCES
    assert errno_of(os.stat, mounted.device) == EACCES
    assert (
        "nosuid" in Path("/proc/self/mountinfo").read_text(errors="replace").split(str(mounted.path))[1].split("\n")[0]
    )
    mounted.unmount()


def test_a_mount_outlives_its_users_runtime_directory(mount: Mounter, user: User) -> None:
    """systemd removes that directory when the user logs out."""
    mounted = mount(user=user)
    runtime = Path(user[1]["XDG_RUNTIME_DIR"]) / "gpufs"
    wait_until(lambda: list(runtime.glob("*/socket")), 20, "the socket")
    shutil.rmtree(runtime)

    def use() -> None:
        (mounted.device / "file").write_bytes(noise(MIB))
        assert_same((mounted.device / "file").read_bytes(), noise(MIB))

    as_nobody(use)
    mounted.unmount()


@pytest.mark.slow
def test_a_private_mount_of_another_user(mount: Mounter, user: User) -> None:
    """Root's commands do not complain about it. Its process counts, also while descriptors come and go."""
    mounted = mount("--no-auto-unmount", user=user)
    place = str(mounted.path)
    runtime = Path(user[1]["XDG_RUNTIME_DIR"]) / "gpufs"
    (address,) = wait_until(lambda: list(runtime.glob("*/socket")), 20, "the socket")

    def connect(_: int) -> None:
        while True:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
                client.connect(str(address))

    (child,) = start_children(1, connect)
    try:
        for _ in range(5):
            assert run(*GPUFS, "status", "--check", place).stdout.endswith(" private (of nobody)\n")
            status = json.loads(run(*GPUFS, "status", "--json", place, check=False).stdout)
            assert (status["state"], status["pid"]) == ("private", mounted.pid)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    brief = ("--status-timeout", "5")  # other mounts of this machine may not answer
    for words in (["status"], ["df"], ["ls"], ["leases"], ["quota", "list"]):
        done = run(*GPUFS, *words, *brief, check=False)
        assert place not in done.stderr, done
        assert (place in done.stdout) == (words == ["status"])
    for words in (["df"], ["ls"], ["leases"], ["quota", "list"]):
        done = run(*GPUFS, *words, place, check=False)
        assert done.returncode == 1
        assert "private (of nobody)" in done.stderr
    others: dict[str, Any] = {"user": OTHER, "group": OTHER, "extra_groups": [], "env": user[1], "cwd": "/"}
    for words in (["metrics"], ["stats"], ["top", "--once"], ["df"], ["ls"]):
        done = run(*user[0], *words, *brief, check=False, **others)
        assert (done.returncode, place in done.stdout + done.stderr) == (0, False), done
    assert run(*user[0], "status", "--check", place, **others).stdout.endswith(" private (of nobody)\n")
    mounted.signal(signal.SIGKILL)
    mounted.daemon.wait(PATIENCE)
    done = run(*GPUFS, "status", "--check", place, check=False)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, "", 1), done


def test_a_runtime_directory_with_a_long_path(user: User, mountpoint: Path) -> None:
    """The path of a socket has at most 107 bytes."""
    runtime = mountpoint.with_name("r" * 100)
    runtime.mkdir()
    os.chown(runtime, NOBODY, NOBODY)
    there = (user[0], {**user[1], "XDG_RUNTIME_DIR": str(runtime)})
    gpufs(there, "mount", mountpoint, "--driver", "host", "--memory", "64M")
    try:
        as_nobody(lambda: (mountpoint / "gpu0/file").write_bytes(noise(MIB)))
        assert gpufs(there, "cp", mountpoint / "gpu0/file", mountpoint.parent / "copy").stderr == ""
        assert_same((mountpoint.parent / "copy").read_bytes(), noise(MIB))
    finally:
        gpufs(there, "umount", mountpoint)


def test_a_plain_user_without_access_to_fuse_gets_the_remedy(user: User, mountpoint: Path) -> None:
    script = """
        mount -t tmpfs none /mnt
        mknod -m 600 /mnt/fuse c 10 229
        mount --bind /mnt/fuse /dev/fuse
        exec setpriv --reuid 65534 --regid 65534 --clear-groups "$@"
    """
    words = [*user[0], "mount", str(mountpoint), "--driver", "host", "--memory", "64M"]
    done = run("unshare", "-m", "sh", "-euc", script, "sh", *words, check=False, env=user[1], cwd="/")
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1
    assert line.startswith(f"gpufs: {mountpoint}: ")
    assert line.endswith("gpufs doctor says what to do")


def test_a_plain_user_may_not_let_others_in(user: User, mountpoint: Path) -> None:
    done = gpufs(user, "mount", mountpoint, "--driver", "host", "--memory", "64M", "--allow-other", check=False)
    if "user_allow_other" in Path("/etc/fuse.conf").read_text().split("\n"):
        gpufs(user, "umount", mountpoint)
        return
    assert done.returncode != 0
    assert "allow" in done.stderr
    assert as_nobody(lambda: os.listdir(mountpoint)) == []


def test_a_plain_user_lets_others_in_where_root_allows_it(user: User, mountpoint: Path) -> None:
    """With user_allow_other in /etc/fuse.conf, shown by a mount namespace: then mode bits decide."""
    home = Path(user[1]["HOME"])
    configuration = home / "fuse.conf"
    configuration.write_text("user_allow_other\n")
    home.chmod(0o711)
    him = "setpriv --reuid 65534 --regid 65534 --clear-groups"
    other = "setpriv --reuid 65533 --regid 65533 --clear-groups"
    command = " ".join(user[0])
    (launcher,) = GPUFS
    file = mountpoint / "gpu0/file"
    script = f"""
        mount --make-rprivate /
        mount --bind {configuration} /etc/fuse.conf
        {him} {command} mount {mountpoint} --driver host --memory 64M --allow-other
        {him} sh -c 'echo shown >{file}; chmod 644 {file}; echo hidden >{file}2; chmod 600 {file}2'
        {other} cat {file}
        {other} cat {file}2 2>&1 | grep -o 'Permission denied'
        {other} sh -c 'echo x >{file}' 2>&1 | grep -o 'Permission denied'
        {him} chmod 666 {file}
        {other} sh -c 'echo theirs >{file}'
        cat {file}
        head -c 1M /dev/zero >{home}/source
        {launcher} cp {home}/source {file}3 2>&1 | grep -o 'our descriptors'
        stat -c %s {file}3
        {other} fusermount3 -u {mountpoint} 2>&1 | grep -o 'fusermount3:' | head -n 1
        {him} fusermount3 -u {mountpoint}
        findmnt {mountpoint} || echo gone
    """
    done = run("unshare", "-m", "bash", "-eu", "-c", script, check=False, env=user[1], cwd="/")
    home.chmod(0o700)
    assert done.returncode == 0, done
    assert done.stdout.splitlines() == [
        "shown",
        "Permission denied",
        "Permission denied",
        "theirs",
        "our descriptors",
        str(1 << 20),
        "fusermount3:",
        "gone",
    ]


def test_options_of_a_plain_users_mount(user: User, mountpoint: Path) -> None:
    gpufs(user, "mount", mountpoint, "--driver", "host", "--memory", "64M", "-o", "ro,noexec,relatime")
    try:
        (line,) = [
            x for x in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines() if str(mountpoint) in x
        ]
        assert {"ro", "noexec", "nosuid", "nodev"} <= set(line.split()[5].split(","))
        assert as_nobody(lambda: errno_of((mountpoint / "gpu0/file").write_bytes, b"x")) == EROFS
        done = gpufs(user, "mount-helper", "gpufs", mountpoint, "-o", "remount,rw", check=False)
        assert (done.returncode, "only root may remount" in done.stderr) == (32, True)
    finally:
        gpufs(user, "umount", mountpoint)


@pytest.fixture
def roots_directories() -> Iterator[None]:
    """Where root has used gpufs, with and without /run."""
    made = []
    for path in map(Path, ("/run/gpufs", "/tmp/gpufs-0")):
        if not path.exists():
            path.mkdir()
            made.append(path)
    yield
    for path in made:
        path.rmdir()


@pytest.mark.usefixtures("roots_directories")
def test_a_plain_user_in_a_user_namespace_of_his_own(user: User, mountpoint: Path) -> None:
    """The user is root in the namespace, and mounts without fusermount3 and without directories of the real root."""
    environment = {name: value for name, value in user[1].items() if name != "XDG_RUNTIME_DIR"}
    command = " ".join(user[0])
    script = f"""
        {command} mount {mountpoint} --driver host --memory 64M
        echo inside >{mountpoint}/gpu0/x
        cat {mountpoint}/gpu0/x
        stat -c %u {mountpoint}/gpu0/x
        {command} stats {mountpoint} >/dev/null
        {command} umount {mountpoint}
    """
    environment["PATH"] = "/usr/bin"
    done = run("unshare", "-Urm", "sh", "-euc", script, check=False, cwd="/", env=environment, **AS_NOBODY)
    assert done.returncode == 0, done
    assert done.stdout.splitlines() == ["inside", "0"]
    assert not mounted_at(str(mountpoint))
