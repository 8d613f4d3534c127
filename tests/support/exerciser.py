"""Changes files at random and compares them with models of their bytes, as fsx does, while a thread moves the files
between their device and the host's memory. What is not open may be evicted, too."""

from __future__ import annotations

import collections
import mmap
import os
import random
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from errno import EBUSY, ECONNRESET, EOPNOTSUPP, ESTALE
from pathlib import Path

import numpy

import gpufs
from support import linux
from support.data import KIB, MIB, Model, assert_same

LARGEST = 8 * MIB
EDGES = (0, 4 * KIB, 64 * KIB, MIB, 2 * MIB, 4 * MIB)
COUNTS = (1, 511, 4 * KIB, 64 * KIB, 64 * KIB + 1, MIB, 3 * MIB)


class Exerciser:
    """``scratch``: a file of the host's, for copies. The operations work on the one file that is open."""

    def __init__(self, directory: Path, scratch: Path, seed: int) -> None:
        self.directory, self.scratch, self.chance = directory, scratch, random.Random(seed)
        self.models = {directory / f"file{number}": Model() for number in range(12)}
        for path in self.models:
            path.touch()
        self.path = next(iter(self.models))
        self.fd = os.open(self.path, os.O_RDWR)
        self.in_place = threading.Lock()  # memory of this program may be stored to, and does not sleep
        self.log: collections.deque[str] = collections.deque(maxlen=20)

    def run(self, turns: Iterable[object]) -> None:
        """Do one operation in each turn."""
        ended = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            mover = pool.submit(self._move_files, ended, random.Random(self.chance.random()))
            try:
                for _ in turns:
                    if mover.done():
                        break
                    name = self.chance.choice(OPERATIONS)
                    self.log.append(f"{self.path.name}, {self.size} bytes: {name}")
                    try:
                        getattr(self, name)()
                    except OSError as failure:
                        if failure.errno != EBUSY and not _died(failure):  # attached memory is not cut off
                            raise
                    assert os.fstat(self.fd).st_size == self.size
                for path in self.models:
                    self.reopen(path)
                    self.read_all()
            except BaseException as failure:
                failure.add_note("\n".join(self.log))
                raise
            finally:
                ended.set()
            mover.result()

    def _move_files(self, ended: threading.Event, chance: random.Random) -> None:
        """Have files sleep, and some of them wake. They stay where they are when their leases end."""
        while not ended.wait(chance.random() * 0.1):
            try:
                with self.in_place, gpufs.attach(chance.choice(list(self.models)), "r+") as array:
                    gpufs.sleep(array)
                    time.sleep(0.01)
                    if chance.random() < 0.7:
                        gpufs.wake(array)
            except OSError as failure:  # it is small, and a copy; or it was made smaller, or emptied, while it slept
                if failure.errno not in (ESTALE, EBUSY, EOPNOTSUPP) and not _died(failure):
                    raise

    @property
    def model(self) -> Model:
        return self.models[self.path]

    @property
    def size(self) -> int:
        return len(self.model.data)

    def _range(self) -> tuple[int, int]:
        at = self.chance.choice((self.chance.choice(EDGES), self.chance.randrange(LARGEST), self.size))
        at = min(max(at + self.chance.randint(-3, 3), 0), LARGEST - 1)
        return at, min(self.chance.choice(COUNTS), LARGEST - at)

    def _compare(self, data: bytes, at: int, count: int) -> None:
        assert_same(data, bytes(self.model.data[at : at + count]), f"{self.path.name} from {at}")

    def reopen(self, path: Path | None = None) -> None:
        os.close(self.fd)
        self.path = path or self.chance.choice(list(self.models))
        self.fd = os.open(self.path, os.O_RDWR)

    def read_all(self) -> None:
        self._compare(os.pread(self.fd, LARGEST + 1, 0), 0, LARGEST)

    def read(self) -> None:
        at, count = self._range()
        self._compare(os.pread(self.fd, count, at), at, count)

    def write(self) -> None:
        at, count = self._range()
        data = self.chance.randbytes(count)
        assert os.pwrite(self.fd, data, at) == count
        self.model.write(at, data)

    def truncate(self) -> None:
        size, _ = self._range()
        os.ftruncate(self.fd, size)
        self.model.resize(size)

    def punch(self) -> None:
        at, count = self._range()
        linux.fallocate(self.fd, linux.FALLOC_PUNCH_HOLE | linux.FALLOC_KEEP_SIZE, at, count)
        self.model.clear(at, count)

    def zero(self) -> None:
        at, count = self._range()
        linux.fallocate(self.fd, linux.FALLOC_ZERO_RANGE | linux.FALLOC_KEEP_SIZE, at, count)
        self.model.clear(at, count)

    def allocate(self) -> None:
        at, count = self._range()
        os.posix_fallocate(self.fd, at, count)
        self.model.resize(max(at + count, self.size))

    def map(self) -> None:
        if not self.size:
            return
        at = self.chance.randrange(self.size)
        data = self.chance.randbytes(min(self.chance.choice(COUNTS), self.size - at))
        with mmap.mmap(self.fd, self.size) as area:
            self._compare(area[at : at + len(data)], at, len(data))
            area[at : at + len(data)] = data
        self.model.write(at, data)

    def store_in_place(self) -> None:
        if not self.size:
            return
        at = self.chance.randrange(self.size)
        with self.in_place, gpufs.attach(self.path, "r+") as array:
            self._compare(array.tobytes(), 0, LARGEST)
            data = self.chance.randbytes(min(self.chance.choice(COUNTS), self.size - at))
            numpy.asarray(array)[at : at + len(data)] = numpy.frombuffer(data, numpy.uint8)
        self.model.write(at, data)

    def copy_range(self) -> None:
        other = self.chance.choice([path for path in self.models if path != self.path])
        start = self.chance.randrange(len(self.models[other].data) + 1)
        self._copy_from(other, start, bytes(self.models[other].data[start : start + self.chance.choice(COUNTS)]))

    def copy_registered(self) -> None:
        data = self.chance.randbytes(self.chance.choice(COUNTS))
        memory = os.memfd_create("memory")
        os.ftruncate(memory, len(data))
        view = numpy.frombuffer(mmap.mmap(memory, len(data)), numpy.uint8)
        os.close(memory)
        view[:] = numpy.frombuffer(data, numpy.uint8)
        with gpufs.register(view, self.directory / "registered") as made:
            self._copy_from(Path(made.path), 0, data)

    def _copy_from(self, path: Path, start: int, data: bytes) -> None:
        at, count = self._range()
        with open(path, "rb") as source:
            while data and count:
                moved = os.copy_file_range(source.fileno(), self.fd, min(len(data), count), start, at)
                assert moved > 0
                self.model.write(at, data[:moved])
                at, start, count, data = at + moved, start + moved, count - moved, data[moved:]

    def copy_out(self) -> None:
        gpufs.copy(self.path, self.scratch)
        self._compare(self.scratch.read_bytes(), 0, LARGEST)

    def replace(self) -> None:
        """A new version of the file takes its name."""
        data, new = self.chance.randbytes(self.size), self.directory / "new"
        self.scratch.write_bytes(data)
        gpufs.copy(self.scratch, new)
        gpufs.replace(new, self.path)
        self.models[self.path] = Model(bytearray(data))
        self.reopen(self.path)


OPERATIONS = (
    *("read", "write", "truncate", "punch", "zero", "allocate", "map", "copy_range", "copy_registered"),
    *("reopen", "read_all", "store_in_place", "copy_out", "replace"),
)


def _died(failure: OSError) -> bool:
    """A copy, or a move, ends with its daemon."""
    return isinstance(failure, gpufs.DaemonDied) or failure.errno == ECONNRESET
