"""gpufs ls: files with the memory that they hold and the programs that use them."""

import os
import stat
import time
from collections.abc import Mapping, Sequence
from typing import Any

import click

from gpufs import config, mounting
from gpufs.cli import _mounts, _queries
from gpufs.cli._files import Found, files_of, held_bytes, parked_bytes
from gpufs.cli._main import complete_files
from gpufs.cli._options import timeout_option
from gpufs.cli._output import Failure, age_text, bytes_text, complain, json_text, table, user_name
from gpufs.drivers import DEVICE_DIRECTORIES


@click.command(name="ls")
@click.argument("paths", metavar="[PATH...]", nargs=-1, shell_complete=complete_files)
@click.option("-r", "-R", "--recursive", is_flag=True, help="List the files of all directories below, too.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: a list with an object for each file, in bytes.")
@timeout_option(config.STATUS_TIMEOUT)
def command(paths: tuple[str, ...], recursive: bool, as_json: bool, timeout: float) -> None:
    """List files on mounts: device, size, memory held, leases, last use and owner.

    List the given PATHs, or every device directory if none is given. HELD is what `du` counts: less than the size if
    the file has holes, more while memory is preallocated; "in host0" is asleep. A directory shows the sums of all files
    below it. LAST USE is "now" while a program has a file attached, else the later of the last read and the last write
    that the kernel has noted; with relatime it notes about one read a day. LEASES are those that you may see (`gpufs
    leases`).
    """
    entries = list({entry.mountpoint: entry for entry in map(_mount_of, paths)}.values()) if paths else _mounts.chosen()
    whole = {entry.device: entry for entry in _mounts.chosen()}  # where a part alone is bound, no leases are listed
    asked = [whole[device] for device in {entry.device for entry in entries} if device in whole]
    answers = _queries.leases_of(asked, timeout)
    for mountpoint, reason in _mounts.silent(asked, answers, named=bool(paths)):
        complain(f"{mountpoint}: {reason}")
    answer_of = dict(zip((entry.device for entry in asked), answers, strict=True))
    leases: dict[tuple[int, int], list[dict[str, Any]]] = {}
    answering = []
    for entry in entries:
        answer = answer_of.get(entry.device, [])
        if isinstance(answer, OSError):
            continue
        answering.append(entry)
        for lease in answer:
            leases.setdefault((entry.st_dev, lease["inode"]), []).append(lease)
    roots = _below(paths, answering) if paths else [entry.mountpoint for entry in answering]
    by_device = {entry.st_dev: entry for entry in answering}
    rows = [
        _row(found, by_device[found.status.st_dev], leases)
        for root in roots
        for found in files_of(root, recursive=recursive)
        if found.status.st_dev in by_device
    ]
    if as_json:
        print(json_text(rows))
    elif rows:
        _print(rows)
    elif not entries:
        print("no gpufs is mounted")
    if paths and len(roots) < len(paths):
        raise Failure(f"{len(paths) - len(roots)} of {len(paths)} could not be listed")


def _mount_of(path: str) -> mounting.MountEntry:
    """Return the mount that a path is on, found without asking the mount. Failure if it is on none."""
    place = _mounts.absolute(path)
    above = [entry for entry in mounting.mounts() if f"{place}/".startswith(f"{entry.mountpoint.rstrip('/')}/")]
    if not above:
        raise Failure(f"{path}: is not on a gpufs mount (gpufs status lists those)")
    return max(above, key=lambda entry: len(entry.mountpoint))


def _below(paths: Sequence[str], answering: Sequence[mounting.MountEntry]) -> list[str]:
    """Return those of the paths that can be listed. The others are complained about."""
    mountpoints = {entry.mountpoint for entry in answering}
    listable = []
    for path in paths:
        if _mount_of(path).mountpoint not in mountpoints:
            continue
        try:
            os.lstat(path)
            listable.append(_mounts.absolute(path))
        except OSError as error:
            complain(f"{path}: {error.strerror}")
    return listable


def _row(
    found: Found,
    entry: mounting.MountEntry,
    leases: Mapping[tuple[int, int], Sequence[dict[str, Any]]],
) -> dict[str, Any]:
    """Return what is printed of a file; of a directory the sums of the files below it, each counted once."""
    path, status = found.path, found.status
    first = os.path.relpath(path, entry.mountpoint).partition("/")[0]
    is_file = stat.S_ISREG(status.st_mode)
    has_host_memory = os.path.isdir(os.path.join(entry.mountpoint, "host0"))
    files: dict[tuple[int, int], os.stat_result] = {}
    parked = 0
    for each in [found] if is_file else files_of(found.place, recursive=True):
        inode = each.status.st_dev, each.status.st_ino
        if inode not in files:
            files[inode] = each.status
            parked += _parked(each.place) if has_host_memory else 0
    used = [lease for file in files for lease in leases.get(file, ())]
    awake = any(not lease.get("asleep") for lease in used)  # the kernel does not see what these do
    return {
        "path": path,
        "type": "file" if is_file else "directory",
        "device": first if first.startswith(DEVICE_DIRECTORIES) else None,
        "size": sum(each.st_size for each in files.values()),
        "held_bytes": sum(map(held_bytes, files.values())),
        "parked_bytes": parked,
        "leases": [{name: lease[name] for name in ("pid", "program", "mode", "bytes")} for lease in used],
        "last_use": time.time() if awake else max(status.st_atime, status.st_mtime),
        "uid": status.st_uid,
        "owner": user_name(status.st_uid),
    }


def _parked(path: str) -> int:
    try:
        return parked_bytes(path, follow=False) or 0
    except OSError:
        return 0  # removed by now, or of an earlier daemon


def _held_text(row: Mapping[str, Any]) -> str:
    held, parked = bytes_text(row["held_bytes"]), row["parked_bytes"]
    if not parked:
        return held
    return f"{held} in host0" if parked == row["held_bytes"] else f"{held}, {bytes_text(parked)} of it in host0"


def _print(rows: Sequence[dict[str, Any]]) -> None:
    now = time.time()
    lines = [
        (
            row["path"] + ("/" if row["type"] == "directory" else ""),
            row["device"] or "-",
            bytes_text(row["size"]),
            _held_text(row),
            str(len(row["leases"]) or "-"),
            f"{age_text(now - row['last_use'])} ago" if now >= row["last_use"] + 1 else "now",
            row["owner"],
        )
        for row in rows
    ]
    headers = ("PATH", "DEVICE", "SIZE", "HELD", "LEASES", "LAST USE", "OWNER")
    table(headers, lines, frozenset({2, 3, 4, 5}), optional=("OWNER", "DEVICE"))
