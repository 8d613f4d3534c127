"""One file under random operations against a model of its bytes: what a file system exerciser does.

Sizes and offsets gather around pages, the largest request, granules and the limit of small files. Every operation is
kept in a short log, which a failure prints with the seed.
"""

from __future__ import annotations

import collections
import mmap
import os
import random
from pathlib import Path

from support import linux
from support.data import GRANULE, KIB, MIB, assert_same
from support.processes import errno_of, start_children, wait_children

from campaigns.harness import Place

LARGEST = 6 * MIB
EDGES = (0, 4 * KIB, 64 * KIB, MIB, GRANULE, 2 * GRANULE, LARGEST)
KINDS = (
    *["write"] * 4,
    *["read"] * 4,
    *["map_write"] * 3,
    *["map_read"] * 3,
    *("truncate", "punch", "zero", "allocate", "copy", "append", "reopen", "replace", "seek", "map_private"),
)


class Exerciser:
    """One process's file and its model."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path = path
        self.random = random.Random(seed)
        self.model = bytearray()
        self.log: collections.deque[str] = collections.deque(maxlen=40)
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)

    def run(self, count: int) -> None:
        for step in range(count):
            kind = self.random.choice(KINDS)
            at, length = self._range()
            self.log.append(f"{step} {kind} {at} {length} size {len(self.model)}")
            try:
                getattr(self, kind)(at, length)
                assert os.fstat(self.fd).st_size == len(self.model), "size"
                if step % 200 == 199:
                    self._compare_all()
            except (AssertionError, OSError) as error:
                error.add_note("\n".join(self.log))
                raise
        self._compare_all()
        os.close(self.fd)

    def _range(self) -> tuple[int, int]:
        edge = self.random.choice(EDGES) + self.random.randint(-5, 5)
        at = max(0, edge if self.random.random() < 0.5 else self.random.randrange(LARGEST))
        length = self.random.choice((1, 7, 511, 4096, 4097, 65536, 65537, 300_000, MIB, MIB + 1, GRANULE + 3))
        at = min(at, LARGEST - 1)
        return at, min(self.random.randint(1, length), LARGEST - at)

    def _bytes(self, count: int) -> bytes:
        return self.random.randbytes(count)

    def _put(self, at: int, data: bytes) -> None:
        if at > len(self.model):
            self.model.extend(bytes(at - len(self.model)))
        self.model[at : at + len(data)] = data

    def _resize(self, size: int) -> None:
        del self.model[size:]
        self.model.extend(bytes(size - len(self.model)))

    def _clear(self, at: int, length: int) -> None:
        end = min(at + length, len(self.model))
        if at < end:
            self.model[at:end] = bytes(end - at)

    def _inside(self, at: int, length: int) -> tuple[int, int]:
        """The part of the range that the file has."""
        at = min(at, len(self.model))
        return at, min(at + length, len(self.model))

    def _compare_all(self) -> None:
        assert_same(os.pread(self.fd, len(self.model) + 1, 0), bytes(self.model), "the whole file")

    def write(self, at: int, length: int) -> None:
        data = self._bytes(length)
        assert os.pwrite(self.fd, data, at) == length
        self._put(at, data)

    def append(self, _: int, length: int) -> None:
        length = min(length, LARGEST - len(self.model))
        data = self._bytes(length)
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        try:
            assert os.write(fd, data) == length
        finally:
            os.close(fd)
        self._put(len(self.model), data)

    def read(self, at: int, length: int) -> None:
        assert_same(os.pread(self.fd, length, at), bytes(self.model[at : at + length]), "read")

    def truncate(self, at: int, _: int) -> None:
        os.ftruncate(self.fd, at)
        self._resize(at)

    def punch(self, at: int, length: int) -> None:
        linux.fallocate(self.fd, linux.FALLOC_PUNCH_HOLE | linux.FALLOC_KEEP_SIZE, at, length)
        self._clear(at, length)

    def zero(self, at: int, length: int) -> None:
        keep = self.random.random() < 0.5
        linux.fallocate(self.fd, linux.FALLOC_ZERO_RANGE | (linux.FALLOC_KEEP_SIZE if keep else 0), at, length)
        self._clear(at, length)
        if not keep and at + length > len(self.model):
            self._resize(at + length)

    def allocate(self, at: int, length: int) -> None:
        linux.fallocate(self.fd, 0, at, length)
        if at + length > len(self.model):
            self._resize(at + length)

    def copy(self, at: int, length: int) -> None:
        at, end = self._inside(at, length)
        into = self.random.randrange(LARGEST)
        length = min(end - at, LARGEST - into)
        if length <= 0 or abs(at - into) < length:
            return
        done = 0
        while done < length:
            moved = os.copy_file_range(self.fd, self.fd, length - done, at + done, into + done)
            assert moved > 0, "copy_file_range stopped"
            done += moved
        self._put(into, bytes(self.model[at : at + length]))

    def seek(self, at: int, _: int) -> None:
        if at >= len(self.model):
            assert errno_of(os.lseek, self.fd, at, os.SEEK_DATA) == 6
            return
        data = linux.find_data(self.fd, at)
        end = len(self.model) if data is None else data
        assert not self.model[at:end].strip(b"\0"), "data in a hole"

    def map_write(self, at: int, length: int) -> None:
        at, end = self._inside(at, length)
        if at >= end:
            return
        data = self._bytes(end - at)
        with mmap.mmap(self.fd, len(self.model)) as area:
            area[at:end] = data
            if self.random.random() < 0.3:
                area.flush()
        self._put(at, data)

    def map_read(self, at: int, length: int) -> None:
        at, end = self._inside(at, length)
        if at < end:
            with mmap.mmap(self.fd, len(self.model), prot=mmap.PROT_READ) as area:
                assert_same(area[at:end], bytes(self.model[at:end]), "mapped read")

    def map_private(self, at: int, length: int) -> None:
        at, end = self._inside(at, length)
        if at < end:
            with mmap.mmap(self.fd, len(self.model), access=mmap.ACCESS_COPY) as area:
                area[at:end] = self._bytes(end - at)

    def reopen(self, *_: int) -> None:
        os.close(self.fd)
        self.fd = os.open(self.path, os.O_RDWR | (os.O_DIRECT if self.random.random() < 0.3 else 0))

    def replace(self, *_: int) -> None:
        """A new file with the same contents takes the old one's name, as editors do it."""
        other = self.path.with_name(self.path.name + ".new")
        fd = os.open(other, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        done = 0
        while done < len(self.model):
            moved = os.copy_file_range(self.fd, fd, len(self.model) - done, done, done)
            assert moved > 0, "copy_file_range stopped"
            done += moved
        os.rename(other, self.path)
        os.close(self.fd)
        self.fd = fd


def one_file(place: Place) -> str:
    steps = 600 if place.quick else 30_000
    seed = random.SystemRandom().randrange(1 << 30)

    def work(number: int) -> None:
        try:
            Exerciser(place.root / f"file{number}", seed + number).run(steps)
        except BaseException as error:
            error.add_note(f"seed {seed + number}")
            raise

    wait_children(start_children(2, work))
    return f"2 files, {steps} operations each, seed {seed}"
