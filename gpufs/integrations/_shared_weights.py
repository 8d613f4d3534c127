"""Weights in the form in which an engine uses them: one file of a mount, which any number of engines map.

The file is what :func:`gpufs.torch.publish` writes. Its metadata has the key, which says for which weights and which
engine they are good, and a digest of their names, shapes and contents. An empty file with the name is a claim: the
engine that has locked it is about to publish.
"""

from __future__ import annotations

import fcntl
import gc
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from errno import ENOSPC
from pathlib import Path
from typing import Any

import torch

from gpufs.formats import FormatError
from gpufs.new_file import NewFile, has_name
from gpufs.syscalls import closed_after, path_of
from gpufs.torch import publish
from gpufs.torch._file import Checkpoint
from gpufs.torch._module import named_tensors

METADATA_KEY = "gpufs.engine"
# Smaller tensors become private copies: biases, norms, and scales, which engines may change.
SMALLEST_SHARED = 64 << 10
_RETRY_SECONDS = 0.2
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class Phases:
    """Where the time of one load goes. Each phase begins where the one before it ends, the first with this object."""

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self._seconds: dict[str, float] = {}

    def end(self, name: str) -> None:
        """Note the end of a phase. Phases of one name add up."""
        now = time.perf_counter()
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._last
        self._last = now

    def __str__(self) -> str:
        """Return a text such as "0.21 seconds (attach 0.02, build the model 0.19)"."""
        parts = ", ".join(f"{name} {seconds:.3f}" for name, seconds in self._seconds.items())
        return f"{time.perf_counter() - self._start:.3f} seconds" + (f" ({parts})" if parts else "")


@dataclass(frozen=True)
class OpenWeights:
    """Weights that are attached.

    attributes: what the engine that published them noted about the model. private: whether this program may not write
    to the file, and so has got a copy of its own in GPU memory.
    """

    path: Path
    checkpoint: Checkpoint
    attributes: dict[str, Any]
    bytes: int
    private: bool


