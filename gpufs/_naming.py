"""The names under which public objects show themselves: the module that programs import them from."""

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def named_in(module: str) -> Callable[[T], T]:
    """Make a class or a function name itself as one of ``module``, in tracebacks, repr() and pickles."""

    def name(public: T) -> T:
        public.__module__ = module
        return public

    return name
