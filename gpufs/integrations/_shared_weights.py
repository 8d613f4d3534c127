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
import shlex
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from errno import ENOSPC
from pathlib import Path
from typing import Any

import msgspec
import torch

from gpufs.formats import FormatError
from gpufs.formats.records import UNSAVED_BUFFER
from gpufs.new_file import has_name
from gpufs.syscalls import closed_after
from gpufs.torch import publish
from gpufs.torch._file import Checkpoint, SafetensorsFile
from gpufs.torch._module import named_tensors
from gpufs.units import bytes_text

METADATA_KEY = "gpufs.engine"
# Smaller tensors become private copies: biases, norms, and scales, which engines may change.
SMALLEST_SHARED = 64 << 10
_RETRY_SECONDS = 0.2
_SUFFIX = ".safetensors"
# Of a file that is the only copy of its weights.
_ONLY_COPY = "user.gpufs-only-copy"
_ROW_BYTES = 8192  # of which the digest takes one number
_MOST_ROWS = 4096  # multiplied at a time on a GPU, which needs memory for them


class Version(msgspec.Struct, frozen=True):
    """The checkpoint that weights of a group were made of. digest: of what identifies its files. path: for people."""

    digest: str
    path: str


class Note(msgspec.Struct):
    """What the engine that publishes weights writes into the file. version: of the weights of a group."""

    key: dict[str, Any]
    digest: str
    attributes: dict[str, Any]
    version: Version | None = None

    @classmethod
    def of(cls, metadata: Mapping[str, str] | None, path: Path) -> Note:
        """Read the note of the file with this metadata. FormatError if it is damaged."""
        try:
            return msgspec.json.decode((metadata or {}).get(METADATA_KEY, ""), type=cls)
        except (ValueError, RecursionError) as error:
            raise FormatError(f"{path}: the note of the engine that wrote it is damaged: {error}") from None

    def metadata(self) -> dict[str, str]:
        """Return the note as metadata of a file."""
        return {METADATA_KEY: _json(msgspec.structs.asdict(self) | {"version": msgspec.to_builtins(self.version)})}


@dataclass(frozen=True)
class OpenWeights:
    """Weights that are attached.

    attributes: what the engine that published them noted about the model. private: whether this program may not write
    to the file, and so has got a copy of its own in GPU memory. version: of the weights of a group.
    """

    path: Path
    checkpoint: Checkpoint
    attributes: dict[str, Any]
    bytes: int
    private: bool
    version: Version | None = None

    def keep(self) -> None:
        """Note in the file that it is the only copy of the weights."""
        with suppress(OSError):
            os.setxattr(self.path, _ONLY_COPY, b"1")


