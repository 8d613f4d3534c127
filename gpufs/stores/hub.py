"""Models, datasets and spaces on the Hugging Face Hub: their files, with sizes and checksums.

Credentials and the cache are those of huggingface_hub. What the cache has is copied from there.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final

from gpufs.stores.checksums import Checksum
from gpufs.stores.errors import StoreError, missing_package, retried
from gpufs.stores.files import StoreFile, nanoseconds, open_store
from gpufs.stores.urls import Url
from gpufs.stores.web import WholeFile

_SHA256_DIGITS: Final = 64  # the cache names large files by their SHA-256, others by Git's


def list_files(url: Url) -> list[StoreFile]:
    """Return all files of the model that a URL names, in one revision: that of the moment, or the one it names."""
    try:
        import huggingface_hub as hub
        from huggingface_hub import constants, errors
    except ModuleNotFoundError:
        raise missing_package(url, "huggingface_hub") from None

    def ask() -> Any:
        try:
            return hub.HfApi().repo_info(url.place, repo_type=url.kind, revision=url.revision, files_metadata=True)
        except errors.GatedRepoError:
            text = "access is denied: set HF_TOKEN, and accept the model's conditions on its page"
            raise StoreError(errno.EACCES, text, url.shown) from None
        except errors.RevisionNotFoundError:
            raise StoreError(errno.ENOENT, f"the revision {url.revision} does not exist", url.shown) from None
        except errors.RepositoryNotFoundError:
            text = f"the {url.kind} {url.place} does not exist, or it is private: set HF_TOKEN"
            raise StoreError(errno.ENOENT, text, url.shown) from None
        except errors.HFValidationError as error:
            raise StoreError(errno.EINVAL, " ".join(str(error).split()), url.shown) from None
        except errors.HfHubHTTPError as error:
            status = error.response.status_code
            if status == 401:
                raise StoreError(errno.EACCES, "HF_TOKEN is not valid", url.shown) from None
            text = f"the Hub does not answer as expected: status {status}"
            raise StoreError(errno.EIO, text, url.shown, transient=status >= 500 or status == 429) from None
        except Exception as error:  # noqa: BLE001 - of requests or httpx, as its version has it
            text = f"the Hub cannot be reached: {type(error).__name__}: {error}"
            raise StoreError(errno.EIO, text, url.shown, transient=True) from None

    if constants.HF_HUB_OFFLINE:
        return _cached_files(url)
    model = retried(ask)
    cache = _cache_folder(url)
    token = hub.get_token()
    headers = {"authorization": f"Bearer {token}"} if token else {}
    files = []
    for entry in sorted(model.siblings or [], key=lambda entry: entry.rfilename):
        # The commit, not the branch: all files are of one state.
        of_file, at = _named(url, entry.rfilename, model.sha)
        store = open_store(at, headers=headers)
        sha256 = entry.lfs.sha256 if entry.lfs is not None else None
        checksum = Checksum("sha256", sha256) if sha256 else Checksum("git", entry.blob_id or "")
        # No ETag: that of the answer is of the server to which the Hub redirects.
        file = StoreFile(
            of_file,
            entry.rfilename,
            entry.size or 0,
            None,
            checksum.value,
            checksum,
            store,
            "",
            partial(WholeFile, at, headers),
            modified_ns=nanoseconds(model.last_modified),  # of the latest commit: the file is not newer
            cached=_with_size(os.path.join(cache, "blobs", checksum.value), entry.size or 0),
        )
        files.append(file)
    return files


def _named(url: Url, name: str, commit: str) -> tuple[Url, Url]:
    """Return the URL of a file as the user would write it, and the one from which it is loaded."""
    import huggingface_hub as hub
    from huggingface_hub import constants

    endpoint = constants.ENDPOINT
    address = hub.hf_hub_url(url.place, name, repo_type=url.kind, revision=commit, endpoint=endpoint)
    revision = f"@{url.revision}" if url.revision else ""
    kind = "" if url.kind == "model" else f"{url.kind}s/"
    of_file = replace(url, text=f"hf://{kind}{url.place}{revision}/{name}", key=name)
    return of_file, replace(of_file, text=address)


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
        commit = file.read(64).strip()
    snapshot = os.path.join(folder, "snapshots", commit)
    files = []
    for directory, _, names in os.walk(snapshot):
        for name in names:
            path = os.path.join(directory, name)
            below = os.path.relpath(path, snapshot)
            status = os.stat(path)
            value = os.path.basename(os.path.realpath(path))
            checksum = Checksum("sha256" if len(value) == _SHA256_DIGITS else "git", value)
            of_file, at = _named(url, below, commit)
            modified = status.st_mtime_ns
            store = open_store(at)
            files.append(
                StoreFile(
                    *(of_file, below, status.st_size, None, value, checksum, store, ""),
                    modified_ns=modified,
                    cached=path,
                )
            )
    if not files:
        text = f"is not in {folder}, and HF_HUB_OFFLINE is set"
        raise StoreError(errno.ENOENT, text, url.shown)
    return sorted(files, key=lambda file: file.path)
