"""Types of array elements, by the names that numpy and torch give them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class ElementType:
    """The type of an element.

    Attributes
    ----------
    name
        numpy's name; torch's for types that numpy lacks.
    bytes
        The size of an element.
    code
        DLPack's number of the kind.
    typestr
        The type in array interfaces; None for types that numpy lacks.
    """

    name: str
    bytes: int
    code: int
    typestr: str | None


def _numpy(name: str, size: int, code: int, kind: str) -> ElementType:
    return ElementType(name, size, code, f"{'|' if size == 1 else '<'}{kind}{size}")


_TYPES: Final = {
    one.name: one
    for one in (
        *(_numpy(f"int{8 * size}", size, 0, "i") for size in (1, 2, 4, 8)),
        *(_numpy(f"uint{8 * size}", size, 1, "u") for size in (1, 2, 4, 8)),
        *(_numpy(f"float{8 * size}", size, 2, "f") for size in (2, 4, 8)),
        *(_numpy(f"complex{8 * size}", size, 5, "c") for size in (8, 16)),
        _numpy("bool", 1, 6, "b"),
        ElementType("bfloat16", 2, 4, None),
        ElementType("float8_e4m3fn", 1, 10, None),
        ElementType("float8_e4m3fnuz", 1, 11, None),
        ElementType("float8_e5m2", 1, 12, None),
        ElementType("float8_e5m2fnuz", 1, 13, None),
        ElementType("float8_e8m0fnu", 1, 14, None),
    )
}
_BY_TYPESTR: Final = {one.typestr: one for one in _TYPES.values() if one.typestr}
UINT8: Final = _TYPES["uint8"]


def element_type(dtype: object) -> ElementType:
    """Find an element type.

    Parameters
    ----------
    dtype
        A name ("float32", "bfloat16", "<f4"), or a type of numpy or torch.

    Returns
    -------
    ElementType
        The type.

    Raises
    ------
    TypeError
        There is no such type, or its bytes are in the other order.
    """
    text = dtype if isinstance(dtype, str) else getattr(dtype, "str", None)  # of a numpy.dtype: with its byte order
    if not isinstance(text, str):
        text = getattr(dtype, "__name__", None) if isinstance(dtype, type) else str(dtype)
    name = str(text).removeprefix("torch.")
    found = _TYPES.get(name) or _BY_TYPESTR.get(name) or _BY_TYPESTR.get("|" + name) or _BY_TYPESTR.get("<" + name)
    if found is None:
        raise TypeError(f"dtype: {dtype!r} is not one of {', '.join(_TYPES)}")
    return found
