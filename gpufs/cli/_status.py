"""The status of mounts, as they report it, or as far as it is known without them."""

import os
from collections.abc import Sequence
from errno import EACCES, ECONNABORTED, ENOTCONN, EPERM, ETIMEDOUT
from typing import Any, Final

from gpufs import mounting
from gpufs.cli import _mounts
from gpufs.cli._untrusted import SIZE, TIME, items, maybe, parse, record, text

# errno of reading the status file: state of the mount
_STATES: Final = {
    ENOTCONN: "dead",
    ECONNABORTED: "dead",
    EACCES: "no permission",
    EPERM: "no permission",
    ETIMEDOUT: "no answer",
}
# The part of a status that the commands show.
_BASICS: Final = record(
    started=TIME,
    devices=items(record(name=text, total_bytes=SIZE, held_bytes=SIZE, free_bytes=SIZE)),
)
_QUOTAS: Final = items(record(path=text, uid=maybe(SIZE), used_bytes=SIZE, limit_bytes=maybe(SIZE)))


def _is_usable(status: Any) -> bool:
    return _BASICS(status) and _QUOTAS(status.get("quotas", []))  # earlier versions have no quotas


def collect(entries: "Sequence[mounting.MountEntry]", timeout: float) -> list[dict[str, Any]]:
    """The status of each mount, at most ``timeout`` seconds later.

    Every one has mountpoint, source, state ("ok", "dead", "no permission", "no answer" or "error"), error (text or
    None), pid, driver, transport and devices, None or an empty list where they are not known; one whose state is "ok"
    has all that its `.gpufs/status` says.
    """
    files = _mounts.read_files([os.path.join(entry.mountpoint, _mounts.STATUS_FILE) for entry in entries], timeout)
    return [_one(entry, content) for entry, content in zip(entries, files, strict=True)]


def _one(entry: "mounting.MountEntry", content: bytes | OSError) -> dict[str, Any]:
    status: dict[str, Any] = {
        "mountpoint": entry.mountpoint,
        "source": entry.source,
        "state": "ok",
        "error": None,
        "pid": None,
        "driver": None,
        "transport": None,
        "devices": [],
    }
    if isinstance(content, bytes):
        try:
            said = parse(content, _is_usable)
        except ValueError as error:
            status.update(state="error", error=f"{_mounts.STATUS_FILE} is not understood: {error}")
        else:
            known = {name: status[name] for name in ("mountpoint", "source", "state", "error")}
            return {**status, **said, **known}
    else:
        status.update(state=_STATES.get(content.errno or 0, "error"), error=content.strerror)
    pids = _mounts.daemons(entry.mountpoint, entry)
    if len(pids) == 1:
        status["pid"] = pids[0]
    return status
