"""Models, datasets and spaces on the Hugging Face Hub: their files, with sizes and checksums.

Credentials are those of huggingface_hub.
"""

from __future__ import annotations

import errno
from dataclasses import replace
from functools import partial
from typing import Any

from gpufs.stores.checksums import Checksum
from gpufs.stores.errors import StoreError, retried
from gpufs.stores.files import StoreFile, nanoseconds, open_store
from gpufs.stores.urls import Url
from gpufs.stores.web import WholeFile


def list_files(url: Url) -> list[StoreFile]:
    """Return all files of the model that a URL names, in one revision: that of the moment, or the one it names."""
    try:
        import huggingface_hub as hub
        from huggingface_hub import errors
    except ModuleNotFoundError:
        raise StoreError(errno.ENOPKG, "hf:// needs huggingface_hub: pip install 'gpufs[hub]'", url.shown) from None

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

    model = retried(ask)
    token = hub.get_token()
    headers = {"authorization": f"Bearer {token}"} if token else {}
    files = []
    for entry in sorted(model.siblings or [], key=lambda entry: entry.rfilename):
        # The commit, not the branch: all files are of one state.
        address = hub.hf_hub_url(
            url.place, entry.rfilename, repo_type=url.kind, revision=model.sha, endpoint=hub.constants.ENDPOINT
        )
        revision = f"@{url.revision}" if url.revision else ""
        kind = "" if url.kind == "model" else f"{url.kind}s/"
        text = f"hf://{kind}{url.place}{revision}/{entry.rfilename}"
        of_file = replace(url, text=text, key=entry.rfilename)
        at = replace(of_file, text=address)
        store = open_store(at, headers=headers)
        sha256 = entry.lfs.sha256 if entry.lfs is not None else None
        checksum = Checksum("sha256", sha256) if sha256 else Checksum("git", entry.blob_id or "")
        # Its ETag is that of the server to which the Hub redirects.
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
        )
        files.append(file)
    return files
