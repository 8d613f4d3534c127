"""Zip archives whose members are stored as they are: npz files of numpy, and files of torch.save().

A file of torch.save() has a pickle, which names the tensors, and a member for each storage. A pickle is a program. This
one may only build containers, numbers and tensors: what ``torch.load(weights_only=True)`` allows of a state dict.
Nothing else is imported or called.
"""

from __future__ import annotations

import errno
import os
import struct
import zipfile
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
from gpufs.formats.layout import MAX_EXTENT
from gpufs.formats.safetensors import MAX_NAME, without_garbage_collection

MAGIC: Final = b"PK\x03\x04"
EMPTY_MAGIC: Final = b"PK\x05\x06"  # of an archive without members
_LOCAL: Final = struct.Struct("<4s22x2H")  # the lengths of the name and of the extra field, which precede the data
_ENCRYPTED: Final = 1
_DIRECTORY_FACTOR: Final = 8  # of what the directory takes, parsed
_PICKLE: Final = "data.pkl"
_MAX_PICKLE: Final = 1 << 26
_MAX_DIMENSIONS: Final = 64
_MAX_DEPTH: Final = 100
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


class _Seekable:
    """What zipfile reads of a file: within its budget, and nothing beyond its end."""

    def __init__(self, file: BoundedFile) -> None:
        self._file = file
        self._position = 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._file.size}[whence]
        if self._position < 0:
            raise OSError(errno.EINVAL, "before the beginning")
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, count: int = -1) -> bytes:
        left = max(self._file.size - self._position, 0)
        count = left if count < 0 else min(count, left)
        self._file.take(_DIRECTORY_FACTOR * count)
        self._position += count
        return self._file.read(self._position - count, count)


def read_members(file: BoundedFile) -> dict[str, Member]:
    """Find the members of a zip archive by name, in the order of its directory.

    FormatError if it is damaged, a member is compressed or encrypted, or two members overlap.
    """
    try:
        found = zipfile.ZipFile(_Seekable(file)).infolist()
    except FormatError:
        raise
    except Exception as error:  # noqa: BLE001 - a damaged directory raises several kinds
        raise FormatError(f"the zip archive is damaged or incomplete: {error}") from None
    members: dict[str, Member] = {}
    for each in found:
        name = each.orig_filename
        if name.endswith("/"):
            continue
        if each.compress_type or each.flag_bits & _ENCRYPTED:
            how = "encrypted" if each.flag_bits & _ENCRYPTED else "compressed"
            text = f"member {name!r} is {how}, so its bytes are not in the file as they are"
            raise FormatError(f"{text}: numpy.load() reads compressed arrays")
        if name in members:
            raise FormatError(f"member {name!r} appears twice")
        magic, *between = _LOCAL.unpack(file.read(each.header_offset, _LOCAL.size))
        if magic != MAGIC or each.compress_size != each.file_size:
            text = (
                f"no member of {each.file_size} bytes begins at offset {each.header_offset}, where {name!r} should be"
            )
            raise FormatError(text)
        members[name] = Member(name, each.header_offset + _LOCAL.size + sum(between), each.file_size)
    end = 0
    for member in sorted(members.values(), key=lambda each: each.offset):
        if member.offset < end:
            raise FormatError(f"member {member.name!r} overlaps the one before it")
        end = member.offset + member.bytes
        if end > file.size:
            raise FormatError(f"member {member.name!r} ends at {end}, and the archive has {file.size} bytes")
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


def _need(condition: bool, what: str) -> None:
    """Raise FormatError unless the condition holds. ``what``: what the pickle has then."""
    if not condition:
        raise FormatError(f"the pickle has {what}: use torch.load(), if you trust the file's author")


def _numbers(values: Any) -> tuple[int, ...]:
    numbers: Any = values.shape if type(values) is Size else values
    _need(type(numbers) is tuple and len(numbers) <= _MAX_DIMENSIONS, "a shape or strides of another kind")
    _need(
        all(type(one) is int and 0 <= one <= MAX_EXTENT for one in numbers), "a shape or strides that are not numbers"
    )
    return tuple(numbers)


