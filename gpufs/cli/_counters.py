"""The counters of mounts, from their files or as the mounts report them."""

import functools
import json
import os
from collections.abc import Sequence
from errno import ENOENT
from typing import Any, Final

from gpufs import mounting, statistics
from gpufs.cli import _mounts
from gpufs.cli._errors import Failure
from gpufs.cli._untrusted import SIZE, TIME, items, maybe, numeric, parse, record, text, values

_FILE: Final = ".gpufs/stats"
# What the commands use of the counters; there may be more.
_BUCKETS: Final = items(lambda value: isinstance(value, list) and len(value) == 2 and all(map(maybe(SIZE), value)))
_COUNTS: Final = record(
    bytes=SIZE,
    operations=SIZE,
    errors=SIZE,
    in_flight=SIZE,
    seconds=SIZE,
    refusals=values(SIZE),
    sizes=_BUCKETS,
    times=_BUCKETS,
)
_DEVICE: Final = record(
    name=text,
    gauges=record(**dict.fromkeys(statistics.DEVICE_GAUGES, SIZE)),
    backends=values(values(_COUNTS)),
    transfers=values(record(**dict.fromkeys(statistics.DETAILS, SIZE))),
)
_USED: Final = record(
    pid=SIZE,
    alive=numeric(2),
    version=maybe(text),
    driver=maybe(text),
    started=TIME,
    dead_since=maybe(TIME),
    gauges=record(**dict.fromkeys(statistics.ENGINE_GAUGES, SIZE)),
    devices=items(_DEVICE),
)


def collect(mountpoints: Sequence[str], timeout: float) -> list[dict[str, Any]]:
    """The counters of the mounts at these paths, or of all, at most ``timeout`` seconds later.

    Those that cannot be read have "error" and no devices. Other processes read them: a mount, or a folder of counters
    that another user has made, may not answer. Failure if nothing is mounted at a path, and nothing was left there by
    a mount whose process died.
    """
    if not mountpoints:
        return _of_mounts(_mounts.chosen(), timeout)
    return [found for path in mountpoints for found in _at(path, timeout)]


def _at(path: str, timeout: float) -> list[dict[str, Any]]:
    try:
        entry = _mounts.find(path)
    except Failure:
        (left,) = _mounts.ask([functools.partial(_left_behind, os.path.realpath(path))], timeout)
        if isinstance(left, OSError):
            raise
        return [json.loads(left)]
    return _of_mounts([entry], timeout)


def _of_mounts(entries: Sequence[mounting.MountEntry], timeout: float) -> list[dict[str, Any]]:
    answers = _mounts.ask([functools.partial(content, entry) for entry in entries], timeout)
    return [_answered(entry, answer) for entry, answer in zip(entries, answers, strict=True)]


def _left_behind(mountpoint: str) -> bytes:
    """The last counters of a mount of ours that is gone, as JSON. OSError ENOENT without them."""
    left = statistics.read_left_behind(mountpoint, os.getuid())
    if left is None:
        raise FileNotFoundError(ENOENT, os.strerror(ENOENT))
    return json.dumps(left).encode()


def content(entry: mounting.MountEntry) -> bytes:
    """The counters as JSON: from their file if that can be read, otherwise from the mount, which may hang. OSError."""
    try:
        return json.dumps(statistics.read_mount(entry.device, entry.uid, entry.mountpoint)).encode()
    except (OSError, statistics.StatisticsError):
        return _mounts.content_of(os.path.join(entry.mountpoint, _FILE))


def checked(said: bytes) -> dict[str, Any]:
    """The counters in a mount's answer. ValueError if they are not understood."""
    if parse(said, record()).get("format") != statistics.VERSION:
        raise ValueError("it has another format: another version of gpufs serves the mount")
    return parse(said, _USED)


def _answered(entry: mounting.MountEntry, answer: bytes | OSError) -> dict[str, Any]:
    """The counters in a mount's answer, or the reason why they are missing."""
    if isinstance(answer, bytes):
        try:
            said = checked(answer)
            said.pop("error", None)
            return {**said, "mountpoint": entry.mountpoint}
        except ValueError as error:
            problem = f"{_FILE} is not understood: {error}"
    else:
        owner = "" if _mounts.is_trusted(entry) else f" (it is user {entry.uid}'s)"
        problem = f"its statistics cannot be read: {answer.strerror}{owner}"
    return {"mountpoint": entry.mountpoint, "error": problem, "devices": [], "alive": None, "pid": None}
