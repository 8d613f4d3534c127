"""`gpufs cp` and gpufs.copy() from and to HOST:PATH. A script stands for ssh, except in the test of a real sshd."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.cli import fails_here, gpufs, gpufs_here, refused_here, user_gpufs
from support.data import MIB, assert_same, left, noise
from support.hosts import THROTTLE, script, throttled_shell
from support.mounting import GPUFS, REPOSITORY, Mounter, Session
from support.processes import NOBODY, PATIENCE, run, wait_until

import gpufs as package

SIZE = 64 * MIB


@pytest.fixture(scope="module")
def rsh(session: Session) -> Path:
    """A command that runs a program here, whatever the host is."""
    return script(session.scratch / "rsh", '#!/bin/sh\nshift\nexec "$@"\n')


@pytest.fixture
def remote(rsh: Path) -> tuple[str, ...]:
    """The options that make any host this machine."""
    return ("-e", str(rsh), "--remote-gpufs", GPUFS[0])


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A directory that is not on a mount."""
    path = tmp_path / "host"
    path.mkdir()
    return path


def servers(session: Session) -> list[int]:
    """The processes of this test session that serve copies."""
    found = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
        if b"serve-copy" in words and session.name.encode() in environment:
            found.append(pid)
    return found


def signal_servers(session: Session, number: signal.Signals) -> None:
    for pid in servers(session):
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(pid, number)


def writes(pid: int, root: Path) -> bool:
    """Whether a process has a file without a name on the mount: one that is being copied."""
    try:
        links = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
    except OSError:
        return False
    return any(link.startswith(str(root.parent)) and link.endswith("(deleted)") for link in links)


def await_copy(session: Session, child: subprocess.Popen[Any], root: Path) -> None:
    """Wait until a process has begun to write a file below a directory, or the command has ended."""

    def has_begun() -> bool:
        return child.poll() is not None or any(writes(pid, root) for pid in [child.pid, *servers(session)])

    wait_until(has_begun, PATIENCE, "the copy")


# ---- copies ----


@pytest.mark.parametrize("size", [0, 9 * MIB + 12345])
def test_there_and_back(root: Path, host: Path, remote: tuple[str, ...], size: int) -> None:
    (host / "source").write_bytes(noise(size))
    for words in [
        (host / "source", f"node:{root}"),
        (f"node:{root}/source", root / "second"),
        (f"node:{root}/second", host / "back"),
    ]:
        (copy,) = json.loads(gpufs_here("cp", *remote, "--verify", "--json", *words).stdout)["copies"]
        assert (copy["bytes"], copy["method"], len(copy["sha256"])) == (size, "node", 64)
    assert left(root) == ["second", "source"]
    for path in (root / "source", root / "second", host / "back"):
        assert_same(path.read_bytes(), noise(size))


@pytest.mark.slow
def test_between_network_namespaces(mount: Mounter) -> None:
    """Each has a mount, and starts the program of the next one."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2")
    first, second, third = mount(), mount(), mount()
    blue, green = (f"gpufs-{secrets.token_hex(4)}" for _ in range(2))
    try:
        for namespace in (blue, green):
            run("ip", "netns", "add", namespace)
        words = ("-e", "ip netns exec", "--remote-gpufs", GPUFS[0])
        (first.device / "a").write_bytes(noise(5 * MIB))
        gpufs_here("cp", *words, first.device / "a", f"{blue}:{second.device}/b")
        gpufs_here("cp", *words, f"{blue}:{second.device}/b", first.device / "c")
        gpufs_here(
            "cp", *words, f"{blue}:{second.device}/b", "-t", f"{blue}:{first.device}", "-t", f"{green}:{third.device}"
        )
        for path in (second.device / "b", first.device / "b", first.device / "c", third.device / "b"):
            assert_same(path.read_bytes(), noise(5 * MIB))
    finally:
        for namespace in (blue, green):
            run("ip", "netns", "delete", namespace)


def test_a_tree(root: Path, host: Path, remote: tuple[str, ...]) -> None:
    """Into a directory it gets its own name, and -L copies the files of links."""
    (host / "tree").mkdir()
    (host / "tree/file").write_bytes(b"x")
    (host / "tree/link").symlink_to("file")
    gpufs_here("cp", *remote, "-a", host / "tree", f"node:{root}/copy")
    gpufs_here("cp", *remote, "-a", f"node:{root}/copy/", host)
    assert os.readlink(host / "copy/link") == "file"
    gpufs_here("cp", *remote, "-rL", host / "tree", f"node:{root}")
    assert not (root / "tree/link").is_symlink()
    assert "is a directory" in refused_here(*remote, f"node:{root}/copy", host / "none")
    assert "is a directory" in refused_here(*remote, host / "tree", f"node:{root}/none")


def test_existing_files(root: Path, host: Path, remote: tuple[str, ...]) -> None:
    """They are replaced when the copy is complete, keep mode and owner, and are skipped with -n."""
    for name in ("a", "b"):
        (host / name).write_bytes(name.encode() * 3)
    (root / "a").write_bytes(b"old")
    (root / "a").chmod(0o600)
    owner = NOBODY if os.geteuid() == 0 else os.geteuid()
    os.chown(root / "a", owner, -1)
    done = json.loads(gpufs_here("cp", *remote, "-n", "--json", host / "a", host / "b", f"node:{root}").stdout)
    assert (done["files"], done["skipped"], (root / "a").read_bytes()) == (1, 1, b"old")
    gpufs_here("cp", *remote, host / "a", "-t", f"node:{root}")
    status = (root / "a").stat()
    assert ((root / "a").read_bytes(), status.st_mode & 0o777, status.st_uid) == (b"aaa", 0o600, owner)
    (host / "other").mkdir()
    (host / "other" / "a").write_bytes(b"another")
    text = refused_here(*remote, host / "a", host / "other" / "a", f"node:{root}")
    assert "another source of this command" in text
    assert left(root) == ["a", "b"]


def test_only_files_and_links_are_replaced(root: Path, host: Path, remote: tuple[str, ...]) -> None:
    """A copy of root to node:/dev/null must not replace the device."""
    (root / "file").write_bytes(b"words")
    os.mkfifo(host / "special")
    assert "is a device, FIFO or socket" in refused_here(*remote, root / "file", f"node:{host}/special")
    assert (host / "special").is_fifo()
    (host / "link").symlink_to("none")
    gpufs_here("cp", *remote, root / "file", f"node:{host}/link")
    assert (host / "link").read_bytes() == b"words"


def test_holes_stay_holes(root: Path, host: Path, remote: tuple[str, ...]) -> None:
    with open(root / "sparse", "wb") as file:
        file.truncate(SIZE)
        file.seek(SIZE // 2)
        file.write(b"data")
    gpufs_here("cp", *remote, "--verify", f"node:{root}/sparse", host)
    assert_same((host / "sparse").read_bytes(), (root / "sparse").read_bytes())
    assert (host / "sparse").stat().st_blocks * 512 <= 4 * MIB


def test_what_does_not_fit(mount: Mounter, host: Path, remote: tuple[str, ...]) -> None:
    """Nothing is created, and the line has the figures of the other machine."""
    small = mount(memory=64 * MIB)
    with open(host / "large", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, 65 * MIB)
    text = refused_here(*remote, host / "large", f"node:{small.device}")
    assert text.startswith(f"gpufs cp: node:{small.device}: No space left on device: needs 66.0 MiB")
    (host / "medium").mkdir()
    for number in range(40):  # each takes a granule of 2 MiB
        (host / "medium" / str(number)).write_bytes(noise(150 << 10))
    assert "No space left on device: needs 80.0 MiB" in refused_here(
        *remote, "-r", host / "medium", f"node:{small.device}"
    )
    assert left(small.device) == []


@pytest.mark.parametrize("there", [False, True])
def test_the_root_of_a_mount_is_the_copy(mount: Mounter, host: Path, remote: tuple[str, ...], there: bool) -> None:
    """Its own space counts, not that of the directory above it, and it is on a mount."""
    small, tree = mount(memory=64 * MIB), host / "tree"
    (tree / "gpu0").mkdir(parents=True)
    words = ("-rT", tree, f"node:{small.path}") if there else ("-rT", f"node:{tree}", small.path)
    with open(tree / "gpu0" / "file", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, 65 * MIB)
        assert "No space left on device: needs 65" in refused_here(*remote, *words)
        assert left(small.device) == []
        file.truncate(MIB)
    gpufs_here("cp", *remote, *words)
    assert left(small.device) == ["file"]


def test_from_python(root: Path, host: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs use ssh and gpufs as they are found in PATH."""
    (tmp_path / "bin").mkdir()
    script(tmp_path / "bin" / "ssh", '#!/bin/sh\n[ "$1" = -- ] || exit 9\nshift 2\nexec "$@"\n')
    (tmp_path / "bin" / "gpufs").symlink_to(GPUFS[0])
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    (root / "m").write_bytes(noise(SIZE))
    seen: list[package.CopyProgress] = []
    result = package.copy(f"node2:{root}/m", host, verify=True, progress=seen.append)
    assert (result.source, result.destination, result.bytes) == (f"node2:{root}/m", str(host / "m"), SIZE)
    assert seen
    assert all(one.total == SIZE for one in seen)
    assert package.copy(host / "m", f"node2:{root}/n").destination == f"node2:{root}/n"
    assert_same((root / "n").read_bytes(), noise(SIZE))
    with pytest.raises(package.CopyError) as failure:
        package.copy(f"node2:{root}/none", host)
    assert (failure.value.errno, failure.value.filename) == (errno.ENOENT, f"node2:{root}/none")
    with pytest.raises(package.CopyError, match="HOST:PATH"):
        package.copy(f"node2:{root}/m", host, partial=True)


