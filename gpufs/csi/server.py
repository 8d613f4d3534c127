"""The plug-in: answers the kubelet's calls over gRPC, and repairs what it has answered.

The plug-in's own round binds again where the node's mount was replaced, and removes what the kubelet forgot. After a
restart the plug-in knows the volumes from the kubelet's next calls, and removes only what is bound nowhere.
What fails in a round is logged, counted and tried again later; the rest of the round goes on.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent import futures
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final, NamedTuple

import grpc
import msgspec
from prometheus_client import CollectorRegistry, Counter, start_http_server

from gpufs import __version__
from gpufs.csi import binding, volumes
from gpufs.csi.binding import Targets
from gpufs.csi.errors import CallError
from gpufs.csi.labels import NodeLabels
from gpufs.csi.messages import CLASSES, PACKAGE, SERVICES
from gpufs.csi.models import Models
from gpufs.csi.state import State
from gpufs.csi.volumes import Model, Volume

log = logging.getLogger(__name__)

_THREADS: Final = 64  # calls at a time; each waits for its model, or for the mount
_MOST_MESSAGE: Final = 2 << 20  # a secret of Kubernetes has 1 MiB at most
_MARGIN: Final = 2.0  # seconds before the kubelet's time is over in which it still gets an answer
_WAIT_WITHOUT_DEADLINE: Final = 100.0
_ROUND_SECONDS: Final = 3.0
_SWEEP_ROUNDS: Final = 20
_REPAIR_SECONDS: Final = 0.5
_ROUND_WAIT: Final = 5.0  # of a call for a repair
_MOST_PAUSE: Final = 120.0
_GRACE: Final = 5.0
_SIGNAL_SECONDS: Final = 1.0  # after which a signal that another thread got is noticed, too


class Options(NamedTuple):
    """How the plug-in runs.

    ``endpoint``: the path of its socket. ``labels``: None if the node gets none. ``metrics``: the address and port at
    which its counters are served, if they are.
    """

    endpoint: str
    mountpoint: str
    node: str
    name: str
    kubelet: str
    state: str
    labels: NodeLabels | None = None
    metrics: tuple[str, int] | None = None


class _Failed(NamedTuple):
    """Why something has failed, and when it is tried again."""

    text: str
    pause: float
    until: float


class _Tries:
    """What the plug-in tries in its rounds: whatever one thing raises, the others are still tried."""

    def __init__(self, failures: Counter) -> None:
        self._failures = failures
        self._failed: dict[tuple[str, str], _Failed] = {}

    def attempt(self, kind: str, name: str, call: Callable[[], object]) -> None:
        """Call a function, unless it has failed a moment ago. ``kind`` and ``name``: for metrics and the log."""
        before = self._failed.get((kind, name))
        if before is not None and time.monotonic() < before.until:
            return
        try:
            call()
            self._failed.pop((kind, name), None)
        except Exception as error:  # also a bug must not end the round
            if isinstance(error, CallError) and error.code == "ABORTED":
                return  # the model is being fetched, or the kubelet is faster
            if not isinstance(error, (OSError, CallError)):
                log.exception("%s %s", kind, name)
            elif before is None or before.text != str(error):
                log.warning("%s %s: %s", kind, name, error)
            self._failures.labels(kind).inc()
            pause = _ROUND_SECONDS if before is None else min(2 * before.pause, _MOST_PAUSE)
            self._failed[kind, name] = _Failed(str(error), pause, time.monotonic() + pause)

    def forget_others(self, kind: str, names: Collection[str]) -> None:
        """Forget the failures of this kind that are not of these names."""
        for key in list(self._failed):  # a call may add one at the same time
            if key[0] == kind and key[1] not in names:
                self._failed.pop(key, None)


class Plugin:
    """The node plug-in. Thread-safe."""

    def __init__(self, options: Options) -> None:
        """OSError if its directory cannot be used."""
        self._options = options
        self._state = State(options.state)
        self._targets = Targets(options.kubelet)
        self._models = Models(options.mountpoint, self._state.directory, self._state.models)
        self._lock = threading.Condition()  # guards what is below
        self._busy: dict[str, bool] = {}  # volumes, by their targets, and whether the plug-in's own round has them
        self.registry = CollectorRegistry()
        failures = Counter("gpufs_csi_failures", "What failed, and is tried again", ["kind"], registry=self.registry)
        self._tries = _Tries(failures)

    def close(self) -> None:
        """End fetches. Volumes stay as they are."""
        self._models.close()
        self._state.close()

    # ---- the kubelet's calls ----

    # Each returns the fields of the response; calls that are not here get an empty one.

    def get_plugin_info(self, request: Any, context: Any) -> dict[str, object]:
        """Name this driver."""
        return {"name": self._options.name, "vendor_version": __version__}

    def probe(self, request: Any, context: Any) -> dict[str, object]:
        """Answer. The mount may be missing: starting the plug-in again would not mount it."""
        return {"ready": {"value": True}}

    def node_get_info(self, request: Any, context: Any) -> dict[str, object]:
        """Name this node."""
        return {"node_id": self._options.node}

    def node_publish_volume(self, request: Any, context: Any) -> None:
        """Put the model on the mount, and bind it into the pod. The same call again changes nothing."""
        volume = volumes.volume_of(request, self._state.key)
        self._targets.path_of(volume.target)
        with self._only_call_for(volume.target):
            self._publish(volume, request.secrets, _wait_within(context, volume.source))

    def node_unpublish_volume(self, request: Any, context: Any) -> None:
        """Remove a volume from its pod. The model goes with its last volume."""
        volumes.check_names(request.volume_id, request.target_path)
        self._targets.path_of(request.target_path)
        with self._only_call_for(request.target_path):
            known = self._state.volume(request.volume_id)
            if known is not None and known.target == request.target_path:
                self._remove(known)
            elif all(one.target != request.target_path for one in self._state.volumes()):
                self._targets.unbind(request.target_path)
                self._tries.attempt("models", "that no volume needs", self._sweep)  # it was there before a restart

    @contextmanager
    def _only_call_for(self, target: str, *, is_round: bool = False) -> Iterator[None]:
        """Keep other calls from a volume. CallError ABORTED if there is one; the plug-in's own round is waited for."""
        with self._lock:
            if not is_round:
                self._lock.wait_for(lambda: not self._busy.get(target, False), _ROUND_WAIT)
            if target in self._busy:
                raise CallError("ABORTED", "another call for this volume is in progress")
            self._busy[target] = is_round
        try:
            yield
        finally:
            with self._lock:
                del self._busy[target]
                self._lock.notify_all()

    def _publish(self, volume: Volume, secrets: Mapping[str, str], proceed: Callable[[str], None]) -> None:
        known = self._state.volume(volume.id)
        if known is not None:
            if known.target != volume.target:
                text = f"the volume is published at another target_path: {known.target}"
                raise CallError("FAILED_PRECONDITION", text)
            # Secrets may change while a pod runs. Its volume stays what it is.
            if known != msgspec.structs.replace(volume, credentials=known.credentials):
                raise CallError("ALREADY_EXISTS", "the volume is published with other volumeAttributes")
            if self._is_bound(known):
                volume = known
            elif known != volume:
                self._state.put(volume)
                self._release(known.model)
        else:
            if any(one.target == volume.target for one in self._state.volumes()):
                raise CallError("FAILED_PRECONDITION", f"another volume is at {volume.target}")
            if not self._targets.has_parent(volume.target):
                text = f"the directory of target_path does not exist: {os.path.dirname(volume.target)}"
                raise CallError("FAILED_PRECONDITION", text)
            is_free = not self._targets.over(volume.target)  # else it was bound before a restart
            if is_free:
                self._targets.unbind(volume.target)  # refuses what is not empty, before anything is fetched
            self._state.put(volume)
        try:
            if not (self._is_bound(volume) and self._models.is_there(volume.model)):
                self._show(volume, secrets, proceed)
        except BaseException as error:
            # After these the kubelet does not ask to unpublish it.
            if known is None and not (isinstance(error, CallError) and error.is_uncertain):
                with suppress(OSError, CallError):
                    if is_free:
                        self._targets.unbind(volume.target)
                self._forget(volume)
            raise

    def _show(self, volume: Volume, secrets: Mapping[str, str], proceed: Callable[[str], None]) -> None:
        self._models.ensure(volume.model, secrets, proceed)
        with self._models.opened(volume.model) as model:
            self._targets.bind(volume.target, model, self._models.mount(), self._models.sockets())
        if volume.keep:
            self._models.keep(volume.model)
        log.info("volume %s shows %s", volume.id, volume.source)

    def _remove(self, volume: Volume) -> None:
        """Remove a volume. OSError or CallError if it stays."""
        self._targets.unbind(volume.target)
        self._forget(volume)

    def _forget(self, volume: Volume) -> None:
        """Remove what is recorded of a volume that is bound nowhere, and its model if that is not needed any more."""
        self._state.remove(volume)
        self._release(volume.model)
        log.info("volume %s is gone", volume.id)

    def _release(self, model: Model) -> None:
        """Remove a model that no volume needs. If that fails, the next rounds try it."""
        self._tries.attempt("model", self._models.name_of(model), partial(self._models.release, model))

    def _is_bound(self, volume: Volume) -> bool:
        place, path = self._targets.path_of(volume.target), self._models.path_of(volume.model)
        return binding.is_bound(place, self._models.mount(), path)

    # ---- the plug-in's own round ----

    def run(self, stopped: threading.Event) -> None:
        """Repair volumes until ``stopped``."""
        rounds, labels = 0, self._options.labels
        while True:
            known = self._state.volumes()
            for volume in known:
                if stopped.is_set():
                    return
                self._tries.attempt("volume", volume.id, partial(self._repair, volume))
            self._tries.forget_others("volume", [volume.id for volume in known])
            if rounds % _SWEEP_ROUNDS == 0:
                self._tries.attempt("models", "that no volume needs", self._sweep)
            if labels is not None:
                self._tries.attempt("labels", "of the node", lambda: labels.set(self._models.resident()))
            rounds += 1
            if stopped.wait(_ROUND_SECONDS):
                return

    def _sweep(self) -> None:
        """Remove what no volume needs, after a plug-in that was killed, or what could not be removed before."""
        found = self._models.leftovers()
        for device, name in found:
            self._tries.attempt("model", name, partial(self._models.remove_unneeded, device, name))
        self._tries.forget_others("model", [name for _, name in found])

    def _repair(self, volume: Volume) -> None:
        with self._only_call_for(volume.target, is_round=True):
            if volume not in self._state.volumes():
                return  # unpublished since
            if not self._targets.has_parent(volume.target):
                log.info("the pod of volume %s is gone", volume.id)
                self._remove(volume)
                return
            if self._is_bound(volume) or (volume.credentials and not self._models.is_there(volume.model)):
                return  # or the kubelet publishes it again, with the secret
            deadline = time.monotonic() + _REPAIR_SECONDS

            def proceed(progress: str) -> None:
                if time.monotonic() > deadline:  # the fetch goes on; other volumes come next
                    raise CallError("ABORTED", progress)

            self._show(volume, {}, proceed)