def _size(values: Any = ()) -> Size:
    size = Size(_numbers(values))
    _need(prod(size.shape) <= MAX_EXTENT, f"a tensor of more than {MAX_EXTENT} elements")
    return size


def _tensor(
    storage: Any, offset: Any, shape: Any, strides: Any, requires_grad: Any = False, _: Any = None, metadata: Any = None
) -> StoredTensor:
    """Do what torch._utils._rebuild_tensor_v2 does. The hooks before the metadata are ignored by torch.load, too."""
    _need(type(storage) is Storage and type(offset) is int and 0 <= offset <= MAX_EXTENT, "a tensor without a storage")
    extents, steps = _size(shape).shape, _numbers(strides)
    _need(len(extents) == len(steps), f"a tensor of {len(extents)} extents and {len(steps)} strides")
    bits = metadata if type(metadata) is dict else {}
    unknown = next((key for key in bits if key not in ("conj", "neg")), None)
    _need(unknown is None, f"a tensor with {unknown!r}, which is not known")
    tensor = StoredTensor(storage, storage.dtype, offset, extents, steps, bool(requires_grad))
    return tensor._replace(conjugated="conj" in bits, negated="neg" in bits)  # torch does not look at the values


def _tensor_of_dtype(*arguments: Any) -> StoredTensor:
    """Do what torch._utils._rebuild_tensor_v3 does, for dtypes whose storage is untyped."""
    before, dtype, metadata = arguments[:6], arguments[6], arguments[7:]
    _need(type(dtype) is Dtype, "a tensor without a dtype")
    _need(element_named(dtype.name) is not None, f"a tensor of torch.{dtype.name}")
    return _tensor(*before, *metadata)._replace(dtype=dtype.name)


def _parameter(data: Any, requires_grad: Any, _: Any = None, state: Any = None) -> StoredTensor:
    """Do what torch._utils._rebuild_parameter does, and _rebuild_parameter_with_state."""
    _need(type(data) is StoredTensor, "a parameter that is not a tensor")
    parameter: StoredTensor = data._replace(requires_grad=bool(requires_grad), is_parameter=True)
    return parameter if state is None else _with_attributes(parameter, state)


def _tensor_with_attributes(rebuild: Any, kind: Any, arguments: Any, state: Any) -> StoredTensor:
    """Do what torch._tensor._rebuild_from_type_v2 does for torch.Tensor itself."""
    plain = rebuild in (_tensor, _tensor_of_dtype) and kind is _TENSOR and type(arguments) is tuple
    _need(plain, "a subclass of torch.Tensor")
    return _with_attributes(rebuild(*arguments), state)


def _with_attributes(tensor: StoredTensor, state: Any) -> StoredTensor:
    _need(state is None or type(state) is dict, "attributes of a tensor that are not a dict")
    return tensor._replace(attributes=state)


def _ordered_dict() -> OrderedDict[Any, Any]:
    return OrderedDict()


def _device(kind: Any, index: Any = None) -> TorchDevice:
    _need(type(kind) is str and (index is None or type(index) is int), "a device without a name")
    return TorchDevice(kind[:_SHOWN], index)


def _layout(name: Any) -> TorchLayout:
    _need(type(name) is str, "a layout without a name")
    return TorchLayout(name[:_SHOWN])


def _complex(real: Any, imaginary: Any) -> complex:
    _need(type(real) is float and type(imaginary) is float, "a complex number of something else than two floats")
    return complex(real, imaginary)


