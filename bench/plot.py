"""Draws the results of a run: rate over block size, one line a system, reads and writes side by side.

python -m bench.plot RESULTS.json PICTURE.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from bench.report import median, size_text

PANELS = (("read", "Reads"), ("rewrite", "Writes into an existing file"))


def draw(document: dict[str, Any], picture: Path) -> None:
    """Writes `picture`. Needs matplotlib: ImportError without it."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    results = document["results"]
    streams = sorted({r["streams"] for r in results if r["operation"] == "read"})
    shown = [streams[0], streams[-1]] if len(streams) > 1 else streams
    systems = list(dict.fromkeys(r["system"] for r in results))
    figure, axes = pyplot.subplots(1, len(PANELS), figsize=(9, 3.4), sharey=True)
    for axis, (operation, title) in zip(axes, PANELS, strict=True):
        for number, system in enumerate(systems):
            for count, style in zip(shown, ("-", "--"), strict=False):
                points = sorted(
                    (r["block"], median(r["bytes_per_second"]) / 1e9)
                    for r in results
                    if (r["system"], r["operation"], r["streams"]) == (system, operation, count)
                )
                label = f"{system}, {count} stream{'s' if count > 1 else ''}"
                axis.plot(*zip(*points, strict=True), style, marker="o", markersize=3, color=f"C{number}", label=label)
        blocks = sorted({r["block"] for r in results if r["operation"] == operation})
        axis.set(title=title, xlabel="block", xscale="log", yscale="log", xticks=blocks)
        axis.set_xticklabels([size_text(block) for block in blocks])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("GB/s")
    axes[-1].legend(fontsize=7)
    machine = document["machine"]
    figure.suptitle(f"{document['options']['driver']} driver, {machine['cpus']} CPUs ({machine['cpu']})", fontsize=9)
    figure.tight_layout()
    figure.savefig(picture, dpi=100)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
