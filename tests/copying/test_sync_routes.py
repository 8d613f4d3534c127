"""`gpufs sync --delete` by every route: afterwards both sides are equal, whatever they were before, or it fails."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from support.cli import gpufs, gpufs_here
from support.data import remove_tree
from support.hosts import script
from support.mounting import GPUFS, Session
from support.stores import S3, Model, WebServer, s3_server, web_server

pytestmark = pytest.mark.driver

NAMES = ("a", "b", "d", "d/a", "d/e", "d/e/c", "g", "g/a", "h.bin")
SIZES = (0, 5, 5, 5, 4096, 200_000)
SECONDS = (10**9, 1_700_000_000, 1_790_000_000)


@dataclass
class Change:
    """Random changes of a tree. Contents of one size never have one time, as after all real programs."""

    seed: int
    left_out: tuple[str, ...] = ()  # what the other side cannot have
    _count: int = 0
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def change(self, top: Path, *, times: bool = True) -> None:
        top.mkdir(exist_ok=True)
        for name in self._random.sample(NAMES, self._random.randint(1, 5)):
            path = top / name
            for above in reversed(list(path.relative_to(top).parents)[:-1]):
                if not stat.S_ISDIR(_mode(top / above)):
                    (top / above).unlink(missing_ok=True)
                    (top / above).mkdir()
            self._change(path, times=times)

    def _change(self, path: Path, *, times: bool) -> None:
        kinds = ["file"] * 6 + ["gone", "dir", "link", "fifo", "mode"]
        kind = self._random.choice([kind for kind in kinds if kind not in self.left_out])
        if kind == "mode":
            if path.is_file() and not path.is_symlink():
                path.chmod(self._random.choice([0o444, 0o600, 0o755]))
            return
        if path.is_dir() and not path.is_symlink():
            if kind == "dir":
                return
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        if kind == "file":
            self._count += 1
            path.write_bytes(self._random.randbytes(self._random.choice(SIZES)))
            if times:  # older and newer than before
                time = self._random.choice(SECONDS) * 10**9 + self._count
                os.utime(path, ns=(time, time))
        elif kind == "dir":
            path.mkdir()
        elif kind == "link":
            path.symlink_to(self._random.choice(["a", "nowhere", "d"]))
        elif kind == "fifo":
            os.mkfifo(path)


def _mode(path: Path) -> int:
    try:
        return path.lstat().st_mode
    except FileNotFoundError:
        return 0


def tree(top: Path, *, flat: bool = False) -> dict[str, object]:
    """What a directory has: ``flat``: only the files."""
    found: dict[str, object] = {}
    for path in sorted(top.rglob("*")):
        name, status = str(path.relative_to(top)), path.lstat()
        if stat.S_ISREG(status.st_mode):
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            found[name] = digest if flat else (digest, status.st_mode, status.st_mtime_ns)
        elif not flat:
            target = os.readlink(path) if path.is_symlink() else ""
            found[name] = (stat.S_IFMT(status.st_mode), target)
    return found


@pytest.fixture(scope="module")
def hub() -> Iterator[WebServer]:
    with web_server() as server:
        yield server


@pytest.fixture(scope="module")
def s3(session: Session, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    with s3_server(tmp_path_factory.mktemp("s3")) as running:
        running.client.create_bucket(Bucket="models")
        yield running


@dataclass
class Routes:
    """The ways from a source to its copy. Each makes the copy, and returns whether the command says that it has."""

    root: Path  # on a mount
    host: Path  # not on one
    s3: S3
    hub: WebServer
    shell: Path
    rounds: int = 0
    output: str = ""
    again: Callable[[], CompletedProcess[str]] = field(init=False)  # the last command

    def run(self, *words: object, env: dict[str, str] | None = None) -> bool:
        self.rounds += 1
        command = ("sync", "--delete", "--json", *words)
        # The Hub's client reads its environment once.
        self.again = (
            partial(gpufs, *command, env=env, check=False) if env else partial(gpufs_here, *command, check=False)
        )
        done = self.again()
        self.output = done.stderr
        return done.returncode == 0

    def local(self, source: Path) -> tuple[bool, Path]:
        return self.run(source, self.root / "copy"), self.root / "copy"

    def back(self, source: Path) -> tuple[bool, Path]:
        return self.run(self._on_mount(source), self.host / "copy"), self.host / "copy"

    def mounts(self, source: Path) -> tuple[bool, Path]:
        return self.run(self._on_mount(source), self.root / "copy"), self.root / "copy"

    def to_host(self, source: Path) -> tuple[bool, Path]:
        remote = ("-e", self.shell, "--remote-gpufs", GPUFS[0])
        return self.run(*remote, source, f"node2:{self.root}/copy"), self.root / "copy"

    def from_host(self, source: Path) -> tuple[bool, Path]:
        remote = ("-e", self.shell, "--remote-gpufs", GPUFS[0])
        return self.run(*remote, f"node2:{self._on_mount(source)}", self.host / "copy"), self.host / "copy"

    def from_s3(self, source: Path) -> tuple[bool, Path]:
        prefix = self._upload(source, f"tune{self.rounds % 2}")
        return self.run(prefix, self.root / "copy"), self.root / "copy"

    def to_s3(self, source: Path) -> tuple[bool, Path]:
        done = self.run(self._on_mount(source), "s3://models/up")
        copy = self.host / "stored"
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir()
        for key in self._keys("up/"):
            path = copy / key.removeprefix("up/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.s3.client.get_object(Bucket="models", Key=key)["Body"].read())
        return done, copy

    def from_hub(self, source: Path) -> tuple[bool, Path]:
        """Two repositories, whose newest revisions come and go."""
        name = f"org/m{self.rounds % 2}"
        files = {str(path.relative_to(source)): path.read_bytes() for path in source.rglob("*") if path.is_file()}
        self.hub.models[name] = Model(files, lfs=tuple(name for name in files if len(files[name]) > 5))
        return self._of_hub(f"hf://{name}", HF_ENDPOINT=self.hub.url)

    def from_cache(self, source: Path) -> tuple[bool, Path]:
        """Two revisions in the cache of the Hub, without a network."""
        revision = f"v{self.rounds % 2}"
        folder = self.host / "hf/hub/models--org--cached"
        shutil.rmtree(folder / "snapshots" / revision, ignore_errors=True)
        for path in source.rglob("*"):
            if path.is_file():
                data = path.read_bytes()
                blob = folder / "blobs" / hashlib.sha256(data).hexdigest()
                blob.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, blob)
                link = folder / "snapshots" / revision / path.relative_to(source)
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(blob)
        return self._of_hub(f"hf://org/cached@{revision}", HF_HUB_OFFLINE="1")

    def _of_hub(self, url: str, **variables: str) -> tuple[bool, Path]:
        environment = {**os.environ, "HF_HOME": str(self.host / "hf"), **variables}
        return self.run(url, self.root / "copy", env=environment), self.root / "copy"

    def _on_mount(self, source: Path) -> Path:
        staged = self.root / "staged"
        remove_tree(staged)
        shutil.rmtree(staged, ignore_errors=True)
        shutil.copytree(source, staged, symlinks=True, copy_function=shutil.copy2, ignore=_fifos)
        for path in source.rglob("*"):
            if stat.S_ISFIFO(path.lstat().st_mode):
                os.mkfifo(staged / path.relative_to(source))
        return staged

    def _upload(self, source: Path, prefix: str) -> str:
        for key in self._keys(f"{prefix}/"):
            self.s3.client.delete_object(Bucket="models", Key=key)
        for path in source.rglob("*"):
            if path.is_file():
                self.s3.client.put_object(
                    Bucket="models", Key=f"{prefix}/{path.relative_to(source)}", Body=path.read_bytes()
                )
        return f"s3://models/{prefix}"

    def _keys(self, prefix: str) -> list[str]:
        found = self.s3.client.list_objects_v2(Bucket="models", Prefix=prefix).get("Contents", [])
        return [entry["Key"] for entry in found]


def _fifos(directory: str, names: list[str]) -> list[str]:
    return [name for name in names if stat.S_ISFIFO(os.lstat(os.path.join(directory, name)).st_mode)]


STORES = ("from_s3", "to_s3", "from_hub", "from_cache")
ROUTES = ("local", "back", "mounts", "to_host", "from_host", *STORES)


@pytest.fixture
def routes(
    root: Path, tmp_path: Path, session: Session, s3: S3, hub: WebServer, monkeypatch: pytest.MonkeyPatch
) -> Routes:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "host").mkdir()
    shell = script(session.scratch / "rsh", '#!/bin/sh\nshift\nexec "$@"\n')
    return Routes(root, tmp_path / "host", s3, hub, shell)


def check(routes: Routes, route: str, top: Path, seed: int, rounds: int) -> None:
    """Change both sides, and sync, again and again."""
    flat, left_out = route in STORES, {"to_host": ("fifo",), "from_host": ("fifo",)}.get(route, ())
    change, source = Change(seed, ("link", "fifo", "mode") if flat else left_out), top / f"source{seed}"
    go: Callable[[Path], tuple[bool, Path]] = getattr(routes, route)
    for number in range(rounds):
        change.change(source)
        if flat and not any(path.is_file() for path in source.rglob("*")):
            continue  # a store has no empty directory
        done, copy = go(source)
        assert done, (route, seed, number, routes.output)
        assert tree(copy, flat=flat) == tree(source, flat=flat), (route, seed, number)
        assert json.loads(routes.again().stdout)["files"] == 0
        if route != "to_s3" and number % 2:
            with suppress(OSError):
                change.change(copy, times=False)


@pytest.mark.parametrize("route", ROUTES)
def test_both_sides_are_equal_afterwards(routes: Routes, tmp_path: Path, route: str) -> None:
    check(routes, route, tmp_path, seed=1, rounds=4)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("route", ROUTES)
def test_many_pairs_of_trees(routes: Routes, tmp_path: Path, route: str) -> None:
    for seed in range(12):
        check(routes, route, tmp_path, seed, rounds=10)
