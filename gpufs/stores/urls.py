"""URLs on the command line and in calls: what they name."""

from __future__ import annotations

import errno
import posixpath
import re
from dataclasses import dataclass
from typing import Final, NamedTuple
from urllib.parse import unquote, urlsplit

_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


class Scheme(NamedTuple):
    """What has the files of a URL. ``store``: its class in obstore. ``credentials``: what to do if they are refused."""

    store: str
    credentials: str
    is_bucket: bool = False
    is_web: bool = False


_OF_SERVERS: Final = Scheme("HTTPStore", "the server asks for a password or a signed URL", is_web=True)
SCHEMES: Final = {
    "s3": Scheme(
        "S3Store",
        "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_SKIP_SIGNATURE=true for a public bucket",
        is_bucket=True,
    ),
    "gs": Scheme(
        "GCSStore",
        "set GOOGLE_APPLICATION_CREDENTIALS, or GOOGLE_SKIP_SIGNATURE=true for a public bucket",
        is_bucket=True,
    ),
    "az": Scheme(
        "AzureStore",
        "set AZURE_STORAGE_ACCOUNT_NAME, and AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN",
        is_bucket=True,
    ),
    "http": _OF_SERVERS,
    "https": _OF_SERVERS,
    "hf": Scheme("HTTPStore", "set HF_TOKEN to a valid token, and accept the model's conditions on its page"),
}
# The Hub's kinds of repositories by the first part of their URLs, as huggingface_hub names them; models need none.
HUB_KINDS: Final = {"models": "model", "datasets": "dataset", "spaces": "space"}
_PATTERN: Final = re.compile(r"[*?[]")
UNSAFE: Final = "an empty part or one that is . or .., or a control character"


@dataclass(frozen=True, slots=True)
class Url:
    text: str  # as it was given
    scheme: str  # one of SCHEMES
    place: str  # the bucket or container, the web server, or the Hub's ORG/MODEL
    key: str  # the path there, without a slash at its start. Of a web server's file: unquoted, without the query.
    revision: str | None = None  # of a model on the Hub
    kind: str = "model"  # what the Hub has there: "model", "dataset" or "space"

    @property
    def shown(self) -> str:
        """The URL for messages: without a query or password, which may be secret."""
        if not self.is_web:
            return self.text
        parts = urlsplit(self.text)
        return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()

    @property
    def without_user(self) -> str:
        """The URL of a web server without user and password, which are sent as a header."""
        parts = urlsplit(self.text)
        return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()

    @property
    def has_query(self) -> bool:
        """Whether a web server may send another file of the same path."""
        return self.is_web and bool(urlsplit(self.text).query)

    @property
    def is_web(self) -> bool:
        """Whether a web server has the file: it cannot list directories, and takes no uploads."""
        return SCHEMES[self.scheme].is_web

    @property
    def is_bucket(self) -> bool:
        return SCHEMES[self.scheme].is_bucket

    @property
    def is_pattern(self) -> bool:
        """Whether it names all files that match ``*``, ``?`` and ``[...]`` in its key. A web URL does not."""
        return not self.is_web and _PATTERN.search(self.key) is not None

    @property
    def is_directory(self) -> bool:
        """Whether it can only be a directory."""
        return not self.is_web and (not self.key or self.key.endswith("/"))

    @property
    def name(self) -> str:
        """The name of its file or directory in another directory."""
        return posixpath.basename(self.key.rstrip("/")) or posixpath.basename(self.place)

    def below(self, path: str) -> Url:
        """Return the URL of a path below this one, which is a directory of an object store."""
        key = f"{self.key.rstrip('/')}/{path}".lstrip("/")
        return Url(f"{self.scheme}://{self.place}/{key}", self.scheme, self.place, key)


def is_url(name: str) -> bool:
    """Return whether a name is a URL. A file of such a name is written ./NAME."""
    return _URL.match(name) is not None


def parse(text: str) -> Url:
    """Return what a URL names. OSError EINVAL, with the remedy, if that cannot be."""
    scheme, _, rest = text.partition("://")
    scheme = scheme.lower()
    if scheme not in SCHEMES:
        schemes = ", ".join(f"{one}://" for one in SCHEMES)
        raise _refused(text, f"{scheme}:// is not one of {schemes} (a file of this name is ./NAME)")
    if any(ord(character) < 32 for character in text):
        raise _refused(text, "has a control character")
    if scheme == "hf":
        return _parse_hub(text, rest)
    if SCHEMES[scheme].is_bucket:
        place, _, key = rest.partition("/")
        if not place:
            raise _refused(text, f"names no bucket: {scheme}://BUCKET/KEY")
        _check_parts(text, key)
        return Url(text, scheme, place, key)
    try:
        parts = urlsplit(text)
        host = parts.hostname
        _ = parts.port  # ValueError for what is not a number
    except ValueError as error:
        raise _refused(text, f"is not a URL: {error}") from None
    if not host:
        raise _refused(text, f"names no server: {scheme}://SERVER/FILE")
    key = unquote(parts.path).lstrip("/")
    name = posixpath.basename(key)
    if not name or not is_safe(name):
        raise _refused(text, "names no file: a web server's directory cannot be listed")
    return Url(text, scheme, parts.netloc, key)


def _parse_hub(text: str, rest: str) -> Url:
    kind, _, below = rest.partition("/")
    if kind in ("buckets", "collections", "papers"):
        raise _refused(
            text, f"names {kind} of the Hub: models, hf://datasets/ORG/NAME and hf://spaces/ORG/NAME are copied"
        )
    if kind not in HUB_KINDS:
        kind, below = "models", rest
    organisation, _, below = below.partition("/")
    model, _, key = below.partition("/")
    model, at, revision = model.partition("@")
    if not organisation or not model or (at and not revision):
        raise _refused(text, "is not like hf://[datasets/ | spaces/]ORG/MODEL[@REVISION][/FILE]")
    revision = unquote(revision)
    for part in (key, revision):  # a revision is a name in the Hub's cache, too
        _check_parts(text, part)
    return Url(text, "hf", f"{organisation}/{model}", key, revision or None, HUB_KINDS[kind])


def _check_parts(text: str, key: str) -> None:
    if not is_safe(key.removesuffix("/")):
        raise _refused(text, f"has {UNSAFE}")


def is_safe(path: str) -> bool:
    """Return whether a path stays below a directory, and has no control character. "" is the directory itself."""
    return not path or (min(path) >= " " and all(part not in ("", ".", "..") for part in path.split("/")))


def _refused(url: str, text: str) -> OSError:
    return OSError(errno.EINVAL, text, url)
