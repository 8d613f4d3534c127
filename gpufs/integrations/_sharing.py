"""Gets the weights of an engine: it maps those that an earlier engine has published, or loads and publishes them.

They are in the directory of its device on a mount.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from errno import EDQUOT, ENOSPC
from pathlib import Path
from typing import Any

import torch

from gpufs import mounting, reports
from gpufs.client._daemons import control_file
from gpufs.formats import FormatError
from gpufs.formats.safetensors import without_garbage_collection
from gpufs.integrations._shared_weights import OpenWeights, SharedWeights, move_to_shared
from gpufs.units import bytes_text

SLEEP_REFUSED = (
    "{option} frees the weights of one engine, and with --load-format gpufs they belong to all engines: {remedy}"
    "without {option}, or with --model-loader-extra-config '{{\"share\": false}}', which gives this engine "
    "weights of its own"
)
RELOAD_REFUSED = (
    "The weights of this engine are a file on the mount that other engines use too, and cannot be changed. Start the "
    "engine with --model-loader-extra-config '{\"share\": false}' to load weights into it"
)
# Words in the names of variables that decide about no weights.
_ELSEWHERE = frozenset(
    """
    BIND BUILD CACHE COMMIT DEBUG DIR DISAGGREGATION DP GC HOST IMAGE IP LOG LOGGING LORA MEDIA MOONCAKE NCCL NIXL P2P
    PATH PLUGINS PORT PROFILING PYNCCL RAY REQUEST RESERVED RPC RUN RUST STATS THREADS TIMEOUT TOOL TRACE USAGE
    """.split()
)
_NOT_OF_WEIGHTS = ("_name_or_path", "transformers_version")
# For an engine that loads the same model, perhaps from a slow disk.
CLAIM_SECONDS = 600.0


class LoaderSettings:
    """The keys of ``--model-loader-extra-config`` that are the plug-in's.

    - share: false gives the engine weights of its own.
    - mount: the mount that keeps shared weights. Otherwise it is the one that has the model's files, or the only one
      that has the engine's GPU.
    - keep_checkpoint: false frees the tensors in the model's own files on a mount once the weights are published.
    - trust: a list of users whose shared weights are used, besides one's own, root's and those of the mount's owner.
    - group: a name. Engines of a group take new versions of their shared weights in place, together.

    others: the remaining keys, for the server's own loader.
    """

    def __init__(self, extra: Mapping[str, Any] | None) -> None:
        self.others = dict(extra or {})
        self.share: bool = self.others.pop("share", True)
        self.mount: str | None = self.others.pop("mount", None)
        self.keep_checkpoint: bool = self.others.pop("keep_checkpoint", True)
        self.trusted = tuple(str(user) for user in self.others.pop("trust", ()))
        self.group: str | None = self.others.pop("group", None)
        if self.group is not None and not (self.share and self.keep_checkpoint and self.group):
            raise ValueError(
                '--model-loader-extra-config: engines of a "group" share weights of changing checkpoints, which stay '
                'complete: name it, and leave out "share": false and "keep_checkpoint": false'
            )
        if not self.keep_checkpoint and not self.share:
            raise ValueError(
                '--model-loader-extra-config: "keep_checkpoint": false frees the checkpoint of shared weights, and '
                'with "share": false none are shared: leave one of the two out'
            )


def check_sleep(option: str, shared: SharedWeights | None) -> None:
    """Refuse to start an engine whose shared weights have no host memory to sleep in. ValueError."""
    if shared is not None and not (shared.directory.parent / "host0").is_dir():
        remedy = "mount with --host-memory SIZE, where they sleep; or start "
        raise ValueError(SLEEP_REFUSED.format(option=option, remedy=remedy))


class Log(logging.LoggerAdapter[logging.Logger]):
    """Says in each line whose it is: the servers' logs show the name of a file at most."""

    def process(self, msg: Any, kwargs: Any) -> tuple[Any, Any]:
        return f"gpufs: {msg}", kwargs


