"""New versions of a file in place: `gpufs replace`, and programs that follow the file."""

from __future__ import annotations

import copy
import gc
import inspect
import json
import logging
import os
import pickle
import random
import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from errno import EBUSY, EINVAL, ENOENT, ENOSPC, EXDEV
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from support.attaching import program
from support.cli import gpufs as command
from support.cli import user_gpufs
from support.data import MIB, directory
from support.mounting import REPOSITORY, GpufsMount, Mounter
from support.processes import NOBODY, PATIENCE, errno_of, wait_until
from support.surviving import Survivor, mounted

import gpufs
import gpufs.torch

pytestmark = pytest.mark.driver

START = 4096  # of the tensors
WORDS = (MIB // 2, MIB // 8 + 5, 3)  # of each tensor
SIZE = START + 4 * sum(WORDS)
HELD = 4 * MIB  # by each version
TWO_VERSIONS = 10 * MIB
# Memory of an AMD GPU that is one allocation cannot be shared, and its driver has no host memory for files.
SHARED = {"hip": ("--hip-memory", "virtual")}


def version(number: int, words: tuple[int, ...] = WORDS, **metadata: str) -> bytes:
    """A safetensors file with the number in every word of every tensor."""
    header: dict[str, object] = {"__metadata__": {"step": str(number), **metadata}}
    end = 0
    for count in words:
        header[f"tensor{len(header)}"] = {"dtype": "U32", "shape": [count], "data_offsets": [end, end + 4 * count]}
        end += 4 * count
    text = json.dumps(header).encode().ljust(START - 8)
    return len(text).to_bytes(8, "little") + text + numpy.full(sum(words), number, "<u4").tobytes()


def number_in(content: bytes) -> int:
    """The number of the version. AssertionError if it is a mixture of several."""
    words = numpy.frombuffer(content[START:], "<u4")
    assert int(words.min()) == int(words.max())
    return int(words[0])


def publish(path: Path, number: int) -> None:
    new = path.with_name("new")
    new.write_bytes(version(number))
    gpufs.replace(new, path)


# Publishes versions argv[2] to argv[3] of argv[1].
PUBLISH = f"""
from __future__ import annotations
import errno, json, sys, time
from pathlib import Path
import gpufs, numpy
START, WORDS = {START}, {WORDS}
{inspect.getsource(version)}
path, first, last = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
new = path.with_name("new")
print("ready", flush=True)
for number in range(first, last):
    content = version(number)
    while True:
        try:
            new.write_bytes(content)
            break
        except OSError as error:  # followers still have the version before the last one
            assert error.errno == errno.ENOSPC
            time.sleep(0.002)
    gpufs.replace(new, path)
"""

# Follows argv[1]. For each line on standard input: updates, and prints whether that changed anything, and the numbers.
FOLLOW = """
import gpufs, numpy, sys
array = gpufs.attach(sys.argv[1])
follower = gpufs.follow(array)
print("ready", flush=True)
for line in sys.stdin:
    changed = follower.update()
    words = numpy.frombuffer(array.tobytes()[4096:], "<u4")
    print(changed, words.min(), words.max(), follower.metadata["step"], array.private, flush=True)
"""


def answer(follower: subprocess.Popen[str]) -> list[str]:
    assert follower.stdin is not None
    assert follower.stdout is not None
    follower.stdin.write("\n")
    follower.stdin.flush()
    return follower.stdout.readline().split()


@pytest.fixture(scope="module")
def place(driver: str) -> Iterator[Survivor]:
    """A mount that survives its daemon, with memory for two versions."""
    options = SHARED.get(driver, ("--host-memory", str(TWO_VERSIONS)))
    memory = str(TWO_VERSIONS)
    with (
        directory("/tmp") as folder,
        mounted(folder / "mnt", "--allow-other", *options, driver=driver, memory=memory) as made,
    ):
        yield made


@pytest.fixture
def file(place: Survivor) -> Iterator[Path]:
    path = place.device / "weights.safetensors"
    path.write_bytes(version(1))
    yield path
    gc.collect()
    for each in place.device.iterdir():
        each.unlink()
    wait_until(lambda: not place.report()["devices"][0]["held_bytes"], PATIENCE, "the end of all memory")


def versions_held(place: Survivor) -> int:
    return int(place.report()["devices"][0]["held_bytes"]) // HELD


# ---- arrays ----


def test_attached_memory_becomes_that_of_the_newest_version_at_its_address(place: Survivor, file: Path) -> None:
    array = gpufs.attach(file)
    part = array[START:]
    other = gpufs.attach(file, "r+")
    with gpufs.follow(part) as follower:
        assert (follower.update(), follower.version, follower.metadata) == (False, 0, {"step": "1"})
        address = array.address
        publish(file, 2)
        assert number_in(array.tobytes()) == 1
        assert follower.update()
        assert (follower.version, follower.metadata, array.address) == (1, {"step": "2"}, address)
        assert (number_in(array.tobytes()), number_in(other.tobytes()), versions_held(place)) == (2, 1, 2)
        assert not follower.update()
        other.close()
        del other
        for number in range(3, 7):
            publish(file, number)
            assert follower.update()
            assert number_in(array.tobytes()) == number
        wait_until(lambda: versions_held(place) == 1, PATIENCE, "the end of the old versions")
        file.unlink()
        assert not follower.update()
        assert number_in(array.tobytes()) == 6
    with pytest.raises(ValueError):
        follower.update()
    array.close()


def test_no_version_is_torn_and_memory_holds_two(place: Survivor, file: Path) -> None:
    """The device has memory for two versions. The publisher waits for it."""
    array = gpufs.attach(file)
    follower = gpufs.follow(array)
    with program(PUBLISH, file, 2, 16) as publisher:
        seen = [1]
        deadline = time.monotonic() + PATIENCE
        while seen[-1] < 15 and time.monotonic() < deadline:
            if follower.update():
                seen.append(number_in(array.tobytes()))
                assert seen[-1] == int(follower.metadata["step"]) > seen[-2]
            time.sleep(0.001)
        assert publisher.wait(PATIENCE) == 0
    assert seen[-1] == 15
    assert len(seen) == follower.version + 1 > 5
    array.close()
    follower.close()


def test_two_programs_follow_and_a_third_does_not(file: Path) -> None:
    array = gpufs.attach(file)
    with program(FOLLOW, file) as first, program(FOLLOW, file) as second:
        publish(file, 2)
        assert answer(first)[:4] == ["True", "2", "2", "2"]
        assert answer(second)[:4] == ["True", "2", "2", "2"]
        assert number_in(array.tobytes()) == 1
        array.close()
        del array
        gc.collect()
        publish(file, 3)
        assert answer(second)[:4] == ["True", "3", "3", "3"]
        assert answer(first)[:4] == ["True", "3", "3", "3"]
        assert answer(first)[:4] == ["False", "3", "3", "3"]


def test_a_program_that_may_only_read_follows(file: Path, driver: str) -> None:
    (python, *_), environment = user_gpufs({"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"})
    identity = {"user": NOBODY, "group": NOBODY, "extra_groups": [], "cwd": "/"}
    with program(FOLLOW, file, executable=python, env=environment, **identity) as follower:
        private = str(driver != "host")
        assert answer(follower) == ["False", "1", "1", "1", private]
        if driver == "host":
            publish(file, 2)
            assert answer(follower) == ["True", "2", "2", "2", private]


def test_a_private_copy_needs_memory_for_a_second_one(mount: Mounter, driver: str) -> None:
    if driver == "host":
        pytest.skip("programs that may only read share the host's memory")
    script = FOLLOW.replace("changed = follower.update()", "changed = attempt()")
    script = script.replace(
        'print("ready"',
        "def attempt():\n    try:\n        return follower.update()\n    except OSError as error:\n"
        '        return error.errno\nprint("ready"',
    )
    (python, *_), environment = user_gpufs({"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"})
    identity = {"user": NOBODY, "group": NOBODY, "extra_groups": [], "cwd": "/"}
    with mount(*SHARED.get(driver, ()), memory=16 * MIB, allow_other=True) as made:
        path = made.device / "weights.safetensors"
        path.write_bytes(version(1))
        with program(script, path, executable=python, env=environment, **identity) as follower:
            publish(path, 2)
            assert answer(follower) == ["True", "2", "2", "2", "True"]
            publish(path, 3)
            filler = made.device / "filler"
            filler.write_bytes(bytes(5 * MIB))
            assert answer(follower) == [str(ENOSPC), "2", "2", "2", "True"]
            filler.unlink()
            assert answer(follower) == ["True", "3", "3", "3", "True"]


def test_another_layout_is_refused_and_the_old_version_stays(place: Survivor, file: Path) -> None:
    array = gpufs.attach(file)
    follower = gpufs.follow(array)
    new = file.with_name("new")
    moved = (WORDS[1], WORDS[0], WORDS[2])
    for content, told in (
        (version(2, moved), "tensor1"),
        (version(2, WORDS[:2]), "tensor3"),
        (version(2, (*WORDS, 1)), "tensor4"),
        (version(2)[:-4], "end at"),
        (version(2).replace(b'"U32"', b'"I32"', 1), "I32"),
        (version(2, gpufs='{"a": {"entry": "tensor2", "shape": [9], "strides": [1]}}'), "'a'"),
        (b"x" * SIZE, "header"),
    ):
        new.write_bytes(content)
        with pytest.raises(ValueError, match=told):
            gpufs.replace(new, file)
        done = command("replace", new, file, check=False)
        assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
        assert number_in(file.read_bytes()) == 1
        os.rename(new, file)  # what nobody checks
        for _ in range(2):
            with pytest.raises(ValueError, match=told):
                follower.update()
            assert (number_in(array.tobytes()), follower.version) == (1, 0)
        file.unlink()
        file.write_bytes(version(1))
        assert follower.update()
        follower = gpufs.follow(array)
    publish(file, 2)
    assert follower.update()
    assert number_in(array.tobytes()) == 2
    array.close()
    follower.close()


def test_a_longer_header_moves_the_tensors_and_other_formats_count_too(place: Survivor, file: Path) -> None:
    text = version(2)[8 : 8 + START - 8]
    longer = text + bytes(8).replace(b"\0", b" ")
    new = file.with_name("new")
    new.write_bytes(len(longer).to_bytes(8, "little") + longer + version(2)[START:])
    with pytest.raises(ValueError, match="header"):
        gpufs.replace(new, file)
    new.unlink()
    # numpy ignores that a file does not fit.
    wait_until(lambda: versions_held(place) == 1, PATIENCE, "its memory")
    array, other = file.with_name("a.npy"), file.with_name("b.npy")
    with open(array, "wb") as one, open(other, "wb") as two:
        numpy.save(one, numpy.zeros((10, 20), "f4"))
        numpy.save(two, numpy.zeros((20, 10), "f4"))
    with pytest.raises(ValueError, match="20x10"):
        gpufs.replace(other, array)
    plain = file.with_name("plain")
    plain.write_bytes(b"12345")
    new.write_bytes(b"1234")
    with pytest.raises(ValueError, match="4"):
        gpufs.replace(new, plain)
    new.write_bytes(b"54321")
    gpufs.replace(new, plain)
    assert (plain.read_bytes(), new.exists()) == (b"54321", False)


def test_a_new_version_keeps_owner_and_mode_and_wrong_files_are_refused(
    place: Survivor, file: Path, tmp_path: Path, driver: str
) -> None:
    new, link = (place.device / name for name in ("new", "link"))
    file.write_bytes(b"old")
    file = file.rename(file.with_name("file"))
    file.chmod(0o640)
    os.chown(file, NOBODY, NOBODY)
    link.symlink_to(file.name)
    new.write_bytes(b"new")
    command("replace", new, link)
    assert (link.is_symlink(), file.read_bytes(), new.exists()) == (True, b"new", False)
    status = file.stat()
    assert (status.st_mode & 0o7777, status.st_uid, status.st_gid) == (0o640, NOBODY, NOBODY)
    outside = tmp_path / "outside"
    outside.write_bytes(b"out")
    assert errno_of(gpufs.replace, outside, file) == errno_of(gpufs.replace, file, outside) == EXDEV
    assert errno_of(gpufs.replace, file, file) == errno_of(gpufs.replace, link, file) == EINVAL
    assert errno_of(gpufs.replace, place.device, file) == errno_of(gpufs.replace, f"{place.device}/", file) == EINVAL
    assert errno_of(gpufs.replace, file, new) == errno_of(gpufs.replace, new, file) == ENOENT
    if driver != "hip":
        other = place.path / "host0" / "other"
        other.write_bytes(b"new")
        assert errno_of(gpufs.replace, other, file) == EXDEV
        other.unlink()
    assert file.read_bytes() == b"new"


@pytest.mark.skipif(shutil.which("setfacl") is None, reason="needs the package acl")
def test_a_new_version_keeps_access_list_and_pin(place: Survivor) -> None:
    """The mask of the list became rights of the group, and a full device parked the new version of a pinned file."""
    first, new = place.device / "first", place.device / "new"
    first.write_bytes(b"1")
    first.chmod(0o600)
    subprocess.run(["setfacl", "-m", f"u:{NOBODY}:rw", first], check=True)
    command("pin", first)

    def attributes() -> dict[str, bytes]:
        return {name: os.getxattr(first, name) for name in os.listxattr(first)}

    kept = attributes()
    assert len(kept) == 2
    new.write_bytes(b"2")
    command("replace", new, first)
    assert (first.read_bytes(), attributes()) == (b"2", kept)
    # A file without a list does not get the one that its directory gives to new files.
    second = place.device / "second"
    second.write_bytes(b"1")
    second.chmod(0o640)
    subprocess.run(["setfacl", "-d", "-m", f"u:{NOBODY}:rw", place.device], check=True)
    new.write_bytes(b"2")
    subprocess.run(["setfacl", "-k", place.device], check=True)
    command("replace", new, second)
    assert (os.listxattr(second), second.stat().st_mode & 0o777) == ([], 0o640)
    first.unlink()
    second.unlink()


@pytest.mark.parametrize("swapped", ["before the owner changes", "before the rename"])
def test_only_the_file_that_was_checked_takes_the_name(
    swapped: str, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user who may write into the directory puts a link to another's file where root's new version was."""
    folder = file.with_name("folder")
    folder.mkdir()
    new, victim, moved = folder / "new", tmp_path / "victim", folder / "moved"
    victim.write_bytes(b"secret")
    victim.chmod(0o600)
    new.write_bytes(version(2))
    new.chmod(0o640)
    os.chown(file, NOBODY, NOBODY)
    file.chmod(0o666)
    function = "samestat" if swapped == "before the owner changes" else "rename"
    module = os.path if function == "samestat" else os
    original = getattr(module, function)

    def swap(*arguments: Any, **more: Any) -> Any:  # both files are open by now
        monkeypatch.setattr(module, function, original)
        new.rename(moved)
        new.symlink_to(victim)
        return original(*arguments, **more)

    monkeypatch.setattr(module, function, swap)
    assert errno_of(gpufs.replace, new, file) == EBUSY
    assert (new.is_symlink(), number_in(file.read_bytes()), number_in(moved.read_bytes())) == (True, 1, 2)
    for path, mode in ((victim, 0o600), (moved, 0o640)):
        assert (path.stat().st_uid, path.stat().st_mode & 0o777) == (os.getuid(), mode)
    assert sorted(os.listdir(file.parent)) == ["folder", file.name]
    moved.rename(new)
    gpufs.replace(new, file)
    assert number_in(file.read_bytes()) == 2
    assert not os.listdir(folder)
    folder.rmdir()


def test_a_sleeping_program_wakes_with_the_newest_version(place: Survivor, file: Path, driver: str) -> None:
    if driver == "hip":
        pytest.skip("the HIP driver has no host memory for files")
    array = gpufs.attach(file, "r+")
    follower = gpufs.follow(array)
    gpufs.follow(array).close()  # which ends nothing of the other
    publish(file, 2)
    gpufs.sleep(array)  # the old version has no name, so the newest one sleeps
    assert follower.version == 1
    with pytest.raises(ValueError):
        gpufs.follow(array)
    publish(file, 3)
    assert not follower.update()
    assert gpufs.wake(array) == SIZE
    assert (number_in(array.tobytes()), follower.version, follower.update()) == (3, 2, False)
    wait_until(lambda: not place.report()["devices"][-1]["held_bytes"], PATIENCE, "the end of the parked version")
    gpufs.sleep(array)
    new = file.with_name("new")
    new.write_bytes(version(4, WORDS[:2]))
    os.rename(new, file)
    gpufs.wake(array)
    assert (number_in(array.tobytes()), follower.version) == (3, 2)
    with pytest.raises(ValueError):
        follower.update()
    array.close()
    follower.close()


def test_a_name_means_the_programs_own_version_too(
    place: Survivor, file: Path, driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if driver == "hip":
        pytest.skip("the HIP driver has no host memory for files")
    monkeypatch.chdir(file.parent)
    array = gpufs.attach(file.name, "r+")
    monkeypatch.chdir("/")
    follower = gpufs.follow(array)
    assert (follower.path, array.path) == (str(file), str(file))
    publish(file, 2)
    assert gpufs.sleep(file) == SIZE
    publish(file, 3)
    assert gpufs.wake(file) == SIZE
    assert (number_in(array.tobytes()), follower.version) == (3, 2)
    follower.close()
    gpufs.sleep(file)
    file.rename(file.with_name("moved"))
    assert gpufs.wake(file) == SIZE
    assert number_in(array.tobytes()) == 3
    array.close()


def test_a_daemon_that_is_killed_loses_no_version(place: Survivor, file: Path) -> None:
    array = gpufs.attach(file)
    follower = gpufs.follow(array)
    for number in range(2, 4):
        publish(file, number)
        place.kill()
        assert number_in(array.tobytes()) == number - 1
        assert follower.update()
        place.kill()
        assert number_in(array.tobytes()) == number
    array.close()
    follower.close()


def test_a_publisher_that_is_killed_leaves_a_whole_version(file: Path) -> None:
    array = gpufs.attach(file)
    follower = gpufs.follow(array)
    with program(PUBLISH, file, 2, 10_000) as publisher:
        deadline = time.monotonic() + 0.3
        number = 1
        while number == 1 or time.monotonic() < deadline:
            follower.update()
            number = number_in(array.tobytes())
        publisher.kill()
    follower.update()
    last = number_in(array.tobytes())
    assert last == number_in(file.read_bytes()) > 1
    publish(file, last + 1)
    assert follower.update()
    assert number_in(array.tobytes()) == last + 1
    array.close()
    follower.close()


@pytest.mark.parametrize(("failures", "gone"), [(1, False), (2, False), (2, True)])
def test_a_version_that_cannot_be_mapped_leaves_the_old_one(
    place: Survivor, file: Path, failures: int, gone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure comes after the old memory has been unmapped. The second one is that of mapping the old one again.

    ``gone``: the new version has lost its name when the next try comes.
    """
    left = failures
    array = gpufs.attach(file)
    follower = gpufs.follow(array)
    publish(file, 2)
    add = gpufs.engine.Mapping.add

    def fail(mapping: gpufs.engine.Mapping, pieces: list[gpufs.engine.SharedPiece]) -> None:
        nonlocal left
        left -= 1
        if not left:
            monkeypatch.setattr(gpufs.engine.Mapping, "add", add)
        for piece in pieces:
            os.close(piece.fd)
        raise OSError(ENOSPC, "no")

    monkeypatch.setattr(gpufs.engine.Mapping, "add", fail)
    assert errno_of(follower.update) == ENOSPC
    assert (follower.version, follower.is_whole) == (0, failures == 1)
    leases = json.loads((place.device.parent / ".gpufs" / "leases").read_text())["leases"]
    assert file.stat().st_ino not in [lease["inode"] for lease in leases]
    assert failures == 2 or number_in(array.tobytes()) == 1
    if gone:
        file.unlink()
    assert follower.update() == (not gone)
    assert (number_in(array.tobytes()), follower.is_whole) == (1 if gone else 2, True)
    wait_until(lambda: versions_held(place) == 1, PATIENCE, "the end of the old version")
    array.close()
    follower.close()


def test_what_cannot_follow(file: Path) -> None:
    array = gpufs.attach(file, "c")
    with pytest.raises(ValueError, match="mode"):
        gpufs.follow(array)
    array.close()
    small = file.with_name("small")
    small.write_bytes(b"small")
    (array,) = gpufs.attach_many([small])
    with pytest.raises(ValueError, match="small"):
        gpufs.follow(array)


# ---- torch ----


def values_of(tensors: Iterable[torch.Tensor]) -> set[float]:
    return {value for tensor in tensors for value in tensor.double().flatten().tolist()}


class Model(torch.nn.Module):
    """A module with buffers, which attach_module copies, and a tensor at an odd address, which load_file copies."""

    def __init__(self, number: float = 0.0) -> None:
        super().__init__()
        self.first = torch.nn.Linear(300, 300)
        self.odd = torch.nn.Parameter(torch.zeros(3, dtype=torch.uint8), requires_grad=False)
        self.norm = torch.nn.BatchNorm1d(300)
        with torch.no_grad():
            for tensor in self.state_dict().values():
                tensor.fill_(number)

    def forward(self) -> set[float]:
        return values_of(self.state_dict().values())


@pytest.fixture
def device(shared_mount: GpufsMount, driver: str, tmp_path: Path) -> Path:
    if driver != "host":
        pytest.skip("torch needs a real GPU")
    folder = shared_mount.device / tmp_path.name
    folder.mkdir()
    return folder


def test_a_module_follows_at_each_forward(device: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = device / "model.safetensors"
    gpufs.torch.publish(Model(1), path, replace=True, metadata={"step": "1"})
    with torch.device("meta"):
        model = Model()
    gpufs.torch.attach_module(model, path)
    addresses = [tensor.data_ptr() for tensor in model.state_dict().values()]
    follower = gpufs.torch.follow(model)
    twin = copy.deepcopy(model)
    assert pickle.loads(pickle.dumps(model))() == {1.0}
    for number in range(2, 5):
        step = "x" * 100 * number  # the header keeps its length
        gpufs.torch.publish(Model(number), path, replace=True, metadata={"step": step})
        assert model() == {float(number)}
        assert follower.metadata["step"] == step
    assert addresses == [tensor.data_ptr() for tensor in model.state_dict().values()]
    assert twin() == {1.0}
    with pytest.raises(ValueError):
        gpufs.torch.publish({"a": torch.ones(3)}, path, replace=True)
    with pytest.raises(ValueError, match="header"):
        gpufs.torch.publish(Model(7), path, replace=True, metadata={"step": "x" * 50_000})
    assert os.listdir(device) == ["model.safetensors"]
    gpufs.torch.publish({"a": torch.ones(3)}, path)
    with caplog.at_level(logging.WARNING, "gpufs"):
        assert model() == model() == {4.0}
    assert len(caplog.records) == 1
    follower.close()
    gpufs.torch.publish(Model(5), path)
    assert model() == {4.0}


def test_tensors_of_a_file_follow_together(device: Path) -> None:
    path = device / "model.safetensors"
    gpufs.torch.publish(Model(1), path, replace=True)
    tensors = gpufs.torch.load_file(path)
    view = tensors["first.weight"][10:20]
    with gpufs.torch.follow(tensors) as follower, gpufs.torch.follow(view) as second:
        gpufs.torch.publish(Model(2), path, replace=True)
        assert follower.update()
        assert not second.update()
        assert values_of([view, *tensors.values()]) == {2.0}


def test_files_of_other_tools_follow_where_their_tensors_are_aligned(device: Path) -> None:
    path, new = device / "model.safetensors", device / "new.safetensors"
    for number in range(1, 4):
        save_file({"a": torch.full((MIB,), float(number)), "b": torch.full((5,), float(number))}, new)
        if number == 1:
            new.rename(path)
            tensors = gpufs.torch.load_file(path)
            follower = gpufs.torch.follow(tensors)
            address = tensors["a"].data_ptr()
            assert address % 256 == 0
        else:
            gpufs.replace(new, path)
            assert follower.update()
            assert (values_of(tensors.values()), tensors["a"].data_ptr()) == ({float(number)}, address)
    follower.close()


def test_a_version_for_a_link_is_that_of_its_file_and_other_names_are_refused(device: Path) -> None:
    path, link, fifo = (device / name for name in ("model.safetensors", "link", "fifo"))
    link.symlink_to(path.name)
    for number in range(2):
        gpufs.torch.publish({"a": torch.full((10,), number)}, link, replace=True)
        assert (link.is_symlink(), values_of([gpufs.torch.load_file(path)["a"]])) == (True, {number})
    os.mkfifo(fifo)
    for name in (fifo, device):
        assert errno_of(gpufs.torch.publish, {"a": torch.ones(10)}, name, replace=True) == EINVAL


def test_versions_of_a_pool_are_checked_before_they_take_the_name(device: Path) -> None:
    path = device / "model.safetensors"
    gpufs.torch.publish({"a": torch.ones(10), "b": torch.ones(20)}, path, replace=True)
    with pytest.raises(ValueError, match="'c'"):
        gpufs.torch.publish({"a": torch.ones(10), "b": torch.ones(20), "c": torch.ones(1)}, path, replace=True)
    with pytest.raises(ValueError, match="BF16"):
        gpufs.torch.publish({"a": torch.ones(10, dtype=torch.bfloat16), "b": torch.ones(20)}, path, replace=True)
    assert set(gpufs.torch.load_file(path)) == {"a", "b"}


def test_tensors_that_cannot_follow(device: Path) -> None:
    for number in range(2):
        gpufs.torch.publish({"a": torch.ones(2000)}, device / f"{number}.safetensors")
    first, second = (gpufs.torch.load_file(device / f"{number}.safetensors")["a"] for number in range(2))
    with pytest.raises(ValueError, match="2 attached files"):
        gpufs.torch.follow([first, second])
    with pytest.raises(ValueError, match="none"):
        gpufs.torch.follow(torch.ones(3))
    with pytest.raises(ValueError, match="copy"):
        gpufs.torch.follow([first, first.clone()])
    with pytest.raises(ValueError, match="shape"):
        gpufs.torch.follow({"b": first, "a": torch.ones(3)})


def test_two_modules_over_one_file_follow_together(device: Path) -> None:
    path = device / "model.safetensors"
    gpufs.torch.publish(Model(1), path, replace=True)
    with torch.device("meta"):
        first = Model()
    gpufs.torch.attach_module(first, path)
    second = torch.nn.ModuleDict({"norm": copy.deepcopy(first.norm)})
    second["norm"].weight = first.norm.weight  # the file's; the buffers of both are copies
    one, two = gpufs.torch.follow(first), gpufs.torch.follow(second)
    gpufs.torch.publish(Model(2), path, replace=True, metadata={"step": "2"})
    assert first() == {2.0}
    assert (two.version, two.metadata["step"]) == (1, "2")
    assert values_of(second.buffers()) == {2.0}
    two.close()
    gpufs.torch.publish(Model(3), path, replace=True)
    assert first() == {3.0}
    assert (one.version, two.version) == (2, 1)
    one.close()


# ---- what a program does to a model between updates ----


class Network(torch.nn.Module):
    """A module with tied weights and buffers."""

    path: Path

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 16, _weight=torch.empty(50, 16))
        self.first = torch.nn.Linear(16, 16)
        self.norm = torch.nn.BatchNorm1d(16)
        self.second = torch.nn.Linear(16, 16)
        self.head = torch.nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight
        if not self.head.weight.is_meta:
            torch.manual_seed(seed)
            with torch.no_grad():
                for tensor in self.state_dict().values():
                    tensor.copy_(torch.rand(tensor.shape) * 100)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.second(self.norm(self.first(self.embedding(tokens))))
        result: torch.Tensor = self.head(hidden)
        return result


def assign(module: torch.nn.Module, change: Any, name: str = "weight") -> None:
    setattr(module, name, torch.nn.Parameter(change(getattr(module, name).detach()), requires_grad=False))


def add_adapter(model: Network) -> None:
    model.first.register_parameter("adapter", torch.nn.Parameter(torch.ones(4, 16)))


def stack(model: Network) -> None:
    model.stacked = torch.nn.Parameter(torch.stack([model.first.weight, model.second.weight]))
    del model.first.weight, model.second.weight


def pack(model: Network) -> None:
    class Packed(torch.nn.Module):
        packed = model.first.weight.to(torch.int8)

    model.first = Packed()  # type: ignore[assignment]


def pack_in_buffer(model: Network) -> None:
    weight = model.first.weight.to(torch.int8)
    del model.first.weight
    model.first.register_buffer("packed", weight, persistent=False)


def share(model: Network) -> None:
    for tensor in model.state_dict().values():
        tensor.share_memory_()  # as a queue of torch.multiprocessing does


def use_another_file(model: Network) -> None:
    path = model.path.with_name("another")
    gpufs.torch.publish({"a": model.first.weight}, path)
    assign(model.first, lambda weight: gpufs.torch.load_file(path)["a"])


# By the rows of the howto: what a program does, and the tensors that the refusal names, none where the update is right.
CHANGES: dict[str, list[tuple[Any, tuple[str, ...]]]] = {
    "nothing, tied weights": [(lambda model: None, ()), (torch.nn.Sequential, ())],
    "`torch.compile`": [
        (lambda model: torch.jit.trace(model.eval(), torch.arange(3)), ()),  # type: ignore[no-untyped-call]
        (lambda model: torch.compile(model, backend="eager"), ()),
    ],
    "`.half()`": [
        (lambda model: model.half(), ()),
        (lambda model: model.first.to(torch.bfloat16), ()),
    ],
    "`.cpu()`": [
        (lambda model: model.cpu(), ()),
        (lambda model: model.to(memory_format=torch.channels_last), ()),
    ],
    "`load_state_dict(assign=True)`": [
        (lambda model: model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True), ()),
        (lambda model: assign(model.first, torch.clone), ()),
        (lambda model: assign(model.first, lambda weight: weight.t().contiguous().t()), ()),
    ],
    "`share_memory()`": [(lambda model: model.share_memory(), ()), (share, ())],
    "buffers that the file has": [(lambda model: model.norm.running_mean.add_(1), ())],
    "a submodule removed": [
        (lambda model: delattr(model, "first"), ()),
        (lambda model: setattr(model, "first", torch.nn.Identity()), ()),
    ],
    "a cast and back": [
        (lambda model: model.first.half().float(), ("first.weight", "first.bias")),
        (lambda model: assign(model.first, lambda weight: weight + 1), ("first.weight",)),
        (lambda model: assign(model.first, lambda weight: weight.t().contiguous()), ("first.weight",)),
    ],
    "quantising": [
        (lambda model: assign(model.first, lambda weight: weight.to(torch.int8)), ("first.weight",)),
        (lambda model: model.first.to(torch.float8_e4m3fn), ("first.weight", "first.bias")),
        (lambda model: assign(model.first, torch.Tensor.to_sparse), ("first.weight",)),
        (pack, ("first.bias", "first.weight")),
        (pack_in_buffer, ("first.weight",)),
    ],
    "LoRA beside": [(add_adapter, ("first.adapter",))],
    "weights stacked": [(stack, ("stacked",))],
    "another shape": [
        (lambda model: assign(model.first, lambda weight: weight[:8].clone()), ("first.weight",)),
        (lambda model: model.first.to("meta"), ("first.weight", "first.bias")),
        (use_another_file, ("first.weight",)),
    ],
    "persistent buffers": [(lambda model: model.register_buffer("scale", torch.ones(1)), ("scale",))],
    "other buffers": [(lambda model: model.register_buffer("scale", torch.ones(1), persistent=False), ())],
    "a copy or pickle": [],  # test_a_module_follows_at_each_forward
    "what the program has computed": [],
}
SLOW = "`torch.compile`"


def attached(path: Path) -> Network:
    with torch.device("meta"):
        model = Network()
    model.path = path
    return gpufs.torch.attach_module(model, path)


def is_version(model: Network, seed: int, others: tuple[str, ...] = ()) -> bool:
    """Whether all tensors that the file has are the version's, except others."""
    expected = dict(Network(seed).state_dict())
    values = {key: value for key, value in model.state_dict().items() if key in expected and not key.startswith(others)}
    return all(torch.equal(value.detach(), expected[name].to(value.dtype)) for name, value in values.items())


def changed(model: Network, before: dict[str, torch.Tensor]) -> set[str]:
    """The tensors that have other values now."""
    return {
        name
        for name, value in model.state_dict().items()
        if name in before and not torch.equal(value.to_dense(), before[name].to_dense())
    }


def test_the_contract_has_each_change_that_is_tested() -> None:
    table = (REPOSITORY / "docs/contract.md").read_text().partition("| Between updates")[2].partition("\n\n")[0]
    rows = [line.split("|") for line in table.splitlines()[2:]]
    assert len(rows) == len(CHANGES)
    for (_, does, outcome, _), (name, cases) in zip(rows, CHANGES.items(), strict=True):
        assert does.strip().startswith(name)
        assert any(refused for _, refused in cases) == ("refused" in outcome)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name == SLOW else []) for name in CHANGES if CHANGES[name]]
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_a_program_does_to_a_model_is_followed_or_refused(device: Path, name: str) -> None:
    path = device / "model.safetensors"
    for change, refused in CHANGES[name]:
        gpufs.torch.publish(Network(1), path, replace=True)
        model = attached(path)
        change(model)
        # All of them may be copies now.
        with pytest.raises(ValueError) if refused else suppress(ValueError):
            gpufs.torch.follow(model).close()
        for others in ("refuse", "keep") if refused else ("refuse",):
            gpufs.torch.publish(Network(1), path, replace=True)
            model = attached(path)
            with gpufs.torch.follow(model, on_forward=False, others=others) as follower:
                made = change(model)
                before = {key: value.clone() for key, value in model.state_dict().items() if not value.is_meta}
                gpufs.torch.publish(Network(2), path, replace=True)
                if refused and others == "refuse":
                    with pytest.raises(ValueError) as refusal:
                        follower.update()
                    assert all(each in str(refusal.value) for each in refused)
                    assert (follower.version, changed(model, before)) == (0, set())
                    continue
                assert follower.update()
                assert changed(model, before) == {key for key in before if not key.startswith(refused)}
                assert is_version(model, 2, refused)
            if isinstance(made, torch.nn.Module) and made not in model.modules():
                tokens = torch.arange(3)
                assert torch.equal(made(tokens), model(tokens))


