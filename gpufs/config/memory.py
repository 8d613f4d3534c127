"""The memory of this machine or container, and what a mount takes of it by default."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gpufs.config.knobs import GRANULE, ConfigError
from gpufs.drivers import HOST
from gpufs.units import bytes_text

# The limits of the default. Each file delays a daemon that takes over by some 3 us. Half of the most is a plain user's
# share, and costs a third of a second.
_LEAST_METADATA: Final = 16 << 20
_MOST_METADATA: Final = 512 << 20
_UNLIMITED: Final = 1 << 62  # or more, in version 1 of cgroups
# The names of versions 2 and 1: the controller in /proc/self/cgroup, where the groups are, their files, and what
# memory.stat calls the bytes that are freed on demand, with those of the groups below.
_VERSIONS: Final = (
    ("", "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("memory", "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory in bytes that this process may use, and that is available now. Includes cgroup limits."""

    total_bytes: int
    available_bytes: int


def numbers(path: Path) -> dict[str, int]:
    """Return the numbers in a file of the kernel by the word before them, "" where a number is alone."""
    try:
        text = path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return {}
    lines = re.findall(r"^(?:(\S+?):?\s+)?(\d+)(?: kB)?$", text, re.MULTILINE)
    return {name: int(value) for name, value in lines}  # "max", unlimited, is left out


def _cgroups(root: Path, controller: str, base: str) -> Iterator[Path]:
    """Yield the folder of our own cgroup, and those of the cgroups above it up to ``base``."""
    try:
        lines = os.fsdecode((root / "proc/self/cgroup").read_bytes()).splitlines()
    except OSError:
        return
    for _, name, path in (line.split(":", 2) for line in lines):
        if controller in name.split(","):
            folder = root / base / path.lstrip("/")
            yield from (folder, *(above for above in folder.parents if above.is_relative_to(root / base)))


def _cgroup_limits(root: Path) -> list[tuple[int, int]]:
    """(limit, bytes that could still be used) of the memory cgroups of both versions, from our own up to the root."""
    limits = []
    for controller, base, bound_file, used_file, reclaimable_name in _VERSIONS:
        for group in _cgroups(root, controller, base):
            bound = numbers(group / bound_file).get("", _UNLIMITED)
            if bound < _UNLIMITED:
                reclaimable = numbers(group / "memory.stat").get(reclaimable_name, 0)
                used = max(numbers(group / used_file).get("", 0) - reclaimable, 0)
                limits.append((bound, max(bound - used, 0)))
    return limits


def is_memory_limited(root: Path = Path("/")) -> bool:
    """Return whether a cgroup, of either version, limits the memory of this process."""
    return bool(_cgroup_limits(root))


def memory_of_machine(root: Path = Path("/")) -> Memory:
    """Return this machine's memory. ``root`` contains /proc and /sys."""
    fields = numbers(root / "proc/meminfo")
    total, available = fields["MemTotal"] * 1024, fields["MemAvailable"] * 1024
    for limit, left in _cgroup_limits(root):
        total = min(total, limit)
        available = min(available, left)
    return Memory(total, available)


def metadata_memory(metadata: int | None) -> int:
    """Return bytes for the metadata of a mount; ``metadata`` is the user's choice, if any."""
    return metadata or min(max(memory_of_machine().total_bytes // 16, _LEAST_METADATA), _MOST_METADATA)


def host_devices(devices: int | Sequence[str]) -> int:
    """Return how many devices the host driver simulates. ConfigError if particular GPUs are asked for."""
    if not isinstance(devices, int):
        raise ConfigError(
            f"devices: {','.join(devices)} names GPUs, but the host driver simulates devices: give their number"
        )
    return devices or 1


def check_host(values: Mapping[str, Any]) -> None:
    """Raise ConfigError if the knobs ask for host memory that there is not, or for GPUs of the host driver."""
    if values["driver"] == HOST:
        host_memory(values["memory"], host_devices(values["devices"]))
    if values["evict"] and not values["host_memory"]:
        raise ConfigError("evict: files are parked in the host's memory: give host_memory, too")
    if (wanted := values["host_memory"]) > (available := memory_of_machine().available_bytes):
        raise ConfigError(
            f"host_memory: {bytes_text(wanted)} would be pinned, and this machine has {bytes_text(available)} available"
        )


def host_memory(memory: int | None, count: int) -> int:
    """Return bytes for each of ``count`` simulated devices; ``memory`` is the user's choice, if any.

    The default is half of the available memory divided by the devices, in whole granules. ConfigError if the sum is
    more than this machine or container has, or if too little is available for the default.
    """
    has = memory_of_machine()
    if memory is None:
        share = has.available_bytes // 2 // count // GRANULE * GRANULE
        if share < GRANULE:
            raise ConfigError(
                f"memory: half of the available {bytes_text(has.available_bytes)} is too little for {count} "
                "devices: give fewer devices"
            )
        return share
    if memory * count > has.total_bytes:
        raise ConfigError(
            f"memory: {count} x {bytes_text(memory)} is more than this machine has: "
            f"{bytes_text(has.total_bytes)}, of which {bytes_text(has.available_bytes)} are available"
        )
    return memory
