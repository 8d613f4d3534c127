"""gpufs inspect: what is in files of tensors, in checkpoints, or in any file."""

from __future__ import annotations

from typing import Any, Final

import click

from gpufs.cli import _tensors
from gpufs.cli._main import complete_files
from gpufs.cli._output import Failure, complain, json_text, printable, table
from gpufs.cli._tensors import Part, TensorFiles
from gpufs.formats.elements import Summary, is_numeric, summarize, unit_bytes
from gpufs.units import bytes_text

_FIRST_BYTES: Final = 64
_LINE_BYTES: Final = 16


@click.command(name="inspect")
@click.argument("names", metavar="FILE...", nargs=-1, required=True, shell_complete=complete_files)
@click.option("--stats", is_flag=True, help="Add minimum, maximum and mean, and count NaN and infinite elements.")
@click.option("--nan", "only_nan", is_flag=True, help="Show only tensors with NaN, with the index of the first one.")
@click.option("--checksum", is_flag=True, help="Print the SHA-256 of each file as sha256sum does.")
@_tensors.type_options
@click.option(
    "--json", "as_json", is_flag=True, help="Print a JSON object, or a list for several FILEs. Sizes are in bytes."
)
def command(
    names: tuple[str, ...],
    stats: bool,
    only_nan: bool,
    checksum: bool,
    dtype: str | None,
    shape: str | None,
    as_json: bool,
) -> int:
    """Show the tensors of a file: name, dtype, shape, bytes, and offset in the file.

    FILE is a safetensors, GGUF, npy or npz file, or one of torch.save(), on a mount or not. The directory of a
    checkpoint, or its index, stands for all its files, and the directory of a registered module for its tensors. The
    type of registered memory is known; --dtype and --shape give that of other files without a header. Files of other
    formats are shown with their size and first bytes. --stats, --nan and --checksum read whole files, in blocks, and
    allocate no memory on a GPU. Minimum, maximum and mean are those of the finite elements.
    """
    given = _tensors.given_type(dtype, shape)
    stats = stats or only_nan
    reports: list[dict[str, Any]] = []
    code = 0
    for place, name in enumerate(names):
        try:
            with _tensors.reported(name, 1), TensorFiles(name, given) as files:
                summaries = _summaries(files) if stats else []
                described = _described(files)
                if only_nan:
                    shown = [place for place, summary in enumerate(summaries) if summary is not None and summary.nan]
                    files.tensors = [files.tensors[place] for place in shown]
                    summaries = [summaries[place] for place in shown]
                    described += f", with NaN: {len(shown)}"
                digests = [file.sha256() for file in files.files] if checksum else []
                if as_json:
                    reports.append(_as_dict(files, summaries, digests))
                else:
                    if place and (stats or not checksum):
                        print()
                    if stats or not checksum:
                        _print(files, described, summaries, only_nan=only_nan)
                    for file, digest in zip(files.files, digests, strict=False):
                        _print_digest(file.path, digest)
                if stats and not files.has_tensors:
                    raise Failure(f"{name}: {_without_stats(files)}")
        except Failure as failure:
            complain(str(failure))
            code = failure.code
    if as_json and reports:
        print(json_text(reports if len(names) > 1 else reports[0]))
    return code


def _without_stats(files: TensorFiles) -> str:
    if files.reason is not None:
        return f"--stats cannot read it: {files.reason}"
    if files.kind is not None:
        return f"--stats does not read the format {files.kind.name}: {files.kind.remedy}"
    return "--stats needs the type of the elements: give --dtype, and --shape if there is one"


def _print_digest(path: str, digest: str) -> None:
    escaped = path.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")  # as sha256sum does
    print(("\\" if escaped != path else "") + f"{digest}  {escaped}")


