"""Writing tensors into a new safetensors file of a mount, within device memory."""

import errno
import json
import os
import stat
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from gpufs._naming import named_in
from gpufs.formats.budget import BoundedFile
from gpufs.formats.records import UNSAVED_BUFFER, TensorRecord, format_records, span
from gpufs.formats.safetensors import DATA_ALIGNMENT, PADDING_NAME, RECORDS_KEY, HeaderEntry, build_header
from gpufs.formats.versions import FileLayout
from gpufs.torch import _pool
from gpufs.torch._file import TORCH_DTYPES, stored_elements
from gpufs.torch._tensor_file import TensorFile

# A tensor with gaps keeps its strides if they make it at most this much larger; otherwise it is made contiguous.
_MAX_SPREAD = 1.25
_LARGEST_ALIGNMENT = 4096
# Kernels load several elements at a time, and are fastest at addresses such as those that torch allocates.
_ALIGNMENT = 256
# Bytes by which the metadata of later versions may be longer, and more for what they note about each tensor.
_SPACE_FOR_NOTES = 1024
_SPACE_FOR_EACH = 128
_FILE_DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}

_Source = torch.nn.Module | Mapping[str, torch.Tensor]


@named_in("gpufs.torch")
@dataclass(frozen=True, slots=True, repr=False)
class Published:
    """A file that :func:`publish` has written.

    Attributes
    ----------
    path : Path
        The file.
    tensors : tuple of str
        The names of the tensors in it.
    nbytes : int
        Its size in bytes, with the header.
    in_place : bool
        Whether it is the file of a pool, in which the tensors were made: then nothing was copied.
    """

    path: Path
    tensors: tuple[str, ...]
    nbytes: int
    in_place: bool

    def __repr__(self) -> str:
        how = ", in place" if self.in_place else ""
        return f"<gpufs.torch.Published {self.path}: {len(self.tensors)} tensors, {self.nbytes} bytes{how}>"