_ALLOWED: Final[Mapping[tuple[str, str], Any]] = {
    ("collections", "OrderedDict"): _ordered_dict,
    ("torch", "Size"): _size,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_of_dtype,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
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
_ATOMS: Final = (str, int, float, complex, bool, bytes, type(None))
_KEY_LEAVES: Final = (Dtype, Size, TorchDevice, TorchLayout)
_DICTS: Final = (dict, OrderedDict, Counter)
_CONTAINERS: Final = (*_DICTS, list, tuple)


# ---- what makes objects of any size ----


def _check_key(budget: Budget, key: Any) -> None:
    """Check a key of a dict, or an item of a set: its hash must not take long, nor its text much memory."""
    several = type(key) is tuple and len(key) <= _MAX_DIMENSIONS
    for part in key if several else (key,):
        _need(
            isinstance(part, _ATOMS if several else (*_ATOMS, *_KEY_LEAVES)), "a key that is neither text nor a number"
        )
        _need(not isinstance(part, (str, bytes)) or len(part) <= MAX_NAME, f"a key of more than {MAX_NAME} characters")
    budget.take(_STEP_BYTES)


def _set(budget: Budget, items: Any = ()) -> set[Any]:
    _need(type(items) in (list, tuple), "a set of something that is not a list")
    budget.take(_SET_BYTES)
    made = set()
    for item in items:
        _check_key(budget, item)
        made.add(item)
    return made


def _counter(budget: Budget, counts: Any = None) -> Counter[Any]:
    _need(counts is None or type(counts) is dict, "a Counter of something that is not a dict")
    made: Counter[Any] = Counter()
    budget.take(_STEP_BYTES * len(counts or ()))
    dict.update(made, counts or {})
    return made


def _encoded(budget: Budget, text: Any, encoding: Any) -> bytes:
    """Return what stands for bytes in protocol 2, which has none of Python 3."""
    _need(type(text) is str and encoding in ("latin1", "latin-1"), "bytes in an encoding that is not known")
    budget.take(len(text))
    return bytes(text, "latin-1")


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


# ---- the instructions ----


class _Machine:
    """Runs a pickle within a budget. It builds what is listed above, and changes lists and dicts alone."""

    def __init__(self, folder: str, members: Mapping[str, Member], budget: Budget) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: list[Any] = []
        self._budget = budget
        self._folder = folder
        self._members = members

    def run(self, data: bytes) -> Any:
        import pickletools  # which other formats do without

        for code, argument, _ in pickletools.genops(data):
            cost, instruction = _INSTRUCTIONS[code.name]
            self._budget.take(cost)
            instruction(self, argument)
        return self.stack.pop()

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def push_text(self, text: str | bytes) -> None:
        self._budget.take(2 * len(text))
        if isinstance(text, str) and not text.isascii():
            self._budget.take(_WIDE_BYTES * len(text))
        self.push(text)

    def pop(self, count: int) -> list[Any]:
        place = len(self.stack) - count
        _need(place >= 0, "too few values for an instruction")
        values = self.stack[place:]
        del self.stack[place:]
        return values

    def pop_mark(self) -> list[Any]:
        return self.pop(len(self.stack) - self.marks.pop())

    def remember(self, place: int) -> None:
        _need(place <= len(self.memo), "its objects numbered in another order than torch.save() does")
        self.memo[place : place + 1] = self.stack[-1:]

    def append(self, items: list[Any]) -> None:
        _need(type(self.stack[-1]) is list, "items that are appended to something other than a list")
        self.stack[-1].extend(items)

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        _need(type(target) in _DICTS, "items that are set in something other than a dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            _check_key(self._budget, key)
            target[key] = value

    def find(self, module: str, name: str) -> None:
        # Protocol 2 has the names of Python 2.
        place = ("builtins" if module == "__builtin__" else module, name)
        if place in _LIMITED:
            self.push(partial(_LIMITED[place], self._budget))
            return
        _need(place in _ALLOWED, f"{module[:_SHOWN]}.{name[:_SHOWN]}, which is neither a plain tensor nor a container")
        self.push(_ALLOWED[place])

    def call(self) -> None:
        function, arguments = self.pop(2)
        _need(type(arguments) is tuple, "a call without a tuple of arguments")
        self.push(function(*arguments))

    def load_storage(self) -> None:
        """Replace ("storage", type, key, location, number of elements) by the storage."""
        (identifier,) = self.pop(1)
        _need(type(identifier) is tuple and len(identifier) == 5, "a reference to something that is not a storage")
        what, kind, key = identifier[:3]
        known = what == "storage" and type(kind) is _StorageType and type(key) is str and len(key) <= MAX_NAME
        _need(known, "a reference to something that is not a storage")
        name = f"{self._folder}data/{key}"
        _need(name in self._members, f"a reference to storage {key!r}, which the archive does not have")
        self.push(Storage(kind.dtype, self._members[name]))

    def set_state(self) -> None:
        (state,) = self.pop(1)
        # The dict of a module has its version in an attribute.
        _need(
            type(self.stack[-1]) is OrderedDict and type(state) is dict,
            "attributes of something other than the dict of a module",
        )
        fits = all(type(name) is str and not hasattr(OrderedDict, name) for name in state)
        _need(fits, "attributes that replace those of a dict")
        self._budget.take(_STEP_BYTES * len(state))
        vars(self.stack[-1]).update(state)


_Instruction: TypeAlias = Callable[[_Machine, Any], object]  # with the argument in the pickle, if it has one
# Those that torch.save() writes, in all protocols. They give an object a place, or make one.
_PLACING: Final[Mapping[str, _Instruction]] = {
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), lambda machine, argument: None),
    "NONE": _Machine.push,
    "NEWTRUE": lambda machine, argument: machine.push(True),
    "NEWFALSE": lambda machine, argument: machine.push(False),
    "EMPTY_TUPLE": lambda machine, argument: machine.push(()),
    "BININT1": _Machine.push,
    **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda machine, place: machine.push(machine.memo[place])),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), _Machine.remember),
    "MEMOIZE": lambda machine, argument: machine.remember(len(machine.memo)),
}
_MAKING: Final[Mapping[str, _Instruction]] = {
    **dict.fromkeys(("BININT", "BININT2", "LONG1", "BINFLOAT"), _Machine.push),
    **dict.fromkeys(("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"), _Machine.push_text),
    **dict.fromkeys(("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"), _Machine.push_text),
    # Texts of Python 2, which pickletools takes for Latin-1.
    **dict.fromkeys(
        ("BINSTRING", "SHORT_BINSTRING"),
        lambda machine, text: machine.push_text(text.encode("latin-1").decode("utf-8", "surrogatepass")),
    ),
    "MARK": lambda machine, argument: machine.marks.append(len(machine.stack)),
    "GLOBAL": lambda machine, names: machine.find(*names.split(" ", 1)),
    "STACK_GLOBAL": lambda machine, argument: machine.find(*machine.pop(2)),
    "REDUCE": lambda machine, argument: machine.call(),
    "BUILD": lambda machine, argument: machine.set_state(),
    "BINPERSID": lambda machine, argument: machine.load_storage(),
    "TUPLE": lambda machine, argument: machine.push(tuple(machine.pop_mark())),
    "TUPLE1": lambda machine, argument: machine.push(tuple(machine.pop(1))),
    "TUPLE2": lambda machine, argument: machine.push(tuple(machine.pop(2))),
    "TUPLE3": lambda machine, argument: machine.push(tuple(machine.pop(3))),
    "EMPTY_LIST": lambda machine, argument: machine.push([]),
    "APPEND": lambda machine, argument: machine.append(machine.pop(1)),
    "APPENDS": lambda machine, argument: machine.append(machine.pop_mark()),
    "EMPTY_DICT": lambda machine, argument: machine.push({}),
    "SETITEM": lambda machine, argument: machine.set_items(machine.pop(2)),
    "SETITEMS": lambda machine, argument: machine.set_items(machine.pop_mark()),
}
_INSTRUCTIONS: Final = {
    code: (cost, instruction)
    for table, cost in ((_PLACING, _PLACE_BYTES), (_MAKING, _STEP_BYTES))
    for code, instruction in table.items()
}


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
        return _Machine(folder, members, file).run(file.read(place.offset, place.bytes))
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
