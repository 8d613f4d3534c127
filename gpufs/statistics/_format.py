"""The format of a file of counters (docs/internals/statistics-file.md), which another user may have forged."""

import json
import struct
from array import array
from collections import namedtuple
from collections.abc import Collection, Sequence
from typing import Any, Final

VERSION: Final = 3
MAGIC: Final = b"GPUFSTAT"
BACKENDS: Final = ("mount", "fastpath", "fallback", "device_copy", "transfer", "locked", "pageable")
FLOWS: Final = ("in", "out")
# The arrays of numbers in their order in the file, and what each number means.
DETAILS: Final = {
    "failed": "Transfers that failed.",
    "cancelled": "Transfers that were cancelled.",
    "abandoned": "Cancelled transfers whose threads hung in their files.",
    "buffered_bytes": "Bytes of the fallback path that went through the page cache.",
    "direct_bytes": "Bytes of the fallback path that were read or written by O_DIRECT.",
    "hole_bytes": "Bytes of holes, which were not read.",
}
ENGINE_GAUGES: Final = {
    "transfers_active": "Transfers in progress.",
    "bounce_slot_bytes": "Bytes of one pinned slot.",
    "bounce_capacity_bytes": "Bytes that pinned slots may take.",
    "bounce_pinned_bytes": "Bytes that pinned slots take.",
    "bounce_used_bytes": "Bytes of pinned slots in use.",
    "request_pinned_bytes": "Pinned bytes of the memory for the kernel's requests.",
    "locked_bytes": "Bytes of locked host memory.",
    "locked_ranges": "Locked ranges of host memory.",
    "inodes": "Files, directories and other inodes in the mount's table.",
    "open_files": "Open files in device memory, each opening counted.",
    "removed_files": "Removed files whose memory is still being freed.",
    "metadata_bytes": "Bytes of memory for names and attributes.",
    "metadata_limit_bytes": "Bytes that names and attributes may take.",
    "backing_open_files": "Open files below backing/, each opening counted.",
    "requests_running": "Requests that worker threads serve.",
    "requests_queued": "Requests that wait for a worker thread.",
    "requests_relayed": "Requests that the control plane has not answered.",
}
ENGINE_COUNTERS: Final = {
    "bounce_waits": "Times that a thread waited for a pinned slot.",
    "bounce_pin_failures": "Times that memory for a slot could not be pinned.",
    "read_ahead_bytes": "Bytes that were read ahead for mappings.",
    "backing_read_bytes": "Bytes of READs of files below backing/.",
    "backing_written_bytes": "Bytes of WRITEs to files below backing/.",
    "backing_copied_bytes": "Bytes that copy_file_range(2) moved from or to files below backing/.",
    "interrupts": "Interrupts of requests.",
    "interrupts_cancelled": "Interrupts that ended or shortened a request that native code served.",
    "interrupts_early": "Interrupts that came before their request or after its end, or that it does not obey.",
    "memory_waits": "Requests that waited for the memory of removed files.",
    "reader_spins": "Times that a thread polled for requests before it slept.",
    "replies_lost": "Replies to requests that the kernel had ended.",
    "replies_rejected": "Replies that the kernel refused. EIO replaced them.",
    "replies_missing": "Requests that nothing replied to. They were answered with EIO.",
    "bad_requests": "Malformed requests of the kernel.",
    "relay_overflows": "Requests that had to wait because the control plane was busy.",
    "relay_bad_replies": "Malformed replies of the control plane.",
}
DEVICE_GAUGES: Final = {
    "total_bytes": "Bytes of memory of the device that the mount may use.",
    "held_bytes": "Bytes of device memory that files hold.",
    "health_error": "0, or the errno of the failure that put the device out of service.",
    "events_existing": "Events that have been created.",
    "events_idle": "Events that are not in use.",
    "streams_existing": "Streams that have been created.",
    "streams_idle": "Streams that are not in use.",
}
_HEADER: Final = struct.Struct("=8sIIQ10I7Q")
_Header = namedtuple(
    "_Header",
    "magic version header_bytes file_bytes devices stripes backends flows buckets reasons pid device_gauges_bytes "
    "details_bytes text_bytes gauges_at counters_at device_gauges_at details_at blocks_at created updated",
)
_TEXT: Final = 256  # offset of the text
_LONGEST_TEXT: Final = 4096
_SCALARS: Final = 8  # words of a block before its arrays
_MOST_COLUMNS: Final = 1024  # reasons of refusal, buckets of a histogram
_SECOND: Final = 1e9
_WRAP: Final = (1 << 64) - 1


class StatisticsError(ValueError):
    """The bytes are not counters, or of a version that this one does not understand."""


