"""Files of other formats as tensors in place: GGUF, torch.save(), npz and npy."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import numpy as np
import torch

from gpufs._naming import named_in
from gpufs.formats import FormatError, archives, gguf, npy, table
from gpufs.formats.budget import BoundedFile
from gpufs.formats.checkpoint import read_beginning
from gpufs.formats.layout import TensorPlace
from gpufs.modes import Mode
from gpufs.torch._file import TORCH_DTYPES, Device, load_file
from gpufs.torch._memory import FileMemory

_LARGEST_ITEM = 16  # bytes of an element of torch.save(), at most


class _FileInPlace:
    def __init__(self, path: str, mode: Mode, device: Device) -> None:
        self._memory = FileMemory.attach(path, mode)
        self._device = device
        self.path = path
        self._storages: dict[int, torch.Tensor] = {}  # of torch.save(), by their offsets
        self.mode = mode
        self.header = BoundedFile(self._memory.size, self._memory.read)

    def tensor(self, dtype: torch.dtype, offset: int, count: int, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the tensor in ``count`` bytes from ``offset`` on. A copy if its address does not suit the dtype."""
        data = self._memory.aligned_tensor(offset, count, dtype.itemsize)
        return self._memory.moved(data.view(dtype).view(shape), self._device)

    def stored(self, tensor: archives.StoredTensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of torch.save(). Those that shared a storage when they were saved share one again."""
        tensor.place(dtype.itemsize)  # raises FormatError if the storage has fewer bytes
        data = self.storage(tensor.storage)
        elements = data[: len(data) // dtype.itemsize * dtype.itemsize].view(dtype)
        return elements.as_strided(tensor.shape, tensor.strides, tensor.offset)

    def storage(self, storage: archives.Storage) -> torch.Tensor:
        member = storage.member
        if member.offset not in self._storages:
            data = self._memory.aligned_tensor(member.offset, member.bytes, _LARGEST_ITEM)
            self._storages[member.offset] = self._memory.moved(data, self._device)
        return self._storages[member.offset]


@named_in("gpufs.torch")
def load(path: str | os.PathLike[str], device: Device = None, *, mode: Mode = "r") -> Any:
    """Return the tensors of a file in place, whatever its format.

    Parameters
    ----------
    path : path
        A file on a mount of gpufs: safetensors (also an index, or the directory of a checkpoint), GGUF, a file of
        ``torch.save()``, or npz or npy of numpy. The content decides, not the name.
    device : torch.device, str or int, optional
        Tensors that are not on this device are copied to it. By default they stay where the file is.
    mode : {"r", "r+", "c"}
        As for :func:`load_file`.

    Returns
    -------
    dict of str to torch.Tensor, or object
        The tensors by name. For npy the tensor itself. Members of an npz file that are not tensors, such as texts, are
        left out with a warning that names them. For ``torch.save()`` the object that was saved: nested dicts and
        lists keep their form.

        GGUF tensors of a quantised type are their raw blocks, as uint8 in the shape that ``gguf.GGUFReader`` gives
        them. Each GGUF tensor has the attributes ``ggml_type`` ("Q4_K") and ``ggml_shape`` (in elements).

    Raises
    ------
    FormatError
        The file is damaged, or cannot be used in place: compressed members, a pickle that needs more than tensors and
        containers, an old file of ``torch.save()`` that is not a zip archive. The text says what to use instead.
    OSError
        As of :func:`gpufs.attach`.

    Examples
    --------
    >>> state = gpufs.torch.load("/mnt/gpufs/gpu0/pytorch_model.bin")  # doctest: +SKIP
    >>> blocks = gpufs.torch.load("/mnt/gpufs/gpu0/model.gguf")["blk.0.attn_q.weight"]  # doctest: +SKIP
    >>> blocks.ggml_type, blocks.ggml_shape  # doctest: +SKIP
    ('Q4_K', (4096, 4096))

    See Also
    --------
    load_file : safetensors files only, with the parameters of ``safetensors.torch.load_file``.
    """
    name = os.fspath(path)
    if os.path.isdir(name) or name.endswith(".json"):
        return load_file(name, device, mode=mode)
    beginning = read_beginning(name, table.PREFIX_BYTES)
    loader = _LOADERS.get(table.recognize(beginning or b""))  # attach() says what is not a regular file
    if loader is None:
        return load_file(name, device, mode=mode)
    file = _FileInPlace(name, mode, device)
    try:
        return loader(file)
    except FormatError as error:
        raise FormatError(f"{name}: {error}") from None


def _load_gguf(file: _FileInPlace) -> dict[str, torch.Tensor]:
    tensors = {}
    for entry in gguf.read_gguf(file.header)[0]:
        dtype = TORCH_DTYPES[entry.type] if entry.block == 1 else torch.uint8
        tensor = file.tensor(dtype, entry.offset, entry.bytes, entry.stored_shape)
        vars(tensor).update(ggml_type=entry.type, ggml_shape=entry.shape)
        tensors[entry.name] = tensor
    return tensors


def _load_npy(file: _FileInPlace) -> torch.Tensor:
    return _array(file, npy.read_npy(file.header, 0, file.header.size))


def _load_archive(file: _FileInPlace) -> Any:
    members = archives.read_members(file.header)
    if archives.pickle_name(members) is not None:
        saved = archives.read_torch_archive(file.header, members)
        return archives.restore(saved, partial(_leaf, file), file.header)
    return _load_npz(file, members)


def _load_npz(file: _FileInPlace, members: dict[str, archives.Member]) -> dict[str, torch.Tensor]:
    arrays, others = npy.read_npz(members, file.header)
    if members and not arrays:
        raise FormatError(f"the zip archive is neither of torch.save() nor of numpy: it has a member {min(members)!r}")
    tensors = {}
    for place in arrays:
        if _dtype_of(place) is None:
            others[place.name] = f"of numpy's type {place.dtype}"
        else:
            tensors[place.name] = _array(file, place)
    if others:
        text = ", ".join(f"{name} ({why})" for name, why in others.items())
        warnings.warn(
            f"{file.path}: left out, because they are not tensors: {text}. numpy.load() reads them", stacklevel=4
        )
    return tensors


def _dtype_of(place: TensorPlace) -> torch.dtype | None:
    try:
        return torch.from_numpy(np.empty(0, place.dtype)).dtype
    except (TypeError, ValueError):
        return None


def _array(file: _FileInPlace, place: TensorPlace) -> torch.Tensor:
    dtype = _dtype_of(place)
    if dtype is None:
        raise FormatError(f"torch has no dtype for numpy's {place.dtype}: use numpy.load()")
    if not place.fortran_order:
        return file.tensor(dtype, place.offset, place.bytes, place.shape)
    shape = place.shape[::-1]
    return file.tensor(dtype, place.offset, place.bytes, shape).permute(*reversed(range(len(shape))))


def _leaf(file: _FileInPlace, value: archives.Leaf) -> Any:
    """Return what stands for a part of the saved object, as torch.load() has it."""
    if isinstance(value, archives.Size):
        return torch.Size(value.shape)
    if isinstance(value, archives.TorchDevice):
        try:
            return torch.device(value.kind) if value.number is None else torch.device(value.kind, value.number)
        except RuntimeError:
            raise FormatError(f"torch {torch.__version__} has no device {value.kind!r}, {value.number}") from None
    if isinstance(value, archives.TorchLayout):
        layout = getattr(torch, value.name.removeprefix("torch."), None)
        if not isinstance(layout, torch.layout):
            raise FormatError(f"torch {torch.__version__} has no layout {value.name!r}")
        return layout
    name = value.name if isinstance(value, archives.Dtype) else value.dtype
    dtype = TORCH_DTYPES.get(name) or getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise FormatError(f"torch {torch.__version__} has no dtype for {name}")
    if isinstance(value, archives.Dtype):
        return dtype
    return _storage(value, file, dtype) if isinstance(value, archives.Storage) else _stored(value, file, dtype)


def _storage(value: archives.Storage, file: _FileInPlace, dtype: torch.dtype) -> torch.TypedStorage:
    return torch.TypedStorage(  # type: ignore[no-untyped-call]
        wrap_storage=file.storage(value).untyped_storage(), dtype=dtype, _internal=True
    )


def _stored(value: archives.StoredTensor, file: _FileInPlace, dtype: torch.dtype) -> torch.Tensor:
    for name in value.attributes or ():
        if type(name) is not str or hasattr(torch.Tensor, name):
            raise FormatError(f"a tensor of the pickle replaces the attribute {name!r} of torch.Tensor")
    tensor = file.stored(value, dtype)
    if value.conjugated:
        tensor = tensor.conj()
    if value.negated:
        tensor = torch._neg_view(tensor)  # torch has no public name for it
    trainable = value.requires_grad and file.mode != "r"
    if value.is_parameter:
        return torch.nn.Parameter(tensor, requires_grad=trainable)
    return tensor.requires_grad_(trainable)


# load_file() reads or refuses the formats that are not here.
_LOADERS: Final[Mapping[table.Format | None, Callable[[_FileInPlace], Any]]] = {
    table.GGUF: _load_gguf,
    table.NPY: _load_npy,
    **dict.fromkeys(table.ARCHIVES, _load_archive),
}
