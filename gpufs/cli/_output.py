"""Tables and numbers for people. What programs read is JSON, printed by json_text()."""

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from gpufs.cli._errors import printable


def bytes_text(size: int | None) -> str:
    """A size for people: "512M", "1.5G"; "-" where it is not known."""
    if size is None:
        return "-"
    value = float(size)
    unit = ""
    for larger in "KMGTPE":
        if value < 1023.95:
            break
        value, unit = value / 1024, larger
    return (f"{value:.0f}" if value >= 99.95 else f"{value:.1f}".removesuffix(".0")) + unit


def json_text(value: Any) -> str:
    """JSON, one value a line, as programs and people can read it."""
    return json.dumps(value, indent=2, ensure_ascii=True)


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], right: frozenset[int] = frozenset()) -> None:
    """Prints a table; `right` are the columns of numbers. Into a file or pipe it goes whole, without colours."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    # One that is wider than the terminal is better wrapped by it, line by line, than squeezed into columns of a letter.
    if sys.stdout.isatty() and sum(widths) + 2 * (len(widths) - 1) <= os.get_terminal_size(sys.stdout.fileno()).columns:
        _rich_table(headers, rows, right)
        return
    for row in (headers, *rows):
        cells = [
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())


def _rich_table(headers: Sequence[str], rows: Sequence[Sequence[str]], right: frozenset[int]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=None, pad_edge=False, header_style="bold")
    for index, header in enumerate(headers):
        shown.add_column(header, justify="right" if index in right else "left", overflow="fold")
    for row in rows:
        shown.add_row(*(Text(cell) for cell in row))
    Console().print(shown)
