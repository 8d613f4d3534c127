"""Asks mounts for their status, leases, limits and counters, for people and programs."""

import functools
import os
import time
from collections.abc import Sequence
from errno import ETIMEDOUT
from typing import Any, Final

from gpufs import mounting
from gpufs.cli import _answers, _mounts
from gpufs.cli._output import MOST_NAMES, Failure, age_text, bytes_text, clock_text, table_lines, user_name
from gpufs.client._daemons import control_file
from gpufs.exceptions import DEAD

# errno of reading the status file: state of the mount
_STATES: Final = {**dict.fromkeys(DEAD, "dead"), ETIMEDOUT: "no answer"}
_REMEDIES: Final = {
    "dead": "gpufs umount {0} removes the mount, and gpufs mount {0} makes a new one",
    "no answer": "kill -9 of its daemon lets another one take over, gpufs umount --force {0} ends it with its files",
}


# ---- status ----


def statuses(entries: Sequence[mounting.MountEntry], show: _answers.Show, timeout: float) -> list[dict[str, Any]]:
    """Return the status of each mount, at most ``timeout`` seconds later. ``show`` makes what is printed of one.

    Every one has mountpoint, source, state ("ok", "private", "dead", "no answer" or "error"), error (text or None),
    pid, driver and devices, None or an empty list where they are not known; one whose state is "ok"
    has all that its `.gpufs/status` says.
    """
    questions = [functools.partial(_status_of, entry) for entry in entries]
    answers = _answers.ask(questions, show, timeout)
    return [
        _unknown(entry, answer) if isinstance(answer, OSError) else answer
        for entry, answer in zip(entries, answers, strict=True)
    ]


def detached() -> list[dict[str, Any]]:
    """Return the status, as of :func:`statuses`, of mounts that are no longer visible while programs use them."""
    visible = {entry.mountpoint for entry in mounting.mounts()}
    found: list[dict[str, Any]] = []
    for path, pid in _mounts.detached():
        # A command with this path would end a later mount there.
        remedy = f"kill {pid}" if path in visible else f"gpufs umount --force {path}"
        status = {"mountpoint": path, "source": None, "state": "detached", "error": f"in use: {remedy} ends it"}
        found.append({**status, "pid": pid, "driver": None, "devices": []})
    return found


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


def _status_of(entry: mounting.MountEntry) -> dict[str, Any]:
    basics = _basics(entry)
    known = {name: basics[name] for name in ("mountpoint", "source", "state", "error")}
    return {**basics, **control_file(entry, "status"), **known}


def _unknown(entry: mounting.MountEntry, failure: OSError) -> dict[str, Any]:
    pids = _mounts.daemons(entry.mountpoint, entry)
    pid = pids[0] if len(pids) == 1 else None
    state, text = _STATES.get(failure.errno or 0, "error"), failure.strerror
    if _mounts.is_private(entry, failure):
        state, text = "private", _mounts.private_text(entry)
        if not pids and os.geteuid() == 0:  # which sees all processes
            state, text = "dead", f"{text}: its daemon has died"
    elif (paused := _mounts.pause_text(entry)) is not None:
        return {**_basics(entry, state, paused), "pid": pid}
    elif state == "dead":
        text = "its daemon has died"
    if state in _REMEDIES:
        text = f"{text}: {_REMEDIES[state].format(entry.mountpoint)}"
    return {**_basics(entry, state, text), "pid": pid}


def remains(path: str, timeout: float) -> str | None:
    """Return why a mount is not at a path any more, and the remedy. None if there was none in the last hour."""
    from gpufs import statistics  # mounts that are there do without

    mountpoint = os.path.realpath(path)
    for status in detached():
        if status["mountpoint"] == mountpoint:
            return f"detached, {status['error']}"
    questions = [functools.partial(statistics.read_left_behind, mountpoint, os.getuid())]
    (left,) = _answers.ask(questions, str, timeout)
    if isinstance(left, OSError):
        return None
    died = clock_text(left["dead_since"])
    return f"its daemon died at {died}, and its files with it: gpufs mount {path} makes a new one"


