"""Engines that take new weights together, with a module of torch in the place of a server's model."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from errno import EACCES, EAGAIN, EBUSY, EIO, ENOSPC
from pathlib import Path

import pytest
import torch
from support.data import MIB, remove_tree
from support.group_engine import Engine, Tensors, process, write_version
from support.mounting import REPOSITORY, GpufsMount, Mounter
from support.processes import NOBODY, errno_of
from support.surviving import mounted

import gpufs
import gpufs.torch


class Program:
    """An engine as a program of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def ask(self, *words: object) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@contextmanager
def program(*prefix: str, device: Path, checkpoint: Path, rank: tuple[object, ...] = ()) -> Iterator[Program]:
    """Runs an engine, or one of its two ranks. prefix: a program that runs it, with its arguments."""
    engine = REPOSITORY / "tests/support/group_engine.py"
    words = [str(word) for word in (*prefix, sys.executable, engine, device, checkpoint, *rank)]
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY}/tests"}
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as started:
        try:
            yield Program(started)
        finally:
            started.kill()


def never(_checkpoint: Path, _target: Tensors) -> None:
    raise AssertionError("this engine was to follow")


@pytest.fixture
def device(shared_mount: GpufsMount) -> Iterator[Path]:
    """The directory of a device, where no group has published."""
    yield shared_mount.device
    for folder in (*shared_mount.device.glob("engines*"), *shared_mount.device.glob("version-*")):
        remove_tree(folder)


@pytest.fixture
def versions(device: Path) -> list[Path]:
    return [write_version(device / f"version-{number}", number) for number in range(4)]


def files_of(device: Path) -> list[Path]:
    return [*device.glob("engines*/*"), *device.glob("engines*/.*")]


def test_engines_of_a_group_take_versions_together(device: Path, versions: list[Path]) -> None:
    """One processes, the others follow, whichever of them loaded the first version; one that starts later maps it."""
    first = Engine(device, versions[0])
    second = Engine(device, versions[0])
    first.update(versions[1])
    assert first.has(versions[1])
    assert second.has(versions[0])
    second.update(versions[1], never)
    assert second.has(versions[1])
    second.update(versions[2])
    first.prepare(versions[2], never)
    assert first.has(versions[1])
    first.group.commit()
    log: list[str] = []
    third = Engine(device, versions[0], log=log)
    assert first.has(versions[2])
    assert second.has(versions[2])
    assert third.has(versions[2])
    assert any(str(versions[0]) in line and str(versions[2]) in line for line in log)
    third.update(versions[0])
    assert third.has(versions[0])
    assert not third.group.commit()
    assert len(files_of(device)) == 1


def test_a_prepared_version_is_used_whatever_becomes_of_its_name(device: Path, versions: list[Path]) -> None:
    first, second = Engine(device, versions[0]), Engine(device, versions[0])
    first.update(versions[1])
    second.prepare(versions[1], never)
    first.update(versions[2])
    (file,) = files_of(device)
    file.unlink()
    second.group.commit()
    assert second.has(versions[1])
    second.update(versions[3])  # nobody has a file now
    first.update(versions[3], never)
    assert second.has(versions[3])
    assert first.has(versions[3])


def test_engines_that_update_at_the_same_time_process_once(device: Path, versions: list[Path]) -> None:
    engines = [Engine(device, versions[0]) for _ in range(3)]
    processed = []

    def work(checkpoint: Path, target: Tensors) -> None:
        processed.append(checkpoint)
        process(checkpoint, target)

    with ThreadPoolExecutor(3) as pool:
        for version in versions[1:]:
            list(pool.map(lambda engine, version=version: engine.update(version, work), engines))
            assert all(engine.has(version) for engine in engines)
    assert processed == versions[1:]


def test_an_engine_that_dies_while_it_processes_leaves_the_version_to_others(
    device: Path, versions: list[Path]
) -> None:
    engine = Engine(device, versions[0])
    with program(device=device, checkpoint=versions[0]) as other, ThreadPoolExecutor(1) as pool:
        assert other.answer() == "ready"
        assert other.ask("hang", versions[1]) == "hangs"
        update = pool.submit(engine.update, versions[1])
        assert not threading.Event().wait(0.5)
        assert not update.done()
        assert engine.has(versions[0])
        other.process.kill()
        update.result()
    assert engine.has(versions[1])
    assert len(files_of(device)) == 1


def test_versions_that_are_refused_change_nothing(device: Path, versions: list[Path], tmp_path: Path) -> None:
    first, second = Engine(device, versions[0]), Engine(device, versions[0])
    wrong = device / "version-wrong"
    write_version(wrong, 5, **{"one.weight": torch.zeros(256, 128)})
    used = os.statvfs(device).f_bfree

    def rewrite(checkpoint: Path, target: Tensors) -> None:
        process(checkpoint, target)
        write_version(checkpoint, 6)

    def interrupted(_checkpoint: Path, target: Tensors) -> None:
        target["one.weight"].zero_()
        raise RuntimeError

    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path, work, expected in (
        (wrong, process, ValueError),
        (versions[3], rewrite, OSError),
        (versions[1], interrupted, RuntimeError),
        (tmp_path, process, FileNotFoundError),
        (fifo, process, OSError),
    ):
        with pytest.raises(expected):
            first.update(path, work)
        assert not first.group.commit()
        assert first.has(versions[0])
    array = gpufs.attach(versions[2] / "model.safetensors", "r+")
    assert errno_of(first.update, versions[2]) == EBUSY
    array.close()
    assert os.statvfs(device).f_bfree == used
    assert second.has(versions[0])
    assert Engine(device, versions[0]).has(versions[0])
    second.update(versions[1])
    (file,) = files_of(device)
    with file.open("r+b") as damaged:
        damaged.seek(file.stat().st_size - 4096)
        damaged.write(bytes(2048))
    with pytest.raises(ValueError, match=file.name):
        first.update(versions[1])
    assert first.has(versions[0])