@dataclass(frozen=True)
class SharedWeights:
    """Where weights with a key are, or will be.

    Each user has a directory of their own on a device, so that nobody else can put a file in the place of another.
    """

    directory: Path  # the directory of a device. The file is in one of ``folder`` there.
    # Names that people read, such as "vllm" and "Qwen3-8B".
    folder: str
    label: str
    key: Mapping[str, Any]  # all that decides about the weights, as JSON can express it
    # Names or numbers of users whose files may be used, besides this program's user, root, and the owner of the
    # directory. "*" stands for all.
    trusted: tuple[str, ...] = ()
    mode: int = 0o644  # of the file, at most
    # For a group, what this program would publish: the key does not have it.
    version: Version | None = None

    @property
    def path(self) -> Path:
        """The file that this program writes. Its name ends with a digest of the key."""
        label = re.sub(r"[^\w.-]+", "-", self.label).strip("-.")[:100] or "model"
        return self.directory / self._folder_of(os.geteuid()) / f"{label}{self._suffix}"

    @property
    def _suffix(self) -> str:
        return f"-{hash_of(self.key)[:16]}{_SUFFIX}"

    def _folder_of(self, user: int) -> str:
        return self.folder if user == os.stat(self.directory).st_uid else f"{self.folder}-{user}"

    def _folders(self) -> Iterator[Path]:
        """Yield the directories of users that are trusted, this program's first. Only their owners can write there."""
        for folder in dict.fromkeys([self.path.parent, *sorted(self.directory.glob(f"{self.folder}*"))]):
            with suppress(FileNotFoundError):
                status = folder.lstat()
                is_own = stat.S_ISDIR(status.st_mode) and folder.name == self._folder_of(status.st_uid)
                if is_own and not status.st_mode & 0o022 and self._is_trusted(status.st_uid):
                    yield folder

    def _is_trusted(self, owner: int) -> bool:
        import pwd

        names = {"*", str(owner)}
        with suppress(KeyError):
            names.add(pwd.getpwuid(owner).pw_name)
        return owner in (os.geteuid(), 0, os.stat(self.directory).st_uid) or not names.isdisjoint(self.trusted)

    def open(self, *, verify: bool = True) -> OpenWeights | None:
        """Attach the weights, under any label. None if there are none, or they are being written.

        ``verify``: compare the contents with the digest, which reads them once, in device memory. FormatError: the file
        is damaged, or has another key. OSError: it cannot be attached.
        """
        failure: Exception | None = None
        for folder in self._folders():
            for path in sorted(folder.glob(f"*{self._suffix}")):
                try:
                    weights = self._open(path, verify)
                except (FormatError, OSError) as error:
                    failure = failure or error
                    continue
                if weights is not None:
                    return weights
        if failure is not None:
            raise failure
        return None

    def _open(self, path: Path, verify: bool) -> OpenWeights | None:
        try:
            status = path.stat()
            if not status.st_size:
                return None
            checkpoint = Checkpoint(path, "r")
        except FileNotFoundError:
            return None
        if status.st_uid == os.geteuid() and status.st_mode & 0o777 & ~self.mode:
            path.chmod(status.st_mode & self.mode)  # the checkpoint has fewer readers than before
        note = self.check(checkpoint.files[0], path, verify=verify)
        private = checkpoint.files[0].private
        return OpenWeights(path, checkpoint, note.attributes, status.st_size, private, note.version)

    def check(self, file: SafetensorsFile, path: Path, *, verify: bool = True) -> Note:
        """Return the note of an attached file. FormatError, as for open(), if the file cannot be used.

        ``path``: the file's name.
        """
        note = Note.of(file.metadata, path)
        if note.key != json.loads(_json(self.key)):
            raise FormatError(f"{path} has another key than its name says")
        if verify and note.digest != digest_of({name: file.tensor(name) for name in file.names()}, kinds_of(file)):
            raise FormatError(f"{path}: the contents do not match the digest in the header")
        return note

    @contextmanager
    def claim(self, seconds: float, waiting: Callable[[], None]) -> Iterator[bool]:
        """Claim the name for publishing, until the context ends. Others of this user that claim it wait for that.

        False if another engine still has it after so many ``seconds``; ``waiting`` is called once if there is one.
        OSError if this program may not create files there.
        """
        self.path.parent.mkdir(0o755, exist_ok=True)
        if self.path.parent not in self._folders():
            raise PermissionError(f"{self.path.parent} is not a directory to which this user alone may write")
        file = self._lock(time.monotonic() + seconds, waiting)
        try:
            yield file is not None
        finally:
            if file is not None:
                with suppress(OSError):
                    if has_name(file, os.fspath(self.path), None) and not os.fstat(file).st_size:
                        os.unlink(self.path)
                os.close(file)

    def _lock(self, deadline: float, waiting: Callable[[], None]) -> int | None:
        announced = False
        while True:
            flags = os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            with closed_after(os.open(self.path, flags, self.mode)) as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    # Else another engine has published or removed it between the two calls.
                    if has_name(file, os.fspath(self.path), None):
                        os.fchmod(file, os.fstat(file).st_mode & self.mode)  # which publish() keeps
                        return os.dup(file)  # which shares the lock
                except BlockingIOError:
                    if not announced:
                        waiting()
                    announced = True
                    if time.monotonic() > deadline:
                        return None
                    time.sleep(_RETRY_SECONDS)

    def discard(self) -> None:
        """Remove the contents of a damaged file, within a claim. Does nothing while a program has it attached."""
        with suppress(OSError):
            os.truncate(self.path, 0)

    def unused(self) -> str:
        """Return how to free memory: which published files no program uses that this user may remove. Else ""."""
        sizes = {}
        for folder in self._folders():
            for path in folder.glob(f"*{_SUFFIX}") if os.access(folder, os.W_OK) else ():
                with suppress(OSError):  # gone, or on a mount of an older version
                    used = {os.getxattr(path, f"user.gpufs.{name}") for name in ("leases", "parked_bytes")} != {b"0"}
                    if not used and _ONLY_COPY not in os.listxattr(path):
                        sizes[os.fspath(path)] = bytes_text(path.stat().st_size)
        if not sizes:
            return ""
        named = ", ".join(f"{path} ({size})" for path, size in sizes.items())
        return f". No program uses these published weights: {named}. To free them: rm {shlex.join(sizes)}"

    def publish(self, module: torch.nn.Module, attributes: Mapping[str, Any]) -> OpenWeights:
        """Write the parameters and buffers of a module, within a claim, and attach them.

        A GPU that has no space for both copies gets the new one by way of host memory. Then the parameters are there
        until :func:`move_to_shared` is called. TypeError: a tensor has no form in the file. OSError as
        :func:`gpufs.torch.publish`. FormatError: what was written is not what was to be written.
        """
        tensors = {name: value.detach() for name, value in named_tensors(module).items()}
        kinds = {name: "parameter" for name, _ in module.named_parameters(remove_duplicate=False)}
        digest = digest_of(tensors, {**dict.fromkeys(tensors, "buffer"), **kinds})
        note = Note(dict(self.key), digest, dict(attributes), self.version)
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

    def _write(self, module: torch.nn.Module, note: Note) -> OpenWeights:
        # The notes of a group's later versions may be longer.
        publish(module, self.path, metadata=note.metadata(), replace=self.version is not None)
        try:
            weights = self._open(self.path, verify=True)
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
    kinds = kinds_of(checkpoint.files[0])
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


