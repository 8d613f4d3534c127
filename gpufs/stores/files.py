"""The files of stores: opening a store, reading ranges of a file, and uploads, which are whole or not there."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gpufs.stores.checksums import Checksum, of_etag
from gpufs.stores.errors import TRIES, StoreError, failure, missing_package, retried
from gpufs.stores.urls import Url
from gpufs.stores.web import WholeFile, authorization

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore

# Each chunk is written as it arrives. The kernel passes at most 1 MiB to a mount at a time.
_CHUNK_BYTES: Final = 1 << 20
_PART_BYTES: Final = 16 << 20  # of an upload
# The attribute of an object with the time of its source, in seconds since 1970, as rclone has it.
_MODIFIED: Final = "mtime"
_MOST_PARTS: Final = 10_000  # of S3
# A connection from which nothing comes for so long is ended, and the range is requested again.
_SILENT: Final = timedelta(seconds=30)
# The limit of one request. It only ends what trickles for ever.
_LONGEST: Final = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class StoreFile:
    url: Url  # of this file alone
    path: str  # its name below what the user has named
    size: int  # in bytes
    etag: str | None  # the store's name for this content, if it checks that name in requests
    version: str  # what changes with the content, "" if nothing is known
    checksum: Checksum | None  # of its content, if the store has one
    store: ObjectStore = field(repr=False)
    _key: str = field(repr=False)
    # Requests the whole file at once, where a web server has it.
    whole: Callable[[], WholeFile] | None = field(default=None, repr=False)
    # Whether that is the only way to load it. Its size is 0 here: the answer has it, if anything.
    is_plain: bool = False
    modified_ns: int | None = None  # when it was changed, in nanoseconds since 1970, if the store knows
    cached: str | None = None  # the path of a file of this machine with the same content, in the cache of a hub

    def read(self, start: int, end: int) -> Iterator[bytes]:
        """Yield the bytes of a range in order. They may end early.

        StoreError if the store fails: EOPNOTSUPP if it sends whole files only, ESTALE if it has another file now.
        """
        import obstore

        options: Any = {"range": (start, end)}
        if self.etag is not None and not self.etag.startswith("W/"):  # a weak one matches nothing
            options["if_match"] = self.etag
        with translated(self.url):
            result = obstore.get(self.store, self._key, options=options)
        etag = result.meta["e_tag"]
        if result.meta["size"] != self.size or (self.etag and etag and etag != self.etag):
            raise StoreError(errno.ESTALE, "has changed during the copy: copy it again", self.url.shown)
        chunks = iter(result.stream(min_chunk_size=_CHUNK_BYTES))
        while True:
            with translated(self.url):
                chunk = next(chunks, None)
            if chunk is None:
                return
            yield chunk

    def delete(self) -> None:
        """Remove it from an object store. StoreError if that fails."""
        import obstore

        def remove() -> None:
            with translated(self.url):
                obstore.delete(self.store, self._key)

        retried(remove)


def nanoseconds(time: datetime | None) -> int | None:
    """Return a time of a store in nanoseconds since 1970, None for the time 0, which some report if they know none."""
    return int(time.timestamp() * 1e9) or None if time is not None else None


@contextmanager
def translated(url: Url) -> Iterator[None]:
    """Raise StoreError for what obstore raises."""
    try:
        from obstore.exceptions import BaseError
    except ModuleNotFoundError:
        raise missing_package(url, "obstore") from None
    try:
        yield
    except (BaseError, FileNotFoundError, ValueError) as error:
        raise failure(error, url) from None


def open_store(url: Url, *, retries: int = 0, headers: dict[str, str] | None = None) -> ObjectStore:
    """Return the store of a URL, without any request.

    ``retries``: how often it repeats a request that fails. ``headers``: sent with each request.
    """
    bundle = os.environ.get("AWS_CA_BUNDLE") if url.scheme == "s3" else None  # as AWS's programs do
    try:
        certificates = Path(bundle).read_bytes() if bundle else b""
    except OSError as error:
        raise StoreError(error.errno or errno.EIO, f"AWS_CA_BUNDLE is {bundle}: {error.strerror}", url.shown) from None
    with translated(url):
        from obstore.store import AzureStore, GCSStore, HTTPStore, S3Store

        # The URL says http, or the variable with the store's endpoint does.
        client: ClientConfig = {"allow_http": True, "timeout": _LONGEST, "read_timeout": _SILENT}
        sent = dict(headers or {})
        if url.is_web and (header := authorization(url)) is not None:
            sent["authorization"] = header
        if sent:
            client["default_headers"] = sent
        retry: Any = {"max_retries": retries}
        if url.scheme == "s3":
            if certificates:
                client["root_certificate"] = certificates
            return S3Store(url.place, client_options=client, retry_config=retry)
        if url.scheme == "gs":
            return GCSStore(url.place, client_options=client, retry_config=retry)
        if url.scheme == "az":
            return AzureStore(url.place, client_options=client, retry_config=retry)
        return HTTPStore.from_url(url.without_user, client_options=client, retry_config=retry)


def upload(fd: int, size: int, modified: str, url: Url, read: Callable[[int], None]) -> Checksum | None:
    """Store a file and return the checksum that the store has for it, None if it has none. Closes its descriptor.

    ``modified``: the time that the object notes as that of its source. ``read`` is called with the bytes read so far.
    An exception that it raises ends the upload.
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
        etag = _write(url, size, modified, parts(), part_bytes)
    finally:
        os.close(fd)
    if url.scheme != "s3":
        return None
    checksum = of_etag(etag, size)
    if checksum is not None and checksum.kind == "parts":
        return Checksum("parts", checksum.value, (part_bytes,))
    return checksum


def _write(url: Url, size: int, modified: str, chunks: Iterator[bytes], part_bytes: int) -> str | None:
    """Write a file of an object store and return its ETag. Either all of it is written or nothing.

    ``chunks``: the content, in pieces of ``part_bytes``; an exception there ends it.
    """
    import obstore

    store = open_store(url, retries=TRIES)
    noted: Any = {_MODIFIED: modified} if modified else None
    with translated(url):
        if size <= part_bytes:
            return obstore.put(store, url.key, b"".join(chunks), attributes=noted, use_multipart=False)["e_tag"]
        # The parts in flight are all the memory that it uses.
        how: Any = {"use_multipart": True, "chunk_size": part_bytes, "max_concurrency": 4}
        return obstore.put(store, url.key, chunks, attributes=noted, **how)["e_tag"]


def noted_of(store: ObjectStore, url: Url) -> tuple[int, str | None]:
    """Return the size of an object, and the time of its source that it notes. StoreError if that fails."""
    import obstore

    def ask() -> Any:
        with translated(url):
            return obstore.get(store, url.key, options={"head": True})

    found = retried(ask)
    return found.meta["size"], found.attributes.get(_MODIFIED)
