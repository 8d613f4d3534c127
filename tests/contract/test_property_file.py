"""Files against a model of files: hypothesis drives both with the same operations and compares what they show.

The model is a bytearray for each file. Sizes and offsets gather around the places where the implementation changes
its way: pages, the largest request, granules of device memory, the limit of small files.
"""

from __future__ import annotations

import itertools
import mmap
import os
import random
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from errno import EINVAL, ENXIO, EOPNOTSUPP
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support import linux
from support.data import GRANULE, KIB, MIB, Model, assert_same, noise
from support.processes import errno_of
from support.surviving import mounted

LARGEST = 5 * MIB
EDGES = (0, 4 * KIB, 64 * KIB, MIB, GRANULE, 2 * GRANULE)

positions = st.one_of(
    st.builds(lambda edge, off: max(0, edge + off), st.sampled_from(EDGES), st.integers(-3, 3)),
    st.integers(0, 3 * GRANULE - 1),
)
lengths = st.one_of(
    st.sampled_from([1, 511, 4095, 4096, 4097, 65535, 65536, 65537, MIB - 1, MIB, MIB + 1, GRANULE, GRANULE + 1]),
    st.integers(1, 300_000),
)
seeds = st.integers(1, 1 << 30)
names = st.sampled_from(["a", "b", "c", "dir/a", "dir/b"])


@dataclass(eq=False)
class Handle:
    """An open file on the mount and the model it belongs to."""

    fd: int
    model: Model
    append: bool = False
    area: mmap.mmap | None = None

    def close(self) -> None:
        if self.area is not None:
            self.area.close()
        os.close(self.fd)


