"""Four processes on one file: every reader sees the last version of a block, whole.

Each process owns a quarter of the blocks and alone writes them: number of the block and a version, repeated over the
whole block. All read all. A reader who sees version n of a block must never see an older one afterwards, its writer
must see exactly what it wrote, and what a writer has announced as written (in memory that they share) is a lower bound
for what every reader finds. Blocks lie across the edges of pages and granules.
"""

from __future__ import annotations

import mmap
import os
import random
import struct
from pathlib import Path

from support.data import GRANULE
from support.processes import start_children, wait_children

from campaigns.harness import Place

PROCESSES = 4
BLOCKS = 64
STAMP = struct.Struct("<QQ")
# Not a multiple of a page: neighbours share pages, and one block in the middle lies across two granules.
BLOCK_BYTES = (2 * GRANULE // BLOCKS + 16) // STAMP.size * STAMP.size


def stamped(block: int, version: int) -> bytes:
    return STAMP.pack(block, version) * (BLOCK_BYTES // STAMP.size)


def version_of(data: bytes, block: int) -> int:
    """The version that a whole block shows; AssertionError for a torn or foreign one."""
    assert len(data) == BLOCK_BYTES, f"block {block}: {len(data)} bytes"
    found, version = STAMP.unpack_from(data)
    assert found == block, f"block {block} shows block {found}"
    assert data == stamped(block, version), f"block {block} is torn at version {version}"
    return int(version)


class Stamper:
    """One of the processes. ``announced`` holds the last version of each block that is known to be written."""

    def __init__(self, path: Path, number: int, announced: mmap.mmap) -> None:
        self.fd = os.open(path, os.O_RDWR)
        self.number = number
        self.announced = announced
        self.random = random.Random(number)
        self.seen = [0] * BLOCKS
        self.written = [0] * BLOCKS

    def run(self, steps: int) -> None:
        for _ in range(steps):
            block = self.random.randrange(BLOCKS)
            if block % PROCESSES == self.number and self.random.random() < 0.7:
                self._write(block)
            else:
                self._read(block)
        os.close(self.fd)

    def _write(self, block: int) -> None:
        version = self.written[block] + 1
        assert os.pwrite(self.fd, stamped(block, version), block * BLOCK_BYTES) == BLOCK_BYTES
        self.written[block] = version
        struct.pack_into("<Q", self.announced, block * 8, version)

    def _read(self, block: int) -> None:
        least = max(self.seen[block], struct.unpack_from("<Q", self.announced, block * 8)[0])
        data = os.pread(self.fd, BLOCK_BYTES, block * BLOCK_BYTES)
        own = block % PROCESSES == self.number
        if own:
            assert version_of(data, block) == self.written[block], f"block {block}: not what this process wrote last"
        else:
            # A write that is under way may show in part, but never anything older than what was there before.
            versions = {version for _, version in STAMP.iter_unpack(data)}
            assert {found for found, _ in STAMP.iter_unpack(data)} == {block}, f"foreign bytes in block {block}"
            assert len(data) == BLOCK_BYTES
            assert min(versions) >= least, f"block {block}: version {min(versions)} after {least}"
            self.seen[block] = min(versions)


def four_stampers(root: Path, steps: int) -> None:
    """Runs the processes, ``steps`` operations each; fails if any saw what it must not."""
    path = root / "blocks"
    path.write_bytes(b"".join(stamped(block, 0) for block in range(BLOCKS)))
    announced = mmap.mmap(-1, BLOCKS * 8)

    def work(number: int) -> None:
        Stamper(path, number, announced).run(steps)

    wait_children(start_children(PROCESSES, work))
    with open(path, "rb") as file:
        for block in range(BLOCKS):
            expected = struct.unpack_from("<Q", announced, block * 8)[0]
            assert version_of(file.read(BLOCK_BYTES), block) == expected
    announced.close()
    os.unlink(path)


def four_processes(place: Place) -> str:
    steps = 2_000 if place.quick else 40_000
    four_stampers(place.root, steps)
    return f"{PROCESSES} processes, {steps} reads and writes each of {BLOCKS} stamped blocks"
