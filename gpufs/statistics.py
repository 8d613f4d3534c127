"""The counters of a mount: where they live, how they are read, and what they look like as JSON and for Prometheus.

A mount keeps its counters in a file of its runtime directory, mapped by the engine, which counts there without a lock.
Anybody who may read the file reads the counters, without asking the mount, and also after its process was killed: the
process holds a lock on the file for as long as it lives. docs/statistics.md has the format. Nothing here needs the
engine.
"""

import fcntl
import json
import os
import re
import stat
import struct
import time
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from errno import EINVAL, ENOENT, EPERM
from pathlib import Path
from typing import Any, Final

MAGIC: Final = b"GPUFSTAT"
VERSION: Final = 2
BACKENDS: Final = ("mount", "fastpath", "fallback", "device_copy", "transfer", "locked", "pageable")
FLOWS: Final = ("in", "out")
_DETAILS: Final = (
    "failed",
    "cancelled",
    "abandoned",
    "buffered_bytes",
    "direct_bytes",
    "hole_bytes",
)
_ENGINE_GAUGES: Final = (
    "transfers_active",
    "bounce_slot_bytes",
    "bounce_capacity_bytes",
    "bounce_pinned_bytes",
    "bounce_used_bytes",
    "bounce_waits",
    "bounce_pin_failures",
    "request_pinned_bytes",
    "locked_bytes",
    "locked_ranges",
)
_DEVICE_GAUGES: Final = (
    "total_bytes",
    "held_bytes",
    "health_error",
    "events_existing",
    "events_idle",
    "streams_existing",
    "streams_idle",
)
_HEADER: Final = struct.Struct("=8sIIQIIIIIIII4QIIIIQQ")
_TEXT: Final = 256
_SCALARS: Final = 8  # words of a block before its arrays
_SECOND: Final = 1e9
_SUFFIX: Final = ".stats"
_ASIDE: Final = "left"
_LONGEST_TEXT: Final = 4096
# Limits for reading a file, which another user may have forged.
_LARGEST: Final = 32 << 20
_MOST_COLUMNS: Final = 1024  # reasons of refusal, buckets of a histogram
_MOST_FILES: Final = 8  # of one mount
_KEPT_SECONDS: Final = 3600.0  # of the last counters of a mount whose process died
_KEPT_FILES: Final = 64


class StatisticsError(ValueError):
    """What was read are no counters that this version understands."""


@dataclass(frozen=True, slots=True)
class Counts:
    """What one backend of a device has done in one direction since the mount began.

    ``sizes`` and ``times``: (upper bound, how many) of each bucket that is not empty, bounds in bytes and nanoseconds;
    the bound of what is beyond all buckets is None.
    """

    started: int = 0
    operations: int = 0  # that have ended
    errors: int = 0
    bytes: int = 0
    nanoseconds: int = 0
    refusals: Mapping[str, int] = field(default_factory=dict)
    sizes: Sequence[tuple[int | None, int]] = ()
    times: Sequence[tuple[int | None, int]] = ()

    @property
    def in_flight(self) -> int:
        """Operations that have begun and not ended."""
        return max(self.started - self.operations, 0)


@dataclass(frozen=True, slots=True)
class DeviceStatistics:
    """One device. ``counts``: by backend and direction; ``details``: of transfers, by direction and name."""

    index: int
    name: str
    description: str
    counts: Mapping[str, Mapping[str, Counts]]
    details: Mapping[str, Mapping[str, int]]
    gauges: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Statistics:
    """All counters of a mount. Times are seconds since 1970; ``updated``: when the gauges were written."""

    pid: int
    created: float
    updated: float
    facts: Mapping[str, Any]
    gauges: Mapping[str, int]
    devices: Sequence[DeviceStatistics]
    alive: bool = True

    def as_dict(self) -> dict[str, Any]:
        """What ``.gpufs/stats`` and ``gpufs stats --json`` show; docs/statistics.md explains each key."""
        return {
            "format": VERSION,
            **{name: self._text(name) for name in ("mountpoint", "version", "driver")},
            "pid": self.pid,
            "alive": self.alive,
            "started": self.created,
            "updated": self.updated,
            "dead_since": None if self.alive else self.updated,
            "gauges": dict(self.gauges),
            "devices": [_device_dict(device) for device in self.devices],
        }

    def _text(self, name: str) -> str | None:
        value = self.facts.get(name)
        return value if isinstance(value, str) else None


