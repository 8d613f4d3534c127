"""gpufs top: what happens on the mounts of this machine, drawn again and again. Two readings of a mount make rates."""

import curses
import functools
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from errno import EACCES, ENOENT, EPERM
from typing import Any, Final

import click

from gpufs import config, mounting
from gpufs.cli import _answers, _mounts, _queries
from gpufs.cli._options import complete_mounts, time_option, timeout_option
from gpufs.cli._output import Failure, age_text, bytes_text, printable, rate_text, table_lines
from gpufs.cli._queries import mode_text, path_text, program_text
from gpufs.client._daemons import control_file

_KEY_MILLISECONDS: Final = 200  # getch() does not end when a signal comes: Python's handlers run after it
# A whole copy, whose pieces other backends count.
_WHOLE: Final = "transfer"
_BAR: Final = 20
_MOST: Final = 12  # rows of a section, except for the devices
_DEVICE_HEADERS: Final = ("DEVICE", "USED", "", "FREE", "SIZE", "READ", "WRITE", "FILES", "HEALTH", "DESCRIPTION")
_OPTIONAL: Final = ("DESCRIPTION", "FILES", "SIZE")  # where the terminal is narrow
_COPY_HEADERS: Final = ("COPY TO", "FROM", "", "DONE", "RATE", "LEFT", "PROGRAM")
_FILE_HEADERS: Final = ("BUSY FILE", "SIZE", "HELD", "READ", "WRITE")
_LEASE_HEADERS: Final = ("LEASE", "PROGRAM", "MODE", "SIZE", "AGE")
Key = tuple[Any, ...]


@dataclass(slots=True)
class Reading:
    """The report of a mount, or the reason why there is none."""

    mountpoint: str
    # The content of `.gpufs/activity`.
    activity: dict[str, Any] = field(default_factory=lambda: {"devices": [], "files": [], "copies": [], "leases": []})
    moved: dict[Key, int] = field(default_factory=dict)  # bytes so far, in both directions, by what moved them
    error: OSError | None = None
    at: float = field(default_factory=time.monotonic)  # seconds of the monotonic clock


@click.command(name="top")
@click.argument("mountpoints", metavar="[MOUNTPOINT...]", nargs=-1, shell_complete=complete_mounts)
@click.option("--once", is_flag=True, help="Print one picture and end, as it also does without a terminal.")
@time_option("--interval", 0.1, 3600, "Time between two pictures, from 0.1 to 3600 seconds.  [default: 1s]", "1s")
@timeout_option(config.STATUS_TIMEOUT)
def command(mountpoints: tuple[str, ...], once: bool, interval: float, timeout: float) -> None:
    """Show what happens on the mounts: devices, copies in progress, busy files and leases, with rates.

    Of all mounts that you may see, or of the given MOUNTPOINTs. The key q quits. Rates are averages over the last
    interval. Users other than root and the one who mounted see their own copies, files and leases.
    """
    if not once and sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        for number in (signal.SIGTERM, signal.SIGHUP):
            # Passes through curses, which restores the terminal.
            signal.signal(number, lambda arrived, _: sys.exit(128 + arrived))
        with suppress(KeyboardInterrupt):
            curses.wrapper(_watch, mountpoints, timeout, interval)
        return
    before = _read(mountpoints, timeout)
    time.sleep(interval)
    now = _read(mountpoints, timeout)
    print("\n".join(_picture(now, before)))
    silent = sum(reading.error is not None for reading in now)
    if mountpoints and silent:
        raise Failure(f"{silent} of {len(now)} mounts did not answer")


def _read(mountpoints: Sequence[str], timeout: float) -> list[Reading]:
    def show(answer: dict[str, Any]) -> list[str]:
        reading = _reading("", answer)
        return _picture([reading], [reading])

    entries = _mounts.chosen(mountpoints)
    answers = _answers.ask([functools.partial(_activity_of, entry) for entry in entries], show, timeout)
    readings = [_reading(entry.mountpoint, answer) for entry, answer in zip(entries, answers, strict=True)]
    if mountpoints:
        return readings
    return [reading for reading in readings if reading.error is None or reading.error.errno not in (EACCES, EPERM)]


def _watch(window: curses.window, mountpoints: Sequence[str], timeout: float, interval: float) -> None:
    with suppress(curses.error):  # a terminal without colours, or one that cannot hide its cursor
        curses.use_default_colors()
        for colour in range(1, 8 if curses.has_colors() else 1):
            curses.init_pair(colour, colour, -1)
        curses.curs_set(0)
    before: list[Reading] = []
    while True:
        now = _read(mountpoints, timeout)
        due = time.monotonic() + interval
        lines = _picture(now, before)
        lines[0] += "   q quits"
        before = now
        _show(window, lines)
        while (left := due - time.monotonic()) > 0:
            window.timeout(min(int(left * 1000) + 1, _KEY_MILLISECONDS))
            key = window.getch()
            if key in (ord("q"), ord("Q")):
                return
            if key == curses.KEY_RESIZE:
                _show(window, lines)


def _show(window: curses.window, lines: Sequence[str]) -> None:
    window.erase()
    height, width = window.getmaxyx()
    for row, line in enumerate(lines[:height]):
        column = attribute = 0
        for number, part in enumerate(re.split(r"\x1b\[([0-9]+)m", line)):  # texts, and between them colours
            if number % 2:
                attribute = curses.color_pair(int(part) % 30)
                continue
            text = part[: max(width - column, 0)].encode(window.encoding, "replace").decode(window.encoding)
            with suppress(curses.error):  # the last cell of a window cannot be written
                window.addstr(row, column, text, attribute)
            column += len(part)
    window.refresh()


# ---- readings ----


