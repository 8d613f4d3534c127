"""The files of stores: opening a store, finding what a URL names, reading ranges and writing whole files."""

from __future__ import annotations

import errno
import fnmatch
import os
import posixpath
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from gpufs.remote.checksums import Checksum, of_etag
from gpufs.remote.errors import TRIES, StoreError, failure, retried
from gpufs.remote.urls import Url, is_safe
from gpufs.remote.web import WholeFile, authorization

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore

# Each chunk is written as it arrives. The kernel passes at most 1 MiB to a mount at a time.
_CHUNK_BYTES: Final = 1 << 20
_QUESTIONS: Final = 16  # about empty objects, at a time
# A connection from which nothing comes for so long is ended, and the range is requested again.
_SILENT: Final = timedelta(seconds=30)
_environment: Final = threading.Lock()
# Of one request. It only ends what trickles for ever.
_LONGEST: Final = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a store.

    Attributes
    ----------
    url : Url
        Its own.
    path : str
        Its name below what the user has named.
    size : int
        In bytes.
    etag : str or None
        The store's name for this content, if it checks that name in requests.
    version : str
        What changes with the content, "" if nothing is known.
    checksum : Checksum or None
        Of its content, if the store has one.
    whole : callable or None
        Requests the whole file at once, where a web server has it.
    is_plain : bool
        Whether that is the only way to load it. Its size is 0 here: the answer has it, if anything.
    """

    url: Url
    path: str
    size: int
    etag: str | None
    version: str
    checksum: Checksum | None
    _store: ObjectStore = field(repr=False)
    _key: str = field(repr=False)
    whole: Callable[[], WholeFile] | None = field(default=None, repr=False)
    is_plain: bool = False

    def read(self, start: int, end: int) -> Iterator[bytes]:
        """Yield the bytes of a range in order. They may end early.

        StoreError if the store fails: EOPNOTSUPP if it sends whole files only, ESTALE if it has another file now.
        """
        import obstore

        options: Any = {"range": (start, end)}
        if self.etag is not None and not self.etag.startswith("W/"):  # a weak one matches nothing
            options["if_match"] = self.etag
        with translated(self.url):
            result = obstore.get(self._store, self._key, options=options)
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


@contextmanager
def translated(url: Url) -> Iterator[None]:
    """Raise StoreError for what obstore raises."""
    try:
        from obstore.exceptions import BaseError
    except ModuleNotFoundError:
        raise StoreError(
            errno.ENOPKG, f"{url.scheme}:// needs obstore: pip install 'gpufs[cloud]'", url.shown
        ) from None
    try:
        yield
    except (BaseError, FileNotFoundError, ValueError) as error:
        raise failure(error, url) from None


def open_store(url: Url, *, retries: int = 0, headers: dict[str, str] | None = None) -> ObjectStore:
    """Return the store of a URL, without any request.

    ``retries``: how often it repeats a request that fails. ``headers``: sent with each request.
    """
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
            with _certificates():
                return S3Store(url.place, client_options=client, retry_config=retry)
        if url.scheme == "gs":
            return GCSStore(url.place, client_options=client, retry_config=retry)
        if url.scheme == "az":
            return AzureStore(url.place, client_options=client, retry_config=retry)
        return HTTPStore.from_url(url.without_user, client_options=client, retry_config=retry)


@contextmanager
def _certificates() -> Iterator[None]:
    """Use the certificates that AWS_CA_BUNDLE names, as AWS's programs do: they are read when a store is opened."""
    bundle = os.environ.get("AWS_CA_BUNDLE")
    if not bundle:
        yield
        return
    with _environment:
        before = os.environ.get("SSL_CERT_FILE")
        os.environ["SSL_CERT_FILE"] = bundle
        try:
            yield
        finally:
            if before is None:
                del os.environ["SSL_CERT_FILE"]
            else:
                os.environ["SSL_CERT_FILE"] = before


def find(url: Url, *, recursive: bool) -> list[RemoteFile]:
    """Return the files that a URL names, in the order of their names.

    ``recursive``: a directory stands for all files below it, otherwise it is an error. StoreError if there is nothing.
    """
    if url.scheme == "hf":
        from gpufs.remote import hub

        found = hub.list_files(url)
    elif url.is_web:
        return [_web_file(url)]
    else:
        store = open_store(url)
        if not url.is_pattern and not url.is_directory:
            try:
                file = _bucket_file(store, url)
            except StoreError as error:
                if error.errno != errno.ENOENT:
                    raise
            else:
                if recursive and _has_files_below(store, url):
                    text = "is an object and a directory: end it with a slash for the directory, or leave out -r"
                    raise StoreError(errno.EINVAL, text, url.shown)
                return [file]
        found = _listed(store, url)
    return _select(url, found, recursive=recursive)