def kinds_of(file: SafetensorsFile) -> dict[str, str]:
    """Return whether each tensor of a published file is a parameter or a buffer."""
    kinds = {name: file.records[name].kind if name in file.records else None for name in file.names()}
    return {name: "buffer" if kind == UNSAVED_BUFFER else kind or "parameter" for name, kind in kinds.items()}


def _json(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def hash_of(value: object) -> str:
    """Return a hash of a value that JSON can express."""
    return hashlib.sha256(_json(value).encode()).hexdigest()


def digest_of(tensors: Mapping[str, torch.Tensor], kinds: Mapping[str, str]) -> str:
    """Return a digest of names, kinds, dtypes, shapes and contents, which do not leave the device."""
    digest = hashlib.sha256()
    sums = {name: _sums(tensors[name]) for name in sorted(tensors)}  # a GPU works on all of them before the first wait
    for name, numbers in sums.items():
        digest.update(f"{name!r} {kinds[name]} {tensors[name].dtype} {list(tensors[name].shape)}\n".encode())
        digest.update(numbers.cpu().numpy().tobytes())
    return digest.hexdigest()


def _sums(tensor: torch.Tensor) -> torch.Tensor:
    """Return for each 8 KiB of a tensor the sum of its words, weighed by their position: 20 GB/s on one core."""
    by_stride = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    flat = tensor.permute(by_stride).contiguous().view(-1).view(torch.uint8)
    if flat.data_ptr() % 8 or flat.storage_offset() % 8:
        flat = flat.clone()
    whole = len(flat) // _ROW_BYTES * _ROW_BYTES
    rest = torch.zeros(_ROW_BYTES, dtype=torch.uint8, device=flat.device)
    rest[: len(flat) - whole] = flat[whole:]
    # Odd, so that each bit of each word counts.
    weights = torch.arange(_ROW_BYTES // 8, device=flat.device) * -0x61C8864680B583EC + 1
    rows = [
        *torch.split(flat[:whole].view(torch.int64).view(-1, len(weights)), _MOST_ROWS),
        rest.view(torch.int64)[None],
    ]
    if flat.is_cuda:  # where torch multiplies no matrices of integers
        return torch.cat([(part * weights).sum(1) for part in rows])
    return torch.cat([part.mv(weights) for part in rows])
