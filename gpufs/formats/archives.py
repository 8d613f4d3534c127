"""Zip archives whose members are stored as they are: npz files of numpy, and files of torch.save().

A file of torch.save() has a pickle, which names the tensors, and a member for each storage. A pickle is a program. This
one may only build containers, numbers and tensors: what ``torch.load(weights_only=True)`` allows of a state dict.
Nothing else is imported or called.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from gpufs.formats import FormatError
from gpufs.formats.element_types import IN_SAFETENSORS

MAGIC: Final = b"PK\x03\x04"
_LOCAL_HEADER_BYTES: Final = 30
# Where a member's local header has the lengths of the name and of the extra field, which come between it and the data.
_NAME_LENGTH: Final = slice(26, 28)
_EXTRA_LENGTH: Final = slice(28, 30)
_MAX_MEMBERS: Final = 1 << 20
_PICKLE: Final = "data.pkl"
_MAX_PICKLE: Final = 1 << 28
_MAX_DIMENSIONS: Final = 64
# The names of safetensors for the storages of torch. An untyped storage has its dtype in the tensor.
_STORAGES: Final = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
    "ComplexFloatStorage": "C64",
    "UntypedStorage": "U8",
}


@dataclass(frozen=True, slots=True)
class Member:
    """A stored member: its bytes are ``bytes`` bytes of the archive from ``offset`` on."""

    name: str
    offset: int
    bytes: int


class _Reader(io.RawIOBase):
    """A file for zipfile, over the function that reads."""

    def __init__(self, size: int, read: Callable[[int, int], bytes]) -> None:
        self._size = size
        self._read = read
        self._position = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise OSError("a position before the start of the file")
        self._position = base + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        left = max(self._size - self._position, 0)
        data = self._read(self._position, left if size < 0 else min(size, left)) if left else b""
        self._position += len(data)
        return data


def read_members(size: int, read: Callable[[int, int], bytes]) -> dict[str, Member]:
    """Find the members of a zip archive.

    Parameters
    ----------
    size
        Of the archive, in bytes.
    read
        ``read(offset, count)`` returns bytes of the archive.

    Returns
    -------
    dict of str to Member
        By name, in the order of the archive's directory.

    Raises
    ------
    FormatError
        The archive is damaged, a member is compressed or encrypted, or two members overlap.
    """
    try:
        with zipfile.ZipFile(_Reader(size, read)) as archive:
            listed = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, OverflowError, UnicodeError, NotImplementedError) as error:
        raise FormatError(f"the zip archive is damaged: {error}") from None
    if len(listed) > _MAX_MEMBERS:
        raise FormatError(f"the zip archive has {len(listed)} members; at most {_MAX_MEMBERS} are read")
    members: dict[str, Member] = {}
    for info in listed:
        if info.is_dir():
            continue
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            how = "encrypted" if info.flag_bits & 1 else "compressed"
            raise FormatError(f"member {info.filename!r} is {how}, so its bytes are not in the file as they are")
        if info.filename in members:
            raise FormatError(f"member {info.filename!r} appears twice")
        header = read(info.header_offset, _LOCAL_HEADER_BYTES) if info.header_offset < size else b""
        if len(header) < _LOCAL_HEADER_BYTES or not header.startswith(MAGIC):
            raise FormatError(f"no member begins at offset {info.header_offset}, where {info.filename!r} should be")
        between = sum(int.from_bytes(header[place], "little") for place in (_NAME_LENGTH, _EXTRA_LENGTH))
        member = Member(info.filename, info.header_offset + _LOCAL_HEADER_BYTES + between, info.file_size)
        if member.offset + member.bytes > size:
            raise FormatError(
                f"member {member.name!r} ends at {member.offset + member.bytes}, and the archive has {size} bytes"
            )
        members[member.name] = member
    end = 0
    for member in sorted(members.values(), key=lambda each: each.offset):
        if member.offset < end:
            raise FormatError(f"member {member.name!r} overlaps the one before it")
        end = member.offset + member.bytes
    return members


# ---- files of torch.save() ----


@dataclass(frozen=True, slots=True)
class Storage:
    """A member of the archive that tensors lie in. ``dtype``: of its elements, by safetensors' name."""

    dtype: str
    member: Member


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of the pickle, in elements of ``dtype`` from the start of its storage."""

    storage: Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    requires_grad: bool
    is_parameter: bool = False

    def place(self, itemsize: int) -> tuple[int, int]:
        """Return the offset in the file and the number of its bytes. FormatError if the file does not have them all."""
        member = self.storage.member
        if len(self.shape) != len(self.strides):
            raise FormatError(
                f"a tensor in {member.name!r} has {len(self.shape)} extents and {len(self.strides)} strides"
            )
        start = self.offset * itemsize
        last = sum((extent - 1) * stride for extent, stride in zip(self.shape, self.strides, strict=True))
        count = 0 if 0 in self.shape else (1 + last) * itemsize
        if start + count > member.bytes:
            raise FormatError(f"a tensor ends at byte {start + count} of {member.name!r}, which has {member.bytes}")
        return member.offset + start, count


@dataclass(frozen=True, slots=True)
class _StorageType:
    dtype: str


@dataclass(frozen=True, slots=True)
class _Dtype:
    name: str


def _sizes(values: Any) -> tuple[int, ...]:
    numbers = tuple(values)
    if len(numbers) > _MAX_DIMENSIONS or not all(type(number) is int and number >= 0 for number in numbers):
        raise FormatError("a tensor of the pickle has a shape or strides that are not unsigned numbers")
    return numbers


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, requires_grad: Any = False, *_: Any) -> StoredTensor:
    """As torch._utils._rebuild_tensor_v2. What follows are hooks and metadata, which torch.load ignores here, too."""
    if type(storage) is not Storage or type(offset) is not int or offset < 0:
        raise FormatError("a tensor of the pickle has no storage, or its offset is not an unsigned number")
    return StoredTensor(storage, storage.dtype, offset, _sizes(shape), _sizes(strides), bool(requires_grad))


def _tensor_of_dtype(
    storage: Any, offset: Any, shape: Any, strides: Any, requires_grad: Any, hooks: Any, dtype: Any, *_: Any
) -> StoredTensor:
    """As torch._utils._rebuild_tensor_v3, for dtypes whose storage is untyped."""
    if type(dtype) is not _Dtype:
        raise FormatError("a tensor of the pickle has no dtype")
    tensor = _tensor(storage, offset, shape, strides, requires_grad)
    return StoredTensor(tensor.storage, dtype.name, tensor.offset, tensor.shape, tensor.strides, tensor.requires_grad)


def _parameter(data: Any, requires_grad: Any, *_: Any) -> StoredTensor:
    """As torch._utils._rebuild_parameter."""
    if type(data) is not StoredTensor:
        raise FormatError("a parameter of the pickle is not a tensor")
    return StoredTensor(
        data.storage, data.dtype, data.offset, data.shape, data.strides, bool(requires_grad), is_parameter=True
    )


_ALLOWED: Final[Mapping[tuple[str, str], Any]] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): _sizes,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_of_dtype,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch.storage", "UntypedStorage"): _StorageType("U8"),
    **{("torch", name): _StorageType(dtype) for name, dtype in _STORAGES.items()},
    **{("torch", element.name): _Dtype(dtype) for dtype, element in IN_SAFETENSORS.items() if element.dlpack >= 0},
}


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, folder: str, members: Mapping[str, Member]) -> None:
        super().__init__(io.BytesIO(data))
        self._folder = folder
        self._members = members

    def find_class(self, module: str, name: str) -> Any:
        allowed = _ALLOWED.get((module, name))
        if allowed is None:
            raise FormatError(
                f"the pickle needs {module}.{name}, which is neither a tensor nor a container: use torch.load(), if "
                "you trust the file's author"
            )
        return allowed

    def persistent_load(self, identifier: Any) -> Storage:
        """Return a storage: ("storage", type, key, location, number of elements)."""
        if type(identifier) is not tuple or len(identifier) != 5 or identifier[0] != "storage":
            raise FormatError("the pickle refers to something that is not a storage")
        kind, key = identifier[1:3]
        member = self._members.get(f"{self._folder}data/{key}")
        if type(kind) is not _StorageType or member is None:
            raise FormatError(f"the pickle refers to storage {key!r}, which the archive does not have")
        return Storage(kind.dtype, member)


def pickle_name(names: Mapping[str, Member]) -> str | None:
    """Return the member with the pickle, if this is an archive of torch.save()."""
    return next((name for name in names if name.endswith(f"/{_PICKLE}")), None)


def read_torch_archive(size: int, read: Callable[[int, int], bytes]) -> Any:
    """Read what torch.save() has written, with a StoredTensor in the place of each tensor.

    Parameters
    ----------
    size
        Of the file, in bytes.
    read
        ``read(offset, count)`` returns bytes of the file.

    Returns
    -------
    object
        As a rule a dict of names and tensors, or nested dicts.

    Raises
    ------
    FormatError
        The archive is damaged, or its pickle needs more than tensors and containers.
    """
    members = read_members(size, read)
    name = pickle_name(members)
    if name is None:
        raise FormatError("the zip archive has no data.pkl, so it is not a file of torch.save()")
    folder = name.removesuffix(_PICKLE)
    order = members.get(f"{folder}byteorder")
    if order is not None and read(order.offset, order.bytes).strip() != b"little":
        raise FormatError("the tensors were written on a machine of another byte order: load them with torch.load()")
    place = members[name]
    if place.bytes > _MAX_PICKLE:
        raise FormatError(f"the pickle has {place.bytes} bytes; at most {_MAX_PICKLE} are read")
    try:
        return _Unpickler(read(place.offset, place.bytes), folder, members).load()
    except FormatError:
        raise
    except Exception as error:  # noqa: BLE001 - a damaged pickle raises whatever it likes
        raise FormatError(f"the pickle is damaged: {type(error).__name__}: {error}") from None


def named(value: Any, name: str = "") -> Iterator[tuple[str, StoredTensor]]:
    """Yield the tensors in what read_torch_archive() returns. Names are the keys and positions that lead to them."""
    if isinstance(value, StoredTensor):
        yield name, value
    elif isinstance(value, (dict, list, tuple)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from named(item, f"{name}.{key}" if name else str(key))
