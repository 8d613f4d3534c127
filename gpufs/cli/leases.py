"""gpufs leases: the programs that have memory of a mount attached, or show theirs as files."""

import time
from typing import Any

import click

from gpufs.cli import _leases, _mounts
from gpufs.cli._errors import Failure, complain
from gpufs.cli._knobs import complete_mounts, knob_options, settings
from gpufs.cli._output import age_text, bytes_text, json_text, table


@click.command(name="leases")
@click.argument("mountpoints", metavar="[MOUNTPOINT...]", nargs=-1, shell_complete=complete_mounts)
@click.option("--json", "as_json", is_flag=True, help="Print JSON: a list with an object for each lease.")
@knob_options("leases")
def command(mountpoints: tuple[str, ...], as_json: bool, **arguments: Any) -> None:
    """Show the programs that have files attached, or have registered memory of theirs as files.

    Of all mounts, or of the given MOUNTPOINTs. Users other than root and the one who mounted see their own programs.
    A file's path is the one at which the program attached it, as the program sees it.
    """
    timeout: float = settings("leases", arguments)["status_timeout"]
    entries = _mounts.chosen(mountpoints)
    found = _leases.collect(entries, timeout)
    now = time.time()
    rows: list[dict[str, Any]] = []
    silent = 0
    for entry, leases in zip(entries, found, strict=True):
        if isinstance(leases, OSError):
            silent += 1
            complain(f"{entry.mountpoint}: {leases.strerror}")
            continue
        rows += [
            {"mountpoint": entry.mountpoint, **lease, "age_seconds": max(0.0, now - lease["since"])} for lease in leases
        ]
    if as_json:
        print(json_text(rows))
    elif rows:
        _print(rows)
    elif not silent:
        print("nothing is attached" if entries else "no gpufs is mounted")
    if mountpoints and silent:
        raise Failure(f"{silent} of {len(entries)} mounts did not answer")


def _print(leases: list[dict[str, Any]]) -> None:
    headers = ("PATH", "PID", "USER", "PROGRAM", "MODE", "SIZE", "AGE")
    rows = [
        (
            lease["path"],
            str(lease["pid"]),
            str(lease["uid"]),
            lease["program"] or "-",
            lease["mode"] + (" copy" if lease["private"] else ""),
            bytes_text(lease["bytes"]),
            age_text(lease["age_seconds"]),
        )
        for lease in leases
    ]
    table(headers, rows, right=frozenset({1, 2, 5, 6}))