@dataclass(frozen=True)
class ModelServer:
    """The steps that each server does in its own way.

    load
        Loads the model and processes its weights.
    build
        Builds the model from shared weights. It may raise any exception.
    restored_on_failure
        A context in which a model is built. After an exception, no trace of that model is left in the server.
    reason_against
        Why the processed weights of a model cannot be shared; None if they can.
    attributes
        What to note about a model beside its weights, as JSON can express it.
    moved
        Called when the parameters of a loaded model have moved.
    ranks
        The process group whose ranks each load a part of the model, as the servers' classes describe it. All call
        :func:`get_model`, with weights of their own.
    released
        Whether files of the model have freed their tensors. Then ``load`` raises an exception.
    sleeps
        Whether the engine may be asked to free its weights for a while. Then none are private copies.
    begun
        When this load began.
    """

    logger: Log
    load: Callable[[], torch.nn.Module]
    build: Callable[[OpenWeights], torch.nn.Module]
    restored_on_failure: Callable[[], AbstractContextManager[None]]
    reason_against: Callable[[torch.nn.Module], str | None]
    attributes: Callable[[torch.nn.Module], Mapping[str, Any]]
    moved: Callable[[torch.nn.Module], None]
    ranks: Any
    released: bool = False
    sleeps: bool = False
    begun: float = field(default_factory=time.perf_counter)

    def all_agree(self, answer: bool) -> bool:
        """Return whether all ranks say yes. Loading may need all of them, so they load together or map together."""
        return all_agree(self.ranks, answer)


def all_agree(ranks: Any, answer: bool) -> bool:
    """Return whether all ranks of a process group say yes."""
    return all(answers_of(ranks, answer))


def answers_of(ranks: Any, answer: Any) -> list[Any]:
    """Return what each rank of a process group says."""
    if ranks.world_size == 1:
        return [answer]
    answers: list[Any] = [None] * ranks.world_size
    torch.distributed.all_gather_object(answers, answer, group=ranks.cpu_group)
    return answers


@contextmanager
def in_all_ranks(ranks: Any) -> Iterator[None]:
    """Have all ranks of a process group fail if one does."""
    try:
        yield
    except Exception:
        all_agree(ranks, False)
        raise
    if not all_agree(ranks, True):
        raise RuntimeError("another rank of the engine has failed")


@dataclass(frozen=True)
class Loaded:
    """A model. shared: the file whose memory it uses. preloaded_bytes: what was in that memory from the beginning."""

    model: torch.nn.Module
    shared: OpenWeights | None = None
    preloaded_bytes: int = 0


def get_model(server: ModelServer, shared: SharedWeights | None) -> Loaded:
    """Return a model with shared weights if that is possible, and with weights of its own otherwise.

    ``shared``: None if this rank cannot share its weights.
    """
    if not server.all_agree(shared is not None) or shared is None:
        return Loaded(server.load())
    weights = open_weights(shared)
    was_there = server.all_agree(weights is not None)
    if not was_there and server.released:
        open_weights(shared, server.logger)  # logs what is wrong with the weights; damaged ones are not removed
        return Loaded(server.load())
    if not was_there:
        del weights
        with claim_in_order(server.ranks, shared, server.logger) as mine:
            weights = open_weights(shared, server.logger, claimed=mine)
            if not server.all_agree(weights is not None):
                model = server.load()
                if mine and weights is None:
                    return Loaded(model, _publish(server, model, shared))
                return Loaded(model)
    assert weights is not None
    if server.sleeps and not server.all_agree(not weights.private):
        text = "The engine loads weights of its own, which can sleep: this user may not write to %s"
        server.logger.warning(text, weights.path)
        del weights
        return Loaded(server.load())
    versions = {each.digest: each.path for each in answers_of(server.ranks, weights.version) if each is not None}
    if len(versions) > 1:
        text = "The ranks' weights in %s are of several versions (%s), and this engine loads its own: %s"
        remedy = "update another engine of the group, or end all and remove the files"
        server.logger.warning(text, weights.path, ", ".join(versions.values()), remedy)
        return Loaded(server.load())
    mapped = _map(server, weights)
    if mapped is not None:
        if shared.version is not None and shared.version.digest not in versions:
            text = "The engine was started with %s, and its group has the weights of %s: an update changes that"
            server.logger.warning(text, shared.version.path, next(iter(versions.values()), "another checkpoint"))
        preloaded = weights.bytes if was_there and not weights.private else 0
        return Loaded(mapped, weights, preloaded)
    del weights
    return Loaded(server.load())


