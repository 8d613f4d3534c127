"""Comparing the contents of files, for --checksum."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import zip_longest
from typing import TYPE_CHECKING

from gpufs.client._cancellation import Cancellation
from gpufs.copying.checksums import blocks, sha256_of
from gpufs.copying.entries import Entry, open_source

if TYPE_CHECKING:
    from gpufs.stores.files import StoreFile
    from gpufs.stores.urls import Url


def same_content(source: Entry | StoreFile, size: int, copy: Entry | Url, cancel: Cancellation) -> bool:
    """Return whether a copy has the content of its source. Without a checksum a store's file differs from all others.

    Raises
    ------
    OSError
        If one of the two cannot be read.
    """

    def content(fd: int) -> Iterator[memoryview]:
        return blocks(fd, lambda: cancel.cancelled)

    if isinstance(source, Entry) and isinstance(copy, Entry):
        with _opened(copy, size) as there, _opened(source, size) as here:
            return -1 not in (here, there) and all(
                one == other for one, other in zip_longest(content(here), content(there))
            )
    from gpufs.stores import checksums, finding

    stored, local = (source, copy) if isinstance(copy, Entry) else (finding.stored(copy), source)
    assert isinstance(local, Entry)
    assert not isinstance(stored, Entry)
    if stored is None or stored.size != size or stored.checksum is None:
        return False
    with _opened(local, size) as fd:
        return fd >= 0 and checksums.verify(content(fd), stored.checksum, size, lambda done: None).matches()


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
