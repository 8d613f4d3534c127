"""`gpufs cp -t DIR -t DIR ...` and copy_files(): one file onto several GPUs, read once."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cli import gpufs_here
from support.copying import wait_for_no_copies
from support.data import MIB, assert_same, noise
from support.hanging import HangingMount
from support.mounting import GpufsMount, Mounter, Session
from support.processes import run

from gpufs.client import Cancellation, CopyProgress, CopyResult, copy_files

SIZE = 9 * MIB + 5


@pytest.fixture(scope="module")
def _three(session: Session, driver: str) -> Iterator[GpufsMount]:
    with GpufsMount(session, driver=driver, devices=3, memory=64 * MIB) as mount:
        yield mount


@pytest.fixture
def three(_three: GpufsMount) -> Iterator[GpufsMount]:
    yield _three
    _three.empty()


@pytest.fixture
def model(host: Path) -> Path:
    path = host / "model"
    path.write_bytes(noise(SIZE))
    path.chmod(0o640)
    return path


def devices(mount: GpufsMount) -> list[Path]:
    return [mount.path / f"gpu{number}" for number in range(3)]


def to_all(mount: GpufsMount) -> list[str]:
    return [f"--target-directory={device}" for device in devices(mount)]


def read_from_host(mount: GpufsMount) -> int:
    """Bytes of the host's files that the daemon has copied to devices."""
    devices = [device["backends"] for device in mount.stats()["devices"]]
    return sum(backends[path]["in"]["bytes"] for backends in devices for path in ("fastpath", "fallback"))


def fill(device: Path, count: int) -> None:
    with open(device / "filler", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, count)


def fails(code: int, *words: object) -> str:
    """Runs a command that must fail with this code; its error lines."""
    done = gpufs_here(*words, check=False)
    assert (done.returncode, done.stdout) == (code, "")
    return done.stderr


def test_every_gpu_gets_the_file_and_it_is_read_once(three: GpufsMount, model: Path) -> None:
    before = read_from_host(three)
    found: dict[str, Any] = json.loads(gpufs_here("cp", "--json", model, *to_all(three)).stdout)
    assert read_from_host(three) - before == SIZE
    assert found["methods"] == {"transfer": 1, "kernel": 2}
    assert found["bytes"] == 3 * SIZE
    for device in devices(three):
        assert_same((device / "model").read_bytes(), noise(SIZE))


def test_several_files_and_the_options_of_one_destination(three: GpufsMount, model: Path, host: Path) -> None:
    small = host / "small"
    small.write_bytes(b"small")
    os.utime(model, ns=(10**18, 10**18))
    words = ["--verify", "-p", "--json", "--progress"]
    found = json.loads(gpufs_here("cp", *words, model, small, *to_all(three)).stdout)
    assert found["files"] == 6
    assert len({copy["sha256"] for copy in found["copies"]}) == 2
    for device in devices(three):
        status = (device / "model").stat()
        assert (status.st_mode & 0o777, status.st_mtime_ns, status.st_atime_ns) == (0o640, 10**18, 10**18)
        assert (device / "small").read_bytes() == b"small"


def test_existing_files_are_skipped_or_overwritten(three: GpufsMount, model: Path) -> None:
    first, second, third = devices(three)
    (first / "model").write_bytes(b"old")
    (third / "model").write_bytes(noise(12 * MIB, 7))
    found = json.loads(gpufs_here("cp", "-n", "--json", model, *to_all(three)).stdout)
    assert (found["files"], found["skipped"]) == (1, 2)
    assert (first / "model").read_bytes() == b"old"
    assert_same((second / "model").read_bytes(), noise(SIZE))
    gpufs_here("cp", model, *to_all(three))
    for device in devices(three):
        assert_same((device / "model").read_bytes(), noise(SIZE))


def test_a_file_of_one_gpu_goes_to_the_others(three: GpufsMount, model: Path) -> None:
    first, *others = devices(three)
    gpufs_here("cp", model, first)
    before = read_from_host(three)
    gpufs_here("cp", first / "model", *to_all(three)[1:])
    assert read_from_host(three) == before
    for device in others:
        assert_same((device / "model").read_bytes(), noise(SIZE))


def test_too_little_space_on_one_gpu_refuses_all(three: GpufsMount, model: Path) -> None:
    fill(devices(three)[2], 60 * MIB)
    line = fails(1, "cp", model, *to_all(three))
    assert "gpu2" in line
    assert not any((device / "model").exists() for device in devices(three))


def test_a_destination_that_fails_does_not_stop_the_others(three: GpufsMount, model: Path) -> None:
    first, *others = devices(three)
    (first / "model").mkdir()
    line = fails(1, "cp", model, *to_all(three))
    assert str(first / "model") in line
    for device in others:
        assert_same((device / "model").read_bytes(), noise(SIZE))


def test_what_several_destinations_do_not_take(three: GpufsMount, model: Path, host: Path) -> None:
    words = to_all(three)
    fails(2, "cp", model, words[0], words[0] + "/.")
    fails(2, "cp", "-", *words)
    fails(1, "cp", model, words[0], f"--target-directory={three.path}/gpu9")
    assert len(fails(1, "cp", host, *words).splitlines()) == 1  # a directory, without -r
    assert not any(os.listdir(device) for device in devices(three))


