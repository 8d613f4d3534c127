"""The peer: a file system that answers READ and WRITE in Python with pyfuse3, tuned as well as that can be.

    python -m bench.peer_pyfuse3 MOUNTPOINT BYTES_OF_A_FILE

It is examples/own_filesystem.py with other files: their memory is allocated and touched before it is used, so a write
is one copy by an assignment to a memoryview and a read returns a slice without a copy. The example's direct_io avoids
the page cache's detour through single pages, and its time-outs of ten minutes keep LOOKUP and GETATTR out of the way.
"""

from __future__ import annotations

import errno
import gc
import mmap
import sys
from collections.abc import Sequence
from pathlib import Path

from pyfuse3 import EntryAttributes

from gpufs.engine import Engine

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from own_filesystem import MIB, File, FileSystem, serve


class PeerFile(File):
    """A file of at most `limit` bytes."""

    def __init__(self, limit: int, name: bytes, entry: EntryAttributes) -> None:
        self.name = name
        self.entry = entry
        self.references = 0
        self._limit = limit
        self._memory = memoryview(mmap.mmap(-1, limit, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE))
        self._size = 0

    def attributes(self) -> EntryAttributes:
        self.entry.st_size, self.entry.st_blocks = self._size, self._size // 512
        return self.entry

    async def read(self, offset: int, size: int) -> memoryview:
        return self._memory[offset : min(offset + size, self._size)]

    async def write(self, offset: int, data: bytes) -> int:
        end = offset + len(data)
        if end > self._limit:
            raise OSError(errno.ENOSPC, "the file has its largest size")
        self._memory[offset:end] = data
        self._size = max(self._size, end)
        return len(data)

    def resize(self, size: int) -> None:
        if size > self._limit:
            raise OSError(errno.ENOSPC, "the file has its largest size")
        self._size = size

    def close(self) -> None:
        """The memory is freed when the last slice of it has been sent."""


class Peer(FileSystem):
    """One directory of such files."""

    def __init__(self, engine: Engine, limit: int) -> None:
        super().__init__(engine)
        self._limit = limit

    def new_file(self, name: bytes, entry: EntryAttributes) -> PeerFile:
        return PeerFile(self._limit, name, entry)


def main(arguments: Sequence[str]) -> None:
    mountpoint, limit = arguments[0], int(arguments[1])
    gc.freeze()
    gc.disable()
    with Engine("host", devices=1, memory_bytes=64 * MIB) as engine:
        serve(Peer(engine, limit), mountpoint, "bench-peer")


if __name__ == "__main__":
    main(sys.argv[1:])
