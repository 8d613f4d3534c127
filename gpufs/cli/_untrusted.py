"""Validates what a mount reports about itself: its daemon may be another user's program."""

import json
from collections.abc import Callable
from typing import Any, Final

Check = Callable[[Any], bool]

_MOST_LEVELS: Final = 32


def numeric(below: float) -> Check:
    """A number from 0 up to, not including, ``below``."""
    return lambda value: isinstance(value, (int, float)) and 0 <= value < below


def text(value: Any) -> bool:
    """A string."""
    return isinstance(value, str)


def maybe(check: Check) -> Check:
    """What passes the check, or null."""
    return lambda value: value is None or check(value)


def items(check: Check) -> Check:
    """A list of what passes the check."""
    return lambda value: isinstance(value, list) and all(map(check, value))


def values(check: Check) -> Check:
    """An object with any names, whose values pass the check."""
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


def record(**checks: Check) -> Check:
    """An object that has at least these names."""
    return lambda value: (
        isinstance(value, dict) and all(name in value and check(value[name]) for name, check in checks.items())
    )


SIZE: Final = numeric(1 << 64)
TIME: Final = numeric(1 << 36)  # seconds since 1970


def parse(content: bytes, check: Check) -> dict[str, Any]:
    """The JSON object in ``content``. ValueError with the reason if it does not pass the check."""
    try:
        said = json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not _is_shallow(said, _MOST_LEVELS):
        raise ValueError("it is nested too deeply")
    if not isinstance(said, dict) or not check(said):
        raise ValueError("a value is missing or has the wrong type")
    json.dumps(said, ensure_ascii=False).encode(errors="surrogateescape")  # ValueError for lone surrogates
    return said


def _is_shallow(value: Any, levels: int) -> bool:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels > 0 and all(_is_shallow(child, levels - 1) for child in children)
