"""gpufs stats: what the mounts of this machine have moved, also those whose process was killed."""

import contextlib
import functools
import json
import os
import sys
import time
from collections.abc import Sequence
from errno import ENOENT
from typing import Any, Final, NoReturn

import click

from gpufs import mounting, statistics
from gpufs.cli import _mounts
from gpufs.cli._errors import Failure, printable
from gpufs.cli._knobs import complete_mounts, knob_options, settings
from gpufs.cli._output import bytes_text, json_text, table
from gpufs.cli._untrusted import SIZE, TIME, items, maybe, numeric, parse, record, text, values

_FILE: Final = ".gpufs/stats"
_LEAST_PAUSE: Final = 0.1  # seconds between two readings
_MOST_PAUSE: Final = 86400.0
# What is shown of `.gpufs/stats`; there may be more in it.
_GAUGES: Final = (
    "bounce_pinned_bytes bounce_capacity_bytes bounce_used_bytes bounce_waits request_pinned_bytes locked_bytes "
    "transfers_active"
).split()
_BUCKETS: Final = items(lambda value: isinstance(value, list) and len(value) == 2 and all(map(maybe(SIZE), value)))
_COUNTS: Final = record(
    bytes=SIZE, operations=SIZE, errors=SIZE, in_flight=SIZE, refusals=values(SIZE), sizes=_BUCKETS, times=_BUCKETS
)
_DEVICE: Final = record(name=text, gauges=record(health_error=SIZE), backends=values(values(_COUNTS)))
_USED: Final = record(
    pid=SIZE,
    alive=numeric(2),
    driver=maybe(text),
    started=TIME,
    dead_since=maybe(TIME),
    gauges=record(**dict.fromkeys(_GAUGES, SIZE)),
    devices=items(_DEVICE),
)


def _pause(text: str) -> float | None:
    """Seconds between two readings; None for a text that is not a number. Failure for one out of range."""
    try:
        seconds = float(text)
    except ValueError:
        return None
    if not _LEAST_PAUSE <= seconds <= _MOST_PAUSE:
        raise Failure(f"--watch: {text} is not from {_LEAST_PAUSE:g} to {_MOST_PAUSE:g} seconds", 2)
    return seconds


@click.command(name="stats")
@click.argument("mountpoint", required=False, shell_complete=complete_mounts)
@click.option("--json", "as_json", is_flag=True, help="Print JSON: a list of mounts, or one object for MOUNTPOINT.")
@click.option(
    "--watch",
    is_flag=False,
    flag_value="1",
    metavar="[S]",
    help="Show it again every S seconds (1), with rates, until interrupted. With --json: an object (list) a line.",
)
@knob_options("stats")
def command(mountpoint: str | None, as_json: bool, watch: str | None, **arguments: Any) -> None:
    """Show what the mounts of this machine have moved.

    All of them, or MOUNTPOINT: bytes, operations and failures by device and by the way that the bytes took, pinned
    memory, and why copies did not take the fastpath. The last counters of a mount whose process was killed stay until
    `gpufs umount` of it, your next mount there, or for an hour.
    """
    timeout: float = settings("stats", arguments)["status_timeout"]
    pause = None if watch is None else _pause(watch)
    if watch is not None and pause is None:
        if mountpoint is not None:
            raise Failure(f"--watch: {watch} is not a number of seconds", 2)
        mountpoint, pause = watch, 1.0  # it was the mountpoint, and --watch had no number
    if pause is None:
        found = _look(mountpoint, timeout)
        if as_json:
            print(json_text(found if mountpoint is None else found[0]))
        else:
            _print_all(found)
        failed = [one for one in found if one.get("error")]
        if mountpoint is not None and failed:
            raise Failure(f"{failed[0]['mountpoint']}: {failed[0]['error']}")
        return
    with contextlib.suppress(KeyboardInterrupt):  # the way to end it
        (_watch_json if as_json else _watch)(mountpoint, timeout, pause)


