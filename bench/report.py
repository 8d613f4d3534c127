"""Results as a table and as JSON, with a description of the machine."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
REPOSITORY = Path(__file__).parents[1]


def machine() -> dict[str, Any]:
    """The machine on which the numbers were measured."""
    cpu = next((x.split(":")[1].strip() for x in open("/proc/cpuinfo") if x.startswith("model name")), "?")  # noqa: SIM115
    memory = next(int(x.split()[1]) * 1024 for x in open("/proc/meminfo") if x.startswith("MemTotal"))  # noqa: SIM115
    commit = subprocess.run(
        ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "cpu": cpu,
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": memory,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "pyfuse3": metadata.version("pyfuse3") if importlib.util.find_spec("pyfuse3") else None,
        "commit": commit or "?",
        "load_before": os.getloadavg()[0],
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def median(samples: Sequence[float]) -> float:
    return statistics.median(samples)


def size_text(size: int) -> str:
    return f"{size >> 20}M" if size >= 1 << 20 else f"{size >> 10}K"


def table(cases: Sequence[tuple[str, int, int]], systems: Sequence[str], samples: Mapping[Any, Sequence[Any]]) -> str:
    """One row a case, with medians: GB/s and gpufs against the others; for small blocks the time of a call instead.

    That time is the median call's and, after a slash, the 99th percentile. A system that lacks a case has "-" there.
    """
    others = [name for name in systems if name != "gpufs"]
    head = ["", "block", "streams", *systems]
    head += [f"gpufs/{name}" for name in others] if "gpufs" in systems else []
    rows = [head]
    for operation, block, streams in cases:
        found = {name: taken for name in systems if (taken := samples.get((name, operation, block, streams)))}
        rates = {name: median([sample.rate for sample in taken]) for name, taken in found.items()}
        row = [operation, size_text(block), str(streams)]
        for name in systems:
            if name not in found:
                row.append("-")
            elif block <= 1 << 16:
                middle = median([sample.median for sample in found[name]]) * 1e6
                late = median([sample.percentile99 for sample in found[name]]) * 1e6
                row.append(f"{middle:.1f} / {late:.1f} us")
            else:
                row.append(f"{rates[name] / 1e9:.2f} GB/s")
        if "gpufs" in systems:
            row += [f"{rates['gpufs'] / rates[name]:.2f}" if name in rates else "-" for name in others]
        rows.append(row)
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def trace_line(found: Mapping[str, Sequence[float]]) -> str:
    """Returns what a recording adds to a read of 4 KiB: medians, and the median of the rounds' own ratios."""
    ratios = sorted(on / off for on, off in zip(found["on"], found["off"], strict=True))
    quarter = len(ratios) // 4
    off, on = (median(found[state]) * 1e6 for state in ("off", "on"))
    low, middle, high = ratios[quarter] - 1, median(ratios) - 1, ratios[-1 - quarter] - 1
    return (
        f"a read of 4K takes {off:.2f} us, {on:.2f} us while it is recorded (gpufs trace): {middle:+.1%}, "
        f"half of the {len(ratios)} rounds from {low:+.1%} to {high:+.1%}"
    )


def write_json(document: dict[str, Any], path: Path | None, name: str = "mount") -> Path:
    """Writes the results; without a path to bench/results/, named by the time."""
    if path is None:
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / (name + time.strftime("-%Y%m%d-%H%M%S.json"))
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path
