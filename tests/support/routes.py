"""The routes of a copy: how a test puts a source there, runs the command as a user would, and reads the copies."""

from __future__ import annotations

import hashlib
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

from support.cli import gpufs_here
from support.data import contents, remove_tree
from support.mounting import GPUFS, GpufsMount
from support.processes import PATIENCE
from support.stores import S3, Model, WebServer

BUCKET: Final = "models"


@dataclass(frozen=True)
class World:
    """Where sources are, on a mount and on a disk; where copies go, which has less space; stores; a shell for hosts."""

    sources: GpufsMount
    files: Path
    mount: GpufsMount
    disk: Path
    s3: S3
    web: WebServer
    shell: Path


class Route:
    """From a directory of this machine onto a mount. The others differ in what they override.

    ``words``: of the command, before its names. ``keep``: options with which attributes are kept. ``one_file``: the
    source is the file "model". ``replaces``: an existing file stays as it is until the new one is complete;
    ``is_whole``: all files do, until all are complete.
    """

    words: ClassVar[tuple[object, ...]] = ("sync",)
    keep: ClassVar[tuple[str, ...]] = ()
    one_file: ClassVar[bool] = False
    replaces: ClassVar[bool] = True
    is_whole: ClassVar[bool] = False

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self._count = 0
        self.tops = [path / name for path in (world.files, world.sources.device, world.disk, *devices(world.mount))]
        for path in self.tops:
            path.mkdir()
        self.files, self.stored, self.disk, self.gpu0, self.gpu1 = self.tops
        self.source, self.copy = self.files / "source", self.gpu0 / "copy"
        self.variables: dict[str, str] = {}  # of the command
        self.place()
        self.source.mkdir()

    def place(self) -> None:
        """Choose where the source and the copy are."""

    def names(self) -> list[object]:
        """The source and the destination, as the command gets them."""
        return [self.source, self.copy]

    @property
    def directories(self) -> list[Path]:
        """The copies of the source; none in a store."""
        return [self.copy]

    def put(self, files: dict[str, bytes]) -> None:
        """Make these the files of the source. Those of one size have different times, as after all real programs."""
        for name in contents(self.source).keys() - files.keys():
            (self.source / name).unlink()
        for path in sorted(self.source.rglob("*"), reverse=True):
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()
        for name, data in files.items():
            path = self.source / name
            if not path.exists() or path.read_bytes() != data:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
                self._count -= 1  # a version that is wanted may be older
                os.utime(path, ns=(10**18 + self._count,) * 2)

    def copies(self) -> list[dict[str, bytes]]:
        """The files of each copy."""
        return [contents(path) for path in self.directories]

    def run(self, *options: str) -> subprocess.CompletedProcess[str]:
        """Run the command to its end."""
        return gpufs_here(*self.words, *options, *self.names(), check=False)

    def start(self, *options: str, **more: Any) -> subprocess.Popen[str]:
        """Start the command."""
        words = [str(word) for word in (*self.words, *options, *self.names())]
        environment = {**os.environ, **self.variables}
        return subprocess.Popen([*GPUFS, *words], stderr=subprocess.PIPE, text=True, env=environment, **more)

    def leftovers(self) -> list[str]:
        """What is beside the copies."""
        found = [path for top in (self.disk, self.gpu0, self.gpu1) for path in top.iterdir()]
        return [str(path) for path in found if path not in (self.copy, *self.directories)]

    def remove(self) -> None:
        """Remove all but what a store has."""
        for path in self.tops:
            remove_tree(path)


class _OwnProcess(Route):
    """It needs variables or standard streams of its own."""

    def run(self, *options: str) -> subprocess.CompletedProcess[str]:
        with self.start(*options, stdout=subprocess.PIPE) as child:
            output, errors = child.communicate(timeout=PATIENCE)
        return subprocess.CompletedProcess(child.args, child.returncode, output, errors)


class Local(Route):
    pass


class Back(Route):
    def place(self) -> None:
        self.source, self.copy = self.stored / "source", self.disk / "copy"


class Mount(Route):
    def place(self) -> None:
        self.source = self.stored / "source"


class TwoDevices(Route):
    words = ("cp", "-ru")
    keep = ("-p",)
    replaces = False

    def names(self) -> list[object]:
        return [self.source, "-t", self.gpu0, "-t", self.gpu1]

    @property
    def directories(self) -> list[Path]:
        return [self.gpu0 / "source", self.gpu1 / "source"]


class FromS3(Route):
    def names(self) -> list[object]:
        return [f"s3://{BUCKET}/{self.name}", self.copy]

    def put(self, files: dict[str, bytes]) -> None:
        there = objects(self.world.s3, self.name)
        for name in there.keys() - files.keys():
            self.world.s3.client.delete_object(Bucket=BUCKET, Key=f"{self.name}/{name}")
        for name, data in files.items():
            if there.get(name) != data:
                self.world.s3.client.put_object(Bucket=BUCKET, Key=f"{self.name}/{name}", Body=data)