def _summaries(files: TensorFiles) -> list[Summary | None]:
    """Return the summary of each tensor; None if its elements are not numbers."""

    tensors = files.tensors
    summaries: list[Summary | None] = [Summary() if is_numeric(place.dtype) else None for _, place in tensors]

    def work(part: Part) -> Summary:
        file, place = tensors[part.number]
        if not part.hole:
            block = file.read(place.offset + part.start, part.size)
            return summarize(place.dtype, block, _tensors.first_element(place, part.start))
        unit = unit_bytes(place.bits)
        return summarize(place.dtype, bytes(unit)).times(part.size // unit)

    numeric = (
        part
        for number, (file, place) in enumerate(tensors)
        if summaries[number] is not None
        for part in _tensors.split(number, place, file.next_data)
    )
    for number, summary in _tensors.map_blocks(numeric, work):
        summaries[number] = (summaries[number] or Summary()) + summary
    return summaries


def _as_dict(files: TensorFiles, summaries: list[Summary | None], digests: list[str]) -> dict[str, Any]:
    first = files.files[0]
    several = len(files.files) > 1
    report: dict[str, Any] = {
        "path": files.path,
        "format": files.format,
        "size_bytes": sum(file.size for file in files.files),
        "held_bytes": sum(file.held_bytes for file in files.files),
        "place": files.places(),
    }
    if several:
        report["files"] = [file.path for file in files.files]
    else:
        report["first_bytes"] = first.read(0, min(_FIRST_BYTES, first.size)).hex()
    if files.reason is not None:
        report["reason"] = files.reason
    if digests:
        report["sha256"] = digests if several else digests[0]
    if files.has_tensors:
        report["metadata"] = files.metadata
        report["registered"] = files.registered
        report["tensors"] = [
            {
                "name": place.name,
                "dtype": place.dtype,
                "shape": list(place.shape),
                "bytes": place.bytes,
                "offset": place.offset,
                "fortran_order": place.fortran_order,
                **({"file": file.path} if several else {}),
            }
            for file, place in files.tensors
        ]
        for tensor, (_, place), summary in zip(report["tensors"], files.tensors, summaries, strict=False):
            tensor["stats"] = summary and {
                "min": summary.minimum,
                "max": summary.maximum,
                "mean": _tensors.finite(summary.mean),
                "nan": summary.nan,
                "inf": summary.inf,
                "first_nan": None if summary.first_nan is None else _tensors.index_of(place, summary.first_nan),
            }
    return report


def _print(files: TensorFiles, described: str, summaries: list[Summary | None], *, only_nan: bool) -> None:
    size, used = (sum(getattr(file, name) for file in files.files) for name in ("size", "held_bytes"))
    places = files.places()
    held = f"{bytes_text(used)} held on {places}" if places else "unknown place"
    print(printable(f"{files.path}: {described}, {bytes_text(size)}, {held}"))
    if not files.has_tensors:
        file = files.files[0]
        for offset in range(0, min(_FIRST_BYTES, file.size), _LINE_BYTES):
            print(_dump_line(offset, bytes(file.read(offset, min(_LINE_BYTES, file.size - offset)))))
        return
    several = len(files.files) > 1 and files.format != _tensors.REGISTERED
    headers = ["NAME", "DTYPE", "SHAPE"]
    headers += ["NAN", "FIRST"] if only_nan else ["BYTES", "OFFSET"]
    if summaries and not only_nan:
        headers += ["MIN", "MAX", "MEAN", "NAN", "INF"]
    right = frozenset(range(3, len(headers)))
    if several:
        headers.append("FILE")
    rows = []
    for number, (file, place) in enumerate(files.tensors):
        row = [place.name, place.dtype, _tensors.shape_text(place)]
        summary = summaries[number] if summaries else None
        if only_nan:
            assert summary is not None
            assert summary.first_nan is not None
            row += [str(summary.nan), str(_tensors.index_of(place, summary.first_nan))]
        else:
            row += [str(place.bytes), str(place.offset)]
            if summaries:
                row += ["-"] * 5 if summary is None else _cells(summary)
        rows.append([*row, file.path.rpartition("/")[2]] if several else row)
    if rows or not only_nan:
        table(headers, rows, right=right, optional=("OFFSET", "BYTES", "INF"))


def _described(files: TensorFiles) -> str:
    if files.format == "raw":
        (tensor,) = files.tensors
        return f"{'registered' if files.registered else 'raw'} {tensor.place.dtype} {_tensors.shape_text(tensor.place)}"
    if not files.has_tensors:
        return "data" if files.kind is None else f"{files.kind.name} ({files.reason or files.kind.remedy})"
    shards = f", files: {len(files.files)}" if len(files.files) > 1 and files.format != _tensors.REGISTERED else ""
    return f"{files.format}{shards}, tensors: {len(files.tensors)}"


def _cells(summary: Summary) -> list[str]:
    numbers = (summary.minimum, summary.maximum, summary.mean)
    texts = [
        "-" if number is None else str(number) if isinstance(number, int) else f"{number:.6g}" for number in numbers
    ]
    return [*texts, str(summary.nan), str(summary.inf)]


def _dump_line(offset: int, data: bytes) -> str:
    """Return a line as that of `xxd`."""
    words = " ".join(data[place : place + 2].hex() for place in range(0, len(data), 2))
    text = "".join(chr(byte) if 0x20 <= byte < 0x7F else "." for byte in data)
    return f"{offset:08x}: {words:39}  {text}"
