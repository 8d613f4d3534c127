"""What users see of a mount: copies in progress, busy files, leases, and files with the memory that they hold."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from support.cli import fails_here, gpufs, gpufs_here
from support.data import MIB
from support.hanging import HangingMount
from support.mounting import GPUFS, GpufsMount, Mounter
from support.processes import PATIENCE, as_nobody, run, wait_until

import gpufs as library

ODD = b"odd\n\x1b[31m\xff"


def activity(mount: GpufsMount) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((mount.path / ".gpufs/activity").read_bytes())
    return value


def listed(*words: object) -> dict[str, dict[str, Any]]:
    return {Path(row["path"]).name: row for row in json.loads(gpufs_here("ls", "--json", *words).stdout)}


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a slow file system")
def test_counters_follow_a_running_copy(mount: Mounter) -> None:
    """They grow while it runs, and at its end they have each byte once."""
    size, good = 64 * MIB, 24 * MIB
    own = mount()

    def transfer() -> dict[str, Any]:
        value: dict[str, Any] = own.moved("in")["transfer"]
        return value

    with HangingMount(size, good) as source:
        command = subprocess.Popen([*GPUFS, "cp", source.file, own.device / "file"])
        try:
            wait_until(lambda: transfer()["bytes"] > 0, PATIENCE, "progress in the counters")
            assert (transfer()["in_flight"], transfer()["operations"]) == (1, 0)
            assert transfer()["bytes"] <= good
            (copy,) = activity(own)["copies"]
            assert (copy["source"], copy["destination"]) == (str(source.file), str(own.device / "file"))
            assert (copy["pid"], copy["total"]) == (command.pid, size)
            assert 0 < copy["moved"] <= good
            picture = gpufs("top", "--once", "--interval", "0.1", own.path).stdout
            assert str(source.file) in picture
            assert str(command.pid) in picture
            source.resume()
            assert command.wait(PATIENCE) == 0
        finally:
            if command.poll() is None:
                command.kill()
                command.wait(PATIENCE)
    assert (transfer()["bytes"], transfer()["operations"], transfer()["in_flight"]) == (size, 1, 0)
    assert activity(own)["copies"] == []


def test_top_shows_devices_busy_files_and_leases(mount: Mounter) -> None:
    """Without a terminal it prints one picture, in which names cannot control the terminal."""
    own = mount(devices=2)
    name = os.fsencode(own.device) + b"/" + ODD
    with open(name, "wb", buffering=0) as busy, open(own.path / "gpu1/idle", "wb") as idle:
        idle.write(bytes(4 * MIB))
        idle.flush()
        busy.write(bytes(MIB))
        with library.attach(str(own.path / "gpu1/idle")):
            words = [*GPUFS, "top", str(own.path), "--interval", "1"]
            picture = subprocess.Popen(words, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
            while picture.poll() is None:
                busy.seek(0)
                busy.write(bytes(MIB))
            assert picture.stdout is not None
            with picture.stdout:
                text = picture.stdout.read().decode(errors="surrogateescape")
    assert picture.returncode == 0
    lines = text.splitlines()
    assert sum(line.startswith(str(own.path / "gpu0")) for line in lines) == 2  # the device and the busy file
    (row,) = (line for line in lines if "odd" in line)
    assert "\x1b" not in text
    assert "iB/s" in row
    (lease,) = (line for line in lines if line.startswith(str(own.path / "gpu1/idle")))
    assert f"({os.getpid()})" in lease


def test_top_goes_on_without_mounts_that_do_not_answer(mount: Mounter) -> None:
    good, stopped = mount(), mount()
    stopped.signal(signal.SIGSTOP)
    try:
        done = gpufs("top", "--interval", "0.1", good.path, stopped.path, "--status-timeout", "5", check=False)
    finally:
        stopped.signal(signal.SIGCONT)
    assert done.returncode == 1
    assert str(good.device) in done.stdout
    assert str(stopped.path) in done.stdout


def test_users_see_only_their_own_activity(shared_mount: GpufsMount, root: Path) -> None:
    theirs, mine = root / "theirs", root / "mine"
    as_nobody(lambda: theirs.write_bytes(bytes(MIB)))
    mine.write_bytes(bytes(MIB))

    def busy() -> set[str]:
        return {Path(one["path"]).name for one in activity(shared_mount)["files"] if one["path"] is not None}

    assert {"theirs", "mine"} <= busy()
    seen = as_nobody(busy)
    assert "theirs" in seen
    assert "mine" not in seen


def test_files_are_listed_with_their_memory_and_leases(mount: Mounter) -> None:
    own = mount(devices=2)
    (own.device / "folder").mkdir()
    (own.device / "folder/deep").write_bytes(bytes(100))
    with open(own.device / "sparse", "wb") as file:
        file.truncate(64 * MIB)
    (own.path / "gpu1/full").write_bytes(bytes(8 * MIB))
    os.utime(own.path / "gpu1/full", (1000.0, 2000.0))
    with library.attach(str(own.path / "gpu1/full")):
        found = listed(own.path)
        assert set(found) == {"folder", "sparse", "full"}
        assert (found["folder"]["type"], found["folder"]["size"]) == ("directory", 100)
        assert found["folder"]["held_bytes"] == (own.device / "folder/deep").stat().st_blocks * 512
        assert (found["sparse"]["size"], found["sparse"]["held_bytes"]) == (64 * MIB, 0)
        full = found["full"]
        assert (full["device"], full["size"], full["held_bytes"]) == ("gpu1", 8 * MIB, 8 * MIB)
        assert [lease["pid"] for lease in full["leases"]] == [os.getpid()]
        assert abs(full["last_use"] - time.time()) < PATIENCE  # a program uses it
        assert full["uid"] == os.geteuid()
    full = listed(own.path / "gpu1/full")["full"]
    assert (full["leases"], full["last_use"]) == ([], 2000.0)
    assert set(listed("-r", own.path)) == {"deep", "sparse", "full"}
    assert set(listed("-r", own.device / "folder", own.device / "sparse")) == {"deep", "sparse"}
    assert "8.0 MiB" in gpufs_here("ls", own.path / "gpu1").stdout
    fails_here(1, "ls", own.path.parent)


def on_terminal(columns: int, *words: object, **environment: str) -> str:
    """What the command writes to a terminal."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
    known = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    command = [*GPUFS, *map(str, words)]
    with subprocess.Popen(command, stdout=follower, env={**known, "TERM": "xterm-256color", **environment}):
        os.close(follower)
        text = b""
        with suppress(OSError):  # EIO: nothing has it open any more
            while data := os.read(leader, 1 << 16):
                text += data
    os.close(leader)
    return text.decode().replace("\r\n", "\n")


