"""Reading files for their checksums, and comparing their contents for --checksum.

A save has checksums of parts of 64 MiB: several threads can make them, and holes cost nothing.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import mmap
import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import starmap, zip_longest
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from gpufs.client._cancellation import Cancellation
from gpufs.copying.entries import Entry, has_holes, next_data, open_source
from gpufs.copying.types import CopyProgress, Pace, Progress
from gpufs.syscalls import os_error

if TYPE_CHECKING:
    from gpufs.stores.files import StoreFile
    from gpufs.stores.urls import Url

_BLOCK_BYTES: Final = 4 << 20
_ZEROS: Final = bytes(1 << 20)
PART_BYTES: Final = 64 << 20
_THREADS: Final = 16  # while some wait for the disk or the device, others make checksums

# Takes data, from any of several threads: a buffer with the bytes, and their offset in the file.
Take: TypeAlias = Callable[[memoryview, int], None]
# The sums of parts by their offsets, in hexadecimal. A part without data has none.
Sums: TypeAlias = dict[int, str]


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
        if self._sha256 is not None:
            self._sha256.update(data)

    def skip(self, count: int) -> None:
        while self._sha256 is not None and count:
            step = min(count, len(_ZEROS))
            self._sha256.update(_ZEROS[:step])
            count -= step

    @property
    def text(self) -> str:
        """In hexadecimal; "" if the file is not verified."""
        return "" if self._sha256 is None else self._sha256.hexdigest()


# ---- --checksum ----


def same_content(source: Entry | StoreFile, size: int, copy: Entry | Url, cancel: Cancellation) -> bool:
    """Return whether a copy has the content of its source. Without a checksum a store's file differs from all others.

    OSError if one of the two cannot be read.
    """

    def content(fd: int) -> Iterator[memoryview]:
        return blocks(fd, lambda: cancel.cancelled)

    if isinstance(source, Entry) and isinstance(copy, Entry):
        with _opened(copy, size) as there, _opened(source, size) as here:
            return -1 not in (here, there) and all(starmap(_equal, zip_longest(content(here), content(there))))
    from gpufs.stores import checksums, finding

    stored, local = (source, copy) if isinstance(copy, Entry) else (finding.stored(copy), source)
    assert isinstance(local, Entry)
    assert not isinstance(stored, Entry)
    if stored is None or stored.size != size or stored.checksum is None:
        return False
    with _opened(local, size) as fd:
        return fd >= 0 and checksums.verify(content(fd), stored.checksum, size, lambda done: None).matches()


def _equal(one: memoryview | None, other: memoryview | None) -> bool:
    """Compare two blocks. As memoryviews they would be compared element by element."""
    if one is None or other is None or len(one) != len(other):
        return False
    whole: Any = other.obj  # the bytearray of blocks()
    return bool(whole.startswith(one))


@contextmanager
def _opened(entry: Entry, size: int) -> Iterator[int]:
    """Open a regular file of this size; -1 if it is another one."""
    with open_source(entry) as opened:
        yield opened.fd if stat.S_ISREG(opened.status.st_mode) and size == opened.status.st_size else -1


# ---- of parts ----


class PartReader:
    """Reads the parts of files for their SHA-256, several at once.

    It has 16 threads, each with a buffer of 4 MiB. A file of one part is read by the calling thread. Any
    thread may call.
    """

    def __init__(self) -> None:
        from concurrent.futures import ThreadPoolExecutor  # which others do without

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
                for future in futures:
                    future.exception()  # ended: the threads use the caller's descriptors

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
