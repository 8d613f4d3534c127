"""New versions of a model of several files: `gpufs replace NEWDIR DIR`, and programs that follow the directory."""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from errno import EINVAL, ENOENT, EXDEV
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.cli import gpufs as command
from support.data import MIB, directory
from support.processes import NOBODY, errno_of, wait_until
from support.surviving import Survivor, mounted

import gpufs
import gpufs.torch

pytestmark = pytest.mark.driver

SHARDS = 3
INDEX = "model.safetensors.index.json"
ELEMENTS = MIB  # of each tensor: 4 MiB, more than a granule
TENSORS = [f"{shard}.weight" for shard in range(SHARDS)]


def name_of(shard: int) -> str:
    return f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors"


def write(folder: Path, number: int, elements: int = ELEMENTS) -> Path:
    """A model with the number in every element of every file."""
    folder.mkdir(exist_ok=True)
    for shard in range(SHARDS):
        tensors = {f"{shard}.weight": torch.full((elements,), float(number))}
        save_file(tensors, folder / name_of(shard), {"step": f"{number:06}"})
    places = {f"{shard}.weight": name_of(shard) for shard in range(SHARDS)}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for shard in range(SHARDS):
            layer = torch.nn.Module()
            layer.weight = torch.nn.Parameter(torch.empty(ELEMENTS))
            self.add_module(str(shard), layer)

    def forward(self) -> list[float]:
        """What every element of each file is."""
        return [value for each in self.parameters() for value in (float(each.min()), float(each.max()))]


def attached(folder: Path) -> Model:
    with torch.device("meta"):
        model = Model()
    return gpufs.torch.attach_module(model, folder)


@pytest.fixture(scope="module")
def place(driver: str) -> Iterator[Survivor]:
    options = ("--hip-memory", "virtual") if driver == "hip" else ("--host-memory", str(64 * MIB))
    with (
        directory("/tmp") as folder,
        mounted(folder / "mnt", "--allow-other", *options, driver=driver, memory=str(128 * MIB)) as made,
    ):
        yield made


@pytest.fixture
def models(place: Survivor) -> Iterator[Path]:
    folder = place.device / "models"
    folder.mkdir()
    yield folder
    gc.collect()
    shutil.rmtree(folder)
    wait_until(lambda: not place.report()["devices"][0]["held_bytes"], 20, "the end of all memory")


def test_a_model_becomes_the_newest_version_of_its_directory(models: Path) -> None:
    current, new = write(models / "policy", 1), write(models / "new", 2)
    model = attached(current)
    follower = gpufs.torch.follow(model)
    addresses = [each.data_ptr() for each in model.parameters()]
    assert set(model()) == {1.0}
    assert f"{new} is the version before" in command("replace", new, current).stdout
    assert set(model()) == {2.0}
    assert [each.data_ptr() for each in model.parameters()] == addresses
    assert (follower.version, follower.metadata["step"], follower.path) == (1, "000002", str(current))
    gpufs.replace(new, current)  # back
    assert set(model()) == {1.0}
    # By a link, as trainers have it, and by hard links of what has not changed.
    (models / "stable").symlink_to("policy")
    other = attached(models / "stable")
    with gpufs.torch.follow(other, on_forward=False) as others:
        third = models / "third"
        third.mkdir()
        for file in current.iterdir():
            os.link(file, third / file.name)
        (third / name_of(0)).unlink()
        save_file({"0.weight": torch.full((ELEMENTS,), 3.0)}, third / name_of(0), {"step": "000003"})
        (models / "link").symlink_to("third")
        (models / "link").rename(models / "stable")
        assert others.update()
        assert other() == [3.0, 3.0, 1.0, 1.0, 1.0, 1.0]
        assert not others.update()
    assert set(model()) == {1.0}
    follower.close()


def test_part_of_a_model_follows_with_the_whole(models: Path) -> None:
    current, new = write(models / "policy", 1), write(models / "new", 2)
    model = attached(current)
    whole = gpufs.torch.follow(model, on_forward=False)
    one = gpufs.torch.follow(next(model.parameters()))
    gpufs.replace(new, current)
    assert one.update()
    assert set(model()) == {2.0}
    assert whole.version == 1
    assert not whole.update()


