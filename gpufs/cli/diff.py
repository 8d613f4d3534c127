"""gpufs diff: how two files of tensors differ."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from gpufs.cli._main import complete_files

if TYPE_CHECKING:
    from gpufs.cli._contents import Contents
    from gpufs.formats.layout import Layout, TensorPlace
    from gpufs.formats.summary import Difference


@click.command(name="diff", short_help="Compare two files, tensor by tensor.")
@click.argument("one", metavar="A", shell_complete=complete_files)
@click.argument("other", metavar="B", shell_complete=complete_files)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
def command(one: str, other: str, as_json: bool) -> int:
    """Compare two safetensors files, or two npy files, tensor by tensor.

    Tensors are equal if name, dtype, shape and all bits are. The order of the tensors and the metadata do not matter.
    cmp(1) compares other files. Exit codes: 0 equal, 1 different, 2 trouble.
    """
    from gpufs.cli._contents import Contents, reported
    from gpufs.cli._errors import Failure
    from gpufs.cli._output import json_text

    with reported(one, 2), Contents(one) as first, reported(other, 2), Contents(other) as second:
        ours, theirs = _layout(first), _layout(second)
        if ours is None or theirs is None or ours.format != theirs.format:
            raise Failure(f"{one} and {other} are not both safetensors or both npy files: cmp compares their bytes", 2)
        tensors = _compare_tensors(first, ours, second, theirs)
        if as_json:
            print(json_text({"equal": not tensors, "format": ours.format, "tensors": tensors}))
        elif tensors:
            _print(tensors)
        sys.stdout.flush()  # a failure of the output is trouble, too
    return 1 if tensors else 0


def _layout(contents: Contents) -> Layout | None:
    from gpufs.cli._contents import reported

    with reported(contents.path, 2):
        return contents.layout()


def _compare_tensors(one: Contents, ours: Layout, other: Contents, theirs: Layout) -> list[dict[str, Any]]:
    """What differs, by the names of the tensors."""
    from gpufs.cli._contents import each_block, finite
    from gpufs.formats.elements import is_numeric
    from gpufs.formats.summary import Difference, compare

    there = {place.name: place for place in theirs.tensors}
    found: dict[str, dict[str, Any]] = {}
    pairs: list[tuple[str, TensorPlace]] = []
    for place in ours.tensors:
        match = there.pop(place.name, None)
        if match is None:
            found[place.name] = {"difference": "missing", "in": "A"}
        elif _kind(place) != _kind(match):
            found[place.name] = {"difference": "type", "a": _kind(place), "b": _kind(match)}
        else:
            pairs.append((place.name, place))
    differences = {name: Difference() for name, _ in pairs}
    places = {place.name: place.offset for place in theirs.tensors}

    def work(place: TensorPlace, start: int, size: int) -> Difference:
        blocks = one.read(place.offset + start, size), other.read(places[place.name] + start, size)
        return compare(place.dtype, place.bits, *blocks, start=8 * start // max(place.bits, 1))

    for name, difference in each_block(pairs, work):
        differences[name] += difference
    for name, place in pairs:
        if differences[name].elements:
            found[name] = _described(place, differences[name])
            largest = differences[name].largest if is_numeric(place.dtype) else None
            found[name]["max_abs_difference"] = finite(largest)
    for name in there:
        found[name] = {"difference": "missing", "in": "B"}
    return [{"name": name, **what} for name, what in found.items()]


def _kind(place: TensorPlace) -> dict[str, Any]:
    return {"dtype": place.dtype, "shape": list(place.shape), "fortran_order": place.fortran_order}


def _described(place: TensorPlace, difference: Difference) -> dict[str, Any]:
    return {
        "difference": "elements",
        "elements": 8 * place.bytes // max(place.bits, 1),
        "differing": difference.elements,
        "first": difference.first,
    }


def _print(tensors: list[dict[str, Any]]) -> None:
    from gpufs.cli._output import table

    rows = []
    for tensor in tensors:
        if tensor["difference"] == "missing":
            row = [f"only in {tensor['in']}", "-", "-", "-"]
        elif tensor["difference"] == "type":
            row = [f"{_kind_text(tensor['a'])} and {_kind_text(tensor['b'])}", "-", "-", "-"]
        else:
            largest = tensor["max_abs_difference"]
            counts = f"{tensor['differing']} of {tensor['elements']}"
            row = ["elements", counts, str(tensor["first"]), "-" if largest is None else f"{largest:.6g}"]
        rows.append([tensor["name"], *row])
    table(("NAME", "DIFFERENCE", "ELEMENTS", "FIRST", "MAX"), rows, right=frozenset({2, 3, 4}))


def _kind_text(kind: dict[str, Any]) -> str:
    shape = "x".join(map(str, kind["shape"])) or "scalar"
    return f"{kind['dtype']} {shape}" + (" fortran" if kind["fortran_order"] else "")
