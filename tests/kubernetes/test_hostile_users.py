"""Commands of root, and the plug-in for Kubernetes, in directories where a plain user changes everything all the time.

The user puts links to others' directories and files, FIFOs, sockets, deep trees, names of odd bytes and marks of models
at the names that root's programs are given, and at those that they use themselves. Nothing of others is read, changed
or removed, each command ends, and the plug-in goes on.
"""

from __future__ import annotations

import ctypes
import os
import random
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc")

from support import hostile_user
from support.cli import gpufs
from support.csi import Kubelet
from support.data import noise
from support.processes import NOBODY, OTHER, run, wait_until
from support.stores import Model, web_server
from support.surviving import Survivor, mounted

pytestmark = [pytest.mark.skipif(os.geteuid() != 0, reason="acts as root and as another user")]

SECRET = b"what nobody else may read"
FILES = {"config.json": b"{}", "weights.safetensors": noise(100_000)}
# {} is a place in the user's directories, on the mount or the host, {root} a directory of root's own.
COMMANDS = """
save {} {root}/saves/{n}
save {} {}
save {mount}/gpu0/mine {}
save --verify {mount} {root}/whole
restore {root}/made {}
restore --overwrite {root}/made {}
restore --overwrite {} {}
restore {} {mount}/gpu0/back
sync --delete {root}/source {}
sync --delete {mount}/gpu0/mine {}
quota set {} 1G
quota remove {}
quota list {mount}
sleep {}
wake {}
pin {}
unpin {}
replace {mount}/gpu0/mine/new {}
leases --revoke {}
ls -R {}
ls {mount}
doctor {}
metrics {mount}
stats {mount}
status {mount}
df {mount}
restart {mount}
"""


class Victim:
    """A directory of others, and what it was. On the host any access to it is noticed, too."""

    def __init__(self, path: Path, uid: int, mode: int, *, watched: bool) -> None:
        self.path = path
        (path / "below").mkdir(parents=True)
        (path / "file").write_bytes(SECRET)
        (path / "below/large").write_bytes(SECRET + bytes(hostile_user.SLEEPS))
        (path / "link").symlink_to("file")
        for place in (path / "below/large", path / "below", path / "file", path):
            os.chown(place, uid, uid)
        path.chmod(mode)
        self._before = self._state()
        self._events = -1
        if watched:
            libc = ctypes.CDLL(None)
            self._events = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
            for place in (path, path / "below"):
                assert libc.inotify_add_watch(self._events, os.fsencode(place), 0xFFF) >= 0

    def _state(self) -> dict[str, Any]:
        found = {}
        for place in (self.path, *sorted(self.path.rglob("*"))):
            status = place.lstat()
            names = os.listxattr(place, follow_symlinks=False)
            content = place.read_bytes() if place.is_file() else None
            ids = status.st_ino, status.st_mode, status.st_uid, status.st_nlink, status.st_ctime_ns
            found[os.fspath(place)] = (*ids, names, content)
        return found

    def damage(self) -> list[str]:
        """What has happened to it."""
        damage = []
        if self._events >= 0:
            with suppress(BlockingIOError):
                damage.append(f"{self.path}: was read: {os.read(self._events, 4096)!r}")
        now = self._state()
        for place in self._before.keys() | now.keys():
            if self._before.get(place) != now.get(place):
                damage.append(f"{place}: {self._before.get(place)!s:.300} -> {now.get(place)!s:.300}")
        return damage

    def close(self) -> None:
        if self._events >= 0:
            os.close(self._events)


class Commands:
    """Runs commands of root, in the user's directories."""

    def __init__(self, root: Path, mount: Survivor, places: Sequence[Path], links: Sequence[Path]) -> None:
        """``places``: what the user changes there has one of its names. ``links``: what does not change."""
        self._root = root
        self._mount = mount
        self._chooser = random.Random(0)
        names = ("", *hostile_user.NAMES)
        self._changing = [place / name for place in places for name in names]
        self._links = [link / name for link in links for name in ("", "file", "below")]
        (root / "saves").mkdir(parents=True)
        root.chmod(0o700)
        for place in (mount.device / "mine", root / "source"):
            (place / "below").mkdir(parents=True)
            for name in ("new", "file"):
                (place / name).write_bytes(b"root's")
        gpufs("save", mount.device / "mine", root / "made")

    def round(self) -> Iterator[list[str]]:
        """Yield the words of each command: with a name that changes, and with a link that does not."""
        for line in COMMANDS.strip().splitlines():
            for places in (self._changing, self._links)[: 1 + ("{}" in line)]:
                found = {"root": self._root, "mount": self._mount.path, "n": self._chooser.getrandbits(64)}
                yield [word.replace("{}", f"{self._chooser.choice(places)}").format(**found) for word in line.split()]

    def run(self, words: list[str]) -> str:
        """Run one, which must end whatever it finds. Return what is wrong with it, "" if nothing is."""
        try:
            done = gpufs(*words, check=False, timeout=120)
        except subprocess.TimeoutExpired as error:
            return str(error)
        said = done.stdout + done.stderr
        bad = [text for text in ("internal error", "Traceback", SECRET.decode()) if text in said]
        return f"{words}: {done.returncode}: {said[-2000:]}" if bad or done.returncode not in (0, 1) else ""

    def secrets(self) -> bool:
        """Whether what others have is in a save of the user's directories. Removes these saves."""
        found = run("grep", "-rqaF", SECRET.decode(), self._root / "saves", check=False).returncode == 0
        run("find", self._root / "saves", "-mindepth", "1", "-delete")
        return found