def test_other_versions_are_refused_before_anything_changes(models: Path, place: Survivor, tmp_path: Path) -> None:
    current, new = write(models / "policy", 1), models / "new"
    model = attached(current)
    follower = gpufs.torch.follow(model, on_forward=False)

    def refused(*words: str) -> None:
        """The new version is refused by replace, and by a program if it is put there all the same."""
        with pytest.raises(ValueError) as error:
            gpufs.replace(new, current)
        assert all(word in str(error.value) for word in words), error.value
        current.rename(models / "old")
        new.rename(current)
        with pytest.raises(ValueError) as error:
            follower.update()
        assert words[0] in str(error.value)
        assert (follower.version, set(model())) == (0, {1.0})
        current.rename(new)
        (models / "old").rename(current)
        assert not follower.update()
        shutil.rmtree(new)

    write(new, 2, ELEMENTS // 2)
    refused("0.weight")
    write(new, 2)
    save_file({"2.weight": torch.full((ELEMENTS + 1,), 2.0)}, new / name_of(2), {"step": "000002"})
    refused("2.weight")
    write(new, 2)
    places = json.loads((new / INDEX).read_text())
    places["weight_map"]["0.bias"] = "more.safetensors"
    (new / INDEX).write_text(json.dumps(places))
    refused("more.safetensors")
    write(new, 2)
    (new / name_of(1)).unlink()
    with pytest.raises(OSError) as missing:
        gpufs.replace(new, current)
    assert (missing.value.errno, missing.value.filename) == (ENOENT, str(new / name_of(1)))
    current.rename(models / "old")
    new.rename(current)
    with pytest.raises(ValueError, match=name_of(1)):
        follower.update()
    assert (follower.version, set(model())) == (0, {1.0})
    current.rename(new)
    assert not follower.update()  # the name is gone
    (models / "old").rename(current)
    (new / name_of(1)).symlink_to(current / name_of(1))
    assert errno_of(gpufs.replace, new, current) == EINVAL
    outside = write(tmp_path / "outside", 2)
    assert errno_of(gpufs.replace, outside, current) == EXDEV
    assert errno_of(gpufs.replace, current / name_of(0), current) == EINVAL
    assert errno_of(gpufs.replace, current, current) == EINVAL
    (models / "empty").mkdir()
    assert errno_of(gpufs.replace, models / "empty", current) == ENOENT
    # One file alone would be a mixture of versions.
    (current / "alone").write_bytes((outside / name_of(1)).read_bytes())
    (current / "alone").rename(current / name_of(1))
    with pytest.raises(ValueError, match="alone"):
        follower.update()
    assert set(model()) == {1.0}


def test_a_version_keeps_owners_modes_and_pins(models: Path) -> None:
    current, new = write(models / "policy", 1), write(models / "new", 2)
    for path in (current, *current.iterdir()):
        os.chown(path, NOBODY, NOBODY)
        path.chmod(0o750 if path == current else 0o640)
    command("pin", current)
    command("replace", new, current)
    assert float(gpufs.torch.load_file(current)["0.weight"][0]) == 2.0
    for path in (current, *(current / name_of(shard) for shard in range(SHARDS))):
        status = path.stat()
        assert (status.st_uid, status.st_mode & 0o777) == (NOBODY, 0o750 if path == current else 0o640)
        assert path == current or os.listxattr(path)


def test_a_sleeping_model_wakes_with_the_newest_version(models: Path, driver: str) -> None:
    if driver == "hip":
        pytest.skip("memory of an AMD GPU has no host0 here")
    current, new = write(models / "policy", 1), write(models / "new", 2)
    model = attached(current)
    with gpufs.torch.follow(model, on_forward=False) as follower:
        gpufs.torch.sleep(model)
        gpufs.replace(new, current)
        assert not follower.update()
        gpufs.torch.wake(model)
        assert (set(model()), follower.version) == ({2.0}, 1)


# Publishes versions argv[3] and later of argv[1], by argv[2], until it is killed.
PUBLISH = f"""
import itertools, os, sys
import gpufs, torch
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from test_model_versions import write
current, new = Path(sys.argv[1]), Path(sys.argv[2])
print("ready", flush=True)
for number in itertools.count(int(sys.argv[3])):
    write(new, number)
    gpufs.replace(new, current)
    print(number, flush=True)
"""


def campaign(models: Path, place: Survivor, versions: int, seed: int, life: float = 3) -> None:
    """Versions beside two followers, with kills of publisher and daemon: none is torn between files."""
    dice = random.Random(seed)
    current, new = write(models / "policy", 1), models / "new"
    both = [attached(current) for _ in range(2)]
    followers = [gpufs.torch.follow(model, on_forward=False) for model in both]
    number, last = 2, 1.0
    while number < versions:
        command_line = [sys.executable, "-c", PUBLISH, str(current), str(new), str(number)]
        with subprocess.Popen(command_line, stdout=subprocess.PIPE, text=True) as publisher:
            try:
                assert publisher.stdout is not None
                assert publisher.stdout.readline() == "ready\n"
                end = time.monotonic() + dice.uniform(0.5, life)
                kill_daemon = time.monotonic() + dice.uniform(0.2, 2 * life)
                while time.monotonic() < end:
                    if time.monotonic() > kill_daemon:
                        place.kill()
                        kill_daemon = end + 1
                    for model, follower in zip(both, followers, strict=True):
                        follower.update()
                        values = set(model())
                        assert len(values) == 1, values
                        assert values == {float(follower.metadata["step"])}
                        last = max(last, *values)
            finally:
                publisher.send_signal(signal.SIGKILL)
        number = int(last) + 1
        shutil.rmtree(new, ignore_errors=True)
    for follower, model in zip(followers, both, strict=True):
        follower.update()
        assert set(model()) == {float(gpufs.torch.load_file(current)["0.weight"][0])}


def test_no_version_is_torn_between_files(models: Path, place: Survivor) -> None:
    campaign(models, place, versions=8, seed=1)


@pytest.mark.slow
def test_a_thousand_versions_of_a_model_of_several_files(models: Path, place: Survivor) -> None:
    campaign(models, place, versions=1000, seed=2, life=20)
