"""The command's launcher (native/launcher): which copies it asks for, and how Python takes them up."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.data import MIB, assert_same, noise
from support.mounting import GPUFS, GpufsMount, Mounter
from support.processes import NOBODY, run, wait_until

from gpufs.client import _copy

pytestmark = pytest.mark.driver

LAUNCHER = Path(GPUFS[0])
PYTHON = LAUNCHER.with_name("gpufs-python")
SIZE = MIB + 7

# In place of the Python program: it tells what it was handed, and sees the copy to its end.
PROBE = f"""#!{sys.executable}
import json, os, socket, sys
from gpufs.client import _protocol

found = {{"words": sys.argv[1:], "handed": os.environ.get("GPUFS_HANDED")}}
with open("/proc/self/status") as status:
    (blocked,) = (int(line.split()[1], 16) for line in status if line.startswith("SigBlk"))
found["blocked"] = [number for number in range(1, 65) if blocked >> (number - 1) & 1]
if found["handed"]:
    names = "process began direction size connection source destination created signals name".split()
    found |= zip(names, found["handed"].split(":", 9))
    found["mine"] = found["process"] == str(os.getpid())
    found["ends"] = [os.readlink("/proc/self/fd/" + found[end]) for end in ("source", "destination")]
    sock = socket.socket(fileno=int(found["connection"]))
    found["answers"] = []
    while not found["answers"] or found["answers"][-1]["type"] not in ("Result", "Goodbye"):
        message = _protocol.decode_server(_protocol.receive(sock)[0])
        found["answers"].append({{"type": type(message).__name__, **vars(message)}})
print(json.dumps(found))
"""


@pytest.fixture
def host() -> Iterator[Path]:
    """An empty directory on a disk."""
    path = Path(tempfile.mkdtemp(prefix="gpufs-launcher-", dir="/var/tmp"))
    path.chmod(0o777)
    yield path
    shutil.rmtree(path)


Install = Callable[[str], Path]


@pytest.fixture
def install(tmp_path: Path) -> Install:
    """Puts the launcher beside a program of the test's own; returns the launcher."""

    def make(program: str) -> Path:
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        shutil.copy(LAUNCHER, folder / "gpufs")
        (folder / "gpufs-python").write_text(program)
        (folder / "gpufs-python").chmod(0o755)
        return folder / "gpufs"

    return make


def before_python(script: str) -> str:
    """A program that runs lines of shell, then becomes the real one, still the same process."""
    return f'#!/bin/sh\n{script}\nexec {PYTHON} "$@"\n'


def probe(launcher: Path, *words: str | Path, **options: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(launcher, *words, **options).stdout)
    assert found["words"] == [os.fspath(word) for word in words]
    return found


def transfers(mount: GpufsMount) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((mount.path / ".gpufs" / "status").read_text())["transfers"]
    return found


# ---- what it asks for ----


@pytest.mark.parametrize("direction", ["load", "store"])
@pytest.mark.parametrize("given", ["name", "directory", "existing"])
def test_a_plain_copy_is_under_way_when_python_starts(
    root: Path, host: Path, install: Install, direction: str, given: str
) -> None:
    here, there = (host, root) if direction == "load" else (root, host)
    content = noise(SIZE)
    (here / "source").write_bytes(content)
    (here / "source").chmod(0o640)
    target = there / ("source" if given == "directory" else "target")
    if given == "existing":
        target.write_bytes(bytes(3 * MIB))
    found = probe(install(PROBE), "cp", here / "source", there if given == "directory" else target)
    assert found["mine"]
    assert (found["direction"], found["created"]) == (direction, "0" if given == "existing" else "1")
    assert found["size"] == str(SIZE)
    assert found["ends"] == [str(here / "source"), str(target)]
    assert found["name"] == str(target)
    assert found["blocked"] == [signal.SIGINT, signal.SIGTERM]
    assert found["signals"] == f"{signal.SIGINT},{signal.SIGTERM}"
    welcome, result = found["answers"]
    assert (welcome["type"], welcome["version"]) == ("Welcome", 1)
    assert (result["type"], result["id"], result["error"], result["done"]) == ("Result", 1, 0, SIZE)
    assert_same(target.read_bytes(), content)
    if given != "existing":
        assert target.stat().st_mode & 0o777 == 0o640