def _select(url: Url, found: list[RemoteFile], *, recursive: bool) -> list[RemoteFile]:
    """Return those of the files that the URL names, with their paths below it."""
    prefix = url.key if url.is_directory else f"{url.key}/"
    if url.is_pattern:
        # A pattern that matches nothing may be the name itself, as in a shell.
        matching = [one for one in found if _matches(one.url.key, url.key)]
        matching = matching or [one for one in found if one.url.key == url.key]
        files = [replace(one, path=posixpath.basename(one.url.key)) for one in matching]
        if not files:
            raise StoreError(errno.ENOENT, "no file matches", url.shown)
    elif files := [replace(one, path=url.name) for one in found if one.url.key == url.key]:
        return files
    else:
        below = [one for one in found if one.url.key.startswith(prefix)]
        if not below:
            bucket = " or its bucket" * url.is_bucket
            raise StoreError(errno.ENOENT, f"the file or directory{bucket} does not exist", url.shown)
        if not recursive:
            raise StoreError(errno.EISDIR, "is a directory (-r copies it)", url.shown)
        files = [replace(one, path=one.url.key.removeprefix(prefix)) for one in below]
    for file in files:
        if not is_safe(file.path):
            raise StoreError(errno.EINVAL, "its key has an empty part, or one that is . or ..", file.url.shown)
    return files


def _matches(key: str, pattern: str) -> bool:
    """Return whether a key matches. As in a shell, * and ? match no slash."""
    parts, patterns = key.split("/"), pattern.split("/")
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))


def _web_file(url: Url) -> RemoteFile:
    store = open_store(url)
    import obstore

    whole = partial(WholeFile, url)

    def ask() -> Any:
        with translated(url):
            return obstore.head(store, "")

    def ask_by_get() -> Any:
        with translated(url):
            return obstore.get(store, "", options={"range": (0, 1)}).meta

    # Not all servers answer HEAD, or a request for a part: a URL may be signed for GET alone, and what a program makes
    # at the moment may have no length, or the length 0 in the answer to HEAD.
    meta: Any = None
    for question in (ask, ask_by_get):
        try:
            meta = retried(question)
        except StoreError as error:
            denied = error.errno == errno.EACCES and question is ask_by_get
            if error.errno in (errno.ENOENT, errno.EPROTO) or error.transient or denied:
                raise
            meta = None
        if meta is not None and meta["size"]:
            break
    else:
        return RemoteFile(url, url.name, 0, None, "", None, store, "", whole, is_plain=True)
    # What a server does not report is the time 0. Another query may name another file of the same time.
    time = meta["last_modified"]
    version = meta["e_tag"] or (str(time) if time.timestamp() and not url.has_query else "")
    return RemoteFile(url, url.name, meta["size"], meta["e_tag"], version, None, store, "", whole)


def _bucket_file(store: ObjectStore, url: Url) -> RemoteFile:
    import obstore

    def ask() -> Any:
        with translated(url):
            return obstore.head(store, url.key)

    return _of_meta(store, url, retried(ask))


def _of_meta(store: ObjectStore, url: Url, meta: Any) -> RemoteFile:
    checksum = of_etag(meta["e_tag"], meta["size"]) if url.scheme == "s3" else None
    etag = meta["e_tag"]
    return RemoteFile(url, url.name, meta["size"], etag, etag or str(meta["last_modified"]), checksum, store, url.key)


def _listed(store: ObjectStore, url: Url) -> list[RemoteFile]:
    """Return all files below the directory that a URL names, or that its pattern begins with."""
    import obstore

    fixed = re.split(r"[*?[]", url.key)[0] if url.is_pattern else f"{url.key}/"
    directory = posixpath.dirname(fixed).strip("/")

    def ask() -> list[Any]:
        with translated(url):
            return [meta for batch in obstore.list(store, directory or None) for meta in batch]

    root = Url("", url.scheme, url.place, "")
    metas = sorted(retried(ask), key=lambda meta: str(meta["path"]))
    found = [_of_meta(store, root.below(meta["path"]), meta) for meta in metas]
    # Some tools store an empty object to make a directory. Its key ends with a slash, which obstore removes.
    empty = [file for file in found if not file.size]
    with ThreadPoolExecutor(_QUESTIONS) as threads:
        real = {file.url.key for file, there in zip(empty, threads.map(_is_there, empty), strict=True) if there}
    return [file for file in found if file.size or file.url.key in real]


def _is_there(file: RemoteFile) -> bool:
    return _has(file._store, file.url)


def _has_files_below(store: ObjectStore, url: Url) -> bool:
    import obstore

    with translated(url):
        return any(len(batch) > 0 for batch in obstore.list(store, url.key, chunk_size=1))


def exists(url: Url) -> bool:
    """Return whether an object store has a file."""
    return _has(open_store(url), url)


def _has(store: ObjectStore, url: Url) -> bool:
    try:
        _bucket_file(store, url)
    except StoreError as error:
        if error.errno == errno.ENOENT:
            return False
        raise
    return True


def write(url: Url, size: int, chunks: Iterator[bytes], part_bytes: int) -> str | None:
    """Write a file of an object store and return its ETag. Either all of it is written or nothing.

    ``chunks``: the content, in pieces of ``part_bytes``; an exception there ends it.
    """
    import obstore

    store = open_store(url, retries=TRIES)
    with translated(url):
        if size <= part_bytes:
            return obstore.put(store, url.key, b"".join(chunks), use_multipart=False)["e_tag"]
        # The parts in flight are all the memory that it uses.
        return obstore.put(store, url.key, chunks, use_multipart=True, chunk_size=part_bytes, max_concurrency=4)[
            "e_tag"
        ]
