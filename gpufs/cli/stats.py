"""gpufs stats: what the mounts of this machine have moved, also those whose process was killed."""

import os
from collections.abc import Sequence
from typing import Any, Final

import click

from gpufs import config
from gpufs.cli import _queries
from gpufs.cli._options import complete_mounts, timeout_option
from gpufs.cli._output import Failure, bytes_text, clock_text, json_text, printable, table_lines


@click.command(name="stats")
@click.argument("mountpoint", required=False, shell_complete=complete_mounts)
@click.option("--json", "as_json", is_flag=True, help="Print JSON: a list of mounts, or one object for MOUNTPOINT.")
@timeout_option(config.STATUS_TIMEOUT)
def command(mountpoint: str | None, as_json: bool, timeout: float) -> None:
    """Show what the mounts of this machine have moved.

    All of them, or MOUNTPOINT: bytes, operations and failures by device and by the way that the bytes took, pinned
    memory, and why copies did not take the fastpath. `gpufs top` shows rates. The last counters of a mount whose
    process was killed stay until `gpufs umount` of it, your next mount there, or for an hour.
    """
    counted = _queries.counters([] if mountpoint is None else [mountpoint], _lines, timeout)
    if as_json:
        print(json_text(counted if mountpoint is None else counted[0]))
    else:
        print("\n\n".join("\n".join(_lines(mount)) for mount in counted) if counted else "no gpufs is mounted")
    failed = [mount for mount in counted if mount.get("error")]
    if mountpoint is not None and failed:
        raise Failure(f"{failed[0]['mountpoint']}: {failed[0]['error']}")


def _headline(mount: dict[str, Any]) -> str:
    if mount.get("error"):
        return f"{mount['mountpoint']}: {mount['error']}"
    if mount["alive"]:
        since = clock_text(mount["started"])
        return f"{mount['mountpoint']}: process {mount['pid']}, driver {mount['driver']}, since {since}"
    return (
        f"{mount['mountpoint']}: its process ({mount['pid']}) is dead since {clock_text(mount['dead_since'])}; "
        "these are its last counters"
    )


def _duration_text(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def _quantile(buckets: Sequence[Sequence[Any]], share: float) -> float | None:
    """Return the upper bound of the bucket in which this share of all values ends; None beyond the last bound."""
    wanted = share * sum(number for _, number in buckets)
    below = 0
    for bound, number in buckets:
        below += number
        if below >= wanted:
            return None if bound is None else float(bound)
    return None


_HEADERS: Final = ("DEVICE", "BACKEND", "DIR", "BYTES", "OPS", "ERRORS", "RUNNING", "SIZE<=", "p50<=", "p99<=")


def _rows(mount: dict[str, Any]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for device in mount["devices"]:
        for backend, flows in device["backends"].items():
            for flow, counts in flows.items():
                if not counts["operations"] and not counts["in_flight"]:
                    continue
                size = _quantile(counts["sizes"], 0.5)
                typical, slow = (_quantile(counts["times"], share) for share in (0.5, 0.99))
                rows.append(
                    (
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
                )
    return rows


def _lines(mount: dict[str, Any]) -> list[str]:
    lines = [printable(_headline(mount))]
    if mount.get("error"):
        return lines
    rows = _rows(mount)
    lines += table_lines(_HEADERS, rows, frozenset(range(3, len(_HEADERS)))) if rows else ["nothing has been moved yet"]
    gauges = mount["gauges"]
    lines.append(
        f"pinned memory: {bytes_text(gauges['bounce_pinned_bytes'])} of {bytes_text(gauges['bounce_capacity_bytes'])} "
        f"for copies ({bytes_text(gauges['bounce_used_bytes'])} in use, {mount['counters']['bounce_waits']} waits), "
        f"{bytes_text(gauges['request_pinned_bytes'])} for requests, {bytes_text(gauges['locked_bytes'])} locked; "
        f"{gauges['transfers_active']} copies under way"
    )
    for device in mount["devices"]:
        for flow, counts in device["backends"].get("fastpath", {}).items():
            if counts["refusals"]:
                reasons = ", ".join(f"{name} {number}" for name, number in sorted(counts["refusals"].items()))
                lines.append(printable(f"{device['name']} {flow}: not by fastpath: {reasons}"))
        if device["gauges"]["health_error"]:
            lines.append(f"{device['name']} is out of service: {os.strerror(device['gauges']['health_error'])}")
    return lines
