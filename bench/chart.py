"""Draws whole programs with and without gpufs: loading, start to the first token, GPU memory.

python -m bench.chart RESULTS.json PICTURE.svg     `bench/gpu/programs.py --json RESULTS.json` measures transformers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from bench.looks import DARK, with_look

_WITHOUT, _GPUFS, _SHARED = "#9aa4ad", "#2f7ed8", "#a9cdf3"
_HEIGHT = 0.38


def _bars(axis: Any, rows: list[dict[str, Any]], names: list[str], unit: str) -> None:
    """Two bars for each row, the first row on top, with their values."""
    for number, row in enumerate(rows):
        imports = row.get("imports", (0, 0))
        for side, (key, colour, offset) in enumerate(
            (("without", _WITHOUT, -_HEIGHT / 2), ("gpufs", _GPUFS, _HEIGHT / 2))
        ):
            value, shared = row[key], row.get("mount", 0) if key == "gpufs" else 0
            axis.barh(number + offset, value, _HEIGHT, color=colour)
            axis.barh(number + offset, shared, _HEIGHT, left=value, color=_SHARED)
            axis.barh(
                number + offset, imports[side], _HEIGHT, color="none", hatch="///", edgecolor="white", linewidth=0
            )
            text = f"{value:g} + {shared:g}" if shared else f"{value:g}"
            axis.text(value + shared, number + offset, f" {text} {unit}", va="center", fontsize=8)
    axis.set_yticks(range(len(rows)), names, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.3 * max(max(row["without"], row["gpufs"] + row.get("mount", 0)) for row in rows))
    axis.set_xticks([])
    axis.spines[["top", "right", "bottom"]].set_visible(False)


def draw(results: dict[str, Any], picture: Path) -> None:
    """Write ``picture``. Needs matplotlib: ImportError without it."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "gpufs", "font.family": "sans-serif"}
    from matplotlib import pyplot

    panels = [(results[key], title) for key, title in _PANELS if results[key]]
    sizes = [len(rows) + 0.8 for rows, _ in panels]
    figure, axes = pyplot.subplots(len(panels), 1, figsize=(8, 0.55 * sum(sizes)), height_ratios=sizes, squeeze=False)
    for axis, (rows, title) in zip(axes[:, 0], panels, strict=True):
        counts = [row.get("programs") for row in rows]
        names = [row["program"] if count is None else _counted(count) for row, count in zip(rows, counts, strict=True)]
        _bars(axis, rows, names, "s" if counts[0] is None else "GiB")
        axis.set_title(title, fontsize=9, loc="left", fontweight="bold")
    colours = {"without gpufs": _WITHOUT, "with gpufs": _GPUFS, "the mount, once for all programs": _SHARED}
    patches = [mpl.patches.Patch(color=colour, label=label) for label, colour in colours.items()]
    patches.append(mpl.patches.Patch(facecolor=_GPUFS, hatch="///", edgecolor="white", label="imports"))
    figure.legend(handles=patches, ncols=4, fontsize=8, loc="lower center", frameon=False)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(picture, metadata={"Date": None}, facecolor="white")
    pyplot.close(figure)
    picture.write_text(with_look(picture.read_text(), "dark", DARK))


_PANELS = (
    ("load_s", "Loading the model"),
    ("start_s", "Start of the program"),
    ("memory_gib", "GPU memory, transformers"),
)


def _counted(count: int) -> str:
    return f"{count} program{'s' * (count > 1)}"


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