@named_in("gpufs.torch")
def publish(
    source: _Source,
    path: str | os.PathLike[str],
    *,
    metadata: Mapping[str, str] | None = None,
    buffers: bool = True,
    replace: bool = False,
) -> Published:
    """Write the tensors of a module or a dict into a safetensors file of a mount.

    The new file takes the name at once when it is complete, as `mv` does: readers see the old file or the new one, and
    programs that have the old one attached keep it. A process that dies while it writes leaves nothing: until the end
    the file has no name. Only a process that dies between two of the last calls, which give the file a temporary name
    and rename it, leaves a hidden file. The next call for this directory removes it.

    Parameters
    ----------
    source : torch.nn.Module or mapping of str to torch.Tensor
        Of a module, all parameters and buffers, also those that are not persistent. Tensors on other devices are
        copied. Tied tensors are written once.
    path : path
        The file, on a mount of gpufs. A file that it replaces passes on its mode, access control list and pin (`gpufs
        pin`), and its owner where this user may set that.
    metadata : mapping of str to str, optional
        More entries for the metadata of the file. All are texts.
    buffers : bool
        Of a module, also the buffers that are not persistent, which are not in its ``state_dict()``.
        :func:`attach_module` then finds them in the file and need not compute them.
    replace : bool
        Whether the file is a new version of the one that has the name, if there is one that is not empty, for programs
        that :func:`follow` it. Then all tensors have the same names, dtypes, shapes, strides and ties. Their order,
        attributes and ``requires_grad`` may be others, and the metadata as far as the header of the first version has
        space: 1 KiB more, and 128 bytes for each tensor, if that was written with ``replace``, too.
        A symbolic link stays and leads to the new version; without ``replace`` the file takes its place.

    Returns
    -------
    Published
        What was written.

    Raises
    ------
    FormatError
        With ``replace``: the layouts differ; the text has the first tensor that differs. Nothing has been written.
    TypeError, ValueError
        Something has no form in the file: a tensor's dtype, sparse tensors, those on the meta device, tensors that wrap
        others; metadata that is not text.
    DeviceFull
        The device has too little memory. The old file stays.

    Notes
    -----
    Every tool that reads safetensors reads the file. Strides, ties, kinds (parameter or buffer) and those attributes
    of the tensors that JSON can express are in the metadata, and :func:`load_file` and :func:`attach_module` restore
    them. A tensor that is not contiguous is written in the order of its memory, as a flat tensor called
    ``NAME.strided``: so it can be used in place, and no other tool takes it for a contiguous one. Pass
    ``tensor.contiguous()`` to have it written under its own name. Tensors that share only a part of their memory, or
    that are spread widely in it, are written as separate contiguous ones.

    Each tensor of 256 bytes or more begins at a multiple of 256. The space behind one whose size is not a multiple of
    256 may be a tensor called ``gpufs.padding.N``, since safetensors allows no gaps. ``gpufs.torch`` hides these, and
    publishes none that it is called with. In the file of a pool, tensors stay where torch has put them: that is a
    multiple of 512, except for views of a part of another tensor.

    Examples
    --------
    >>> gpufs.torch.publish(model, "/mnt/gpufs/gpu0/model.safetensors").nbytes  # doctest: +SKIP
    8589934592
    """
    chosen = {name: value for name, value in _tensors(source, buffers).items() if not name.startswith(PADDING_NAME)}
    tensors = {name: _plain(name, tensor) for name, tensor in chosen.items()}
    records = _describe(source, chosen)
    # A link stays, and leads to the new version, as with gpufs.replace().
    target_path = Path(os.path.realpath(path) if replace else path)
    old = _layout_of(target_path) if replace else None
    before = old.starts if old is not None else {}
    parts, layouts = _lay_out(tensors, before)
    for name, layout in layouts.items():
        records[name] = msgspec.structs.replace(records.get(name, TensorRecord()), **layout)
    notes = {"format": "pt", **(metadata or {})}
    notes.pop(RECORDS_KEY, None)  # of another file
    if records:
        notes[RECORDS_KEY] = format_records(records)
    pool = _pool.find_pool(parts.values(), target_path)
    if pool is not None and _publish_in_place(pool, parts, notes, target_path, old):
        return Published(Path(path), tuple(tensors), pool.file_bytes, in_place=True)
    # Where the version before has them, in whatever order they come now.
    entries = _entries_at(parts, before, old.size - old.first_tensor if old is not None else 0)
    if entries is None:
        entries = _entries_at(parts, _place(parts), 0) or {}
    header = _header(entries, notes, old, later_versions=replace)
    size = len(header) + max((entry.end for entry in entries.values()), default=0)
    if old is not None:
        old.check(_layout_by(header, size), os.fspath(path))
    _synchronize(tensors)
    with TensorFile(target_path) as file:
        file.allocate(size)
        target = file.map()
        target[: len(header)].copy_(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        for name, part in parts.items():
            start, end = (len(header) + offset for offset in (entries[name].start, entries[name].end))
            target[start:end].copy_(part.contiguous().view(-1).view(torch.uint8))
        _synchronize({**tensors, "": target})
        del target
        file.take_name()
    return Published(Path(path), tuple(tensors), size, in_place=False)


def _layout_of(path: Path) -> FileLayout | None:
    """Return the layout of the file that has a name; None if there is none, or it is empty."""
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):  # opening a FIFO would wait for a writer
            raise OSError(errno.EINVAL, "is not a regular file", os.fspath(path))
        with open(path, "rb", buffering=0) as file:
            return FileLayout.of_file(file.fileno(), os.fspath(path)) if status.st_size else None
    except FileNotFoundError:
        return None


def _layout_by(header: bytes, size: int) -> FileLayout:
    """Return the layout of a safetensors file with this header."""
    file = BoundedFile(size, lambda offset, count: header[offset : offset + count])
    return FileLayout.read("new.safetensors", file)


def _header(
    entries: Mapping[str, HeaderEntry], notes: Mapping[str, str], old: FileLayout | None, *, later_versions: bool
) -> bytes:
    """Return the header: as long as that of the version before, and the first of several with space for more notes."""
    if old is not None:
        try:
            return build_header(entries.items(), notes, size=old.first_tensor)
        except ValueError:  # the header is longer
            return build_header(entries.items(), notes)
    header = build_header(entries.items(), notes)
    if not later_versions:
        return header
    used = len(header.rstrip(b" ")) + _SPACE_FOR_NOTES + _SPACE_FOR_EACH * len(entries)
    return build_header(entries.items(), notes, size=used + -used % DATA_ALIGNMENT)