def _look(mountpoint: str | None, timeout: float) -> list[dict[str, Any]]:
    """The statistics of the mounts; those that cannot be read have "error" and no devices.

    Other processes read them: a mount, or a folder of counters that another user has made, may not answer.
    """
    if mountpoint is None:
        entries = _mounts.trusted_first(mounting.mounts())
    else:
        try:
            entries = [_mounts.find(mountpoint)]
        except Failure:
            (left,) = _mounts.ask([functools.partial(_left_behind, os.path.realpath(mountpoint))], timeout)
            if isinstance(left, OSError):
                raise
            return [json.loads(left)]
    answers = _mounts.ask([functools.partial(_of_mount, entry) for entry in entries], timeout)
    return [_answered(entry, answer) for entry, answer in zip(entries, answers, strict=True)]


def _left_behind(mountpoint: str) -> bytes:
    """The last counters of a mount of ours that is gone, as JSON. OSError ENOENT without them."""
    left = statistics.read_left_behind(mountpoint, os.getuid())
    if left is None:
        raise FileNotFoundError(ENOENT, os.strerror(ENOENT))
    return json.dumps(left).encode()


def _of_mount(entry: mounting.MountEntry) -> bytes:
    """The statistics as JSON: from the counters' file if that can be read, otherwise from the mount. OSError."""
    try:
        return json.dumps(statistics.read_mount(entry.device, entry.uid, entry.mountpoint)).encode()
    except (OSError, statistics.StatisticsError):
        return _mounts.content_of(os.path.join(entry.mountpoint, _FILE))


def _answered(entry: mounting.MountEntry, answer: bytes | OSError) -> dict[str, Any]:
    """The statistics in a mount's answer, or the reason why they are missing."""
    if isinstance(answer, bytes):
        try:
            if parse(answer, record()).get("format") == statistics.VERSION:
                said = parse(answer, _USED)
                said.pop("error", None)
                return {**said, "mountpoint": entry.mountpoint}
            problem = f"{_FILE} has another format: another version of gpufs serves the mount"
        except ValueError as error:
            problem = f"{_FILE} is not understood: {error}"
    else:
        owner = "" if _mounts.is_trusted(entry) else f" (it is user {entry.uid}'s)"
        problem = f"its statistics cannot be read: {answer.strerror}{owner}"
    return {"mountpoint": entry.mountpoint, "error": problem, "devices": [], "alive": None, "pid": None}


# ---- for people ----


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _headline(one: dict[str, Any]) -> str:
    if one.get("error"):
        return f"{one['mountpoint']}: {one['error']}"
    if one["alive"]:
        return f"{one['mountpoint']}: process {one['pid']}, driver {one['driver']}, since {_clock(one['started'])}"
    return (
        f"{one['mountpoint']}: its process ({one['pid']}) is dead since {_clock(one['dead_since'])}; "
        "these are its last counters"
    )


