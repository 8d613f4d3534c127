"""The files below ``.gpufs``: read-only, made when they are opened, with what a mount reports about itself."""

import functools
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from errno import EBUSY
from typing import Any, Final, TypeAlias, TypeVar

import trio

from gpufs import statistics, threads
from gpufs._version import __version__
from gpufs.engine import Device, Engine, EngineError, Mount, Trace, journal_format
from gpufs.fs.requests import Opened
from gpufs.syscalls import trusted
from gpufs.units import bytes_text

# Bytes that one read of a stream returns at most: the kernel may find no memory for a larger message.
_STREAM_READ_BYTES: Final = 64 << 10
# Seconds for which an open waits for the end of another stream of which there can be only one. The kernel may report
# the last close of a descriptor after the next open.
_STREAM_SECONDS: Final = 2.0
_RETRY_SECONDS: Final = 0.02
# A user's next text is made so many times later as making the last one took: reading without a pause takes no more than
# that part of the loop.
_PAUSE: Final = 10
_PRIVATE = ("backing", "log_file")  # knobs with paths of the host: for root and the mount's owner
_BUSIEST = 32  # files that `.gpufs/activity` lists at most
_INDENTED = 100  # leases with which a text has still one line for each value: making that takes six times as long
_NAME_MAX = 64  # characters of a device's name that the counters' file keeps

T = TypeVar("T")
# A text, what makes it on a thread, or a stream.
Content: TypeAlias = bytes | Callable[[], bytes] | Trace


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    """The result, and the seconds of this thread that it took."""
    began = time.thread_time()
    result = work()
    return result, time.thread_time() - began


@dataclass(slots=True)
class _OpenControlFile(Opened):
    content: bytes | Trace

    async def read(self, offset: int, size: int) -> bytes:
        if isinstance(self.content, Trace):
            return self.content.read(min(size, _STREAM_READ_BYTES))
        return self.content[offset : offset + size]

    async def release(self) -> None:
        if isinstance(self.content, Trace):
            self.content.close()


@dataclass(slots=True)
class _ReadingUser:
    """A user that reads a control file. ``began``: when the last text was begun; ``next``: when one may be made."""

    making: trio.Lock = field(default_factory=trio.Lock)
    text: bytes = b""
    began: float = 0.0
    next: float = 0.0


class ControlFile:
    """A file whose content ``produce`` makes for the user that opens it. A trace grows without an end."""

    def __init__(self, produce: Callable[[int], Content]) -> None:
        self._produce = produce
        self._readers: dict[int, _ReadingUser] = {}  # by user

    async def open(self, uid: int) -> Opened:
        """The content for a user. EBUSY if there can be only one at a time and another one stays open."""
        deadline = trio.current_time() + _STREAM_SECONDS
        while True:
            try:
                return _OpenControlFile(await self._content(uid))
            except OSError as failure:
                if failure.errno != EBUSY or trio.current_time() >= deadline:
                    raise
            await trio.sleep(_RETRY_SECONDS)

    async def _content(self, uid: int) -> bytes | Trace:
        if trusted(uid):
            return (await self._make(uid))[0]
        now = trio.current_time()
        self._readers = {
            user: reader for user, reader in self._readers.items() if reader.next > now or reader.making.locked()
        }
        reader = self._readers.setdefault(uid, _ReadingUser())
        async with reader.making:
            if reader.began >= now:  # another call of the same user has made it in the meantime
                return reader.text
            await trio.sleep_until(reader.next)
            began = trio.current_time()
            content, seconds = await self._make(uid)
            reader.next = trio.current_time() + _PAUSE * seconds
            if isinstance(content, bytes):
                reader.text, reader.began = content, began
            return content

    async def _make(self, uid: int) -> tuple[bytes | Trace, float]:
        """The content now, and how many seconds making it took."""
        content, seconds = _timed(lambda: self._produce(uid))
        if isinstance(content, bytes | Trace):
            return content, seconds
        text, more = await threads.run(functools.partial(_timed, content))
        return text, seconds + more


# ---- contents ----


def _json(content: Mapping[str, Any], leases: Sequence[Mapping[str, Any]]) -> bytes:
    indent = 2 if len(leases) <= _INDENTED else None
    return json.dumps(content, indent=indent, default=str).encode() + b"\n"