def _wait_within(context: Any, source: str) -> Callable[[str], None]:
    """Return what ends the wait for a model before the kubelet stops waiting, so that the pod's events show why."""
    remaining = context.time_remaining()
    deadline = time.monotonic() + (_WAIT_WITHOUT_DEADLINE if remaining is None else max(remaining - _MARGIN, 0.2))

    def proceed(progress: str) -> None:
        if time.monotonic() > deadline or not context.is_active():
            raise CallError("ABORTED", f"{source} is being fetched: {progress}")

    return proceed


# ---- gRPC ----


def _answer(call: Callable[[Any, Any], Any], response: Callable[..., Any], request: Any, context: Any) -> Any:
    try:
        return response(**(call(request, context) or {}))
    except CallError as error:
        failure = error
    except OSError as error:
        named = f"{error.filename}: " if error.filename else ""
        failure = CallError.of(error, f"{named}{error.strerror or error}")
    except Exception:
        log.exception("a call failed")
        failure = CallError("INTERNAL", "a fault of the plug-in, which its log shows")
    log.info("%s: %s", failure.code, failure)
    return context.abort(grpc.StatusCode[failure.code], str(failure))


def _handlers(plugin: Plugin) -> Iterator[grpc.GenericRpcHandler]:
    for service, calls in SERVICES.items():
        methods = {}
        for call in calls:
            method = getattr(plugin, re.sub(r"\B([A-Z])", r"_\1", call).lower(), lambda _request, _context: None)
            methods[call] = grpc.unary_unary_rpc_method_handler(
                partial(_answer, method, CLASSES[f"{call}Response"]),
                request_deserializer=CLASSES[f"{call}Request"].FromString,
                response_serializer=CLASSES[f"{call}Response"].SerializeToString,
            )
        yield grpc.method_handlers_generic_handler(f"{PACKAGE}.{service}", methods)


