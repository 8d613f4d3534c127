"""Prints for commands: failures on standard error, tables for people, JSON for programs."""

import pwd
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

from gpufs._printable import printable as printable
from gpufs.units import bytes_text as bytes_text
from gpufs.units import rate_text as rate_text

MOST_NAMES: Final = 5  # in one message


class Failure(Exception):
    """One line for the user and the exit code: 1, or 2 for a wrong command line or configuration.

    ``command``: as for complain().
    """

    def __init__(self, message: str, code: int = 1, *, command: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.command = command


def complain(text: str, command: str = "") -> None:
    """Print a line on standard error. It is lost if that cannot be written; the exit code remains.

    ``command``: its name, of those that report failures of single files, too.
    """
    try:
        print(f"{f'gpufs {command}'.rstrip()}: {printable(text)}", file=sys.stderr)
    except OSError:
        pass


def json_text(value: Any) -> str:
    """Return JSON with one value on each line."""
    import json  # most commands print none

    return json.dumps(value, indent=2, ensure_ascii=True)


def age_text(seconds: float) -> str:
    """Return a time for people: "12s", "5m", "3h", "2d"."""
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f}{unit}"
    return f"{max(seconds, 0.0):.0f}s"


def countdown_text(seconds: float) -> str:
    """Return a time that is left: "0:07", "12:05", "3:00:00"."""
    minutes, rest = divmod(int(seconds + 0.5), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


def clock_text(seconds: float) -> str:
    """Return a time in seconds since 1970 for people."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def listed(names: Sequence[str]) -> str:
    """Return names for one line: "a, b, c, d, e and 7 more"."""
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def user_name(uid: int) -> str:
    """Return the name of a user, or the number."""
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):  # the number may be a mount's
        return str(uid)


def table_lines(headers: Sequence[str], rows: Sequence[Sequence[str]], right: frozenset[int]) -> list[str]:
    """Return the lines of a table, that of the headers first. `right` are the columns that are aligned to the right."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (headers, *rows)
    ]


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], right: frozenset[int] = frozenset()) -> None:
    """Print a table, as table_lines() makes it."""
    print("\n".join(table_lines(headers, rows, right)))
