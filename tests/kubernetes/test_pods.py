"""Mount, plug-in and a program with a volume, in mount and PID namespaces of their own, as the chart's pods.

docs/containers.md says what the program sees when one of them is killed, restarted or upgraded.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

pytest.importorskip("grpc")

from support.cli import gpufs
from support.containers import UPGRADED, image_roots, remove_containers, words_of
from support.csi import BIDIRECTIONAL, HOST_TO_CONTAINER, Kubelet, at_once, fields, unless_it_dies
from support.data import MIB, noise
from support.mounting import GPUFS, REPOSITORY
from support.processes import PATIENCE, run, wait_until
from support.stores import Model, WebServer, web_server

from gpufs import __version__
from gpufs.mounting import listed

pytestmark = [pytest.mark.skipif(os.geteuid() != 0, reason="binds directories, which takes root")]

WEIGHTS = noise(3 * MIB + 5)
RIGHT = [hashlib.sha256(WEIGHTS).hexdigest()] * 2
# For each line that it gets: the checksum of what it has attached, that of the file, or the error; and attaches again.
PROGRAM = """
import errno, gpufs, hashlib, sys
path = sys.argv[1] + "/weights.safetensors"
array = gpufs.attach(path)
for line in sys.stdin:
    found = [hashlib.sha256(array.memoryview()).hexdigest()]
    try:
        with open(path, "rb") as file:
            found.append(hashlib.sha256(file.read()).hexdigest())
        array = gpufs.attach(path)
    except OSError as error:
        found.append(errno.errorcode.get(error.errno, repr(error)))
    print(*found, flush=True)
"""
# Seconds in which all is again as it was, after the death of: the daemon, the plug-in's container, the program's, the
# mount's, with which the model goes.
WITHIN = {"daemon": 5.0, "plug-in": 30.0, "program": 30.0, "mount": 60.0}


class Pods(NamedTuple):
    """How the chart's pods are run: the words before a command."""

    privileged: list[str]  # of mount and plug-in, which see and make mounts below a directory, and outside of it
    with_volume: Callable[[Path], list[str]]  # of a program that has a volume
    at: str  # where it has that
    gpufs: Sequence[str]
    python: str
    version: str


@pytest.fixture(scope="module")
def images() -> Iterator[tuple[Path, Path]]:
    missing = [name for name in ("buildah", "debootstrap", "runc") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"scripts/check deploy installs {missing[0]}")
    with image_roots() as roots:
        yield roots


@pytest.fixture(params=["namespaces", pytest.param("containers", marks=pytest.mark.slow)])
def pods(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[Pods]]:
    """In namespaces of their own, or as containers of deploy/Dockerfile's image, and of its next version."""
    if request.param == "namespaces":
        inside = tmp_path / "inside"
        inside.mkdir()
        words = [*HOST_TO_CONTAINER]
        of_volume = lambda volume: [*words, str(volume), str(inside)]  # noqa: E731
        yield [Pods(BIDIRECTIONAL, of_volume, str(inside), GPUFS, sys.executable, __version__)]
        return
    roots = request.getfixturevalue("images")
    folder, shared, run_directory = tmp_path / "containers", tmp_path / "node", Path("/run/gpufs")
    folder.mkdir()
    run_directory.mkdir(exist_ok=True)
    binds = [(shared, str(shared), "rshared"), (run_directory, str(run_directory), "rprivate")]

    def with_volume(root: Path, volume: Path) -> list[str]:
        return [*BIDIRECTIONAL, *words_of(root, folder, False, [(volume, "/data", "rslave")])]

    yield [
        Pods(
            [*BIDIRECTIONAL, *words_of(root, folder, True, binds)],
            partial(with_volume, root),
            *("/data", ["gpufs"], "python", version),
        )
        for root, version in zip(roots, (__version__, UPGRADED), strict=True)
    ]
    remove_containers(folder)