def serve(options: Options, ready: Callable[[], None]) -> None:
    """Serve until SIGTERM or SIGINT. ``ready``: called when the socket answers. OSError if it cannot start."""
    asked: list[int] = []  # the signals that have come; a handler could wait for ever for the lock of an Event
    plugin = Plugin(options)
    for number in (signal.SIGTERM, signal.SIGINT):  # before, there is nothing to end
        signal.signal(number, lambda arrived, _: asked.append(arrived))
    if options.metrics is not None:
        address, port = options.metrics
        try:
            start_http_server(port, address, plugin.registry)
        except (OSError, UnicodeError) as error:
            raise OSError(f"--metrics {address}:{port}: {error}") from None
    pool = futures.ThreadPoolExecutor(_THREADS)
    settings = [("grpc.max_receive_message_length", _MOST_MESSAGE), ("grpc.so_reuseport", 0)]
    server = grpc.server(pool, options=settings, maximum_concurrent_rpcs=_THREADS)
    server.add_generic_rpc_handlers(list(_handlers(plugin)))
    os.umask(0o077)  # of the socket: only root calls
    try:
        if server.add_insecure_port(f"unix:{options.endpoint}") == 0:
            raise OSError(f"{options.endpoint}: the socket cannot be made")
    except RuntimeError as error:
        raise OSError(f"{options.endpoint}: the socket cannot be made: {error}") from None
    server.start()
    os.umask(0o022)
    ready()
    stopped = threading.Event()
    rounds = threading.Thread(target=plugin.run, args=(stopped,), daemon=True)
    rounds.start()
    while not asked:
        time.sleep(_SIGNAL_SECONDS)
    stopped.set()
    server.stop(_GRACE).wait(2 * _GRACE)  # a call may wait for a mount that does not answer
    plugin.close()
