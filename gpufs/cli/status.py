"""gpufs status: the mounts of this machine."""

from typing import Any

import click

from gpufs import config
from gpufs.cli import _mounts, _queries
from gpufs.cli._options import complete_mounts, timeout_option
from gpufs.cli._output import Failure, bytes_text, clock_text, complain, json_text, printable, table, table_lines
from gpufs.cli._queries import cell, deaths_text, memory_cells


@click.command(name="status")
@click.argument("mountpoint", required=False, shell_complete=complete_mounts)
@click.option("--json", "as_json", is_flag=True, help="Print JSON: a list of mounts, or one object for MOUNTPOINT.")
@click.option(
    "--check",
    is_flag=True,
    help="Print one line. Exit with 0 if the mount answers and its devices are in service, otherwise with 1. Without "
    "MOUNTPOINT: every mount of this machine, and at least one. Of another user's private mount only root checks more "
    "than that it exists: that its process lives.",
)
@timeout_option(config.STATUS_TIMEOUT)
def command(mountpoint: str | None, as_json: bool, check: bool, timeout: float) -> None:
    """Show the mounts of this machine.

    Lists all of them, or shows MOUNTPOINT in detail. Mounts that are dead or do not answer are marked; of other users'
    mounts it shows what permissions allow.
    """
    if check and as_json:
        raise Failure("--check prints one line: --json does not go with it", 2)
    try:
        entries = _mounts.chosen([] if mountpoint is None else [mountpoint])
    except Failure:
        if mountpoint is None or (remains := _queries.remains(mountpoint, timeout)) is None:
            raise
        raise Failure(f"{mountpoint}: {remains}") from None
    statuses = _queries.statuses(entries, lambda status: (_row(status), _details(status)), timeout)
    if check:
        print(_verdict(statuses))
        return
    if mountpoint is None:
        statuses += _queries.detached()
        if as_json:
            print(json_text(statuses))
            return
        if statuses:
            headers = ("MOUNTPOINT", "STATE", "PID", "DRIVER", "DEVICES", "USED", "SIZE")
            table(headers, [_row(status) for status in statuses], right=frozenset({2, 4, 5, 6}))
        else:
            print("no gpufs is mounted")
        for status in statuses:
            if status["state"] not in ("ok", "private"):
                complain(f"{status['mountpoint']}: {status['error']}")
        return
    (status,) = statuses
    print(json_text(status) if as_json else "\n".join(_details(status)))
    if status["state"] != "ok":
        raise Failure(f"{status['mountpoint']}: {status['error']}")


def _verdict(statuses: list[dict[str, Any]]) -> str:
    """Return what --check prints. Failure if a mount does not work, a device is out of service, or nothing mounted."""
    if not statuses:
        raise Failure("no gpufs is mounted")
    for status in statuses:
        if status["state"] not in ("ok", "private"):
            raise Failure(f"{status['mountpoint']}: {status['error']}")
        for device in status["devices"]:
            if device.get("health") not in ("good", None):
                raise Failure(f"{status['mountpoint']}: {device['name']}: {device['health']}")
    return ", ".join(printable(f"{status['mountpoint']} {_state(status)}") for status in statuses)


def _state(status: dict[str, Any]) -> str:
    if status["state"] == "private":
        return str(status["error"])
    return f"ok ({len(status['devices'])} x {status['driver']})"


def _row(status: dict[str, Any]) -> tuple[str, ...]:
    devices = status["devices"]
    known = status["state"] == "ok"
    deaths = status.get("deaths", {}).get("count")
    state = status["error"] if status["state"] == "private" else status["state"]
    return (
        status["mountpoint"],
        f"{state}, {deaths} deaths" if deaths else state,
        cell(status["pid"]),
        cell(status["driver"]),
        str(len(devices)) if known else "-",
        bytes_text(sum(device["held_bytes"] for device in devices)) if known else "-",
        bytes_text(sum(device["total_bytes"] for device in devices)) if known else "-",
    )


def _details(status: dict[str, Any]) -> list[str]:
    facts = [(key, cell(status[key])) for key in ("mountpoint", "state", "pid", "driver")]
    if "version" in status:
        facts.append(("version", str(status["version"])))
    if "started" in status:
        facts.append(("started", clock_text(status["started"])))
    if "survives" in status:
        facts.append(("survives", "yes" if status["survives"] else f"no: {status.get('survival_obstacle', '-')}"))
    if deaths := deaths_text(status):
        facts.append(("deaths", deaths))
    width = max(len(key) for key, _ in facts)
    lines = [f"{key:<{width}}  {printable(value)}" for key, value in facts]
    if status["devices"]:
        rows = [
            (
                device["name"],
                *memory_cells(device),
                *(cell(device.get(key)) for key in ("files", "health", "description")),
            )
            for device in status["devices"]
        ]
        headers = ("DEVICE", "SIZE", "USED", "FREE", "FILES", "HEALTH", "DESCRIPTION")
        lines += ["", *table_lines(headers, rows, right=frozenset({1, 2, 3, 4}))]
    return lines + _queries.limit_lines([status])
