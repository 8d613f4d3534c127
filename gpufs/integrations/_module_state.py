"""What a module has beside the values of its parameters and buffers, to see whether a server changes it."""

from __future__ import annotations

from typing import Any

import torch

from gpufs.integrations._shared_weights import named_tensors
from gpufs.torch._publish import is_json

_TENSORS = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


def module_state(module: torch.nn.Module) -> dict[str, Any]:
    """Returns the attributes of all submodules and of their tensors, in a form that can be compared."""
    state = {
        f"{prefix}.{name}".strip("."): _comparable(value)
        for prefix, part in module.named_modules(remove_duplicate=False)
        for name, value in vars(part).items()
        if name not in _TENSORS
    }
    for prefix, tensor in named_tensors(module).items():
        # What JSON can express is noted about each published tensor, and other engines get it.
        state |= {f"{prefix}.{name}": _comparable(value) for name, value in vars(tensor).items() if not is_json(value)}
    return state


def changed_state(before: dict[str, Any], after: dict[str, Any]) -> str | None:
    """Returns the name of an attribute that is new, gone or another one; None if there is none."""
    missing = object()
    names = sorted(before.keys() | after.keys())
    return next((name for name in names if before.get(name, missing) != after.get(name, missing)), None)


class _Identity:
    """Equal to another one for the same object."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)


def _comparable(value: object) -> object:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, dict):
        return {key: _comparable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value).__name__, [_comparable(item) for item in value]
    return _Identity(value)