def _publish_in_place(
    pool: _pool.PoolMemory,
    parts: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str],
    path: Path,
    old: FileLayout | None,
) -> bool:
    """Write a header before a pool's tensors and give its file the name. False if they need a file of their own."""
    entries = _entries_in_place(pool, parts)
    if entries is None:
        return False
    try:
        header = build_header(entries.items(), metadata, size=pool.header_bytes)
    except ValueError:  # more tensors than the space for the header can describe
        return False
    if old is not None and old.difference(_layout_by(header, pool.file_bytes)) is not None:
        return False
    _synchronize(parts)
    assert pool.bytes is not None
    target = pool.bytes[: pool.header_bytes]
    target.copy_(torch.frombuffer(bytearray(header), dtype=torch.uint8))
    _synchronize({"": target})
    pool.file.take_name(path)
    pool.published = True
    pool.file.close()
    return True


def _entries_in_place(pool: _pool.PoolMemory, parts: Mapping[str, torch.Tensor]) -> dict[str, HeaderEntry] | None:
    """Return the header's entries for tensors where they are. None if some overlap."""
    assert pool.bytes is not None
    base = pool.bytes.data_ptr() + pool.header_bytes
    starts = {name: part.data_ptr() - base if part.nbytes else 0 for name, part in parts.items()}
    return _entries_at(parts, starts, len(pool.bytes) - pool.header_bytes)


def _entries_at(
    parts: Mapping[str, torch.Tensor], starts: Mapping[str, int], size: int
) -> dict[str, HeaderEntry] | None:
    """Return the header's entries for tensors that begin there, with padding up to ``size``.

    None if some overlap, or begin nowhere.
    """
    if not parts.keys() <= starts.keys():
        return None
    entries: dict[str, HeaderEntry] = {}
    end = 0
    for name, part in sorted(parts.items(), key=lambda item: (starts[item[0]], item[1].nbytes)):
        if starts[name] < end:
            return None
        _pad(entries, end, starts[name])
        entries[name] = _entry(name, part, starts[name])
        end = entries[name].end
    _pad(entries, end, size)
    return entries


def _pad(entries: dict[str, HeaderEntry], start: int, end: int) -> None:
    if start < end:
        entries[f"{PADDING_NAME}{len(entries)}"] = HeaderEntry("U8", (end - start,), start, end)


def _tensors(source: _Source, buffers: bool) -> dict[str, torch.Tensor]:
    if not isinstance(source, torch.nn.Module):
        if not isinstance(source, Mapping) or not all(isinstance(name, str) for name in source):
            raise TypeError("publish() takes a module, or a dict of tensors by name: {'weight': tensor}")
        return dict(source)
    tensors: dict[str, torch.Tensor] = dict(source.named_parameters(remove_duplicate=False))
    persistent = source.state_dict(keep_vars=True).keys()
    for name, tensor in source.named_buffers(remove_duplicate=False):
        if buffers or name in persistent:
            tensors[name] = tensor
    return tensors


def _describe(source: _Source, tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorRecord]:
    records = {}
    buffers: dict[str, str] = {}
    if isinstance(source, torch.nn.Module):
        buffers = dict.fromkeys((name for name, _ in source.named_buffers(remove_duplicate=False)), UNSAVED_BUFFER)
        buffers |= dict.fromkeys(buffers.keys() & source.state_dict(keep_vars=True).keys(), "buffer")
    for name, tensor in tensors.items():
        kind = buffers.get(name) or ("parameter" if isinstance(tensor, torch.nn.Parameter) else None)
        attributes = {key: value for key, value in vars(tensor).items() if is_json(value)}
        if kind is not None or attributes:
            records[name] = TensorRecord(
                kind=kind, requires_grad=bool(kind and tensor.requires_grad), attributes=attributes
            )
    return records


