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
    """Return a ``__getattr__`` for a package: its ``globals()`` keep what has been loaded, and get a ``__dir__``.

    ``modules``: the names that each module of the package has, between spaces; a module with a dot before its name is
    one beside the package.
    """
    places = {name: module for module, names in modules.items() for name in names.split()}

    def load(name: str) -> object:
        if name not in places:
            raise AttributeError(f"module {package['__name__']!r} has no attribute {name!r}")
        value: object = getattr(importlib.import_module(f".{places[name]}", str(package["__name__"])), name)
        package[name] = value
        return value

    package["__dir__"] = lambda: package["__all__"]
    return load
