"""Finds what a server changes in a module when it loads weights, besides the values of parameters and buffers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from gpufs.integrations._shared_weights import named_tensors
from gpufs.torch._publish import is_json

_TENSORS = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_MISSING = object()


class ModuleState:
    """The attributes of all submodules, and the forms of their tensors, as they are now."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._attributes = {name: _comparable(value) for name, value in _attributes(module)}
        self._tensors = _forms(module)

    def changes(self, module: torch.nn.Module) -> tuple[dict[str, Any], str | None]:
        """Return the attributes that the module has got since then.

        Returns
        -------
        attributes : dict
            Names, with the names of the submodules, and values that JSON can express.
        obstacle : str or None
            A name of what has changed in another way: :func:`set_attributes` would not make up for it.
        """
        tensors = _forms(module)
        obstacle = next((name for name, form in self._tensors.items() if tensors.get(name) != form), None)
        attributes: dict[str, Any] = {}
        names = set()
        for name, value in _attributes(module):
            names.add(name)
            if self._attributes.get(name, _MISSING) == _comparable(value):
                continue
            if is_json(value):
                attributes[name] = value
            else:
                obstacle = obstacle or name
        return attributes, obstacle or next((name for name in self._attributes if name not in names), None)


def set_attributes(module: torch.nn.Module, attributes: Mapping[str, Any]) -> None:
    """Give another module of the same kind the attributes that :meth:`ModuleState.changes` has found."""
    for name, value in attributes.items():
        prefix, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(prefix), attribute, value)


def _attributes(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for prefix, part in module.named_modules():
        for name, value in vars(part).items():
            if name not in _TENSORS:
                yield f"{prefix}.{name}" if prefix else name, value
    for prefix, tensor in named_tensors(module).items():
        # What JSON can express is in the published file.
        yield from ((f"{prefix}.{name}", value) for name, value in vars(tensor).items() if not is_json(value))


def _forms(module: torch.nn.Module) -> dict[str, object]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in named_tensors(module).items()}


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
