"""Storing one file in an object store, by a multipart upload: the object is there when all parts are."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from typing import Final

from gpufs.stores import files
from gpufs.stores.checksums import Checksum, of_etag
from gpufs.stores.urls import Url

_PART_BYTES: Final = 16 << 20
_MOST_PARTS: Final = 10_000  # of S3


def upload(fd: int, size: int, url: Url, read: Callable[[int], None]) -> Checksum | None:
    """Store a file and return the checksum that the store has for it, None if it has none. Closes its descriptor.

    ``read`` is called with the bytes read so far. An exception that it raises ends the upload.
    """
    part_bytes = _PART_BYTES
    while part_bytes * _MOST_PARTS < size:
        part_bytes *= 2

    def parts() -> Iterator[bytes]:
        for start in range(0, size, part_bytes):
            end = min(start + part_bytes, size)
            part = bytearray(end - start)
            done = 0
            while done < len(part):
                read(start + done)
                count = os.preadv(fd, [memoryview(part)[done : done + (4 << 20)]], start + done)
                if not count:
                    raise OSError(errno.EIO, "the file became smaller during the copy")
                done += count
            read(end)
            yield bytes(part)

    try:
        etag = files.write(url, size, parts(), part_bytes)
    finally:
        os.close(fd)
    if url.scheme != "s3":
        return None
    checksum = of_etag(etag, size)
    if checksum is not None and checksum.kind == "parts":
        return Checksum("parts", checksum.value, (part_bytes,))
    return checksum
