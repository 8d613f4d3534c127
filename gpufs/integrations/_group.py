"""Engines that take new weights together: one processes a version into a new file, and all map it in place of the old.

The file of a group has one name for all versions of the weights; its note says of which checkpoint they were made. An
update has two steps, which all ranks of an engine call. :meth:`Group.prepare` finds the version, or makes it, and
changes nothing in the engine. :meth:`Group.commit` maps it at the addresses of the version in use. Nothing else changes
the version, neither a start nor a wake.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from errno import EACCES, EAGAIN, ETIMEDOUT
from io import FileIO
from typing import Any, Final, TypeAlias
from weakref import WeakKeyDictionary

import torch

from gpufs.client._attach import Attachment, attach, following, take_versions
from gpufs.exceptions import with_user_names
from gpufs.formats import FormatError
from gpufs.formats.budget import BoundedFile
from gpufs.formats.checkpoint import find_files
from gpufs.formats.safetensors import build_header, read_header
from gpufs.formats.versions import FileLayout
from gpufs.integrations._checkpoint import ModelFiles
from gpufs.integrations._shared_weights import Note, OpenWeights, SharedWeights, Version, digest_of, kinds_of
from gpufs.integrations._sharing import CLAIM_SECONDS, Log, all_agree, claim_in_order, in_all_ranks
from gpufs.syscalls import path_of
from gpufs.torch._file import SafetensorsFile
from gpufs.torch._memory import FileMemory
from gpufs.torch._module import named_tensors
from gpufs.torch._tensor_file import TensorFile

Process: TypeAlias = Callable[[Mapping[str, torch.Tensor]], None]
_groups: Final[WeakKeyDictionary[torch.nn.Module, Group]] = WeakKeyDictionary()


def group_of(module: torch.nn.Module) -> Group | None:
    """Return the group that a model takes its weights with. None if it does not, as with weights of its own."""
    return _groups.get(module)


class Group:
    """The weights of one rank of an engine: those in use, and those that are prepared.

    Parameters
    ----------
    module
        The model, just loaded: its parameters lie in the file of ``weights``, or are copies of what is there.
    shared, weights
        Where the weights are published (``shared.version`` is not None), and what is attached.
    ranks
        The process group whose ranks make all calls together, each with weights of its own.

    Attributes
    ----------
    version
        The one in use.
    tensors
        The parameters and buffers of the model by their names in the file. Adapters, which come later, give some of
        them other names in the module.
    """

    def __init__(
        self, module: torch.nn.Module, shared: SharedWeights, weights: OpenWeights, ranks: Any, logger: Log
    ) -> None:
        assert weights.version is not None
        self.version = weights.version
        self.tensors = named_tensors(module)
        self._shared = shared
        self._path = weights.path
        self._ranks = ranks
        self._logger = logger
        self._attributes = weights.attributes
        file = weights.checkpoint.files[0]
        self._memory = file.memory  # that of each later version, too
        assert isinstance(file.memory.attached, Attachment)
        self._attachment = file.memory.attached
        self._kinds = kinds_of(file)
        self._layout = FileLayout.read(os.fspath(self._path), BoundedFile(self._memory.size, self._memory.read))
        self._prepared: tuple[FileIO, SafetensorsFile, Version] | None = None  # a file, open and attached
        _groups[module] = self

    def checkpoint(self, path: str) -> ModelFiles:
        """Return the files of a version: of a file of tensors, an index, or the directory of either.

        OSError or FormatError if there are none, or a program has one attached for writing.
        """
        return ModelFiles(find_files(path).files, self._shared.directory)

    def prepare(self, checkpoint: ModelFiles, process: Process) -> None:
        """Get the weights of a checkpoint ready for :meth:`commit`; publish them if no engine has done that.

        Parameters
        ----------
        checkpoint
            The files of the version that is wanted.
        process
            Called if nobody has published that version. It gets writable tensors by the names that the model has, in a
            new file that has the contents of the version in use, and fills them; tied ones are the same memory. It
            raises an exception if what the engine notes beside tensors would become something else. It leaves nothing
            changed in the model, and keeps none of the tensors, whether it fails or not.

        Raises
        ------
        ValueError
            The layout or the notes are others, or a file is damaged. Also what ``process`` raises.
        OSError
            EAGAIN if the weights sleep, EACCES if another user has to publish, ETIMEDOUT after waiting for another
            engine, EBUSY if the checkpoint has changed meanwhile, and what a full device or quota raises.
        RuntimeError
            Another rank has failed.

        In all these cases nothing has changed, for this engine and for others.
        """
        self.forget()
        wanted = checkpoint.version
        with in_all_ranks(self._ranks):
            self._check_awake()
        if all_agree(self._ranks, self.version.digest == wanted.digest):
            return
        file = self._find(wanted)
        if file is None:
            with in_all_ranks(self._ranks):
                self._check_owner()
            with claim_in_order(self._ranks, self._shared, self._logger) as mine:
                file = self._find(wanted)  # another engine may have published it meanwhile
                if file is None:
                    self._publish(checkpoint, process, mine=mine)
                    return
        self._attach(file, wanted)

    def commit(self) -> bool:
        """Use the version that was prepared, at the addresses of the one in use. False if there is none.

        Nothing uses the weights meanwhile. OSError or ValueError if that is not possible: this rank keeps its version,
        and a later call tries again. RuntimeError if another rank fails.
        """
        if self._prepared is None:
            return False
        file, attached, version = self._prepared
        with in_all_ranks(self._ranks):
            self._check_awake()
            with following:
                take_versions([(self._attachment, path_of(file.fileno()))], lambda _, fd: self._checked_layout(fd))
            with torch.no_grad():
                for name, tensor in self.tensors.items():
                    if name in self._kinds and not self._memory.contains(tensor):
                        tensor.data.copy_(attached.uncounted(name))
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # before the lease on the file ends
            self.version = version
        self.forget()
        return True

    def forget(self) -> None:
        """Forget what was prepared. Does nothing if that is nothing."""
        prepared, self._prepared = self._prepared, None
        if prepared is not None:
            prepared[0].close()

    def _check_awake(self) -> None:
        if self._attachment.is_asleep:
            raise OSError(EAGAIN, "the weights sleep: wake the engine first", os.fspath(self._path))

    def _checked_layout(self, fd: int) -> FileLayout:
        """Return the layout of an open file. FormatError if it is another one than that of the version in use."""
        layout = FileLayout.of_file(fd, os.fspath(self._path))
        self._layout.check(layout, os.fspath(self._path))
        return layout

    def _find(self, wanted: Version) -> FileIO | None:
        """Open the file that has the name. None unless it is the wanted version, in all ranks."""
        with ExitStack() as opened:
            found = None
            with in_all_ranks(self._ranks), suppress(FileNotFoundError):
                file = opened.enter_context(FileIO(self._path))
                if os.fstat(file.fileno()).st_size:  # else it is a claim
                    try:
                        _, header = read_header(BoundedFile.of(file.fileno()))
                    except FormatError as error:
                        raise FormatError(f"{self._path}: {error}: remove it, and update again") from None
                    version = Note.of(header.metadata, self._path).version
                    found = file if version is not None and version.digest == wanted.digest else None
            if not all_agree(self._ranks, found is not None):
                return None
            opened.pop_all()
            return found

    def _attach(self, file: FileIO, version: Version) -> None:
        """Prepare the version in an open file, which this takes over, if it can take the place of the one in use."""
        with ExitStack() as opened:
            opened.callback(file.close)
            with in_all_ranks(self._ranks):
                self._checked_layout(file.fileno())
                array = attach(path_of(file.fileno()), placement=self._attachment.placement)
                attached = SafetensorsFile(FileMemory(array))
                try:
                    attributes = self._shared.check(attached, self._path).attributes
                except FormatError as error:
                    raise FormatError(f"{error}. Remove the file, and update again") from None
                if json.dumps(attributes, sort_keys=True) != json.dumps(self._attributes, sort_keys=True):
                    raise ValueError(
                        f"{self._path}: what the engine that published {version.path} has noted beside the weights is "
                        "not what this engine uses: restart the engines of the group"
                    )
            opened.pop_all()
        self._prepared = file, attached, version

    def _publish(self, checkpoint: ModelFiles, process: Process, *, mine: bool) -> None:
        """Make a version and prepare it. The files of all ranks get their names when all are complete."""
        with ExitStack() as opened:
            with in_all_ranks(self._ranks):
                if not mine:
                    text = f"another engine has been at work on a version for {CLAIM_SECONDS:.0f} seconds"
                    raise OSError(ETIMEDOUT, f"{text}: update again later", os.fspath(self._path))
                new = opened.enter_context(TensorFile(self._path))
                try:
                    self._write(new, checkpoint, process)
                finally:
                    gc.collect()
                    torch.cuda.empty_cache()
                file = FileIO(path_of(new.fd))  # no duplicate: that would keep the lock which the new file gets
            self._attach(file, checkpoint.version)
            try:
                with in_all_ranks(self._ranks):
                    self._give_name(new, checkpoint.mode())
            except BaseException:
                self.forget()
                raise

    def _check_owner(self) -> None:
        """Raise OSError unless this user may publish versions of the file."""
        owner = os.stat(self._path.parent).st_uid
        if self._memory.private or owner != os.geteuid():
            text = with_user_names(f"only engines of user {owner}, whose file it is, can publish a version")
            raise OSError(EACCES, f"{text}: update one of those first", os.fspath(self._path))

    def _write(self, new: TensorFile, checkpoint: ModelFiles, process: Process) -> None:
        """Write a version into a new file with the layout of the one in use."""
        new.allocate(self._memory.size)
        memory = FileMemory(new.attach(self._attachment.placement))
        memory.uncounted(0, memory.size).copy_(self._memory.uncounted(0, memory.size))
        file = SafetensorsFile(memory)
        tensors = {name: file.uncounted(name) for name in self._kinds}
        for name, tensor in tensors.items():
            if tensor.numel() and not memory.contains(tensor):
                raise FormatError(f"{self._path}: {name} is not aligned: end all engines of the group, and remove it")
        process(tensors)
        checkpoint.check_unchanged()
        digest = digest_of(tensors, self._kinds)
        note = Note(dict(self._shared.key), digest, dict(self._attributes), checkpoint.version)
        start, header = read_header(BoundedFile(memory.size, memory.read))
        text = build_header(header.entries.items(), {**(header.metadata or {}), **note.metadata()}, size=start)
        memory.uncounted(0, start).copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))

    def _give_name(self, new: TensorFile, mode: int) -> None:
        """Give the name to a complete file. Only users who may read the former file and the checkpoint may read it."""
        with FileIO(self._path) as old:
            status = os.fstat(old.fileno())
            if status.st_size:
                self._checked_layout(old.fileno())
            os.fchmod(old.fileno(), status.st_mode & self._shared.mode & mode)  # the new one takes its mode over
        new.take_name()