class Node:
    """A node with the chart's pods, and a program with a volume. A context manager, which leaves nothing."""

    def __init__(self, folder: Path, pods: Pods, hub: WebServer) -> None:
        self._folder = folder
        self.shared = folder / "node"
        self.path = self.shared / "mnt/node"
        self._environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder)}
        self.pods = pods
        self.kubelet: Kubelet
        self.mounting: subprocess.Popen[bytes]
        self.program: subprocess.Popen[str]

    def __enter__(self) -> Node:
        with ExitStack() as ends:
            self.path.mkdir(parents=True)
            run("mount", "--bind", self.shared, self.shared)
            ends.callback(lambda: [run("umount", "-l", at, check=False) for at in (self.path, self.shared)])
            run("mount", "--make-shared", self.shared)
            (self._folder / "bin").mkdir()
            (self._folder / "bin/gpufs").write_text(f'#!/bin/sh\nexec {shlex.join(GPUFS)} "$@"\n')
            (self._folder / "bin/gpufs").chmod(0o755)
            self.start_mount()
            ends.callback(lambda: self.end(self.mounting))
            words = {"launcher": self.pods.privileged, "program": self.pods.gpufs}
            self.kubelet = ends.enter_context(Kubelet(self.shared, self.path, self._environment, **words))
            self.volume = self.kubelet.publish("v1")
            self.start_program()
            ends.callback(lambda: self.end(self.program))
            self._ends = ends.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    def start_mount(self) -> None:
        """Start the mount's pod, and return when it has mounted."""
        chart = yaml.safe_load_all((REPOSITORY / "deploy/gpufs.yaml").read_text())
        (pod,) = [one["spec"]["template"]["spec"] for one in chart if one["metadata"]["name"] == "gpufs-mount"]
        (container,) = pod["containers"]
        options = [word.replace("cuda", "host") for word in container["args"]]
        words = [*self.pods.privileged, *container["command"][:-1], self.path, *options]
        environment = {**os.environ, "PATH": f"{self._folder}/bin:{os.environ['PATH']}"}
        with open(self._folder / "log", "ab") as log:  # what `kubectl logs` shows
            words += ["--devices", "1", "--memory", "32M"]
            self.mounting = subprocess.Popen(words, env=environment, stderr=log)
        wait_until(lambda: os.path.isdir(self.path / "gpu0"), 30, "the mount's pod")

    def start_program(self) -> None:
        """Start the program, which attaches the model."""
        words = [*self.pods.with_volume(self.volume), self.pods.python, "-c", PROGRAM, self.pods.at]
        self.program = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def end(self, process: subprocess.Popen[bytes] | subprocess.Popen[str]) -> None:
        """Kill a container, or a pod in namespaces, with all its processes."""
        with suppress(BrokenPipeError), process:  # of a question that nobody has read
            process.kill()

    def ask(self) -> list[str]:
        """What the program reads: nothing if it has been killed."""
        assert self.program.stdin is not None
        assert self.program.stdout is not None
        try:
            self.program.stdin.write("\n")
            self.program.stdin.flush()
            return self.program.stdout.readline().split()
        except (BrokenPipeError, ValueError):  # the second where another thread has ended it
            return []

    def processes(self, word: str) -> list[int]:
        """The processes of this node that have a word in their command line."""
        return [int(pid) for pid in run("pgrep", "-f", f"{word}.*{self.path}", check=False).stdout.split()]

    def shown(self) -> set[str]:
        """The device numbers of what is bound as the volume."""
        return {entry.device for entry in listed() if entry.mountpoint == str(self.volume)}

    def status(self) -> dict[str, Any]:
        return dict(json.loads(gpufs("status", "--json", self.path).stdout))


@pytest.fixture
def node(tmp_path: Path, pods: list[Pods]) -> Iterator[Node]:
    with web_server() as hub:
        files = {"config.json": b"{}", "weights.safetensors": WEIGHTS}
        hub.models["org/model"] = Model(files, lfs=("weights.safetensors",))
        hub.models["org/other"] = Model({f"{part}.bin": noise(400 << 10) for part in range(6)})
        with Node(tmp_path, pods[0], hub) as node:
            assert node.ask() == RIGHT
            yield node


