"""Stand-ins for what URLs name: a web server with faults, which is also a Hub, and S3 by moto's server."""

from __future__ import annotations

import hashlib
import http.client
import http.server
import json
import os
import re
import socket
import ssl
import struct
import subprocess
import sys
import threading
import urllib.parse
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import boto3

from support.data import MIB, noise
from support.processes import PATIENCE, wait_until

PART = 16 * MIB  # what gpufs requests at once


class Request(NamedTuple):
    """One GET. ``end`` is behind its last byte."""

    path: str
    start: int
    end: int


_COMMIT = "c0ffee" * 6 + "abcd"  # of all models


@dataclass
class Model:
    """A model on the Hub: its files, and those whose checksum is wrong there."""

    files: dict[str, bytes]
    lfs: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()
    token: str | None = None
    revision: str = "main"
    lie: Callable[[Any], object] = lambda answer: None  # changes what the Hub says about it
    answer: bytes | None = None  # in place of that


@dataclass
class WebServer:
    """A web server whose files, faults and log a test reads and changes.

    ``faults``: for each path what the next GETs end with: "503", "short" (half of the range, as if it were all),
    "reset" (after half of it), "gone" (404), "more" (a byte too many),
    "reversed" (other bytes). ``held``: GETs at or behind this offset wait
    until ``released``. ``ranges``: whether it knows ranges.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    models: dict[str, Model] = field(default_factory=dict)
    faults: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    requests: list[Request] = field(default_factory=list)
    parts: dict[int, bytes] = field(default_factory=dict)  # of an upload
    held: int | None = None
    released: threading.Event = field(default_factory=threading.Event)
    ranges: bool = True
    head: int = 200  # the answer to HEAD
    head_length: int | None = None  # what it says about the size
    length: bool = True  # whether answers have one; without, the end of the connection ends them
    mirrors: int = 1  # servers behind the address, each with an ETag of its own
    authorization: str | None = None  # what it wants to get
    headers: dict[str, str] | None = None  # that show which content it is, in place of an ETag
    answer: tuple[int, bytes] | None = None  # to everything
    authorizations: list[str] = field(default_factory=list)  # that clients have sent
    redirects_to: WebServer | None = None  # what serves the files of models, as the Hub has another server do
    url: str = ""
    answered: int = 0
    # Takes the place of a file's content, for those that do not fit into memory.
    sizes: dict[str, int] = field(default_factory=dict)

    def requested(self, path: str) -> list[tuple[int, int]]:
        """The ranges of a file that were requested, sorted."""
        return sorted((one.start, one.end) for one in self.requests if one.path == path)

    def content(self, path: str) -> tuple[int, Callable[[int, int], bytes]] | None:
        """The size of a file, and what returns its bytes."""
        if path in self.sizes:
            return self.sizes[path], repeated
        data = self.files.get(path)
        return None if data is None else (len(data), lambda start, end: data[start:end])


_BLOCK = noise(MIB + 7)


def repeated(start: int, end: int) -> bytes:
    """Bytes of a file without an end, for large ones: a block of which no two are at the same offset of a page."""
    first = start % len(_BLOCK)
    return (_BLOCK * ((first + end - start) // len(_BLOCK) + 1))[first : first + end - start]


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = PATIENCE
    server: _Server

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        if self.server.store.head != 200:
            self._send(self.server.store.head)
            return
        self._serve(body=False)

    def do_GET(self) -> None:
        self._serve(body=True)

    def do_POST(self) -> None:
        """Begin or complete a multipart upload, as S3 does."""
        store, (_, _, path, _, query, _) = self.server.store, urllib.parse.urlparse(self.path)
        self.rfile.read(int(self.headers["Content-Length"] or 0))
        if "uploadId" not in query:
            self._send(200, b"<InitiateMultipartUploadResult><UploadId>1</UploadId></InitiateMultipartUploadResult>")
            return
        store.files[path] = b"".join(data for _, data in sorted(store.parts.items()))
        self._send(200, b"<CompleteMultipartUploadResult><ETag>1</ETag></CompleteMultipartUploadResult>")

    def do_PUT(self) -> None:
        """Take one part."""
        store, (_, _, path, _, query, _) = self.server.store, urllib.parse.urlparse(self.path)
        data = self.rfile.read(int(self.headers["Content-Length"]))
        if store.answer is not None:
            self._send(store.answer[0], store.answer[1])
            return
        fault = store.faults[path].pop(0) if store.faults[path] else ""
        if fault == "reset":
            self._reset()
            return
        if not fault:
            store.parts[int(urllib.parse.parse_qs(query)["partNumber"][0])] = data
        self._send(int(fault or 200), ETag="part")

    def _reset(self) -> None:
        self.wfile.flush()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.server.shutdown_request(self.connection)

    def _send(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content_Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _serve(self, *, body: bool) -> None:
        store, path = self.server.store, urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        if "Authorization" in self.headers:
            store.authorizations.append(self.headers["Authorization"])
        if store.answer is not None:
            self._send(store.answer[0], store.answer[1])
            return
        if path.startswith("/api/models/"):
            self._describe_model(path.removeprefix("/api/models/"))
            return
        if path.startswith("/api/datasets/"):
            self._describe_model(path.removeprefix("/api/"))
            return
        if "/resolve/" in path:
            self._redirect(path)
            return
        if store.authorization not in (None, self.headers.get("Authorization")):
            self._send(401)
            return
        content = store.content(path)
        if content is None:
            self._send(404)
            return
        size, read = content
        # It looks like the MD5 of the content and is none, as that of an object encrypted by KMS.
        store.answered += 1
        etag = (
            f'"{store.answered % store.mirrors or ""}{hashlib.md5(path.encode() + read(0, min(size, 64))).hexdigest()}"'
        )
        headers = {"ETag": etag} if store.headers is None else dict(store.headers)
        if self.headers.get("If-Match") not in (None, etag):
            self._send(412)
            return
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        start, end = (int(found[1]), min(int(found[2]) + 1, size)) if found and store.ranges else (0, size)
        if body and found and start >= size and store.ranges:
            self._send(416)
            return
        if not body:
            self._send_head(200, size if store.head_length is None else store.head_length, headers)
            return
        store.requests.append(Request(path, start, end))
        if store.held is not None and start >= store.held:
            store.released.wait(PATIENCE)
        self._send_range(store.faults[path].pop(0) if store.faults[path] else "", start, end, size, read, headers)

    def _send_head(self, status: int, length: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        if not self.server.store.length:
            self.close_connection = True
            headers = {"Connection": "close", **headers}
        else:
            headers = {"Content-Length": str(length), **headers}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _send_range(
        self, fault: str, start: int, end: int, size: int, read: Callable[[int, int], bytes], headers: dict[str, str]
    ) -> None:
        if fault in ("503", "gone"):
            self._send(503 if fault == "503" else 404)
            return
        whole = not self.server.store.ranges
        middle = (start + end) // 2
        sent = {"short": middle, "reset": middle, "more": end + 1}.get(fault, end)
        if not whole:
            headers = {**headers, "Content-Range": f"bytes {start}-{end - 1}/{size}"}
        length = end - start if fault == "reset" else sent - start
        self._send_head(200 if whole else 206, length, headers)
        try:
            for at in range(start, sent, MIB):
                to = min(at + MIB, sent)
                data = read(at, to).ljust(to - at, b"\0")
                self.wfile.write(data[::-1] if fault == "reversed" else data)
            if fault == "reset":
                self._reset()
        except OSError:
            self.close_connection = True  # the client has ended

    def _describe_model(self, rest: str) -> None:
        name, _, revision = rest.partition("/revision/")
        model = self.server.store.models.get(name)
        if model is None or (revision and revision != model.revision):
            error = "RevisionNotFound" if model else "RepoNotFound"
            self._send(404, X_Error_Code=error)
            return
        if not self._allowed(model):
            return
        siblings: list[dict[str, Any]] = []
        for path, data in model.files.items():
            shown = b"something else" if path in model.wrong else data
            entry: dict[str, Any] = {"rfilename": path, "size": len(data)}
            entry["blobId"] = hashlib.sha1(b"blob %d\0" % len(data) + shown).hexdigest()
            if path in model.lfs:
                entry["lfs"] = {"size": len(data), "sha256": hashlib.sha256(shown).hexdigest(), "pointerSize": 134}
            siblings.append(entry)
        answer = {"id": name, "modelId": name, "sha": _COMMIT, "siblings": siblings, "tags": [], "private": False}
        model.lie(answer)
        self._send(200, model.answer or json.dumps(answer).encode(), Content_Type="application/json")

    def _allowed(self, model: Model) -> bool:
        given = self.headers.get("Authorization")
        if model.token is None or given == f"Bearer {model.token}":
            return True
        if given is None:
            self._send(401, X_Error_Code="GatedRepo", X_Error_Message="Access is restricted")
        else:
            self._send(401, X_Error_Message="Invalid credentials")
        return False

    def _redirect(self, path: str) -> None:
        name, _, rest = path.removeprefix("/").partition("/resolve/")
        model, (commit, _, file) = self.server.store.models[name], rest.partition("/")
        assert commit in (_COMMIT, model.revision)
        if not self._allowed(model):
            return
        if file not in model.files:
            self._send(404, X_Error_Code="EntryNotFound", X_Repo_Commit=_COMMIT)
            return
        other = self.server.store.redirects_to or self.server.store
        data = other.files[f"/blobs/{name}/{file}"] = model.files[file]
        named = hashlib.sha256(data) if file in model.lfs else hashlib.sha1(b"blob %d\0" % len(data) + data)
        self._send(
            302,
            Location=f"{other.url}/blobs/{name}/{urllib.parse.quote(file)}",
            X_Repo_Commit=_COMMIT,
            X_Linked_Etag=f'"{named.hexdigest()}"',
            X_Linked_Size=str(len(data)),
        )


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64
    store: WebServer

    def handle_error(self, *_: object) -> None:
        pass  # clients are killed


@contextmanager
def web_server(context: ssl.SSLContext | None = None) -> Iterator[WebServer]:
    """Run a web server on this machine. With a context it is one for https, named localhost."""
    store = WebServer()
    with _Server(("127.0.0.1", 0), _Handler) as server:
        server.store = store
        store.url = f"http://127.0.0.1:{server.server_port}"
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True)
            store.url = f"https://localhost:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield store
        finally:
            store.released.set()
            server.shutdown()
            thread.join()


class S3(NamedTuple):
    """An S3 server. ``environment``: with its address and credentials. ``client``: boto3's."""

    environment: dict[str, str]
    client: Any


