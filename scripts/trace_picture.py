"""Draws a part of a trace of `gpufs trace` as SVG. Usage: trace_picture.py TRACE.json OUTPUT.svg [--from MS] [--for MS]

One row for each track, in order of its first span: threads first, then what devices did for them.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from xml.sax.saxutils import escape

_COLOURS: Final = {
    "file": "#3b7dd8",
    "device copy": "#e08a1e",
    "fastpath": "#2f9e5f",
    "mount": "#7a62c9",
    "wait": "#c9cdd3",
    "transfer": "#5f6b7a",
}
_WIDTH: Final = 960.0
_LEFT: Final = 190.0
_ROW: Final = 18.0
_TOP: Final = 34.0
_LEAST: Final = 0.4  # pixels: what is shorter would not be seen

Event = dict[str, Any]


def _spans(events: list[Event]) -> Iterator[Event]:
    begun: dict[tuple[str, str], Event] = {}
    for event in events:
        if event["ph"] == "X" and event["cat"] != "piece":
            yield event
        elif event["ph"] == "b":
            begun[event["id"], event["name"]] = event
        elif event["ph"] == "e":
            start = begun.pop((event["id"], event["name"]), None)
            if start is not None and event["name"] == "transfer":
                yield {**start, "pid": -1, "tid": 0, "dur": event["ts"] - start["ts"]}


def _names(events: list[Event]) -> dict[tuple[int, int], str]:
    processes = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    found = {(-1, 0): "copies"}
    for event in events:
        if event["ph"] == "M" and event["name"] == "thread_name":
            owner = processes.get(event["pid"], "")
            name = str(event["args"]["name"]).split(" (")[0]
            found[event["pid"], event["tid"]] = name if event["pid"] == 1 else f"{owner}: {name}"
    return found


def picture(events: list[Event], start: float | None, length: float | None) -> str:
    """The SVG. ``start`` and ``length`` in microseconds; without them from the first transfer to the last one's end."""
    spans = list(_spans(events))
    transfers = [span for span in spans if span["cat"] == "transfer"] or spans
    if start is None:
        start = min(span["ts"] for span in transfers)
    if length is None:
        length = max(span["ts"] + span["dur"] for span in transfers) - start
    end = start + length
    rows: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for span in spans:
        if span["ts"] < end and span["ts"] + span["dur"] > start:
            rows[span["pid"], span["tid"]].append(span)
    names = _names(events)
    order = sorted(rows, key=lambda track: (track[0], names.get(track, "")))
    height = _TOP + _ROW * len(order) + 24
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {_WIDTH:.0f} {height:.0f}" font-family="sans-serif" font-size="11">'
    )
    parts = [head, f'<rect width="{_WIDTH:.0f}" height="{height:.0f}" fill="#ffffff"/>']
    at = _LEFT
    for category in ("file", "device copy", "fastpath", "wait", "mount", "transfer"):
        if any(span["cat"] == category for track in order for span in rows[track]):
            parts.append(f'<rect x="{at:.0f}" y="8" width="10" height="10" fill="{_COLOURS[category]}"/>')
            parts.append(f'<text x="{at + 14:.0f}" y="17">{escape(category)}</text>')
            at += 34 + 6.2 * len(category)
    scale = (_WIDTH - _LEFT - 10) / length
    for place, track in enumerate(order):
        top = _TOP + place * _ROW
        parts.append(f'<text x="4" y="{top + 12:.1f}">{escape(names.get(track, str(track)))}</text>')
        for span in sorted(rows[track], key=lambda one: -one["dur"]):
            left = max(span["ts"], start)
            width = max((min(span["ts"] + span["dur"], end) - left) * scale, _LEAST)
            title = f"{span['name']}, {span['args'].get('size', 0)} bytes, {span['dur'] / 1000:.3f} ms"
            parts.append(
                f'<rect x="{_LEFT + (left - start) * scale:.2f}" y="{top + 2:.1f}" width="{width:.2f}" '
                f'height="{_ROW - 5:.1f}" fill="{_COLOURS.get(span["cat"], "#999999")}">'
                f"<title>{escape(title)}</title></rect>"
            )
    foot = _TOP + len(order) * _ROW + 14
    for share in range(5):
        shown = length * share / 4 / 1000
        parts.append(f'<text x="{_LEFT + length * share / 4 * scale:.1f}" y="{foot:.0f}" fill="#5f6b7a" '
                     f'text-anchor="{"end" if share == 4 else "start"}">{shown:.2f} ms</text>')  # fmt: skip
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--from", dest="start", type=float, help="milliseconds into the trace")
    parser.add_argument("--for", dest="length", type=float, help="milliseconds to show")
    chosen = parser.parse_args()
    events = json.loads(chosen.trace.read_text(encoding="utf-8"))["traceEvents"]
    start = None if chosen.start is None else chosen.start * 1000
    length = None if chosen.length is None else chosen.length * 1000
    chosen.output.write_text(picture(events, start, length), encoding="utf-8")


if __name__ == "__main__":
    main()
