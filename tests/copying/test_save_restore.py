"""`gpufs save` and `gpufs restore`: everything comes back, a save is whole or not there, and none is trusted."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import stat
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.cli import fails, fails_here, gpufs, gpufs_here, mountpoint, open_directory, user_gpufs  # noqa: F401
from support.data import GIB, KIB, MIB, left, noise
from support.mounting import GPUFS, GpufsMount, Mounter
from support.processes import NOBODY, PATIENCE, as_nobody, plain_user, run, wait_until
from support.watchdog import mounted_at

pytestmark = [
    pytest.mark.driver,
    pytest.mark.skipif(os.geteuid() != 0, reason="sets owners, and acts as another user"),
]

PART = 64 * MIB
ACCESS_LIST = bytes.fromhex(
    "02000000 01000600ffffffff 02000600feff0000 04000400ffffffff 10000600ffffffff 20000400ffffffff"
)
DEFAULT_LIST = bytes.fromhex(
    "02000000 01000700ffffffff 02000700feff0000 04000500ffffffff 10000700ffffffff 20000500ffffffff"
)


def make_tree(path: Path) -> None:
    """All kinds of names, with all kinds of attributes."""
    deep = path / "deep" / "er"
    deep.mkdir(parents=True)
    (path / "empty").mkdir(mode=0o750)
    (path / "nothing").touch()
    (path / "small").write_bytes(noise(300 * KIB))
    for number in range(40):
        (deep / f"{number}").write_bytes(noise(1000 + number, number))
    (path / "large").write_bytes(noise(PART + 3 * MIB + 777))
    with open(path / "sparse", "wb") as file:
        file.write(noise(1000))
        file.truncate(3 * PART + 5)
        file.seek(2 * PART + 10 * MIB)
        file.write(noise(3 * MIB))
    with open(path / "hole", "wb") as file:
        file.truncate(5 * MIB)
    os.link(path / "large", deep / "first name comes later")
    os.link(path / "deep" / "er" / "7", path / "also 7")
    (path / "link").symlink_to("deep/er/7")
    (path / "elsewhere").symlink_to("/etc/hostname")
    (path / "nowhere").symlink_to("../../gone")
    os.mkfifo(path / "fifo", 0o620)
    os.mknod(path / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    for name in (b"not \xff UTF-8", b"100%41", b"line\nbreak", "ünïcode".encode(), b" blank "):
        (path / os.fsdecode(name)).write_bytes(name)
    os.setxattr(path / "small", "user.note", b"\0binary\xff")
    os.setxattr(path / "small", "trusted.note", b"root's")
    os.setxattr(path / "small", "security.note", b"label")
    os.setxattr(path / "link", "trusted.note", b"of a link", follow_symlinks=False)
    os.setxattr(path / "deep", "user.note", b"of a directory")
    os.setxattr(path / "nothing", "system.posix_acl_access", ACCESS_LIST)
    os.setxattr(path / "empty", "system.posix_acl_default", DEFAULT_LIST)
    os.chown(path / "small", 1234, 5678)
    os.chmod(path / "small", 0o6754)
    os.chown(path / "deep", NOBODY, NOBODY)
    os.utime(path / "nothing", ns=(1, -1_500_000_000))
    os.utime(path / "link", ns=(5, 6), follow_symlinks=False)
    os.utime(path / "deep" / "er", ns=(10**18 + 1, 10**18 + 2))
    os.chmod(path / "deep" / "er", 0o500)


def snapshot(path: Path) -> dict[bytes, object]:
    """What a directory has: everything that a save must keep."""
    found: dict[bytes, object] = {}
    inodes: dict[int, bytes] = {}
    for folder, directories, files in os.walk(os.fsencode(path)):
        for full in [folder, *(os.path.join(folder, name) for name in (*directories, *files))]:
            status = os.lstat(full)
            name = os.path.relpath(full, os.fsencode(path))
            kind = stat.S_IFMT(status.st_mode)
            xattrs = {each: os.getxattr(full, each, follow_symlinks=False)
                      for each in os.listxattr(full, follow_symlinks=False)}  # fmt: skip
            content: object = None
            if kind == stat.S_IFREG:
                with open(full, "rb") as file:
                    content = hashlib.file_digest(file, "sha256").hexdigest(), status.st_size, status.st_blocks
            elif kind == stat.S_IFLNK:
                content = os.readlink(full)
            elif kind != stat.S_IFDIR:
                content = status.st_rdev
            same = inodes.setdefault(status.st_ino, name) if kind == stat.S_IFREG else name
            found[name] = (
                status.st_mode,
                status.st_uid,
                status.st_gid,
                status.st_mtime_ns,
                xattrs,
                content,
                min(same, name),
            )
    return found


def manifest(save: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (save / "manifest.jsonl").read_bytes().splitlines()]


def write_manifest(save: Path, lines: list[dict[str, Any]]) -> None:
    """Write a manifest whose checksum is right."""
    data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    end = {"type": "end", "lines": len(lines), "sha256": hashlib.sha256(data).hexdigest()}
    (save / "manifest.jsonl").write_bytes(data + json.dumps(end).encode() + b"\n")


@pytest.fixture
def saved(root: Path, host: Path) -> tuple[Path, Path]:
    """A directory of a mount, and its save."""
    source = root / "source"
    (source / "d").mkdir(parents=True)
    (source / "a").write_bytes(noise(100 * KIB))
    (source / "d" / "b").write_bytes(noise(PART + MIB, 2))
    (source / "d" / "c").write_bytes(b"c")
    gpufs_here("save", source, host / "save")
    return source, host / "save"


# ---- what is kept ----


def test_everything_comes_back(shared_mount: GpufsMount, root: Path, host: Path) -> None:
    source, again = root / "source", max(shared_mount.path.glob("gpu*")) / f"again-{os.getpid()}"
    source.mkdir(mode=0o710)
    make_tree(source)
    # A GPU's memory that was preallocated for a writer is released a moment later.
    wait_until(lambda: (source / "sparse").stat().st_blocks * 512 == 6 * MIB, 10, "the end of the preallocation")
    before = snapshot(source)
    try:
        gpufs_here("save", "--verify", source, host / "save")
        assert snapshot(source) == before
        gpufs_here("restore", "--verify", host / "save", again)
        assert snapshot(again) == before
    finally:
        run("rm", "-rf", again)


def test_a_save_can_be_opened_by_hand(saved: tuple[Path, Path]) -> None:
    source, save = saved
    assert run("diff", "-r", source, save / "tree").stdout == ""
    sums = "".join(
        f"{line['sha256']}  tree/{line['path']}\n" for line in manifest(save) if "sha256" in line and "path" in line
    )
    checked = run("sha256sum", "-c", input=sums, cwd=save).stdout
    assert checked.count("OK") == 2
    # A file of several parts, as docs/save.md shows.
    (large,) = (line for line in manifest(save) if "parts" in line)
    found = run("split", "-b", "64M", "--filter=sha256sum", save / "tree" / large["path"]).stdout
    assert [line.split()[0] for line in found.splitlines()] == list(large["parts"].values())
    assert stat.S_IMODE(save.stat().st_mode) == 0o700


def test_a_mount_is_saved_and_restored_with_its_limits(mountpoint: Path, host: Path) -> None:  # noqa: F811
    words = ("mount", mountpoint, "--driver", "host", "--devices", "2", "--memory", "64M")
    gpufs(*words)
    (mountpoint / "gpu1" / "d").mkdir()
    (mountpoint / "gpu0" / "a").write_bytes(noise(3 * MIB))
    (mountpoint / "gpu1" / "d" / "b").write_bytes(b"b")
    (mountpoint / "gpu1").chmod(0o1777)
    gpufs_here("quota", "set", mountpoint / "gpu1" / "d", "10M")
    gpufs_here("quota", "set", mountpoint / "gpu0", "-u", "nobody", "20M")
    limits = gpufs_here("quota", "list", mountpoint, "--json").stdout
    before = {name: snapshot(mountpoint / name) for name in ("gpu0", "gpu1")}
    stop = threading.Event()

    def change() -> None:
        while not stop.is_set():
            (mountpoint / "gpu0" / "changing").write_bytes(b"x")
            time.sleep(0.01)  # so that the file is mostly closed: the command refuses a mount with open files

    changer = threading.Thread(target=change)
    changer.start()
    try:
        assert str(mountpoint) in fails(1, "umount", "--save", host / "save", mountpoint)
    finally:
        stop.set()
        changer.join()
    assert mounted_at(str(mountpoint))
    assert os.listdir(host) == []
    (mountpoint / "gpu0" / "changing").unlink()
    with open(mountpoint / "gpu0" / "a", "rb"):
        assert str(os.getpid()) in fails(1, "umount", "--save", host / "save", mountpoint)
    assert os.listdir(host) == []
    os.utime(mountpoint / "gpu0", ns=(before["gpu0"][b"."][3],) * 2)  # type: ignore[index]
    gpufs("umount", "--save", host / "save", mountpoint)
    assert not mounted_at(str(mountpoint))
    gpufs(*words, "--restore", host / "save")
    try:
        assert {name: snapshot(mountpoint / name) for name in ("gpu0", "gpu1")} == before
        assert json.loads(gpufs_here("quota", "list", mountpoint, "--json").stdout) == json.loads(limits)
    finally:
        gpufs("umount", mountpoint)
    # A save that does not fit leaves nothing mounted.
    done = gpufs(*words[:-1], "2M", "--restore", host / "save", check=False)
    assert done.returncode == 1
    assert "gpu0" in done.stderr
    assert not mounted_at(str(mountpoint))
    # A part of it goes anywhere.
    gpufs("mount", mountpoint, "--driver", "host", "--devices", "1", "--memory", "64M")
    try:
        assert "gpu1" in fails_here(1, "restore", host / "save", mountpoint)
        gpufs_here("restore", host / "save" / "tree" / "gpu1", mountpoint / "gpu0" / "other")
        assert (mountpoint / "gpu0" / "other" / "d" / "b").read_bytes() == b"b"
        assert os.listdir(mountpoint / "gpu0") == ["other"]
    finally:
        gpufs("umount", mountpoint)
    # A device that is missing does not matter if it had no files.
    gpufs(*words, "--host-memory", "4M")
    (mountpoint / "gpu0" / "a").write_bytes(b"a")
    gpufs_here("quota", "set", mountpoint / "gpu1", "-u", "nobody", "20M")
    gpufs("umount", "--save", host / "save", mountpoint)
    gpufs("mount", mountpoint, "--driver", "host", "--devices", "1", "--memory", "64M", "--restore", host / "save")
    try:
        assert (mountpoint / "gpu0" / "a").read_bytes() == b"a"
    finally:
        gpufs("umount", mountpoint)


def test_names_in_the_way_are_named(saved: tuple[Path, Path], root: Path) -> None:
    _, save = saved
    end = root / "end"
    (end / "d").mkdir(parents=True)
    (end / "d").chmod(0o711)
    (end / "d" / "c").write_bytes(b"mine")
    assert os.fspath(end / "d" / "c") in fails_here(1, "restore", save, end)
    assert snapshot(end).keys() == {b".", b"d", b"d/c"}
    gpufs_here("restore", "--overwrite", save, end)
    assert (end / "d" / "c").read_bytes() == b"c"
    assert stat.S_IMODE((end / "d").stat().st_mode) == 0o755
    shutil.rmtree(end / "d")
    (end / "d").write_bytes(b"a file where a directory belongs")
    done = gpufs_here("restore", "--overwrite", save, end, check=False)
    assert done.returncode == 1
    assert os.fspath(end / "d") in done.stderr


# ---- whole or not there ----


@pytest.mark.slow
def test_a_save_killed_at_many_points_leaves_the_old_one_or_the_new_one(root: Path, host: Path) -> None:
    times = 50
    source, save = root / "source", host / "save"
    source.mkdir()
    chance = random.Random(times)

    def write(version: int) -> None:
        for number in range(60):
            (source / f"{number}").write_text(f"{version} {number}")
        (source / "large").write_bytes(noise(8 * MIB, version))
        (source / f"only in {version}").touch()
        (source / f"only in {version - 1}").unlink(missing_ok=True)

    def version() -> int:
        found = {int(path.read_text().split()[0]) for path in (save / "tree").iterdir() if path.name.isdigit()}
        assert len(found) == 1
        (number,) = found
        assert (save / "tree" / f"only in {number}").exists()
        assert len(os.listdir(save / "tree")) == 62
        return number

    write(0)
    began = time.monotonic()
    gpufs_here("save", source, save)
    seconds = time.monotonic() - began
    old = 0
    for number in range(1, times + 1):
        write(number)
        process = subprocess.Popen([*GPUFS, "save", source, save], start_new_session=True)
        time.sleep(chance.uniform(0.2, 1.1) * seconds)
        process.kill()
        process.wait(PATIENCE)
        found = version()
        assert found in (old, number)
        if number % 10 == 0:
            gpufs_here("restore", "--verify", save)
        old = found
    gpufs_here("save", source, save)
    assert version() == times
    assert os.listdir(host) == ["save"]


@pytest.mark.parametrize(
    "command", ["save", pytest.param("restore", marks=pytest.mark.slow), pytest.param("umount", marks=pytest.mark.slow)]
)
def test_a_signal_ends_a_command_whose_other_side_does_not_answer(mount: Mounter, command: str) -> None:
    """Threads that wait in the kernel do not keep it, nor its output, and the next run finds nothing in its way."""
    ours, other = mount(memory=GIB), mount(memory=512 * MIB)
    (ours.device / "large").write_bytes(noise(PART + MIB))
    for number in range(100):
        (ours.device / f"{number}").write_bytes(noise(MIB, number))
    save, restored = other.device / "save", ours.device / "restored"
    if command == "restore":
        gpufs_here("save", ours.path, save)
    words = {
        "save": ("save", ours.path, save),
        "umount": ("umount", ours.path, "--save", save),
        "restore": ("restore", save / "tree" / "gpu0", restored),
    }[command]
    before = left(other.device)
    with subprocess.Popen([*GPUFS, *words], stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: left(other.device) != before or restored.exists(), PATIENCE, "the beginning")
        other.daemon.send_signal(signal.SIGSTOP)
        try:
            time.sleep(0.5)
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
            _, text = process.communicate(timeout=PATIENCE)
            seconds = time.monotonic() - began
        finally:
            other.daemon.send_signal(signal.SIGCONT)
    assert process.returncode == -signal.SIGTERM, text
    assert seconds < 10
    assert mounted_at(str(ours.path))
    if command == "restore":
        gpufs_here("restore", "--overwrite", *words[1:])
    else:
        gpufs_here("save", ours.path, save)
        assert left(other.device) == ["save"]


def test_what_others_put_beside_a_save_is_not_used(saved: tuple[Path, Path], host: Path) -> None:
    source, save = saved
    before, part = snapshot(save), host / ".save.gpufs-part"
    part.mkdir()
    os.chown(part, NOBODY, NOBODY)
    (part / "theirs").touch()
    assert part.name in fails_here(1, "save", source, save)
    shutil.rmtree(part)
    part.symlink_to(source)
    fails_here(1, "save", source, save)
    assert snapshot(source).keys() == {b".", b"a", b"d", b"d/b", b"d/c"}
    part.unlink()
    part.mkdir()
    fd = os.open(part, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)  # as the save of another process has it
    assert "in progress" in fails_here(1, "save", source, save)
    assert snapshot(save) == before
    os.close(fd)
    gpufs_here("save", source, save)
    assert sorted(os.listdir(host)) == ["save"]


def test_a_full_destination_keeps_the_old_save(saved: tuple[Path, Path], host: Path) -> None:
    source, save = saved
    before = snapshot(save)
    # It fits until it is begun: only a process with this limit finds out in the end.
    assert "d/b" in fails(1, "save", source, save, preexec_fn=lambda: limit_files(MIB))
    assert snapshot(save) == before
    small = host / "small"
    small.mkdir()
    run("mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", small)
    try:
        assert "needs" in fails_here(1, "save", source, small / "save")
        assert os.listdir(small) == []
        assert "mounted" in fails_here(1, "save", source, small)
    finally:
        run("umount", small)
    assert sorted(os.listdir(host)) == ["save", "small"]


def limit_files(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def test_a_save_replaces_only_saves(saved: tuple[Path, Path], host: Path) -> None:
    source, _ = saved
    (host / "mine").mkdir()
    (host / "empty").mkdir()
    (host / "mine" / "file").touch()
    assert "mine" in fails_here(1, "save", source, host / "mine")
    assert "below" in fails_here(1, "save", source, source / "d" / "save")
    assert "rsync" in fails_here(2, "save", source, "s3://bucket/save")
    assert "rsync" in fails_here(2, "save", source, "machine:/save")
    assert "mount" in fails_here(1, "save", host, host / "other")
    gpufs_here("save", source, host / "empty")
    assert sorted(os.listdir(host)) == ["empty", "mine", "save"]


def test_a_file_that_changes_ends_the_save(root: Path, host: Path) -> None:
    changing = root / "changing"
    changing.write_bytes(bytes(30 * MIB))
    stop = threading.Event()

    def change() -> None:
        with open(changing, "r+b", buffering=0) as file:
            while not stop.is_set():
                file.write(b"x")

    changer = threading.Thread(target=change)
    changer.start()
    try:
        assert os.fspath(changing) in fails_here(1, "save", root, host / "save")
        assert os.listdir(host) == []
        gpufs_here("save", root, host / "save", "--exclude", "changing")
    finally:
        stop.set()
        changer.join()


# ---- damage ----


def flip(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))


def test_a_flipped_bit_is_found_and_its_file_named(saved: tuple[Path, Path], root: Path) -> None:
    _, save = saved
    gpufs_here("restore", "--verify", save)
    flip(save / "tree" / "a", 50_000)
    flip(save / "tree" / "d" / "b", PART + 77)
    done = gpufs_here("restore", "--verify", save, check=False)
    assert done.returncode == 1
    assert sorted(line.split(": ")[1] for line in done.stderr.splitlines()) == [
        os.fspath(save / "tree" / name) for name in ("a", "d/b")
    ]
    assert str(PART) in done.stderr
    done = gpufs_here("restore", save, root / "end", check=False)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 2
    assert sorted(os.listdir(root / "end")) == ["d"]
    assert os.listdir(root / "end" / "d") == ["c"]
    gpufs_here("restore", "--no-verify", save, root / "damaged")
    assert (root / "damaged" / "a").read_bytes() == (save / "tree" / "a").read_bytes()


def test_other_damage_is_found_before_anything_is_restored(saved: tuple[Path, Path], root: Path) -> None:
    _, save = saved
    lines, file = save / "manifest.jsonl", save / "tree" / "a"
    data, content = lines.read_bytes(), file.read_bytes()
    damages: list[tuple[Path, Callable[[], object]]] = [
        (lines, lambda: flip(lines, data.index(b'"mtime":"') + 12)),
        (lines, lambda: os.truncate(lines, len(data) - 150)),
        (file, lambda: os.truncate(file, 5)),
        (file, file.unlink),
    ]
    for wanted, damage in damages:
        damage()
        for words in ((root / "end",), ("--verify",)):
            assert os.fspath(wanted) in fails_here(1, "restore", save, *words)
        assert not (root / "end").exists()
        lines.write_bytes(data)
        file.write_bytes(content)


# ---- saves of others ----

EDITS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "above": lambda line: {**line, "path": "../outside"},
    "above, inside": lambda line: {**line, "path": "d/../../outside"},
    "above, escaped": lambda line: {**line, "path": "%2e%2e/outside"},
    "absolute": lambda line: {**line, "path": "/tmp/gpufs-outside"},
    "no name": lambda line: {**line, "path": "d//x"},
    "nothing": lambda line: {**line, "path": ""},
    "NUL": lambda line: {**line, "path": "x%00y"},
    "long name": lambda line: {**line, "path": "x" * 256},
    "deep": lambda line: {**line, "path": "/".join("x" * 3000)},
    "huge": lambda line: {**line, "size": 1 << 60},
    "larger": lambda line: {**line, "size": 1 << 40, "sha256": None, "parts": {}},
    "negative": lambda line: {**line, "size": -1},
    "parts": lambda line: {**line, "parts": {"-1": "0" * 64}},
    "mode": lambda line: {**line, "mode": "07777777"},
    "owner": lambda line: {**line, "uid": -1},
    "time": lambda line: {**line, "mtime": "9" * 40 + ".000000000"},
    "kind": lambda line: {**line, "type": "program"},
    "field": lambda line: {**line, "run": "sh"},
    "link above": lambda line: {"type": "hardlink", "path": "x", "to": "../../../etc/passwd"},
    "link to a directory": lambda line: {"type": "hardlink", "path": "x", "to": "d"},
    "link to nothing": lambda line: {"type": "hardlink", "path": "x", "to": "there/is/none"},
    "link as the directory itself": lambda line: {"type": "hardlink", "path": ".", "to": "a"},
    "file as the directory itself": lambda line: {**line, "path": "."},
    "attribute": lambda line: {**line, "xattrs": {"user.\0x": "AAAA"}},
    "surrogate": lambda line: {**line, "path": "\ud800"},
    "second beginning": lambda line: {"type": "gpufs-save", "version": 1, "source": "", "saved": ""},
    "nested": lambda line: {**line, "xattrs": {"user.x": "not base 64!"}},
}  # fmt: skip


def test_no_line_of_a_manifest_leads_out_of_the_destination(saved: tuple[Path, Path], root: Path) -> None:
    _, save = saved
    restore = ("restore", save, root / "end")
    lines = manifest(save)[:-1]
    place = next(place for place, line in enumerate(lines) if line.get("path") == "a")
    outside = (*root.iterdir(), *save.parent.iterdir())
    for name, edit in EDITS.items():
        write_manifest(save, [*lines[:place], edit(lines[place]), *lines[place + 1 :]])
        assert "internal error" not in fails_here(1, *restore), name
        assert (*root.iterdir(), *save.parent.iterdir()) == outside, name
    assert not os.path.lexists("/tmp/gpufs-outside")
    for path in ("..", "d\0x", "%2e%2e"):
        write_manifest(save, [{**lines[0], "limits": [{"path": path, "limit_bytes": 1}]}, *lines[1:]])
        assert "manifest" in fails_here(1, *restore)
    for data in (
        b"",
        b"\0" * 1000,
        b"[" * 10**6,
        b'{"type":"gpufs-save"}\n',
        b'{"type":"gpufs-save","version":9,"source":"","saved":""}\n',
    ):
        (save / "manifest.jsonl").write_bytes(data)
        assert "manifest" in fails_here(1, *restore)


def test_links_in_a_save_or_a_destination_are_not_followed(saved: tuple[Path, Path], root: Path, host: Path) -> None:
    _, save = saved
    secret = host / "secret"
    secret.mkdir()
    (secret / "c").write_bytes(b"s")
    # In the tree: a file, and a directory.
    (save / "tree" / "a").unlink()
    (save / "tree" / "a").symlink_to(secret / "c")
    assert os.fspath(save / "tree" / "a") in fails_here(1, "restore", save, root / "end")
    (save / "tree" / "a").unlink()
    os.mkfifo(save / "tree" / "a")  # nor opened
    fails(1, "restore", save, root / "end", timeout=PATIENCE)
    (save / "tree" / "a").unlink()
    (save / "tree" / "a").write_bytes(noise(100 * KIB))
    shutil.move(save / "tree" / "d", host / "d")
    (save / "tree" / "d").symlink_to(host / "d")
    fails_here(1, "restore", save, root / "end")
    (save / "tree" / "d").unlink()
    shutil.move(host / "d", save / "tree" / "d")
    # In the destination: a directory.
    (root / "end").mkdir()
    (root / "end" / "d").symlink_to(secret)
    for words in ((), ("--overwrite",)):
        done = gpufs_here("restore", *words, save, root / "end", check=False)
        assert done.returncode == 1
        assert os.fspath(root / "end" / "d") in done.stderr
    assert (secret / "c").read_bytes() == b"s"
    assert os.listdir(secret) == ["c"]
    # In the manifest: a link before what would go through it.
    lines = manifest(save)[:-1]
    link = {"type": "symlink", "path": "d", "mode": "0777", "uid": 0, "gid": 0, "atime": "0.000000000"}
    write_manifest(save, [lines[0], {**link, "mtime": "0.000000000", "target": os.fspath(secret)}, *lines[1:]])
    assert gpufs_here("restore", save, root / "other", check=False).returncode == 1
    assert (secret / "c").read_bytes() == b"s"
    assert os.listdir(secret) == ["c"]


def test_the_save_of_another_user_gives_no_rights(root: Path, host: Path) -> None:
    source = root / "source"
    source.mkdir()
    (source / "program").write_bytes(b"#!/bin/sh")
    os.setxattr(source / "program", "security.note", b"x")
    os.setxattr(source / "program", "user.note", b"x")
    (source / "program").chmod(0o6755)
    os.mknod(source / "disk", stat.S_IFBLK | 0o666, os.makedev(8, 0))
    gpufs_here("save", source, host / "save")
    os.chown(host / "save" / "manifest.jsonl", NOBODY, NOBODY)
    done = gpufs_here("restore", host / "save", root / "end")
    assert os.fspath(host / "save") in done.stderr
    assert stat.S_IMODE((root / "end" / "program").stat().st_mode) == 0o755
    assert os.listxattr(root / "end" / "program") == ["user.note"]
    assert os.listdir(root / "end") == ["program"]


def test_a_plain_user_saves_and_restores_what_is_the_users_own(
    root: Path,
    open_directory: Path,  # noqa: F811
) -> None:
    source, other = root / "source", root / "source" / "other"

    def make() -> None:
        source.mkdir()
        (source / "mine").write_bytes(noise(MIB))
        os.setxattr(source / "mine", "user.note", b"x")
        (source / "mine").chmod(0o440)
        (source / "d").mkdir(mode=0o500)

    as_nobody(make)
    (source / "theirs").write_bytes(b"readable")
    (source / "secret").write_bytes(b"secret")
    (source / "secret").chmod(0o600)
    other.mkdir(mode=0o700)
    open_directory.chmod(0o777)
    with plain_user() as environment:
        program, variables = user_gpufs(environment)

        def as_user(*words: object) -> subprocess.CompletedProcess[str]:
            identity: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": [], "cwd": "/"}
            return run(*program, *map(str, words), env=variables, **identity)

        done = as_user("save", source, open_directory / "save")
        assert len(done.stderr.splitlines()) == 1
        assert os.fspath(other) in done.stderr or os.fspath(source / "secret") in done.stderr
        done = as_user("restore", "--verify", open_directory / "save", root / "end")
        assert len(done.stderr.splitlines()) == 1  # of the owner of one
    mine, theirs = root / "end" / "mine", root / "end" / "theirs"
    assert sorted(os.listdir(root / "end")) == ["d", "mine", "theirs"]
    assert mine.read_bytes() == noise(MIB)
    assert stat.S_IMODE(mine.stat().st_mode) == 0o440
    assert os.getxattr(mine, "user.note") == b"x"
    assert {path.stat().st_uid for path in (mine, theirs, root / "end", root / "end" / "d")} == {NOBODY}
    assert stat.S_IMODE((root / "end" / "d").stat().st_mode) == 0o500


def test_a_file_that_fails_leaves_the_old_one_and_the_error_does_not_say_otherwise(root: Path, tmp_path: Path) -> None:
    (root / "tree").mkdir()
    (root / "tree/file").write_bytes(b"saved")
    gpufs_here("save", root / "tree", tmp_path / "save")
    (root / "tree/file").write_bytes(b"newer")
    words = [*GPUFS, "restore", "--overwrite", str(tmp_path / "save"), str(root / "tree")]
    done = run("sh", "-c", 'ulimit -f 0; exec "$@"', "sh", *words, check=False)
    assert done.returncode == 1
    assert done.stderr == f"gpufs restore: {root}/tree/file: File too large\n"
    assert (root / "tree/file").read_bytes() == b"newer"


def test_a_save_with_a_name_of_255_bytes(root: Path, tmp_path: Path) -> None:
    (root / "file").write_bytes(b"saved")
    for _ in range(2):  # also in place of the first one
        gpufs_here("save", root, tmp_path / ("s" * 255))
    assert [path.name for path in tmp_path.iterdir()] == ["s" * 255]


def test_trees_deeper_than_functions_and_descriptors_go(root: Path, host: Path) -> None:
    """They are saved, also over an older save, restored and deleted. What is too deep for a path is refused by name."""

    def make_levels(path: Path, count: int) -> None:
        above = os.open(path, os.O_RDONLY)
        for _ in range(count):
            os.mkdir("d", dir_fd=above)
            below = os.open("d", os.O_RDONLY, dir_fd=above)
            os.close(above)
            above = below
        os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=above))
        os.close(above)

    def limited(*words: object, check: bool = True) -> subprocess.CompletedProcess[str]:
        return run("prlimit", "--nofile=256:", *GPUFS, *map(str, words), check=check)

    def levels(path: Path) -> int:
        return len(run("find", path, "-type", "d", "-name", "d").stdout.splitlines())

    for path in (root / "deep", root / "deeper", host / "empty"):
        path.mkdir()
    try:
        make_levels(root / "deep", 1100)
        for _ in range(2):
            limited("save", root / "deep", host / "s")
            assert sorted(os.listdir(host)) == ["empty", "s"]
        limited("restore", host / "s", root / "r")
        assert levels(root / "r") == 1100
        limited("sync", "--delete", host / "empty", root / "r")
        assert levels(root / "r") == 0
        make_levels(root / "deeper", 2200)
        refused = limited("save", root, host / "s", check=False)
        assert refused.returncode == 1
        assert "--exclude" in refused.stderr
        limited("save", "--exclude", "deeper", root, host / "s")
        assert levels(host / "s") == 1100
        assert sorted(os.listdir(host)) == ["empty", "s"]
    finally:
        run("rm", "-rf", root / "deep", root / "deeper", root / "r", host / "s", host / ".s.gpufs-part")