def test_signals_that_were_blocked_stay_so(root: Path, host: Path, install: Install) -> None:
    (host / "source").write_bytes(noise(SIZE))
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        found = probe(install(PROBE), "cp", host / "source", root)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    assert found["signals"] == str(int(signal.SIGTERM))


def test_a_name_may_hold_anything(root: Path, host: Path) -> None:
    folder = root / "a:b\nc\\040 \udcff"
    folder.mkdir()
    source = host / "s:\n\udcfe\\"
    source.write_bytes(noise(SIZE))
    run(LAUNCHER, "cp", source, folder)
    assert_same((folder / source.name).read_bytes(), noise(SIZE))


def test_a_link_to_the_command_and_a_name_relative_to_here(root: Path, host: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(LAUNCHER)
    (host / "source").write_bytes(noise(SIZE))
    run(tmp_path / "link", "cp", "source", os.path.relpath(root / "target", host), cwd=host)
    assert_same((root / "target").read_bytes(), noise(SIZE))
    run("bash", "-c", f"exec -a other {LAUNCHER} cp target {host}/back", cwd=root)
    assert_same((host / "back").read_bytes(), noise(SIZE))


def test_it_is_asked_for_once(shared_mount: GpufsMount, root: Path, host: Path) -> None:
    (host / "source").write_bytes(noise(SIZE))
    before = transfers(shared_mount)
    run(LAUNCHER, "cp", host / "source", root / "target")
    after = transfers(shared_mount)
    assert after["completed"] - before["completed"] == after["accepted"] - before["accepted"] == 1
    assert after["loaded_bytes"] - before["loaded_bytes"] == SIZE


def test_a_terminal_gets_the_bar(root: Path, host: Path) -> None:
    (host / "source").write_bytes(noise(64 * MIB))
    ours, theirs = pty.openpty()
    try:
        child = subprocess.Popen([LAUNCHER, "cp", host / "source", root / "target"], stderr=theirs)
        os.close(theirs)
        shown = b""
        while True:
            try:
                shown += os.read(ours, 65536)
            except OSError:  # EIO: nobody has the other end any more
                break
        assert child.wait(60) == 0, shown.decode()
    finally:
        os.close(ours)
    assert b"100%" in shown
    assert_same((root / "target").read_bytes(), noise(64 * MIB))


def test_the_program_finds_what_its_interpreter_finds() -> None:
    """It leaves out `site`, whose work it has done when it was built: also where packages are another environment's."""
    whole, plain = (
        set(
            run(PYTHON.with_name("python"), "-P", *words, "-c", "import sys; print(*sys.path, sep='\\n')").stdout.split(
                "\n"
            )
        )
        for words in ((), ("-S",))
    )
    (line,) = [line for line in PYTHON.read_text().splitlines() if "sys.path +=" in line]
    root = str(Path(__file__).parents[1])
    assert {root, *whole} - plain <= set(re.findall(r"['\"]([^'\"]+)['\"]", line))


# ---- what it leaves to Python ----


def not_handed(found: dict[str, Any]) -> bool:
    return found["handed"] is None and not found["blocked"]


@pytest.mark.parametrize(
    "words",
    [
        ("cp", "-v", "HOST/source", "ROOT/target"),
        ("cp", "HOST/source", "HOST/more", "ROOT"),
        ("cp", "--", "HOST/source", "ROOT/target"),
        ("cp", "HOST/small", "ROOT/target"),
        ("cp", "HOST/none", "ROOT/target"),
        ("cp", "HOST/empty", "ROOT/target"),
        ("cp", "HOST/folder", "ROOT/target"),
        ("cp", "HOST/fifo", "ROOT/target"),
        ("cp", "HOST/source", "HOST/target"),
        ("cp", "ROOT/there", "ROOT/target"),
        ("cp", "ROOT/there", "ROOT/there"),
        ("cp", "HOST/source", "ROOT/dangling"),
        ("cp", "HOST/source", "ROOT/none/target"),
        ("cp", "HOST/source", "ROOT/there/"),
        ("cp", "HOST/source", "ROOT/holder"),
        ("cp", "HOST/source", "ROOT/new/"),
        ("cp", "HOST/source", ""),
        ("cp", "", "ROOT/target"),
        ("cp", "HOST/source"),
        ("cp",),
        (),
        ("df", "HOST/source", "ROOT/target"),
    ],
    ids=lambda words: " ".join(words),
)
def test_what_is_not_plain_is_left_alone(root: Path, host: Path, install: Install, words: tuple[str, ...]) -> None:
    for path in (host / "source", host / "more", root / "there"):
        path.write_bytes(noise(SIZE))
    (host / "small").write_bytes(noise(_copy._SMALL_BYTES))
    (host / "empty").touch()
    (host / "folder").mkdir()
    (root / "holder" / "source").mkdir(parents=True)
    os.mkfifo(host / "fifo")
    (root / "dangling").symlink_to(root / "nowhere")
    before = sorted(os.listdir(root)), sorted(os.listdir(host))
    words = tuple(word.replace("ROOT", str(root)).replace("HOST", str(host)) for word in words)
    assert not_handed(probe(install(PROBE), *words))
    assert (sorted(os.listdir(root)), sorted(os.listdir(host))) == before


def test_a_file_one_byte_larger_is_asked_for(root: Path, host: Path, install: Install) -> None:
    """The bound is Python's."""
    (host / "source").write_bytes(noise(_copy._SMALL_BYTES + 1))
    assert probe(install(PROBE), "cp", host / "source", root)["handed"]


def test_with_a_stream_closed(root: Path, host: Path, install: Install) -> None:
    """Its files would become that stream."""
    (host / "source").write_bytes(noise(SIZE))
    launcher = install(PROBE)
    done = run("bash", "-c", f"{launcher} cp {host / 'source'} {root / 'target'} <&-")
    assert not_handed(json.loads(done.stdout))


def test_with_hardly_a_descriptor_left(root: Path, host: Path, install: Install) -> None:
    """Those that are handed on would be the ones that Python needs to start."""
    (host / "source").write_bytes(noise(SIZE))
    launcher = install(PROBE)
    done = run("bash", "-c", f"ulimit -n 18; {launcher} cp {host / 'source'} {root / 'target'}")
    assert not_handed(json.loads(done.stdout))
    assert not (root / "target").exists()


def test_a_variable_that_was_inherited_is_not_believed(root: Path, host: Path, install: Install) -> None:
    environment = {**os.environ, "GPUFS_HANDED": f"{os.getpid()}:1:load:0:1:2:0:2:/etc/passwd"}
    assert not_handed(probe(install(PROBE), "df", env=environment))
    (host / "source").write_bytes(noise(SIZE))
    for program in (LAUNCHER, PYTHON):
        run(program, "cp", host / "source", root / "target", env=environment)
        assert_same((root / "target").read_bytes(), noise(SIZE))
        (root / "target").unlink()


def test_a_file_that_cannot_be_made_is_python_to_tell(root: Path, host: Path) -> None:
    (host / "source").write_bytes(noise(SIZE))
    name = "n" * 256
    done = run(LAUNCHER, "cp", host / "source", root / name, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"gpufs: cp: {root / name}: File name too long\n"


@pytest.mark.parametrize("missing", [True, False])
def test_without_its_python(root: Path, host: Path, install: Install, missing: bool) -> None:
    (host / "source").write_bytes(noise(SIZE))
    launcher = install("#!/nowhere/python\n")
    program = launcher.with_name("gpufs-python")
    if missing:
        program.unlink()
    done = run(launcher, "cp", host / "source", root / "target", check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"gpufs: {program}: No such file or directory (it belongs to gpufs: install gpufs again)\n"
    assert not missing or not (root / "target").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="hides /proc, which takes root")
def test_without_proc(root: Path, host: Path, install: Install) -> None:
    """What it is called by then leads to its Python, by way of links as well."""
    (host / "source").write_bytes(noise(SIZE))
    launcher = install('#!/bin/sh\necho "$GPUFS_HANDED" "$@"\n')
    (host / "link").symlink_to(launcher)
    words = f"cp {host / 'source'} {root / 'target'}"
    script = f"mount -t tmpfs none /proc; {launcher} {words}; cd {host}; ./link {words}; PATH=$PWD:$PATH; link {words}"
    done = run("unshare", "--mount", "--propagation", "private", "sh", "-c", script)
    assert (done.stdout, done.stderr) == (f" {words}\n" * 3, "")


# ---- what happens before Python is there ----


@pytest.mark.parametrize("direction", ["load", "store"])
def test_names_that_go_meanwhile(root: Path, host: Path, install: Install, direction: str) -> None:
    """The copy is that of the files that were open; as with any copy, names may go."""
    here, there = (host, root) if direction == "load" else (root, host)
    (here / "source").write_bytes(noise(SIZE))
    (there / "target").touch()
    os.link(there / "target", there / "kept")
    launcher = install(before_python('rm "$2" "$3"'))
    run(launcher, "cp", here / "source", there / "target")
    assert_same((there / "kept").read_bytes(), noise(SIZE))
    assert sorted(os.listdir(there)) == ["kept"]


@pytest.mark.complains
@pytest.mark.parametrize("direction", ["load", "store"])
def test_the_daemon_dies_meanwhile(mount: Mounter, host: Path, install: Install, direction: str) -> None:
    own = mount()
    here, there = (host, own.device) if direction == "load" else (own.device, host)
    (here / "source").write_bytes(noise(64 * MIB))
    launcher = install(before_python(f"kill -9 {own.pid}; while [ -e /proc/{own.pid}/exe ]; do sleep 0.01; done"))
    done = run(launcher, "cp", here / "source", there / "target", check=False)
    *notice, line = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (1, "")
    assert all("its copy service cannot be reached" in text for text in notice)
    assert line.startswith("gpufs cp: ")
    assert "the daemon of the" in line
    own.daemon.wait(60)
    if direction == "store":
        assert (host / "target").stat().st_size in (0, 64 * MIB)
    own.rescue()


def test_a_daemon_with_too_many_clients(mount: Mounter, host: Path) -> None:
    """It says so instead of greeting: the mount serves, as a plain file system."""
    from gpufs.client import _find

    own = mount()
    (host / "source").write_bytes(noise(SIZE))
    device = own.path.stat().st_dev
    places = _find.mounts_by_device()[device]
    taken = [_find.connect(device, places) for _ in range(32)]
    try:
        wait_until(lambda: transfers(own)["connections"] == 32, 20, "32 connections")
        done = run(LAUNCHER, "cp", host / "source", own.device / "target")
    finally:
        for sock in taken:
            sock.close()
    (line,) = done.stderr.splitlines()
    assert "too many connections" in line
    assert_same((own.device / "target").read_bytes(), noise(SIZE))


def test_a_file_that_the_daemon_has_no_buffer_for(mount: Mounter, host: Path, reference: Path) -> None:
    """Of backing/: it says so, and Python reads and writes it."""
    own = mount("--backing", f"d={reference}")
    (host / "source").write_bytes(noise(SIZE))
    run(LAUNCHER, "cp", host / "source", own.path / "backing/d/target")
    assert_same((reference / "target").read_bytes(), noise(SIZE))
    run(LAUNCHER, "cp", own.path / "backing/d/target", host / "back")
    assert_same((host / "back").read_bytes(), noise(SIZE))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
@pytest.mark.parametrize("ignored", [False, True], ids=["heeded", "ignored"])
def test_a_signal_meanwhile_waits_for_python(
    mount: Mounter, host: Path, install: Install, number: signal.Signals, ignored: bool
) -> None:
    own = mount(environment={"GPUFS_IO_WORKERS": "1", "GPUFS_IO_CHUNK_BYTES": "64K"})
    size = 192 * MIB
    (host / "source").write_bytes(noise(size))
    launcher = install(before_python(f"kill -{number.value} $$"))
    command = [str(launcher), "cp", str(host / "source"), str(own.device / "target")]
    if ignored:
        command = ["sh", "-c", f"trap '' {number.value}; exec \"$@\"", "sh", *command]
    done = run(*command, check=False)
    held = (own.device / "target").read_bytes()
    assert_same(held, noise(size)[: len(held)])
    if ignored:
        assert (done.returncode, done.stderr, len(held)) == (0, "", size)
        return
    assert done.returncode == -number
    if len(held) < size:  # else it was through before Python could have it cancelled
        assert f"interrupted: the copy has {len(held)} of {size} bytes" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_ends_an_open_that_is_not_answered(
    root: Path, host: Path, install: Install, number: signal.Signals
) -> None:
    """As by a file's server that hangs: here others wait until a lease on the destination has been given back."""
    (root / "source").write_bytes(noise(SIZE))
    (host / "target").write_bytes(b"before")
    lease = os.open(host / "target", os.O_RDWR)
    try:
        fcntl.fcntl(lease, fcntl.F_SETSIG, signal.SIGURG)  # which nobody minds, and not SIGIO, which would end us
        fcntl.fcntl(lease, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        child = subprocess.Popen([install(PROBE), "cp", root / "source", host / "target"], stdout=subprocess.PIPE)
        inode = f":{os.fstat(lease).st_ino} "
        wait_until(
            lambda: any(inode in x and "BREAKING" in x for x in Path("/proc/locks").read_text().splitlines()),
            20,
            "the destination to be opened",
        )
        child.send_signal(number)
        assert child.communicate(timeout=60)[0] == b""  # there was no Python
        assert child.returncode == -number
    finally:
        os.close(lease)
    assert (host / "target").read_bytes() == b"before"


def test_a_killed_one_leaves_nothing(mount: Mounter, host: Path, install: Install) -> None:
    own = mount(environment={"GPUFS_IO_WORKERS": "1", "GPUFS_IO_CHUNK_BYTES": "64K"})
    (host / "source").write_bytes(noise(192 * MIB))
    launcher = install("#!/bin/sh\nkill -9 $$\n")
    done = run(launcher, "cp", host / "source", own.device / "target", check=False)
    assert done.returncode == -signal.SIGKILL
    wait_until(lambda: transfers(own)["running"] == transfers(own)["connections"] == 0, 20, "the end of the copy")
    held = (own.device / "target").read_bytes()
    assert_same(held, noise(192 * MIB)[: len(held)])


@pytest.mark.skipif(os.geteuid() != 0, reason="acts as another user, which takes root")
def test_as_a_plain_user(root: Path, host: Path, install: Install) -> None:
    """He gets what he may open, and the daemon is asked by him."""
    identity: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    for name in ("his", "secret"):
        (host / name).write_bytes(noise(SIZE))
        (host / name).chmod(0o644 if name == "his" else 0o600)
    folder = Path(tempfile.mkdtemp(prefix="gpufs-launcher-", dir="/tmp"))
    try:
        folder.chmod(0o755)
        shutil.copy(LAUNCHER, folder / "gpufs")
        (folder / "gpufs-python").write_text('#!/bin/sh\nsleep 0.1\necho "$GPUFS_HANDED"\n')
        (folder / "gpufs-python").chmod(0o755)
        assert run(folder / "gpufs", "cp", host / "secret", root / "secret", **identity).stdout == "\n"
        assert not (root / "secret").exists()
        assert ":load:" in run(folder / "gpufs", "cp", host / "his", root / "his", **identity).stdout
        assert (root / "his").stat().st_uid == NOBODY
    finally:
        shutil.rmtree(folder)
