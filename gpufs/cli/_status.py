"""The status of mounts, as they report it, or as far as it is known without them."""

import functools
from collections.abc import Sequence
from errno import EACCES, ECONNABORTED, ENOTCONN, EPERM, ETIMEDOUT
from typing import Any, Final

from gpufs import mounting
from gpufs.cli import _answers, _mounts
from gpufs.cli._output import bytes_text

# errno of reading the status file: state of the mount
_STATES: Final = {
    ENOTCONN: "dead",
    ECONNABORTED: "dead",
    EACCES: "no permission",
    EPERM: "no permission",
    ETIMEDOUT: "no answer",
}


def collect(entries: Sequence[mounting.MountEntry], show: _answers.Show, timeout: float) -> list[dict[str, Any]]:
    """The status of each mount, at most ``timeout`` seconds later. ``show`` makes what the command prints of one.

    Every one has mountpoint, source, state ("ok", "dead", "no permission", "no answer" or "error"), error (text or
    None), pid, driver and devices, None or an empty list where they are not known; one whose state is "ok"
    has all that its `.gpufs/status` says.
    """
    questions = [functools.partial(_question, entry) for entry in entries]
    found = _answers.ask(questions, show, timeout)
    return [
        _unknown(entry, answer) if isinstance(answer, OSError) else answer
        for entry, answer in zip(entries, found, strict=True)
    ]


def _basics(entry: mounting.MountEntry, state: str = "ok", error: str | None = None) -> dict[str, Any]:
    return {
        "mountpoint": entry.mountpoint,
        "source": entry.source,
        "state": state,
        "error": error,
        "pid": None,
        "driver": None,
        "devices": [],
    }


def _question(entry: mounting.MountEntry) -> dict[str, Any]:
    basics = _basics(entry)
    known = {name: basics[name] for name in ("mountpoint", "source", "state", "error")}
    return {**basics, **_answers.control_file(entry, "status"), **known}


def _unknown(entry: mounting.MountEntry, failure: OSError) -> dict[str, Any]:
    pids = _mounts.daemons(entry.mountpoint, entry)
    basics = _basics(entry, _STATES.get(failure.errno or 0, "error"), failure.strerror)
    return {**basics, "pid": pids[0] if len(pids) == 1 else None}


def silent(found: Sequence[dict[str, Any]]) -> list[tuple[str, object]]:
    """The mounts that did not answer, and why."""
    return [(status["mountpoint"], status["error"]) for status in found if status["state"] != "ok"]


def memory(device: dict[str, Any]) -> list[str]:
    """Cells of a table: size, used and free memory of a device."""
    return [bytes_text(device[f"{name}_bytes"]) for name in ("total", "held", "free")]


def text(value: object) -> str:
    """A cell of a table."""
    return "-" if value is None or value == "" else str(value)