def silent_statuses(reported: Sequence[dict[str, Any]], *, named: bool) -> list[tuple[str, object]]:
    """Return the mounts that did not answer, and why; other users' private ones only if they are named."""
    fine = ("ok",) if named else ("ok", "private")
    return [(status["mountpoint"], status["error"]) for status in reported if status["state"] not in fine]


def memory_cells(device: dict[str, Any]) -> list[str]:
    """Return cells of a table: size, used and free memory of a device."""
    return [bytes_text(device[f"{name}_bytes"]) for name in ("total", "held", "free")]


def cell(value: object) -> str:
    return "-" if value is None or value == "" else str(value)


def deaths_text(status: dict[str, Any]) -> str:
    """Return how many daemons of a mount have died and of what the last one did; "" if none has."""
    if not (deaths := status.get("deaths", {})).get("count"):
        return ""
    last = f"the last at {clock_text(deaths['last'])}: {deaths['cause'] or 'unknown reason'}"
    return f"{deaths['count']} of its daemons, {last}"


# ---- leases ----


def leases_of(entries: Sequence[mounting.MountEntry], timeout: float) -> list[list[dict[str, Any]] | OSError]:
    """Return the leases of each mount, at most ``timeout`` seconds later; OSError for one that does not answer."""
    questions = [functools.partial(_leases_of, entry) for entry in entries]
    return _answers.ask(
        questions,
        lambda leases: [(lease_row(lease), by_program([lease]), {lease["inode"]: lease}) for lease in leases],
        timeout,
    )


def _leases_of(entry: mounting.MountEntry) -> list[dict[str, Any]]:
    now = time.time()
    leases = control_file(entry, "leases")["leases"]
    return [
        {"mountpoint": entry.mountpoint, **lease, "age_seconds": max(0.0, now - lease["since"])} for lease in leases
    ]


def program_text(holder: dict[str, Any]) -> str:
    """Return the program of a lease or a copy, for people: "python3 (1234)"."""
    return f"{holder['program'] or 'a program'} ({holder['pid']})"


def mode_text(lease: dict[str, Any]) -> str:
    """Return the mode, and whether the program has a copy of its own, or sleeps."""
    return f"{lease['mode']}{' copy' if lease['private'] else ''}{' asleep' if lease.get('asleep') else ''}"


def path_text(lease: dict[str, Any]) -> str:
    """Return the path of a lease's file, for people: "/mnt/gpu0/file (removed)"."""
    state = lease.get("state", "present")
    return f"{lease['path']}{'' if state == 'present' else f' ({state})'}"


def by_program(leases: Sequence[dict[str, Any]]) -> list[str]:
    """Describe what each program has: "python3 (1234), 1.5 GiB of /mnt/gpu0/file" or "..., 2 GiB of 400 files".

    Of many programs those with most memory, and then how many there are besides.
    """
    programs: dict[str, list[dict[str, Any]]] = {}
    for lease in leases:
        programs.setdefault(program_text(lease), []).append(lease)

    def held(having: list[dict[str, Any]]) -> int:
        return sum({lease["inode"]: lease["bytes"] for lease in having}.values())

    largest = sorted(programs.items(), key=lambda item: held(item[1]), reverse=True)
    texts = []
    for name, having in largest[:MOST_NAMES]:
        paths = {lease["path"] for lease in having}
        what = paths.pop() if len(paths) == 1 else f"{len(paths)} files"
        texts.append(f"{name}, {bytes_text(held(having))} of {what}")
    if rest := largest[MOST_NAMES:]:
        texts.append(f"{len(rest)} more programs, {bytes_text(sum(held(having) for _, having in rest))}")
    return texts


