"""The dtypes of safetensors files and those of torch."""

from __future__ import annotations

import torch

_NAMES = {
    "BOOL": "bool",
    "F4": "float4_e2m1fn_x2",  # two elements a byte
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}
# Without those that this torch does not have.
TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, x) for name, x in _NAMES.items() if hasattr(torch, x)}
FILE_DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def stored_elements(dtype: str) -> int:
    """Returns how many elements of the file are one element of torch."""
    return 2 if dtype == "F4" else 1
