"""The status of mounts, as they report it, or as far as it is known without them."""

import functools
import os
from collections.abc import Sequence
from errno import ECONNABORTED, ENOTCONN, ETIMEDOUT
from typing import Any, Final

from gpufs import mounting
from gpufs.cli import _answers, _mounts
from gpufs.cli._output import bytes_text

# errno of reading the status file: state of the mount
_STATES: Final = {ENOTCONN: "dead", ECONNABORTED: "dead", ETIMEDOUT: "no answer"}


def collect(entries: Sequence[mounting.MountEntry], show: _answers.Show, timeout: float) -> list[dict[str, Any]]:
    """The status of each mount, at most ``timeout`` seconds later. ``show`` makes what the command prints of one.

    Every one has mountpoint, source, state ("ok", "private", "dead", "no answer" or "error"), error (text or None),
    pid, driver and devices, None or an empty list where they are not known; one whose state is "ok"
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
    pid = pids[0] if len(pids) == 1 else None
    state, text = _STATES.get(failure.errno or 0, "error"), failure.strerror
    if _mounts.is_private(entry, failure):
        state, text = "private", _mounts.private_text(entry)
        if not pids and os.geteuid() == 0:  # which sees all processes
            state, text = "dead", f"{text}: its process has died"
    return {**_basics(entry, state, text), "pid": pid}


def silent(found: Sequence[dict[str, Any]], *, named: bool) -> list[tuple[str, object]]:
    """The mounts that did not answer, and why. Those that other users keep to themselves only if they are named."""
    fine = ("ok",) if named else ("ok", "private")
    return [(status["mountpoint"], status["error"]) for status in found if status["state"] not in fine]


def memory(device: dict[str, Any]) -> list[str]:
    """Cells of a table: size, used and free memory of a device."""
    return [bytes_text(device[f"{name}_bytes"]) for name in ("total", "held", "free")]


def text(value: object) -> str:
    """A cell of a table."""
    return "-" if value is None or value == "" else str(value)
