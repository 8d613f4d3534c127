"""The counters of mounts, from their files or as the mounts report them."""

import functools
import os
from collections.abc import Sequence
from errno import ENOENT
from typing import Any

from gpufs import mounting, statistics
from gpufs.cli import _answers, _mounts
from gpufs.cli._errors import Failure


def collect(mountpoints: Sequence[str], show: _answers.Show, timeout: float) -> list[dict[str, Any]]:
    """The counters of the mounts at these paths, or of all, at most ``timeout`` seconds later.

    ``show`` makes what the command prints of one. Without paths, private mounts of other users are left out. Those that
    cannot be read have "error" and no devices. Other processes read them: a mount, or a folder of counters that another
    user has made, may not answer. Failure if nothing is mounted at a path, and nothing was left there by a mount whose
    process died.
    """
    if not mountpoints:
        return _of_mounts(_mounts.chosen(), show, timeout, private=False)
    return [found for path in mountpoints for found in _at(path, show, timeout)]


def _at(path: str, show: _answers.Show, timeout: float) -> list[dict[str, Any]]:
    try:
        entry = _mounts.find(path)
    except Failure:
        (left,) = _answers.ask([functools.partial(_left_behind, os.path.realpath(path))], show, timeout)
        if isinstance(left, OSError):
            raise
        return [left]
    return _of_mounts([entry], show, timeout)


def _of_mounts(
    entries: Sequence[mounting.MountEntry], show: _answers.Show, timeout: float, *, private: bool = True
) -> list[dict[str, Any]]:
    """The counters of mounts, without those that other users keep to themselves unless ``private``."""
    answers = _answers.ask([functools.partial(of_mount, entry) for entry in entries], show, timeout)
    return [
        _answered(entry, answer)
        for entry, answer in zip(entries, answers, strict=True)
        if private or not (isinstance(answer, OSError) and _mounts.is_private(entry, answer))
    ]


def _left_behind(mountpoint: str) -> dict[str, Any]:
    """The last counters of a mount of ours that is gone. OSError ENOENT without them."""
    left = statistics.read_left_behind(mountpoint, os.getuid())
    if left is None:
        raise FileNotFoundError(ENOENT, os.strerror(ENOENT))
    return left


def of_mount(entry: mounting.MountEntry) -> dict[str, Any]:
    """The counters: from their file if that can be read, otherwise from the mount, which may hang. OSError."""
    try:
        found = statistics.read_mount(entry.device, entry.uid, entry.mountpoint)
    except FileNotFoundError:
        found = _answers.control_file(entry, "stats")
        if found.get("format") != statistics.VERSION:
            raise ValueError("it has another format: another version of gpufs serves the mount") from None
        found.pop("error", None)
    return {**found, "mountpoint": entry.mountpoint}


def _answered(entry: mounting.MountEntry, answer: Any) -> dict[str, Any]:
    """The counters of a mount, or the reason why they are missing."""
    if not isinstance(answer, OSError):
        found: dict[str, Any] = answer
        return found
    owner = "" if _mounts.is_trusted(entry) else f" (it is user {entry.uid}'s)"
    problem = f"its statistics cannot be read: {answer.strerror}{owner}"
    return {"mountpoint": entry.mountpoint, "error": problem, "devices": [], "alive": None, "pid": None}
