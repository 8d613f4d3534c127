"""Turns the failure of a store into an OSError with a remedy, and decides whether another try may help."""

from __future__ import annotations

import errno
import random
import re
import shlex
import sys
import threading
from collections.abc import Callable
from typing import Final, TypeVar

from gpufs.stores.urls import SCHEMES, UNSAFE, Url
from gpufs.syscalls import os_error

_Result = TypeVar("_Result")

_STATUS: Final = re.compile(r"status code: (\d{3})")
# The addresses at which the machines of a cloud ask for credentials, and what obstore says without asking.
_NO_CREDENTIALS: Final = re.compile(
    r"http://169\.254\.169\.254|http://metadata\.google|Account must be specified"
    r"|Missing (AccessKeyId|SecretAccessKey)|service account"
)
# A connection was refused, reset, silent, or ended early. The store of web servers has the name HTTP, too.
_CONNECTION: Final = re.compile(r"(?<!Generic )HTTP error: ")
_REGION: Final = re.compile(r"without LOCATION|PermanentRedirect|AuthorizationHeaderMalformed|IncorrectEndpoint")
_CERTIFICATE: Final = re.compile(r"InvalidCertificate\(\s*(\w+)")
_RETRIED_STATUS: Final = (408, 429)
# object_store, which parses the keys of a list, says this.
_ODD_KEY: Final = re.compile(r'Encountered object with invalid path: .*?[Pp]ath ("[^"]*")')
_NOT_IMPLEMENTED: Final = 501
_MOST_TEXT: Final = 10_000  # of what obstore says: it may have the whole answer of a server
_FIRST_SECONDS: Final = 0.25
_MOST_SECONDS: Final = 8.0
# About 24 s in all.
TRIES: Final = 8
# For requests that come before any byte: the URL may be wrong.
FIRST_TRIES: Final = 4


class StoreError(OSError):
    """A failure of a store.

    ``transient``: another try may help.
    """

    def __init__(self, number: int, text: str, url: str, *, transient: bool = False) -> None:
        super().__init__(number, text, url)
        self.transient = transient


def failure(error: Exception, url: Url) -> StoreError:
    """Return the error for the user for one that obstore has raised."""
    text = str(error)[:_MOST_TEXT]
    found = _STATUS.search(text)
    status = int(found[1]) if found else 0
    if (meaning := _meaning(error, text, status, url)) is not None:
        return StoreError(*meaning, url.shown)
    transient = _is_transient(status) or (not status and _CONNECTION.search(text) is not None)
    return StoreError(errno.EIO, _reason(text), url.shown, transient=transient)


def _meaning(error: Exception, text: str, status: int, url: Url) -> tuple[int, str] | None:
    """Return the errno and text of a failure that is known, and that another try does not mend."""
    from obstore import exceptions

    if (found := _CERTIFICATE.search(text)) is not None:
        return certificate_failure(found[1])
    if "No CA certificates were loaded" in text:
        missing = "no certificates of authorities are installed: install ca-certificates, or set SSL_CERT_FILE"
        return errno.EPROTO, missing
    if (found := _ODD_KEY.search(text)) is not None:
        what = "with it a directory cannot be listed: name the other files, or a directory below"
        return errno.EINVAL, f"the key {found[1]} has {UNSAFE}; {what}"
    if "InvalidObjectState" in text:
        return errno.EACCES, "is archived (Glacier): restore the object first"
    if "NoSuchBucket" in text:
        return errno.ENOENT, f"the bucket {url.place} does not exist"
    if status in (404, 410) or (isinstance(error, FileNotFoundError) and not status):
        return errno.ENOENT, f"the file{' or its bucket' * url.is_bucket} does not exist"
    if isinstance(error, exceptions.NotSupportedError):
        return errno.EOPNOTSUPP, "the server sends whole files only"
    if isinstance(error, exceptions.PreconditionError) or status in (412, 416):
        return errno.ESTALE, "has changed during the copy: copy it again"
    if _REGION.search(text):
        region = re.search(r"expecting '([\w-]{1,64})'|<Region>([\w-]{1,64})<", text)
        name = (region[1] or region[2]) if region else "that of the bucket"
        return errno.EINVAL, f"the bucket is in another region: set AWS_REGION to {name}"
    if isinstance(error, exceptions.UnauthenticatedError) or status == 401:
        return _denied(url, "the credentials are missing or wrong")
    if url.is_bucket and _NO_CREDENTIALS.search(text):
        return _denied(url, "no credentials were found")
    if isinstance(error, exceptions.PermissionDeniedError) or status == 403:
        return _denied(url)
    if url.scheme == "s3" and status == 400:  # HEAD has no body that says why
        return errno.EINVAL, "the request is refused: AWS_REGION is not the bucket's, or the credentials have expired"
    return None


