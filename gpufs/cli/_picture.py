"""What `gpufs top` draws: the lines of one picture."""

import time
from collections.abc import Sequence
from typing import Final

from gpufs.cli._activity import Reading, copy_key, file_key, rate
from gpufs.cli._errors import printable
from gpufs.cli._leases import mode, program, shown_path
from gpufs.cli._output import age_text, bytes_text, rate_text, table_lines

_BAR: Final = 20
_MOST: Final = 12  # rows of a section, except for the devices


def draw(now: Sequence[Reading], before: Sequence[Reading]) -> list[str]:
    """The lines of the picture of the mounts; rates are between the two readings."""
    earlier = {reading.mountpoint: reading for reading in before}
    pairs = [(reading, earlier.get(reading.mountpoint)) for reading in now]
    sections = [
        _section(_DEVICE_HEADERS, _devices(pairs), {1, 3, 4, 5, 6, 7}, len(now) * 1000),
        _section(_COPY_HEADERS, _copies(pairs), {3, 4, 5}),
        _section(_FILE_HEADERS, _files(pairs), {1, 2, 3, 4}),
        _section(_LEASE_HEADERS, _leases(now), {3, 4}),
        [printable(f"{one.mountpoint}: {one.error.strerror}") for one in now if one.error is not None],
    ]
    lines = [f"gpufs top   {time.strftime('%H:%M:%S')}"]
    for section in filter(None, sections):
        lines += ["", *section]
    return lines


def _section(headers: Sequence[str], rows: list[tuple[str, ...]], right: set[int], most: int = _MOST) -> list[str]:
    if not rows:
        return []
    left = [f"... and {len(rows) - most} more"] if len(rows) > most else []
    return table_lines(headers, rows[:most], frozenset(right)) + left


def _rate(value: float | None) -> str:
    return "-" if value is None else rate_text(value)


def _bar(share: float) -> str:
    full = min(max(round(share * _BAR), 0), _BAR)
    return f"[{'|' * full}{' ' * (_BAR - full)}]"


_Pairs = Sequence[tuple[Reading, Reading | None]]
_DEVICE_HEADERS: Final = ("DEVICE", "USED", "", "FREE", "SIZE", "READ", "WRITE", "FILES", "HEALTH", "DESCRIPTION")
_COPY_HEADERS: Final = ("COPY TO", "FROM", "", "DONE", "RATE", "LEFT", "PROGRAM")
_FILE_HEADERS: Final = ("BUSY FILE", "SIZE", "HELD", "READ", "WRITE")
_LEASE_HEADERS: Final = ("LEASE", "PROGRAM", "MODE", "SIZE", "AGE")


def _devices(pairs: _Pairs) -> list[tuple[str, ...]]:
    return [
        (
            f"{now.mountpoint.rstrip('/')}/{device['name']}",
            bytes_text(device["held_bytes"]),
            _bar(device["held_bytes"] / device["total_bytes"] if device["total_bytes"] else 0.0),
            bytes_text(device["free_bytes"]),
            bytes_text(device["total_bytes"]),
            _rate(rate(now, before, (device["name"], "out"))),
            _rate(rate(now, before, (device["name"], "in"))),
            str(device["files"]),
            device["health"],
            device["description"] or "-",
        )
        for now, before in pairs
        for device in now.said["devices"]
    ]


def _copies(pairs: _Pairs) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for now, before in pairs:
        for copy in now.said["copies"]:
            speed = rate(now, before, copy_key(copy))
            share = copy["moved"] / copy["total"] if copy["total"] else 0.0
            rows.append(
                (
                    copy["destination"] or "?",
                    copy["source"] or "?",
                    _bar(share),
                    f"{min(share, 1.0):.0%} of {bytes_text(copy['total'])}",
                    _rate(speed),
                    age_text((copy["total"] - copy["moved"]) / speed) if speed else "-",
                    program(copy),
                )
            )
    return rows


def _files(pairs: _Pairs) -> list[tuple[str, ...]]:
    """Those that have been read or written between the readings, the busiest first."""
    found: list[tuple[float, tuple[str, ...]]] = []
    for now, before in pairs:
        for one in now.said["files"]:
            speeds = [rate(now, before, file_key(one, flow)) for flow in ("out", "in")]
            total = sum(filter(None, speeds))
            if total:
                name = one["path"] if one["path"] is not None else f"(removed file, inode {one['inode']})"
                path = f"{now.mountpoint.rstrip('/')}/{name}"
                sizes = (bytes_text(one["size"]), bytes_text(one["held_bytes"]))
                found.append((total, (path, *sizes, *map(_rate, speeds))))
    return [row for _, row in sorted(found, key=lambda pair: -pair[0])]


def _leases(now: Sequence[Reading]) -> list[tuple[str, ...]]:
    return [
        (
            shown_path(lease),
            program(lease),
            mode(lease),
            bytes_text(lease["bytes"]),
            age_text(time.time() - lease["since"]),
        )
        for reading in now
        for lease in reading.said["leases"]
    ]