# ---- chains ----


@pytest.fixture
def nodes(session: Session, mount: Mounter) -> tuple[tuple[str, ...], list[Path]]:
    """Options for machines that are mounts here, and a directory of each. A shell names none that begins with bad."""
    text = '#!/bin/sh\n[ "$1" != -- ] || shift\ncase $1 in bad*) echo no route >&2; exit 255;; esac\nshift\nexec "$@"\n'
    shell = script(session.scratch / "rsh-of-nodes", text)
    return ("-e", str(shell), "--remote-gpufs", GPUFS[0]), [mount().device for _ in range(3)]


def ends(directories: Sequence[Path]) -> list[str]:
    """The options that make a chain of directories, on machines n0, n1, ..."""
    return [word for number, path in enumerate(directories) for word in ("-t", f"n{number}:{path}")]


Nodes = tuple[tuple[str, ...], list[Path]]


@pytest.mark.parametrize("there", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["here", "there"])
def test_a_chain(nodes: Nodes, host: Path, there: bool) -> None:
    """Copies files of this machine and of another one, with a directory, a hole, and names that are not text."""
    remote, directories = nodes
    (host / "tree" / "deep").mkdir(parents=True)
    Path(os.fsdecode(os.fsencode(host / "tree") + b"/\xff name")).write_bytes(noise(9 * MIB + 5))
    (host / "tree" / "deep" / "link").symlink_to("nowhere")
    with open(host / "tree" / "sparse", "wb") as file:
        file.write(b"data")
        file.truncate(SIZE)
    sources = (f"source:{host}/tree" if there else host / "tree",)
    done = json.loads(gpufs_here("cp", *remote, "-a", "--verify", "--json", *sources, *ends(directories)).stdout)
    assert (done["files"], done["errors"]) == (6, [])
    for number, directory in enumerate(directories):
        assert_same(Path(os.fsdecode(os.fsencode(directory) + b"/tree/\xff name")).read_bytes(), noise(9 * MIB + 5))
        assert (directory / "tree" / "sparse").stat().st_blocks * 512 < SIZE
        assert os.readlink(directory / "tree" / "deep" / "link") == "nowhere"
        copies = [copy for copy in done["copies"] if copy["destination"] == f"n{number}:{directory}/tree/sparse"]
        assert [copy["source"] for copy in copies] == [f"{sources[0]}/sparse"]


@pytest.mark.slow
def test_one_copy_between_two_other_machines(nodes: Nodes) -> None:
    remote, (first, second, _) = nodes
    (first / "a").write_bytes(noise(5))
    gpufs_here("cp", *remote, f"x:{first}/a", f"y:{second}/b")
    assert (second / "b").read_bytes() == noise(5)
    assert refused_here(*remote, f"x:{first}/none", f"y:{second}/b") == (
        f"gpufs cp: x:{first}/none: No such file or directory"
    )
    assert "need a directory" in refused_here(*remote, f"x:{first}/a", "-t", f"y:{second}/none")


@pytest.mark.slow
def test_a_file_that_some_nodes_do_not_take(nodes: Nodes, host: Path) -> None:
    """The others get it. If none takes it, its bytes are not sent."""
    remote, directories = nodes
    with open(host / "large", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, 2 * SIZE)
    (host / "small").write_bytes(b"small")
    for number in (0, 1):
        (directories[number] / "large").write_bytes(b"old")
    words = (host / "large", host / "small")
    done = json.loads(gpufs_here("cp", *remote, "-n", "--json", *words, *ends(directories)).stdout)
    assert (done["files"], done["skipped"]) == (4, 2)
    assert [(path / "large").stat().st_size for path in directories] == [3, 3, 2 * SIZE]
    done = json.loads(gpufs_here("cp", *remote, "-n", "--json", *words, *ends(directories)).stdout)
    assert (done["files"], done["skipped"]) == (0, 6)