def _activity_of(entry: mounting.MountEntry) -> dict[str, Any]:
    try:
        activity = control_file(entry, "activity")
    except FileNotFoundError:
        raise OSError(ENOENT, "has no .gpufs/activity: another version of gpufs serves it") from None
    return {"activity": activity, "devices": _queries.counters_of(entry)["devices"]}


def _reading(mountpoint: str, answer: Any) -> Reading:
    if isinstance(answer, OSError):
        return Reading(mountpoint, error=answer)
    reading = Reading(mountpoint, answer["activity"])
    for device in answer["devices"]:
        for flow in ("in", "out"):
            reading.moved[device["name"], flow] = sum(
                flows[flow]["bytes"] for backend, flows in device["backends"].items() if backend != _WHOLE
            )
    for file in reading.activity["files"]:
        reading.moved[_file_key(file, "in")] = file["bytes_written"]
        reading.moved[_file_key(file, "out")] = file["bytes_read"]
    for copy in reading.activity["copies"]:
        reading.moved[_copy_key(copy)] = copy["moved"]
    return reading


def _file_key(file: dict[str, Any], flow: str) -> Key:
    return ("file", file["inode"], flow)


def _copy_key(copy: dict[str, Any]) -> Key:
    return ("copy", copy["pid"], copy["since"], copy["source"], copy["destination"])


def _rate(now: Reading, before: Reading | None, key: Key) -> float | None:
    """Return bytes a second between two readings of a mount; None if one of them does not have the key."""
    if before is None or key not in before.moved or key not in now.moved:
        return None
    return max(now.moved[key] - before.moved[key], 0) / max(now.at - before.at, 1e-3)


# ---- the picture ----

_Pairs = Sequence[tuple[Reading, Reading | None]]


def _picture(now: Sequence[Reading], before: Sequence[Reading]) -> list[str]:
    """Return the lines of the picture of the mounts; rates are between the two readings."""
    earlier = {reading.mountpoint: reading for reading in before}
    pairs = [(reading, earlier.get(reading.mountpoint)) for reading in now]
    sections = [
        _section(_DEVICE_HEADERS, _devices(pairs), {1, 3, 4, 5, 6, 7}, _OPTIONAL, len(now) * 1000),
        _section(_COPY_HEADERS, _copies(pairs), {3, 4, 5}),
        _section(_FILE_HEADERS, _files(pairs), {1, 2, 3, 4}),
        _section(_LEASE_HEADERS, _leases(now), {3, 4}),
        [printable(f"{each.mountpoint}: {each.error.strerror}") for each in now if each.error is not None],
    ]
    lines = [f"gpufs top   {time.strftime('%H:%M:%S')}"]
    for section in filter(None, sections):
        lines += ["", *section]
    return lines


def _section(
    headers: Sequence[str],
    rows: list[tuple[str, ...]],
    right: set[int],
    optional: Sequence[str] = (),
    most: int = _MOST,
) -> list[str]:
    if not rows:
        return []
    left = [f"... and {len(rows) - most} more"] if len(rows) > most else []
    return table_lines(headers, rows[:most], frozenset(right), optional) + left


def _rate_text(value: float | None) -> str:
    return "-" if value is None else rate_text(value)


def _bar(share: float) -> str:
    full = min(max(round(share * _BAR), 0), _BAR)
    return f"[{'|' * full}{' ' * (_BAR - full)}]"


def _devices(pairs: _Pairs) -> list[tuple[str, ...]]:
    return [
        (
            f"{now.mountpoint.rstrip('/')}/{device['name']}",
            bytes_text(device["held_bytes"]),
            _bar(device["held_bytes"] / device["total_bytes"] if device["total_bytes"] else 0.0),
            bytes_text(device["free_bytes"]),
            bytes_text(device["total_bytes"]),
            _rate_text(_rate(now, before, (device["name"], "out"))),
            _rate_text(_rate(now, before, (device["name"], "in"))),
            str(device["files"]),
            device["health"],
            device["description"] or "-",
        )
        for now, before in pairs
        for device in now.activity["devices"]
    ]


def _copies(pairs: _Pairs) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for now, before in pairs:
        for copy in now.activity["copies"]:
            speed = _rate(now, before, _copy_key(copy))
            share = copy["moved"] / copy["total"] if copy["total"] else 0.0
            rows.append(
                (
                    copy["destination"] or "?",
                    copy["source"] or "?",
                    _bar(share),
                    f"{min(share, 1.0):.0%} of {bytes_text(copy['total'])}",
                    _rate_text(speed),
                    age_text((copy["total"] - copy["moved"]) / speed) if speed else "-",
                    program_text(copy),
                )
            )
    return rows


def _files(pairs: _Pairs) -> list[tuple[str, ...]]:
    """Return those that have been read or written between the readings, the busiest first."""
    rows: list[tuple[float, tuple[str, ...]]] = []
    for now, before in pairs:
        for file in now.activity["files"]:
            speeds = [_rate(now, before, _file_key(file, flow)) for flow in ("out", "in")]
            total = sum(filter(None, speeds))
            if total:
                name = file["path"] if file["path"] is not None else f"(removed file, inode {file['inode']})"
                path = f"{now.mountpoint.rstrip('/')}/{name}"
                sizes = (bytes_text(file["size"]), bytes_text(file["held_bytes"]))
                rows.append((total, (path, *sizes, *map(_rate_text, speeds))))
    return [row for _, row in sorted(rows, key=lambda pair: -pair[0])]


def _leases(now: Sequence[Reading]) -> list[tuple[str, ...]]:
    return [
        (
            path_text(lease),
            program_text(lease),
            mode_text(lease),
            bytes_text(lease["bytes"]),
            age_text(time.time() - lease["since"]),
        )
        for reading in now
        for lease in reading.activity["leases"]
    ]
