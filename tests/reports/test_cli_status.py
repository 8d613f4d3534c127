"""gpufs status and df: what programs read (JSON) and what people read, on a mount and beside one."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from support.data import MIB
from support.mounting import GPUFS, GpufsMount, Mounter
from support.processes import PATIENCE, children_of, has_ended, run, wait_until

import gpufs

STATUS: dict[str, type | tuple[type, ...]] = {
    "mountpoint": str,
    "source": str,
    "state": str,
    "error": type(None),
    "pid": int,
    "uid": int,
    "driver": str,
    "version": str,
    "started": (int, float),
    "devices": list,
    "knobs": dict,
}
DEVICE: dict[str, type | tuple[type, ...]] = {
    "index": int,
    "name": str,
    "description": str,
    "pci_address": str,
    "total_bytes": int,
    "free_bytes": int,
    "held_bytes": int,
    "files": int,
    "health": str,
}
DF: dict[str, type | tuple[type, ...]] = {
    "path": str,
    "mountpoint": str,
    "device": str,
    "description": str,
    "total_bytes": int,
    "used_bytes": int,
    "free_bytes": int,
    "files": int,
}


def assert_has(value: dict[str, Any], schema: dict[str, type | tuple[type, ...]]) -> None:
    for key, kind in schema.items():
        assert key in value, f"{key} is missing in {sorted(value)}"
        assert isinstance(value[key], kind), f"{key} is {value[key]!r}"


def status_of(mount: GpufsMount) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(run(*GPUFS, "status", "--json", mount.path).stdout)
    return value


def df_of(mount: GpufsMount) -> list[dict[str, Any]]:
    value: list[dict[str, Any]] = json.loads(run(*GPUFS, "df", "--json", mount.path).stdout)
    return value


def test_status_as_json_has_all_fields(shared_mount: GpufsMount) -> None:
    status = status_of(shared_mount)
    assert_has(status, STATUS)
    for device in status["devices"]:
        assert_has(device, DEVICE)
    assert status["mountpoint"] == str(shared_mount.path)
    assert (status["state"], status["pid"], status["version"]) == ("ok", shared_mount.pid, gpufs.__version__)
    assert [device["name"] for device in status["devices"]] == ["gpu0", "gpu1"]
    assert abs(status["started"] - time.time()) < 3600


def test_status_shows_whole_paths_on_narrow_output(shared_mount: GpufsMount) -> None:
    """Paths are not cut, and a pipe gets no colours."""
    for command in (["status"], ["status", shared_mount.path]):
        text = run(*GPUFS, *command, env={**os.environ, "COLUMNS": "20"}).stdout
        assert str(shared_mount.path) in text
        assert str(shared_mount.pid) in text
        assert "\x1b" not in text


def test_the_check_is_one_line_and_an_exit_code(mount: Mounter, tmp_path: Path) -> None:
    own = mount()
    done = run(*GPUFS, "status", "--check", own.path)
    assert (done.stdout.count("\n"), done.stderr) == (1, "")
    assert str(own.path) in done.stdout
    own.signal(signal.SIGSTOP)
    try:
        for words in ([own.path], []):  # this mount, and every mount
            done = run(*GPUFS, "status", "--check", *words, "--status-timeout", "3", check=False)
            assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    finally:
        own.signal(signal.SIGCONT)
    own.unmount()
    for path in (own.path, tmp_path / "missing"):
        done = run(*GPUFS, "status", "--check", path, check=False)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)


def test_commands_work_where_the_parent_ignores_its_children(shared_mount: GpufsMount) -> None:
    """The kernel then does not keep the ends of a command's own children."""
    for words in (["status"], ["df"], ["ls"], ["stats"]):
        run("sh", "-c", 'trap "" CHLD; exec "$@"', "sh", *GPUFS, *words, shared_mount.path)


def test_bind_mounts_are_not_mounts_of_their_own(mount: Mounter, tmp_path: Path) -> None:
    """A container's volume can show a mount, or one directory of it, at a second place of the host."""
    own = mount()
    (own.device / "weights").write_bytes(bytes(MIB))
    part, whole = tmp_path / "part", tmp_path / "whole"
    for place, what in ((part, own.device), (whole, own.path)):
        place.mkdir()
        run("mount", "--bind", what, place)
    try:
        for command in (["status"], ["df"], ["leases"], ["quota", "list"], ["top", "--once"], ["metrics"], ["ls"]):
            done = run(*GPUFS, *command, check=False)
            assert str(own.path) in done.stdout or command in (["leases"], ["quota", "list"])
            assert str(tmp_path) not in done.stdout + done.stderr
        assert json.loads(run(*GPUFS, "status", "--json", whole).stdout)["state"] == "ok"
        assert str(part / "weights") in run(*GPUFS, "ls", part).stdout
        for command in (["status"], ["df"], ["top", "--once"]):
            done = run(*GPUFS, *command, part, check=False)
            assert (done.returncode, done.stderr.count("\n")) == (1, 1)
            assert "/gpu0" in done.stderr
        run(*GPUFS, "umount", part)
        run(*GPUFS, "umount", "--force", whole)
        assert not os.path.ismount(part)
        assert not os.path.ismount(whole)
        assert (own.device / "weights").stat().st_size == MIB
    finally:
        for place in (part, whole):
            run("umount", "--lazy", place, check=False)
    own.unmount()


def test_df_counts_the_memory_of_files(mount: Mounter) -> None:
    own = mount(devices=2)
    before = df_of(own)
    for device in before:
        assert_has(device, DF)
    (own.device / "df-file").write_bytes(bytes(range(256)) * (8 * MIB // 256))
    after = df_of(own)
    assert after[0]["used_bytes"] - before[0]["used_bytes"] == 8 * MIB
    assert before[0]["free_bytes"] - after[0]["free_bytes"] == 8 * MIB
    assert after[0]["files"] - before[0]["files"] == 1
    assert after[1] == before[1]
    text = run(*GPUFS, "df", own.path).stdout
    assert f"{own.path}/gpu0" in text
    own.unmount()


@pytest.mark.parametrize("everybody", [True, False], ids=["terminal", "command"])
def test_an_interrupted_command_leaves_no_process(mount: Mounter, everybody: bool) -> None:
    """The command uses a helper process to ask a mount that may hang."""
    own = mount()
    own.signal(signal.SIGSTOP)
    try:
        words = [*GPUFS, "status", str(own.path)]
        with subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        ) as command:
            (reader,) = wait_until(lambda: children_of(command.pid), 20, "the question")
            if everybody:
                os.killpg(command.pid, signal.SIGINT)
            else:
                command.send_signal(signal.SIGINT)
            out, said = command.communicate(timeout=PATIENCE)
        assert command.returncode == 130, said
        assert "Traceback" not in said
        assert not out
        wait_until(lambda: has_ended(reader), 20, "the end of who asked")
    finally:
        own.signal(signal.SIGCONT)


def test_a_limit_on_file_sizes_that_an_answer_exceeds_is_named(shared_mount: GpufsMount) -> None:
    for blocks in (0, 1):
        command = f'ulimit -f {blocks}; exec "$@"'
        done = run("sh", "-c", command, "sh", *GPUFS, "status", str(shared_mount.path), check=False)
        assert done.returncode == 1
        assert "the most that ulimit -f allows" in done.stderr
        assert len(done.stderr.splitlines()) == 1
