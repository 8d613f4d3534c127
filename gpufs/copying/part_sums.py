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
_BLOCK_BYTES: Final = 4 << 20
_THREADS: Final = 16  # while some wait for the disk or the device, others make checksums

# Takes data, from any of several threads: a buffer with the bytes, and their offset in the file.
Take: TypeAlias = Callable[[memoryview, int], None]
# The sums of parts by their offsets, in hexadecimal. A part without data has none.
Sums: TypeAlias = dict[int, str]


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

    def read(
        self,
        fd: int,
        size: int,
        progress: Progress,
        cancel: Cancellation,
        take: Take = lambda data, offset: None,
        phase: str = "copy",
    ) -> tuple[Sums, int]:
        """Return the sums of a file, and how many bytes it has that are not holes.

        ``take`` gets the data. ``phase``: as of CopyProgress. OSError ECANCELED once cancelled.
        """
        read, pace, lock = 0, Pace(), threading.Lock()

        def count(data: memoryview, offset: int) -> None:
            nonlocal read
            take(data, offset)
            with lock:
                read += len(data)
                due = pace.is_due()
            if due and progress is not None:
                progress(CopyProgress(read, size, {"mount": read}, phase))

        if size <= PART_BYTES:
            return {0: self._read_part(fd, 0, size, cancel, count)}, read
        with cancel.follower() as ours:
            starts = list(_parts_with_data(fd, size))
            futures = [
                self._pool.submit(self._read_part, fd, start, min(start + PART_BYTES, size), ours, count)
                for start in starts
            ]
            try:
                return {start: future.result() for start, future in zip(starts, futures, strict=True)}, read
            except BaseException:
                ours.cancel()
                raise
            finally:
                wait(futures)  # the threads use the caller's descriptors

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
                raise OSError(errno.EBUSY, "was changed while it was read")
            checksum.update(buffer[:count])
            take(buffer[:count], offset)
            offset += count
        return checksum.text

    def _buffer(self) -> memoryview:
        if not hasattr(self._of_thread, "buffer"):
            self._of_thread.buffer = memoryview(mmap.mmap(-1, _BLOCK_BYTES))
        buffer: memoryview = self._of_thread.buffer
        return buffer


def different_part(found: Sums, wanted: Sums, size: int) -> tuple[int, int] | None:
    """Return the start and end of the first part of a file that has another sum than it should, None if none has."""
    for start in sorted(found.keys() | wanted.keys()):
        end = min(start + PART_BYTES, size)
        ours, theirs = found.get(start), wanted.get(start)
        if ours != theirs:  # a hole may have become zeros, or zeros a hole
            zeros = _sum_of_zeros(end - start)
            if (ours or zeros) != (theirs or zeros):
                return start, end
    return None


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
