"""Whether a copy is equal to its source."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from collections.abc import Callable
from typing import Final

_STREAM_BYTES: Final = 4 << 20


def _checksum(
    fd: int, end: int | None, stopped: Callable[[], bool], report: Callable[[int], None] = lambda offset: None
) -> str | OSError:
    """SHA-256 of a file up to the offset ``end``, or of all of it; the error if it cannot be read."""
    checksum = hashlib.sha256()
    buffer = memoryview(bytearray(_STREAM_BYTES))
    offset = 0
    try:
        while not stopped():
            count = os.preadv(fd, [buffer if end is None else buffer[: end - offset]], offset)
            if not count:
                return checksum.hexdigest()
            checksum.update(buffer[:count])
            offset += count
            report(offset)
    except OSError as error:
        return error
    return OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))


def checksums(
    source: int, destination: int, end: int | None, *, stopped: Callable[[], bool], report: Callable[[int], None]
) -> tuple[str | OSError, str | OSError]:
    """The checksums of both files, or the errors of reading them. ``end``: where the destination's content ends.

    ``stopped`` is called before each read and ends both with ECANCELED.
    """
    # Opened again through the descriptor: this is the file that was written, whatever its name refers to now.
    back = os.open(f"/proc/self/fd/{destination}", os.O_RDONLY | os.O_CLOEXEC)
    ended = threading.Event()
    theirs: list[str | OSError] = []

    def read_back() -> None:
        try:
            theirs.append(_checksum(back, end, lambda: ended.is_set() or stopped()))
        finally:
            os.close(back)

    reader = threading.Thread(target=read_back, daemon=True)
    try:
        for fd in (destination, back):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        reader.start()
    except BaseException:
        os.close(back)
        raise
    try:
        # The thread closes its own descriptor, so an exception here cannot close it during a read.
        ours = _checksum(source, None, stopped, report)
        reader.join()
    finally:
        ended.set()
    return ours, theirs[0]
