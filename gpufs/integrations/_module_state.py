"""Finds what a server changes in a module when it loads weights, besides the values of parameters and buffers."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from typing import Any

import torch

from gpufs.integrations._shared_weights import hash_of
from gpufs.torch._module import named_tensors
from gpufs.torch._publish import is_json

_TENSORS = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_MISSING = object()


class _Attributes:
    """The values of attributes, as they are now. find: yields them with their names."""

    def __init__(self, find: Callable[[], Iterator[tuple[str, Any]]]) -> None:
        self._find = find
        self._before = {name: _comparable(value) for name, value in find()}

    def changes(self) -> tuple[dict[str, Any], list[str], list[str]]:
        """Return what has changed since then, by names: values that JSON can express, others, and those that are gone.

        The names of others come without values.
        """
        plain: dict[str, Any] = {}
        others = []
        names = set()
        for name, value in self._find():
            names.add(name)
            if self._before.get(name, _MISSING) == _comparable(value):
                continue
            if is_json(value):
                plain[name] = value
            else:
                others.append(name)
        return plain, others, [name for name in self._before if name not in names]


class ModuleState:
    """The attributes of all submodules and their helpers, and the forms of their tensors, as they are now.

    package: as for :class:`HelperState`.
    """

    def __init__(self, module: torch.nn.Module, package: str) -> None:
        self._module = module
        self._attributes = _Attributes(lambda: _attributes(module))
        self._helpers = HelperState(module, package)
        self._tensors = _forms(module)

    def changes(self) -> tuple[dict[str, Any], str | None]:
        """Return the attributes that the module and its helpers have got since then, as far as JSON can express them.

        Also a name of what has changed in another way, for which :func:`set_attributes` would not make up.
        """
        tensors = _forms(self._module)
        plain, others, gone = self._attributes.changes()
        of_helpers, unknown = self._helpers.changes()
        changed = [name for name, form in self._tensors.items() if tensors.get(name) != form]
        return {**plain, **of_helpers}, next(iter([*changed, *others, *unknown, *gone]), None)


class HelperState:
    """The attributes of objects that a module's parts hold beside tensors, as a quantisation's method and its kernels.

    package: only objects of classes from this package count.
    """

    def __init__(self, module: torch.nn.Module, package: str) -> None:
        self._attributes = _Attributes(lambda: _helper_attributes(module, package))

    def changes(self) -> tuple[dict[str, Any], list[str]]:
        """Return what has changed since then: values that JSON can express, and the names of others."""
        plain, others, _ = self._attributes.changes()
        return plain, others


def set_attributes(module: torch.nn.Module, attributes: Mapping[str, Any]) -> None:
    """Give another module of the same kind, and its helpers, the attributes that have been found changed.

    AttributeError if it has no such part.
    """
    for name, value in attributes.items():
        path, _, attribute = name.rpartition(".")
        owner = _part(module, path)
        if getattr(owner, attribute, _MISSING) != value:
            setattr(owner, attribute, value)


@contextmanager
def unchanged(module: torch.nn.Module, package: str) -> Iterator[None]:
    """Undo in the end what the block changes in a module, its helpers and its tensors, except the tensors' contents.

    ValueError if the block has ended, and a value that JSON can express is another one than before.
    """

    def values() -> dict[str, Any]:
        found = [*_attributes(module), *_helper_attributes(module, package)]
        return {name: value for name, value in found if is_json(value)}

    before = values()
    owners = [*module.modules(), *(helper for _, helper in _helpers(module, package)), *named_tensors(module).values()]
    dicts = [vars(owner) for owner in owners]
    dicts += [vars(part)[name] for part in module.modules() for name in ("_parameters", "_buffers")]
    kept = [(each, dict(each)) for each in dicts]
    data = [(tensor, tensor.data) for tensor in named_tensors(module).values()]
    try:
        yield
        after = values()
        for name, value in before.items():
            if name in after and after[name] != value:
                raise ValueError(f"{name} is {value} in this engine, and would become {after[name]}")
    finally:
        for each, content in kept:
            each.clear()
            each.update(content)
        for tensor, memory in data:
            tensor.data = memory


def numbers(module: torch.nn.Module) -> str:
    """Return a hash of the floating-point numbers in a module, such as scales that were read from tensors."""
    return hash_of({name: value for name, value in _attributes(module) if isinstance(value, float)})


def tensor_beside(module: torch.nn.Module, package: str) -> str | None:
    """Return the name of a tensor that a module or a helper keeps, and that is not a parameter or a buffer."""
    known = {id(tensor) for tensor in named_tensors(module).values()}
    for name, value in [*_attributes(module), *_helper_attributes(module, package)]:
        for each in value if isinstance(value, list | tuple) else [value]:
            if isinstance(each, torch.Tensor) and each.numel() > 1 and not each.is_meta and id(each) not in known:
                return name
    return None


def missing(module: torch.nn.Module, names: list[str]) -> str | None:
    """Return the first of the attributes that this module does not have, or that is None. None if all are there."""
    for name in names:
        try:
            if _part(module, name) is not None:
                continue
        except AttributeError:
            pass
        return name
    return None


def _part(module: torch.nn.Module, path: str) -> Any:
    return reduce(getattr, path.split(".") if path else (), module)


def _attributes(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for prefix, part in module.named_modules():
        for name, value in vars(part).items():
            if name not in _TENSORS:
                yield f"{prefix}.{name}" if prefix else name, value
    for prefix, tensor in named_tensors(module).items():
        # Values that JSON can express are in the published file.
        yield from ((f"{prefix}.{name}", value) for name, value in vars(tensor).items() if not is_json(value))


def _helper_attributes(module: torch.nn.Module, package: str) -> Iterator[tuple[str, Any]]:
    for path, helper in _helpers(module, package):
        yield from ((f"{path}.{name}", value) for name, value in vars(helper).items())


def _helpers(module: torch.nn.Module, package: str) -> Iterator[tuple[str, Any]]:
    """Yield the helpers, and the helpers that these hold, each once."""
    seen: set[int] = set()
    for prefix, part in module.named_modules():
        held = [(f"{prefix}.{name}" if prefix else name, value) for name, value in vars(part).items()]
        while held:
            path, value = held.pop()
            if not _is_helper(value, package) or id(value) in seen:
                continue
            seen.add(id(value))
            yield path, value
            held += [(f"{path}.{name}", item) for name, item in vars(value).items()]


def _is_helper(value: object, package: str) -> bool:
    if isinstance(value, torch.nn.Module | torch.Tensor | enum.Enum) or not hasattr(value, "__dict__"):
        return False
    return f"{type(value).__module__}.".startswith(f"{package}.")


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