def open_weights(
    shared: SharedWeights,
    logger: Log | None = None,
    *,
    verify: bool = True,
    claimed: bool = False,
) -> OpenWeights | None:
    """Attach shared weights. None if there are none that can be used: the ``logger`` gets the reason.

    ``claimed``: their name is claimed, so that damaged ones can be removed.
    """
    try:
        return shared.open(verify=verify)
    except (FormatError, OSError) as error:
        damaged, reason = isinstance(error, FormatError), str(error)
    text = "Shared weights cannot be used: %s"
    if claimed and damaged:
        shared.discard()  # not within the handler, whose traceback keeps the file attached
        text = "Damaged shared weights are replaced: %s"
    if logger is not None:
        logger.warning(text, reason)
    return None


@contextmanager
def claim_in_order(ranks: Any, shared: SharedWeights, logger: Log) -> Iterator[bool]:
    """Claim the names of the weights of all ranks, the first rank's before the others.

    So of two engines that start at the same time one has all names, and they never wait for each other.
    """
    with ExitStack() as stack:

        def claim() -> bool:
            try:
                return stack.enter_context(shared.claim(CLAIM_SECONDS, waiting))
            except OSError as error:
                logger.warning("Weights cannot be published: %s", error)
                return False

        def waiting() -> None:
            logger.info("Waiting for the engine that loads %s", shared.path)

        if ranks.rank_in_group == 0:
            mine = claim()
            all_agree(ranks, mine)
        else:
            mine = all_agree(ranks, True) and claim()
        yield mine


def _map(server: ModelServer, weights: OpenWeights) -> torch.nn.Module | None:
    """Build a model from shared weights. None if a rank fails."""
    try:
        with without_garbage_collection(), server.restored_on_failure():
            try:
                model = server.build(weights)
            except Exception:
                server.all_agree(False)
                raise
            if not server.all_agree(True):
                raise RuntimeError("the weights of another rank do not")
    except Exception as error:  # noqa: BLE001  the servers' classes are private and may fail in any way
        server.logger.warning("%s does not fit this engine, which loads weights of its own: %r", weights.path, error)
        return None
    server.logger.info(
        "Mapped %s (%s%s) in %.2f seconds",
        weights.path,
        bytes_text(weights.bytes),
        ", a private copy, since this user may not write to the file" if weights.private else "",
        time.perf_counter() - server.begun,
    )
    return model


def _publish(server: ModelServer, model: torch.nn.Module, shared: SharedWeights) -> OpenWeights | None:
    """Publish the weights of a model, and move the model to the published memory. None if that is not possible."""
    reason = server.reason_against(model)
    if reason is None:
        try:
            weights = shared.publish(model, server.attributes(model))
        except (FormatError, OSError, TypeError) as error:
            is_full = isinstance(error, OSError) and error.errno in (ENOSPC, EDQUOT)
            reason = f"{error}{shared.unused() if is_full else ''}"
    if reason is not None:
        server.logger.warning("The weights of this engine are its own: %s", reason)
        return None
    move_to_shared(model, weights)
    server.moved(model)
    gc.collect()
    torch.cuda.empty_cache()
    server.logger.info(
        "Published the weights as %s (%s) in %.2f seconds. Later engines map them",
        shared.path,
        bytes_text(weights.bytes),
        time.perf_counter() - server.begun,
    )
    return weights


def private_pieces(name: str) -> tuple[Any, str]:
    """Import the module with what is private to a server. None, and why, for a version of the server without it."""
    try:
        return importlib.import_module(f"gpufs.integrations.{name}"), ""
    except ImportError as error:
        return None, str(error)


def weights_label(model: str, server: str, key: Mapping[str, Any], groups: Sequence[str], *, is_draft: bool) -> str:
    """Return a name that people read: of the model, of the server and its version, and of the rank of several."""
    parts = [os.path.basename(os.path.normpath(model)), f"{server}-{key[f'{server}_version']}"]
    parts += ["draft"] if is_draft else []
    for name in groups:
        if key[f"{name}_size"] > 1:
            parts.append(f"{name}{key[f'{name}_rank']}of{key[f'{name}_size']}")
    return "-".join(parts)


def refuse_reload(model: torch.nn.Module, undo: Callable[[], None] = lambda: None) -> None:
    """Refuse to load weights into the model: it would write to read-only memory, which ends the process.

    ``undo``: what the server has done to the model by then.
    """

    def refuse(*_: object, **__: object) -> None:
        undo()
        raise RuntimeError(RELOAD_REFUSED)

    model.load_weights = refuse  # type: ignore[assignment]


def refuses_reload(model: torch.nn.Module) -> bool:
    """Return whether the model's weights are those of other engines, too."""
    return "load_weights" in vars(model)