def test_a_node_that_cannot_be_reached(nodes: Nodes, host: Path) -> None:
    """The machines before it finish, and one line names it and those after it."""
    remote, (first, second, third) = nodes
    (host / "file").write_bytes(noise(9 * MIB))
    text = refused_here(*remote, host / "file", "-t", f"n0:{first}", "-t", f"bad:{second}", "-t", f"n2:{third}")
    assert text == "gpufs cp: bad: the connection ended: no route (n2 gets the files from there)"
    assert (left(first), left(second), left(third)) == (["file"], [], [])
    text = refused_here(*remote, f"n0:{first}/file", "-t", f"bad:{second}", "-t", f"n2:{third}", "-t", "n3:x")
    assert text == "gpufs cp: bad: the connection ended: no route (n2, n3 get the files from there)"
    text = refused_here(*remote, host / "file", "-t", f"n0:{first}", "-t", f"n1:{second}/none")
    assert text.startswith(f"gpufs cp: n1:{second}/none: No such file or directory") or "-t takes" in text
    with open(host / "large", "wb") as file:
        file.truncate(5 * MIB)
    (second / "large").mkdir()
    text = refused_here(*remote, host / "large", *ends([first, second, third]))
    assert text == f"gpufs cp: {host}/large -> n1:{second}/large: a directory cannot be overwritten with a file"
    assert (left(first), left(third)) == (["file", "large"], ["large"])


@pytest.mark.slow
def test_nodes_are_killed_at_50_random_points(session: Session, nodes: Nodes, host: Path) -> None:
    """Any of them, or this side, also before they are connected."""
    remote, directories = nodes
    (host / "m").write_bytes(noise(SIZE))
    command = [*GPUFS, "cp", *remote, str(host / "m"), *ends(directories)]
    began = time.monotonic()
    run(*command)
    took = time.monotonic() - began
    for directory in directories:
        (directory / "m").unlink()
    chance = random.Random(8)
    failures = 0
    for _ in range(50):
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as child:
            time.sleep(chance.uniform(0, took))
            victims = [child.pid, *servers(session)]
            with suppress(ProcessLookupError):
                os.kill(chance.choice(victims), signal.SIGKILL)
            _, errors = child.communicate(timeout=PATIENCE)
        if child.returncode == 1:
            failures += 1
            assert "the connection ended" in errors
        wait_until(lambda: not servers(session), PATIENCE, "the end of the nodes")
        for directory in directories:
            assert left(directory) in ([], ["m"])
            if left(directory):
                assert_same((directory / "m").read_bytes(), noise(SIZE))
                (directory / "m").unlink()
    print(f"{failures} of 50 copies failed")
    assert failures > 10


@pytest.mark.parametrize("size", [5, SIZE], ids=["small", "large"])
@pytest.mark.slow
def test_a_chain_is_interrupted_while_a_node_does_not_answer(
    session: Session, nodes: Nodes, host: Path, tmp_path: Path, size: int
) -> None:
    """As with ssh, a signal ends the shell and not what it runs. That ends all the same, and leaves nothing."""
    asked = tmp_path / "asked"
    text = f'#!/bin/sh\ncase $1 in silent) touch {asked}; exec sleep 600;; esac\nshift\n"$@"\nexit\n'
    shell = script(tmp_path / "rsh", text)
    (_, program), (first, second, _) = nodes[0][2:], nodes[1]
    (host / "m").write_bytes(noise(size))
    command = [*GPUFS, "cp", "-e", str(shell), "--remote-gpufs", program, str(host / "m")]
    command += ["-t", f"n0:{first}", "-t", f"silent:{second}"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as child:
        await_copy(session, child, first) if size == SIZE else wait_until(lambda: left(first), PATIENCE, "the copy")
        wait_until(asked.exists, PATIENCE, "the second node")
        child.send_signal(signal.SIGINT)
        assert child.wait(PATIENCE) == -signal.SIGINT
    wait_until(lambda: not servers(session), 10, "the end of the first node")
    assert (left(first), left(second)) == ([] if size == SIZE else ["m"], [])


@pytest.mark.slow
def test_as_many_names_as_a_command_can_have(nodes: Nodes, host: Path) -> None:
    remote, directories = nodes
    (host / "m").write_bytes(b"x")
    missing = [str(host / f"{number:0250}") for number in range(4500)]
    done = gpufs_here("cp", *remote, *missing, host / "m", *ends(directories[:2]), check=False)
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 4500)
    assert [left(directory) for directory in directories[:2]] == [["m"], ["m"]]


@pytest.mark.slow
def test_a_chain_takes_the_time_of_one_copy(session: Session, nodes: Nodes, host: Path) -> None:
    """Where the links are the bottleneck: each pipe moves 30 MB/s."""
    (_, program), directories = nodes[0][2:], nodes[1]
    throttle = f"{sys.executable} {script(session.scratch / 'throttle.py', THROTTLE)} 30e6"
    shell = script(session.scratch / "slow-rsh-of-nodes", f'#!/bin/sh\nshift\n{throttle} | "$@"\n')
    (host / "m").write_bytes(noise(SIZE))
    seconds = []
    for count in (1, 3):
        began = time.monotonic()
        gpufs_here("cp", "-e", shell, "--remote-gpufs", program, host / "m", *ends(directories[:count]))
        seconds.append(time.monotonic() - began)
    print(f"one node {seconds[0]:.2f} s, three {seconds[1]:.2f} s")
    assert seconds[1] < 2 * seconds[0]


