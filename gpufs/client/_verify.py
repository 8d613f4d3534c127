"""Whether a copy is equal to its source."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from collections.abc import Callable
from typing import Final

_STREAM_BYTES: Final = 4 << 20


class _Checksum:
    """SHA-256 of a file, up to the offset ``end`` or all of it. ``stopped`` is called before each read."""

    def __init__(self, end: int | None, stopped: Callable[[], bool]) -> None:
        self._end = end
        self._stopped = stopped
        self.digest = ""
        self.error: OSError | None = None

    def read(self, fd: int, report: Callable[[int], None] | None = None) -> None:
        checksum = hashlib.sha256()
        buffer = memoryview(bytearray(_STREAM_BYTES))
        offset = 0
        try:
            while True:
                if self._stopped():
                    raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))
                count = os.preadv(fd, [buffer if self._end is None else buffer[: self._end - offset]], offset)
                if not count:
                    break
                checksum.update(buffer[:count])
                offset += count
                if report is not None:
                    report(offset)
            self.digest = checksum.hexdigest()
        except OSError as error:
            self.error = error

    def read_and_close(self, fd: int) -> None:
        try:
            self.read(fd)
        finally:
            os.close(fd)


def checksums(
    source: int, destination: int, end: int | None, *, stopped: Callable[[], bool], report: Callable[[int], None]
) -> tuple[str | OSError, str | OSError]:
    """The checksums of both files, or why they could not be read. ``end``: where the destination's content ends."""
    # Opened again through the descriptor, so that it is the file that was written whatever its name means now.
    back = os.open(f"/proc/self/fd/{destination}", os.O_RDONLY | os.O_CLOEXEC)
    ended = False
    ours, theirs = _Checksum(None, stopped), _Checksum(end, lambda: ended or stopped())
    try:
        for fd in (destination, back):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        other = threading.Thread(target=theirs.read_and_close, args=(back,), daemon=True)
        other.start()
    except BaseException:
        os.close(back)
        raise
    try:
        # The thread owns its descriptor: an exception here does not close it while the thread still reads.
        ours.read(source, report)
        other.join()
    finally:
        ended = True
    return ours.error or ours.digest, theirs.error or theirs.digest