@contextmanager
def s3_server(directory: Path) -> Iterator[S3]:
    """Run moto's server, whose buckets are empty."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    url = f"http://127.0.0.1:{port}"
    variables = {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": url,
    }
    log = directory / "moto.log"
    with open(log, "wb") as output:
        server = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        wait_until(lambda: "Running on" in log.read_text(), PATIENCE, "moto's server")
        client = boto3.client(
            "s3",
            endpoint_url=url,
            region_name="us-east-1",
            aws_access_key_id="test",
            aws_secret_access_key="test",
        )
        try:
            yield S3({**os.environ, **variables}, client)
        finally:
            client.close()
    finally:
        server.kill()
        server.wait()


@contextmanager
def busy_at_first(address: str) -> Iterator[str]:
    """Run a proxy of an S3 server that refuses the first request of each kind for a path with 503."""
    target = urllib.parse.urlsplit(address).netloc
    seen: set[tuple[str, str]] = set()

    class Proxy(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = PATIENCE

        def log_message(self, *_: object) -> None:
            pass

        def _pass_on(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"] or 0))
            kind = (self.command, urllib.parse.urlsplit(self.path).path)
            if kind not in seen:
                seen.add(kind)
                self.send_response(503)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            with closing(http.client.HTTPConnection(target, timeout=PATIENCE)) as connection:
                connection.request(self.command, self.path, body, dict(self.headers))
                response = connection.getresponse()
                answer = response.read()
            self.send_response_only(response.status)
            for name, value in response.getheaders():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(answer)

        do_HEAD = do_GET = do_PUT = do_POST = do_DELETE = _pass_on

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def is_partition(ranges: list[tuple[int, int]], size: int) -> bool:
    """True if the ranges have each byte once."""
    ends = [0, *(end for _, end in ranges)]
    return [start for start, _ in ranges] == ends[:-1] and ends[-1] == size
