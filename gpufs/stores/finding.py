"""Finding the files that a URL names: one, those of a directory, or those that match a pattern."""

from __future__ import annotations

import errno
import fnmatch
import posixpath
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from gpufs.stores.checksums import of_etag
from gpufs.stores.errors import StoreError, retried
from gpufs.stores.files import StoreFile, nanoseconds, open_store, translated
from gpufs.stores.urls import Url, is_safe
from gpufs.stores.web import WholeFile

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_QUESTIONS: Final = 16  # about empty objects, at a time


def find(url: Url, *, recursive: bool) -> list[StoreFile]:
    """Return the files that a URL names, in the order of their names.

    ``recursive``: a directory stands for all files below it, otherwise it is an error. StoreError if there is nothing.
    """
    if url.scheme == "hf":
        from gpufs.stores import hub

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


def _select(url: Url, found: list[StoreFile], *, recursive: bool) -> list[StoreFile]:
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


def _web_file(url: Url) -> StoreFile:
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
        return StoreFile(url, url.name, 0, None, "", None, store, "", whole, is_plain=True)
    # What a server does not report is the time 0. Another query may name another file of the same time.
    time = meta["last_modified"]
    version = meta["e_tag"] or (str(time) if time.timestamp() and not url.has_query else "")
    modified = nanoseconds(None if url.has_query else time)
    return StoreFile(url, url.name, meta["size"], meta["e_tag"], version, None, store, "", whole, modified_ns=modified)


def _bucket_file(store: ObjectStore, url: Url) -> StoreFile:
    import obstore

    def ask() -> Any:
        with translated(url):
            return obstore.head(store, url.key)

    return _of_meta(store, url, retried(ask))


def _of_meta(store: ObjectStore, url: Url, meta: Any) -> StoreFile:
    checksum = of_etag(meta["e_tag"], meta["size"]) if url.scheme == "s3" else None
    etag = meta["e_tag"]
    version, modified = etag or str(meta["last_modified"]), nanoseconds(meta["last_modified"])
    return StoreFile(url, url.name, meta["size"], etag, version, checksum, store, url.key, modified_ns=modified)


def _listed(store: ObjectStore, url: Url) -> list[StoreFile]:
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


def _is_there(file: StoreFile) -> bool:
    return _stored(file.store, file.url) is not None


def _has_files_below(store: ObjectStore, url: Url) -> bool:
    import obstore

    def ask() -> bool:
        with translated(url):
            return any(len(batch) > 0 for batch in obstore.list(store, url.key, chunk_size=1))

    return retried(ask)


def below(url: Url) -> list[StoreFile]:
    """Return all files below a directory of an object store; an empty list if there is no such directory."""
    prefix = f"{url.key.rstrip('/')}/".lstrip("/")
    found = [one for one in _listed(open_store(url), url) if one.url.key.startswith(prefix)]
    return [replace(one, path=one.url.key.removeprefix(prefix)) for one in found]


def stored(url: Url) -> StoreFile | None:
    """Return the file of an object store that has this URL, None if there is none."""
    return _stored(open_store(url), url)


def _stored(store: ObjectStore, url: Url) -> StoreFile | None:
    try:
        return _bucket_file(store, url)
    except StoreError as error:
        if error.errno == errno.ENOENT:
            return None
        raise