@dataclass(slots=True)
class StatusReport:
    """The sources of ``.gpufs/status``.

    ``files`` (of a device, by its index), ``transfers``, ``leases`` and ``quotas`` are asked at each reading.
    """

    mountpoint: str
    driver: str
    devices: tuple[Device, ...]
    knobs: Mapping[str, Any]
    files: Callable[[int], int]
    transfers: Callable[[], Mapping[str, Any]]
    leases: Callable[[int], list[dict[str, Any]]]  # and registrations, that a user may see
    quotas: Callable[[int], list[dict[str, Any]]]  # that a user may see
    obstacle: Callable[[], str | None]  # to surviving the daemon
    began: float  # when the mount was made, by this daemon or one before
    deaths: Mapping[str, Any]  # of the daemons before: their count, the time of the last one and its cause

    def as_dict(self, uid: int) -> dict[str, Any]:
        """The status now, for this user. Sizes in bytes, times in seconds since 1970, ``uptime`` in seconds."""
        hidden = () if trusted(uid) else _PRIVATE
        return {
            "version": __version__,
            "mountpoint": self.mountpoint,
            "pid": os.getpid(),
            "uid": os.geteuid(),
            "driver": self.driver,
            "started": self.began,
            "uptime": max(0.0, time.time() - self.began),
            "deaths": self.deaths,
            "survives": (obstacle := self.obstacle()) is None,
            "survival_obstacle": obstacle,
            "journal_format": journal_format(),
            "devices": [self.device(device) for device in self.devices],
            "knobs": {name: value for name, value in self.knobs.items() if name not in hidden},
            "transfers": self.transfers(),
            "leases": self.leases(uid),
            "quotas": self.quotas(uid),
        }

    def as_bytes(self, uid: int) -> bytes:
        """The text of ``.gpufs/status`` for this user: one JSON object."""
        status = self.as_dict(uid)
        return _json(status, status["leases"])

    def device(self, device: Device) -> dict[str, Any]:
        """Return the facts about a device: its memory in bytes, files and health."""
        info = device.info
        entry: dict[str, Any] = {
            "index": device.index,
            "name": info.directory,
            "description": info.name,
            "pci_address": "" if info.host_tier else info.pci_address,  # for tools that look for their GPU
            "uuid": info.uuid or None,
            "total_bytes": info.total_bytes,
            "free_bytes": 0,
            "held_bytes": 0,
            "granule_bytes": info.granule,
            "slot_bytes": info.slot_bytes,
            "files": self.files(device.index),
            "health": "good",
        }
        try:
            memory = device.memory()
        except EngineError as failure:
            entry["health"] = str(failure)
        else:
            entry["total_bytes"] = memory.total_bytes
            entry["free_bytes"] = memory.free_bytes
            entry["held_bytes"] = memory.held_bytes
            if memory.health is not None:
                entry["health"] = str(memory.health)
        return entry


class StatisticsReport:
    """The engine's counters, as ``.gpufs/stats`` and ``.gpufs/metrics`` show them."""

    def __init__(self, opened: Engine, mountpoint: str, deaths: int) -> None:
        """Describe the counters in their file, too, for its readers."""
        self._engine = opened
        facts: dict[str, Any] = {
            "version": __version__,
            "mountpoint": mountpoint,
            "devices": [device.info.name[:_NAME_MAX] for device in opened.devices],
            "directories": [device.info.directory for device in opened.devices],
            "deaths": deaths,
        }
        try:
            opened.statistics_describe(facts)
        except EngineError:
            facts["mountpoint"] = None  # the one part that may be too long
            opened.statistics_describe(facts)

    def read(self) -> dict[str, Any]:
        return statistics.parse(self._engine.statistics_read())

    def as_bytes(self) -> bytes:
        """The text of ``.gpufs/stats``: one JSON object, as docs/statistics.md describes it."""
        return json.dumps(self.read(), indent=2).encode() + b"\n"

    def as_metrics(self) -> Callable[[], bytes]:
        """Return the function that makes the text of ``.gpufs/metrics``, in Prometheus' format, on a thread."""
        counters = self.read()

        def render() -> bytes:
            from gpufs.statistics import prometheus  # takes long, and most mounts never need it

            return prometheus.metrics([counters])

        return render


@dataclass(frozen=True, slots=True)
class ActivityReport:
    """The sources of ``.gpufs/activity``, which shows what happens now. Each reading calls each function."""

    status: StatusReport
    mount: Mount
    copies: Callable[[int], list[dict[str, Any]]]  # in progress, that a user may see

    def as_bytes(self, uid: int) -> bytes:
        """The text for a user: one JSON object. Other users' files, copies and leases are for root and the owner."""
        files = [file for file in self._files() if trusted(uid) or uid == file["uid"]]
        activity = {
            "devices": [self.status.device(device) for device in self.status.devices],
            "files": files,
            "copies": self.copies(uid),
            "leases": self.status.leases(uid),
        }
        return _json(activity, activity["leases"])

    def _files(self) -> Iterator[dict[str, Any]]:
        busiest = self.mount.busiest(_BUSIEST)
        for ino, read, written in busiest:
            try:
                attributes = self.mount.inode_get(ino)
            except EngineError:
                continue  # gone by now
            path = self.mount.path(ino)
            yield {
                "path": None if path is None else os.fsdecode(path),
                "inode": ino,
                "uid": attributes.uid,
                "device": self.mount.engine.devices[attributes.device].info.directory,
                "size": attributes.size,
                "held_bytes": attributes.blocks * 512,
                "bytes_read": read,
                "bytes_written": written,
            }


def readme_text(mountpoint: str, devices: Sequence[Device], shares: Sequence[str]) -> bytes:
    """The text of ``README`` in the mount's root. ``shares``: names of the directories below ``backing``."""
    infos = [device.info for device in devices]
    rows = [(f"{info.directory}/", f"{info.name}, {bytes_text(info.total_bytes)}") for info in infos]
    rows += [(f"backing/{name}/", "files of the host") for name in shares]
    width = max(len(name) for name, _ in rows)
    lines = [f"  {name:{width}}  {text}" for name, text in rows]
    return "\n".join(
        (
            "gpufs: memory as files. No file can be created here. These directories take files:",
            "",
            *lines,
            "",
            f"    gpufs cp model.safetensors {mountpoint.rstrip('/')}/gpu0/",
            "",
            "copies a file, or says how much memory is missing. cp works too. `gpufs status` and `df` show this mount.",
            "",
        )
    ).encode(errors="surrogateescape")


def leases_text(leases: Sequence[Mapping[str, Any]]) -> bytes:
    """The text of ``.gpufs/leases``: one JSON object with a list of the leases."""
    return _json({"leases": leases}, leases)


def version_text() -> bytes:
    """The text of ``.gpufs/version``."""
    return __version__.encode() + b"\n"
