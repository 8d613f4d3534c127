"""Finding the files that a URL names: one, those of a directory, or those that match a pattern."""

from __future__ import annotations

import errno
import fnmatch
import posixpath
import re
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from gpufs import waiting
from gpufs.stores.checksums import of_etag
from gpufs.stores.errors import StoreError, retried
from gpufs.stores.files import FileMeta, StoreFile, checked, open_store, translated
from gpufs.stores.urls import UNSAFE, Url, is_safe
from gpufs.stores.web import WholeFile
from gpufs.waiting import Workers

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_QUESTIONS: Final = 16  # about empty objects, at a time
# A listing has at most so many names, which take about 1 KiB each. It comes in steps, and each has such a limit.
_MOST_FILES: Final = 1_000_000
_STEP_FILES: Final = 1000
_STEP_SECONDS: Final = 300.0


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
        file = None if url.is_pattern or url.is_directory else _stored(store, url)
        if file is not None:
            if recursive and retried(lambda: any(_steps(store, url, url.key, 1))):
                text = "is an object and a directory: end it with a slash for the directory, or copy without -r"
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
        depth = url.key.count("/") + 1
        above = ("/".join(one.url.key.split("/")[:depth]) for one in found if one.url.key.count("/") >= depth)
        if recursive and (directory := next((path for path in above if _matches(path, url.key)), None)):
            text = f"a pattern stands for files, and {directory} is a directory that matches: name it, or leave out -r"
            raise StoreError(errno.EISDIR, text, url.shown)
    elif files := [replace(one, path=url.name) for one in found if one.url.key == url.key]:
        return files
    else:
        below = [one for one in found if one.url.key.startswith(prefix)]
        if not below:
            bucket = " or its bucket" * url.is_bucket
            raise StoreError(errno.ENOENT, f"the file or directory{bucket} does not exist", url.shown)
        if not recursive:
            raise StoreError(errno.EISDIR, "is a directory (-r or gpufs.copy_tree() copies it)", url.shown)
        files = [replace(one, path=one.url.key.removeprefix(prefix)) for one in below]
    for file in files:
        if not is_safe(file.path):
            raise StoreError(errno.EINVAL, f"its key has {UNSAFE}", file.url.shown)
    return files


def _matches(key: str, pattern: str) -> bool:
    """Return whether a key matches. As in a shell, * and ? match no slash."""
    parts, patterns = key.split("/"), pattern.split("/")
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))


def _web_file(url: Url) -> StoreFile:
    store = open_store(url)
    import obstore

    whole = partial(WholeFile, url)

    # Not all servers answer HEAD, or a request for a part: a URL may be signed for GET alone, and what a program makes
    # at the moment may have no length, or the length 0 in the answer to HEAD.
    meta: FileMeta | None = None
    for ask in (_head, lambda store, key: obstore.get(store, key, options={"range": (0, 1)}).meta):
        try:
            meta = _meta(store, url, "", ask)
        except StoreError as error:
            denied = error.errno == errno.EACCES and ask is not _head
            if error.errno in (errno.ENOENT, errno.EPROTO) or error.transient or denied:
                raise
            meta = None
        if meta is not None and meta.size:
            break
    else:
        return StoreFile(url, url.name, 0, "", "", None, lambda: store, "", whole, is_plain=True)
    # Without a strong ETag nothing shows that parts are of one file. Another query may name another file of a time.
    etag, modified = meta.strong_etag, None if url.has_query else meta.modified_ns
    known = (url, url.name, meta.size, etag, etag, None, lambda: store, "", whole)
    return StoreFile(*known, is_plain=not etag, modified_ns=modified)


def _head(store: ObjectStore, key: str) -> Any:
    import obstore

    return obstore.head(store, key)


def _meta(store: ObjectStore, url: Url, key: str, ask: Callable[[ObjectStore, str], Any] = _head) -> FileMeta:
    def ask_once() -> FileMeta:
        with translated(url):
            return checked(ask(store, key), url)

    return retried(ask_once)


def _of_meta(store: ObjectStore, url: Url, meta: FileMeta) -> StoreFile:
    checksum = of_etag(meta.e_tag, meta.size) if url.scheme == "s3" else None
    etag = meta.strong_etag
    known = (url, url.name, meta.size, etag, etag, checksum, lambda: store, url.key)
    return StoreFile(*known, modified_ns=meta.modified_ns)


def _steps(store: ObjectStore, url: Url, directory: str, count: int) -> Iterator[list[FileMeta]]:
    """Yield what a store lists, ``count`` names at a time. StoreError once it makes no progress."""
    import obstore

    with translated(url):
        batches = iter(obstore.list(store, directory or None, chunk_size=count))
    while True:
        deadline = time.monotonic() + _STEP_SECONDS
        step: Any = waiting.start(next, batches, None)
        with translated(url):
            try:
                batch = waiting.result(step, lambda: time.monotonic() > deadline)  # noqa: B023 - called here alone
            except OSError as error:
                if error.errno != errno.ECANCELED:
                    raise
                text = f"the store lists nothing more, and has not ended its list after {_STEP_SECONDS:.0f} seconds"
                raise StoreError(errno.ETIMEDOUT, text, url.shown) from None
        if batch is None:
            return
        yield [checked(meta, url) for meta in batch]


def _listed(store: ObjectStore, url: Url) -> list[StoreFile]:
    """Return all files below the directory that a URL names, or that its pattern begins with."""
    fixed = re.split(r"[*?[]", url.key)[0] if url.is_pattern else f"{url.key}/"
    directory = posixpath.dirname(fixed).strip("/")

    def ask() -> dict[str, FileMeta]:
        names: dict[str, FileMeta] = {}
        for step in _steps(store, url, directory, _STEP_FILES):
            before = len(names)
            # Some tools store an empty object to make a directory. Its key ends with a slash, which obstore removes.
            names.update((meta.path, meta) for meta in step if meta.size or meta.path not in names)
            if len(names) == before and len(step) >= _STEP_FILES:
                raise StoreError(errno.EPROTO, "the store lists the same names again", url.shown)
            if len(names) > _MOST_FILES:
                text = f"has more than {_MOST_FILES} files: name a directory below it, or a part of them"
                raise StoreError(errno.EFBIG, text, url.shown)
        return names

    root = Url("", url.scheme, url.place, "")
    found = [_of_meta(store, root.below(path), meta) for path, meta in sorted(retried(ask).items())]
    empty = [file for file in found if not file.size]
    with closing(Workers(_QUESTIONS)) as workers:
        there = waiting.results([workers.submit(_stored, store, file.url) for file in empty])
    real = {file.url.key for file in there if file is not None}
    return [file for file in found if file.size or file.url.key in real]


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
        return _of_meta(store, url, _meta(store, url, url.key))
    except StoreError as error:
        if error.errno == errno.ENOENT:
            return None
        raise