@contextmanager
def replaced(node: Node) -> Iterator[None]:
    """The mount's pod ends in the block, and another one takes its place. The program finds the model again."""
    before = node.shown()
    os.stat(node.path / "gpu0")
    yield
    node.mounting.wait(PATIENCE)
    run("stat", node.path / "gpu0/csi", check=False)  # the dead mount must not forget the name
    node.start_mount()
    wait_until(lambda: node.shown() - before, 30, "the volume on the new mount")
    assert node.ask() == RIGHT
    assert node.ask() == RIGHT  # which has attached again


@pytest.mark.timeout(2400)
def test_pods_that_restart(node: Node, tmp_path: Path, pods: list[Pods]) -> None:
    """The end or upgrade of the plug-in's pod and the death of the daemon change nothing for the program.

    With the mount's pod the models go; then the program finds them again under the same name, and what it has attached
    was there all the time.
    """
    kubelet, path = node.kubelet, node.path
    kubelet.end(signal.SIGKILL)  # the pod, with all its processes
    assert node.ask() == RIGHT
    kubelet.start()
    os.kill(node.processes("gpufs[.]daemon")[0], signal.SIGKILL)
    assert node.ask() == RIGHT
    assert kubelet.publish("v1") == node.volume
    up = run(*node.pods.privileged, *node.pods.gpufs, "metrics", path).stdout
    assert f'gpufs_up{{mountpoint="{path}"}} 1.0' in up
    assert b"gpufs.daemon" in (tmp_path / "log").read_bytes()
    with replaced(node):
        node.end(node.mounting)
    # An upgrade: the chart replaces the plug-in's pod, and an administrator deletes the mount's.
    version = node.status()["version"]
    node.pods = pods[-1]
    kubelet.end(signal.SIGKILL)
    kubelet.program = [*node.pods.privileged, *node.pods.gpufs]
    kubelet.start()
    assert fields(kubelet.call("Identity", "GetPluginInfo", b""))[2].decode() == node.pods.version
    assert kubelet.publish("v1") == node.volume
    assert node.ask() == RIGHT
    assert node.status()["version"] == version
    with replaced(node):
        (first,) = node.processes("^sh -c")
        os.kill(first, signal.SIGTERM)  # as the kubelet does
    assert node.status()["version"] == node.pods.version
    node.end(node.program)
    kubelet.unpublish("v1")
    assert kubelet.bound() == []
    assert not any((path / "gpu0/csi").iterdir())


