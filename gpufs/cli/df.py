"""gpufs df: the memory of the devices."""

from collections.abc import Sequence
from typing import Any

import click

from gpufs import config
from gpufs.cli import _answers, _mounts, _queries
from gpufs.cli._options import complete_mounts, timeout_option
from gpufs.cli._output import json_text, table_lines


@click.command(name="df")
@click.argument("mountpoints", metavar="[MOUNTPOINT...]", nargs=-1, shell_complete=complete_mounts)
@click.option("--json", "as_json", is_flag=True, help="Print JSON: a list with an object for each device, in bytes.")
@timeout_option(config.STATUS_TIMEOUT)
def command(mountpoints: tuple[str, ...], as_json: bool, timeout: float) -> None:
    """Show the memory of each device, and the limits of users and directories.

    Of all mounts, or of the given MOUNTPOINTs.
    """
    statuses = _queries.statuses(_mounts.chosen(mountpoints), lambda status: _lines([status]), timeout)
    if as_json:
        print(json_text([device for status in statuses for device in _devices(status)]))
    elif lines := _lines(statuses):
        print("\n".join(lines))
    elif not statuses:
        print("no gpufs is mounted")
    _answers.finish(_queries.silent_statuses(statuses, named=bool(mountpoints)), len(statuses), named=bool(mountpoints))


def _devices(status: dict[str, Any]) -> list[dict[str, Any]]:
    quotas = _queries.quotas_of(status)
    root = status["mountpoint"].rstrip("/")
    return [
        {
            "path": f"{root}/{device['name']}",
            "mountpoint": status["mountpoint"],
            "device": device["name"],
            "description": device.get("description"),
            "uuid": device.get("uuid"),
            "total_bytes": device["total_bytes"],
            "used_bytes": device["held_bytes"],
            "free_bytes": device["free_bytes"],
            "files": device.get("files"),
            "quotas": [quota for quota in quotas if f"{quota['path']}/".startswith(f"{root}/{device['name']}/")],
        }
        for device in status["devices"]
    ]


def _lines(statuses: Sequence[dict[str, Any]]) -> list[str]:
    rows = []
    for status in statuses:
        for device in status["devices"]:
            usable = device["held_bytes"] + device["free_bytes"]
            rows.append(
                (
                    f"{status['mountpoint'].rstrip('/')}/{device['name']}",
                    *_queries.memory_cells(device),
                    f"{100 * device['held_bytes'] / usable:.0f}%" if usable else "-",
                    _queries.cell(device.get("files")),
                    _queries.cell(device.get("description")),
                )
            )
    headers = ("DEVICE", "SIZE", "USED", "FREE", "USE%", "FILES", "DESCRIPTION")
    return table_lines(headers, rows, right=frozenset({1, 2, 3, 4, 5})) + _queries.limit_lines(statuses) if rows else []
