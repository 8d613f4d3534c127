"""An operator new that fails when a test says so, for programs that the test starts."""

from __future__ import annotations

import contextlib
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path

from support.mounting import REPOSITORY
from support.vendors import preloaded

LIBRARY = next(iter(REPOSITORY.glob("build/cmake/**/failing_memory/libgpufs_failing_memory.so")), None)
ORDER_BYTES = 40


class FailingMemory:
    """The order, in a file, that the operator new of programs with this environment obeys."""

    def __init__(self, path: Path, *, create: bool = True) -> None:
        if create:
            path.write_bytes(bytes(mmap.PAGESIZE))
        with open(path, "r+b") as file:
            self._order = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        assert LIBRARY is not None, "scripts/build gpufs_tests makes it"
        self.environment = {"LD_PRELOAD": preloaded(LIBRARY, path.parent), "GPUFS_FAILING_MEMORY": str(path)}

    @contextlib.contextmanager
    def failing(self, skip: int, fail: int) -> Iterator[None]:
        """``skip`` allocations from now on are good, and the ``fail`` after them are not."""
        self._order[8:32] = struct.pack("QQQ", skip, fail, 0)
        self._order[0:8] = struct.pack("Q", 1)
        try:
            yield
        finally:
            self._order[0:8] = struct.pack("Q", 0)

    @property
    def seen(self) -> int:
        """Allocations while the last order was in force."""
        return int(struct.unpack("Q", self._order[24:32])[0])
