"""Models, datasets and spaces on the Hugging Face Hub: their files, with sizes and checksums.

Credentials and the cache are those of huggingface_hub. What the cache has is copied from there.
"""

from __future__ import annotations

import errno
import functools
import os
import stat
from contextlib import closing, suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Annotated, Final
from urllib.parse import quote

import msgspec
from msgspec import Meta

from gpufs.stores.checksums import Checksum
from gpufs.stores.errors import StoreError, missing_package, retried, wrong_answer
from gpufs.stores.files import Size, StoreFile, nanoseconds, open_store
from gpufs.stores.urls import UNSAFE, Url, is_safe
from gpufs.stores.web import WholeFile

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_MOST_BYTES: Final = 64 << 20  # of the Hub's answer: 250 bytes a file
_SHA256_DIGITS: Final = 64  # the cache names large files by their SHA-256, others by Git's


class _Stored(msgspec.Struct):
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]


class _File(msgspec.Struct):
    rfilename: Annotated[str, Meta(min_length=1, max_length=4096)]
    size: Size
    blobId: Annotated[str, Meta(pattern=r"^[0-9a-f]{40}\Z")]
    lfs: _Stored | None = None

    def __post_init__(self) -> None:
        if not is_safe(self.rfilename):
            raise ValueError(f"the name of the file has {UNSAFE}")


class _Repository(msgspec.Struct):
    """What the Hub says about a repository. Its names and digests become paths: they are what they must be."""

    sha: Annotated[str, Meta(pattern=r"^[0-9a-f]{40}\Z")]
    siblings: list[_File]
    lastModified: datetime | None = None

    def __post_init__(self) -> None:
        if len({file.rfilename for file in self.siblings}) < len(self.siblings):
            raise ValueError("two files have one name - at `$.siblings`")


def list_files(url: Url) -> list[StoreFile]:
    """Return all files of the model that a URL names, in one revision: that of the moment, or the one it names."""
    try:
        import huggingface_hub as hub
        from huggingface_hub import constants, errors
    except ModuleNotFoundError:
        raise missing_package(url, "huggingface_hub") from None
    try:
        hub.hf_hub_url(url.place, "")  # checks the name
    except errors.HFValidationError as error:
        raise StoreError(errno.EINVAL, " ".join(str(error).split()), url.shown) from None
    if constants.HF_HUB_OFFLINE:
        return _cached_files(url)
    token = hub.get_token()
    of_revision = f"/revision/{quote(url.revision, safe='')}" if url.revision else ""
    api = replace(url, text=f"{constants.ENDPOINT}/api/{url.kind}s/{url.place}{of_revision}?blobs=true")

    def ask() -> bytes:
        try:
            with closing(WholeFile(api, token)) as answer:
                return answer.content(_MOST_BYTES)
        except StoreError as error:
            error.filename = url.shown
            raise

    try:
        model = msgspec.json.decode(retried(ask), type=_Repository)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise wrong_answer(error, url, constants.ENDPOINT) from None
    cache = _cache_folder(url)
    files = []
    for entry in sorted(model.siblings, key=lambda entry: entry.rfilename):
        # The commit, not the branch: all files are of one state.
        checksum = Checksum("sha256", entry.lfs.sha256) if entry.lfs else Checksum("git", entry.blobId)
        cached = _with_size(os.path.join(cache, "blobs", checksum.value), entry.size)
        modified_ns = nanoseconds(model.lastModified)  # of the latest commit: the file is not newer
        files.append(_file(url, entry.rfilename, model.sha, entry.size, checksum, modified_ns, cached, token))
    return files


@functools.lru_cache(maxsize=32)  # more than are copied at once
def _store_of(at: Url, token: str | None) -> ObjectStore:
    return open_store(at, token=token)


def _file(
    url: Url,
    name: str,
    commit: str,
    size: int,
    checksum: Checksum,
    modified_ns: int | None,
    cached: str | None,
    token: str | None = None,
) -> StoreFile:
    """Return a file of a revision, with the URL as the user would write it, and the one from which it is loaded."""
    import huggingface_hub as hub
    from huggingface_hub import constants

    endpoint = constants.ENDPOINT
    address = hub.hf_hub_url(url.place, name, repo_type=url.kind, revision=commit, endpoint=endpoint)
    revision = f"@{url.revision}" if url.revision else ""
    kind = "" if url.kind == "model" else f"{url.kind}s/"
    of_file = replace(url, text=f"hf://{kind}{url.place}{revision}/{name}", key=name)
    at = replace(of_file, text=address)
    # No ETag: that of the answer is of the server to which the Hub redirects.
    opened, whole = partial(_store_of, at, token), partial(WholeFile, at, token)
    known = (of_file, name, size, "", checksum.value, checksum, opened, "", whole)
    return StoreFile(*known, modified_ns=modified_ns, cached=cached)


def _cache_folder(url: Url) -> str:
    """Return the folder of a model in the cache, as huggingface_hub names it, whether it exists or not."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return os.path.join(constants.HF_HUB_CACHE, repo_folder_name(repo_id=url.place, repo_type=url.kind))


def _with_size(path: str, size: int) -> str | None:
    """Return a path, None unless it is a file of this size."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return path if stat.S_ISREG(status.st_mode) and status.st_size == size else None


def _cached_files(url: Url) -> list[StoreFile]:
    """Return the files that the cache has of a revision, without a question to the Hub."""
    folder, revision = _cache_folder(url), url.revision or "main"
    commit = revision
    with suppress(OSError), open(os.path.join(folder, "refs", revision), encoding="ascii", errors="replace") as file:
        named = file.read(64).strip()
        commit = named if is_safe(named) else revision
    snapshot = os.path.join(folder, "snapshots", commit)
    files = []
    for directory, _, names in os.walk(snapshot):
        for name in names:
            path = os.path.join(directory, name)
            below = os.path.relpath(path, snapshot)
            status = os.stat(path)
            value = os.path.basename(os.path.realpath(path))
            checksum = Checksum("sha256" if len(value) == _SHA256_DIGITS else "git", value)
            files.append(_file(url, below, commit, status.st_size, checksum, status.st_mtime_ns, path))
    if not files:
        text = f"is not in {folder}, and HF_HUB_OFFLINE is set"
        raise StoreError(errno.ENOENT, text, url.shown)
    return sorted(files, key=lambda file: file.path)