def _denied(url: Url, what: str = "access is denied") -> tuple[int, str]:
    return errno.EACCES, f"{what}: {SCHEMES[url.scheme].credentials}"


def of_status(status: int, url: Url, code: str | None) -> StoreError:
    """Return the error for the status of an answer. ``code``: what the Hub says about it."""
    meaning = errno.EIO, f"the server does not answer as expected: status {status}"
    if url.scheme == "hf" and code == "RevisionNotFound":
        meaning = errno.ENOENT, f"the revision {url.revision} does not exist"
    elif url.scheme == "hf" and code == "RepoNotFound":
        meaning = errno.ENOENT, f"the {url.kind} {url.place} does not exist, or it is private: set HF_TOKEN"
    elif status in (404, 410):
        meaning = errno.ENOENT, "the file does not exist"
    elif status == 403 or (url.scheme == "hf" and code == "GatedRepo"):
        meaning = _denied(url)
    elif status == 401:
        meaning = _denied(url, "the credentials are missing or wrong")
    return StoreError(*meaning, url.shown, transient=_is_transient(status))


def _is_transient(status: int) -> bool:
    return status in _RETRIED_STATUS or (status >= 500 and status != _NOT_IMPLEMENTED)


def certificate_failure(reason: str) -> tuple[int, str]:
    """Return the errno and text for a certificate that is not trusted."""
    text = f"the server's certificate is not trusted ({reason}): SSL_CERT_FILE names a file with that of its authority"
    return errno.EPROTO, text


def _reason(text: str) -> str:
    """Return the reason in obstore's text, on one line and without the URL, which may be signed."""
    summary = text.partition("\n\n")[0]
    noise = r"Generic \w+ error: |Error performing .* in [\w.µ]+(, after \d+ retries[^-]*)? - "
    reason = re.sub(noise, "", summary)
    causes = re.findall(r'message: "([^"]+)"|kind: (TimedOut|UnexpectedEof|ConnectionReset)', text)
    cause = next((one or other for one, other in reversed(causes)), "")
    line = " ".join(f"{reason} {f'({cause})' if cause else ''}".split()).rstrip(": ")
    return f"the store does not answer as expected: {line[:300]}"


def wrong_answer(error: BaseException, url: Url, server: str = "the store") -> StoreError:
    """Return the error for an answer that is not as it must be; ``error`` names the field."""
    return StoreError(errno.EPROTO, f"{server} does not answer as expected: {error}", url.shown)


def missing_package(url: Url, package: str) -> StoreError:
    """Return the error for a URL whose package this Python does not have."""
    text = f"{url.scheme}:// needs {package}: {shlex.quote(sys.executable)} -m pip install {package}"
    return StoreError(errno.ENOPKG, text, url.shown)


def retried(work: Callable[[], _Result], tries: int = FIRST_TRIES, stopped: threading.Event | None = None) -> _Result:
    """Return what ``work``, one request to a store, returns. It is called again after transient failures."""
    for number in range(1, tries):
        try:
            return work()
        except StoreError as error:
            if not error.transient:
                raise
            wait(number, stopped or threading.Event())
    return work()


def wait(number: int, stopped: threading.Event) -> None:
    """Wait before try ``number`` + 1, for a random part of a time that doubles. OSError ECANCELED when stopped."""
    seconds = min(_FIRST_SECONDS * 2 ** (number - 1), _MOST_SECONDS) * random.uniform(0.5, 1.0)
    if stopped.wait(seconds):
        raise os_error(errno.ECANCELED)
