"""Root runs commands next to mounts, files and processes of a hostile user."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.data import noise
from support.mounting import GPUFS, GpufsMount, Mounter
from support.processes import NOBODY, as_nobody, run, wait_until
from support.watchdog import mounted_at

from gpufs import mounting, statistics

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="acts as another user, which takes root")

# A file system of another user that calls itself gpufs. Its files below .gpufs have the content of a file of the host.
SERVER = """
import ctypes, os, stat, sys
from struct import pack, unpack_from

place, content = sys.argv[1:]
device = os.open("/dev/fuse", os.O_RDWR)
options = f"fd={device},rootmode=40000,user_id=65534,group_id=65534,allow_other"
assert ctypes.CDLL(None).mount(b"gpufs", place.encode(), b"fuse.gpufs", 6, options.encode()) == 0
source = os.open(content, os.O_RDONLY)
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)

LOOKUP, GETATTR, OPEN, READ, RELEASE, FLUSH, INIT, OPENDIR = 1, 3, 14, 15, 18, 25, 26, 27
FORGET, INTERRUPT, BATCH_FORGET = 2, 36, 42

def attributes(inode):
    mode = stat.S_IFDIR | 0o755 if inode < 3 else stat.S_IFREG | 0o644
    return pack("=Q52xI24x", inode, mode)

while True:
    request = os.read(device, 1 << 20)
    opcode, unique, inode = unpack_from("=4xIQQ", request)
    code, reply = 0, b""
    if opcode == INIT:
        _, minor, ahead = unpack_from("=III", request, 40)
        reply = pack("=IIII HHIIHHI28x", 7, minor, ahead, 0, 16, 12, 4096, 1, 0, 0, 0)
    elif opcode == LOOKUP:
        found = 2 if inode == 1 else 3
        reply = pack("=QQ24x", found, 0) + attributes(found)
    elif opcode == GETATTR:
        reply = pack("=16x") + attributes(inode)
    elif opcode == OPEN:
        reply = pack("=QII", 1, 1, 0)  # without a cache
    elif opcode == READ:
        offset, size = unpack_from("=8xQI", request, 40)
        reply = os.pread(source, size, offset)
    elif opcode in (OPENDIR, FORGET, INTERRUPT, BATCH_FORGET):
        continue  # never answered
    elif opcode not in (RELEASE, FLUSH):
        code = -38  # ENOSYS
    os.write(device, pack("=IiQ", 16 + len(reply), code, unique) + reply)