def _device_dict(device: DeviceStatistics) -> dict[str, Any]:
    return {
        "index": device.index,
        "name": device.name,
        "description": device.description,
        "gauges": dict(device.gauges),
        "backends": {
            backend: {flow: _counts_dict(counts) for flow, counts in flows.items()}
            for backend, flows in device.counts.items()
        },
        "transfers": {flow: dict(details) for flow, details in device.details.items()},
    }


def _counts_dict(counts: Counts) -> dict[str, Any]:
    return {
        "bytes": counts.bytes,
        "operations": counts.operations,
        "errors": counts.errors,
        "in_flight": counts.in_flight,
        "seconds": counts.nanoseconds / _SECOND,
        "refusals": dict(counts.refusals),
        "sizes": [list(bucket) for bucket in counts.sizes],
        "times": [[None if bound is None else bound / _SECOND, number] for bound, number in counts.times],
    }


# ---- reading ----


def parse(data: bytes, *, alive: bool = True) -> Statistics:
    """The counters in the bytes of a file. StatisticsError for anything else, and for formats of other versions."""
    if len(data) < _HEADER.size or data[: len(MAGIC)] != MAGIC:
        raise StatisticsError("these are no statistics of gpufs")
    (
        _,
        version,
        header_bytes,
        file_bytes,
        devices,
        stripes,
        backends,
        flows,
        block_bytes,
        buckets,
        reasons,
        pid,
        gauges_at,
        device_gauges_at,
        details_at,
        blocks_at,
        gauges_bytes,
        device_gauges_bytes,
        details_bytes,
        text_bytes,
        created,
        updated,
    ) = _HEADER.unpack_from(data)
    if version != VERSION:
        raise StatisticsError(f"the statistics have format {version}, this program reads format {VERSION}")
    words = _SCALARS + reasons + 2 * buckets
    blocks = stripes * devices * backends * flows
    if (
        file_bytes != len(data)
        or header_bytes < _TEXT + text_bytes
        or block_bytes != 8 * words
        or (backends, flows) != (len(BACKENDS), len(FLOWS))
        or min(stripes, buckets) < 1
        or max(reasons, buckets) > _MOST_COLUMNS
        or text_bytes > _LONGEST_TEXT
        or gauges_at + gauges_bytes > len(data)
        or device_gauges_at + devices * device_gauges_bytes > len(data)
        or details_at + devices * flows * details_bytes > len(data)
        or blocks_at + blocks * block_bytes > len(data)
        or gauges_bytes < 8 * len(_ENGINE_GAUGES)
        or device_gauges_bytes < 8 * len(_DEVICE_GAUGES)
        or details_bytes < 8 * len(_DETAILS)
    ):
        raise StatisticsError("the statistics are damaged")
    facts = _facts(data[_TEXT : _TEXT + text_bytes])
    stripe_bytes = devices * backends * flows * block_bytes
    columns = [_words(data, blocks_at + stripe * stripe_bytes, stripe_bytes) for stripe in range(stripes)]
    totals = columns[0] if stripes == 1 else array("Q", [sum(row) & _WRAP for row in zip(*columns, strict=True)])
    names = [str(name) for name in _list(facts, "refusals")]
    names += [f"reason_{bit}" for bit in range(len(names), reasons)]
    found = []
    for index in range(devices):
        counts: dict[str, dict[str, Counts]] = {}
        for place, backend in enumerate(BACKENDS):
            counts[backend] = {}
            for side, flow in enumerate(FLOWS):
                start = ((index * backends + place) * flows + side) * words
                counts[backend][flow] = _counts(totals[start : start + words], reasons, buckets, names)
        details = {
            flow: _named(data, details_at + (index * flows + side) * details_bytes, _DETAILS)
            for side, flow in enumerate(FLOWS)
        }
        described = _list(facts, "devices")
        description = str(described[index]) if index < len(described) else ""
        gauges = _named(data, device_gauges_at + index * device_gauges_bytes, _DEVICE_GAUGES)
        found.append(DeviceStatistics(index, f"gpu{index}", description, counts, details, gauges))
    engine_gauges = _named(data, gauges_at, _ENGINE_GAUGES)
    return Statistics(pid, created / _SECOND, updated / _SECOND, facts, engine_gauges, found, alive)