@dataclass(frozen=True)
class SharedWeights:
    """Where weights with a key are, or will be."""

    directory: Path  # the directory of a device. The file is in ``folder`` there.
    # Names that people read, such as "vllm" and "Qwen3-8B".
    folder: str
    label: str
    key: Mapping[str, Any]  # all that decides about the weights, as JSON can express it
    # Names or numbers of users whose files may be used, besides this program's user, root, and the owner of the
    # directory. "*" stands for all.
    trusted: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        """The file. Its name ends with a digest of the key."""
        label = re.sub(r"[^\w.-]+", "-", self.label).strip("-.")[:100] or "model"
        return self.directory / self.folder / f"{label}-{_digest_of(_json(self.key))[:16]}.safetensors"

    def open(self, *, verify: bool = True, phases: Phases | None = None) -> OpenWeights | None:
        """Attach the weights. None if there are none, or they are being written.

        ``verify``: compare the contents with the digest, which reads them once, in device memory. FormatError: the file
        is damaged, or has another key. PermissionError: its owner is not trusted. OSError: it cannot be attached.
        """
        try:
            file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        try:
            status = os.fstat(file)
            if not status.st_size:
                return None
            if not self._is_trusted(status.st_uid):
                raise PermissionError(f"{self.path} belongs to user {status.st_uid}, who is not trusted")
            # The file whose owner was checked, whatever has the name by now.
            checkpoint = Checkpoint(path_of(file), "r")
        except FormatError as error:
            raise FormatError(str(error).replace(path_of(file), str(self.path))) from None
        finally:
            os.close(file)
        phases = phases or Phases()
        note = self._note(checkpoint)
        phases.end("attach")
        if verify and note["digest"] != _digest(_kinds(checkpoint), dict(checkpoint.tensors())):
            raise FormatError(f"{self.path}: the contents do not match the digest in the header")
        phases.end("compare the digest")
        return OpenWeights(self.path, checkpoint, note["attributes"], status.st_size, checkpoint.files[0].private)

    def _is_trusted(self, owner: int) -> bool:
        if owner in (os.geteuid(), 0, os.stat(self.directory).st_uid) or "*" in self.trusted:
            return True
        import pwd

        with suppress(KeyError):
            if pwd.getpwuid(owner).pw_name in self.trusted:
                return True
        return str(owner) in self.trusted

    def _note(self, checkpoint: Checkpoint) -> dict[str, Any]:
        try:
            note = json.loads((checkpoint.files[0].metadata or {})[METADATA_KEY])
            if note["key"] != json.loads(_json(self.key)):
                raise FormatError(f"{self.path} has another key than its name says")
            if type(note["digest"]) is not str or type(note["attributes"]) is not dict:
                raise ValueError("fields have the wrong type")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise FormatError(f"{self.path}: the note of the engine that wrote it is damaged: {error}") from None
        checked: dict[str, Any] = note
        return checked

    def claim(self, seconds: float, waiting: Callable[[], None]) -> AbstractContextManager[bool]:
        """Claim the name for publishing, until the context ends. Others that claim it wait for that.

        False if another engine still has it after so many ``seconds``; ``waiting`` is called once if there is one.
        OSError if this program may not create files there.
        """
        (self.directory / self.folder).mkdir(exist_ok=True)
        file = self._lock(time.monotonic() + seconds, waiting)
        return nullcontext(False) if file is None else self._hold(file)

    @contextmanager
    def _hold(self, file: int) -> Iterator[bool]:
        try:
            yield True
        finally:
            with suppress(OSError):
                if has_name(file, os.fspath(self.path), None) and not os.fstat(file).st_size:
                    os.unlink(self.path)
            os.close(file)

    def _lock(self, deadline: float, waiting: Callable[[], None]) -> int | None:
        announced = False
        while True:
            try:
                file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except FileNotFoundError:
                try:
                    file = os.open(self.path, os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
                except FileExistsError:
                    continue
            with closed_after(file):
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    # Else another engine has published or removed it between the two calls.
                    if has_name(file, os.fspath(self.path), None):
                        if self._is_trusted(os.fstat(file).st_uid):
                            return os.dup(file)  # which shares the lock
                        return self._own_file()
                except BlockingIOError:
                    if not announced:
                        waiting()
                    announced = True
                    if time.monotonic() > deadline:
                        return None
                    time.sleep(_RETRY_SECONDS)

    def _own_file(self) -> int:
        """Put an empty file of this user in the place of another's, whose owner and rights publish() would keep."""
        folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with closed_after(folder), closing(NewFile.create(folder)) as new:
            new.complete(self.path.name)
            return os.dup(new.fd)  # which shares its lock

    def discard(self) -> None:
        """Remove the contents of a damaged file, within a claim. Does nothing while a program has it attached."""
        with suppress(OSError):
            os.truncate(self.path, 0)

    def publish(self, module: torch.nn.Module, attributes: Mapping[str, Any]) -> OpenWeights:
        """Write the parameters and buffers of a module, within a claim, and attach them.

        A GPU that has no space for both copies gets the new one by way of host memory. Then the parameters are there
        until :func:`move_to_shared` is called. TypeError: a tensor has no form in the file. OSError as
        :func:`gpufs.torch.publish`. FormatError: what was written is not what was to be written.
        """
        tensors = {name: value.detach() for name, value in named_tensors(module).items()}
        kinds = {name: "parameter" for name, _ in module.named_parameters(remove_duplicate=False)}
        digest = _digest({**dict.fromkeys(tensors, "buffer"), **kinds}, tensors)
        note = {"key": self.key, "digest": digest, "attributes": dict(attributes)}
        try:
            return self._write(module, note)
        except OSError as error:
            if error.errno != ENOSPC or not any(parameter.is_cuda for parameter in module.parameters()):
                raise
        del tensors
        moved = _move_to_host(module)
        try:
            return self._write(module, note)
        except BaseException:
            for parameter, device in moved:
                parameter.data = parameter.data.to(device)
            raise

    def _write(self, module: torch.nn.Module, note: Mapping[str, Any]) -> OpenWeights:
        publish(module, self.path, metadata={METADATA_KEY: _json(note)})
        try:
            weights = self.open()
        except FormatError:
            self.path.unlink(missing_ok=True)
            raise
        if weights is None:
            raise FileNotFoundError(f"{self.path} was removed")
        return weights


def _move_to_host(module: torch.nn.Module) -> list[tuple[torch.nn.Parameter, torch.device]]:
    """Move the parameters that will be shared to host memory, and return them with their devices."""
    moved = []
    for parameter in module.parameters():
        if parameter.is_cuda and parameter.nbytes >= SMALLEST_SHARED:
            moved.append((parameter, parameter.device))
            parameter.data = parameter.data.cpu()
    gc.collect()
    torch.cuda.empty_cache()
    return moved


def move_to_shared(module: torch.nn.Module, weights: OpenWeights) -> None:
    """Move the parameters of the module that was published into the file's memory. Their old memory becomes free."""
    for name, parameter in module.named_parameters():
        if parameter.nbytes >= SMALLEST_SHARED:
            parameter.data = weights.checkpoint.tensor(name)


def fill(module: torch.nn.Module, weights: OpenWeights) -> None:
    """Give a module all parameters and buffers of the file; those that it does not have are added.

    FormatError if the file has a tensor of a submodule that the module does not have, or a buffer of another shape.
    """
    checkpoint = weights.checkpoint
    owners = dict(module.named_modules(remove_duplicate=False))
    kinds = _kinds(checkpoint)
    made: dict[tuple[object, ...], torch.Tensor] = {}
    for name in checkpoint.places:
        prefix, _, attribute = name.rpartition(".")
        owner = owners.get(prefix)
        if owner is None:
            raise FormatError(f"{weights.path} has a tensor {name!r}, and the model has no module {prefix!r}")
        is_buffer = kinds[name] == "buffer"
        identity = (is_buffer, *checkpoint.memory(name))
        if identity not in made:
            tensor = checkpoint.tensor(name)
            if is_buffer or tensor.nbytes < SMALLEST_SHARED:
                tensor = tensor.clone()
            made[identity] = tensor if is_buffer else torch.nn.Parameter(tensor, requires_grad=False)
            vars(made[identity]).update(checkpoint.record(name).attributes)
        if is_buffer:
            _put_buffer(owner, attribute, made[identity], weights.path)
        else:
            owner._buffers.pop(attribute, None)
            owner.register_parameter(attribute, made[identity])


def _put_buffer(owner: torch.nn.Module, attribute: str, value: torch.Tensor, path: Path) -> None:
    old = owner._buffers.get(attribute)
    # Tables that are computed from the engine's settings, such as the longest sequence.
    if old is not None and old.shape != value.shape:
        raise FormatError(f"{path} has {attribute!r} of shape {list(value.shape)}, and the model {list(old.shape)}")
    persistent = attribute not in owner._non_persistent_buffers_set
    owner._parameters.pop(attribute, None)
    owner.register_buffer(attribute, value, persistent=persistent)


def _kinds(checkpoint: Checkpoint) -> dict[str, str]:
    return {name: checkpoint.record(name).kind or "parameter" for name in checkpoint.places}


def _json(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _digest(kinds: Mapping[str, str], tensors: Mapping[str, torch.Tensor]) -> str:
    """Return a digest of names, kinds, dtypes, shapes and contents, which do not leave the device."""
    names = sorted(tensors)
    sums = _numbers([_sum(tensors[name]) for name in names])
    lines = (
        f"{name!r} {kinds[name]} {tensors[name].dtype} {list(tensors[name].shape)} {number}"
        for name, number in zip(names, sums, strict=True)
    )
    return _digest_of("\n".join(lines))


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor's words, in the widest words that fill it: 20 GB/s on one core."""
    by_stride = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    flat = tensor.permute(by_stride).contiguous().view(-1).view(torch.uint8)
    word = _WORDS[min(tensor.nbytes & -tensor.nbytes or 1, 8)]
    if flat.data_ptr() % word.itemsize or flat.storage_offset() % word.itemsize:
        flat = flat.clone()
    return flat.view(word).sum(dtype=torch.int64)


def _numbers(scalars: list[torch.Tensor]) -> list[int]:
    """Return the values of tensors of one element each. A GPU is waited for once, not for each of them."""
    numbers = {}
    for device in {scalar.device for scalar in scalars}:
        numbers[device] = iter(torch.stack([scalar for scalar in scalars if scalar.device == device]).tolist())
    return [next(numbers[scalar.device]) for scalar in scalars]
