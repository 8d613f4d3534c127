"""What this machine, or the container that we run in, has to offer.

Reads /proc and /sys alone; nothing here is cached, opened or started.
"""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory in bytes that this process may use at most, and that is available now; cgroup limits count."""

    total_bytes: int
    available_bytes: int


def _number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return int(text) if text.isdigit() else None  # "max" is no limit


def _statistic(path: Path, key: str) -> int:
    try:
        for line in path.read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(" ")
            if name == key and value.isdigit():
                return int(value)
    except (OSError, UnicodeDecodeError):
        pass
    return 0


def _cgroup_limits(root: Path) -> list[tuple[int, int]]:
    """(limit, bytes that could still be used) of every memory cgroup from our own up to the root."""
    found = []
    try:
        lines = os.fsdecode((root / "proc/self/cgroup").read_bytes()).rstrip("\n").split("\n")
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            base, limit, usage, reclaimable = root / "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            limit, usage, reclaimable = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        folder = base / path.lstrip("/")
        while True:
            bound = _number(folder / limit)
            if bound is not None:
                used = (_number(folder / usage) or 0) - _statistic(folder / "memory.stat", reclaimable)
                found.append((bound, max(bound - max(used, 0), 0)))
            if folder == base or base not in folder.parents:
                break
            folder = folder.parent
    return found


def memory(root: Path = Path("/")) -> Memory:
    """This machine's memory. ``root`` is where /proc and /sys are found. OSError when /proc/meminfo is unreadable."""
    fields = {}
    for line in (root / "proc/meminfo").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if words and words[0].isdigit():
            fields[name] = int(words[0]) * 1024
    total = fields["MemTotal"]
    available = fields.get("MemAvailable", fields.get("MemFree", total))
    for limit, left in _cgroup_limits(root):
        total = min(total, limit)
        available = min(available, left)
    return Memory(total, available)