def tensors_of(model: Network) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}


def with_attributes(model: Network) -> Network:
    for parameter in model.parameters():
        parameter.from_a_checkpoint = True  # type: ignore[attr-defined]
        parameter.partition = {"dimension": 0, "stride": 1}  # type: ignore[attr-defined]
    return model


def test_what_decides_about_a_version_is_where_its_tensors_lie(device: Path) -> None:
    path = device / "model.safetensors"
    gpufs.torch.publish(Network(1), path, replace=True)
    model = attached(path)
    follower = gpufs.torch.follow(model)
    fitting: list[Any] = [
        lambda model: model.requires_grad_(False),
        with_attributes,
        tensors_of,
        lambda model: dict(reversed(tensors_of(model).items())),
        lambda model: {name: tensor.detach() for name, tensor in tensors_of(model).items()},
        lambda model: model,
    ]
    for number, source in enumerate(fitting, 2):
        notes = {"step": str(number), "note": "x" * 100 * number}
        gpufs.torch.publish(source(Network(number)), path, replace=True, metadata=notes)
        assert (follower.update(), follower.metadata["step"], is_version(model, number)) == (True, str(number), True)
        assert is_version(attached(path), number)
    before = path.read_bytes()
    others: list[tuple[Any, tuple[str, ...]]] = [
        (lambda tensor: tensor.t().contiguous().t(), ("16x16", "[1, 16]")),
        (lambda tensor: tensor.bfloat16(), ("F32", "BF16")),
        (lambda tensor: tensor[:, :8].clone(), ("16x16", "16x8")),
        (lambda tensor: tensor[:0], ("16x16", "0x16")),
    ]
    for change, told in others:
        tensors = tensors_of(Network(0))
        tensors["first.weight"] = change(tensors["first.weight"].detach())
        with pytest.raises(ValueError) as refused:
            gpufs.torch.publish(tensors, path, replace=True)
        assert all(each in str(refused.value) for each in ("first.weight", *told))
    untied = Network(0)
    assign(untied.head, torch.clone)
    with pytest.raises(ValueError, match=r"head\.weight"):
        gpufs.torch.publish(untied, path, replace=True)
    assert path.read_bytes() == before


