"""Containers: a program in namespaces of its own, with the mount and the directory of its socket, attaches."""

from __future__ import annotations

import hashlib
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support.attaching import leases
from support.cli import user_gpufs
from support.copying import socket_path
from support.data import MIB, noise
from support.mounting import GPUFS, REPOSITORY, GpufsMount, Mounter
from support.processes import NOBODY, PATIENCE, wait_until

pytestmark = [pytest.mark.skipif(os.geteuid() != 0, reason="makes namespaces, which takes root")]

# Enters a new root with the system's directories, the mount at /data and the socket's directory, and a user namespace.
# $1: the mount, $2: the socket's directory, $3: an empty directory, $4: the user outside, $5: this checkout; the rest:
# the command.
CONTAINER = """
mount --make-rprivate /
root=$3; data=$1; sockets=$2; user=$4; checkout=$5; shift 5
mount -t tmpfs none "$root"
for path in /*; do
  case "$path" in /proc|/sys|/tmp|/run|/mnt|/lost+found) continue ;; esac
  if [[ -L "$path" ]]; then cp -P "$path" "$root$path"
  elif [[ -d "$path" ]]; then mkdir "$root$path"; mount --rbind "$path" "$root$path"; fi
done
mkdir -p "$root/proc" "$root/data" "$root$sockets" "$root/old" "$root/tmp"
mount --bind "$data" "$root/data"
mountpoint -q "$root$sockets" || mount --bind "$sockets" "$root$sockets"
if [[ ! -e "$root$checkout" ]]; then mkdir -p "$root$checkout"; mount --bind "$checkout" "$root$checkout"; fi
mount -t proc proc "$root/proc"
cd "$root"
pivot_root . old
umount -l old
hash -r
exec setpriv --reuid "$user" --regid "$user" --clear-groups unshare --user --map-root-user "$@"
"""
NAMESPACES = ("--mount", "--pid", "--ipc", "--net", "--uts", "--cgroup", "--fork", "--kill-child")


@pytest.fixture
def container(mount: Mounter) -> GpufsMount:
    return mount(allow_other=True)


def words(mounted: GpufsMount, root: Path, user: int, script: str, *arguments: str) -> list[str]:
    command, environment = user_gpufs({})
    sockets = str(Path(socket_path(mounted.path)).parent)
    python = command[0] if user else sys.executable
    inside = ["env", f"PYTHONPATH={environment['PYTHONPATH']}:{REPOSITORY}", python, "-c", script, *arguments]
    outside = ["unshare", *NAMESPACES, "bash", "-euo", "pipefail", "-c", CONTAINER, "container"]
    return [*outside, str(mounted.path), sockets, str(root), str(user), str(REPOSITORY), *inside]


@pytest.mark.parametrize("user", [0, NOBODY], ids=["root", "unmapped-root"])
def test_a_program_in_a_container_attaches(container: GpufsMount, tmp_path: Path, user: int, driver: str) -> None:
    """The end of the container ends its lease."""
    if driver != "host":
        pytest.skip("reads attached memory with the CPU")
    path = container.device / "weights"
    path.write_bytes(noise(5 * MIB))
    path.chmod(0o666)
    script = """
import gpufs, hashlib, os, sys
assert not os.path.exists("/tmp/pytest-of-root")
assert os.getpid() < 10, os.getpid()
with gpufs.attach("/data/gpu0/weights", "r+") as array:
    digest = hashlib.sha256(array.memoryview()).hexdigest()
    array.memoryview()[0] = 201
    with open("/data/gpu0/weights", "rb") as file:
        print(digest, file.read(1)[0], flush=True)
    sys.stdin.read()
"""
    command = words(container, tmp_path, user, script)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().split() == [hashlib.sha256(noise(5 * MIB)).hexdigest(), "201"]
        assert path.read_bytes()[0] == 201
        (lease,) = leases(container)
        assert (lease["pid"] > 1, lease["bytes"]) == (True, 5 * MIB)
        process.kill()
    wait_until(lambda: not leases(container), 10, "the leases to end")


def test_the_command_of_the_daemon_set(mountpoint: Path, tmp_path: Path) -> None:
    """As the first process of a container: the mount survives its daemon, and ends with SIGTERM."""
    manifests = yaml.safe_load_all((REPOSITORY / "deploy/gpufs.yaml").read_text())
    pods = [one["spec"]["template"]["spec"] for one in manifests if one["metadata"]["name"] == "gpufs-mount"]
    (container,) = pods[0]["containers"]
    shell_words, path = container["command"][:-1], container["command"][-1]
    assert path == "/mnt/gpufs/node"
    options = [word.replace("cuda", "host").replace("/run/gpufs", str(tmp_path)) for word in container["args"]]
    program = tmp_path / "gpufs"
    program.write_text(f'#!/bin/sh\nexec {shlex.join(GPUFS)} "$@"\n')
    program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    words = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", *shell_words, str(mountpoint), *options]
    with subprocess.Popen([*words, "--memory", "64M"], env=environment) as container:
        try:
            children = Path(f"/proc/{container.pid}/task/{container.pid}/children")
            wait_until(lambda: children.read_text(), PATIENCE, "the container")
            shell = int(children.read_text())
            device = Path(f"/proc/{shell}/root{mountpoint}/gpu0")
            started = Path(f"/proc/{shell}/task/{shell}/children")
            wait_until(
                lambda: any(cmdline_of(Path("/proc", pid)).startswith(b"sleep") for pid in started.read_text().split()),
                PATIENCE,
                "the end of `gpufs mount`, which fails if the daemon dies before",
            )
            (device / "file").write_bytes(b"contents")
            # The daemon's number as this PID namespace has it.
            wanted = (b"gpufs.daemon", os.fsencode(mountpoint))
            processes = [
                folder for folder in Path("/proc").glob("[0-9]*") if all(w in cmdline_of(folder) for w in wanted)
            ]
            (daemon,) = processes
            os.kill(int(daemon.name), signal.SIGKILL)
            assert (device / "file").read_bytes() == b"contents"
            os.kill(shell, signal.SIGTERM)
            assert container.wait(PATIENCE) == 0
        finally:
            container.kill()


def cmdline_of(folder: Path) -> bytes:
    try:
        return (folder / "cmdline").read_bytes()
    except OSError:
        return b""