def _duration_text(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def _quantile(buckets: Sequence[Sequence[Any]], share: float) -> float | None:
    """The upper bound of the bucket in which this share of all values ends; None where that is beyond them all."""
    wanted = share * sum(number for _, number in buckets)
    below = 0
    for bound, number in buckets:
        below += number
        if below >= wanted:
            return None if bound is None else float(bound)
    return None


_HEADERS: Final = ("DEVICE", "BACKEND", "DIR", "BYTES", "OPS", "ERRORS", "RUNNING", "SIZE<=", "p50<=", "p99<=")
_RATES: Final = ("BYTES/s", "OPS/s")
_Counted = dict[tuple[str, str, str, str], tuple[int, int]]


def _counted(found: Sequence[dict[str, Any]]) -> _Counted:
    return {
        (one["mountpoint"], device["name"], backend, flow): (counts["bytes"], counts["operations"])
        for one in found
        for device in one["devices"]
        for backend, flows in device["backends"].items()
        for flow, counts in flows.items()
    }


def _rows(one: dict[str, Any], before: _Counted | None = None, seconds: float = 1.0) -> list[tuple[str, ...]]:
    rows = []
    for device in one["devices"]:
        for backend, flows in device["backends"].items():
            for flow, counts in flows.items():
                if not counts["operations"] and not counts["in_flight"]:
                    continue
                size = _quantile(counts["sizes"], 0.5)
                typical, slow = (_quantile(counts["times"], share) for share in (0.5, 0.99))
                row: tuple[str, ...] = (
                    device["name"],
                    backend,
                    flow,
                    bytes_text(counts["bytes"]),
                    str(counts["operations"]),
                    str(counts["errors"]),
                    str(counts["in_flight"]),
                    "-" if size is None else bytes_text(int(size)),
                    "-" if typical is None else _duration_text(typical),
                    "-" if slow is None else _duration_text(slow),
                )
                if before is not None:
                    old = before.get((one["mountpoint"], device["name"], backend, flow), (0, 0))
                    rates = ((counts["bytes"] - old[0]) / seconds, (counts["operations"] - old[1]) / seconds)
                    row += (bytes_text(max(int(rates[0]), 0)), f"{max(rates[1], 0.0):.0f}")
                rows.append(row)
    return rows


def _errno_text(number: int) -> str:
    return os.strerror(number) if number < 4096 else f"error {number}"


def _remarks(one: dict[str, Any]) -> list[str]:
    if one.get("error"):
        return []
    gauges = one["gauges"]
    memory = (
        f"pinned memory: {bytes_text(gauges['bounce_pinned_bytes'])} of {bytes_text(gauges['bounce_capacity_bytes'])} "
        f"for copies ({bytes_text(gauges['bounce_used_bytes'])} in use, {gauges['bounce_waits']} waits), "
        f"{bytes_text(gauges['request_pinned_bytes'])} for requests, {bytes_text(gauges['locked_bytes'])} locked; "
        f"{gauges['transfers_active']} copies under way"
    )
    lines = [memory]
    for device in one["devices"]:
        for flow, counts in device["backends"].get("fastpath", {}).items():
            if counts["refusals"]:
                reasons = ", ".join(f"{name} {number}" for name, number in sorted(counts["refusals"].items()))
                lines.append(f"{device['name']} {flow}: not by fastpath: {reasons}")
        if device["gauges"]["health_error"]:
            lines.append(f"{device['name']} is out of service: {_errno_text(device['gauges']['health_error'])}")
    return lines


_RIGHT: Final = frozenset(range(3, len(_HEADERS) + len(_RATES)))


def _print_all(found: Sequence[dict[str, Any]], before: _Counted | None = None, seconds: float = 1.0) -> None:
    if not found:
        print("no gpufs is mounted")
    for place, one in enumerate(found):
        if place:
            print()
        _print(one, before, seconds)


def _print(one: dict[str, Any], before: _Counted | None = None, seconds: float = 1.0) -> None:
    print(printable(_headline(one)))
    rows = _rows(one, before, seconds)
    if rows:
        table(_HEADERS if before is None else _HEADERS + _RATES, rows, _RIGHT)
    elif not one.get("error"):
        print("nothing has been moved yet")
    for line in _remarks(one):
        print(line)


def _watch_json(mountpoint: str | None, timeout: float, pause: float) -> NoReturn:
    while True:
        found = _look(mountpoint, timeout)
        print(json.dumps(found if mountpoint is None else found[0]), flush=True)
        time.sleep(pause)


def _watch(mountpoint: str | None, timeout: float, pause: float) -> NoReturn:
    before: _Counted | None = None
    last = time.monotonic()
    while True:
        found = _look(mountpoint, timeout)
        now = time.monotonic()
        if sys.stdout.isatty():
            click.clear()
        _print_all(found, before, max(now - last, 1e-3))
        print(flush=True)
        before, last = _counted(found), now
        time.sleep(pause)
