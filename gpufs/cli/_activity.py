"""What happens on mounts now: two readings of a mount make rates."""

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from errno import ENOENT
from typing import Any, Final

from gpufs import mounting
from gpufs.cli import _answers, _counters

# A whole copy, whose pieces other backends count.
_WHOLE: Final = "transfer"

Key = tuple[Any, ...]


@dataclass(slots=True)
class Reading:
    """What a mount has said, or why it has not.

    ``at``: seconds of the monotonic clock. ``said``: what `.gpufs/activity` says. ``moved``: bytes so far by what moved
    them, in both directions.
    """

    mountpoint: str
    said: dict[str, Any] = field(default_factory=lambda: {"devices": [], "files": [], "copies": [], "leases": []})
    moved: dict[Key, int] = field(default_factory=dict)
    error: OSError | None = None
    at: float = field(default_factory=time.monotonic)


def collect(entries: Sequence[mounting.MountEntry], show: _answers.Show, timeout: float) -> list[Reading]:
    """A reading of each mount, at most ``timeout`` seconds later. ``show`` draws one."""
    questions = [functools.partial(_question, entry) for entry in entries]
    answers = _answers.ask(questions, lambda answer: show(_reading("", answer)), timeout)
    return [_reading(entry.mountpoint, answer) for entry, answer in zip(entries, answers, strict=True)]


def _question(entry: mounting.MountEntry) -> dict[str, Any]:
    try:
        activity = _answers.control_file(entry, "activity")
    except FileNotFoundError:
        raise OSError(ENOENT, "has no .gpufs/activity: another version of gpufs serves it") from None
    return {"activity": activity, "devices": _counters.of_mount(entry)["devices"]}


def _reading(mountpoint: str, answer: Any) -> Reading:
    if isinstance(answer, OSError):
        return Reading(mountpoint, error=answer)
    reading = Reading(mountpoint, answer["activity"])
    for device in answer["devices"]:
        for flow in ("in", "out"):
            reading.moved[device["name"], flow] = sum(
                flows[flow]["bytes"] for backend, flows in device["backends"].items() if backend != _WHOLE
            )
    for one in reading.said["files"]:
        reading.moved[file_key(one, "in")] = one["bytes_written"]
        reading.moved[file_key(one, "out")] = one["bytes_read"]
    for one in reading.said["copies"]:
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