def test_directories_go_to_each(three: GpufsMount, model: Path, host: Path) -> None:
    """Each file is read once, and a directory that cannot be made at one of them does not stop the others."""
    tree = host / "tree"
    (tree / "sub").mkdir(parents=True, mode=0o711)
    model.rename(tree / "sub/model")
    (tree / "link").symlink_to("sub/model")
    before = read_from_host(three)
    gpufs_here("cp", "-r", tree, *to_all(three))
    assert read_from_host(three) - before == SIZE
    for device in devices(three):
        assert_same((device / "tree/sub/model").read_bytes(), noise(SIZE))
        assert os.readlink(device / "tree/link") == "sub/model"
        assert (device / "tree/sub").stat().st_mode & 0o777 == 0o711
    first, *others = devices(three)
    shutil.rmtree(first / "tree/sub")
    (first / "tree/sub").write_bytes(b"a file")
    (tree / "sub/model").write_bytes(noise(SIZE, 3))
    line = fails(1, "cp", "-r", tree, *to_all(three))
    assert str(first / "tree/sub") in line
    for device in others:
        assert_same((device / "tree/sub/model").read_bytes(), noise(SIZE, 3))


def test_without_the_option_the_last_name_alone_is_the_destination(three: GpufsMount, model: Path) -> None:
    first, second, _ = devices(three)
    line = fails(1, "cp", model, first, second)
    assert str(first) in line
    assert os.listdir(first) == []
    assert os.listdir(second) == ["model"]


def test_one_directory_may_be_named_before_the_files(three: GpufsMount, model: Path) -> None:
    gpufs_here("cp", "-t", three.device, model, model.parent / "model")
    assert_same((three.device / "model").read_bytes(), noise(SIZE))
    gpufs_here("cp", "-r", "-t", three.device, model.parent)
    assert_same((three.device / model.parent.name / "model").read_bytes(), noise(SIZE))


def test_from_python(three: GpufsMount, model: Path) -> None:
    seen: list[CopyProgress] = []
    results = copy_files(model, devices(three), verify=True, progress=seen.append)
    assert [result.destination for result in results] == [str(device / "model") for device in devices(three)]
    assert all(isinstance(result, CopyResult) and result.bytes == SIZE for result in results)
    assert all(progress.moved <= progress.total for progress in seen)
    fill(devices(three)[1], 60 * MIB - SIZE)
    model.write_bytes(noise(20 * MIB, 3))
    with pytest.raises(ExceptionGroup) as raised:
        copy_files(model, [device / "more" for device in devices(three)])
    (error,) = raised.value.exceptions
    assert isinstance(error, OSError)
    assert error.filename == str(devices(three)[1])
    assert not any((device / "more").exists() for device in devices(three))


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a slow server")
@pytest.mark.complains  # a thread may wait for the slow server longer than a cancellation
def test_an_exception_of_the_progress_callback_ends_all_copies(mount: Mounter) -> None:
    """But not other copies of the program's that have the same Cancellation."""
    own = mount(devices=2, memory=2048 * MIB)
    cancel = Cancellation()

    def report(_: CopyProgress) -> None:
        raise ZeroDivisionError

    with HangingMount(operations=(), good=1 << 30, delay=0.005) as slow:  # it takes minutes to read
        first = own.path / "gpu0/first"
        first.write_bytes(noise(MIB))
        with pytest.raises(ZeroDivisionError):
            copy_files(slow.file, [own.path / "gpu0", own.path / "gpu1"], progress=report, cancel=cancel)
    assert not cancel.cancelled
    wait_for_no_copies(own)
    assert os.listdir(own.path / "gpu0") == ["first"]
    assert os.listdir(own.path / "gpu1") == []
    assert len(copy_files(first, [own.path / "gpu1"], cancel=cancel)) == 1


def test_the_commands_of_the_how_to_page(mount: Mounter, host: Path) -> None:
    four = mount(devices=4, memory=16 * MIB)
    page = Path(__file__).resolve().parents[2] / "docs/howto/load-onto-several-gpus.md"
    (host / "model").mkdir()
    for file in ("model.safetensors", "model/a", "model/b"):
        (host / file).write_bytes(noise(MIB, len(file)))
    shown = re.findall(r"^    (gpufs cp .*)$|`(gpufs cp .*?)`", page.read_text(), re.M)
    commands = [block or inline for block, inline in shown]
    assert len(commands) >= 4
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for command in commands:
        run("bash", "-euc", command.replace("/mnt/gpufs", str(four.path)), cwd=host, env=environment)
    for number in range(4):
        device = four.path / f"gpu{number}"
        found = {str(path.relative_to(device)): path.read_bytes() for path in device.rglob("*") if path.is_file()}
        sizes = {"model.safetensors": 17, "a": 7, "b": 7, "model/a": 7, "model/b": 7}
        assert found == {name: noise(MIB, size) for name, size in sizes.items()}
