"""The public names of packages: where they are loaded from, and the module that they name as their own."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import TypeVar

T = TypeVar("T")


def named_in(module: str) -> Callable[[T], T]:
    """Make a class or a function name itself as one of ``module``, in tracebacks, repr() and pickles."""

    def name(public: T) -> T:
        public.__module__ = module
        return public

    return name


def lazy(package: dict[str, object], modules: Mapping[str, str]) -> Callable[[str], object]:
    """Return a ``__getattr__`` for a package: its ``globals()`` keep what has been loaded.

    ``modules``: the module of the package that has each name; with a dot before it, one beside the package.
    """

    def load(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package['__name__']!r} has no attribute {name!r}")
        value: object = getattr(importlib.import_module(f".{modules[name]}", str(package["__name__"])), name)
        package[name] = value
        return value

    return load