def test_a_path_that_is_written_again_is_a_new_version(device: Path, versions: list[Path]) -> None:
    first, second = Engine(device, versions[0]), Engine(device, versions[0])
    for number in (7, 8):
        write_version(versions[1], number)
        first.update(versions[1])
        second.update(versions[1], never)
        assert first.has(versions[1])
        assert second.has(versions[1])
    contents = (versions[2] / "model.safetensors").read_bytes()
    with (versions[1] / "model.safetensors").open("r+b") as file:  # in place
        file.write(contents)
    first.update(versions[1])
    assert first.has(versions[1])
    assert not second.has(versions[1])


def test_another_user_can_follow_and_not_publish(device: Path, versions: list[Path]) -> None:
    engine = Engine(device, versions[0])
    # The capability to read: the Python here may be closed to other users.
    capability = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
    nobody = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", *capability)
    with program(*nobody, device=device, checkpoint=versions[0]) as other:
        assert other.answer() == "ready"
        assert other.ask("update", versions[1]) == str(EACCES)
        assert other.ask("has", versions[0]) == "True"
        engine.update(versions[1])
        assert other.ask("update", versions[1]) == "0"
        assert other.ask("has", versions[1]) == "True"
    assert not (device / f"engines-{NOBODY}").exists()


def test_all_ranks_of_an_engine_have_one_version(device: Path, versions: list[Path], tmp_path: Path) -> None:
    """One that fails keeps the others from a version; files of two versions are not mapped."""

    def both(ranks: list[Program], *commands: str, version: Path) -> list[str]:
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(lambda rank, command: rank.ask(command, version), ranks, commands))

    @contextmanager
    def engine(name: str) -> Iterator[list[Program]]:
        with ExitStack() as started:
            places = [(rank, tmp_path / name) for rank in range(2)]
            programs = (program(device=device, checkpoint=versions[0], rank=place) for place in places)
            yield [started.enter_context(each) for each in programs]

    with engine("first") as one:
        assert [rank.answer() for rank in one] == ["ready"] * 2
        before = sorted(files_of(device))[0].read_bytes()
        for failing in (("update", "fail"), ("fail", "update")):
            assert both(one, *failing, version=versions[1]) == [str(EIO)] * 2
            assert both(one, "has", "has", version=versions[0]) == ["True"] * 2
        for version in versions[1:]:
            assert both(one, "update", "update", version=version) == ["0", "0"]
            assert both(one, "has", "has", version=version) == ["True"] * 2
    old = device / "engines" / "old"
    old.write_bytes(before)
    old.rename(sorted(files_of(device))[0])  # as after a crash between two renames
    with engine("second") as torn:
        assert [rank.answer() for rank in torn] == ["own"] * 2


def test_an_engine_wakes_with_the_version_it_slept_with(mount: Mounter) -> None:
    """It takes the newer one at its next update; an engine that sleeps takes none."""
    device = mount("--host-memory", "32M", memory=64 * MIB).device
    versions = [write_version(device / f"version-{number}", number) for number in range(3)]
    first, second = Engine(device, versions[0]), Engine(device, versions[0])
    gpufs.torch.sleep(second.model)
    first.update(versions[1])
    assert errno_of(second.update, versions[1]) == EAGAIN
    first.update(versions[2])
    gpufs.torch.wake(second.model)
    assert second.has(versions[0])
    second.update(versions[2], never)
    assert second.has(versions[2])
    second.prepare(versions[1])
    gpufs.torch.sleep(second.model)
    assert errno_of(second.group.commit) == EAGAIN
    gpufs.torch.wake(second.model)
    assert second.has(versions[2])
    assert second.group.commit()
    assert second.has(versions[1])
    assert first.has(versions[2])


def test_a_full_device_refuses_a_version(mount: Mounter) -> None:
    device = mount(memory=16 * MIB).device
    versions = [write_version(device / f"version-{number}", number) for number in range(2)]
    engine = Engine(device, versions[0])
    full = device / "full"
    with pytest.raises(OSError, match="No space"), full.open("wb") as file:
        file.write(bytes(16 * MIB))
    assert errno_of(engine.update, versions[1]) == ENOSPC
    assert engine.has(versions[0])
    full.unlink()
    engine.update(versions[1])
    assert engine.has(versions[1])


def test_engines_go_on_when_the_daemon_is_killed(tmp_path: Path) -> None:
    """An update in whose middle it is killed works, or fails and works when it is tried again."""
    with mounted(tmp_path / "mount", memory="64M") as survivor:
        device = survivor.device
        versions = [write_version(device / f"version-{number}", number) for number in range(4)]
        first, second = Engine(device, versions[0]), Engine(device, versions[0])

        def interrupted(checkpoint: Path, target: Tensors) -> None:
            survivor.kill()
            process(checkpoint, target)

        with suppress(OSError):
            first.update(versions[1], interrupted)
        assert first.has(versions[0]) or first.has(versions[1])
        first.update(versions[1])
        second.prepare(versions[1])
        survivor.kill()
        with suppress(OSError):
            second.group.commit()
        second.group.commit()
        assert first.has(versions[1])
        assert second.has(versions[1])
        second.update(versions[2])
        first.update(versions[2], never)
        assert first.has(versions[2])
