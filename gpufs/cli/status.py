"""gpufs status: the mounts of this machine."""

import time
from typing import Any

import click

from gpufs.cli import _mounts, _quotas, _status
from gpufs.cli._errors import Failure, complain, printable
from gpufs.cli._knobs import complete_mounts, knob_options, settings
from gpufs.cli._output import bytes_text, json_text, table


@click.command(name="status")
@click.argument("mountpoint", required=False, shell_complete=complete_mounts)
@click.option("--json", "as_json", is_flag=True, help="Print JSON: a list of mounts, or one object for MOUNTPOINT.")
@click.option(
    "--check",
    is_flag=True,
    help="Print one line. Exit with 0 if the mount answers and its devices are in service, otherwise with 1. Without "
    "MOUNTPOINT: every mount of this machine, and at least one.",
)
@knob_options("status")
def command(mountpoint: str | None, as_json: bool, check: bool, **arguments: Any) -> None:
    """Show the mounts of this machine.

    Lists all of them, or shows MOUNTPOINT in detail. Mounts that are dead or do not answer are marked; of other users'
    mounts it shows what permissions allow.
    """
    if check and as_json:
        raise Failure("--check prints one line: --json does not go with it", 2)
    timeout: float = settings("status", arguments)["status_timeout"]
    if check:
        print(_verdict(_status.collect(_mounts.chosen([] if mountpoint is None else [mountpoint]), timeout)))
        return
    if mountpoint is None:
        found = _status.collect(_mounts.chosen(), timeout)
        if as_json:
            print(json_text(found))
        elif found:
            _print_list(found)
        else:
            print("no gpufs is mounted")
        for status in found:
            if status["state"] == "error" and not as_json:
                complain(f"{status['mountpoint']}: {status['error']}")
        return
    (status,) = _status.collect([_mounts.find(mountpoint)], timeout)
    if as_json:
        print(json_text(status))
    else:
        _print_one(status)
    if status["state"] != "ok":
        raise Failure(f"{status['mountpoint']}: {status['error']}")


def _verdict(found: list[dict[str, Any]]) -> str:
    """What --check prints. Failure if a mount does not work, if a device is out of service, or if there is no mount."""
    if not found:
        raise Failure("no gpufs is mounted")
    for status in found:
        if status["state"] != "ok":
            raise Failure(f"{status['mountpoint']}: {status['error']}")
        for device in status["devices"]:
            if device.get("health") not in ("good", None):
                raise Failure(f"{status['mountpoint']}: {device['name']}: {device['health']}")
    return ", ".join(f"{printable(one['mountpoint'])} ok ({len(one['devices'])} x {one['driver']})" for one in found)


def _text(value: object) -> str:
    return "-" if value is None or value == "" else str(value)


def _print_list(mounts: list[dict[str, Any]]) -> None:
    rows = []
    for status in mounts:
        devices = status["devices"]
        known = status["state"] == "ok"
        rows.append(
            (
                status["mountpoint"],
                status["state"],
                _text(status["pid"]),
                _text(status["driver"]),
                str(len(devices)) if known else "-",
                bytes_text(sum(device["held_bytes"] for device in devices)) if known else "-",
                bytes_text(sum(device["total_bytes"] for device in devices)) if known else "-",
                _text(status["transport"]),
            )
        )
    headers = ("MOUNTPOINT", "STATE", "PID", "DRIVER", "DEVICES", "USED", "SIZE", "TRANSPORT")
    table(headers, rows, right=frozenset({2, 4, 5, 6}))


def _print_one(status: dict[str, Any]) -> None:
    facts = [(key, _text(status[key])) for key in ("mountpoint", "state", "pid", "driver")]
    why = status.get("statistics", {}).get("transport", {}).get("reason")
    facts.append(("transport", f"{status['transport']}: {why}" if why else _text(status["transport"])))
    if "version" in status:
        facts.append(("version", str(status["version"])))
    if "started" in status:
        facts.append(("started", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(status["started"]))))
    width = max(len(key) for key, _ in facts)
    for key, value in facts:
        print(f"{key:<{width}}  {printable(value)}")
    if status["devices"]:
        print()
        rows = [
            (
                device["name"],
                bytes_text(device["total_bytes"]),
                bytes_text(device["held_bytes"]),
                bytes_text(device["free_bytes"]),
                _text(device.get("files")),
                _text(device.get("health")),
                _text(device.get("description")),
            )
            for device in status["devices"]
        ]
        table(("DEVICE", "SIZE", "USED", "FREE", "FILES", "HEALTH", "IS"), rows, right=frozenset({1, 2, 3, 4}))
    _quotas.print_limits([status])
