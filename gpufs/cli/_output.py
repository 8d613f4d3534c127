"""Prints for commands: failures on standard error, tables for people, JSON for programs."""

import os
import pwd
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

from gpufs._printable import printable as printable
from gpufs.units import bytes_text as bytes_text
from gpufs.units import rate_text as rate_text

MOST_NAMES: Final = 5  # in one message
# Of tables.
_GAP: Final = "  "
_CUT: Final = "~"
_NARROWEST: Final = 8
_FULL: Final = 0.95
_RED: Final = 31
_GREEN: Final = 32
_CYAN: Final = 36


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
    with suppress(OSError):
        print(f"{f'gpufs {command}'.rstrip()}: {printable(text)}", file=sys.stderr)


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


def table_lines(
    headers: Sequence[str], rows: Sequence[Sequence[str]], right: frozenset[int], optional: Sequence[str] = ()
) -> list[str]:
    """Return the lines of a table, that of the headers first. `right` are the columns that are aligned to the right.

    On a terminal they fit into its width: columns of the headers `optional` are left out, the first one first, and then
    the widest columns are cut.
    """
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    shown = [*range(len(headers))]
    if sys.stdout.isatty():
        import shutil  # most commands draw no table

        most = shutil.get_terminal_size().columns + len(_GAP)
        for name in optional:
            if name in headers and sum(widths[index] + len(_GAP) for index in shown) > most:
                shown.remove(headers.index(name))
        while sum(widths[index] + len(_GAP) for index in shown) > most:
            widest = max(shown, key=widths.__getitem__)
            if widths[widest] <= _NARROWEST:
                break
            widths[widest] -= 1
    return [
        _GAP.join(_cell(row[index], widths[index], headers[index], right=index in right) for index in shown).rstrip()
        for row in (headers, *rows)
    ]


def _cell(text: str, width: int, header: str, *, right: bool) -> str:
    if len(text) > width and text.startswith(("[|", "[ ")):  # a bar
        full = round(text.count("|") / (len(text) - 2) * (width - 2))
        text = f"[{'|' * full}{' ' * (width - 2 - full)}]"
    elif len(text) > width:
        text = f"{text[: (width - 1) // 2]}{_CUT}{text[len(text) - (width - 1 - (width - 1) // 2) :]}"
    padded = text.rjust(width) if right else text.ljust(width)
    colour = _colour(header, text) if text != header else 0
    return padded.replace(text, f"\x1b[{colour}m{text}\x1b[0m") if colour else padded


def _colour(header: str, text: str) -> int:
    """Return the number of a cell's colour: for what is out of service, full or asleep. 0 for none."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb":
        return 0
    if header in ("HEALTH", "STATE") and text != "-":
        return _GREEN if text in ("good", "ok") else _RED
    if text.startswith("[|") or header == "USE%":
        share = text.count("|") / (len(text) - 2) if "|" in text else int(text.rstrip("%").replace("-", "0")) / 100
        return _RED if share >= _FULL else 0
    return _CYAN if header in ("HELD", "MODE") and text.endswith(("asleep", "host0")) else 0


def table(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: frozenset[int] = frozenset(),
    optional: Sequence[str] = (),
) -> None:
    """Print a table, as table_lines() makes it."""
    print("\n".join(table_lines(headers, rows, right, optional)))
