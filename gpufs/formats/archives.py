"""Zip archives whose members are stored as they are: npz files of numpy, and files of torch.save().

A file of torch.save() has a pickle, which names the tensors, and a member for each storage. A pickle is a program. This
one may only build containers, numbers and tensors: what ``torch.load(weights_only=True)`` allows of a state dict.
Nothing else is imported or called.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Final, NamedTuple, TypeAlias

from gpufs.formats import FormatError
from gpufs.formats.budget import BoundedFile, Budget
from gpufs.formats.element_types import IN_SAFETENSORS
from gpufs.formats.element_types import named as element_named
from gpufs.formats.safetensors import MAX_NAME, without_garbage_collection

MAGIC: Final = b"PK\x03\x04"
EMPTY_MAGIC: Final = b"PK\x05\x06"  # of an archive without members
_END: Final = struct.Struct("<4s4x2H2L2x")  # of the directory: members here and in all, its bytes and offset
_LONG_END_PLACE: Final = struct.Struct("<4s4xQ4x")
_LONG_END: Final = struct.Struct("<4s20x4Q")
_ENTRY: Final = struct.Struct("<4s4x2H8x2L3H8xL")  # flags, method, bytes stored and of the content, lengths, offset
_LOCAL: Final = struct.Struct("<4s22x2H")  # the lengths of the name and of the extra field, which precede the data
_LONG_FIELD: Final = 1  # what an extra field has for numbers that do not fit
_UTF8: Final = 1 << 11
_ENCRYPTED: Final = 1
_MAX_COMMENT: Final = (1 << 16) - 1
_MEMBER_BYTES: Final = 256
_PICKLE: Final = "data.pkl"
_MAX_PICKLE: Final = 1 << 26
_MAX_DIMENSIONS: Final = 64
_MAX_DEPTH: Final = 100
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


def read_members(file: BoundedFile) -> dict[str, Member]:
    """Find the members of a zip archive by name, in the order of its directory.

    FormatError if it is damaged, a member is compressed or encrypted, or two members overlap.
    """
    directory = _directory(file)
    members: dict[str, Member] = {}
    place = 0
    while place < len(directory):
        if not directory.startswith(b"PK\1\2", place) or place + _ENTRY.size > len(directory):
            raise FormatError("the zip archive is damaged: its directory has something that is not a member")
        _, flags, method, stored, size, *lengths, offset = _ENTRY.unpack_from(directory, place)
        begin, middle = place + _ENTRY.size, place + _ENTRY.size + lengths[0]
        file.take(_MEMBER_BYTES + 4 * lengths[0])
        extra = directory[middle : middle + lengths[1]]
        name = directory[begin:middle].decode("utf-8" if flags & _UTF8 else "cp437", "replace")
        place = middle + lengths[1] + lengths[2]
        if name.endswith("/"):
            continue
        size, stored, offset = _long_numbers(extra, size, stored, offset)
        if method or flags & _ENCRYPTED:
            how = "encrypted" if flags & _ENCRYPTED else "compressed"
            text = f"member {name!r} is {how}, so its bytes are not in the file as they are"
            raise FormatError(f"{text}: numpy.load() reads compressed arrays")
        if name in members:
            raise FormatError(f"member {name!r} appears twice")
        magic, *between = _LOCAL.unpack(file.read(offset, _LOCAL.size))
        if magic != MAGIC or stored != size:
            raise FormatError(f"no member of {size} bytes begins at offset {offset}, where {name!r} should be")
        member = Member(name, offset + _LOCAL.size + sum(between), size)
        if member.offset + size > file.size:
            raise FormatError(f"member {name!r} ends at {member.offset + size}, and the archive has {file.size} bytes")
        members[name] = member
    end = 0
    for member in sorted(members.values(), key=lambda each: each.offset):
        if member.offset < end:
            raise FormatError(f"member {member.name!r} overlaps the one before it")
        end = member.offset + member.bytes
    return members


def _directory(file: BoundedFile) -> bytes:
    """Return the bytes that list the members."""
    start = max(file.size - _END.size - _MAX_COMMENT, 0)
    tail = file.read(start, file.size - start)
    place = tail.rfind(EMPTY_MAGIC, 0, len(tail) - _END.size + len(EMPTY_MAGIC))
    if place < 0:
        raise FormatError("the zip archive has no directory at its end: the file is incomplete")
    *_, size, offset = _END.unpack_from(tail, place)
    if place >= _LONG_END_PLACE.size:
        magic, long_end = _LONG_END_PLACE.unpack_from(tail, place - _LONG_END_PLACE.size)
        if magic == b"PK\6\7":
            magic, *_, size, offset = _LONG_END.unpack(file.read(long_end, _LONG_END.size))
            if magic != b"PK\6\6":
                raise FormatError(f"the zip archive is damaged: its directory does not end at offset {long_end}")
    return file.read(offset, size)


def _long_numbers(extra: bytes, *numbers: int) -> list[int]:
    """Return the numbers of a member, each from the extra field if that has it."""
    place, long = 0, b""
    while place + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, place)
        place += 4 + length
        if kind == _LONG_FIELD:
            long = extra[place - length : place]
    found = iter(struct.unpack_from(f"<{min(len(long) // 8, len(numbers))}Q", long))
    return [next(found, number) if number == 0xFFFFFFFF else number for number in numbers]


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


def _numbers(values: Any) -> tuple[int, ...]:
    numbers: Any = values.shape if type(values) is Size else values
    if type(numbers) is not tuple or len(numbers) > _MAX_DIMENSIONS:
        raise FormatError(
            f"a tensor of the pickle has a shape or strides that are no {_MAX_DIMENSIONS} numbers or less"
        )
    if not all(type(one) is int and 0 <= one <= _MAX_NUMBER for one in numbers):
        raise FormatError("a tensor of the pickle has a shape or strides that are not unsigned numbers")
    return numbers


def _size(values: Any = ()) -> Size:
    size = Size(_numbers(values))
    if prod(size.shape) > _MAX_NUMBER:
        raise FormatError(f"a tensor of the pickle has more than {_MAX_NUMBER} elements")
    return size


def _tensor(
    storage: Any, offset: Any, shape: Any, strides: Any, requires_grad: Any = False, _: Any = None, metadata: Any = None
) -> StoredTensor:
    """Do what torch._utils._rebuild_tensor_v2 does. The hooks before the metadata are ignored by torch.load, too."""
    if type(storage) is not Storage or type(offset) is not int or not 0 <= offset <= _MAX_NUMBER:
        raise FormatError("a tensor of the pickle has no storage, or its offset is not an unsigned number")
    extents, steps = _size(shape).shape, _numbers(strides)
    if len(extents) != len(steps):
        raise FormatError(f"a tensor of the pickle has {len(extents)} extents and {len(steps)} strides")
    bits = metadata if type(metadata) is dict else {}
    unknown = next((key for key in bits if key not in ("conj", "neg")), None)
    if unknown is not None:
        raise FormatError(f"a tensor of the pickle has {unknown!r}, which is not known: use torch.load()")
    tensor = StoredTensor(storage, storage.dtype, offset, extents, steps, bool(requires_grad))
    return tensor._replace(conjugated=bool(bits.get("conj")), negated=bool(bits.get("neg")))


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
    ("torch.storage", "UntypedStorage"): _StorageType("U8"),
    **{("torch", name): _StorageType(dtype) for name, dtype in _STORAGES.items()},
    **{("torch", element.name): Dtype(dtype) for dtype, element in IN_SAFETENSORS.items() if element.dlpack >= 0},
    **{("torch", name): Dtype(name) for name in _OTHER_DTYPES},
    ("builtins", "complex"): _complex,
}

# What an instruction of a pickle takes: it makes an object with its place in a container, or only gives it a place.
_STEP_BYTES: Final = 96
_PLACE_BYTES: Final = 32
_SET_BYTES: Final = 192
_WIDE_BYTES: Final = 4  # of a character beyond ASCII, beside what others take
_LEAF_BYTES: Final = 1 << 10  # of a tensor and what names it, for the program
# The instructions that torch.save() writes, in all protocols.
_PLACING: Final = (
    "PROTO FRAME STOP BINPUT LONG_BINPUT MEMOIZE BINGET LONG_BINGET NONE NEWTRUE NEWFALSE EMPTY_TUPLE BININT1"
)
_MAKING: Final = (
    "MARK GLOBAL STACK_GLOBAL REDUCE BUILD BINPERSID BININT BININT2 LONG1 BINFLOAT TUPLE TUPLE1 TUPLE2 TUPLE3 "
    "EMPTY_LIST APPEND APPENDS EMPTY_DICT SETITEM SETITEMS"
)
# Those that make a text or bytes: how many bytes their length has.
_TEXTS: Final = {"BINUNICODE": 4, "SHORT_BINUNICODE": 1, "BINUNICODE8": 8, "BINSTRING": 4, "SHORT_BINSTRING": 1}
_BINARIES: Final = {"BINBYTES": 4, "SHORT_BINBYTES": 1, "BINBYTES8": 8}
_ATOMS: Final = (str, int, float, complex, bool, bytes, type(None))
_KEY_LEAVES: Final = (Dtype, Size, TorchDevice, TorchLayout)
_DICTS: Final = (dict, OrderedDict, Counter)
_CONTAINERS: Final = (*_DICTS, list, tuple)


# ---- what makes objects of any size ----


def _check_key(budget: Budget, key: Any) -> None:
    """Check a key of a dict, or an item of a set: its hash must not take long, nor its text much memory."""
    parts = key if type(key) is tuple and len(key) <= _MAX_DIMENSIONS else (key,)
    for part in parts:
        if not isinstance(part, _ATOMS if parts is key else (*_ATOMS, *_KEY_LEAVES)):
            raise FormatError("the pickle has a dict or set with keys that are neither texts nor numbers")
        if isinstance(part, (str, bytes)) and len(part) > MAX_NAME:
            raise FormatError(f"the pickle has a dict or set with a key of {len(part)} characters")
    budget.take(_STEP_BYTES)


def _set(budget: Budget, items: Any = ()) -> set[Any]:
    if type(items) not in (list, tuple):
        raise FormatError("the pickle has a set of something that is not a list")
    budget.take(_SET_BYTES)
    made = set()
    for item in items:
        _check_key(budget, item)
        made.add(item)
    return made


def _counter(budget: Budget, counts: Any = None) -> Counter[Any]:
    if counts is not None and type(counts) is not dict:
        raise FormatError("the pickle has a Counter of something that is not a dict")
    made: Counter[Any] = Counter()
    budget.take(_STEP_BYTES * len(counts or ()))
    dict.update(made, counts or {})
    return made


def _encoded(budget: Budget, text: Any, encoding: Any) -> bytes:
    """Return what stands for bytes in protocol 2, which has none of Python 3."""
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise FormatError("the pickle has bytes in an encoding that is not known")
    budget.take(len(text))
    return text.encode("latin-1")


def _bytearray(budget: Budget, content: Any = b"", encoding: Any = "latin-1") -> bytearray:
    if type(content) is not bytes:
        content = _encoded(budget, content, encoding)
    budget.take(len(content))
    return bytearray(content)


_LIMITED: Final[Mapping[tuple[str, str], Callable[..., Any]]] = {
    ("collections", "Counter"): _counter,
    ("_codecs", "encode"): _encoded,
    ("builtins", "bytearray"): _bytearray,
    ("builtins", "set"): _set,
}


class _Unpickler(pickle._Unpickler):
    """Runs a pickle within a budget. It builds what is listed above, and changes lists and dicts alone.

    The base class is the one in Python: instructions of the other one cannot be replaced.
    """

    # What the base class has and its types lack.
    stack: list[Any]
    pop_mark: Callable[[], list[Any]]
    append: Callable[[Any], None]
    read: Callable[[int], bytes]

    def __init__(self, data: bytes, folder: str, members: Mapping[str, Member], budget: Budget) -> None:
        self._data = io.BytesIO(data)
        super().__init__(self._data)
        self.memo: list[Any] = []
        self.budget = budget
        self._folder = folder
        self._members = members

    def find_class(self, module: str, name: str) -> Any:
        # Protocol 2 has the names of Python 2.
        place = ("builtins" if module == "__builtin__" else module, name)
        if place in _LIMITED:
            return partial(_LIMITED[place], self.budget)
        if place not in _ALLOWED:
            raise FormatError(
                f"the pickle needs {module[:_SHOWN]}.{name[:_SHOWN]}, which is neither a plain tensor nor a container: "
                "use torch.load(), if you trust the file's author"
            )
        return _ALLOWED[place]

    def persistent_load(self, identifier: Any) -> Storage:
        """Return a storage: ("storage", type, key, location, number of elements)."""
        if type(identifier) is not tuple or len(identifier) != 5 or identifier[0] != "storage":
            raise FormatError("the pickle refers to something that is not a storage")
        kind, key = identifier[1:3]
        if type(kind) is not _StorageType or type(key) is not str or len(key) > MAX_NAME:
            raise FormatError("the pickle refers to something that is not a storage")
        member = self._members.get(f"{self._folder}data/{key}")
        if member is None:
            raise FormatError(f"the pickle refers to storage {key!r}, which the archive does not have")
        return Storage(kind.dtype, member)

    # ---- instructions ----

    def load_frame(self) -> None:
        """Pass over the length of a frame: all of the pickle is in memory."""
        self.read(8)

    def load_global(self) -> None:
        self.append(self.find_class(*(self._data.readline(MAX_NAME)[:-1].decode("utf-8") for _ in range(2))))

    def load_reduce(self) -> None:
        arguments = self.stack.pop()
        if type(arguments) is not tuple:
            raise FormatError("the pickle calls something without a tuple of arguments")
        self.stack[-1] = self.stack[-1](*arguments)

    def load_memoize(self) -> None:
        self.memo.append(self.stack[-1])

    def load_binput(self) -> None:
        self._put(self.read(1))

    def load_long_binput(self) -> None:
        self._put(self.read(4))

    def _put(self, number: bytes) -> None:
        place = int.from_bytes(number, "little")
        if place > len(self.memo):
            raise FormatError("the pickle numbers its objects in another order than torch.save() does")
        self.memo[place : place + 1] = self.stack[-1:]

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
        self._set_items(self.pop_mark())

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set_items([key, value])

    def _set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) not in _DICTS:
            raise FormatError("the pickle sets items of something that is not a dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            _check_key(self.budget, key)
            target[key] = value

    def load_build(self) -> None:
        state = self.stack.pop()
        # The dict of a module has its version in an attribute.
        if type(self.stack[-1]) is not OrderedDict or type(state) is not dict:
            raise FormatError("the pickle sets attributes of something that is not a dict of a module")
        if any(type(name) is not str or hasattr(OrderedDict, name) for name in state):
            raise FormatError("the pickle replaces attributes of a dict")
        self.budget.take(_STEP_BYTES * len(state))
        vars(self.stack[-1]).update(state)


def _dispatch() -> dict[int, Callable[[Any], None]]:
    """Return what carries out each instruction, by its code."""
    table: dict[int, Callable[[Any], None]] = {}

    def add(name: str, cost: int, instruction: Callable[[Any], None]) -> None:
        def step(unpickler: _Unpickler) -> None:
            unpickler.budget.take(cost)
            instruction(unpickler)

        table[getattr(pickle, name)[0]] = step

    def add_text(name: str, width: int, make: Callable[[bytes], Any]) -> None:
        def load(unpickler: _Unpickler) -> None:
            count = int.from_bytes(unpickler.read(width), "little")
            unpickler.budget.take(2 * count)
            data = unpickler.read(count)
            if make is not bytes and not data.isascii():
                unpickler.budget.take(_WIDE_BYTES * count)
            unpickler.append(make(data))

        add(name, _STEP_BYTES, load)

    for names, cost in ((_PLACING, _PLACE_BYTES), (_MAKING, _STEP_BYTES)):
        for name in names.split():
            own = getattr(_Unpickler, f"load_{name.lower()}", None)
            add(name, cost, own or pickle._Unpickler.dispatch[getattr(pickle, name)[0]])
    for texts, make in ((_TEXTS, partial(str, encoding="utf-8", errors="surrogatepass")), (_BINARIES, bytes)):
        for name, width in texts.items():
            add_text(name, width, make)
    return table


_Unpickler.dispatch = _dispatch()


def pickle_name(names: Mapping[str, Member]) -> str | None:
    """Return the member with the pickle, if this is an archive of torch.save()."""
    return next((name for name in names if name.endswith(f"/{_PICKLE}")), None)


@without_garbage_collection()
def read_torch_archive(file: BoundedFile, members: Mapping[str, Member]) -> Any:
    """Read what torch.save() has written, with a Leaf in the place of each tensor, storage, dtype and size.

    FormatError if it is damaged, or its pickle needs more than tensors and containers, or more time or memory than
    headers may take.
    """
    name = pickle_name(members)
    if name is None:
        raise FormatError("the zip archive has no data.pkl, so it is not a file of torch.save()")
    folder = name.removesuffix(_PICKLE)
    order = members.get(f"{folder}byteorder")
    if order is not None and file.read(order.offset, min(order.bytes, _SHOWN)).strip() != b"little":
        raise FormatError("the tensors were written on a machine of another byte order: load them with torch.load()")
    place = members[name]
    if place.bytes > _MAX_PICKLE:
        raise FormatError(f"the pickle has {place.bytes} bytes; at most {_MAX_PICKLE} are read")
    try:
        return _Unpickler(file.read(place.offset, place.bytes), folder, members, file).load()
    except FormatError:
        raise
    except Exception as error:  # noqa: BLE001 - a damaged pickle raises whatever it likes
        text = " ".join(str(error).split())[:_SHOWN]
        raise FormatError(f"the pickle is damaged: {type(error).__name__}: {text}") from None


def named(value: Any, budget: Budget) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the tensors in what read_torch_archive() returns. Names are the keys and positions that lead to them.

    FormatError if it is nested too deeply, or what it shares makes too many names.
    """
    without: set[int] = set()  # containers that lead to no tensor

    def below(value: Any, name: str, depth: int) -> Iterator[tuple[str, StoredTensor]]:
        if isinstance(value, StoredTensor):
            budget.take(_LEAF_BYTES // 2 + len(name))
            yield name, value
        elif type(value) in _CONTAINERS and id(value) not in without:
            budget.take(_STEP_BYTES)
            _check_depth(depth)
            found = False
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                budget.take(0)
                path = f"{name}.{key}" if name else str(key)
                if len(path) > MAX_NAME:
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


def restore(value: Any, make: Callable[[Leaf], Any], budget: Budget) -> Any:
    """Return the object that was saved. ``make`` makes what stands for a leaf; what was one object stays one."""
    known: dict[int, Any] = {}

    def made(value: Any, depth: int) -> Any:
        if isinstance(value, (StoredTensor, Storage, *_KEY_LEAVES)):
            if id(value) not in known:
                attributes = (isinstance(value, StoredTensor) and value.attributes) or {}
                budget.take(_LEAF_BYTES + _STEP_BYTES * len(attributes))
                known[id(value)] = leaf = make(value)  # first: its attributes may lead to it
                if attributes:
                    vars(leaf).update(made(attributes, depth + 1))
            return known[id(value)]
        if type(value) not in (*_CONTAINERS, set):
            return value
        if id(value) in known:
            return known[id(value)]
        _check_depth(depth)
        budget.take(_STEP_BYTES * (1 + len(value)))
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
            budget.take(_STEP_BYTES * len(vars(value)))
            vars(result).update(vars(value))
        return result

    return made(value, 0)
