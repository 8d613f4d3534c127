"""A kubelet for `gpufs csi`: starts the plug-in, and calls it by gRPC over its socket.

The messages are put together here byte by byte, by the numbers of their fields in the specification of CSI. So the
plug-in's own messages cannot be wrong in the same way on both sides.
"""

from __future__ import annotations

import http.server
import json
import os
import signal
import ssl
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc

from gpufs.mounting import listed
from support.mounting import GPUFS
from support.processes import PATIENCE, run, wait_until

MOUNT = b"\x12\x00"  # in a VolumeCapability: access by a file system
BLOCK = b"\x0a\x00"
WRITER = b"\x1a\x02\x08\x01"  # access mode SINGLE_NODE_WRITER, as the kubelet has it for inline volumes


def field(number: int, value: bytes | str) -> bytes:
    """One field that has a length."""
    data = value.encode() if isinstance(value, str) else value
    length, size = len(data), b""
    while length > 127:
        size += bytes([length & 127 | 128])
        length >>= 7
    return bytes([number << 3 | 2]) + size + bytes([length]) + data


def fields(message: bytes) -> dict[int, bytes]:
    """The fields of a short message; each has a length."""
    found = {}
    while message:
        number, size = message[0] >> 3, message[1]
        assert message[0] & 7 == 2
        found[number], message = message[2 : 2 + size], message[2 + size :]
    return found


class Refused(Exception):
    """A call that failed. ``code``: the name of gRPC's code."""

    def __init__(self, error: grpc.RpcError) -> None:
        self.code = error.code().name
        super().__init__(f"{self.code}: {error.details()}")


def unless_it_dies(call: Callable[[], object]) -> None:
    """Makes a call to a plug-in that may be killed meanwhile: it may fail as such calls do."""
    try:
        call()
    except Refused as error:
        if error.code not in ("ABORTED", "UNAVAILABLE", "CANCELLED", "DEADLINE_EXCEEDED"):
            raise
    except ValueError:
        pass  # this client's channel was closed with the plug-in


class Kubelet:
    """One node: its kubelet's directory, its plug-in and the calls to it. A context manager, which leaves nothing."""

    def __init__(
        self,
        folder: Path,
        mountpoint: Path,
        environment: Mapping[str, str],
        *options: str,
        launcher: Sequence[str] = (),
        program: Sequence[str] = GPUFS,
    ) -> None:
        """``launcher``: a program with its options, which runs the plug-in. ``program``: gpufs, as that calls it."""
        self.directory = folder / "kubelet"
        (self.directory / "pods").mkdir(parents=True)
        self.state = self.directory / "plugins/gpufs.dev/state"
        self.log = folder / "csi.log"
        self.socket = folder / "csi.sock"
        self.program = [*launcher, *program]
        self._words = ["csi", "--endpoint", f"unix://{self.socket}", "--mount", str(mountpoint)]
        self._words += ["--kubelet-dir", str(self.directory), "--node", "node-1", *options]
        self._environment = {**os.environ, **environment}
        self.process: subprocess.Popen[bytes] | None = None
        self._channel: Any = None
        self.start()

    def start(self) -> None:
        """Start the plug-in, and return when it answers."""
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [*self.program, *self._words], env=self._environment, stdout=log, stderr=log
            )
        options = [("grpc.initial_reconnect_backoff_ms", 20), ("grpc.max_reconnect_backoff_ms", 100)]
        options += [("grpc.use_local_subchannel_pool", 1)]
        self._channel = grpc.insecure_channel(f"unix:{self.socket}", options=options)
        self.call("Identity", "Probe", b"", wait=True)

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End the plug-in."""
        assert self.process is not None
        self._channel.close()
        self.process.send_signal(number)
        self.process.wait(PATIENCE)
        self.socket.unlink(missing_ok=True)  # in other namespaces its processes may answer a moment longer

    def call(self, service: str, name: str, message: bytes, *, wait: bool = False, seconds: float = PATIENCE) -> bytes:
        """Call the plug-in."""
        method = self._channel.unary_unary(f"/csi.v1.{service}/{name}")
        try:
            answer: bytes = method(message, timeout=seconds, wait_for_ready=wait)
        except grpc.RpcError as error:
            raise Refused(error) from None
        return answer

    def target(self, volume: str) -> Path:
        """Where a volume of this name belongs, in a directory that the kubelet has made."""
        path = self.directory / "pods" / f"uid-{volume}" / "volumes/kubernetes.io~csi/model/mount"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def publish(
        self,
        volume: str,
        source: str | None = "hf://org/model",
        *,
        target: object = None,
        secrets: Mapping[str, str] | None = None,
        capability: bytes | None = MOUNT + WRITER,
        seconds: float = PATIENCE,
        more: bytes = b"",
        **attributes: str,
    ) -> Path:
        """Publish a volume as a pod with these attributes gets it; return its path."""
        attributes |= {"source": source} if source is not None else {}
        attributes |= {"csi.storage.k8s.io/ephemeral": "true", "csi.storage.k8s.io/pod.name": "pod"}
        message = field(1, volume) if volume else b""
        path = self.target(volume or "none") if target is None else target
        message += field(4, str(path)) if path else b""
        message += field(5, capability) if capability is not None else b""
        for number, words in ((7, secrets or {}), (8, attributes)):
            for name, value in words.items():
                message += field(number, field(1, name) + field(2, value))
        self.call("Node", "NodePublishVolume", message + more, seconds=seconds)
        return Path(str(path))

    def unpublish(self, volume: str, *, target: object = None) -> None:
        """Unpublish a volume."""
        message = field(1, volume) if volume else b""
        path = self.target(volume or "none") if target is None else target
        self.call("Node", "NodeUnpublishVolume", message + (field(2, str(path)) if path else b""))

    def unpublish_all(self) -> None:
        """Unpublish what a test that failed has left."""
        if self.process is None or self.process.poll() is not None:
            self.start()
        for pod in (self.directory / "pods").iterdir():
            with suppress(Refused):
                self.unpublish(pod.name.removeprefix("uid-"))

    def bound(self) -> list[str]:
        """What is mounted below the kubelet's directory."""
        return [entry.mountpoint for entry in listed() if entry.mountpoint.startswith(f"{self.directory}/")]

    def until(self, action: Any) -> Any:
        """Do as the kubelet, which repeats what fails for a reason that may pass."""
        result = None

        def tried() -> bool:
            nonlocal result
            try:
                result = action()
            except Refused as error:
                if error.code not in ("ABORTED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"):
                    raise
                return False
            return True

        wait_until(tried, 60, "a call that succeeds")
        return result

    def __enter__(self) -> Kubelet:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.end(signal.SIGKILL)
        for path in reversed(self.bound()):
            subprocess.run(["umount", "-l", path], check=False, capture_output=True)