def is_json(value: object) -> bool:
    """Return whether the value survives being written as JSON and read again."""
    try:
        return bool(json.loads(json.dumps(value, allow_nan=False)) == value)
    except (TypeError, ValueError, RecursionError):
        return False


def _plain(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor without what no file can hold."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name!r} is not a tensor but {type(tensor).__name__}")
    if hasattr(tensor, "__tensor_flatten__"):
        raise TypeError(f"tensor {name!r} wraps others ({type(tensor).__name__}): publish those")
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise TypeError(f"tensor {name!r} is sparse or quantized by torch: convert it first")
    if tensor.is_meta:
        raise TypeError(f"tensor {name!r} is on the meta device and has no bytes")
    if tensor.dtype not in _FILE_DTYPES:
        raise TypeError(f"tensor {name!r}: safetensors has no dtype for {tensor.dtype}")
    return tensor.detach().resolve_conj().resolve_neg()


def _lay_out(
    tensors: Mapping[str, torch.Tensor], before: Container[str]
) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, Any]]]:
    """Return what is written under which name, and the layout of the tensors that are not written as they are.

    ``before``: the names in the version before. Of tied tensors the one that was written there is written again.
    """

    def order(name: str) -> tuple[bool, bool]:
        return not tensors[name].is_contiguous(), name not in before and _strided(name) not in before

    parts: dict[str, torch.Tensor] = {}
    layouts: dict[str, dict[str, Any]] = {}
    owners: dict[tuple[object, ...], str] = {}
    # The contiguous ones first: what is tied to them is a view of them.
    for name in sorted(tensors, key=order):
        tensor = tensors[name]
        elements = span(tuple(tensor.shape), tensor.stride())
        memory = (tensor.device, tensor.data_ptr(), elements, tensor.dtype)
        layout = {"shape": tuple(tensor.shape), "strides": tensor.stride()}
        if elements and memory in owners:
            owner = tensors[owners[memory]]
            same = tensor.shape == owner.shape and tensor.is_contiguous() and owner.is_contiguous()
            layouts[name] = {"same_as": owners[memory], **({} if same else layout)}
        elif tensor.is_contiguous() or elements > _MAX_SPREAD * tensor.numel():
            parts[name] = tensor
            if tensor.is_contiguous():
                owners[memory] = name
        else:
            entry = _strided(name)
            while entry in tensors:
                entry += "_"
            parts[entry] = tensor.as_strided((elements,), (1,))
            layouts[name] = {"entry": entry, **layout}
            owners[memory] = name
    return parts, layouts


def _strided(name: str) -> str:
    return f"{name}.strided"


def _place(parts: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return where each tensor begins in a file of its own.

    Tensors whose size is a multiple of a larger power of two come first. So each begins at a multiple of the largest
    power of two, up to 4096, that its size is a multiple of. Only behind a large tensor of another size there may be
    padding, and small tensors come last.
    """

    def order(name: str) -> tuple[bool, int]:
        size = parts[name].nbytes
        return size >= _ALIGNMENT, min(size & -size, _LARGEST_ALIGNMENT)

    starts: dict[str, int] = {}
    end = 0
    for name in sorted(parts, key=order, reverse=True):
        large, power = order(name)
        starts[name] = end + -end % max(power, _ALIGNMENT if large else 1)
        end = starts[name] + parts[name].nbytes
    return starts


def _entry(name: str, part: torch.Tensor, start: int) -> HeaderEntry:
    """Return the entry of a tensor whose bytes begin there."""
    dtype = _FILE_DTYPES[part.dtype]
    shape = tuple(part.shape)
    if stored_elements(dtype) > 1:
        if not shape:
            raise TypeError(f"tensor {name!r}: {part.dtype} needs a dimension")
        shape = (*shape[:-1], shape[-1] * stored_elements(dtype))
    return HeaderEntry(dtype, shape, start, start + part.nbytes)


def _synchronize(tensors: Mapping[str, torch.Tensor]) -> None:
    """Wait until all streams of the GPUs of these tensors have finished."""
    for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
        torch.cuda.synchronize(device)