class ToS3(Mount):
    def names(self) -> list[object]:
        return [self.source, f"s3://{BUCKET}/{self.name}"]

    @property
    def directories(self) -> list[Path]:
        return []

    def copies(self) -> list[dict[str, bytes]]:
        return [objects(self.world.s3, self.name)]

    def leftovers(self) -> list[str]:
        """Uploads that were begun, which this ends."""
        found = self.world.s3.client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])
        for one in found:
            self.world.s3.client.abort_multipart_upload(Bucket=BUCKET, Key=one["Key"], UploadId=one["UploadId"])
        return [one["Key"] for one in found]


class Hub(_OwnProcess):
    """The Hub's library reads its variables once."""

    def place(self) -> None:
        self.variables = {"HF_ENDPOINT": self.world.web.url, "HF_HOME": str(self.files)}

    def names(self) -> list[object]:
        return [f"hf://org/{self.name}", self.copy]

    def put(self, files: dict[str, bytes]) -> None:
        self.world.web.models[f"org/{self.name}"] = Model(files, lfs=tuple(name for name in files if "m" in name))


class HubCache(Hub):
    def place(self) -> None:
        self.variables = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(self.files)}

    def names(self) -> list[object]:
        return [f"hf://org/{self.name}@main", self.copy]

    def put(self, files: dict[str, bytes]) -> None:
        revision = self.files / f"hub/models--org--{self.name}/snapshots/main"
        revision.mkdir(parents=True, exist_ok=True)
        remove_tree(revision)
        for name, data in files.items():
            blob, link = revision.parents[1] / "blobs" / hashlib.sha256(data).hexdigest(), revision / name
            for path in (blob, link):
                path.parent.mkdir(parents=True, exist_ok=True)
            blob.write_bytes(data)
            link.symlink_to(blob)


class Web(Route):
    words = ("cp", "-u")
    one_file = True

    def place(self) -> None:
        self.copy.mkdir()

    def names(self) -> list[object]:
        return [f"{self.world.web.url}/{self.name}/model", self.copy]

    def put(self, files: dict[str, bytes]) -> None:
        self.world.web.files[f"/{self.name}/model"] = files["model"]


class ToHost(Route):
    def names(self) -> list[object]:
        return [*remote(self.world), self.source, f"node:{self.copy}"]


class FromHost(Back):
    def names(self) -> list[object]:
        return [*remote(self.world), f"node:{self.source}", self.copy]


class Chain(TwoDevices):
    replaces = True

    def names(self) -> list[object]:
        return [*remote(self.world), self.source, "-t", f"n0:{self.gpu0}", "-t", f"n1:{self.gpu1}"]


class Save(Back):
    words = ("save",)
    is_whole = True

    def copies(self) -> list[dict[str, bytes]]:
        return [contents(self.copy / "tree")]


class Restore(Mount):
    words = ("restore", "--overwrite")

    def names(self) -> list[object]:
        gpufs_here("save", self.source, self.files / "save")
        return [self.files / "save", self.copy]


class StreamIn(_OwnProcess):
    words = ("cp",)
    one_file = True
    replaces = False

    def place(self) -> None:
        self.copy.mkdir()

    def names(self) -> list[object]:
        return ["-", self.copy / "model"]

    def start(self, *options: str, **more: Any) -> subprocess.Popen[str]:
        with open(self.source / "model", "rb") as file:
            return super().start(*options, stdin=file, **more)


class StreamOut(_OwnProcess):
    words = ("cp",)
    one_file = True

    def place(self) -> None:
        self.source, self.copy = self.stored / "source", self.disk / "copy"
        self.copy.mkdir()

    def names(self) -> list[object]:
        return [self.source / "model", "-"]

    def start(self, *options: str, **more: Any) -> subprocess.Popen[str]:
        with open(self.copy / "model", "wb") as file:
            return super().start(*options, **{**more, "stdout": file})


def devices(mount: GpufsMount) -> list[Path]:
    """The directories of its two devices."""
    return [mount.path / "gpu0", mount.path / "gpu1"]


def remote(world: World) -> tuple[object, ...]:
    """The options that make any host this machine."""
    return ("-e", world.shell, "--remote-gpufs", GPUFS[0])


def objects(s3: S3, prefix: str) -> dict[str, bytes]:
    """The objects below a prefix, by their names there."""
    listed = s3.client.list_objects_v2(Bucket=BUCKET, Prefix=f"{prefix}/").get("Contents", [])
    return {
        entry["Key"].removeprefix(f"{prefix}/"): s3.client.get_object(Bucket=BUCKET, Key=entry["Key"])["Body"].read()
        for entry in listed
    }


ROUTES: Final[dict[str, type[Route]]] = {
    "local": Local,
    "back": Back,
    "mount": Mount,
    "two devices": TwoDevices,
    "from S3": FromS3,
    "to S3": ToS3,
    "Hub": Hub,
    "Hub's cache": HubCache,
    "web": Web,
    "to HOST": ToHost,
    "from HOST": FromHost,
    "chain": Chain,
    "save": Save,
    "restore": Restore,
    "stream in": StreamIn,
    "stream out": StreamOut,
}