def has_no_effect_on_weights(variable: str) -> bool:
    """Return whether a variable of a server's environment decides about something else."""
    return not _ELSEWHERE.isdisjoint(variable.split("_"))


def model_settings(config: Any) -> dict[str, Any]:
    """Return what a model's configuration says, except where it comes from and what has written it."""
    return {name: value for name, value in config.to_dict().items() if name not in _NOT_OF_WEIGHTS}


def device_name() -> str:
    """Return the name and capability of the GPU in use, or "cpu"."""
    if not torch.cuda.is_available():
        return "cpu"
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return f"{properties.name} {properties.major}.{properties.minor}"


# ---- the directory of a device ----


class NoDirectoryError(Exception):
    """No mount has a directory for the device, or several have."""


def is_on_mount(path: str | os.PathLike[str]) -> bool:
    """Return whether a file or directory, or what a link leads to, lies on a gpufs mount."""
    device = os.stat(path).st_dev
    return any(entry.st_dev == device for entry in mounting.mounts())


def device_directory(device: torch.device, near: str | os.PathLike[str], mountpoint: str | None = None) -> Path:
    """Return the directory of a mount in which files are memory of the device: a GPU, or the CPU for host memory.

    ``near``: a directory; if it lies on a mount, only that one counts. ``mountpoint``: the one mount that counts.
    NoDirectoryError if no mount has the device, or several have it.
    """
    entries = [entry for entry in mounting.mounts() if entry.root == "/"]
    if mountpoint is not None:
        wanted = mounting.absolute(mountpoint)
        entries = [entry for entry in entries if entry.mountpoint == wanted]
        if not entries:
            raise NoDirectoryError(f"{mountpoint} is not a gpufs mount")
    real = Path(os.path.realpath(near))
    near_device = os.stat(real).st_dev if real.exists() else -1
    nearest = [entry for entry in entries if entry.st_dev == near_device]
    # This process uses the mount of the model, and one that is named, anyway. Others may be users' mounts that hang.
    report = _report if nearest or mountpoint is not None else _report_of_any
    found = {entry.mountpoint: _directories(report(entry), device) for entry in nearest or entries}
    candidates = {path: directories for path, directories in found.items() if directories}
    if not candidates:
        raise NoDirectoryError(f"no gpufs mount here has a directory for {_name(device)}")
    if len(candidates) > 1:
        raise NoDirectoryError(
            f"{_name(device)} is on several gpufs mounts ({', '.join(candidates)}): choose one by "
            '--model-loader-extra-config \'{"mount": "PATH"}\''
        )
    (directories,) = candidates.values()
    return next((directory for directory in directories if directory in real.parents), directories[0])


def _report(entry: mounting.MountEntry) -> dict[str, Any]:
    try:
        return {**control_file(entry, "status"), "mountpoint": entry.mountpoint}
    except (OSError, ValueError):
        return {"devices": []}  # closed to this user, or its daemon is dead


def _report_of_any(entry: mounting.MountEntry) -> dict[str, Any]:
    """Return what _report() does, from a process of its own, which ends also if the mount never answers."""
    try:
        status = reports.status(entry.mountpoint)
    except OSError:
        return {"devices": []}  # the mount has just been unmounted
    return status.details if status.state == "ok" else {"devices": []}


def _directories(report: Mapping[str, Any], device: torch.device) -> list[Path]:
    """Return the directories of a mount whose memory the device uses. report: the mount's."""
    if device.type == "cpu":
        listed = [one for one in report["devices"] if report["driver"] == "host"]
    else:
        own = _pci_of(device)
        listed = [one for one in report["devices"] if one["pci_address"] and _pci_numbers(one["pci_address"]) == own]
    return [Path(report["mountpoint"], one["name"]) for one in listed]


def _pci_of(device: torch.device) -> tuple[int, int, int]:
    properties: Any = torch.cuda.get_device_properties(device)  # torch's stubs leave these out
    return properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id


def _pci_numbers(address: str) -> tuple[int, int, int]:
    """Return domain, bus and device of an address such as 0000:1b:00.0."""
    domain, bus, rest = address.split(":")
    return int(domain, 16), int(bus, 16), int(rest.split(".")[0], 16)


def _name(device: torch.device) -> str:
    return "host memory" if device.type == "cpu" else f"the GPU {torch.cuda.get_device_name(device)} ({device})"
