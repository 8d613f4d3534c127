"""Files of other formats as tensors in place: GGUF, torch.save(), npz and npy."""

from __future__ import annotations

import os
import warnings
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

import gpufs
from gpufs._naming import named_in
from gpufs.formats import FormatError, archives, gguf, layout
from gpufs.formats.checkpoint import link_error
from gpufs.modes import Mode
from gpufs.torch._file import TORCH_DTYPES, Device, load_file

_MAGIC_BYTES = 8


class _File:
    """An attached file. Its tensors are views that keep the mapping alive."""

    def __init__(self, path: str, mode: Mode, device: Device) -> None:
        try:
            self._bytes: torch.Tensor = from_dlpack(gpufs.attach(path, mode=mode))
        except OSError as error:
            raise link_error(error, path) from None
        self._device = device
        self.mode = mode
        self.size = len(self._bytes)

    def read(self, offset: int, count: int) -> bytes:
        return self._bytes[offset : offset + count].cpu().numpy().tobytes()

    def tensor(
        self,
        dtype: torch.dtype,
        offset: int,
        count: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None = None,
    ) -> torch.Tensor:
        """Return the tensor in ``count`` bytes from ``offset`` on. A copy if its address does not suit the dtype."""
        data = self._bytes[offset : offset + count]
        if data.data_ptr() % dtype.itemsize or data.storage_offset() % dtype.itemsize:
            data = data.clone()
        typed = data.view(dtype)
        shaped = typed.view(shape) if strides is None else typed.as_strided(shape, strides)
        return shaped if self._device is None else shaped.to(self._device)


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
    file = _File(name, mode, device)
    magic = file.read(0, _MAGIC_BYTES)
    try:
        if magic.startswith(gguf.MAGIC):
            return _load_gguf(file)
        if magic.startswith(layout.NPY_MAGIC):
            return _array(file, layout.read_npy(file.size, file.read))
        if magic.startswith((archives.MAGIC, archives.EMPTY_MAGIC)):
            members = archives.read_members(file.size, file.read)
            if archives.pickle_name(members) is not None:
                return archives.restore(archives.read_torch_archive(file.size, file.read), partial(_leaf, file))
            return _load_npz(name, file, members)
    except FormatError as error:
        raise FormatError(f"{name}: {error}") from None
    return load_file(name, device, mode=mode)


def _load_gguf(file: _File) -> dict[str, torch.Tensor]:
    tensors = {}
    for entry in gguf.read_gguf(file.size, file.read)[0]:
        dtype = TORCH_DTYPES[entry.type] if entry.block == 1 else torch.uint8
        tensor = file.tensor(dtype, entry.offset, entry.bytes, entry.stored_shape)
        vars(tensor).update(ggml_type=entry.type, ggml_shape=entry.shape)
        tensors[entry.name] = tensor
    return tensors


def _load_npz(path: str, file: _File, members: dict[str, archives.Member]) -> dict[str, torch.Tensor]:
    arrays, others = layout.read_npz(members, file.read)
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
        warnings.warn(f"{path}: left out, because they are not tensors: {text}. numpy.load() reads them", stacklevel=3)
    return tensors


def _dtype_of(place: layout.TensorPlace) -> torch.dtype | None:
    try:
        return torch.from_numpy(np.empty(0, place.dtype)).dtype
    except (TypeError, ValueError):
        return None


def _array(file: _File, place: layout.TensorPlace) -> torch.Tensor:
    dtype = _dtype_of(place)
    if dtype is None:
        raise FormatError(f"torch has no dtype for numpy's {place.dtype}: use numpy.load()")
    if not place.fortran_order:
        return file.tensor(dtype, place.offset, place.bytes, place.shape)
    shape = place.shape[::-1]
    return file.tensor(dtype, place.offset, place.bytes, shape).permute(*reversed(range(len(shape))))


def _leaf(file: _File, value: archives.Leaf) -> Any:
    """Return what stands for a part of the saved object, as torch.load() has it."""
    if isinstance(value, archives.Size):
        return torch.Size(value.shape)
    name = value.name if isinstance(value, archives.Dtype) else value.dtype
    if name not in TORCH_DTYPES:
        raise FormatError(f"torch {torch.__version__} has no dtype for {name}")
    dtype = TORCH_DTYPES[name]
    if isinstance(value, archives.Dtype):
        return dtype
    return _storage(value, file, dtype) if isinstance(value, archives.Storage) else _stored(value, file, dtype)


def _storage(value: archives.Storage, file: _File, dtype: torch.dtype) -> torch.TypedStorage:
    member = value.member
    elements = file.tensor(torch.uint8, member.offset, member.bytes, (member.bytes,))
    if elements.untyped_storage().nbytes() != member.bytes:  # that of the whole file
        elements = elements.clone()
    return torch.TypedStorage(  # type: ignore[no-untyped-call]
        wrap_storage=elements.untyped_storage(), dtype=dtype, _internal=True
    )


def _stored(value: archives.StoredTensor, file: _File, dtype: torch.dtype) -> torch.Tensor:
    offset, count = value.place(dtype.itemsize)
    tensor = file.tensor(dtype, offset, count, value.shape, value.strides)
    if value.conjugated:
        tensor = tensor.conj()
    if value.negated:
        tensor = torch._neg_view(tensor)  # torch has no public name for it
    trainable = value.requires_grad and file.mode != "r"
    if value.is_parameter:
        return torch.nn.Parameter(tensor, requires_grad=trainable)
    return tensor.requires_grad_(trainable)