def lease_row(lease: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells of a table: path, process, user, program, mode, size, age."""
    return (
        path_text(lease),
        str(lease["pid"]),
        user_name(lease["uid"]),
        lease["program"] or "-",
        mode_text(lease),
        bytes_text(lease["bytes"]),
        age_text(lease["age_seconds"]),
    )


# ---- limits ----


def quotas_of(status: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the limits of one mount that this user may see, and what is used.

    For each: mountpoint, path (of the device or directory), uid and user (None for a directory), used_bytes,
    limit_bytes (None without a limit).
    """
    root = status["mountpoint"].rstrip("/")
    return [
        {
            "mountpoint": status["mountpoint"],
            "path": f"{root}/{quota['path']}",
            "uid": quota["uid"],
            "user": None if quota["uid"] is None else user_name(quota["uid"]),
            "used_bytes": quota["used_bytes"],
            "limit_bytes": quota["limit_bytes"],
        }
        for quota in status.get("quotas", [])
    ]


def quota_lines(quotas: Sequence[dict[str, Any]]) -> list[str]:
    rows = []
    for quota in quotas:
        used, limit = quota["used_bytes"], quota["limit_bytes"]
        share = f"{100 * used / limit:.0f}%" if limit else "-"
        user = "all" if quota["user"] is None else quota["user"]
        rows.append((quota["path"], user, bytes_text(used), bytes_text(limit), share))
    return table_lines(("PATH", "USER", "USED", "LIMIT", "USE%"), rows, right=frozenset({2, 3, 4}))


def limit_lines(statuses: Sequence[dict[str, Any]]) -> list[str]:
    """Return an empty line and the table of those that have a limit; nothing if none has one."""
    limited = [quota for status in statuses for quota in quotas_of(status) if quota["limit_bytes"] is not None]
    return ["", *quota_lines(limited)] if limited else []


# ---- counters ----


def counters(mountpoints: Sequence[str], show: _answers.Show, timeout: float) -> list[dict[str, Any]]:
    """Return the counters of the mounts at these paths, or of all, at most ``timeout`` seconds later.

    ``show`` makes what the command prints of one. Without paths, private mounts of other users are left out. Those that
    cannot be read have "error" and no devices. Other processes read them: a mount, or a folder of counters that another
    user has made, may not answer. Failure if nothing is mounted at a path, and nothing was left there by a mount whose
    process died.
    """
    if not mountpoints:
        return _counters_of_mounts(_mounts.chosen(), show, timeout, private=False)
    return [counted for path in mountpoints for counted in _counters_at(path, show, timeout)]


def _counters_at(path: str, show: _answers.Show, timeout: float) -> list[dict[str, Any]]:
    try:
        entry = _mounts.find(path)
    except Failure:
        from gpufs import statistics

        (left,) = _answers.ask(
            [functools.partial(statistics.read_left_behind, os.path.realpath(path), os.getuid())], show, timeout
        )
        if isinstance(left, OSError):
            raise
        return [left]
    return _counters_of_mounts([entry], show, timeout)


def _counters_of_mounts(
    entries: Sequence[mounting.MountEntry], show: _answers.Show, timeout: float, *, private: bool = True
) -> list[dict[str, Any]]:
    """Return the counters of mounts, without those that other users keep to themselves unless ``private``."""
    answers = _answers.ask([functools.partial(counters_of, entry) for entry in entries], show, timeout)
    return [
        _answered(entry, answer)
        for entry, answer in zip(entries, answers, strict=True)
        if private or not (isinstance(answer, OSError) and _mounts.is_private(entry, answer))
    ]


def counters_of(entry: mounting.MountEntry) -> dict[str, Any]:
    """Return the counters: from their file if that can be read, otherwise from the mount, which may hang. OSError."""
    from gpufs import statistics  # other questions do without

    try:
        counted = statistics.read_mount(entry.device, entry.uid, entry.mountpoint)
    except FileNotFoundError:
        counted = control_file(entry, "stats")
        if counted.get("format") != statistics.VERSION:
            raise ValueError("it has another format: another version of gpufs serves the mount") from None
        counted.pop("error", None)
    return {**counted, "mountpoint": entry.mountpoint}


def _answered(entry: mounting.MountEntry, answer: Any) -> dict[str, Any]:
    if not isinstance(answer, OSError):
        counted: dict[str, Any] = answer
        return counted
    owner = "" if _mounts.is_trusted(entry) else f" (it is user {entry.uid}'s)"
    problem = f"its statistics cannot be read: {answer.strerror}{owner}"
    return {"mountpoint": entry.mountpoint, "error": problem, "devices": [], "alive": None, "pid": None}
