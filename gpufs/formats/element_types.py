"""The types of elements: their names in numpy, torch and safetensors files, their sizes, and their codes in DLPack."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class ElementType:
    """The type of an element."""

    name: str  # numpy's name; torch's for types that numpy lacks, safetensors' for types that both lack
    bits: int  # the size of an element
    safetensors: str | None  # the name in safetensors files; None for types that these lack
    dlpack: int = -1  # DLPack's code of the kind; -1 for types whose elements are parts of bytes
    typestr: str | None = None  # the type in array interfaces; None for types that numpy lacks

    @property
    def bytes(self) -> int:
        return self.bits // 8


_TABLE: Final = (
    ElementType("bool", 8, "BOOL", 6, "|b1"),
    ElementType("int8", 8, "I8", 0, "|i1"),
    ElementType("int16", 16, "I16", 0, "<i2"),
    ElementType("int32", 32, "I32", 0, "<i4"),
    ElementType("int64", 64, "I64", 0, "<i8"),
    ElementType("uint8", 8, "U8", 1, "|u1"),
    ElementType("uint16", 16, "U16", 1, "<u2"),
    ElementType("uint32", 32, "U32", 1, "<u4"),
    ElementType("uint64", 64, "U64", 1, "<u8"),
    ElementType("float16", 16, "F16", 2, "<f2"),
    ElementType("float32", 32, "F32", 2, "<f4"),
    ElementType("float64", 64, "F64", 2, "<f8"),
    ElementType("complex64", 64, "C64", 5, "<c8"),
    ElementType("complex128", 128, None, 5, "<c16"),
    ElementType("bfloat16", 16, "BF16", 4),
    ElementType("float8_e4m3fn", 8, "F8_E4M3", 10),
    ElementType("float8_e4m3fnuz", 8, "F8_E4M3FNUZ", 11),
    ElementType("float8_e5m2", 8, "F8_E5M2", 12),
    ElementType("float8_e5m2fnuz", 8, "F8_E5M2FNUZ", 13),
    ElementType("float8_e8m0fnu", 8, "F8_E8M0", 14),
    ElementType("F4", 4, "F4"),
    ElementType("F6_E2M3", 6, "F6_E2M3"),
    ElementType("F6_E3M2", 6, "F6_E3M2"),
)
BY_NAME: Final = {element.name: element for element in _TABLE}
IN_SAFETENSORS: Final = {element.safetensors: element for element in _TABLE if element.safetensors is not None}
_BY_TYPESTR: Final = {element.typestr: element for element in _TABLE if element.typestr is not None}
UINT8: Final = BY_NAME["uint8"]


def named(name: str) -> ElementType | None:
    """Return the type of a name in safetensors files, numpy or torch; None if the table lacks it."""
    return IN_SAFETENSORS.get(name) or BY_NAME.get(name)


def element_type(dtype: object) -> ElementType:
    """Find the type of the elements of an array by a name ("float32", "bfloat16", "<f4"), or a type of numpy or torch.

    TypeError if there is no such type, or its bytes are in the other order.
    """
    text = dtype if isinstance(dtype, str) else getattr(dtype, "str", None)  # of a numpy.dtype: with its byte order
    if not isinstance(text, str):
        text = getattr(dtype, "__name__", None) if isinstance(dtype, type) else str(dtype)
    name = str(text).removeprefix("torch.")
    for candidate in (BY_NAME.get(name), *(_BY_TYPESTR.get(prefix + name) for prefix in ("", "|", "<"))):
        if candidate is not None and candidate.dlpack >= 0:
            return candidate
    known = ", ".join(element.name for element in _TABLE if element.dlpack >= 0)
    raise TypeError(f"dtype: {dtype!r} is not one of {known}")
