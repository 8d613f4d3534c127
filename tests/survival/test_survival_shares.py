"""What one plain user can take of what the next daemon needs: descriptors, and the journal's memory."""

from __future__ import annotations

import errno
import functools
import mmap
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from support import fake_gpu
from support.attaching import Attacker
from support.cli import gpufs as command
from support.copying import socket_path
from support.data import MIB, noise
from support.processes import NOBODY, PATIENCE, as_nobody, as_other, errno_of, in_child, links_of, wait_until
from support.surviving import Survivor, mounted

import gpufs
from gpufs import protocol

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="acts as several users, which takes root")
REFUSED = (errno.EDQUOT, errno.ENOSPC)
DESCRIPTORS = 400
# Root's daemon would raise the limit.
WITH_FEW_DESCRIPTORS = (
    *("prlimit", f"--nofile={DESCRIPTORS}:{DESCRIPTORS}"),
    *("setpriv", "--bounding-set", "-sys_resource", "--inh-caps", "-sys_resource"),
)
Make = Callable[..., Survivor]


@pytest.fixture(params=["host", "cuda"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """make(*options, launcher=(), environment={}): a mount with a directory of nobody's, over host memory and over a
    fake of CUDA."""
    folder = Path(tempfile.mkdtemp())  # which all users may search, as they may not search tmp_path
    folder.chmod(0o711)
    fake = fake_gpu.environment(tmp_path) if request.param == "cuda" else {}
    contexts = []

    def mount(*options: str, launcher: tuple[str, ...] = (), environment: dict[str, str] | None = None) -> Survivor:
        words = ("--allow-other", *options)
        variables = fake | (environment or {})
        context = mounted(folder / "mount", *words, driver=request.param, environment=variables, launcher=launcher)
        contexts.append(context)
        made = context.__enter__()
        place = made.device / "nobodys"
        place.mkdir()
        os.chown(place, NOBODY, NOBODY)
        return made

    yield mount
    for context in contexts:
        context.__exit__(None, None, None)
    shutil.rmtree(folder)


def journal_bytes(mount: Survivor) -> int:
    """Memory of the journal."""
    fd = next(fd for fd, link in links_of(mount.pid).items() if link.startswith("/memfd:gpufs-journal"))
    return os.stat(f"/proc/{mount.pid}/fd/{fd}").st_blocks * 512


def until_refused(folder: Path, create: Callable[[Path], None]) -> int:
    """How many files create() makes."""
    made = 0
    while not (code := errno_of(create, folder / f"{made}")):
        made += 1
    assert code in REFUSED
    return made


@pytest.mark.parametrize("make", ["host", pytest.param("cuda", marks=pytest.mark.slow)], indirect=True)
def test_the_journal_takes_no_more_than_its_limit(make: Make) -> None:
    """With attributes of one size after the other, of which a few stay each time; and its memory comes back."""
    mount = make("--metadata", "8M")
    folder = mount.device / "nobodys"
    kept: dict[str, bytes] = {}
    most = 0
    for exponent in range(9, 20, 2):
        value = bytes([exponent]) * min((1 << exponent) // 2 - 100, 60_000)
        parts = max(1, (1 << exponent) // 2 // 60_000)

        def create(path: Path, value: bytes = value, parts: int = parts) -> None:
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
            for part in range(parts):
                os.setxattr(path, f"user.{part}", value)

        def fill(exponent: int = exponent, create: Callable[[Path], None] = create) -> None:
            inner = folder / f"{exponent}"
            inner.mkdir()
            assert until_refused(inner, create) > 5

        def remove(exponent: int = exponent) -> None:
            for path in (folder / f"{exponent}").iterdir():
                if int(path.name) % 300:
                    path.unlink()

        as_nobody(fill)
        most = max(most, journal_bytes(mount))
        as_nobody(remove)
        most = max(most, journal_bytes(mount))
        kept[f"{exponent}/0"] = value
    assert most < 10 * MIB
    mount.kill()
    for name, value in kept.items():
        assert os.getxattr(folder / name, "user.0") == value
    for exponent in range(9, 20, 2):
        for path in (folder / f"{exponent}").iterdir():
            path.unlink()
    assert journal_bytes(mount) < 5 * MIB


def test_descriptors_are_shared(make: Make) -> None:
    """One user's files leave descriptors to the others, and to the daemon that takes over, which has all files."""
    mount = make(launcher=WITH_FEW_DESCRIPTORS)
    folder, others = mount.device / "nobodys", mount.device / "others"
    content = noise(70_000, 1)
    (mount.device / "roots").write_bytes(noise(3 * MIB, 2))

    def create(path: Path) -> None:
        try:
            path.write_bytes(content)
        except OSError:
            path.unlink()
            raise

    made = as_nobody(lambda: until_refused(folder, create))
    assert 50 < made < DESCRIPTORS // 2
    others.touch()
    others.chmod(0o666)
    as_other(lambda: others.write_bytes(content))
    command("cp", __file__, mount.device / "copied")

    mount.kill()

    assert (mount.device / "roots").read_bytes() == noise(3 * MIB, 2)
    assert (mount.device / "copied").read_bytes() == Path(__file__).read_bytes()
    assert others.read_bytes() == content
    assert all((folder / f"{number}").read_bytes() == content for number in range(made))
    # Root may take more, but not what the next daemon needs.
    (mount.device / "many").mkdir()
    until_refused(mount.device / "many", create)
    mount.kill()
    assert (mount.device / "many" / "0").read_bytes() == content
    # What is removed can be taken again.
    (folder / "0").unlink()
    (mount.device / "many" / "0").unlink()
    as_nobody(lambda: create(folder / "again"))


@pytest.mark.parametrize("make", ["cuda"], indirect=True)
def test_pieces_of_one_file_are_shared(make: Make) -> None:
    """On a GPU each piece of a sparse file takes a descriptor."""
    mount = make(launcher=WITH_FEW_DESCRIPTORS)
    sparse = mount.device / "nobodys/sparse"

    def fill() -> int:
        with open(sparse, "wb", buffering=0) as file:
            for number in range(DESCRIPTORS):
                if code := errno_of(os.posix_fallocate, file.fileno(), number * 4 * MIB, 1):
                    assert code in REFUSED
                    return number
                os.pwrite(file.fileno(), b"x", number * 4 * MIB)
        return DESCRIPTORS

    made = as_nobody(fill)
    assert 50 < made < DESCRIPTORS // 2
    (mount.device / "roots").write_bytes(noise(3 * MIB, 2))
    mount.kill()
    assert (mount.device / "roots").read_bytes() == noise(3 * MIB, 2)
    with open(sparse, "rb") as file:
        assert all(os.pread(file.fileno(), 1, number * 4 * MIB) == b"x" for number in range(made))


@pytest.mark.parametrize("make", ["host"], indirect=True)
def test_registrations_share_descriptors(make: Make) -> None:
    """Those of one user leave some for root's. The next daemon has what found some, and removes the others' files."""
    mount = make(launcher=WITH_FEW_DESCRIPTORS)
    end, ends = os.pipe()
    count = 40

    def hold(folder: Path) -> None:
        os.close(ends)
        memory = os.memfd_create("memory")
        os.ftruncate(memory, 8192)
        array = np.frombuffer(mmap.mmap(memory, 8192), np.uint8)
        array[:] = 7
        with ExitStack() as held:
            for number in range(count):
                held.enter_context(gpufs.register(array, folder / f"{number:02}"))
            (folder / "ready").touch()
            os.read(end, 1)

    holders = []
    folders = (mount.device / "nobodys", mount.device / "roots")
    try:
        for folder, uid in zip(folders, (NOBODY, 0), strict=True):
            folder.mkdir(exist_ok=True)
            work = functools.partial(in_child, functools.partial(hold, folder), uid=uid, gid=uid)
            holders.append(threading.Thread(target=work))
            holders[-1].start()
            wait_until((folder / "ready").exists, PATIENCE, "the registrations")
        former = None
        for _ in range(2):
            mount.kill()
            kept = [sorted(path for path in folder.iterdir() if path.name != "ready") for folder in folders]
            for folder, paths in zip(folders, kept, strict=True):
                assert 1 < len(paths) < count
                assert paths == [folder / f"{number:02}" for number in range(len(paths))]
                assert all(path.read_bytes() == bytes([7]) * 8192 for path in paths)
            assert former in (None, kept)
            former = kept
    finally:
        os.close(ends)
        for holder in holders:
            holder.join()
        os.close(end)
    assert [os.listdir(folder) for folder in folders] == [["ready"], ["ready"]]


@pytest.mark.parametrize("make", ["host", pytest.param("cuda", marks=pytest.mark.slow)], indirect=True)
def test_removed_files_in_use_count_for_the_next_daemon(make: Make) -> None:
    """A lease on one was lost, and its memory with it; the limit of a directory was applied by names."""
    mount = make()
    folder = mount.device / "nobodys" / "limited"
    folder.mkdir()
    command("quota", "set", folder, "8M")
    command("quota", "set", mount.device, "8M", "--user", NOBODY)

    def used() -> list[tuple[str, int]]:
        quotas = mount.report()["quotas"]
        return sorted(
            (entry["path"].rpartition("/")[2], entry["used_bytes"] // MIB) for entry in quotas if entry["limit_bytes"]
        )

    with Attacker(socket_path(mount.path)) as client, ExitStack() as files:
        assert client.greet()
        for name in ("leased", "open"):
            (folder / name).write_bytes(noise(4 * MIB))
            os.chown(folder / name, NOBODY, NOBODY)
            file = files.enter_context(open(folder / name, "r+b"))
            if name == "leased":
                answer, received = client.ask(protocol.Attach(1, "r+"), [file.fileno()])
                assert not answer["error"]
                for fd in received:
                    os.close(fd)
                file.close()
            (folder / name).unlink()
        full = [("gpu0", 8), ("limited", 8)]
        assert used() == full
        for _ in range(2):
            mount.kill()
            assert used() == full
            assert as_nobody(lambda: errno_of((mount.device / "nobodys/more").write_bytes, bytes(MIB))) == errno.EDQUOT
            assert errno_of((folder / "more").write_bytes, bytes(MIB)) == errno.EDQUOT
        assert not client.ask(protocol.Refresh(9, 1, 0))[0]["error"]
    for path in (folder / "more", mount.device / "nobodys/more"):
        path.unlink()
    wait_until(lambda: [size for _, size in used()] == [0, 0], PATIENCE, "the memory to be free")
