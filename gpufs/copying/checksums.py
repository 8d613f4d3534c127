"""Reading files for their checksums."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Iterator
from typing import Final

from gpufs.syscalls import os_error

_BLOCK_BYTES: Final = 4 << 20
_ZEROS: Final = bytes(1 << 20)


def blocks(fd: int, cancelled: Callable[[], bool], end: int | None = None) -> Iterator[memoryview]:
    """Yield the content of a file up to the offset ``end``, or all of it. OSError ECANCELED once ``cancelled``."""
    buffer = memoryview(bytearray(_BLOCK_BYTES))
    offset = 0
    while count := os.preadv(fd, [buffer if end is None else buffer[: end - offset]], offset):
        if cancelled():
            raise os_error(errno.ECANCELED)
        offset += count
        yield buffer[:count]


def sha256_of(
    fd: int, cancelled: Callable[[], bool], report: Callable[[int], None] = lambda done: None, end: int | None = None
) -> str:
    """Return the SHA-256 of a file up to the offset ``end``, or of all of it. Calls ``report`` with the bytes read."""
    checksum, done = hashlib.sha256(), 0
    for block in blocks(fd, cancelled, end):
        checksum.update(block)
        done += len(block)
        report(done)
    return checksum.hexdigest()


class RunningChecksum:
    """SHA-256 of the bytes of a file on its way between machines, if it is verified.

    Otherwise the bytes are as safe as ssh and the network make them: a checksum halves the rate of a fast network.
    """

    def __init__(self, *, verify: bool) -> None:
        self._sha256 = hashlib.sha256() if verify else None

    def update(self, data: memoryview) -> None:
        """Add bytes."""
        if self._sha256 is not None:
            self._sha256.update(data)

    def skip(self, count: int) -> None:
        """Add a hole."""
        while self._sha256 is not None and count:
            step = min(count, len(_ZEROS))
            self._sha256.update(_ZEROS[:step])
            count -= step

    @property
    def text(self) -> str:
        """In hexadecimal; "" if the file is not verified."""
        return "" if self._sha256 is None else self._sha256.hexdigest()
