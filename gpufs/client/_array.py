"""DeviceArray: attached memory as an array that other libraries take without a copy."""

from __future__ import annotations

import ctypes
import math
import operator
from types import EllipsisType
from typing import Any, Final, Protocol, Self, TypeAlias

from gpufs._naming import named_in
from gpufs.drivers import DRIVERS, HOST
from gpufs.engine import Mapping, dlpack_capsule
from gpufs.formats.element_types import UINT8, ElementType, element_type
from gpufs.modes import Mode
from gpufs.syscalls import Closing

Index: TypeAlias = "int | slice | EllipsisType | tuple[int | slice | EllipsisType, ...]"

_View: TypeAlias = memoryview  # whose name is also a method's

_WORD: Final = 8  # the strictest alignment of an element in bytes
_CUDA_ARRAY_VERSION: Final = 3
_ARRAY_VERSION: Final = 3
# What a program compares with elements: with these, == would otherwise be False whatever the elements are.
_COMPARABLE: Final = (bool, int, float, complex, bytes, bytearray, _View, list, tuple)
_ARRAY_PROTOCOLS: Final = ("__dlpack__", "__array_interface__", "__cuda_array_interface__")
_NO_OPERATORS: Final = (
    "DeviceArrays have no arithmetic and no comparisons: array.torch() and array.numpy() have, in the same memory, and "
    "item() and tobytes() return elements"
)


def _is_array(value: object) -> bool:
    return any(hasattr(value, name) for name in _ARRAY_PROTOCOLS)


