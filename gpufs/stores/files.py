"""The files of stores: opening a store, reading ranges of a file, and uploads, which are whole or not there."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import msgspec
from msgspec import Meta

from gpufs.stores.checksums import Checksum, of_etag
from gpufs.stores.errors import StoreError, failure, missing_package, retried, wrong_answer
from gpufs.stores.urls import SCHEMES, Url
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
# The limit of one request. It only ends what trickles for ever: the rest of a part is requested again.
_LONGEST: Final = timedelta(minutes=10)
_LONGEST_UPLOAD: Final = timedelta(hours=1)

Size: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class FileMeta(msgspec.Struct, gc=False):
    """What a store says about a file. No store has longer keys."""

    path: Annotated[str, Meta(max_length=1024)]
    size: Size
    e_tag: Annotated[str, Meta(max_length=1024, pattern=r"^[ -~]*\Z")] | None
    last_modified: datetime

    @property
    def strong_etag(self) -> str:
        """The ETag if it changes with each byte, else ""."""
        return "" if self.e_tag is None or self.e_tag.startswith("W/") else self.e_tag

    @property
    def modified_ns(self) -> int | None:
        return nanoseconds(self.last_modified)


def checked(meta: Any, url: Url) -> FileMeta:
    """Return what obstore says about a file. StoreError if no file can be like that."""
    try:
        return msgspec.convert(meta, FileMeta)
    except msgspec.ValidationError as error:
        raise wrong_answer(error, url) from None


@dataclass(frozen=True, slots=True)
class StoreFile:
    url: Url  # of this file alone
    path: str  # its name below what the user has named
    size: int  # in bytes
    etag: str  # the store's name for this content, if it checks that name in requests; else ""
    version: str  # what is another one with each other content, "" if nothing is known
    checksum: Checksum | None  # of its content, if the store has one
    _open: Callable[[], ObjectStore] = field(repr=False)
    _key: str = field(repr=False)
    # Requests the whole file at once, where a web server has it.
    whole: Callable[[], WholeFile] | None = field(default=None, repr=False)
    # Whether that is the only way to load it: the answer has the size, if anything.
    is_plain: bool = False
    modified_ns: int | None = None  # when it was changed, in nanoseconds since 1970, if the store knows
    cached: str | None = None  # the path of a file of this machine with the same content, in the cache of a hub

    def read(self, start: int, end: int) -> Iterator[bytes]:
        """Yield the bytes of a range in order. They may end early.

        StoreError if the store fails: EOPNOTSUPP if it sends whole files only, ESTALE if it has another file now.
        """
        import obstore

        options: Any = {"range": (start, end)}
        if self.etag:
            options["if_match"] = self.etag
        with translated(self.url):
            result = obstore.get(self._open(), self._key, options=options)
        meta = checked(result.meta, self.url)
        same = not (self.etag and meta.e_tag) or meta.e_tag == self.etag
        if meta.size != self.size or not same or not (self.version or meta.modified_ns == self.modified_ns):
            raise StoreError(errno.ESTALE, "has changed during the copy: copy it again", self.url.shown)
        chunks = iter(result.stream(min_chunk_size=_CHUNK_BYTES))
        while True:
            with translated(self.url):
                chunk = next(chunks, None)
            if chunk is None:
                return
            start += len(chunk)
            if start > end:
                raise StoreError(errno.EIO, "the store sent more than was requested", self.url.shown)
            yield chunk

    def delete(self) -> None:
        """Remove it from an object store. StoreError if that fails."""
        import obstore

        def remove() -> None:
            with translated(self.url):
                obstore.delete(self._open(), self._key)

        retried(remove)


def nanoseconds(time: datetime | None) -> int | None:
    """Return a time of a store in nanoseconds since 1970, None for the time 0, which some report if they know none."""
    return max(int(time.timestamp() * 1e9), 0) or None if time is not None else None


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
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # which no module has by name
            raise
        raise wrong_answer(error, url) from None


def open_store(url: Url, *, retries: int = 0, token: str | None = None) -> ObjectStore:
    """Return the store of a URL, without any request.

    ``retries``: how often it repeats a request that fails, for uploads. ``token``: sent with each request.
    """
    bundle = os.environ.get("AWS_CA_BUNDLE") if url.scheme == "s3" else None  # as AWS's programs do
    try:
        certificates = Path(bundle).read_bytes() if bundle else b""
    except OSError as error:
        raise StoreError(error.errno or errno.EIO, f"AWS_CA_BUNDLE is {bundle}: {error.strerror}", url.shown) from None
    with translated(url):
        from obstore import store as classes

        # The URL says http, or the variable with the store's endpoint does.
        longest = _LONGEST_UPLOAD if retries else _LONGEST
        client: ClientConfig = {"allow_http": True, "timeout": longest, "read_timeout": _SILENT}
        if header := authorization(url, token):
            client["default_headers"] = {"authorization": header}
        if certificates:
            client["root_certificate"] = certificates
        kind: Any = getattr(classes, SCHEMES[url.scheme].store)
        make, place = (kind, url.place) if url.is_bucket else (kind.from_url, url.without_user)
        store: ObjectStore = make(place, client_options=client, retry_config={"max_retries": retries})
        return store


def upload(
    store: ObjectStore, fd: int, size: int, modified: str, url: Url, read: Callable[[int], None]
) -> Checksum | None:
    """Store a file and return the checksum that the store has for it, None if it has none. Closes its descriptor.

    Either all of it is stored or nothing. ``store``: with retries. ``modified``: the time that the object notes as that
    of its source. ``read`` is called with the bytes read so far. An exception that it raises ends the upload.
    """
    import obstore

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

    content: Any = parts()
    how: Any = {"attributes": {_MODIFIED: modified} if modified else None, "use_multipart": size > part_bytes}
    try:
        with translated(url):
            if size > part_bytes:
                how |= {"chunk_size": part_bytes, "max_concurrency": 4}  # these parts are all the memory that it uses
            else:
                content = b"".join(content)
            etag = obstore.put(store, url.key, content, **how)["e_tag"]
    finally:
        os.close(fd)
    if url.scheme != "s3":
        return None
    checksum = of_etag(etag, size)
    if checksum is not None and checksum.kind == "parts":
        return Checksum("parts", checksum.value, (part_bytes,))
    return checksum


def noted_of(store: ObjectStore, url: Url) -> tuple[int, str | None]:
    """Return the size of an object, and the time of its source that it notes. StoreError if that fails."""
    import obstore

    def ask() -> Any:
        with translated(url):
            return obstore.get(store, url.key, options={"head": True})

    found = retried(ask)
    return found.meta["size"], found.attributes.get(_MODIFIED)