# A pod: it has the volume at /data and nothing else of the mount. $1: the volume, $2: the mount, $3: an empty
# directory, $4: its user; the rest: its command.
POD = """
mount --make-rprivate /
mount --rbind "$1" "$3"
umount -l "$2"
mount -t tmpfs none /run
mount -t proc proc /proc
user=$4; export DATA=$3; shift 4
exec setpriv --reuid "$user" --regid "$user" --clear-groups "$@"
"""


def pod_words(volume: Path, mountpoint: Path, empty: Path, user: int, *command: str) -> list[str]:
    """The command that runs a command in a pod with a volume."""
    words = [str(volume), str(mountpoint), str(empty), str(user), *command]
    return ["unshare", "--mount", "--pid", "--ipc", "--net", "--fork", "bash", "-euc", POD, "pod", *words]


def at_once(*actions: Any) -> list[Any]:
    """Run actions in threads; what they return or raise."""
    results: list[Any] = [None] * len(actions)

    def run(place: int) -> None:
        try:
            results[place] = actions[place]()
        except Exception as error:  # noqa: BLE001 - the caller judges
            results[place] = error

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(actions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


class _Api(http.server.BaseHTTPRequestHandler):
    """What NodeLabels needs of the Kubernetes API: a node, whose labels a merge patch changes."""

    server: ApiServer

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._answer(None)

    def do_PATCH(self) -> None:
        assert self.headers["Content-Type"] == "application/merge-patch+json"
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _answer(self, patch: Any) -> None:
        allowed = self.headers.get("Authorization") == "Bearer account-token"
        known = self.path == "/api/v1/nodes/node-1"
        if allowed and known and patch is not None:
            self.server.patches += 1
            for name, value in patch["metadata"]["labels"].items():
                if value is None:
                    self.server.labels.pop(name, None)
                else:
                    self.server.labels[name] = value
        content = json.dumps({"metadata": {"name": "node-1", "labels": self.server.labels}}).encode()
        self.send_response(200 if allowed and known else 403)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


class ApiServer(http.server.ThreadingHTTPServer):
    """A stand-in for the Kubernetes API, with one node and its labels. It is not Kubernetes, and checks no label."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        """``folder`` gets the service account's token and certificate."""
        super().__init__(("127.0.0.1", 0), _Api)
        self.labels = {"kubernetes.io/hostname": "node-1", "models.gpufs.dev/gone": "gpu0"}
        self.patches = 0
        words = "req -x509 -newkey rsa:2048 -nodes -keyout key -out ca.crt -days 9 -subj /CN=localhost".split()
        run("openssl", *words, "-addext", "subjectAltName=DNS:localhost", cwd=folder)
        (folder / "token").write_text("account-token\n")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "ca.crt", folder / "key")
        self.socket = context.wrap_socket(self.socket, server_side=True)
        self.environment = {"KUBERNETES_SERVICE_HOST": "localhost", "KUBERNETES_SERVICE_PORT": str(self.server_port)}
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05})

    def __enter__(self) -> ApiServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


# A namespace in which a mount below a shared directory is seen outside, and the other way round: what mountPropagation
# Bidirectional gives to a pod. All its processes end with it.
BIDIRECTIONAL = "unshare --mount --propagation unchanged --pid --fork --mount-proc --kill-child".split()
# A container that has a volume with HostToContainer, as container engines mount it. The volume and where it is shown
# come next, and then the command.
HOST_TO_CONTAINER = [
    *"unshare --mount --propagation slave --pid --fork --mount-proc --kill-child bash -euc".split(),
    'mount --rbind "$0" "$1"; umount -l "$0"; shift; exec "$@"',
]