class Files(RuleBasedStateMachine):
    root: ClassVar[Path]
    numbers: ClassVar[Iterator[int]] = itertools.count()
    zero_range: ClassVar[bool | None] = None

    handles = Bundle("handles")

    def __init__(self) -> None:
        super().__init__()
        self.base = self.root / f"example{next(self.numbers)}"
        (self.base / "dir").mkdir(parents=True)
        self.tree: dict[str, Model] = {}
        self.open: list[Handle] = []

    def teardown(self) -> None:
        for handle in self.open:
            handle.close()
        for name, model in self.tree.items():
            assert_same((self.base / name).read_bytes(), bytes(model.data), f"at the end, {name}")
        shutil.rmtree(self.base)

    def _opened(self, fd: int, model: Model, append: bool = False) -> Handle:
        handle = Handle(fd, model, append)
        self.open.append(handle)
        return handle

    # ---- opening and closing ----

    @rule(target=handles, name=names, truncate=st.booleans(), append=st.booleans(), direct=st.booleans())
    def open_file(self, name: str, truncate: bool, append: bool, direct: bool) -> Handle:
        flags = os.O_RDWR | os.O_CREAT
        flags |= os.O_TRUNC if truncate else 0
        flags |= os.O_APPEND if append else 0
        flags |= os.O_DIRECT if direct else 0
        fd = os.open(self.base / name, flags, 0o644)
        model = self.tree.setdefault(name, Model())
        if truncate:
            model.data.clear()
        return self._opened(fd, model, append)

    @rule(handle=consumes(handles))
    def close(self, handle: Handle) -> None:
        self.open.remove(handle)
        handle.close()

    @rule(target=handles, handle=handles)
    def reopen_through_proc(self, handle: Handle) -> Handle:
        return self._opened(os.open(f"/proc/self/fd/{handle.fd}", os.O_RDWR), handle.model)

    # ---- data ----

    @rule(handle=handles, at=positions, count=lengths, seed=seeds)
    def write(self, handle: Handle, at: int, count: int, seed: int) -> None:
        if handle.append:
            at = len(handle.model.data)
        if at + count > LARGEST:
            return
        data = noise(count, seed)
        assert os.pwrite(handle.fd, data, at) == count
        handle.model.write(at, data)

    @rule(handle=handles, at=positions, count=lengths)
    def read(self, handle: Handle, at: int, count: int) -> None:
        assert_same(os.pread(handle.fd, count, at), bytes(handle.model.data[at : at + count]), f"read {count} at {at}")

    @rule(handle=handles)
    def read_everything(self, handle: Handle) -> None:
        assert_same(os.pread(handle.fd, len(handle.model.data) + 1, 0), bytes(handle.model.data))

    @rule(handle=handles, size=positions)
    def truncate(self, handle: Handle, size: int) -> None:
        os.ftruncate(handle.fd, size)
        handle.model.resize(size)

    @rule(handle=handles, at=positions, count=lengths, keep=st.booleans())
    def allocate(self, handle: Handle, at: int, count: int, keep: bool) -> None:
        if at + count > LARGEST:
            return
        linux.fallocate(handle.fd, linux.FALLOC_KEEP_SIZE if keep else 0, at, count)
        if not keep and at + count > len(handle.model.data):
            handle.model.resize(at + count)

    @rule(handle=handles, at=positions, count=lengths)
    def punch(self, handle: Handle, at: int, count: int) -> None:
        linux.fallocate(handle.fd, linux.FALLOC_PUNCH_HOLE | linux.FALLOC_KEEP_SIZE, at, count)
        handle.model.clear(at, count)

    @precondition(lambda self: self.zero_range is not False)
    @rule(handle=handles, at=positions, count=lengths, keep=st.booleans())
    def zero(self, handle: Handle, at: int, count: int, keep: bool) -> None:
        if at + count > LARGEST:
            return
        flags = linux.FALLOC_ZERO_RANGE | (linux.FALLOC_KEEP_SIZE if keep else 0)
        code = errno_of(linux.fallocate, handle.fd, flags, at, count)
        if code == EOPNOTSUPP and not self.zero_range:
            type(self).zero_range = False  # tmpfs
            return
        assert code == 0
        type(self).zero_range = True
        handle.model.clear(at, count)
        if not keep and at + count > len(handle.model.data):
            handle.model.resize(at + count)

    @rule(source=handles, into=handles, source_at=positions, into_at=positions, count=lengths)
    def copy_range(self, source: Handle, into: Handle, source_at: int, into_at: int, count: int) -> None:
        if into.append or into_at + count > LARGEST:
            return
        available = max(0, min(count, len(source.model.data) - source_at))
        overlap = source.model is into.model and abs(source_at - into_at) < count
        if overlap:
            code = errno_of(os.copy_file_range, source.fd, into.fd, count, source_at, into_at)
            if abs(source_at - into_at) < available:
                assert code == EINVAL
            if code == 0 and available:
                into.model.write(into_at, bytes(source.model.data[source_at : source_at + available]))
            return
        done = 0
        while done < available:
            moved = os.copy_file_range(source.fd, into.fd, count - done, source_at + done, into_at + done)
            assert 0 < moved <= available - done
            done += moved
        if available == 0:
            assert os.copy_file_range(source.fd, into.fd, count, source_at, into_at) == 0
        else:
            into.model.write(into_at, bytes(source.model.data[source_at : source_at + available]))

    @rule(handle=handles)
    def holes_are_zeros(self, handle: Handle) -> None:
        data, at, end_of_data = handle.model.data, 0, 0
        while at < len(data) and (begin := linux.find_data(handle.fd, at)) is not None:
            assert begin >= at
            assert not data[at:begin].strip(b"\0"), "bytes in what is said to be a hole"
            at = os.lseek(handle.fd, begin, os.SEEK_HOLE)
            assert begin < at <= len(data)
            end_of_data = at
        assert not data[end_of_data:].strip(b"\0"), "bytes behind the last data"
        assert errno_of(os.lseek, handle.fd, len(data), os.SEEK_HOLE) == ENXIO
        assert errno_of(os.lseek, handle.fd, len(data) + 5, os.SEEK_DATA) == ENXIO

    @rule(handle=handles)
    def sync(self, handle: Handle) -> None:
        os.fsync(handle.fd)

    # ---- mappings ----

    @rule(handle=handles)
    def map(self, handle: Handle) -> None:
        if handle.area is None and handle.model.data:
            handle.area = mmap.mmap(handle.fd, len(handle.model.data))

    @rule(handle=handles)
    def unmap(self, handle: Handle) -> None:
        if handle.area is not None:
            handle.area.close()
            handle.area = None

    @rule(handle=handles, at=positions, count=st.integers(1, 20_000), seed=seeds)
    def store(self, handle: Handle, at: int, count: int, seed: int) -> None:
        if handle.area is None:
            return
        end = min(at + count, len(handle.area), len(handle.model.data))
        if at < end:
            data = noise(end - at, seed)
            handle.area[at:end] = data
            handle.model.write(at, data)

    @rule(handle=handles, at=positions, count=lengths)
    def load(self, handle: Handle, at: int, count: int) -> None:
        if handle.area is None:
            return
        end = min(at + count, len(handle.area), len(handle.model.data))
        if at < end:
            assert_same(handle.area[at:end], bytes(handle.model.data[at:end]), f"load {count} at {at}")

    # ---- names ----

    @rule(name=names)
    def unlink(self, name: str) -> None:
        assert errno_of(os.unlink, self.base / name) == (0 if name in self.tree else 2)
        if model := self.tree.pop(name, None):
            model.links = 0

    # ---- what holds always ----

    @invariant()
    def sizes_and_links(self) -> None:
        for handle in self.open:
            found = os.fstat(handle.fd)
            assert found.st_size == len(handle.model.data)
            assert found.st_nlink == handle.model.links
        for name, model in self.tree.items():
            assert os.stat(self.base / name).st_size == len(model.data)


@pytest.mark.driver
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("examples", [30, pytest.param(450, marks=pytest.mark.slow)])
def test_files_behave_as_their_model(root: Path, examples: int) -> None:
    Files.root = root
    run_state_machine_as_test(Files, settings=settings(max_examples=examples, stateful_step_count=50))


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("examples", [15, pytest.param(300, marks=pytest.mark.slow)])
def test_files_behave_as_their_model_while_the_daemon_dies(tmp_path: Path, examples: int) -> None:
    """It is killed again and again, in the middle of whatever it does."""
    with mounted(tmp_path / "mount") as mount:
        end = threading.Event()
        failures: list[BaseException] = []

        def kill() -> None:
            chance = random.Random(1)
            try:
                while not end.wait(chance.random() * 0.5):
                    mount.kill()
            except BaseException as failure:
                failures.append(failure)
                raise

        killer = threading.Thread(target=kill)
        killer.start()
        try:
            Files.root = mount.device
            run_state_machine_as_test(Files, settings=settings(max_examples=examples, stateful_step_count=50))
        finally:
            end.set()
            killer.join()
        assert not failures
