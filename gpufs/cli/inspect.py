"""gpufs inspect: what is in a file of tensors, or in any file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click

from gpufs.cli._main import complete_files

if TYPE_CHECKING:
    from gpufs.cli._contents import Contents
    from gpufs.formats.layout import Layout, TensorPlace
    from gpufs.formats.summary import Summary

_FIRST_BYTES: Final = 64
_LINE_BYTES: Final = 16


@click.command(name="inspect", short_help="Show the tensors of a file.")
@click.argument("name", metavar="FILE", shell_complete=complete_files)
@click.option("--stats", is_flag=True, help="Add minimum, maximum and mean, and count NaN and infinite elements.")
@click.option("--checksum", is_flag=True, help="Print the SHA-256 as sha256sum does.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object. Sizes and offsets are in bytes.")
def command(name: str, stats: bool, checksum: bool, as_json: bool) -> None:
    """Show the tensors of a safetensors or npy file: name, dtype, shape, bytes, and offset in the file.

    FILE may be on a mount or not. Other files are shown with their size and first bytes. --stats and --checksum read
    the whole file, in blocks, and allocate no memory on a GPU. Minimum, maximum and mean are those of the finite
    elements.
    """
    from gpufs.cli._contents import Contents, reported
    from gpufs.cli._output import json_text

    with reported(name, 1), Contents(name) as contents:
        layout = contents.layout()
        summaries = _summaries(contents, layout) if stats and layout is not None else []
        digest = contents.sha256() if checksum else None
        if as_json:
            print(json_text(_as_dict(contents, layout, summaries, digest)))
            return
        if stats or digest is None:
            _print(contents, layout, summaries)
        if digest is not None:
            escaped = name.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")  # as sha256sum does
            print(("\\" if escaped != name else "") + f"{digest}  {escaped}")


def _summaries(contents: Contents, layout: Layout) -> list[Summary | None]:
    """The summary of each tensor; None if its elements are not numbers."""
    from gpufs.cli._contents import each_block
    from gpufs.formats.elements import is_numeric
    from gpufs.formats.summary import Summary, summarize

    found: list[Summary | None] = [Summary() if is_numeric(one.dtype) else None for one in layout.tensors]
    numeric = [(index, one) for index, one in enumerate(layout.tensors) if found[index] is not None]

    def work(place: TensorPlace, start: int, size: int) -> Summary:
        return summarize(place.dtype, contents.read(place.offset + start, size))

    for index, summary in each_block(numeric, work):
        found[index] = (found[index] or Summary()) + summary
    return found


def _as_dict(
    contents: Contents, layout: Layout | None, summaries: list[Summary | None], digest: str | None
) -> dict[str, Any]:
    from gpufs.cli._contents import finite

    found: dict[str, Any] = {
        "path": contents.path,
        "format": layout.format if layout else None,
        "size_bytes": contents.size,
        "held_bytes": contents.held_bytes,
        "place": contents.place,
        "first_bytes": contents.read(0, min(_FIRST_BYTES, contents.size)).hex(),
    }
    if digest is not None:
        found["sha256"] = digest
    if layout is not None:
        found["metadata"] = layout.metadata
        found["tensors"] = [
            {
                "name": one.name,
                "dtype": one.dtype,
                "shape": list(one.shape),
                "bytes": one.bytes,
                "offset": one.offset,
                "fortran_order": one.fortran_order,
            }
            for one in layout.tensors
        ]
        for tensor, summary in zip(found["tensors"], summaries, strict=False):
            tensor["stats"] = summary and {
                "min": summary.minimum,
                "max": summary.maximum,
                "mean": finite(summary.mean),
                "nan": summary.nan,
                "inf": summary.inf,
            }
    return found


def _print(contents: Contents, layout: Layout | None, summaries: list[Summary | None]) -> None:
    from gpufs.cli._errors import printable
    from gpufs.cli._output import table
    from gpufs.units import bytes_text

    held = f"{bytes_text(contents.held_bytes)} held on {contents.place}" if contents.place else "unknown place"
    kind = "data" if layout is None else f"{layout.format}, tensors: {len(layout.tensors)}"
    print(printable(f"{contents.path}: {kind}, {bytes_text(contents.size)}, {held}"))
    if layout is None:
        for offset in range(0, min(_FIRST_BYTES, contents.size), _LINE_BYTES):
            print(_dump_line(offset, bytes(contents.read(offset, min(_LINE_BYTES, contents.size - offset)))))
        return
    headers = ["NAME", "DTYPE", "SHAPE", "BYTES", "OFFSET"]
    if summaries:
        headers += ["MIN", "MAX", "MEAN", "NAN", "INF"]
    rows = []
    for index, one in enumerate(layout.tensors):
        shape = "x".join(map(str, one.shape)) or "scalar"
        row = [one.name, one.dtype, shape + (" fortran" if one.fortran_order else ""), str(one.bytes), str(one.offset)]
        if summaries:
            summary = summaries[index]
            row += ["-"] * 5 if summary is None else _cells(summary)
        rows.append(row)
    table(headers, rows, right=frozenset(range(3, 10)))


def _cells(summary: Summary) -> list[str]:
    numbers = (summary.minimum, summary.maximum, summary.mean)
    texts = ["-" if one is None else str(one) if isinstance(one, int) else f"{one:.6g}" for one in numbers]
    return [*texts, str(summary.nan), str(summary.inf)]


def _dump_line(offset: int, data: bytes) -> str:
    """A line as that of `xxd`."""
    words = " ".join(data[place : place + 2].hex() for place in range(0, len(data), 2))
    text = "".join(chr(byte) if 0x20 <= byte < 0x7F else "." for byte in data)
    return f"{offset:08x}: {words:39}  {text}"
