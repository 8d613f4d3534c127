"""Zip archives whose members are stored as they are: npz files of numpy, and files of torch.save().

A file of torch.save() has a pickle, which names the tensors, and a member for each storage. A pickle is a program. This
one may only build containers, numbers and tensors: what ``torch.load(weights_only=True)`` allows of a state dict.
Nothing else is imported or called.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Final, NamedTuple, TypeAlias

from gpufs.formats import FormatError
from gpufs.formats.budget import TENSOR_BYTES, Budget
from gpufs.formats.element_types import IN_SAFETENSORS
from gpufs.formats.element_types import named as element_named
from gpufs.formats.safetensors import without_garbage_collection

MAGIC: Final = b"PK\x03\x04"
EMPTY_MAGIC: Final = b"PK\x05\x06"  # of an archive without members
_LOCAL_HEADER_BYTES: Final = 30
# Where a member's local header has the lengths of the name and of the extra field, which come between it and the data.
_NAME_LENGTH: Final = slice(26, 28)
_EXTRA_LENGTH: Final = slice(28, 30)
# The largest directory: zipfile keeps all of its entries at once, a few hundred thousand.
_MAX_DIRECTORY: Final = 32 << 20
_PICKLE: Final = "data.pkl"
_MAX_PICKLE: Final = 1 << 26
_MAX_DIMENSIONS: Final = 64
_MAX_DEPTH: Final = 100
_MAX_NAME: Final = 4096
_MAX_NUMBER: Final = (1 << 63) - 1
_SHOWN: Final = 100  # characters of what a file contains, in messages
# The names of safetensors for the storages of torch, or torch's where it has none. An untyped storage has its dtype in
# the tensor.
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
    "ComplexDoubleStorage": "complex128",
    "UntypedStorage": "U8",
}
# The dtypes of torch that safetensors has no name for. Only complex128 can be that of a tensor here.
_OTHER_DTYPES: Final = (
    *("complex32", "complex128", "float4_e2m1fn_x2", "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"),
    *("qint8", "qint32", "quint8", "quint2x4", "quint4x2"),
    *(f"{kind}{bits}" for kind in ("int", "uint") for bits in range(1, 8)),
)


@dataclass(frozen=True, slots=True)
class Member:
    """A stored member: its bytes are ``bytes`` bytes of the archive from ``offset`` on."""

    name: str
    offset: int
    bytes: int


class _ZipInput(io.RawIOBase):
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
        count = left if size < 0 else min(size, left)
        if count > _MAX_DIRECTORY:
            raise FormatError(f"its directory has {count} bytes; at most {_MAX_DIRECTORY} are read")
        data = self._read(self._position, count) if count else b""
        self._position += len(data)
        return data


def read_members(size: int, read: Callable[[int, int], bytes]) -> dict[str, Member]:
    """Find the members of a zip archive by name, in the order of its directory.

    FormatError if it is damaged, a member is compressed or encrypted, or two members overlap.
    """
    try:
        with zipfile.ZipFile(_ZipInput(size, read)) as archive:
            listed = archive.infolist()
    except FormatError as error:
        raise FormatError(f"the zip archive is too large: {error}") from None
    except (zipfile.BadZipFile, OSError, ValueError, OverflowError, UnicodeError, NotImplementedError) as error:
        if not zipfile.is_zipfile(_ZipInput(size, read)):
            raise FormatError("the zip archive has no directory at its end: the file is incomplete") from None
        raise FormatError(f"the zip archive is damaged: {error}") from None
    members: dict[str, Member] = {}
    for info in listed:
        if info.is_dir():
            continue
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            how = "encrypted" if info.flag_bits & 1 else "compressed"
            text = f"member {info.filename!r} is {how}, so its bytes are not in the file as they are"
            raise FormatError(f"{text}: numpy.load() reads compressed arrays")
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

# What a pickle can contain here, besides numbers, texts and containers. All of it is immutable, so the checks at its
# creation hold.


class Storage(NamedTuple):
    """A member of the archive that tensors lie in. ``dtype``: of its elements, as in Dtype."""

    dtype: str
    member: Member


class Dtype(NamedTuple):
    """A dtype of torch, by safetensors' name, or by torch's if safetensors has none."""

    name: str


class Size(NamedTuple):
    """A torch.Size."""

    shape: tuple[int, ...]


class TorchDevice(NamedTuple):
    """A torch.device."""

    kind: str
    number: int | None


class TorchLayout(NamedTuple):
    """A torch.layout, by its full name."""

    name: str


class StoredTensor(NamedTuple):
    """A tensor of the pickle, in elements of ``dtype`` from the start of its storage.

    ``conjugated``, ``negated``: whether its elements are the conjugates, or the negatives, of those that are stored.
    ``attributes``: what a program has set on the tensor. The pickle can still change this dict.
    """

    storage: Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    requires_grad: bool
    is_parameter: bool = False
    conjugated: bool = False
    negated: bool = False
    attributes: dict[Any, Any] | None = None

    def place(self, itemsize: int) -> tuple[int, int]:
        """Return the offset in the file and the number of its bytes. FormatError if the file does not have them all."""
        member = self.storage.member
        if 0 in self.shape:
            return member.offset, 0
        start = self.offset * itemsize
        last = sum((extent - 1) * stride for extent, stride in zip(self.shape, self.strides, strict=True))
        count = (1 + last) * itemsize
        if start + count > member.bytes:
            raise FormatError(f"a tensor ends at byte {start + count} of {member.name!r}, which has {member.bytes}")
        return member.offset + start, count


Leaf: TypeAlias = StoredTensor | Storage | Dtype | Size | TorchDevice | TorchLayout


class _StorageType(NamedTuple):
    dtype: str


_TENSOR: Final = object()  # the class torch.Tensor


def _sizes(values: Any) -> tuple[int, ...]:
    numbers = tuple(values) if type(values) in (tuple, list) else values.shape
    if len(numbers) > _MAX_DIMENSIONS or not all(type(one) is int and 0 <= one <= _MAX_NUMBER for one in numbers):
        raise FormatError("a tensor of the pickle has a shape or strides that are not unsigned numbers")
    if prod(numbers) > _MAX_NUMBER:
        raise FormatError(f"a tensor of the pickle has more than {_MAX_NUMBER} elements")
    return numbers


def _size(values: Any = ()) -> Size:
    return Size(_sizes(values))


def _tensor(
    storage: Any, offset: Any, shape: Any, strides: Any, requires_grad: Any = False, _: Any = None, metadata: Any = None
) -> StoredTensor:
    """Do what torch._utils._rebuild_tensor_v2 does. The hooks before the metadata are ignored by torch.load, too."""
    if type(storage) is not Storage or type(offset) is not int or not 0 <= offset <= _MAX_NUMBER:
        raise FormatError("a tensor of the pickle has no storage, or its offset is not an unsigned number")
    extents, steps = _sizes(shape), _steps(strides)
    if len(extents) != len(steps):
        raise FormatError(f"a tensor of the pickle has {len(extents)} extents and {len(steps)} strides")
    bits = metadata if type(metadata) is dict else {}
    unknown = [str(key)[:_SHOWN] for key in bits if key not in ("conj", "neg")]
    if unknown:
        raise FormatError(f"a tensor of the pickle has {unknown[0]!r}, which is not known: use torch.load()")
    tensor = StoredTensor(storage, storage.dtype, offset, extents, steps, bool(requires_grad))
    return tensor._replace(conjugated=bool(bits.get("conj")), negated=bool(bits.get("neg")))


def _steps(values: Any) -> tuple[int, ...]:
    numbers = tuple(values) if type(values) in (tuple, list) else ()
    if not all(type(one) is int and 0 <= one <= _MAX_NUMBER for one in numbers):
        raise FormatError("a tensor of the pickle has a shape or strides that are not unsigned numbers")
    return numbers


def _tensor_of_dtype(
    storage: Any,
    offset: Any,
    shape: Any,
    strides: Any,
    requires_grad: Any,
    hooks: Any,
    dtype: Any,
    metadata: Any = None,
) -> StoredTensor:
    """Do what torch._utils._rebuild_tensor_v3 does, for dtypes whose storage is untyped."""
    if type(dtype) is not Dtype:
        raise FormatError("a tensor of the pickle has no dtype")
    if element_named(dtype.name) is None:
        raise FormatError(f"a tensor of torch.{dtype.name} cannot be used in place: use torch.load()")
    return _tensor(storage, offset, shape, strides, requires_grad, hooks, metadata)._replace(dtype=dtype.name)


def _parameter(data: Any, requires_grad: Any, *_: Any) -> StoredTensor:
    """Do what torch._utils._rebuild_parameter does."""
    if type(data) is not StoredTensor:
        raise FormatError("a parameter of the pickle is not a tensor")
    return data._replace(requires_grad=bool(requires_grad), is_parameter=True)


def _parameter_with_attributes(data: Any, requires_grad: Any, _: Any, state: Any) -> StoredTensor:
    """Do what torch._utils._rebuild_parameter_with_state does."""
    return _with_attributes(_parameter(data, requires_grad), state)


def _tensor_with_attributes(rebuild: Any, kind: Any, arguments: Any, state: Any) -> StoredTensor:
    """Do what torch._tensor._rebuild_from_type_v2 does for torch.Tensor itself."""
    if rebuild not in (_tensor, _tensor_of_dtype) or kind is not _TENSOR or type(arguments) is not tuple:
        raise FormatError("the pickle has a subclass of torch.Tensor: use torch.load(), if you trust the file's author")
    return _with_attributes(rebuild(*arguments), state)


def _with_attributes(tensor: StoredTensor, state: Any) -> StoredTensor:
    if state is not None and type(state) is not dict:
        raise FormatError("a tensor of the pickle has attributes that are not a dict")
    return tensor._replace(attributes=state)


def _ordered_dict() -> OrderedDict[Any, Any]:
    return OrderedDict()


def _device(kind: Any, index: Any = None) -> TorchDevice:
    if type(kind) is not str or not (index is None or type(index) is int):
        raise FormatError("the pickle has a device without a name")
    return TorchDevice(kind[:_SHOWN], index)


def _layout(name: Any) -> TorchLayout:
    if type(name) is not str:
        raise FormatError("the pickle has a layout without a name")
    return TorchLayout(name[:_SHOWN])


def _complex(real: Any, imaginary: Any) -> complex:
    if type(real) is not float or type(imaginary) is not float:
        raise FormatError("the pickle has a complex number of something that is not a number")
    return complex(real, imaginary)


def _encoded(text: Any, encoding: Any) -> bytes:
    """Return what stands for bytes in protocol 2, which has none of Python 3."""
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise FormatError("the pickle has bytes in an encoding that is not known")
    return text.encode("latin-1")


def _bytearray(content: Any = b"", encoding: Any = "latin-1") -> bytearray:
    if type(content) is not bytes:
        content = _encoded(content, encoding)
    return bytearray(content)


_ALLOWED: Final[Mapping[tuple[str, str], Any]] = {
    ("collections", "OrderedDict"): _ordered_dict,
    ("torch", "Size"): _size,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_of_dtype,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter_with_attributes,
    ("torch._tensor", "_rebuild_from_type_v2"): _tensor_with_attributes,
    ("torch", "Tensor"): _TENSOR,
    ("torch", "device"): _device,
    ("torch.serialization", "_get_layout"): _layout,
    ("_codecs", "encode"): _encoded,
    ("torch.storage", "UntypedStorage"): _StorageType("U8"),
    **{("torch", name): _StorageType(dtype) for name, dtype in _STORAGES.items()},
    **{("torch", element.name): Dtype(dtype) for dtype, element in IN_SAFETENSORS.items() if element.dlpack >= 0},
    **{("torch", name): Dtype(name) for name in _OTHER_DTYPES},
    # Protocol 2 has the names of Python 2.
    **{(module, "bytearray"): _bytearray for module in ("builtins", "__builtin__")},
    **{(module, "complex"): _complex for module in ("builtins", "__builtin__")},
}

# What one instruction of a pickle may add: an object, and its place in a container or in the memo.
_STEP_BYTES: Final = 64
# The instructions that torch.save() writes, in all protocols.
_INSTRUCTIONS: Final = (
    "PROTO FRAME STOP MARK GLOBAL STACK_GLOBAL REDUCE BUILD BINPERSID BINGET LONG_BINGET BINPUT LONG_BINPUT MEMOIZE "
    "NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 LONG4 BINFLOAT BINUNICODE SHORT_BINUNICODE BINUNICODE8 "
    "BINSTRING SHORT_BINSTRING BINBYTES SHORT_BINBYTES BINBYTES8 EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST "
    "APPEND APPENDS EMPTY_DICT SETITEM SETITEMS"
).split()
_ATOMS: Final = (str, int, float, complex, bool, bytes, type(None))
_KEY_LEAVES: Final = (Dtype, Size, TorchDevice, TorchLayout)
_DICTS: Final = (dict, OrderedDict, Counter)
_CONTAINERS: Final = (*_DICTS, list, tuple)


class _Unpickler(pickle._Unpickler):
    """Runs a pickle within a budget. It builds what is listed above, and changes lists and dicts alone.

    The base class is the one in Python: instructions of the other one cannot be replaced.
    """

    # What the base class has and its types lack.
    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, data: bytes, folder: str, members: Mapping[str, Member], budget: Budget) -> None:
        super().__init__(io.BytesIO(data))
        self.budget = budget
        self._folder = folder
        self._members = members

    def find_class(self, module: str, name: str) -> Any:
        own = {"builtins.set": self._made_set, "__builtin__.set": self._made_set, "collections.Counter": self._counter}
        allowed = _ALLOWED.get((module, name)) or own.get(f"{module}.{name}")
        if allowed is None:
            raise FormatError(
                f"the pickle needs {f'{module}.{name}'[:_SHOWN]}, which is neither a plain tensor nor a container: use "
                "torch.load(), if you trust the file's author"
            )
        return allowed

    def persistent_load(self, identifier: Any) -> Storage:
        """Return a storage: ("storage", type, key, location, number of elements)."""
        if type(identifier) is not tuple or len(identifier) != 5 or identifier[0] != "storage":
            raise FormatError("the pickle refers to something that is not a storage")
        kind, key = identifier[1:3]
        if type(kind) is not _StorageType or type(key) is not str:
            raise FormatError("the pickle refers to something that is not a storage")
        member = self._members.get(f"{self._folder}data/{key}")
        if member is None:
            raise FormatError(f"the pickle refers to storage {key[:_SHOWN]!r}, which the archive does not have")
        return Storage(kind.dtype, member)

    def load_appends(self) -> None:
        items = self.pop_mark()
        if type(self.stack[-1]) is not list:
            raise FormatError("the pickle appends to something that is not a list")
        self.stack[-1].extend(items)

    def load_append(self) -> None:
        item = self.stack.pop()
        if type(self.stack[-1]) is not list:
            raise FormatError("the pickle appends to something that is not a list")
        self.stack[-1].append(item)

    def load_setitems(self) -> None:
        self._set(self.pop_mark())

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key, value])

    def _set(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) not in _DICTS:
            raise FormatError("the pickle sets items of something that is not a dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            self._check_key(key)
            target[key] = value

    def _check_key(self, key: Any) -> None:
        # The hash of a nested tuple can take for ever.
        if not isinstance(key, (*_ATOMS, *_KEY_LEAVES)) and not (
            type(key) is tuple and all(isinstance(one, _ATOMS) for one in key)
        ):
            raise FormatError("the pickle has a dict or set with keys that are neither texts nor numbers")
        self.budget.take(0)  # colliding keys take time

    def _made_set(self, items: Any = ()) -> set[Any]:
        if type(items) not in (list, tuple):
            raise FormatError("the pickle has a set of something that is not a list")
        made = set()
        for item in items:
            self.budget.take(_STEP_BYTES)
            self._check_key(item)
            made.add(item)
        return made

    def _counter(self, counts: Any = None) -> Counter[Any]:
        if counts is not None and type(counts) is not dict:
            raise FormatError("the pickle has a Counter of something that is not a dict")
        made: Counter[Any] = Counter()
        self.budget.take(_STEP_BYTES * len(counts or ()))
        dict.update(made, counts or {})
        return made

    def load_build(self) -> None:
        state = self.stack.pop()
        # The dict of a module has its version in an attribute.
        if type(self.stack[-1]) is not OrderedDict or type(state) is not dict:
            raise FormatError("the pickle sets attributes of something that is not a dict of a module")
        if any(type(name) is not str or hasattr(OrderedDict, name) for name in state):
            raise FormatError("the pickle replaces attributes of a dict")
        vars(self.stack[-1]).update(state)


def _within_budget(instruction: Callable[[Any], None]) -> Callable[[Any], None]:
    def step(unpickler: _Unpickler) -> None:
        unpickler.budget.take(_STEP_BYTES)
        instruction(unpickler)

    return step


def _dispatch() -> dict[int, Callable[[Any], None]]:
    """Return what carries out each instruction, by its code."""
    own = {
        "APPEND": _Unpickler.load_append,
        "APPENDS": _Unpickler.load_appends,
        "SETITEM": _Unpickler.load_setitem,
        "SETITEMS": _Unpickler.load_setitems,
        "BUILD": _Unpickler.load_build,
    }
    table = {}
    for name in _INSTRUCTIONS:
        code = getattr(pickle, name)[0]
        table[code] = _within_budget(own.get(name, pickle._Unpickler.dispatch[code]))
    return table


_Unpickler.dispatch = _dispatch()


def pickle_name(names: Mapping[str, Member]) -> str | None:
    """Return the member with the pickle, if this is an archive of torch.save()."""
    return next((name for name in names if name.endswith(f"/{_PICKLE}")), None)


@without_garbage_collection()
def read_torch_archive(size: int, read: Callable[[int, int], bytes]) -> Any:
    """Read what torch.save() has written, with a Leaf in the place of each tensor, storage, dtype and size.

    FormatError if it is damaged, or its pickle needs more than tensors and containers, or more time or memory than
    headers may take.
    """
    members = read_members(size, read)
    name = pickle_name(members)
    if name is None:
        raise FormatError("the zip archive has no data.pkl, so it is not a file of torch.save()")
    folder = name.removesuffix(_PICKLE)
    order = members.get(f"{folder}byteorder")
    if order is not None and read(order.offset, min(order.bytes, _SHOWN)).strip() != b"little":
        raise FormatError("the tensors were written on a machine of another byte order: load them with torch.load()")
    place = members[name]
    if place.bytes > _MAX_PICKLE:
        raise FormatError(f"the pickle has {place.bytes} bytes; at most {_MAX_PICKLE} are read")
    try:
        return _Unpickler(read(place.offset, place.bytes), folder, members, Budget()).load()
    except FormatError:
        raise
    except Exception as error:  # noqa: BLE001 - a damaged pickle raises whatever it likes
        text = " ".join(str(error).split())[:_SHOWN]
        raise FormatError(f"the pickle is damaged: {type(error).__name__}: {text}") from None


def named(value: Any) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the tensors in what read_torch_archive() returns. Names are the keys and positions that lead to them.

    FormatError if it is nested too deeply, or what it shares makes too many names.
    """
    budget = Budget()
    without: set[int] = set()  # containers that lead to no tensor

    def below(value: Any, name: str, depth: int) -> Iterator[tuple[str, StoredTensor]]:
        if isinstance(value, StoredTensor):
            budget.take(TENSOR_BYTES + len(name))
            yield name, value
        elif type(value) in _CONTAINERS and id(value) not in without:
            budget.take(_STEP_BYTES)
            _check_depth(depth)
            found = False
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                path = f"{name}.{key}" if name else str(key)
                if len(path) > _MAX_NAME:
                    raise FormatError(f"the name {path[:_SHOWN]!r}... has {len(path)} characters")
                for pair in below(item, path, depth + 1):
                    found = True
                    yield pair
            if not found:
                without.add(id(value))

    return below(value, "", 0)


