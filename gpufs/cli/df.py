"""gpufs df: the memory of the devices."""

from typing import Any

import click

from gpufs.cli import _mounts, _quotas, _status
from gpufs.cli._errors import Failure, complain
from gpufs.cli._knobs import complete_mounts, knob_options, settings
from gpufs.cli._output import bytes_text, json_text, table


@click.command(name="df")
@click.argument("mountpoints", metavar="[MOUNTPOINT...]", nargs=-1, shell_complete=complete_mounts)
@click.option("--json", "as_json", is_flag=True, help="Print JSON: a list with an object for each device, in bytes.")
@knob_options("df")
def command(mountpoints: tuple[str, ...], as_json: bool, **arguments: Any) -> None:
    """Show the memory of each device, and the limits of users and directories.

    Of all mounts, or of the given MOUNTPOINTs.
    """
    timeout: float = settings("df", arguments)["status_timeout"]
    entries = _mounts.chosen(mountpoints)
    found = _status.collect(entries, timeout)
    devices = [_device(status, device) for status in found for device in status["devices"]]
    if as_json:
        print(json_text(devices))
    elif devices:
        _print(devices)
        _quotas.print_limits(found)
    elif not entries:
        print("no gpufs is mounted")
    silent = [status for status in found if status["state"] != "ok"]
    for status in silent:
        complain(f"{status['mountpoint']}: {status['error']}")
    if mountpoints and silent:
        raise Failure(f"{len(silent)} of {len(found)} mounts did not answer")


def _device(status: dict[str, Any], device: dict[str, Any]) -> dict[str, Any]:
    path = f"{status['mountpoint'].rstrip('/')}/{device['name']}"
    return {
        "path": path,
        "mountpoint": status["mountpoint"],
        "device": device["name"],
        "description": device.get("description"),
        "uuid": device.get("uuid"),
        "total_bytes": device["total_bytes"],
        "used_bytes": device["held_bytes"],
        "free_bytes": device["free_bytes"],
        "files": device.get("files"),
        "quotas": [one for one in _quotas.of_status(status) if (one["path"] + "/").startswith(path + "/")],
    }


def _print(devices: list[dict[str, Any]]) -> None:
    rows = []
    for device in devices:
        usable = device["used_bytes"] + device["free_bytes"]
        rows.append(
            (
                device["path"],
                bytes_text(device["total_bytes"]),
                bytes_text(device["used_bytes"]),
                bytes_text(device["free_bytes"]),
                f"{100 * device['used_bytes'] / usable:.0f}%" if usable else "-",
                "-" if device["files"] is None else str(device["files"]),
                str(device["description"] or "-"),
            )
        )
    headers = ("DEVICE", "SIZE", "USED", "FREE", "USE%", "FILES", "IS")
    table(headers, rows, right=frozenset({1, 2, 3, 4, 5}))