@pytest.mark.slow
def test_a_chain_from_python(nodes: Nodes, host: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remote, (first, second, _) = nodes
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").symlink_to(remote[1])
    (tmp_path / "bin" / "gpufs").symlink_to(GPUFS[0])
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    (host / "m").write_bytes(noise(SIZE))
    seen: list[package.CopyProgress] = []
    results = package.copy_files(host / "m", [f"a:{first}", f"b:{second}/other"], verify=True, progress=seen.append)
    assert [result.destination for result in results] == [f"a:{first}/m", f"b:{second}/other"]
    assert all(one.total in (0, SIZE) for one in seen)
    assert package.copy(f"a:{first}/m", f"b:{second}/third").destination == f"b:{second}/third"
    with pytest.raises(ExceptionGroup) as failure:
        package.copy_files(host / "m", [f"a:{first}/m2", "bad:x", "c:y"])
    assert [str(error).startswith("bad: the connection ended") for error in failure.value.exceptions] == [True, True]
    assert (left(first), left(second)) == (["m", "m2"], ["other", "third"])
    with pytest.raises(ExceptionGroup) as failure:
        package.copy_files(host / "none", [f"a:{first}", f"b:{second}"])
    assert [error.errno for error in failure.value.exceptions if isinstance(error, OSError)] == [errno.ENOENT]


# ---- NIXL ----

LARGE = 1 << 30  # NIXL is asked from this size on
DATA = 40 * MIB  # the rest is a hole


@pytest.fixture(scope="module")
def slow_pipe(session: Session) -> tuple[str, ...]:
    """The options for such a shell."""
    pytest.importorskip("nixl")
    return ("-e", str(throttled_shell(session)), "--remote-gpufs", GPUFS[0])


@pytest.fixture(scope="module")
def large(session: Session) -> Path:
    path = session.scratch / "large"
    with open(path, "wb") as file:
        file.write(noise(DATA))
        file.truncate(LARGE)
    return path


@pytest.mark.slow
def test_bytes_by_nixl(root: Path, host: Path, slow_pipe: tuple[str, ...], large: Path) -> None:
    """In both directions, with a small file and one that is skipped beside the large one."""
    (host / "small").write_bytes(noise(3))
    (root / "skipped").write_bytes(b"old")
    (host / "skipped").write_bytes(noise(5 * MIB))
    words = (large, host / "small", host / "skipped", f"node:{root}")
    done = json.loads(gpufs_here("cp", *slow_pipe, "-n", "--json", *words).stdout)
    assert (done["skipped"], done["paths"]) == (1, {"nixl": DATA + 3, "hole": LARGE - DATA})
    done = json.loads(gpufs_here("cp", *slow_pipe, "--json", f"node:{root}/large", host / "back").stdout)
    assert done["paths"] == {"nixl": DATA, "hole": LARGE - DATA}
    with open(host / "back", "rb") as file:
        assert_same(file.read(DATA), noise(DATA))
    assert left(root) == ["large", "skipped", "small"]


@pytest.mark.slow
def test_files_in_place_by_nixl(mount: Mounter, host: Path, slow_pipe: tuple[str, ...]) -> None:
    """From memory of one mount into that of another, in both directions, with --verify by slots."""
    first, second = (mount(memory=LARGE + 128 * MIB).device for _ in range(2))
    with open(first / "large", "wb") as file:
        for seed in range(LARGE // SIZE):
            file.write(noise(SIZE, seed))
    for options, words in [
        ((), (first / "large", f"node:{second}/large")),
        ((), (f"node:{first}/large", second / "large")),
        (("--verify",), (first / "large", f"node:{second}/large")),
    ]:
        (second / "large").unlink(missing_ok=True)
        (copy,) = json.loads(gpufs_here("cp", *slow_pipe, *options, "--json", *words).stdout)["copies"]
        print(f"{LARGE / MIB / copy['seconds']:.0f} MiB/s, {copy['paths']}")
        assert copy["paths"].get("nixl", 0) + copy["paths"].get("direct", 0) == LARGE
        assert ("direct" in copy["paths"]) == (not options)
        with open(second / "large", "rb") as file:
            for seed in range(LARGE // SIZE):
                assert_same(file.read(SIZE), noise(SIZE, seed))


@pytest.mark.parametrize(
    ("call", "when"),
    [("register_memory", f"first[0][1] >= {LARGE}"), ("initialize_xfer", "first == 'WRITE'")],
    ids=["register", "write"],
)
@pytest.mark.slow
def test_memory_that_nixl_does_not_take(
    mount: Mounter, slow_pipe: tuple[str, ...], tmp_path: Path, call: str, when: str
) -> None:
    """The slots take its place, wherever it fails, and nothing is said."""
    first, second = (mount(memory=LARGE + 128 * MIB).device for _ in range(2))
    with open(first / "large", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, LARGE)
    program = script(
        tmp_path / "gpufs",
        f"""#!{sys.executable}
from gpufs.cli import main
from nixl._api import nixl_agent
original = nixl_agent.{call}
def refuse(agent, first, *others):
    if {when}:
        raise RuntimeError("refused")
    return original(agent, first, *others)
nixl_agent.{call} = refuse
main()
""",
    )
    words = ("-e", slow_pipe[1], "--remote-gpufs", program, "--json")
    for names in [(first / "large", f"node:{second}/large"), (f"node:{first}/large", second / "large")]:
        done = gpufs_here("cp", *words, *names)
        assert done.stderr == ""
        (copy,) = json.loads(done.stdout)["copies"]
        if call == "register_memory" or "node" in str(names[0]):  # else this side writes
            assert copy["paths"] == {"nixl": LARGE}
        (second / "large").unlink()


@pytest.mark.parametrize("there", [True, False], ids=["to", "from"])
@pytest.mark.slow
def test_the_peer_is_killed_during_a_copy_in_place(
    session: Session, mount: Mounter, slow_pipe: tuple[str, ...], there: bool
) -> None:
    first, second = (mount(memory=LARGE + 128 * MIB).device for _ in range(2))
    with open(first / "large", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, LARGE)
    names = (str(first / "large"), f"node:{second}") if there else (f"node:{first}/large", str(second))
    chance = random.Random(7 + there)
    for _ in range(4):
        with subprocess.Popen([*GPUFS, "cp", *slow_pipe, *names], stderr=subprocess.PIPE, text=True) as child:
            await_copy(session, child, second)
            time.sleep(chance.uniform(0, 1))
            signal_servers(session, signal.SIGKILL)
            killed = time.monotonic()
            _, errors = child.communicate(timeout=PATIENCE)
            if child.returncode:
                assert time.monotonic() - killed < 12
                assert errors.splitlines()[-1].startswith("gpufs cp: node: the connection ended")
        wait_until(lambda: not servers(session), PATIENCE, "the end of the other side")
        assert left(second) == ([] if child.returncode else ["large"])
        (second / "large").unlink(missing_ok=True)


@pytest.mark.slow
def test_a_chain_by_nixl(mount: Mounter, slow_pipe: tuple[str, ...], large: Path) -> None:
    first, second = (mount(memory=128 * MIB).device for _ in range(2))
    done = json.loads(gpufs_here("cp", *slow_pipe, "--json", large, "-t", f"a:{first}", "-t", f"b:{second}").stdout)
    assert (done["errors"], done["paths"]) == ([], {"nixl": 2 * DATA, "hole": 2 * (LARGE - DATA)})
    for directory in (first, second):
        with open(directory / "large", "rb") as file:
            assert_same(file.read(DATA), noise(DATA))


@pytest.mark.parametrize("there", [True, False], ids=["to", "from"])
@pytest.mark.slow
def test_the_peer_is_killed_during_nixl(
    session: Session, root: Path, host: Path, slow_pipe: tuple[str, ...], large: Path, there: bool
) -> None:
    (host / "from").mkdir()
    for number in range(4):
        (host / "from" / str(number)).symlink_to(large)
    names = (f"{host}/from", f"node:{root}") if there else (f"node:{host}/from", str(root))
    chance = random.Random(3 + there)
    command = [*GPUFS, "cp", *slow_pipe, "-rL", *names]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as child:
        await_copy(session, child, root)
        time.sleep(chance.uniform(0, 0.1))
        signal_servers(session, signal.SIGKILL)
        killed = time.monotonic()
        _, errors = child.communicate(timeout=PATIENCE)
        if child.returncode:
            assert time.monotonic() - killed < 10
            assert errors.splitlines()[-1].startswith("gpufs cp: node: the connection ended")
    for path in root.rglob("*"):  # those that were complete
        assert path.is_dir() or path.stat().st_size == LARGE
        assert "gpufs-part" not in path.name


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import importlib.util as u; o = u.find_spec; u.find_spec = lambda *a: None if a == ('nixl',) else o(*a)", ""),
        ("import sys; sys.modules['nixl._api'] = None", "NIXL: "),
    ],
    ids=["absent", "broken"],
)
@pytest.mark.slow
def test_without_nixl_there(root: Path, tmp_path: Path, rsh: Path, large: Path, code: str, reason: str) -> None:
    """The pipe takes its place, and a line says why."""
    pytest.importorskip("nixl")
    program = script(tmp_path / "gpufs", f"#!{sys.executable}\n{code}\nfrom gpufs.cli import main\nmain()\n")
    remote = ("-e", str(rsh), "--remote-gpufs", str(program))
    words = (large, f"node:{root}") if reason else (f"node:{large}", root)
    done = gpufs_here("cp", *remote, "--json", *words)
    assert json.loads(done.stdout)["paths"] == {"pipe": DATA, "hole": LARGE - DATA}
    (line,) = done.stderr.splitlines()
    assert line.startswith("gpufs cp: node: the bytes go through the pipe of the shell: ")
    assert (reason or "NIXL is not installed") in line


# ---- failures ----


def test_a_file_that_the_remote_user_cannot_read(root: Path, open_directory: Path) -> None:
    """The rights are those of the user there, also where this user has more."""
    host = open_directory / "host"
    host.mkdir(mode=0o755)
    environment = {"PATH": os.environ["PATH"], "HOME": "/"}
    words, environment = user_gpufs(environment)
    settings = " ".join(f"{name}='{value}'" for name, value in environment.items())
    identity = f"setpriv --reuid={NOBODY} --regid={NOBODY} --clear-groups"
    shell = script(open_directory / "rsh", f'#!/bin/sh\nshift\ncd /\nexec env {settings} {identity} "$@"\n')
    (host / "secret").write_bytes(b"secret")
    (host / "secret").chmod(0o600)
    remote = ("-e", str(shell), "--remote-gpufs", " ".join(words))
    text = refused_here(*remote, f"node:{host}/secret", root)
    assert text == f"gpufs cp: node:{host}/secret: Permission denied"
    (root / "file").write_bytes(b"content")
    text = refused_here(*remote, root / "file", f"node:{host}/file")
    assert text == f"gpufs cp: {root}/file -> node:{host}/file: Permission denied"
    assert left(host) == ["secret"]
    assert left(root) == ["file"]


@pytest.mark.parametrize("there", [True, False], ids=["to", "from"])
def test_the_peer_is_killed(session: Session, root: Path, host: Path, remote: tuple[str, ...], there: bool) -> None:
    """At random points: no name is left, and one line names the host, within seconds."""
    (root / "m").write_bytes(noise(SIZE))
    (host / "to").mkdir()
    words = (root / "m", f"node:{host}/to") if there else (f"node:{root}/m", host / "to")
    chance = random.Random(1 + there)
    for number in (signal.SIGKILL, signal.SIGTERM):
        command = [*GPUFS, "cp", *remote, *map(str, words)]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as child:
            wait_until(lambda: servers(session), PATIENCE, "the other side")
            time.sleep(chance.uniform(0, 0.4))
            signal_servers(session, number)
            killed = time.monotonic()
            _, errors = child.communicate(timeout=PATIENCE)
            if child.returncode == 0:  # it was faster
                assert left(host / "to") == ["m"]
                (host / "to" / "m").unlink()
                continue
            assert time.monotonic() - killed < 10
            assert child.returncode == 1
            assert errors == f"gpufs cp: node: the connection ended: signal {number}\n"
        assert left(host / "to") in ([], ["m"])
        if left(host / "to"):  # it was complete, and the answer was lost
            assert_same((host / "to" / "m").read_bytes(), noise(SIZE))
            (host / "to" / "m").unlink()


@pytest.mark.slow
def test_a_peer_that_stops(session: Session, root: Path, remote: tuple[str, ...], host: Path) -> None:
    """A machine that is gone sends nothing. The copy notices that within seconds."""
    with open(host / "large", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, 4 * SIZE)
    command = [*GPUFS, "cp", *remote, "--verify", str(host / "large"), f"node:{root}"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as child:
        await_copy(session, child, root)
        signal_servers(session, signal.SIGSTOP)
        _, errors = child.communicate(timeout=PATIENCE)
    assert child.returncode == 1
    assert errors.splitlines()[-1] == "gpufs cp: node: the connection ended: nothing came for 10 seconds"
    assert left(root) == []


# ---- what the other side sends ----

FAKE = """
import sys
from gpufs.hosts.channel import HostChannel
from gpufs.hosts.messages import *
from gpufs.hosts.peer import greeting
channel = HostChannel(0, 1, silence=30)
attributes = FileAttributes(0o100644, 0, 0, 0, 0)
line = greeting()
{before}
channel.write_line(line)
channel.receive()
channel.send(Plan(3, 3))
{after}
channel.send(FilesDone())
channel.receive()
"""


def fake(path: Path, *, before: str = "", after: str = "") -> tuple[str, ...]:
    """Options that make a program the other side."""
    program = script(path / "fake.py", FAKE.format(before=before, after=after))
    shell = script(path / "rsh", f"#!/bin/sh\nexec {sys.executable} {program} 2>/dev/null\n")
    return ("-e", str(shell))


@pytest.mark.parametrize(
    "name", ["../outside", "..", "/etc/outside", "a/b", ""], ids=["parent", "dots", "absolute", "path", "empty"]
)
def test_a_sender_that_names_other_files(root: Path, host: Path, tmp_path: Path, name: str) -> None:
    """It chooses names below the destination, and nothing else."""
    after = f"""
channel.send(Found(0, b"tree", b"tree", FileAttributes(0o40755, 0, 0, 0, 0), True))
channel.send(Found(0, {name.encode()!r}, b"p", attributes, True, size=3, data=3))
channel.send_data(memoryview(b"abc"))
channel.send(End())
"""
    assert "does not keep to the protocol" in refused_here("-r", *fake(tmp_path, after=after), "node:/tree", root)
    assert left(root) == ["tree"]
    assert left(root / "tree") == []


def test_a_link_of_the_sender_is_not_followed(root: Path, host: Path, tmp_path: Path) -> None:
    after = f"""
directory = FileAttributes(0o40755, 0, 0, 0, 0)
channel.send(Found(0, b"tree", b"tree", directory, True))
channel.send(Found(0, b"x", b"x", FileAttributes(0o120777, 0, 0, 0, 0), True, {os.fsencode(host)!r}))
channel.send(Found(0, b"x", b"x", directory, True))
channel.send(Found(0, b"file", b"file", attributes, True, size=3, data=3))
channel.send_data(memoryview(b"abc"))
channel.send(End())
channel.receive()
channel.send(Leave())
channel.send(Leave())
"""
    assert "a file cannot be overwritten with a directory" in refused_here(
        "-r", *fake(tmp_path, after=after), "node:/tree", root
    )
    assert left(host) == []


@pytest.mark.parametrize("sent", [b"abc", b"abd"])
def test_bytes_that_change_on_the_way(root: Path, tmp_path: Path, sent: bytes) -> None:
    after = f"""
channel.send(Found(0, b"file", b"/file", attributes, True, size=3, data=3))
channel.send_data(memoryview(b"abc"))
channel.send(End("{hashlib.sha256(sent).hexdigest()}"))
channel.receive()
"""
    words = ("--verify", *fake(tmp_path, after=after), "node:/file", root)
    if sent == b"abc":
        gpufs_here("cp", *words)
        assert (root / "file").read_bytes() == b"abc"
    else:
        assert "have changed on the way" in refused_here(*words)
        assert left(root) == []


def file(size: int, *sent: str, data: int | None = None, attributes: str = "attributes") -> str:
    """What sends a file of this size, and then ``sent``."""
    data = size if data is None else data
    begun = f'channel.send(Found(0, b"f", b"/f", {attributes}, True, size={size}, data={data}))'
    return "\n".join([begun, *sent, "channel.send(End())"])


def raw(message: bytes) -> str:
    """What sends a message as it is."""
    return f"channel._send(True, {message!r})"


ABC = 'channel.send_data(memoryview(b"abc"))'
ENTER = 'channel.send(Found(0, b"{name}", b"d", FileAttributes(0o40755, 0, 0, 0, 0), True))'
LINK = 'channel.send(Found(0, b"f", b"/f", FileAttributes(0o120777, 0, 0, 0, 0), True, {target!r}))'


@pytest.mark.parametrize(
    "after",
    [
        "",
        file(4, ABC),
        file(2, ABC),
        file(3, ABC, "channel.send(Hole(1 << 62))"),
        file(3, ABC, data=4),
        file(0, "channel._send(False, b'')"),
        file(1 << 63),
        file(3, ABC, attributes="FileAttributes(0o100644, 1 << 32, 0, 0, 0)"),
        file(3, ABC, attributes="FileAttributes(0o100644, 0, 0, 1 << 63, 0)"),
        LINK.format(target=b"/etc/passwd"),
        f"{ENTER.format(name='d')}\n{LINK.format(target=b'a' + bytes(1))}\nchannel.send(Leave())",
        "channel.send(Plan(1 << 40, 0))",
        'for number in range(3): channel.send(Offer(b"x", 1))',
        'channel.send(Failed(0, "", b""))',
        ABC,
        raw(b"\x82\xa4type\xa4Plan\xa1x" + b"\x91" * 100_000),
        raw(b"\xc1"),
    ],
    ids=range(17),
)
def test_a_sender_that_lies(root: Path, tmp_path: Path, after: str) -> None:
    """The copy ends with one line, in which no type of Python is named, and leaves no file."""
    options = ("-r",) if "Leave" in after else ()
    text = refused_here(*options, "-p", *fake(tmp_path, after=f"{after}\n"), "node:/f", root / "copy")
    assert text.startswith("gpufs cp: node:")
    assert "Error" not in text
    assert not any(path.is_file() or path.is_symlink() for path in root.rglob("*"))


@pytest.mark.parametrize(
    ("answer", "options"),
    [
        ("", ()),
        ("channel.send(Finished())", ()),
        ("channel.send(FileResult(message.number, b'x', size=2))", ()),
        ("channel.send(FileResult(message.number, b'x', size=1))", ("--verify",)),
        (f"channel.send(FileResult(message.number, b'x', size=1, checksum={'0' * 64!r}))", ("--verify",)),
        ("channel.send(FileResult(message.number, b'x', skipped=True))", ()),
        (f"channel.send(FileResult(message.number, b'x', {errno.ECANCELED}))", ()),
        ("channel.send(FileResult(message.number, b'x', size=1, hop=1))", ()),
        ("channel.send(FileResult(message.number, b'x', size=1, paths={'magic': 1}))", ()),
        ("channel.send(FileResult(message.number, b'x', size=1, seconds=float('nan')))", ()),
        ("for number in range(9): channel.send(Free(number))", ()),
        ("channel.send(Deleted(b'/x'))", ()),
    ],
)
def test_a_receiver_that_lies(root: Path, tmp_path: Path, answer: str, options: tuple[str, ...]) -> None:
    """What is not stored, or not as it was sent, is not a success."""
    (root / "file").write_bytes(b"x")
    receive = f"""
while not isinstance(message := channel.receive(), FilesDone):
    if isinstance(message, Found):
        {answer or "pass"}
channel.send(Finished())
channel.receive()
"""
    program = FAKE.format(before="", after="").replace("channel.send(Plan(3, 3))", receive)
    shell = f"#!/bin/sh\nexec {sys.executable} {script(tmp_path / 'f.py', program)} 2>/dev/null\n"
    assert "Error" not in refused_here(*options, "-e", script(tmp_path / "rsh", shell), root / "file", "node:x")


def test_a_machine_that_does_not_copy_what_it_is_asked_for(tmp_path: Path) -> None:
    for answer in ("channel.send(Finished())", 'channel.send(FileResult(0, b"x", size=1, hop=1))'):
        assert refused_here(*fake(tmp_path, after=f"{answer}\n"), "node:x", "other:y")


def test_many_failures_take_little_memory(root: Path, tmp_path: Path) -> None:
    """A machine can report any number. All are counted."""
    after = 'for number in range(20_000): channel.send(Failed(13, "x" * 4000, b"y" * 4000))'
    command = [*GPUFS, "cp", *fake(tmp_path, after=f"{after}\n"), "node:/f", str(root / "copy")]
    program = f"""
import resource, subprocess, sys
with open({str(tmp_path / "errors")!r}, "wb") as errors:
    print(subprocess.run({command!r}, stderr=errors).returncode)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""
    code, used = map(int, run(sys.executable, "-c", program).stdout.split())
    lines = (tmp_path / "errors").read_bytes().splitlines()
    assert (code, lines[-1]) == (1, b"gpufs cp: 10000 more failures are not shown")
    assert len(lines) == 10_001
    assert used * 1024 < 100 * MIB


def test_nothing_is_deleted_that_could_not_be_sent(root: Path, host: Path, remote: tuple[str, ...]) -> None:
    """With a part of the source that cannot be read, the other machine keeps its copy."""
    (host / "deep").mkdir()
    for name in ("a", "deep/b"):
        (host / name).write_bytes(b"x")
    gpufs_here("sync", *remote, "-L", "--delete", host, f"node:{root}/copy")
    (host / "deep" / "b").unlink()
    (host / "deep" / "b").symlink_to("nowhere")
    done = gpufs_here("sync", *remote, "-L", "--delete", host, f"node:{root}/copy", check=False)
    assert (done.returncode, (root / "copy" / "deep" / "b").read_bytes()) == (1, b"x")
    assert "nothing is deleted" in done.stderr
    assert gpufs_here("sync", *remote, "--delete", host / "none", f"node:{root}/copy", check=False).returncode == 1
    assert left(root / "copy") == ["a", "deep"]


def test_a_file_that_changes_while_it_is_sent(session: Session, root: Path, host: Path) -> None:
    """The copy has the promised size: of a file that grows what it was, and of one that shrinks nothing."""
    old = noise(16 * MIB)
    slow = ("-e", str(throttled_shell(session)), "--remote-gpufs", GPUFS[0])
    for size, code in ((SIZE, 0), (MIB, 1)):
        (host / "file").write_bytes(old)
        command = [*GPUFS, "cp", *slow, str(host / "file"), f"node:{root}/copy"]
        with subprocess.Popen(command) as child:
            await_copy(session, child, root)
            os.truncate(host / "file", size)
            assert child.wait(PATIENCE) == code
        assert left(root) == ["copy"]
        assert_same((root / "copy").read_bytes(), old)


def test_another_version(root: Path, tmp_path: Path) -> None:
    """The line says what each side has."""
    assert "version 7" in refused_here(*fake(tmp_path, before="line = b'gpufs copy 7 2.0'"), "node:/file", root)


# ---- wrong input ----


def test_hosts_that_cannot_be_reached(root: Path, tmp_path: Path) -> None:
    noisy = script(tmp_path / "noisy", "#!/bin/sh\necho Welcome\n")
    refuses = script(tmp_path / "refuses", "#!/bin/sh\necho banner >&2\necho 'ssh: no route' >&2\nexit 255\n")
    shell = script(tmp_path / "rsh", '#!/bin/sh\nshift\nexec sh -c "$*"\n')
    assert "'Welcome' came instead of gpufs" in refused_here("-e", noisy, "node:x", root)
    done = gpufs_here("cp", "-e", refuses, "node:x", root, check=False)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        1,
        "gpufs cp: node: the connection ended: ssh: no route",
    )
    assert "--remote-gpufs" in refused_here("-e", shell, "--remote-gpufs", "/none/gpufs", "node:x", root)
    assert "/none/rsh: cannot be run: No such file or directory" in refused_here("-e", "/none/rsh", "node:x", root)
    assert "cannot be split into words" in refused_here("-e", "'", "node:x", root)


def test_ssh_can_ask_for_a_password(root: Path, host: Path, tmp_path: Path) -> None:
    """It has the terminal for itself: nothing is drawn before the connection is there."""
    if shutil.which("script") is None:
        pytest.skip("needs script(1)")
    asks = '#!/bin/sh\nprintf "Password: " >/dev/tty\nsleep 0.5\nread word </dev/tty\n'
    shell = script(tmp_path / "rsh", asks + '[ "$word" = secret ] || exit 5\necho right >/dev/tty\nshift\nexec "$@"\n')
    (host / "file").write_bytes(noise(MIB))
    command = f"{GPUFS[0]} cp -e {shell} --remote-gpufs {GPUFS[0]} {host}/file node:{root}"
    done = run("script", "-qec", command, "/dev/null", input="secret\n")
    assert "1.0 MiB of 1.0 MiB" in done.stdout
    assert done.stdout.index("right") < done.stdout.index("\x1b[K")
    assert_same((root / "file").read_bytes(), noise(MIB))


def test_names_that_are_not_hosts(root: Path) -> None:
    (root / "a:b").write_bytes(b"x")
    for name, text in [
        (":/x", "has no host"),
        ("-oProxyCommand=x:/x", "is not a host"),
        ("a b:/x", "is not a host"),
        ("@:/x", "is not a host"),
        ("u@:/x", "is not a host"),
        ("[-oProxyCommand=x;#@h:/x", "is not a host"),
        ("-l@h:/x", "is not a host"),
        ("u@-h:/x", "is not a host"),
        ("a$(x):/x", "is not a host"),
        ("`x`@h:/x", "is not a host"),
        ("u@h\x07:/x", "is not a host"),
    ]:
        assert text in fails_here(2, "cp", "--", name, root)
    gpufs("cp", "./a:b", "copy", cwd=root)  # a name of this machine
    gpufs_here("cp", root / "a:b", root / "c:d")
    assert left(root) == ["a:b", "c:d", "copy"]


@pytest.mark.parametrize("end", ["{root}/new/", "node:{host}/new/"], ids=["here", "there"])
def test_a_directory_that_does_not_exist(root: Path, host: Path, remote: tuple[str, ...], end: str) -> None:
    """A slash at the end asks for a directory. -r creates it for a directory, and nothing does for a file."""
    (root / "m").mkdir()
    (root / "m" / "a").write_bytes(b"a")
    (root / "link").symlink_to("m/a")
    end = end.format(root=root, host=host)
    there = "" if end.startswith("node:") else "node:"
    for words in [(f"{there}{root}/m/a",), ("-r", f"{there}{root}/m/a"), ("-r", f"{there}{root}/link")]:
        assert "/new/: is not a directory" in refused_here(*remote, *words, end)
    assert (left(root), left(host)) == (["link", "m"], [])
    gpufs_here("cp", *remote, "-r", f"{there}{root}/m", end)
    assert left(Path(end.removeprefix("node:"))) == ["a"]


def test_a_peer_names_no_command(tmp_path: Path) -> None:
    """What runs gpufs for others, as a key that allows nothing else does, runs no command that these name."""
    (tmp_path / "bin").mkdir()
    script(tmp_path / "bin" / "ssh", f"#!/bin/sh\necho ran >>{tmp_path}/ssh\n")
    trap = script(tmp_path / "trap", f"#!/bin/sh\ntouch {tmp_path}/trapped\n")
    program = script(
        tmp_path / "client.py",
        f"""
import subprocess, msgspec
from gpufs.hosts.channel import HostChannel
from gpufs.hosts.messages import Failed, FilesDone, Finished, Plan
class Request(msgspec.Struct, tag=True):
    sends: bool
    sources: list[bytes]
    destination: bytes
    forward: list[bytes]
    shell: str
    program: str
for sends in (True, False):
    command = [{GPUFS[0]!r}, "serve-copy"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    channel = HostChannel(child.stdout.fileno(), child.stdin.fileno(), silence=30)
    channel.read_line(256, 30)
    channel.send(Request(sends, [b"x"], {os.fsencode(tmp_path)!r}, [b"h:x"], {str(trap)!r}, {str(trap)!r}))
    if not sends:
        channel.send(Plan(0, 0))
        channel.send(Failed(2, "", b"x"))
        channel.send(FilesDone())
    while not isinstance(channel.receive(), Finished):
        pass
    channel.close()
    child.stdin.close()
    child.wait()
""",
    )
    environment = {**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "PYTHONPATH": str(REPOSITORY)}
    run(sys.executable, program, env=environment)
    assert (tmp_path / "ssh").read_text() == "ran\nran\n"
    assert not (tmp_path / "trapped").exists()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("a:x", "b:y", "z"), "several machines"),
        (("a:x", "y", "z"), "use two"),
        (("-", "a:x"), "must be on this machine"),
        (("--dry-run", "a:x", "z"), "--dry-run cannot be used"),
        (("--partial", "a:x", "z"), "--partial cannot be used"),
        (("--fastpath", "require", "a:x", "z"), "--fastpath require cannot be used"),
        (("x", "-t", "a:y", "-t", "z"), "on this machine and on others"),
        (("a:x", "-t", "y", "-t", "z"), "one destination here"),
        (("x", "-t", "a:y", "-t", "b:y", "-t", "a:y/"), "a:y: is given more than once"),
        (("-e", "s\udcffh", "x", "-t", "a:y", "-t", "b:y"), "must be UTF-8"),
        (("a:x", ""), "an empty name"),
        (("-e", "ssh", "x", "y"), "need a name like HOST:PATH"),
        (("--remote-gpufs", "gpufs", "x", "y"), "need a name like HOST:PATH"),
    ],
)
def test_what_cannot_be_combined(words: tuple[str, ...], text: str) -> None:
    assert text in fails_here(2, "cp", *words)


def test_names_there_that_are_wrong(root: Path, host: Path, remote: tuple[str, ...]) -> None:
    (root / "file").write_bytes(b"x")
    (host / "file").write_bytes(b"x")
    for words, text in [
        ((f"node:{root}/none", host), f"node:{root}/none: No such file or directory"),
        ((root / "file", f"node:{root}/none/x"), "No such file or directory"),
        ((f"node:{root}/*.bin", host), "patterns are not expanded"),
        ((root / "none", f"node:{host}"), f"{root}/none: No such file or directory"),
        ((root / "file", "-t", f"node:{host}/none"), "need a directory"),
        ((f"node:{root}/file", "-t", f"{host}/none"), "need a directory"),
        (("-T", root / "file", f"node:{host}"), "directory"),
        ((f"node:{host}/file", host / "copy"), "neither of them is on a gpufs mount"),
        ((host / "file", f"node:{host}/copy"), "neither of them is on a gpufs mount"),
        (("-r", host, f"node:{host}/copy"), "neither of them is on a gpufs mount"),
    ]:
        assert text in refused_here(*remote, *words)
    assert (left(host), left(root)) == (["file"], ["file"])


# ---- ssh itself ----


@pytest.fixture
def sshd(session: Session, tmp_path: Path) -> Iterator[str]:
    """A real sshd on this machine; the command that reaches it."""
    server = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/usr/bin")
    if server is None or shutil.which("ssh") is None or os.geteuid() != 0:
        pytest.skip("needs root and openssh-server")
    Path("/run/sshd").mkdir(exist_ok=True)
    for name in ("host_key", "user_key"):
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name)
    config = tmp_path / "sshd_config"
    config.write_text(
        f"HostKey {tmp_path}/host_key\nAuthorizedKeysFile {tmp_path}/user_key.pub\nStrictModes no\n"
        f"PermitRootLogin prohibit-password\nSetEnv PYTHONPATH={REPOSITORY} TESTS_OF_GPUFS={session.name}\n"
    )
    # As inetd does: each ssh starts an sshd, over a pipe instead of a port.
    proxy = f"{server} -i -q -f {config}"
    yield (
        f"ssh -F none -i {tmp_path}/user_key -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null "
        f"-o BatchMode=yes -o LogLevel=ERROR -o 'ProxyCommand={proxy}'"
    )
    wait_until(lambda: not servers(session), PATIENCE, "the end of the other side")


def test_by_ssh(sshd: str, root: Path, host: Path) -> None:
    remote = ("-e", sshd, "--remote-gpufs", GPUFS[0])
    (host / "file").write_bytes(noise(9 * MIB))
    gpufs_here("cp", *remote, "--verify", host / "file", f"root@localhost:{root}/copy")
    gpufs_here("cp", *remote, "--verify", f"root@localhost:{root}/copy", host / "back")
    assert_same((host / "back").read_bytes(), noise(9 * MIB))
    for name in ("first", "second"):
        (root / name).mkdir()
    chain = [word for name in ("first", "second") for word in ("-t", f"root@localhost:{root}/{name}")]
    gpufs_here("cp", *remote, f"root@localhost:{root}/copy", *chain)
    for name in ("first", "second"):
        assert_same((root / name / "copy").read_bytes(), noise(9 * MIB))
    assert f"root@localhost:{root}/none: No such file" in refused_here(*remote, f"root@localhost:{root}/none", host)


def test_sync_from_the_home_directory(
    root: Path, host: Path, remote: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """HOST: without a path. It was the root directory."""
    monkeypatch.chdir(host)  # where a remote shell starts
    (host / "notes").write_bytes(b"mine")
    gpufs_here("sync", *remote, "--exclude", "/*/", "node2:", root / "copy")
    assert left(root / "copy") == ["notes"]


def test_a_sync_sees_what_a_program_writes_in_memory(root: Path, host: Path, remote: tuple[str, ...]) -> None:
    (root / "source").mkdir()
    (root / "source/model").write_bytes(noise(MIB))
    for ends in ((f"node2:{root}/source", host / "copy"), (root / "source", f"node2:{host}/copy2")):
        gpufs_here("sync", *remote, *ends)
        with package.attach(root / "source/model", "r+"):
            for _ in range(2):
                assert json.loads(gpufs_here("sync", "--json", *remote, *ends).stdout)["files"] == 1
        gpufs_here("sync", *remote, *ends)
        assert json.loads(gpufs_here("sync", "--json", *remote, *ends).stdout)["files"] == 0
