"""Reading files for their checksums, and comparing their contents for --checksum."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import starmap, zip_longest
from typing import TYPE_CHECKING, Any, Final

from gpufs.client._cancellation import Cancellation
from gpufs.copying.entries import Entry, open_source
from gpufs.syscalls import os_error

if TYPE_CHECKING:
    from gpufs.stores.files import StoreFile
    from gpufs.stores.urls import Url

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


def has_checksum(copy: Entry, sha256: str, cancel: Cancellation) -> bool:
    """Return whether a file has a SHA-256. A file that cannot be read has none."""
    try:
        with _opened(copy, None) as fd:
            return fd >= 0 and sha256_of(fd, lambda: cancel.cancelled) == sha256
    except OSError:
        return False


@contextmanager
def _opened(entry: Entry, size: int | None) -> Iterator[int]:
    """Open a regular file, of this size unless that is None; -1 if it is another one."""
    with open_source(entry) as opened:
        yield opened.fd if stat.S_ISREG(opened.status.st_mode) and size in (None, opened.status.st_size) else -1
