"""What gpufs does in programs that did not ask for it: plug-ins, and modules that it changes when they are imported."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def harmless(without: str) -> Callable[[Callable[P, T]], Callable[P, T | None]]:
    """Have a function log its exceptions instead of raising them. ``without``: what the program then does without."""

    def protected(function: Callable[P, T]) -> Callable[P, T | None]:
        @functools.wraps(function)
        def call(*arguments: P.args, **named: P.kwargs) -> T | None:
            try:
                return function(*arguments, **named)
            except Exception as error:  # noqa: BLE001 - the program would end
                import logging  # which most programs have loaded

                text = f"{type(error).__name__}: {error}"
                logging.getLogger("gpufs").warning("gpufs: this program goes on without %s: %s", without, text)
                return None

        return call

    return protected
