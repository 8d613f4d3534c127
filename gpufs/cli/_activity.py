"""What happens on mounts now: two readings of a mount make rates."""

import functools
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from errno import ENOENT, EPROTO
from typing import Any, Final

from gpufs import mounting
from gpufs.cli import _counters, _mounts
from gpufs.cli._leases import LEASES
from gpufs.cli._untrusted import SIZE, TIME, items, maybe, parse, record, text

_FILE: Final = ".gpufs/activity"
_SEPARATOR: Final = b"\0"  # is in no JSON text
_DEVICE: Final = record(
    name=text, description=text, total_bytes=SIZE, held_bytes=SIZE, free_bytes=SIZE, files=SIZE, health=text
)
_BUSY: Final = record(path=maybe(text), inode=SIZE, uid=SIZE, size=SIZE, bytes_read=SIZE, bytes_written=SIZE)
_COPY: Final = record(
    source=text, destination=text, pid=SIZE, uid=SIZE, program=text, total=SIZE, moved=SIZE, since=TIME
)
_USED: Final = record(devices=items(_DEVICE), files=items(_BUSY), copies=items(_COPY))
# A whole copy, whose pieces other backends count.
_WHOLE: Final = "transfer"

Key = tuple[Any, ...]


@dataclass(slots=True)
class Reading:
    """What a mount has said, or why it has not.

    ``at``: seconds of the monotonic clock. ``moved``: bytes so far by what moved them, in both directions.
    """

    mountpoint: str
    at: float
    error: OSError | None = None
    devices: list[dict[str, Any]] = field(default_factory=list)
    files: list[dict[str, Any]] = field(default_factory=list)
    copies: list[dict[str, Any]] = field(default_factory=list)
    leases: list[dict[str, Any]] = field(default_factory=list)
    moved: dict[Key, int] = field(default_factory=dict)


def collect(entries: Sequence[mounting.MountEntry], timeout: float) -> list[Reading]:
    """A reading of each mount, at most ``timeout`` seconds later."""
    answers = _mounts.ask([functools.partial(_content, entry) for entry in entries], timeout)
    return [_reading(entry.mountpoint, answer) for entry, answer in zip(entries, answers, strict=True)]


def _content(entry: mounting.MountEntry) -> bytes:
    return _SEPARATOR.join([_counters.content(entry), _mounts.content_of(os.path.join(entry.mountpoint, _FILE))])


def _reading(mountpoint: str, answer: bytes | OSError) -> Reading:
    reading = Reading(mountpoint, time.monotonic())
    if isinstance(answer, OSError):
        reading.error = answer
        if answer.errno == ENOENT:
            reading.error = OSError(ENOENT, f"has no {_FILE}: another version of gpufs serves it")
        return reading
    counters, _, activity = answer.partition(_SEPARATOR)
    try:
        counted, said = _counters.checked(counters), parse(activity, _USED)
        leases = parse(activity, LEASES)["leases"]
    except ValueError as error:
        reading.error = OSError(EPROTO, f"{_FILE} is not understood: {error}")
        return reading
    reading.devices, reading.files, reading.copies, reading.leases = (
        said["devices"],
        said["files"],
        said["copies"],
        leases,
    )
    for device in counted["devices"]:
        for flow in ("in", "out"):
            reading.moved[device["name"], flow] = sum(
                flows[flow]["bytes"]
                for backend, flows in device["backends"].items()
                if backend != _WHOLE and flow in flows
            )
    for one in reading.files:
        reading.moved[file_key(one, "in")] = one["bytes_written"]
        reading.moved[file_key(one, "out")] = one["bytes_read"]
    for one in reading.copies:
        reading.moved[copy_key(one)] = one["moved"]
    return reading


def file_key(one: dict[str, Any], flow: str) -> Key:
    """The key in Reading.moved of a file's bytes in one direction."""
    return ("file", one["inode"], flow)


def copy_key(one: dict[str, Any]) -> Key:
    """The key in Reading.moved of a copy."""
    return ("copy", one["pid"], one["since"], one["source"], one["destination"])


def rate(now: Reading, before: Reading | None, key: Key) -> float | None:
    """Bytes a second between two readings of a mount; None if one of them does not have the key."""
    if before is None or key not in before.moved or key not in now.moved:
        return None
    return max(now.moved[key] - before.moved[key], 0) / max(now.at - before.at, 1e-3)