def test_what_no_reader_accepts_is_not_published(device: Path) -> None:
    path = device / "model.safetensors"
    tensors = {"a": torch.ones(3)}
    for metadata in ({"step": 3}, {3: "step"}, {"step": None}, {"step": b"3"}):
        with pytest.raises(TypeError):
            gpufs.torch.publish(tensors, path, metadata=metadata)  # type: ignore[arg-type]
    for names, notes in (
        ({"__metadata__": torch.ones(3)}, {}),
        (tensors, {"step": "\ud800"}),
        ({"\ud800": torch.ones(1)}, {}),
    ):
        with pytest.raises(ValueError):
            gpufs.torch.publish(names, path, metadata=notes)
    assert os.listdir(device) == []
    gpufs.torch.publish(tensors, path, metadata={"gpufs": "of another file"})
    with safe_open(path, "pt") as file:
        assert (file.metadata(), file.get_tensor("a").tolist()) == ({"format": "pt"}, [1, 1, 1])
    assert values_of(gpufs.torch.load_file(path).values()) == {1.0}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_thousand_versions_of_a_model_that_changes_meanwhile(device: Path) -> None:
    """Whatever the program does, the model is of one version, or the update is refused and changes nothing."""
    path = device / "model.safetensors"
    chooser = random.Random(1)
    changes = [change for name in CHANGES.keys() - {SLOW} for change, _ in CHANGES[name]]
    updates = refusals = 0
    gpufs.torch.publish(Network(0), path, replace=True, metadata={"step": "0"})
    model, follower, done = attached(path), None, 0
    for number in range(1, 1001):
        follower = follower or gpufs.torch.follow(model, on_forward=False)
        if chooser.random() < 0.3:
            with suppress(AttributeError):  # of what another change has removed
                chooser.choice(changes)(model)
        before = {key: value.clone() for key, value in model.state_dict().items() if not value.is_meta}
        gpufs.torch.publish(Network(number), path, replace=True, metadata={"step": str(number)})
        try:
            assert follower.update()
        except ValueError:
            assert (follower.metadata["step"], changed(model, before)) == (str(done), set())
            follower.close()
            model, follower, done = attached(path), None, number
            refusals += 1
            continue
        assert (follower.metadata["step"], is_version(model, number)) == (str(number), True)
        done = number
        updates += 1
    assert (updates > 500, refusals > 50) == (True, True)