@contextmanager
def hostile(levels: int, others: Sequence[Path], places: Sequence[Path]) -> Iterator[None]:
    """The user, until the block ends."""
    words = [str(levels), ":".join(map(str, others)), *map(str, places)]
    setpriv = ["setpriv", "--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups"]
    with subprocess.Popen([*setpriv, sys.executable, hostile_user.__file__, *words], stdin=subprocess.PIPE) as process:
        try:
            yield
        finally:
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait(60) == 0, "the user has ended before"


def let_pods_come_and_go(kubelet: Kubelet, goes_on: Callable[[], bool]) -> str:
    """Each of them sees its model as it is. Return what is wrong."""
    count = 0
    while goes_on():
        name, count = f"v{count}", count + 1
        try:
            volume = kubelet.until(partial(kubelet.publish, name))
            if {file: (volume / file).read_bytes() for file in FILES} != FILES:
                return f"{name} shows another model"
            kubelet.until(partial(kubelet.unpublish, name))
        except Exception as error:  # noqa: BLE001 - shown by the test
            return f"{name}: {type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("seconds", "levels"),
    [(0, 60), pytest.param(600, 1500, marks=[pytest.mark.slow, pytest.mark.timeout(2400)])],
    ids=["short", "long"],
)
def test_roots_programs_among_hostile_names(open_directory: Path, seconds: float, levels: int) -> None:
    """For HOSTILE_SECONDS, if that is set."""
    seconds = float(os.environ.get("HOSTILE_SECONDS", seconds))
    with ExitStack() as opened:
        # Others than rm(1) do not get through the deep trees.
        opened.callback(run, "rm", "-rf", "--one-file-system", open_directory / "root", open_directory / "host")
        hub = opened.enter_context(web_server())
        hub.models["org/model"] = Model(dict(FILES), lfs=("weights.safetensors",))
        options = ("--allow-other", "--host-memory", "64M")
        mount = opened.enter_context(mounted(open_directory / "mnt", *options, memory="256M"))
        (open_directory / "host").mkdir()
        (mount.device / "csi").mkdir()  # as an administrator does whose users would take the name
        shared = [mount.device, open_directory / "host"]
        shared[1].chmod(0o1777)
        others = [
            Victim(folder / f"others-{uid}", uid, mode, watched=folder == shared[1])
            for folder in shared
            for uid, mode in ((0, 0o700), (OTHER, 0o755))
        ]
        places = [folder / "u" for folder in shared]
        for place in places:
            place.mkdir()
            os.chown(place, NOBODY, NOBODY)
        links = []
        for victim in others:
            place = victim.path.with_name(victim.path.name.replace("others", "to"))
            place.symlink_to(victim.path)
            os.chown(place, NOBODY, NOBODY, follow_symlinks=False)
            links.append(place)
        changing = [*places, *(folder / "u2" for folder in shared)]
        commands = Commands(open_directory / "root", mount, changing, links)
        names = [victim.path / name for victim in others for name in ("", "file", "below", "below/large")]
        opened.enter_context(hostile(levels, names, places))
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = f"127.0.0.1:{free.getsockname()[1]}"
        environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(open_directory / "hub"), "HF_TOKEN": ""}
        kubelet = opened.enter_context(Kubelet(open_directory, mount.path, environment, "--metrics", address))
        stopped = threading.Event()
        workers = opened.enter_context(ThreadPoolExecutor(3))
        opened.callback(stopped.set)
        pods = workers.submit(let_pods_come_and_go, kubelet, lambda: not stopped.is_set())
        wrong: list[str] = []
        began, rounds = time.monotonic(), 0
        while not wrong and (not rounds or time.monotonic() < began + seconds):
            wrong += filter(None, workers.map(commands.run, list(commands.round())))
            rounds += 1
            if commands.secrets():
                wrong.append("a save has others' files")
            for folder in places:  # what root has put there, and the user may not remove
                run(
                    "find",
                    folder,
                    "-mindepth",
                    "1",
                    "-maxdepth",
                    "1",
                    "-user",
                    "root",
                    "-exec",
                    "rm",
                    "-rf",
                    "{}",
                    "+",
                    check=False,
                )
        stopped.set()
        wrong += filter(None, [pods.result(), *(text for victim in others for text in victim.damage())])
        limited = gpufs("quota", "list", "--json", mount.path).stdout
        wrong += [f"{victim.path} is limited" for victim in others if f'"{victim.path}' in limited]
        for victim in others:
            victim.close()
        assert not wrong, "\n".join(wrong)
        # The plug-in still repairs what is missing, and says what it could not do.
        volume = kubelet.until(partial(kubelet.publish, "last"))
        run("umount", "-R", "-l", volume)
        wait_until((volume / "config.json").exists, 10, "the plug-in's next round")
        kubelet.unpublish("last")
        with urllib.request.urlopen(f"http://{address}/metrics") as answer:
            assert b"gpufs_csi_failures" in answer.read()
        kubelet.end()
        assert b"Traceback" not in kubelet.log.read_bytes()