def _check_depth(depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise FormatError(f"the pickle has containers that are nested more than {_MAX_DEPTH} deep")


def restore(value: Any, make: Callable[[Leaf], Any]) -> Any:
    """Return the object that was saved. ``make`` makes what stands for a leaf; what was one object stays one."""
    known: dict[int, Any] = {}

    def made(value: Any, depth: int) -> Any:
        if isinstance(value, (StoredTensor, Storage, *_KEY_LEAVES)):
            if id(value) not in known:
                known[id(value)] = leaf = make(value)  # first: its attributes may lead to it
                if isinstance(value, StoredTensor) and value.attributes:
                    vars(leaf).update(made(value.attributes, depth + 1))
            return known[id(value)]
        if type(value) not in (*_CONTAINERS, set):
            return value
        if id(value) in known:
            return known[id(value)]
        _check_depth(depth)
        if type(value) is tuple:
            known[id(value)] = result = tuple(made(item, depth + 1) for item in value)
            return result
        known[id(value)] = result = type(value)()  # first: it may contain itself
        if type(value) is list:
            result.extend(made(item, depth + 1) for item in value)
        elif type(value) is set:
            result.update(made(item, depth + 1) for item in value)
        else:
            for key, item in value.items():  # update() of a Counter adds
                result[made(key, depth + 1)] = made(item, depth + 1)
        if type(value) is OrderedDict:
            vars(result).update(vars(value))
        return result

    return made(value, 0)