class _TypeName(str):
    """The name of an element type, which equals the types of numpy and torch that have these elements, too."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str):
            return str.__eq__(self, other)
        try:
            return element_type(other).name == str(self)
        except TypeError:
            return False

    def __ne__(self, other: object) -> bool:
        return not self == other


class AttachedFile(Protocol):
    """The memory of a file, mapped into this process until nothing refers to this object."""

    path: str
    mode: Mode
    driver: str
    private: bool
    size: int
    placement: int
    mapping: Mapping

    def refresh(self) -> None: ...


@named_in("gpufs")
class DeviceArray(Closing):
    """The memory behind a file of a gpufs mount, as an array. `gpufs.attach` makes one.

    It is the memory itself and not a copy, unless ``private`` is true: programs that read the file see what this one
    writes, and the reverse, without a system call. numpy (host driver), torch, CuPy, JAX and numba take it without a
    copy: ``torch.from_dlpack(array)``, ``numpy.asarray(array)``, ``cupy.asarray(array)``.

    The memory stays mapped, and the file leased, until this array, its views, and all arrays and tensors that other
    libraries made of them are gone. ``close()`` gives up this object's own share.

    Attributes
    ----------
    path : str
        The file's name when it was attached, made absolute.
    mode : str
        "r" (the memory is mapped read-only), "r+", or "c" (what is written stays in this program).
    private : bool
        Whether it is a copy of the file's contents, made because this program may not write to the file.

    See Also
    --------
    gpufs.attach : attaches a file.
    """

    __slots__ = (
        "__weakref__",
        "_attached",
        "_element",
        "_exported",
        "_kept",
        "_offset",
        "_shape",
        "_strides",
        "_whole",
        "mode",
        "path",
        "private",
    )

    def __init__(
        self,
        attached: AttachedFile,
        offset: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        element: ElementType,
        *,
        whole: bool = False,
    ) -> None:
        self._attached: AttachedFile | None = attached
        self._kept: AttachedFile | None = None  # after close(), for a consumer that relies on this object
        self._exported = False  # whether there may be such a consumer
        self._offset = offset
        self._shape = shape
        self._strides = strides  # in bytes
        self._element = element
        self._whole = whole
        self.path = attached.path
        self.mode = attached.mode
        self.private = attached.private

    @classmethod
    def of(cls, attached: AttachedFile, offset: int = 0) -> Self:
        """The bytes of a whole file, which begin at an offset of the memory that is mapped."""
        return cls(attached, offset, (attached.size,), (1,), UINT8, whole=True)

    # ---- what it is ----

    @property
    def shape(self) -> tuple[int, ...]:
        """The extents."""
        return self._shape

    @property
    def strides(self) -> tuple[int, ...]:
        """The distance in bytes between neighbours, for each dimension."""
        return self._strides

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self._shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self._shape)

    @property
    def dtype(self) -> str:
        """The name of the element type: "uint8", "float32", "bfloat16". It also equals the types of numpy and torch."""
        return _TypeName(self._element.name)

    @property
    def itemsize(self) -> int:
        """The bytes of an element."""
        return self._element.bytes

    @property
    def nbytes(self) -> int:
        """The bytes of all elements."""
        return self.size * self._element.bytes

    @property
    def device(self) -> str:
        """Where the memory is: "cpu", or the driver's name and the device's number in this process, as "cuda:0"."""
        attached = self._open()
        return "cpu" if attached.driver == HOST else f"{attached.driver}:{attached.mapping.device}"

    @property
    def address(self) -> int:
        """The address of the first element, for programs on its device."""
        return self._open().mapping.address + self._offset

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return self._attached is None

    def __len__(self) -> int:
        if not self._shape:
            raise TypeError("an array without dimensions has no length")
        return self._shape[0]

    def __repr__(self) -> str:
        name = f"<gpufs.DeviceArray {self.path!r}"
        if self.closed:
            return f"{name} (closed)>"
        private = ", a private copy" if self.private else ""
        return f"{name}, shape {self._shape}, {self.dtype}, on {self.device}, mode {self.mode!r}{private}>"

    # ---- parts and views ----

    def __getitem__(self, index: Index) -> DeviceArray:
        """A part of the array, in the same memory: integers, slices, and an ellipsis, as in numpy.

        Arrays with negative steps have no DLPack capsule: torch ends the program for one.

        With an integer for each dimension the part is an array of one element, whose number is ``item()``.
        """
        attached = self._open()
        given = index if isinstance(index, tuple) else (index,)
        if given.count(Ellipsis) > 1:
            raise IndexError("an index can have only one ellipsis")
        indices = [item for item in given if item is not Ellipsis]
        if len(indices) > self.ndim:
            raise IndexError(f"{len(indices)} indices for an array of {self.ndim} dimensions")
        place = given.index(Ellipsis) if Ellipsis in given else len(indices)
        indices[place:place] = [slice(None)] * (self.ndim - len(indices))
        offset, shape, strides = self._offset, [], []
        for item, extent, stride in zip(indices, self._shape, self._strides, strict=True):
            if isinstance(item, slice):
                start, stop, step = item.indices(extent)
                length = len(range(start, stop, step))
                offset += start * stride if length else 0
                shape.append(length)
                strides.append(stride * step)
                continue
            position = operator.index(item)
            if not -extent <= position < extent:
                raise IndexError(f"index {position} is out of range for {extent} elements")
            offset += position % extent * stride
        return DeviceArray(attached, offset, tuple(shape), tuple(strides), self._element)

    def __setitem__(self, index: Index, value: object) -> None:
        """Write elements, as numpy does, in host memory. ``value``: a number, or an array of a shape that fits.

        Raises
        ------
        TypeError
            The memory is a GPU's, or numpy has no such elements. The message names what writes them.
        ValueError
            The array is read-only, or the shapes do not fit.
        """
        part = self[index]
        if self.mode == "r":
            raise ValueError(f'the array of {self.path} is read-only: attach with mode "r+" writes to the file')
        if self._open().driver != HOST or self._element.typestr is None:
            what = f"the memory of {self.device}" if self.device != "cpu" else f"elements of {self.dtype}"
            raise TypeError(f"numpy cannot write to {what}: torch.from_dlpack(array)[...] = value does")
        import numpy

        numpy.asarray(part)[...] = value

    def view(self, dtype: object = None, shape: int | tuple[int, ...] | None = None) -> DeviceArray:
        """Show the same bytes as another array.

        Parameters
        ----------
        dtype
            The element type: a name ("float32", "bfloat16", "float8_e4m3fn") or a type of numpy or torch. None: the
            same as now.
        shape
            The extents; one may be -1 and is computed. None: one dimension, or the same as now if the element type
            stays.

        Returns
        -------
        DeviceArray
            The view.

        Raises
        ------
        TypeError
            The element type is not known.
        ValueError
            The array is not contiguous, the extents do not have as many bytes, or the first byte is not aligned for
            such elements.

        Examples
        --------
        >>> array.view("float32", (1024, -1))  # doctest: +SKIP
        """
        attached = self._open()
        element = self._element if dtype is None else element_type(dtype)
        if not self._contiguous():
            raise ValueError("the array is not contiguous: make a view of the whole first, then take the part")
        if self._offset % min(element.bytes, _WORD):
            raise ValueError(
                f"the array begins at byte {self._offset} of its memory, where {element.name} is not aligned: copy it"
            )
        if shape is None:
            extents = self._shape if element == self._element else (-1,)
        else:
            extents = (operator.index(shape),) if not isinstance(shape, tuple) else tuple(map(operator.index, shape))
        known = math.prod(extent for extent in extents if extent != -1) * element.bytes
        if extents.count(-1) > 1 or any(extent < -1 for extent in extents):
            raise ValueError(f"shape: {extents} is not a shape")
        if -1 in extents:
            missing = self.nbytes // known if known else 0
            extents = tuple(missing if extent == -1 else extent for extent in extents)
        if math.prod(extents) * element.bytes != self.nbytes:
            raise ValueError(f"shape: {extents} of {element.name} does not have {self.nbytes} bytes")
        return DeviceArray(attached, self._offset, extents, _strides_of(extents, element.bytes), element)

    def reshape(self, *shape: int | tuple[int, ...]) -> DeviceArray:
        """Show the same elements in another shape, as :meth:`view` does."""
        extents: Any = shape if len(shape) != 1 else shape[0]
        return self.view(None, extents)

    @property
    def T(self) -> DeviceArray:
        """The same elements with the order of the dimensions reversed."""
        return DeviceArray(self._open(), self._offset, self._shape[::-1], self._strides[::-1], self._element)

    def _contiguous(self) -> bool:
        expected = _strides_of(self._shape, self._element.bytes)
        together = zip(self._shape, self._strides, expected, strict=True)
        return self.size == 0 or all(extent == 1 or stride == wanted for extent, stride, wanted in together)

    # ---- values ----

    def tobytes(self) -> bytes:
        """Return a copy of the elements in host memory, in C order.

        Waits for all work that this program has queued on the device.

        Returns
        -------
        bytes
            The elements.

        Examples
        --------
        >>> array[:4].tobytes()  # doctest: +SKIP
        b"\\x7fELF"
        """
        attached = self._open()
        if not self.size:
            return b""
        before, size = self._extent()
        content = attached.mapping.read(self._offset - before, size)
        if self._contiguous():
            return content
        import numpy

        element = numpy.dtype((numpy.void, self._element.bytes))
        return numpy.ndarray(self._shape, element, content, before, self._strides).tobytes()

    def item(self) -> int | float | complex | bool:
        """Return the only element as a number of Python, for example of ``array[3]``.

        Waits for all work that this program has queued on the device.

        Returns
        -------
        int, float, complex or bool
            The number. A bfloat16 or a float8 is a float.

        Raises
        ------
        ValueError
            The array has more than one element, or none.

        Examples
        --------
        >>> array.view("float32")[0].item()  # doctest: +SKIP
        0.5
        """
        if self.size != 1:
            raise ValueError(f"item() of {self.size} elements: take one, for example array[0].item()")
        import numpy

        from gpufs.formats.elements import numbers

        content = self.tobytes()
        typestr = self._element.typestr
        values = numpy.frombuffer(content, typestr) if typestr else numbers(self._element.name, content)
        value: int | float | complex | bool = values[0].item()
        return value

    def __int__(self) -> int:
        """The only element as an integer, as of :meth:`item`."""
        return int(self._number())

    def __float__(self) -> float:
        """The only element as a float, as of :meth:`item`."""
        return float(self._number())

    def __bool__(self) -> bool:
        """Whether the only element is not zero. ValueError for more elements, as in numpy."""
        return bool(self.item())

    def _number(self) -> int | float:
        value = self.item()
        if isinstance(value, complex):
            raise TypeError("the element is a complex number: item() returns it")
        return value

    def __eq__(self, other: object) -> bool:
        """Refused where elements would have to be compared. The same object is found by ``is``."""
        if isinstance(other, _COMPARABLE) or _is_array(other):
            raise TypeError(_NO_OPERATORS)
        return NotImplemented

    def _no_operator(self, other: object = None, *_: object) -> Any:
        if hasattr(other, "__array_ufunc__"):
            return NotImplemented  # numpy takes a DeviceArray
        raise TypeError(_NO_OPERATORS)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __matmul__ = __rmatmul__ = _no_operator
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = _no_operator
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __neg__ = __pos__ = __abs__ = _no_operator
    __invert__ = __lt__ = __le__ = __gt__ = __ge__ = _no_operator

    __hash__ = object.__hash__

    # ---- its life ----

    def refresh(self) -> Self:
        """Map what the file has grown by since it was attached. Only for the array that `gpufs.attach` returned.

        Arrays that other libraries have made of it stay as they are.

        Returns
        -------
        DeviceArray
            This array, whose shape is now the file's size.

        Raises
        ------
        OSError
            EOPNOTSUPP for a private copy, EFBIG if the file has outgrown the addresses that ``attach`` reserved
            (attach it again), ENOTCONN if the mount's daemon has died.
        """
        attached = self._open()
        if not self._whole:
            raise ValueError("refresh the array that attach() returned, then take its part or view again")
        attached.refresh()
        self._offset, self._shape = attached.placement, (attached.size,)
        return self

    @property
    def attached(self) -> AttachedFile:
        """The memory of the file that this array is of. ValueError if the array is closed."""
        return self._open()

    def close(self) -> None:
        """Give up this object's share of the memory. A second call does nothing.

        The memory is unmapped and the lease ends here unless views or other libraries' arrays still use it.
        """
        if self._exported:
            self._kept = self._attached
        self._attached = None

    def __reduce__(self) -> str:
        raise TypeError("a DeviceArray cannot be copied or pickled: attach the file in the other process")

    def _open(self) -> AttachedFile:
        if self._attached is None:
            raise ValueError(f"the array of {self.path} is closed")
        return self._attached

    # ---- other libraries ----

    def numpy(self) -> Any:
        """Return the array as one of numpy, in the same memory. TypeError for a GPU's memory or bfloat16."""
        import numpy

        return numpy.asarray(self)

    def torch(self) -> Any:
        """Return the array as a tensor of torch, in the same memory; with mode "r" a program that writes to it ends."""
        from torch.utils.dlpack import from_dlpack

        return from_dlpack(self)

    def __dlpack_device__(self) -> tuple[int, int]:
        """The kind of device in DLPack's numbers, and its number in this process."""
        attached = self._open()
        return DRIVERS[attached.driver].dlpack, 0 if attached.driver == HOST else attached.mapping.device

    def __dlpack__(
        self,
        *,
        stream: int | Any | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A DLPack capsule of the array, for ``from_dlpack`` of other libraries.

        The daemon's copies are complete when they return, so no stream has to wait for anything. A capsule for
        consumers from before DLPack 1.0 cannot mark memory as read-only; writing to such memory ends the program.
        """
        attached = self._open()
        if self._extent()[0]:
            raise BufferError("torch ends the program for negative steps: take the part without them and flip it there")
        return dlpack_capsule(
            attached,
            attached.driver,
            self.__dlpack_device__()[1],
            self.address,
            self._shape,
            strides=[stride // self._element.bytes for stride in self._strides],
            code=self._element.dlpack,
            bits=self._element.bytes * 8,
            read_only=self.mode == "r",
            stream=stream,
            max_version=max_version,
            dl_device=dl_device,
            copy=copy,
        )

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The array for CuPy, numba and torch; only on GPUs."""
        attached = self._open()
        if attached.driver == HOST:
            raise AttributeError("the array is in host memory: it has __array_interface__")
        self._exported = True
        return {
            "shape": self._shape,
            "strides": None if self._contiguous() else self._strides,
            "typestr": self._typestr(),
            "data": (self.address if self.size else 0, self.mode == "r"),
            "stream": None,
            "version": _CUDA_ARRAY_VERSION,
        }

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """The array for numpy; only in host memory."""
        if self._open().driver != HOST:
            raise AttributeError("the array is in GPU memory: it has __cuda_array_interface__")
        return {
            "shape": self._shape,
            "strides": None if self._contiguous() else self._strides,
            "typestr": self._typestr(),
            "data": self._span(),
            "offset": self._extent()[0],
            "version": _ARRAY_VERSION,
        }

    def __array__(self, dtype: object = None, copy: bool | None = None) -> Any:
        """Not possible, or numpy would have used ``__array_interface__``; the error says why."""
        if self._open().driver != HOST:
            raise TypeError(
                f"the array is in the memory of {self.device}, which numpy cannot use: "
                "torch.from_dlpack() or cupy.asarray() take it, and reading the file copies it"
            )
        raise TypeError(f"numpy has no {self.dtype}: make a view of another type first, as view('uint8')")

    def memoryview(self) -> _View:
        """The bytes of a contiguous array in host memory, as a memoryview.

        Raises
        ------
        TypeError
            The memory is a GPU's.
        ValueError
            The array is not contiguous.
        """
        if self._open().driver != HOST:
            raise TypeError(f"the array is in the memory of {self.device}, which the CPU cannot use")
        if not self._contiguous():
            raise ValueError("the array is not contiguous")
        return self._span()

    def __buffer__(self, flags: int) -> _View:  # from Python 3.12 on
        return self.memoryview()

    def _typestr(self) -> str:
        if self._element.typestr is None:
            raise AttributeError(f"array interfaces have no {self.dtype}: use DLPack, or make a view of another type")
        return self._element.typestr

    def _extent(self) -> tuple[int, int]:
        """How many bytes lie before the first element, where steps are negative, and all bytes of the elements."""
        if not self.size:
            return 0, 0
        steps = [(extent - 1) * stride for extent, stride in zip(self._shape, self._strides, strict=True)]
        before = -sum(step for step in steps if step < 0)
        return before, sum(map(abs, steps)) + self._element.bytes

    def _span(self) -> _View:
        """The memory of all elements, from the lowest address on. It keeps the memory mapped."""
        attached = self._open()
        before, size = self._extent()
        span = (ctypes.c_ubyte * size).from_address(self.address - before)
        span.owner = attached  # type: ignore[attr-defined]  # what uses the bytes refers to `span`
        view = memoryview(span).cast("B")
        return view.toreadonly() if self.mode == "r" else view


def _strides_of(shape: tuple[int, ...], item: int) -> tuple[int, ...]:
    strides = []
    for extent in reversed(shape):
        strides.append(item)
        item *= max(extent, 1)
    return tuple(reversed(strides))
