"""Tables for people, JSON for programs."""

import json
from collections.abc import Sequence
from typing import Any

from gpufs.cli._errors import printable
from gpufs.units import bytes_text as bytes_text
from gpufs.units import rate_text as rate_text


def json_text(value: Any) -> str:
    """JSON with one value on each line."""
    return json.dumps(value, indent=2, ensure_ascii=True)


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], right: frozenset[int] = frozenset()) -> None:
    """Prints a table. `right` are the columns of numbers, which are aligned to the right."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    for row in (headers, *rows):
        cells = [
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())
