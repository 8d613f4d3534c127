"""gpufs diff: how two files of tensors, or two checkpoints, differ."""

from __future__ import annotations

import math
import sys
from contextlib import ExitStack
from functools import partial
from typing import Any

import click

from gpufs.cli import _tensors
from gpufs.cli._main import complete_files
from gpufs.cli._output import Failure, json_text, table
from gpufs.cli._tensors import Part, Tensor, TensorFiles
from gpufs.formats.element_types import named
from gpufs.formats.elements import Difference, compare, is_numeric
from gpufs.formats.layout import TensorPlace
from gpufs.formats.safetensors import PADDING_NAME


@click.command(name="diff")
@click.argument("first", metavar="A", shell_complete=complete_files)
@click.argument("second", metavar="B", shell_complete=complete_files)
@_tensors.type_options
@click.option("-v", "--verbose", is_flag=True, help="Print tensors that are equal, too.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
def command(first: str, second: str, dtype: str | None, shape: str | None, verbose: bool, as_json: bool) -> int:
    """Compare two files of tensors, two checkpoints, or two arrays, tensor by tensor.

    Files may have different formats: what counts is the name of a tensor. A checkpoint is a directory or an index; how
    it is cut into files does not matter. The directory of a registered module has its tensors. Arrays are npy files,
    registered memory, and files whose type --dtype gives. Tensors are equal if name, dtype, shape and all bits are. The
    order of the tensors and the metadata do not matter. cmp(1) compares other files. Exit codes: 0 equal, 1 different,
    2 trouble.
    """
    given = _tensors.given_type(dtype, shape)
    with ExitStack() as opened:
        pair = []
        for name in (first, second):
            opened.enter_context(_tensors.reported(name, 2))
            pair.append(opened.enter_context(TensorFiles(name, given)))
        ours, theirs = pair
        for files in pair:
            if files.reason is not None:
                raise Failure(f"{files.path}: {files.reason}", 2)
        are_arrays = [files.format in ("npy", "raw") for files in pair]
        if not (ours.has_tensors and theirs.has_tensors) or len(set(are_arrays)) > 1:
            text = "neither both files of tensors nor both arrays: cmp compares their bytes, --dtype gives a type"
            raise Failure(f"{first} and {second} are {text}", 2)
        tensors = _compare_tensors(ours, theirs)
        differing = [tensor for tensor in tensors if tensor["difference"] != "equal"]
        counts = {"a": len(_by_name(ours)), "b": len(_by_name(theirs)), "equal": len(tensors) - len(differing)}
        shown = tensors if verbose else differing
        if as_json:
            equal = not differing
            print(json_text({"equal": equal, "format": ours.format, "counts": counts, "tensors": shown}))
        elif shown:
            _print_summary(counts, differing)
            _print(shown)
        sys.stdout.flush()  # a failure of the output is trouble, too
    return 1 if differing else 0


def _by_name(files: TensorFiles) -> dict[str, Tensor]:
    return {tensor.place.name: tensor for tensor in files.tensors if not tensor.place.name.startswith(PADDING_NAME)}


def _compare_tensors(ours: TensorFiles, theirs: TensorFiles) -> list[dict[str, Any]]:
    """Return what became of each tensor: those of A in their order, then those that only B has."""
    unmatched = _by_name(theirs)
    found: dict[str, dict[str, Any]] = {}
    pairs: list[tuple[Tensor, Tensor]] = []
    for name, tensor in _by_name(ours).items():
        match = unmatched.pop(name, None)
        found[name] = {"difference": "equal"}
        if match is None:
            found[name] = {"difference": "missing", "in": "A"}
        elif not _of_one_kind(tensor.place, match.place):
            found[name] = {"difference": "type", "a": _kind(tensor.place), "b": _kind(match.place)}
        else:
            pairs.append((tensor, match))
    differences = [Difference() for _ in pairs]

    def next_data(number: int, offset: int) -> int:
        """Return the next byte of A that is not in a hole of both."""
        tensor, match = pairs[number]
        shift = match.place.offset - tensor.place.offset
        return min(tensor.file.next_data(offset), match.file.next_data(offset + shift) - shift)

    def work(part: Part) -> Difference:
        if part.hole:
            return Difference()
        first, second = (file.read(place.offset + part.start, part.size) for file, place in pairs[part.number])
        place = pairs[part.number][0].place
        return compare(place.dtype, place.bits, first, second, start=_tensors.first_element(place, part.start))

    parts = (
        part
        for number, (tensor, _) in enumerate(pairs)
        for part in _tensors.split(number, tensor.place, partial(next_data, number))
    )
    for number, difference in _tensors.map_blocks(parts, work):
        differences[number] += difference
    for (tensor, _), difference in zip(pairs, differences, strict=True):
        if difference.elements:
            place = tensor.place
            found[place.name] = _described(place, difference)
            found[place.name]["max_abs_difference"] = _tensors.finite(
                difference.largest if is_numeric(place.dtype) else None
            )
    for name in unmatched:
        found[name] = {"difference": "missing", "in": "B"}
    return [{"name": name, **what} for name, what in found.items()]


def _of_one_kind(ours: TensorPlace, theirs: TensorPlace) -> bool:
    """Return whether bytes can be compared. Formats name a type differently: F32 is float32."""
    types = [found.name if (found := named(place.dtype)) else place.dtype for place in (ours, theirs)]
    return types[0] == types[1] and (ours.shape, ours.fortran_order) == (theirs.shape, theirs.fortran_order)


def _kind(place: TensorPlace) -> dict[str, Any]:
    return {"dtype": place.dtype, "shape": list(place.shape), "fortran_order": place.fortran_order}


def _described(place: TensorPlace, difference: Difference) -> dict[str, Any]:
    assert difference.first is not None
    elements = 8 * place.bytes // max(place.bits, 1)
    of_blocks = elements != math.prod(place.shape)  # the format's own, of several elements each
    return {
        "difference": "elements",
        "elements": elements,
        "differing": difference.elements,
        "first": [difference.first] if of_blocks else _tensors.index_of(place, difference.first),
    }


def _print_summary(counts: dict[str, int], differing: list[dict[str, Any]]) -> None:
    parts = [f"{counts['equal']} equal"]
    if changed := sum(tensor["difference"] != "missing" for tensor in differing):
        parts.append(f"{changed} different")
    for side in ("A", "B"):
        if only := sum(tensor.get("in") == side for tensor in differing):
            parts.append(f"{only} only in {side}")
    print(f"tensors: {counts['a']} in A, {counts['b']} in B: {', '.join(parts)}")


def _print(tensors: list[dict[str, Any]]) -> None:
    rows = []
    for tensor in tensors:
        if tensor["difference"] == "equal":
            row = ["equal", "-", "-", "-"]
        elif tensor["difference"] == "missing":
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
