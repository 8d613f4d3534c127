"""The leases of mounts, as the mounts report them."""

import functools
import time
from collections.abc import Sequence
from typing import Any

from gpufs import mounting
from gpufs.cli import _answers
from gpufs.cli._output import MOST_NAMES, age_text, bytes_text, user_name


def collect(entries: Sequence[mounting.MountEntry], timeout: float) -> list[list[dict[str, Any]] | OSError]:
    """The leases of each mount, at most ``timeout`` seconds later; OSError for one that does not answer."""
    questions = [functools.partial(_question, entry) for entry in entries]
    return _answers.ask(
        questions, lambda leases: [(row(one), by_program([one]), {one["inode"]: one}) for one in leases], timeout
    )


def _question(entry: mounting.MountEntry) -> list[dict[str, Any]]:
    now = time.time()
    leases = _answers.control_file(entry, "leases")["leases"]
    return [
        {"mountpoint": entry.mountpoint, **lease, "age_seconds": max(0.0, now - lease["since"])} for lease in leases
    ]


def program(one: dict[str, Any]) -> str:
    """The program of a lease or a copy, for people: "python3 (1234)"."""
    return f"{one['program'] or 'a program'} ({one['pid']})"


def mode(lease: dict[str, Any]) -> str:
    """The mode, and whether the program has a copy of its own."""
    return f"{lease['mode']}{' copy' if lease['private'] else ''}"


def shown_path(lease: dict[str, Any]) -> str:
    """The path of a lease's file, for people: "/mnt/gpu0/file (removed)"."""
    state = lease.get("state", "present")
    return f"{lease['path']}{'' if state == 'present' else f' ({state})'}"


def by_program(leases: Sequence[dict[str, Any]]) -> list[str]:
    """What each program has, for people: "python3 (1234), 1.5 GiB of /mnt/gpu0/file" or "..., 2 GiB of 400 files".

    Of many programs those with most memory, and then how many there are besides.
    """
    programs: dict[str, list[dict[str, Any]]] = {}
    for lease in leases:
        programs.setdefault(program(lease), []).append(lease)

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


def row(lease: dict[str, Any]) -> tuple[str, ...]:
    """The cells of a table: path, process, user, program, mode, size, age."""
    return (
        shown_path(lease),
        str(lease["pid"]),
        user_name(lease["uid"]),
        lease["program"] or "-",
        mode(lease),
        bytes_text(lease["bytes"]),
        age_text(lease["age_seconds"]),
    )
