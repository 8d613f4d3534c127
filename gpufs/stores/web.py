"""One plain request to a web server, whose own headers count: for files of servers that answer others wrongly."""

from __future__ import annotations

import base64
import errno
import http.client
import ssl
import string
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any, Final
from urllib.parse import quote, unquote, urlsplit

from gpufs._version import __version__
from gpufs.stores.errors import StoreError, certificate_failure, of_status
from gpufs.stores.urls import Url

_CHUNK_BYTES: Final = 1 << 20
# A connection from which nothing comes for so long is ended.
_SILENT_SECONDS: Final = 30.0
_MOST_SECONDS: Final = 120.0  # of an answer that is no file


def authorization(url: Url, token: str | None = None) -> str | None:
    """Return the header for a token, or the user and password in a web server's URL; None if there are none."""
    if token is not None:
        return f"Bearer {token}"
    parts = urlsplit(url.text)
    if not url.is_web or parts.username is None:
        return None
    words = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return "Basic " + base64.b64encode(words.encode()).decode()


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Passes what is for this server alone on if the server redirects to itself."""

    def redirect_request(self, req: urllib.request.Request, *others: Any) -> urllib.request.Request | None:
        new = super().redirect_request(req, *others)
        if new is not None and (new.type, new.host) == (req.type, req.host):
            new.unredirected_hdrs.update(req.unredirected_hdrs)
        return new


class WholeFile:
    """The answer to a request for a whole file. Iterating over it yields its bytes."""

    def __init__(self, url: Url, token: str | None = None) -> None:
        """Make the request. StoreError if it fails. ``token``: for this server alone, not where it redirects to."""
        self._url = url
        # The opener follows redirects to http and https alone.
        opener = urllib.request.OpenerDirector()
        for handler in (
            urllib.request.ProxyHandler(),
            urllib.request.UnknownHandler(),
            urllib.request.HTTPHandler(),
            urllib.request.HTTPSHandler(),
            urllib.request.HTTPDefaultErrorHandler(),
            _Redirects(),
            urllib.request.HTTPErrorProcessor(),
        ):
            opener.add_handler(handler)
        # Spaces and letters other than ASCII are encoded, as obstore does.
        address = quote(url.without_user, safe=string.punctuation, errors="surrogateescape")
        request = urllib.request.Request(address, headers={"User-Agent": f"gpufs/{__version__}"})
        if header := authorization(url, token):
            request.add_unredirected_header("Authorization", header)
        try:
            answer = opener.open(request, timeout=_SILENT_SECONDS)
        except urllib.error.HTTPError as error:
            error.close()
            raise of_status(error.code, url, error.headers.get("X-Error-Code")) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._failure(error) from None
        assert isinstance(answer, http.client.HTTPResponse)
        self._answer = answer
        length = answer.headers.get("Content-Length", "")
        chunked = "chunked" in answer.headers.get("Transfer-Encoding", "").lower()
        # None if the server does not say it.
        self.size = int(length) if length.isdecimal() and len(length) < 20 and not chunked else None

    def content(self, most: int) -> bytes:
        """Return all of it. StoreError if it has more than ``most`` bytes, or takes too long."""
        text, began = bytearray(), time.monotonic()
        for chunk in self._chunks(self._answer.read1):  # which returns what has come
            text += chunk
            if len(text) > most or time.monotonic() - began > _MOST_SECONDS:
                what = f"has more than {most >> 20} MiB, or takes longer than {_MOST_SECONDS:.0f} seconds"
                raise StoreError(errno.EFBIG, f"the server's answer {what}", self._url.shown)
        return bytes(text)

    def __iter__(self) -> Iterator[bytes]:
        return self._chunks(self._answer.read)

    def _chunks(self, read: Callable[[int], bytes]) -> Iterator[bytes]:
        done = 0
        try:
            while chunk := read(_CHUNK_BYTES):
                done += len(chunk)
                yield chunk
        except (OSError, http.client.HTTPException) as error:
            raise self._failure(error) from None
        if self.size is not None and done != self.size:
            text = f"the server sent {done} of {self.size} bytes"
            raise StoreError(errno.EIO, text, self._url.shown, transient=True)

    def close(self) -> None:
        self._answer.close()

    def _failure(self, error: Exception) -> StoreError:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(reason, ssl.SSLCertVerificationError):
            return StoreError(*certificate_failure(reason.verify_message), self._url.shown)
        if isinstance(reason, (ValueError, http.client.InvalidURL)):
            return StoreError(errno.EINVAL, f"is not a URL that can be requested: {reason}", self._url.shown)
        text = f"the server does not answer as expected: {type(reason).__name__}: {reason}"
        return StoreError(errno.EIO, " ".join(text.split())[:300], self._url.shown, transient=True)