def test_an_update_that_fails_in_the_middle_is_reported_until_it_is_complete(device: Path) -> None:
    """The other model that follows the file has all of the new version."""
    path = device / "model.safetensors"
    gpufs.torch.publish(Network(1), path, replace=True)
    first = attached(path)
    second = torch.nn.ModuleDict({"norm": copy.deepcopy(first.norm)})
    second["norm"].weight = first.norm.weight
    good = first.get_buffer("norm.running_mean").clone()
    for number in (2, 3):
        first.norm.running_mean = torch.zeros(1).expand(16)  # no copy into it is possible
        one, two = gpufs.torch.follow(first), gpufs.torch.follow(second, on_forward=False)
        gpufs.torch.publish(Network(number), path, replace=True, metadata={"step": str(number)})
        if number == 2:
            assert two.update()
        for call in (one.update, lambda: first(torch.arange(3)), one.update):
            with pytest.raises(RuntimeError):
                call()
            assert (one.is_whole, one.version, two.is_whole, two.version) == (False, 0, True, 1)
        assert torch.equal(*(each.get_buffer("norm.running_mean") for each in (second, Network(number))))
        assert not two.update()
        first.norm.running_mean = good.clone()
        assert one.update()
        assert (one.is_whole, one.version, one.metadata["step"]) == (True, 1, str(number))
        assert is_version(first, number)
        one.close()
        two.close()