_WRAP: Final = (1 << 64) - 1


def _facts(text: bytes) -> dict[str, Any]:
    """What the text beside the counters says; nothing where it is damaged."""
    try:
        facts = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _list(facts: Mapping[str, Any], name: str) -> list[Any]:
    value = facts.get(name)
    return value if isinstance(value, list) else []


def _words(data: bytes, offset: int, size: int) -> "array[int]":
    words = array("Q")
    words.frombytes(data[offset : offset + size])
    return words


def _named(data: bytes, offset: int, names: Sequence[str]) -> dict[str, int]:
    return dict(zip(names, _words(data, offset, 8 * len(names)), strict=True))


def _counts(words: "array[int]", reasons: int, buckets: int, names: Sequence[str]) -> Counts:
    refusals = words[_SCALARS : _SCALARS + reasons]
    sizes = words[_SCALARS + reasons : _SCALARS + reasons + buckets]
    times = words[_SCALARS + reasons + buckets :]
    return Counts(
        words[0],
        words[1],
        words[2],
        words[3],
        words[4],
        {names[bit]: number for bit, number in enumerate(refusals) if number},
        _buckets(sizes),
        _buckets(times),
    )


def _buckets(numbers: "array[int]") -> list[tuple[int | None, int]]:
    last = len(numbers) - 1
    return [(None if place == last else 1 << place, number) for place, number in enumerate(numbers) if number]


# ---- the file ----


def file_name(pid: int, device: str) -> str:
    """What the file of the mount with this device number ("0:52") is called that a process serves."""
    return f"{pid}-{device.replace(':', '-')}{_SUFFIX}"


def device_of(name: str) -> str | None:
    """The device number in a file_name(), also of one that was deleted meanwhile; None for other names."""
    found = re.fullmatch(r"\d+-(\d+)-(\d+)" + re.escape(_SUFFIX) + r"(?: \(deleted\))?", name)
    return f"{found[1]}:{found[2]}" if found else None


def folders(uid: int, environ: Mapping[str, str] = os.environ) -> list[Path]:
    """Where the runtime directory of a user's mounts may be."""
    if uid == 0:
        return [Path("/run/gpufs"), Path(f"/tmp/gpufs-{_outer(uid)}")]
    found = [Path(f"/run/user/{uid}/gpufs"), Path(f"/tmp/gpufs-{_outer(uid)}")]
    own = environ.get("XDG_RUNTIME_DIR")
    if own and Path(own) / "gpufs" not in found:
        found.insert(0, Path(own) / "gpufs")
    return found


def _outer(uid: int) -> int:
    """A user's number outside of this user namespace: unique in /tmp, which namespaces share."""
    try:
        with open("/proc/self/uid_map", encoding="ascii") as file:
            for line in file:
                inside, outside, count = map(int, line.split())
                if inside <= uid < inside + count:
                    return outside + uid - inside
    except OSError:
        pass
    return uid


def find(device: str, uid: int, places: Iterable[Path] | None = None) -> list[Path]:
    """The files of the mount with this device number that a user made, the newest first; those are the user's own."""
    found = []
    for folder in folders(uid) if places is None else places:
        for path in _listed(folder):
            if path.name.endswith(f"-{device.replace(':', '-')}{_SUFFIX}"):
                status = _status(path)
                if status is not None and status.st_uid == uid and stat.S_ISREG(status.st_mode):
                    found.append((status.st_mtime_ns, path))
    return [path for _, path in sorted(found, reverse=True)]


def _listed(folder: Path) -> list[Path]:
    try:
        return [folder / name for name in os.listdir(folder)]
    except OSError:
        return []


def _status(path: Path) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except OSError:
        return None


