"""Checksums of files by parts of 64 MiB, as a save has them: several threads can make them, and holes cost nothing."""

from __future__ import annotations

import errno
import functools
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Final, TypeAlias

from gpufs.client._cancellation import Cancellation
from gpufs.copying.checksums import RunningChecksum
from gpufs.copying.entries import has_holes, next_data
from gpufs.copying.types import CopyProgress, Pace, Progress
from gpufs.syscalls import os_error

PART_BYTES: Final = 64 << 20
CHANGED: Final = "was changed while it was read"
_BLOCK_BYTES: Final = 4 << 20
_THREADS: Final = 16  # while some wait for the disk or the device, others make checksums

# Takes data: a buffer of whole pages, the bytes in it, and their offset in the file.
Take: TypeAlias = Callable[[memoryview, int, int], None]
# The sums of parts by their offsets, in hexadecimal. A part without data has none.
Sums: TypeAlias = dict[int, str]


class MovedBytes:
    """Counts and reports the bytes of one file that several threads read. ``phase``: as of CopyProgress."""

    def __init__(self, size: int, progress: Progress, phase: str = "copy") -> None:
        self.count = 0
        self._size = size
        self._progress = progress
        self._phase = phase
        self._lock = threading.Lock()  # guards the count and the pace
        self._pace = Pace()

    def add(self, count: int, *, path: str = "") -> None:
        """Count bytes, which have moved by a path of CopyResult unless that is empty."""
        with self._lock:
            self.count += count
            due = self._pace.is_due()
        if due and self._progress is not None:
            paths = {path: self.count} if path else {}
            self._progress(CopyProgress(self.count, self._size, paths, self._phase))


class PartReader:
    """Reads the parts of files for their SHA-256, several at once.

    It has 16 threads, each with a buffer of 4 MiB. A file of one part is read by the calling thread. Any
    thread may call.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_THREADS)
        self._of_thread = threading.local()

    def close(self) -> None:
        self._pool.shutdown()

    def read(self, fd: int, size: int, cancel: Cancellation, take: Take) -> Sums:
        """Return the sums of a file. ``take`` gets the data, from several threads. OSError ECANCELED once cancelled."""
        if size <= PART_BYTES:
            return {0: self._read_part(fd, 0, size, cancel, take)}
        with cancel.follower() as ours:
            starts = list(_parts_with_data(fd, size))
            futures = [
                self._pool.submit(self._read_part, fd, start, min(start + PART_BYTES, size), ours, take)
                for start in starts
            ]
            try:
                return {start: future.result() for start, future in zip(starts, futures, strict=True)}
            except BaseException:
                ours.cancel()
                raise
            finally:
                wait(futures)  # the threads use the caller's descriptors

    def differing_part(
        self, fd: int, size: int, sums: Sums, cancel: Cancellation, take: Take
    ) -> tuple[int, int] | None:
        """Return the start and end of the first part of a file that has another sum, None if none has."""
        found = self.read(fd, size, cancel, take)
        for start in sorted(found.keys() | sums.keys()):
            end = min(start + PART_BYTES, size)
            ours, theirs = found.get(start), sums.get(start)
            if ours != theirs:  # a hole may have become zeros, or zeros a hole
                zeros = _sum_of_zeros(end - start)
                if (ours or zeros) != (theirs or zeros):
                    return start, end
        return None

    def _read_part(self, fd: int, start: int, end: int, cancel: Cancellation, take: Take) -> str:
        checksum, buffer, offset = RunningChecksum(verify=True), self._buffer(), start
        data_end = start if has_holes(os.fstat(fd)) else end
        while offset < end:
            if cancel.cancelled:
                raise os_error(errno.ECANCELED)
            if offset == data_end:
                data, data_end = (min(each, end) for each in next_data(fd, offset))
                checksum.skip(data - offset)
                offset = data
                continue
            count = os.preadv(fd, [buffer[: min(_BLOCK_BYTES, data_end - offset)]], offset)
            if not count:
                raise OSError(errno.EBUSY, CHANGED)
            checksum.update(buffer[:count])
            take(buffer, count, offset)
            offset += count
        return checksum.text

    def _buffer(self) -> memoryview:
        if not hasattr(self._of_thread, "buffer"):
            self._of_thread.buffer = memoryview(mmap.mmap(-1, _BLOCK_BYTES))
        buffer: memoryview = self._of_thread.buffer
        return buffer


def _parts_with_data(fd: int, size: int) -> Iterator[int]:
    offset = 0
    while offset < size:
        start, _ = next_data(fd, offset)
        if start >= size:
            return
        start -= start % PART_BYTES
        yield start
        offset = start + PART_BYTES


@functools.lru_cache(maxsize=4)
def _sum_of_zeros(count: int) -> str:
    checksum = RunningChecksum(verify=True)
    checksum.skip(count)
    return checksum.text