def parse(data: bytes, *, alive: bool = True) -> dict[str, Any]:
    """Interpret the bytes of a file of counters.

    Parameters
    ----------
    data
        The whole file.
    alive
        Whether the process that counts is alive.

    Returns
    -------
    dict
        The counters, as docs/statistics.md describes them.

    Raises
    ------
    StatisticsError
        The data is something else, damaged, or has the format of another version.
    """
    if len(data) < _HEADER.size or not data.startswith(MAGIC):
        raise StatisticsError("these are not statistics of gpufs")
    header = _Header(*_HEADER.unpack_from(data))
    if header.version != VERSION:
        raise StatisticsError(f"the statistics have format {header.version}, this program reads format {VERSION}")
    blocks = header.stripes * header.devices * header.backends * header.flows
    if (
        header.file_bytes != len(data)
        or header.header_bytes < _TEXT + header.text_bytes
        or (header.backends, header.flows) != (len(BACKENDS), len(FLOWS))
        or min(header.stripes, header.buckets) < 1
        or max(header.reasons, header.buckets) > _MOST_COLUMNS
        or header.text_bytes > _LONGEST_TEXT
        or header.gauges_at + 8 * len(ENGINE_GAUGES) > len(data)
        or header.counters_at + 8 * len(ENGINE_COUNTERS) > len(data)
        or header.device_gauges_at + header.devices * header.device_gauges_bytes > len(data)
        or header.details_at + header.devices * header.flows * header.details_bytes > len(data)
        or header.blocks_at + blocks * _block_bytes(header) > len(data)
        or header.device_gauges_bytes < 8 * len(DEVICE_GAUGES)
        or header.details_bytes < 8 * len(DETAILS)
    ):
        raise StatisticsError("the statistics are damaged")
    facts = _facts(data[_TEXT : _TEXT + header.text_bytes])
    updated = header.updated / _SECOND
    return {
        "format": VERSION,
        **{name: _text(facts.get(name)) for name in ("mountpoint", "version", "driver")},
        "pid": header.pid,
        "alive": alive,
        "started": header.created / _SECOND,
        "updated": updated,
        "dead_since": None if alive else updated,
        "deaths": deaths if isinstance(deaths := facts.get("deaths"), int) else 0,
        "gauges": _named(data, header.gauges_at, ENGINE_GAUGES),
        "counters": _named(data, header.counters_at, ENGINE_COUNTERS),
        "devices": _devices(data, header, facts),
    }


def _block_bytes(header: _Header) -> int:
    """Return the bytes of the counters of one stripe, device, backend and direction."""
    return int(8 * (_SCALARS + header.reasons + 2 * header.buckets))


def _devices(data: bytes, header: _Header, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what each device has counted, added up over the stripes."""
    words = _block_bytes(header) // 8
    stripe_bytes = header.devices * header.backends * header.flows * _block_bytes(header)
    columns = [_words(data, header.blocks_at + stripe * stripe_bytes, stripe_bytes) for stripe in range(header.stripes)]
    totals = [sum(row) & _WRAP for row in zip(*columns, strict=True)]
    blocks = iter([totals[start : start + words] for start in range(0, len(totals), words)])
    names = [str(name) for name in _list(facts.get("refusals"))]
    names += [f"reason_{bit}" for bit in range(len(names), header.reasons)]
    names_of = [str(name) for name in _list(facts.get("directories"))]
    descriptions = [str(description) for description in _list(facts.get("devices"))]
    return [
        {
            "index": index,
            "name": names_of[index] if index < len(names_of) else f"gpu{index}",
            "description": descriptions[index] if index < len(descriptions) else "",
            "gauges": _named(data, header.device_gauges_at + index * header.device_gauges_bytes, DEVICE_GAUGES),
            "backends": {
                backend: {flow: _counts(next(blocks), header.reasons, header.buckets, names) for flow in FLOWS}
                for backend in BACKENDS
            },
            "transfers": {
                flow: _named(data, header.details_at + (index * header.flows + side) * header.details_bytes, DETAILS)
                for side, flow in enumerate(FLOWS)
            },
        }
        for index in range(header.devices)
    ]


def _counts(block: Sequence[int], reasons: int, buckets: int, names: Sequence[str]) -> dict[str, Any]:
    begun, operations, errors, moved, nanoseconds = block[:5]
    refusals = block[_SCALARS : _SCALARS + reasons]
    sizes = block[_SCALARS + reasons : _SCALARS + reasons + buckets]
    times = block[_SCALARS + reasons + buckets :]
    return {
        "bytes": moved,
        "operations": operations,
        "errors": errors,
        "in_flight": max(begun - operations, 0),
        "seconds": nanoseconds / _SECOND,
        "refusals": {names[bit]: number for bit, number in enumerate(refusals) if number},
        "sizes": _histogram(sizes, 1),
        "times": _histogram(times, _SECOND),
    }


def _histogram(numbers: Sequence[int], scale: float) -> list[list[float | None]]:
    """Return the upper bound and the number of each bucket that is not empty; null bounds what is beyond all others."""
    bounds = [(1 << place) if scale == 1 else (1 << place) / scale for place in range(len(numbers) - 1)]
    return [[bound, number] for bound, number in zip([*bounds, None], numbers, strict=True) if number]


def _facts(text: bytes) -> dict[str, Any]:
    """Return what the text beside the counters says; nothing where it is damaged."""
    try:
        facts = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _words(data: bytes, offset: int, size: int) -> "array[int]":
    words = array("Q")
    words.frombytes(data[offset : offset + size])
    return words


def _named(data: bytes, offset: int, names: Collection[str]) -> dict[str, int]:
    return dict(zip(names, _words(data, offset, 8 * len(names)), strict=True))