class _Killer:
    """Kills something of a node, waits until all is as before, and counts what was seen."""

    def __init__(self, node: Node, chooser: random.Random) -> None:
        self._node = node
        self._chooser = chooser
        self.longest: dict[str, float] = {}  # seconds, by what was killed
        self.kills: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()  # that the program got while there was no mount
        self._other = False  # whether another volume is there
        self._held: dict[bool, int] = {}  # bytes, without the other volume and with it

    def _held_bytes(self) -> int:
        (device,) = self._node.status()["devices"]
        return int(device["held_bytes"])

    def one(self) -> None:
        """One round: a volume comes or goes, the program reads all the time, and at a random moment something dies."""
        node = self._node
        (victim,) = self._chooser.choices(list(WITHIN), (4, 3, 2, 1))
        delay = self._chooser.choice([0.0, 0.05, self._chooser.random() * 1.5])
        name, source = "other", "hf://org/other"
        change = partial(node.kubelet.unpublish, name) if self._other else partial(node.kubelet.publish, name, source)
        began = 0.0

        def kill() -> None:
            nonlocal began
            time.sleep(delay)
            began = time.monotonic()
            getattr(self, f"_kill_{victim.replace('-', '_')}")()

        def read() -> None:
            while not began or time.monotonic() < began + 0.2:
                answer = node.ask()
                if answer != RIGHT and victim in ("daemon", "plug-in"):
                    raise AssertionError(f"{answer} after the death of {victim}")
                if not answer:  # the program's end
                    return
                assert answer[0] == RIGHT[0], "what is attached has changed"
                if answer[1] != RIGHT[1]:
                    assert answer[1] in ("ENOTCONN", "ECONNABORTED")
                    self.errors[answer[1]] += 1

        failures = [one for one in at_once(partial(unless_it_dies, change), kill, read) if isinstance(one, Exception)]
        assert not failures, (victim, failures)
        node.kubelet.until(change)
        self._other = not self._other
        wait_until(lambda: node.ask() == RIGHT, 60, "what the program reads")
        seconds = time.monotonic() - began
        self.kills[victim] += 1
        self.longest[victim] = max(self.longest.get(victim, 0.0), seconds)
        assert seconds < WITHIN[victim], f"{victim}: {seconds:.1f} s"
        self._check_nothing_is_left()

    def _kill_daemon(self) -> None:
        (daemon,) = self._node.processes("gpufs[.]daemon")
        os.kill(daemon, signal.SIGKILL)
        # Answers a name that the kernel does not know.
        assert "No such file" in run("stat", self._node.path / f"gpu0/{daemon}", check=False).stderr
        for keeper in self._node.processes("gpufs-keeper"):
            os.kill(keeper, signal.SIGUSR1)  # forgets the deaths: so many in a row look like a call that kills daemons

    def _kill_plug_in(self) -> None:
        self._node.kubelet.end(signal.SIGKILL)
        self._node.kubelet.start()
        assert self._node.kubelet.until(partial(self._node.kubelet.publish, "v1")) == self._node.volume

    def _kill_program(self) -> None:
        self._node.end(self._node.program)
        if self._chooser.random() < 0.5:  # the pod is deleted, and another one comes
            self._node.kubelet.until(partial(self._node.kubelet.unpublish, "v1"))
            self._node.kubelet.until(partial(self._node.kubelet.publish, "v1"))
        self._node.start_program()

    def _kill_mount(self) -> None:
        before = self._node.shown()
        self._node.end(self._node.mounting)
        self._node.start_mount()
        wait_until(lambda: self._node.shown() - before, 60, "the volume on the new mount")

    def _check_nothing_is_left(self) -> None:
        """One process of each kind, one mount, the binds of the volumes that there are, and no memory but theirs."""
        node = self._node
        for word in ("gpufs[.]daemon", "^[^ ]*gpufs-keeper", "^[^ ]*python[^ ]* [^ ]*gpufs csi"):
            wait_until(partial(self._has_one, word), 10, f"one {word}")
        assert [entry.mountpoint for entry in listed()].count(str(node.path)) == 1
        assert len(set(node.kubelet.bound())) == 3 * (1 + self._other)
        models = 1 + self._other
        wait_until(lambda: len(os.listdir(node.path / "gpu0/csi")) == models, 70, "no other model")
        held = self._held.setdefault(self._other, self._held_bytes())
        wait_until(lambda: self._held_bytes() == held, 10, "the memory of other models")

    def _has_one(self, word: str) -> bool:
        return len(self._node.processes(word)) == 1

    def end(self) -> str:
        """Let the volumes go. Return what was seen."""
        node = self._node
        node.end(node.program)
        node.kubelet.until(partial(node.kubelet.unpublish, "v1"))
        if self._other:
            node.kubelet.until(partial(node.kubelet.unpublish, "other"))
        assert not node.kubelet.bound()
        wait_until(lambda: self._held_bytes() == 0, 70, "the memory of all models")
        assert not os.listdir(node.path / "gpu0/csi")
        seen = [f"{name} {count} times (at most {self.longest[name]:.1f} s)" for name, count in self.kills.items()]
        errors = ", ".join(f"{count} {name}" for name, count in self.errors.items())
        return f"killed {', '.join(seen)}; what the program got without a mount: {errors or 'nothing'}"


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("pods", ["containers"], indirect=True)
def test_kills_of_containers(tmp_path: Path, node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    """Daemon and containers are killed at random moments, KILLS times (by default 20): nothing is lost or left."""
    kills = int(os.environ.get("KILLS", "20"))
    killer = _Killer(node, random.Random(kills))
    for count in range(kills):
        try:
            killer.one()
        except BaseException as error:
            error.add_note(f"kill {count}")
            raise
    seen = killer.end()
    node.__exit__()
    assert not [entry for entry in listed() if entry.mountpoint.startswith(str(node.shared))]
    assert not node.processes("")
    with capsys.disabled():
        print(f"\n{seen}", flush=True)
