"""A mount's counters as Prometheus reads them: its text format, version 0.0.4."""

from collections.abc import Sequence
from typing import Final

from gpufs.statistics import Statistics

_SECOND: Final = 1e9  # nanoseconds
_SIZE_BOUNDS: Final = tuple(1 << power for power in range(9, 37))  # 512 bytes to 64 GiB
_TIME_BOUNDS: Final = tuple(1 << power for power in range(9, 38))  # 512 ns to 137 s


def _label(text: str) -> str:
    text = text.encode(errors="backslashreplace").decode()  # names of files are bytes, the format is UTF-8
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class _Page:
    """Lines in Prometheus' text format, version 0.0.4. Every sample names the mount: a machine may have several."""

    def __init__(self, mountpoint: str) -> None:
        self.lines: list[str] = []
        self._mountpoint = mountpoint

    def family(self, name: str, kind: str, text: str) -> None:
        self.lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]

    def sample(self, name: str, value: float, **labels: str) -> None:
        named = {"mountpoint": self._mountpoint, **labels}
        shown = ",".join(f'{key}="{_label(text)}"' for key, text in named.items())
        number = repr(value) if isinstance(value, float) else str(value)
        self.lines.append(f"{name}{{{shown}}} {number}")

    def histogram(
        self,
        name: str,
        buckets: Sequence[tuple[int | None, int]],
        bounds: Sequence[int],
        total: float,
        scale: float,
        **labels: str,
    ) -> None:
        below = 0
        place = 0
        ordered = [(bound, number) for bound, number in buckets if bound is not None]
        for bound in bounds:
            while place < len(ordered) and ordered[place][0] <= bound:
                below += ordered[place][1]
                place += 1
            shown = repr(bound / scale) if scale != 1 else str(bound)
            self.sample(f"{name}_bucket", below, **labels, le=shown)
        number = sum(number for _, number in buckets)
        self.sample(f"{name}_bucket", number, **labels, le="+Inf")
        self.sample(f"{name}_sum", total, **labels)
        self.sample(f"{name}_count", number, **labels)


_COUNTERS: Final = (
    ("gpufs_bytes_total", "bytes", "Bytes moved into (in) or out of (out) device memory."),
    ("gpufs_errors_total", "errors", "Operations that failed."),
)
_DETAIL_TEXTS: Final = {
    "failed": "Transfers that failed.",
    "cancelled": "Transfers that were cancelled.",
    "abandoned": "Cancelled transfers whose threads hung in their files.",
    "buffered_bytes": "Bytes of the fallback path that went through the page cache.",
    "direct_bytes": "Bytes of the fallback path that were read or written by O_DIRECT.",
    "hole_bytes": "Bytes of holes, which were not read.",
}
_ENGINE_TEXTS: Final = {
    "transfers_active": "Transfers under way.",
    "bounce_slot_bytes": "Bytes of one pinned slot.",
    "bounce_capacity_bytes": "Bytes that pinned slots may take.",
    "bounce_pinned_bytes": "Bytes that pinned slots take.",
    "bounce_used_bytes": "Bytes of pinned slots in use.",
    "bounce_waits": "Times that somebody had to wait for a pinned slot.",
    "bounce_pin_failures": "Times that memory for a slot could not be pinned.",
    "request_pinned_bytes": "Pinned bytes of the memory for the kernel's requests.",
    "locked_bytes": "Bytes of locked host memory.",
    "locked_ranges": "Locked ranges of host memory.",
}
_GROWING: Final = frozenset({"bounce_waits", "bounce_pin_failures"})
_DEVICE_TEXTS: Final = {
    "total_bytes": "Bytes of memory of the device that the mount may use.",
    "held_bytes": "Bytes of device memory that files hold.",
    "health_error": "0, or the errno of the failure that put the device out of service.",
    "events_existing": "Events that have been created.",
    "events_idle": "Events that wait to be used.",
    "streams_existing": "Streams that have been created.",
    "streams_idle": "Streams that wait to be used.",
}


def page(found: Statistics) -> str:
    """The counters in Prometheus' text format. What a backend of a device has never done is left out."""
    page = _Page(str(found.facts.get("mountpoint") or ""))
    page.family("gpufs_build_info", "gauge", "1; the labels say what runs.")
    facts = {key: str(found.facts.get(key) or "") for key in ("version", "driver")}
    page.sample("gpufs_build_info", 1, **facts)
    page.family("gpufs_start_time_seconds", "gauge", "When the mount's process began, in seconds since 1970.")
    page.sample("gpufs_start_time_seconds", found.created)
    for name, text in _ENGINE_TEXTS.items():
        metric = f"gpufs_{name}_total" if name in _GROWING else f"gpufs_{name}"
        page.family(metric, "counter" if name in _GROWING else "gauge", text)
        page.sample(metric, found.gauges[name])
    for name, text in _DEVICE_TEXTS.items():
        page.family(f"gpufs_device_{name}", "gauge", text)
        for device in found.devices:
            page.sample(f"gpufs_device_{name}", device.gauges[name], device=device.name)
    used = [
        ({"device": device.name, "backend": backend, "direction": flow}, counts)
        for device in found.devices
        for backend, flows in device.counts.items()
        for flow, counts in flows.items()
        if counts.started or counts.refusals
    ]
    for metric, member, text in _COUNTERS:
        page.family(metric, "counter", text)
        for labels, counts in used:
            page.sample(metric, getattr(counts, member), **labels)
    page.family("gpufs_in_flight", "gauge", "Operations that have begun and not ended.")
    for labels, counts in used:
        page.sample("gpufs_in_flight", counts.in_flight, **labels)
    page.family("gpufs_refusals_total", "counter", "Requests that a backend did not take, by reason.")
    for labels, counts in used:
        for reason, number in counts.refusals.items():
            page.sample("gpufs_refusals_total", number, **labels, reason=reason)
    page.family("gpufs_operation_size_bytes", "histogram", "Bytes that an operation moved.")
    for labels, counts in used:
        page.histogram("gpufs_operation_size_bytes", counts.sizes, _SIZE_BOUNDS, counts.bytes, 1, **labels)
    page.family("gpufs_operation_duration_seconds", "histogram", "How long an operation took.")
    for labels, counts in used:
        seconds = counts.nanoseconds / _SECOND
        page.histogram("gpufs_operation_duration_seconds", counts.times, _TIME_BOUNDS, seconds, _SECOND, **labels)
    for name, text in _DETAIL_TEXTS.items():
        page.family(f"gpufs_transfer_{name}_total", "counter", text)
        for device in found.devices:
            for flow, details in device.details.items():
                page.sample(f"gpufs_transfer_{name}_total", details[name], device=device.name, direction=flow)
    return "\n".join(page.lines) + "\n"
