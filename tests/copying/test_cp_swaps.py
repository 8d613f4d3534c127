"""Copies, saves and restores by root of trees in which another user exchanges names for symbolic links."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.mounting import GPUFS
from support.processes import NOBODY, PATIENCE, run

from gpufs.cli import run_command_line as run_here

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="acts as root and as another user")

ROUNDS = 12
SECONDS = 20  # for all rounds, on a busy machine

# Exchanges a name for a link and back as fast as it can: argv: the name, where the link leads.
SWAPPER = """
import os, sys
name, target = sys.argv[1:]
os.setgroups([]); os.setgid(65534); os.setuid(65534)
print("ready", flush=True)
link, aside = name + ".link", name + ".aside"
while os.getppid() == int(os.environ["PARENT"]):
    try:
        if not os.path.lexists(link):
            os.symlink(target, link)
        os.rename(name, aside)
        os.rename(link, name)
        os.rename(name, link)
        os.rename(aside, name)
    except OSError:
        pass
"""


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory of the other user beside one of root."""
    with tempfile.TemporaryDirectory(prefix="gpufs-client-", dir="/var/tmp") as folder:
        path = Path(folder)
        path.chmod(0o755)
        (path / "his").mkdir()
        secret = path / "secret"
        secret.mkdir(mode=0o700)
        (secret / "key").write_text("root alone")
        (secret / "key").chmod(0o600)
        (secret / "f").write_text("root alone")
        yield path


@pytest.fixture
def swap(shared: Path) -> Iterator[Callable[[Path, Path], None]]:
    children: list[subprocess.Popen[str]] = []

    def start(name: Path, target: Path) -> None:
        words = [sys.executable, "-c", SWAPPER, str(name), str(target)]
        environment = {**os.environ, "PARENT": str(os.getpid())}
        child = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment)
        children.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"

    yield start
    for child in children:
        child.kill()
        child.communicate(timeout=PATIENCE)


def repeat(action: Callable[[int], None]) -> None:
    end = time.monotonic() + SECONDS
    for number in range(ROUNDS):
        action(number)
        if time.monotonic() > end:
            return


def give(path: Path) -> None:
    run("chown", "-R", f"{NOBODY}:{NOBODY}", path)


@pytest.mark.parametrize("option", ["-r", "-a"])
@pytest.mark.parametrize(("name", "target"), [("sub/f", "key"), ("sub", "")], ids=["file", "directory"])
def test_a_source_that_becomes_a_link_leaks_nothing(
    shared: Path, root: Path, swap: Callable[[Path, Path], None], name: str, target: str, option: str
) -> None:
    tree = shared / "his" / "tree"
    (tree / "sub").mkdir(parents=True)
    for number in range(30):
        (tree / f"a{number}").write_text("his")
    (tree / "sub/f").write_text("his")
    give(tree)
    swap(tree / name, shared / "secret" / target)

    def copy(number: int) -> None:
        copied = root / f"copy{number}"
        run_here(["cp", option, "--no-progress", str(tree), str(copied)])
        for path in copied.rglob("*"):
            if not path.is_symlink() and path.is_file():
                assert path.read_text() in ("his", ""), path

    repeat(copy)


def status(path: Path) -> tuple[int, ...]:
    found = path.lstat()
    return (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode), found.st_mtime_ns, found.st_size)


@pytest.mark.parametrize(
    ("name", "target"), [("tree/sub/f", "key"), ("tree/sub", ""), ("new", "")], ids=["file", "directory", "new"]
)
def test_a_destination_that_becomes_a_link_changes_nothing_elsewhere(
    shared: Path, root: Path, swap: Callable[[Path, Path], None], name: str, target: str
) -> None:
    """Root restores a user's files into a directory of that user; contents, owners, modes and times elsewhere stay.

    A new directory is exchanged between its creation and the change of its owner; the user may fill it before that.
    """
    source, secret, his = root / "tree", shared / "secret", shared / "his"
    (source / "sub").mkdir(parents=True)
    for file in ("f", "key", *(f"f{number}" for number in range(20))):
        (source / "sub" / file).write_text("his")
    give(source)
    give(his)
    if name != "new":
        run(*GPUFS, "cp", "-a", source, his)
    before = [status(path) for path in (secret, secret / "key", secret / "f")]
    swap(his / name, secret / target)
    into = his / "new" if name == "new" else his

    def copy(number: int) -> None:
        run_here(["cp", "-a", "--no-progress", str(source), str(into)])
        found = [status(path) for path in (secret, secret / "key", secret / "f")]
        if name == "new":  # which may lead there from the begin: then the copy belongs there, as that of cp(1)
            assert found[0][:3] == before[0][:3]
        else:
            assert found == before
            assert sorted(os.listdir(secret)) == ["f", "key"]

    repeat(copy)
    assert (secret / "key").read_text() == "root alone"


def test_existing_links_are_not_followed(shared: Path, root: Path) -> None:
    """The other user has created the links before root copies."""
    source = root / "tree"
    source.mkdir()
    (source / "f").write_text("his")
    give(source)
    his = shared / "his"
    (his / "tree").mkdir()
    (his / "tree/f").symlink_to(shared / "secret/key")
    give(his)
    for option in ("-r", "-a"):
        done = run(*GPUFS, "cp", option, source, his, check=False)
        assert (done.returncode, "symbolic link" in done.stderr) == (1, True)
        assert (shared / "secret/key").read_text() == "root alone"
    done = run(*GPUFS, "cp", "-a", source / "f", his / "tree", check=False)
    assert done.returncode == 1
    assert (shared / "secret/key").read_text() == "root alone"


def test_a_saved_directory_that_becomes_a_link_leaks_nothing(
    shared: Path, root: Path, swap: Callable[[Path, Path], None]
) -> None:
    tree = root / "tree"
    (tree / "sub").mkdir(parents=True)
    for number in range(30):
        (tree / "sub" / f"f{number}").write_text("his")
    give(tree)
    swap(tree / "sub", shared / "secret")

    def save(number: int) -> None:
        run_here(["save", "--no-progress", str(root), str(shared / f"save{number}")])
        for path in shared.glob("save*/tree/**/*"):
            assert path.is_symlink() or path.is_dir() or path.read_text() == "his"

    repeat(save)
    assert "root alone" not in "".join(path.read_text() for path in shared.glob("save*/manifest.jsonl"))


def test_a_restored_directory_that_becomes_a_link_changes_nothing_elsewhere(
    shared: Path, root: Path, swap: Callable[[Path, Path], None]
) -> None:
    source, his, secret = root / "source", root / "his", shared / "secret"
    (source / "sub").mkdir(parents=True)
    for name in ("key", *(f"f{number}" for number in range(20))):
        (source / "sub" / name).write_text("his")
    give(source)
    run(*GPUFS, "save", source, shared / "save")
    run("cp", "-a", source, his)
    before = [status(path) for path in (secret, secret / "key", secret / "f")]
    swap(his / "sub", secret)

    def restore(number: int) -> None:
        run_here(["restore", "--overwrite", "--no-progress", str(shared / "save"), str(his)])
        assert [status(path) for path in (secret, secret / "key", secret / "f")] == before
        assert sorted(os.listdir(secret)) == ["f", "key"]

    repeat(restore)