def _is_locked(fd: int) -> bool:
    """Whether a process holds the writer's lock on a file that is open for reading."""
    asked = struct.pack("hhlli", fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
    answer = fcntl.fcntl(fd, _F_OFD_GETLK, asked)
    (kind,) = struct.unpack_from("h", answer)
    return bool(kind != fcntl.F_UNLCK)


_F_OFD_GETLK: Final = 36


def read(path: Path, uid: int | None = None) -> Statistics:
    """The counters in a file. OSError where it cannot be read or is not the user's; StatisticsError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(EINVAL, "no regular file", str(path))
        if uid is not None and status.st_uid != uid:
            raise OSError(EPERM, "the file of another user", str(path))
        if status.st_size > _LARGEST:
            raise StatisticsError(f"{path}: too large for a file of counters")
        alive = _is_locked(fd)
        data = b""
        while part := os.pread(fd, status.st_size - len(data), len(data)):
            data += part
    finally:
        os.close(fd)
    return parse(data, alive=alive)


def read_mount(device: str, uid: int) -> Statistics:
    """The counters of a mount by its device number and the user who made it. OSError ENOENT where there are none."""
    failure: Exception = FileNotFoundError(ENOENT, os.strerror(ENOENT))
    newest: Statistics | None = None
    for folder in folders(uid):  # one after the other: the last is below /tmp, where another user may have made it
        for path in find(device, uid, [folder])[:_MOST_FILES]:
            try:
                found = read(path, uid)
            except (OSError, StatisticsError) as error:
                failure = error
                continue
            if found.alive:
                return found
            newest = newest or found
    if newest is None:
        raise failure
    return newest


def read_left_behind(mountpoint: str, uid: int) -> Statistics | None:
    """The last counters of a user's mount at this path whose process died and that is gone; None where there are none.

    They stay until the user's next mount there, or for an hour.
    """
    newest: tuple[int, Statistics] | None = None
    for folder in folders(uid):
        for path in _listed(folder):
            status = _status(path)
            if not path.name.endswith(_SUFFIX) or status is None:
                continue
            try:
                found = read(path, uid)
            except (OSError, StatisticsError):
                continue
            fits = not found.alive and found.facts.get("mountpoint") == mountpoint
            if fits and (newest is None or status.st_mtime_ns > newest[0]):
                newest = (status.st_mtime_ns, found)
    return None if newest is None else newest[1]


def remove_dead(device: str, uid: int) -> None:
    """Removes the counters that dead processes left of a mount with this device number."""
    for path in find(device, uid):
        _remove_if_dead(path)


def sweep(folder: Path, devices: Iterable[str], mountpoint: str = "") -> None:
    """Removes what dead processes left in a folder.

    Except for the mounts with these device numbers; and the last counters of mounts at other places than
    ``mountpoint`` stay for an hour, so that one who looks why a mount died is not too late because of another one.
    """
    keep = tuple(f"-{device.replace(':', '-')}{_SUFFIX}" for device in devices)
    kept: list[tuple[float, Path]] = []
    for path in _listed(folder):
        if not path.name.endswith(_SUFFIX) or path.name.endswith(keep):
            continue
        died = _died_elsewhere(path, mountpoint)
        if died is not None and time.time() - died < _KEPT_SECONDS:
            kept.append((died, _put_aside(path)))
        else:
            _remove_if_dead(path)
    for _, path in sorted(kept, reverse=True)[_KEPT_FILES:]:
        _remove_if_dead(path)


def _died_elsewhere(path: Path, mountpoint: str) -> float | None:
    """When a dead process last wrote what it tells beside its counters; None unless it served a mount elsewhere."""
    try:
        with open(path, "rb", buffering=0, opener=_open_carefully) as file:
            data = b"" if _is_locked(file.fileno()) else file.read(_TEXT + _LONGEST_TEXT)
    except OSError:
        return None
    if len(data) < _TEXT or not data.startswith(MAGIC):
        return None
    *_, text_bytes, _, updated = _HEADER.unpack_from(data)
    served = _facts(data[_TEXT : _TEXT + text_bytes]).get("mountpoint")
    if served is None:
        return None  # it died before there was a mount, or writes another format
    return None if served == mountpoint else updated / _SECOND


def _put_aside(path: Path) -> Path:
    """Takes the device's number out of the name, which belongs to the next mount that gets it. Returns the new name."""
    aside = path.with_name(f"{path.name.partition('-')[0]}-{_ASIDE}{_SUFFIX}")
    try:
        return path.rename(aside)
    except OSError:
        return path  # somebody else's, or gone


def _open_carefully(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)


def _remove_if_dead(path: Path) -> None:
    try:
        with open(path, "rb", buffering=0, opener=_open_carefully) as file:
            # A file whose first bytes are not there yet is of a process that is just making it.
            if file.read(len(MAGIC)) == MAGIC and not _is_locked(file.fileno()):
                os.unlink(path)
    except OSError:
        pass  # somebody else's, or gone
