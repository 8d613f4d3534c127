"""The counters of a mount for Prometheus."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from gpufs.statistics._format import DETAILS, DEVICE_GAUGES, ENGINE_GAUGES

_SIZE_BOUNDS: Final = tuple(float(1 << power) for power in range(9, 37))  # 512 bytes to 64 GiB
_TIME_BOUNDS: Final = tuple((1 << power) / 1e9 for power in range(9, 38))  # 512 ns to 137 s
_GROWING: Final = frozenset({"bounce_waits", "bounce_pin_failures"})


def metrics(found: dict[str, Any]) -> bytes:
    """Counters, as `parse` returns them, in Prometheus' text format. What a backend has never done is left out."""
    return generate_latest(_Mount(found))


class _Mount(CollectorRegistry):
    """What prometheus_client asks for the families of metrics."""

    def __init__(self, found: dict[str, Any]) -> None:
        super().__init__()
        self._found = found

    def collect(self) -> Iterator[Metric]:
        return _families(self._found)


def _families(found: dict[str, Any]) -> Iterator[Metric]:
    # Names of files are bytes, the format is UTF-8.
    mountpoint = (found["mountpoint"] or "").encode(errors="backslashreplace").decode()
    of_device, of_flow = ["mountpoint", "device"], ["mountpoint", "device", "direction"]
    of_backend = ["mountpoint", "device", "backend", "direction"]

    build = GaugeMetricFamily(
        "gpufs_build_info", "1; the labels say what runs.", labels=["mountpoint", "version", "driver"]
    )
    build.add_metric([mountpoint, found["version"] or "", found["driver"] or ""], 1)
    yield build
    started = GaugeMetricFamily(
        "gpufs_start_time_seconds", "When the mount's process began, in seconds since 1970.", labels=["mountpoint"]
    )
    started.add_metric([mountpoint], found["started"])
    yield started
    for name, text in ENGINE_GAUGES.items():
        kind = CounterMetricFamily if name in _GROWING else GaugeMetricFamily
        gauge = kind(f"gpufs_{name}", text, labels=["mountpoint"])
        gauge.add_metric([mountpoint], found["gauges"][name])
        yield gauge
    for name, text in DEVICE_GAUGES.items():
        gauge = GaugeMetricFamily(f"gpufs_device_{name}", text, labels=of_device)
        for device in found["devices"]:
            gauge.add_metric([mountpoint, device["name"]], device["gauges"][name])
        yield gauge

    moved = CounterMetricFamily(
        "gpufs_bytes", "Bytes moved into (in) or out of (out) device memory.", labels=of_backend
    )
    errors = CounterMetricFamily("gpufs_errors", "Operations that failed.", labels=of_backend)
    running = GaugeMetricFamily("gpufs_in_flight", "Operations that have begun and not ended.", labels=of_backend)
    refusals = CounterMetricFamily(
        "gpufs_refusals", "Requests that a backend did not take, by reason.", labels=[*of_backend, "reason"]
    )
    sizes = HistogramMetricFamily("gpufs_operation_size_bytes", "Bytes that an operation moved.", labels=of_backend)
    times = HistogramMetricFamily("gpufs_operation_duration_seconds", "How long an operation took.", labels=of_backend)
    for device in found["devices"]:
        for backend, flows in device["backends"].items():
            for flow, counts in flows.items():
                if not (counts["operations"] or counts["in_flight"] or counts["refusals"]):
                    continue
                labels = [mountpoint, device["name"], backend, flow]
                moved.add_metric(labels, counts["bytes"])
                errors.add_metric(labels, counts["errors"])
                running.add_metric(labels, counts["in_flight"])
                for reason, number in counts["refusals"].items():
                    refusals.add_metric([*labels, reason], number)
                sizes.add_metric(labels, _cumulative(counts["sizes"], _SIZE_BOUNDS), counts["bytes"])
                times.add_metric(labels, _cumulative(counts["times"], _TIME_BOUNDS), counts["seconds"])
    yield from (moved, errors, running, refusals, sizes, times)

    for name, text in DETAILS.items():
        detail = CounterMetricFamily(f"gpufs_transfer_{name}", text, labels=of_flow)
        for device in found["devices"]:
            for flow, details in device["transfers"].items():
                detail.add_metric([mountpoint, device["name"], flow], details[name])
        yield detail


def _cumulative(buckets: Sequence[Sequence[Any]], bounds: Sequence[float]) -> list[tuple[str, float]]:
    """For each bound, how many values are not above it."""
    shown = [
        (str(limit), sum(number for bound, number in buckets if bound is not None and bound <= limit))
        for limit in bounds
    ]
    return [*shown, ("+Inf", sum(number for _, number in buckets))]