def test_tables_fit_the_terminal(mount: Mounter) -> None:
    """Also with the names of a hub's cache. A pipe gets all of them, and no colours."""
    own = mount(memory=64 * MIB, devices=2)  # one stays empty
    folder = own.device / "hub" / "models--organisation--model" / "blobs"
    folder.mkdir(parents=True)
    path, other = (folder / f"{letter * 64}.safetensors" for letter in "ab")
    for place, value in ((path, 1.0), (other, 2.0)):
        safetensors.torch.save_file(
            {f"model.layers.{'expert.' * 20}{i}": torch.full((3,), value) for i in (1, 2)}, place
        )
    commands = (
        ("ls", "-r", own.path),
        ("inspect", "--stats", path),
        ("diff", path, other),
        ("top", "--once", own.path),
    )
    with library.attach(str(path)):
        for words in commands:
            text = on_terminal(80, *words, NO_COLOR="1")
            lines = text.splitlines()[1 if words[0] == "inspect" else 0 :]  # its first line has the path as it is given
            assert max(map(len, lines)) <= 80, text
            assert "\x1b" not in text
            assert not re.search(r"\[ *~", text)  # a bar is shorter, and not cut
            plain = gpufs_here(*words, check=words[0] != "diff").stdout
            assert max(map(len, plain.splitlines())) > 80
            assert "\x1b" not in plain
    assert "\x1b[32mgood\x1b[0m" in on_terminal(80, "top", "--once", own.path)


@pytest.mark.slow
def test_deeply_nested_directories_are_listed(mount: Mounter) -> None:
    own = mount()
    folder = os.open(own.device, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=folder)
        below = os.open("d", os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = below
    with open("file", "wb", opener=lambda name, flags: os.open(name, flags, dir_fd=folder)) as file:
        file.write(bytes(4096))
    os.close(folder)
    assert listed("-R", own.path)["file"]["size"] == 4096
    assert listed(own.path)["d"]["size"] == 4096


def test_a_model_server_does_not_wait_for_a_mount_that_hangs(mount: Mounter, tmp_path: Path) -> None:
    """A server looks for its device on all mounts, also on those of other users."""
    hanging = mount()
    script = """
import sys
import torch
from gpufs.integrations._sharing import NoDirectoryError, device_directory
try:
    device_directory(torch.device("cpu"), sys.argv[1])
except NoDirectoryError as error:
    print(error)
print("ended")
"""
    hanging.signal(signal.SIGSTOP)
    try:
        # As a user has it, not as tests wait on a busy machine.
        done = run(sys.executable, "-c", script, tmp_path, env={**os.environ, "GPUFS_STATUS_TIMEOUT": "2"})
    finally:
        hanging.signal(signal.SIGCONT)
    assert done.stdout.endswith("ended\n")