"""


@pytest.fixture
def hostile(tmp_path: Path) -> Iterator[Callable[[bytes], Path]]:
    """A mount of another user whose control files have the content given; returns its place."""
    place, content = tmp_path / "hostile", tmp_path / "content"
    place.mkdir()
    content.touch()
    server = subprocess.Popen([sys.executable, "-c", SERVER, place, content], cwd="/")

    def show(text: bytes) -> Path:
        content.write_bytes(text)
        return place

    try:
        wait_until(lambda: mounted_at(str(place)), 60, "the hostile mount")
        yield show
    finally:
        subprocess.run(["umount", "-l", place], check=False)
        server.kill()
        server.wait()


COUNTS = {"bytes": 1, "operations": 1, "errors": 0, "in_flight": 0, "refusals": {}, "sizes": [], "times": []}
STATS = {"format": 1, "pid": 1, "alive": True, "driver": "host", "started": 1, "dead_since": None, "devices": []}
ANSWERS: dict[str, Any] = {
    "very deep": b"[" * 200_000,
    "other types": {"format": 1, "devices": {"a": 1}, "started": "yesterday"},
    "large numbers": {
        "devices": [{"name": "gpu0", "total_bytes": 10**400, "held_bytes": 0, "free_bytes": 0}],
        "started": 1,
    },
    "text that cannot be printed": b'{"devices": [], "started": 1, "version": "\\ud800", "format": 1}',
    "buckets": {
        **STATS,
        "gauges": {},
        "devices": [{"name": "g", "gauges": {"health_error": 1}, "backends": {"mount": {"in": COUNTS | {"sizes": 1}}}}],
    },
}  # fmt: skip


@pytest.mark.parametrize("answer", ANSWERS)
def test_bad_answers_of_another_users_mount_do_not_hide_other_mounts(
    shared_mount: GpufsMount, hostile: Callable[[bytes], Path], answer: str
) -> None:
    content = ANSWERS[answer]
    place = hostile(content if isinstance(content, bytes) else json.dumps(content).encode())
    for words in (["status"], ["df"], ["stats", "--json"]):
        done = run(*GPUFS, *words, check=False)
        assert done.returncode == 0, done
        assert str(shared_mount.path) in done.stdout
        # A status that is understood may have no device, and then df has no line about it.
        assert words == ["df"] or str(place) in done.stdout + done.stderr
        assert "internal error" not in done.stdout + done.stderr
        assert len([line for line in done.stderr.splitlines() if str(place) in line]) <= 1


def limited() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))


def test_an_endless_answer_is_not_read_to_its_end(
    shared_mount: GpufsMount, hostile: Callable[[bytes], Path], tmp_path: Path
) -> None:
    place = hostile(b"")
    os.truncate(tmp_path / "content", 1 << 40)
    for words in (["status"], ["df"], ["stats"]):
        done = run(*GPUFS, *words, preexec_fn=limited)
        assert str(shared_mount.path) in done.stdout
        assert str(place) in done.stdout + done.stderr


@pytest.mark.parametrize("kind", ["sparse", "damaged"])
def test_damaged_counters_of_another_user_do_not_hide_other_mounts(
    shared_mount: GpufsMount, hostile: Callable[[bytes], Path], kind: str
) -> None:
    place = hostile(b"")
    entry = mounting.entry_of(str(place))
    own = mounting.entry_of(str(shared_mount.path))
    assert entry is not None
    assert own is not None
    folder = Path(f"/tmp/gpufs-{NOBODY}")
    made = not folder.exists()
    folder.mkdir(exist_ok=True)
    os.chown(folder, NOBODY, NOBODY)
    path = folder / statistics.file_name(1, entry.device)
    data = statistics.find(own.device, 0)[0].read_bytes()
    if kind == "damaged":  # behind the header that says what it is
        data = data[:16] + noise(len(data) - 16)
    path.write_bytes(data)
    if kind == "sparse":
        os.truncate(path, 3 << 30)
    os.chown(path, NOBODY, NOBODY)
    try:
        done = run(*GPUFS, "stats", preexec_fn=limited)
        assert str(shared_mount.path) in done.stdout
        assert str(place) in done.stdout
        assert "internal error" not in done.stderr
    finally:
        path.unlink()
        if made:
            folder.rmdir()


def test_a_process_with_the_daemons_name_is_left_alone(mount: Mounter) -> None:
    """Neither waiting for the daemon nor --force touches the process."""
    own = mount()
    words = ["-m", "gpufs.daemon", str(own.path)]
    identities: list[dict[str, Any]] = [{"user": NOBODY, "group": NOBODY, "extra_groups": []}, {}]
    for identity in identities:
        stand_in = subprocess.Popen(
            ["/usr/bin/env", "sh", "-c", "read x; true", *words], stdin=subprocess.PIPE, **identity
        )
        try:
            status = json.loads(run(*GPUFS, "status", "--json", own.path).stdout)
            assert status["pid"] == own.pid
            done = run(*GPUFS, "umount", own.path, check=False)
            assert done.returncode == 0, done
            own.wait_ended()
            assert "no gpufs is mounted there" in run(*GPUFS, "umount", "--force", own.path, check=False).stderr
            assert stand_in.poll() is None
        finally:
            stand_in.kill()
            stand_in.communicate()
        if identity:
            own = mount()
            words[-1] = str(own.path)


def test_only_root_and_the_owner_see_paths_of_the_host(mount: Mounter, tmp_path: Path) -> None:
    share = tmp_path / "share"
    share.mkdir()
    own = mount("--backing", f"share={share}", allow_other=True)
    status = own.path / ".gpufs/status"

    def shown() -> dict[str, Any]:
        knobs: dict[str, Any] = json.loads(status.read_text())["knobs"]
        return knobs

    root = shown()
    assert root["backing"] == [["share", str(share), False]]
    assert root["log_file"] == str(own.log)
    with open(status) as held:  # what root reads is not what another user gets, whose file is open at the same time
        held.read(1)
        text = as_nobody(status.read_text)
        knobs = json.loads(text)["knobs"]
    assert str(tmp_path) not in text.replace(str(own.path), "")
    assert str(own.log) not in text
    assert knobs == {name: value for name, value in root.items() if name not in ("backing", "log_file")}
