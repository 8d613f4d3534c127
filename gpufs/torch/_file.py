"""Safetensors files as tensors in place: one file, or a checkpoint of several files with an index."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, Self, TypeAlias

import torch

from gpufs._naming import named_in
from gpufs.formats import FormatError
from gpufs.formats.budget import BoundedFile
from gpufs.formats.checkpoint import find_files
from gpufs.formats.element_types import IN_SAFETENSORS
from gpufs.formats.placement import misplaced
from gpufs.formats.records import TensorRecord, parse_records, span
from gpufs.formats.safetensors import (
    LENGTH_BYTES,
    PADDING_NAME,
    Header,
    HeaderEntry,
    read_header,
    without_garbage_collection,
)
from gpufs.modes import Mode
from gpufs.torch._memory import FileMemory
from gpufs.torch._program_report import program

Device: TypeAlias = "torch.device | str | int | None"
_PACKED: Final = {"F4": "float4_e2m1fn_x2"}  # dtypes of safetensors of which an element of torch has two
# By the names of safetensors, without those that this torch does not have.
TORCH_DTYPES: Final[dict[str, torch.dtype]] = {
    name: getattr(torch, torch_name)
    for name, element in IN_SAFETENSORS.items()
    if hasattr(torch, torch_name := _PACKED.get(name, element.name))
}
_NO_RECORD = TensorRecord()


def stored_elements(dtype: str) -> int:
    """Return how many elements of the file are one element of torch."""
    return 2 if dtype in _PACKED else 1


class SafetensorsFile:
    """One safetensors file, mapped. Its tensors are the file's memory, and keep the mapping alive."""

    def __init__(self, memory: FileMemory) -> None:
        self.path = memory.counts.path
        self.private = memory.private
        self.device = memory.device
        self.counts = memory.counts
        self.memory = memory
        try:
            # The header is read from the mapping, so it belongs to these bytes whatever happens to the name.
            file = BoundedFile(memory.size, memory.read)
            self._start, header = _checked_header(file)
            self._entries = header.entries
            self.metadata = header.metadata
            self.records = parse_records(header.metadata, file)
            self._check_records()
        except FormatError as error:
            raise FormatError(f"{self.path}: {error}") from None
        # With r+ a change must reach the file.
        copies = memory.aligned and memory.mode != "r+"
        self._misplaced = misplaced(self._entries, memory.address + self._start) if copies else frozenset()
        # The bytes that several tensors lie in, by their name in the header: such tensors share a storage.
        self._in_several = {self._owner(name) for name, record in self.records.items() if record.same_as is not None}
        self._shared: dict[str, torch.Tensor] = {}

    def _check_records(self) -> None:
        for name, record in self.records.items():
            if (record.entry is not None or record.same_as is not None) and name in self._entries:
                raise FormatError(f"tensor {name!r} has bytes of its own and those of another one")
            if record.same_as is not None and self._record(record.same_as).same_as is not None:
                raise FormatError(
                    f"tensor {name!r} is the same as {record.same_as!r}, which is itself the same as another"
                )
            owner = self._owner(name)
            if owner not in self._entries:
                raise FormatError(f"tensor {name!r} lies in {owner!r}, which is not in the file")
            if record.shape is not None and record.strides is not None:
                entry = self._entries[owner]
                elements = (entry.end - entry.start) // self.dtype(name).itemsize
                if span(record.shape, record.strides) > elements:
                    raise FormatError(f"tensor {name!r} ends beyond the bytes of {owner!r}")

    def _record(self, name: str) -> TensorRecord:
        return self.records.get(name, _NO_RECORD)

    def _owner(self, name: str) -> str:
        """Return the name in the header of the bytes that a tensor lies in."""
        if not self.records:
            return name
        record = self._record(name)
        if record.same_as is not None:
            name = record.same_as
            record = self._record(name)
        return record.entry or name

    def names(self) -> list[str]:
        """Return all tensors, ordered by offset; those that lie in the bytes of others come last."""
        renamed = {record.entry: name for name, record in self.records.items() if record.entry is not None}
        names = [renamed.get(entry, entry) for entry in self._entries if not entry.startswith(PADDING_NAME)]
        return names + [name for name, record in self.records.items() if record.same_as is not None]

    def entry(self, name: str) -> HeaderEntry:
        """Return the bytes that the tensor lies in."""
        return self._entries[self._owner(name)]

    def dtype(self, name: str) -> torch.dtype:
        """Return the tensor's dtype. TypeError if this torch does not have it."""
        dtype = self.entry(name).dtype
        if dtype not in TORCH_DTYPES:
            raise TypeError(f"{self.path}: torch {torch.__version__} has no dtype for {dtype} of tensor {name!r}")
        return TORCH_DTYPES[dtype]

    def shape(self, name: str) -> tuple[int, ...]:
        record = self._record(name)
        if record.shape is not None:
            return record.shape
        entry = self.entry(name)
        packed = stored_elements(entry.dtype)
        if packed == 1 or not entry.shape:
            return entry.shape
        if entry.shape[-1] % packed:
            raise FormatError(f"{self.path}: tensor {name!r} has an odd number of {entry.dtype} elements a row")
        return (*entry.shape[:-1], entry.shape[-1] // packed)

    def strides(self, name: str) -> tuple[int, ...] | None:
        """Return the tensor's strides in elements; None if it is contiguous."""
        return self._record(name).strides

    def tensor(self, name: str) -> torch.Tensor:
        """Return the tensor in place; a copy if its address does not suit its dtype, or kernels."""
        dtype = self.dtype(name)
        return self._shaped(name, self._bytes_of(self._owner(name), dtype.itemsize).view(dtype))

    def uncounted(self, name: str) -> torch.Tensor:
        """Return the tensor in place, or a copy, for gpufs itself: the program does not get it."""
        entry, dtype = self.entry(name), self.dtype(name)
        data = self.memory.uncounted(self._start + entry.start, entry.end - entry.start)
        return self._shaped(name, (data.clone() if data.data_ptr() % dtype.itemsize else data).view(dtype))

    def _shaped(self, name: str, typed: torch.Tensor) -> torch.Tensor:
        strides = self.strides(name)
        return typed.view(self.shape(name)) if strides is None else typed.as_strided(self.shape(name), strides)

    def _bytes_of(self, owner: str, itemsize: int) -> torch.Tensor:
        """Return all bytes that the header has under this name, as a storage."""
        shared = self._shared.get(owner)
        if shared is not None:
            return shared
        entry = self._entries[owner]
        offset, count = self._start + entry.start, entry.end - entry.start
        data = self.memory.aligned_tensor(offset, count, itemsize, copy=owner in self._misplaced)
        return self._shared.setdefault(owner, data) if owner in self._in_several else data

    def part(self, name: str, index: Any) -> torch.Tensor:
        """Return a part of the tensor; in place where torch's indexing gives a view."""
        owner, dtype = self._owner(name), self.dtype(name)
        entry = self._entries[owner]
        whole = self.memory.uncounted(self._start + entry.start, entry.end - entry.start)
        if owner in self._in_several or owner in self._misplaced or whole.data_ptr() % dtype.itemsize:
            return self.memory.separate(self.tensor(name)[index])
        return self.memory.separate(self._shaped(name, whole.view(dtype))[index])


def _checked_header(file: BoundedFile) -> tuple[int, Header]:
    """Return where the data begins, and the header."""
    if not file.beginning(LENGTH_BYTES + 1).endswith(b"{"):
        from gpufs.formats import table  # which names the format that the file has

        table.check_safetensors(file.beginning(table.PREFIX_BYTES))
    return read_header(file)


class Checkpoint:
    """Named tensors of one file, or of the files that an index names."""

    def __init__(self, path: str | os.PathLike[str], mode: Mode) -> None:
        self.path = os.fspath(path)
        listed = find_files(path)
        files = {name: SafetensorsFile(FileMemory.attach(name, mode)) for name in listed.files}
        self.files = list(files.values())
        if listed.places is None:
            self.places = {name: file for file in self.files for name in file.names()}
            return
        held = {name: set(file.names()) for name, file in files.items()}
        for tensor, name in listed.places.items():
            if tensor not in held[name]:
                raise FormatError(f"{self.path}: the index says that tensor {tensor!r} is in {name}, and it is not")
        self.places = {tensor: files[name] for tensor, name in listed.places.items()}

    def tensor(self, name: str, device: Device = None) -> torch.Tensor:
        """Return the tensor in place; a copy if it is on another device than the one asked for."""
        file = self.places[name]
        return file.memory.moved(file.tensor(name), device)

    def memory(self, name: str) -> tuple[object, ...]:
        """Return what is equal for tensors that are the same bytes of a file in the same layout."""
        file = self.places[name]
        return id(file), file.entry(name), file.shape(name), file.strides(name)

    def record(self, name: str) -> TensorRecord:
        """Return what publish() noted about the tensor."""
        return self.places[name].records.get(name, _NO_RECORD)

    def tensors(self, device: Device = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Return all names and tensors, in the order of the files."""
        return ((name, self.tensor(name, device)) for name in self.places)


@named_in("gpufs.torch")
def load_file(
    filename: str | os.PathLike[str], device: Device = None, *, mode: Mode = "r", backend: str | None = None
) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file in place.

    Parameters
    ----------
    filename : path
        A file on a mount of gpufs, the index of a checkpoint of several files (``model.safetensors.index.json``), or
        the directory of either.
    device : torch.device, str or int, optional
        Tensors that are not on this device are copied to it. By default they stay where the file is.
    mode : {"r", "r+", "c"}
        "r" maps the file read-only: a program that writes to a tensor ends (SIGSEGV in host memory, a fatal error of
        the context on a GPU). With "r+" changes of the tensors are changes of the file. With "c" they stay
        private to this program: a page of host memory is copied when it is written to, a GPU's file at once.
    backend : str, optional
        How safetensors reads files. It has no effect: the tensors are in memory already.

    Returns
    -------
    dict of str to torch.Tensor
        Ordered by offset. A tensor whose address is not a multiple of its dtype's size is a private copy. Unless
        ``mode`` is "r+", so are tensors that odd sizes before them have put beside multiples of 16: those of 256 bytes
        or more, the smallest first, up to 16 MiB of a file.

    Raises
    ------
    FormatError
        The file is not a valid safetensors file. The checks are those of safetensors; a key that appears twice is an
        error, too.
    OSError
        The file cannot be opened, or is not on a mount of gpufs.

    Examples
    --------
    >>> weights = gpufs.torch.load_file("/mnt/gpufs/gpu0/model.safetensors")
    >>> model.load_state_dict(weights, assign=True)
    """
    with without_garbage_collection():
        return dict(Checkpoint(filename, mode).tensors(device))


class TensorSlice:
    """A tensor of an open file that can be indexed without being read; see :meth:`safe_open.get_slice`."""

    def __init__(self, checkpoint: Checkpoint, name: str, device: Device) -> None:
        self._checkpoint = checkpoint
        self._name = name
        self._device = device

    def get_shape(self) -> list[int]:
        """Return the tensor's shape."""
        return list(self._checkpoint.places[self._name].shape(self._name))

    def get_dtype(self) -> str:
        """Return the dtype as the file names it, for example "BF16"."""
        return self._checkpoint.places[self._name].entry(self._name).dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Return a part of the tensor; a view where torch's indexing gives one."""
        file = self._checkpoint.places[self._name]
        return file.memory.moved(file.part(self._name, index), self._device)

    def became(self, result: torch.Tensor) -> None:
        """Note what a library has made of the tensor, for the report."""
        file = self._checkpoint.places[self._name]
        file.counts.became(file.dtype(self._name), file.device, result)


@named_in("gpufs.torch")
class safe_open:
    """A safetensors file whose tensors are taken one by one; a context manager.

    Parameters
    ----------
    filename : path
        As for :func:`load_file`.
    framework : {"pt", "torch"}
        Other frameworks take their arrays from :func:`gpufs.attach`.
    device, mode, backend
        As for :func:`load_file`.

    Examples
    --------
    >>> with gpufs.torch.safe_open("/mnt/gpufs/gpu0/model.safetensors", framework="pt") as file:
    ...     half = file.get_slice("embedding.weight")[:1000]
    """

    def __init__(
        self,
        filename: str | os.PathLike[str],
        framework: str = "pt",
        device: Device = None,
        *,
        mode: Mode = "r",
        backend: str | None = None,
    ) -> None:
        if framework not in ("pt", "torch", "pytorch"):
            raise ValueError(f"framework {framework!r} is not served here; use 'pt', or gpufs.attach and DLPack")
        self._path = os.fspath(filename)
        self._device = device
        self._checkpoint: Checkpoint | None = Checkpoint(filename, mode)

    def _open(self) -> Checkpoint:
        if self._checkpoint is None:
            raise ValueError(f"{self._path} is closed")
        return self._checkpoint

    def _known(self, name: str) -> Checkpoint:
        checkpoint = self._open()
        if name not in checkpoint.places:
            raise KeyError(f"{self._path} has no tensor {name!r}")
        return checkpoint

    def keys(self) -> list[str]:
        """Return the names of the tensors, sorted."""
        return sorted(self._open().places)

    def offset_keys(self) -> list[str]:
        """Return the names of the tensors, ordered by offset."""
        return list(self._open().places)

    def metadata(self) -> dict[str, str] | None:
        """Return the metadata of the file; of the first one if there are several."""
        return next((file.metadata for file in self._open().files), None)

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return a tensor in place."""
        return self._known(name).tensor(name, self._device)

    def get_tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors in place, ordered by offset."""
        return dict(self._open().tensors(self._device))

    def get_slice(self, name: str) -> TensorSlice:
        """Return an object that gives parts of a tensor when it is indexed."""
        return TensorSlice(self._known(name), name, self._device)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file. Tensors that it gave stay valid."""
        self._checkpoint = None


class InPlaceFile(safe_open):
    """An open file in the place of safetensors' own; see gpufs/in_place.py. Its errors are safetensors'."""

    def __init__(self, filename: str | os.PathLike[str], device: Device, mode: Mode) -> None:
        super().__init__(filename, device=device, mode=mode)
        program.opened(self)

    def __exit__(self, *_: object) -> None:
        """Close the file. Tensors that it gave stay valid."""
        if self._checkpoint is not None:
            self._checkpoint = None
            program.closed(self)

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return a tensor in place."""
        with _errors_of_safetensors():
            return super().get_tensor(name)

    def get_slice(self, name: str) -> TensorSlice:
        """Return an object that gives parts of a tensor when it is indexed."""
        with _errors_of_safetensors():
            return super().get_slice(name)


@contextmanager
def _errors_of_safetensors() -> Iterator[None]:
    try:
        yield
    except (KeyError, ValueError) as error:
        from safetensors import SafetensorError  # which the program has imported

        raise SafetensorError(error.args[0]) from None