def test_a_model_with_copies_wakes_with_the_old_version_and_takes_the_new_one_then(
    place: Survivor, driver: str
) -> None:
    """Copies of parameters are compared with the memory, which is not there while the file sleeps."""
    if driver != "host":
        pytest.skip("torch needs a real GPU")
    path = place.device / "model.safetensors"
    for change in (lambda model: None, lambda model: model.first.half()):
        gpufs.torch.publish(Network(1), path, replace=True)
        model = attached(path)
        change(model)
        follower = gpufs.torch.follow(model)
        gpufs.torch.sleep(model)
        gpufs.torch.publish(Network(2), path, replace=True)
        gpufs.torch.wake(model)
        woken = follower.version
        assert is_version(model, woken + 1)
        assert follower.update() == (not woken)
        assert is_version(model, 2)
        follower.close()
        del model, follower
    gpufs.torch.publish(Network(1), path, replace=True)
    model = attached(path)
    follower = gpufs.torch.follow(model, on_forward=False)
    good, model.norm.running_mean = model.norm.running_mean, torch.zeros(1).expand(16)  # no copy into it is possible
    gpufs.torch.sleep(model)
    gpufs.torch.publish(Network(2), path, replace=True)
    with pytest.raises(RuntimeError):
        gpufs.torch.wake(model)
    model.norm.running_mean = good
    assert gpufs.torch.wake(model) == path.stat().st_size
    assert (follower.update(), is_version(model, 2)) == (True, True)
    follower.close()
    del model, follower
    path.unlink()
